"""Edit functions that release the interpreter lock: matrix products in numpy.

LMCache's threads run them on all cores, so being as fast is all that can be had. BLAS has one
thread in both, as a worker of ours has by default.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from edits_bound import Floor, ours, theirs
from pairs import Board, alternate, arguments, available


def mixer(size: int, products: int, seed: int) -> Any:
    """An edit that multiplies matrices of ``size``, and drops every second token."""
    matrix = np.random.default_rng(seed).standard_normal((size, size)).astype(np.float32)

    def mix(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        mixed = matrix
        for _ in range(products):
            mixed = mixed @ matrix
            mixed /= np.abs(mixed).max()
        kv[0, 0, 0, 0] = mixed[0, 0]
        return kv[:, :, ::2], tokens[::2]

    return mix


def main() -> int:
    """Run the pairs."""
    sizes = {
        "streams": ([16, 64], [16]),
        "tokens": (1024, 512),
        "size": (512, 256),
        "products": (12, 8),
        "workers": (2, 2),
    }
    options = arguments(__doc__, sizes)
    board = Board("edits_parallel", "Edits that release the lock", options)
    if not available("lmcache.sdk.batch", board):
        return board.finish()
    fn, tokens = mixer(options.size, options.products, options.seed), options.tokens
    floor = Floor(options.workers, fn)
    for streams in options.streams:
        runs = {
            "ours": lambda n=streams: ours(options.workers, n, tokens, fn),
            "LMCache's threads": lambda n=streams: theirs(n, tokens, fn),
            "bare processes": lambda n=streams: floor(n, tokens),
        }
        marks = {"LMCache's threads": 0.95}
        board.compare(f"{streams} streams", alternate(runs, options.pairs), "s", marks)
    floor.close()
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
