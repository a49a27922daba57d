"""Ready edits on a long prompt's KV, against one gather and one rotation written by hand.

KV [2, 36, 14080, 1024] float16, about 2 GB, of which half is kept and turned to new positions.
Each edit runs in a process of its own, alternating with the one by hand; memory is what the process
took at its peak beyond the tensor, result included. Exits 1 when a median misses its mark.

    python benchmarks/edits.py [--layers 36] [--tokens 14080] [--pairs 3] [--time 2] [--memory 0.8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

from lmcache_mp.edits import Rope, keydiff, knorm, lagkv, quantize, sink_recent

WIDTH, HEAD_DIM = 1024, 128
ROPE = Rope(HEAD_DIM, 1e6)
EDITS: dict[str, Any] = {
    "sink_recent": sink_recent(0.5, rope=ROPE),
    "knorm": knorm(0.5, rope=ROPE),
    "keydiff": keydiff(0.5, rope=ROPE),
    "lagkv": lagkv(0.5, rope=ROPE),
    "quantize": quantize(),
}
MARKED = ("sink_recent", "knorm")


def by_hand(kv: Any, tokens: list[int]) -> Any:
    """Half of the tokens at random, layer by layer, and the rotation of each layer's keys."""
    keep = np.sort(np.random.default_rng(0).permutation(len(tokens))[: len(tokens) // 2])
    angles = (np.arange(len(keep)) - keep)[:, None] * ROPE.inv_freq
    cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    out = np.empty((2, kv.shape[1], len(keep), WIDTH), kv.dtype)
    for layer in range(kv.shape[1]):
        out[1, layer] = kv[1, layer][keep]
        heads = kv[0, layer][keep].astype(np.float32).reshape(len(keep), -1, HEAD_DIM)
        a, b = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        out[0, layer] = turned.reshape(len(keep), WIDTH)
    return out


def kilobytes(name: str) -> int:
    """A figure of this process' memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def measure(name: str, layers: int, tokens: int) -> None:
    """Print seconds and the peak beyond the tensor, in tensors."""
    kv = np.empty((2, layers, tokens, WIDTH), np.float16)
    kv[:] = np.random.default_rng(0).standard_normal((tokens, WIDTH)).astype(np.float16)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before, ids = kilobytes("VmRSS"), list(range(tokens))
    start = time.perf_counter()
    (by_hand if name == "by_hand" else EDITS[name])(kv, ids)
    seconds = time.perf_counter() - start
    print(seconds, (kilobytes("VmHWM") - before) * 1024 / kv.nbytes)


def main() -> int:
    """Run the pairs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=14080)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--time", type=float, default=2.0, help="most of the time by hand")
    parser.add_argument("--memory", type=float, default=0.8, help="most of the tensor's size")
    parser.add_argument("--all", action="store_true", help="all edits, not only those with a mark")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.layers, options.tokens)
        return 0

    def once(name: str) -> tuple[float, float]:
        sizes = [f"--layers={options.layers}", f"--tokens={options.tokens}"]
        command = [sys.executable, __file__, "--measure", name, *sizes]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, memory = map(float, done.stdout.split())
        return seconds, memory

    missed = False
    for name in EDITS if options.all else MARKED:
        pairs = [(once("by_hand"), once(name)) for _ in range(options.pairs)]
        ratios = [edit[0] / hand[0] for hand, edit in pairs]
        ratio, memory = statistics.median(ratios), max(edit[1] for _, edit in pairs)
        verdict = ""
        if name in MARKED:
            holds = ratio <= options.time and memory <= options.memory
            missed |= not holds
            verdict = (
                f" (marks {options.time:g}x, {options.memory:g}x): {'holds' if holds else 'misses'}"
            )
        print(
            f"{name}: {ratio:.2f}x the time by hand ({min(ratios):.2f} to {max(ratios):.2f} over "
            f"{len(pairs)} pairs, {pairs[0][1][0]:.1f} s), {memory:.2f}x the tensor at the "
            f"peak{verdict}",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
