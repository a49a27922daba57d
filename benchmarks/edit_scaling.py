"""A pure-Python edit function over 16 streams: two workers against one, A B A B in one run.

The edit is a loop over tokens, as users write them, so it is bound to the interpreter. Two workers
can be at most twice as fast. Exits 1 when the median ratio is under the mark.

    python benchmarks/edit_scaling.py [--streams 16] [--tokens 1024] [--pairs 7] [--mark 1.8]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from fixtures import OneEvent, ZeroKV

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.stream import create_request


def drop_by_score(kv: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    """Keep the half of the tokens with the highest score, made in a loop of plain Python."""
    scores = []
    for position, token in enumerate(tokens):
        score = token
        for step in range(600):
            score = (score * 31 + position + step) % 65_537
        scores.append(score)
    order = sorted(range(len(tokens)), key=scores.__getitem__)
    keep = sorted(order[len(tokens) // 2 :])
    return kv[:, :, keep], [tokens[i] for i in keep]


def seconds(workers: int, streams: int, tokens: int) -> float:
    """Wall clock of one modify phase, workers being up."""
    with LMCacheBatchedStream(workers) as batch:
        context, engine = ZeroKV(), OneEvent()
        for i in range(streams):
            batch.add(create_request(context, engine, [i + 1] * tokens))
        batch.start()
        return batch.modify_stream(drop_by_score)


def main() -> int:
    """Run the pairs and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mark", type=float, default=1.8)
    options = parser.parse_args()
    ratios = []
    for pair in range(options.pairs):
        one = seconds(1, options.streams, options.tokens)
        two = seconds(2, options.streams, options.tokens)
        ratios.append(one / two)
        print(f"pair {pair + 1}: 1 worker {one:.2f} s, 2 workers {two:.2f} s, {one / two:.2f}x")
    median = statistics.median(ratios)
    holds = median >= options.mark
    print(
        f"edit scaling, {options.streams} streams: 2 workers are {median:.2f}x as fast as 1 "
        f"({min(ratios):.2f} to {max(ratios):.2f} over {options.pairs} pairs; mark "
        f"{options.mark:.2f}x): {'holds' if holds else 'misses'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
