"""Stands for an engine: registers layouts with an LMCache server, until standard input ends.

    python register.py URL '{"model": {"dtype": "float32", "query": false}, ...}'

Prints "ready" once the server has them. LAYERS, HEADS and HEAD_DIM are those of every layout.
"""

from __future__ import annotations

import json
import sys

LAYERS, HEADS, HEAD_DIM, BLOCK = 3, 2, 8, 16
QUERY_HEADS = 4


def main() -> None:
    import torch
    import zmq
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector.utils import LayoutHints
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    url, models = sys.argv[1], json.loads(sys.argv[2])
    client = RequestClientFactory.create(url, context=zmq.Context())
    chunk_size = client.get_chunk_size().result(30)
    contexts = []
    for number, (name, model) in enumerate(models.items()):
        dtype = getattr(torch, model["dtype"])
        if model["query"]:
            heads, shape = 1, (4, BLOCK, QUERY_HEADS * HEAD_DIM)
        else:
            heads, shape = HEADS, (4, 2, HEADS, BLOCK, HEAD_DIM)
        layers = {f"layer.{i}": torch.zeros(shape, dtype=dtype) for i in range(LAYERS)}
        context = create_transfer_context(
            layers, instance_id=1000 + number, req_client=client, mode="lmcache_driven"
        )
        hints = LayoutHints(
            kv_layout="HND", num_kv_heads=heads, tokens_per_block=BLOCK, head_dim=shape[-1]
        )
        context.register(
            layers,
            name,
            1,
            chunk_size // BLOCK,
            30.0,
            layout_hints=hints,
            engine_type=EngineType.VLLM,
        )
        contexts.append((context, layers))
    print("ready", flush=True)
    sys.stdin.read()
    for context, _ in contexts:
        done = context.unregister()
        if done is not None:
            done.result(10)
        context.close()
    client.close()


if __name__ == "__main__":
    main()
