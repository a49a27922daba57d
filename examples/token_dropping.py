"""Half of each prompt's KV cache dropped, on a real language model, without a server.

A baseline batch (prefill, decode) and a second one (prefill, modify, decode) run over the same
prompts. The edit keeps the first tokens ("sinks") and the most recent ones, as StreamingLLM does
(Xiao et al., https://arxiv.org/abs/2309.17453), and rotates the kept keys to their new positions.

    python examples/token_dropping.py [--limit 12] [--max-tokens 32] [--keep 0.5] [--workers N]
"""

import argparse
import json
import textwrap
from pathlib import Path

import numpy as np

import lmcache_mp
import lmcache_mp.batch as lmc_batch
import lmcache_mp.stream as lmc_stream
from lmcache_mp.edits.rope import rerotate

SINKS = 4


def make_dropper(rope, keep):
    """An edit that keeps the share ``keep`` of the tokens: the first few, and the most recent."""

    def drop_middle(kv, tokens):  # kv: [2, L, T, D], keys and values of every layer
        kept = max(SINKS + 1, round(keep * len(tokens)))
        recent = len(tokens) - (kept - SINKS)
        index = np.r_[:SINKS, recent : len(tokens)]
        new_kv = kv[:, :, index]
        new_kv[0] = rerotate(new_kv[0], index, np.arange(len(index)), rope)
        return new_kv, [tokens[i] for i in index]

    return drop_middle


def fill(batch, ctx, prompts, salt):
    """Add every prompt to the batch, under a salt that keeps the KV of both batches apart."""
    for prompt in prompts:
        tokens = ctx.chat([{"role": "user", "content": prompt["prompt"]}])
        stream = lmc_stream.create_request(ctx, ctx.post_completion, tokens, cache_salt=salt)
        batch.add(stream, custom_id=prompt["custom_id"])


def compare(ctx, baseline, dropped):
    """Print both decodes side by side: speed, size of the KV, and what each stream says."""
    token_bytes = 2 * ctx.config.layers * ctx.config.kv_heads * ctx.config.head_dim * 4
    rows = []
    for metrics in (baseline, dropped):
        data = metrics.to_dict()["metrics"]
        kv = int(metrics.to_frame()["input_tokens"].sum()) * token_bytes
        rows.append((data["results"]["output_tput"], data["latency"]["mean_ttft_ms"], kv / 2**20))
    labels = (
        "Decode throughput (tokens/s)",
        "Mean TTFT of the decode (ms)",
        "KV of all streams (MiB)",
    )
    print(f"\n{'Comparison':32}{'baseline':>12}{'dropped':>12}{'ratio':>10}")
    for label, before, after in zip(labels, *rows, strict=True):
        print(f"{label:32}{before:12.1f}{after:12.1f}{after / before:9.2f}x")
    frames = [metrics.to_frame().set_index("custom_id") for metrics in (baseline, dropped)]
    for custom_id in frames[0].index:
        before, after = (frame.at[custom_id, "output_text"] for frame in frames)
        print(f"\n{custom_id}")
        for name, text in (("baseline", before), ("dropped", after)):
            line = " ".join(text.split())
            print(
                textwrap.fill(line, 100, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12)
            )


def main():
    """Run both batches."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).with_name("prompts.jsonl")
    parser.add_argument(
        "--prompts", type=Path, default=default, help="JSONL with custom_id and prompt"
    )
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to decode (default 32)")
    parser.add_argument(
        "--keep", type=float, default=0.5, help="share of tokens kept (default 0.5)"
    )
    parser.add_argument("--workers", type=int, help="worker processes (default: one a core)")
    parser.add_argument("--model", help="a GGUF file (default: the packaged SmolLM2-135M)")
    options = parser.parse_args()
    with options.prompts.open(encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file][: options.limit]

    with lmcache_mp.connect_local(options.model) as ctx:
        greedy = {"temperature": 0}
        decoding = {"max_tokens": options.max_tokens, "temperature": 0}

        print(f"Baseline: {len(prompts)} prompts, nothing dropped\n")
        with lmc_batch.LMCacheBatchedStream(options.workers, name="baseline") as batch:
            fill(batch, ctx, prompts, salt="baseline")
            batch.prefill(greedy).emit()
            baseline = batch.decode(decoding)
            baseline.emit()

        print(f"\nDropped: {1 - options.keep:.0%} of each stream's KV\n")
        with lmc_batch.LMCacheBatchedStream(options.workers, name="dropped") as batch:
            fill(batch, ctx, prompts, salt="dropped")
            batch.prefill(greedy).emit()
            batch.modify(make_dropper(ctx.rope, options.keep)).emit()
            dropped = batch.decode(decoding)
            dropped.emit()

        compare(ctx, baseline, dropped)


if __name__ == "__main__":
    main()
