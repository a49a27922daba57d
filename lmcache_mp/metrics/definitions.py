"""What each number means: name, unit, formula and label, in one table.

Frames take their columns, dtypes and units from here, aggregates their names, reports their labels.
The meanings are those of the field's serving benchmarks (vLLM, SGLang, aiperf, guidellm). Whatever
a pass leaves undefined is missing (NaN or NA in a frame, None in a dict), never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    ``unit`` is "s", "tokens", "tokens/s", "requests/s", "1" (a ratio), "" (a plain count) or None
    (not a quantity). ``dtype`` is the pandas dtype of its column; a metric with many values a
    stream has none. ``summarised`` metrics have a row in ``Metrics.summary``; ``reported`` ones are
    printed and, where they are seconds, have ``mean_<name>_ms`` and the like in ``to_dict``.
    """

    name: str
    unit: str | None
    label: str
    formula: str
    dtype: str | None = "float64"
    summarised: bool = False
    reported: bool = False


def _fact(name: str, formula: str, dtype: str = "string") -> Definition:
    return Definition(name, None, name.replace("_", " ").capitalize(), formula, dtype)


def _seconds(name: str, label: str, formula: str, *, reported: bool = False) -> Definition:
    return Definition(name, "s", label, formula, summarised=True, reported=reported)


def _gap(name: str, label: str, formula: str, *, reported: bool = False) -> Definition:
    return Definition(name, "s", label, formula, None, summarised=True, reported=reported)


def _tokens(
    name: str, label: str, formula: str, dtype: str = "Int64", *, reported: bool = False
) -> Definition:
    return Definition(name, "tokens", label, formula, dtype, summarised=True, reported=reported)


#: What every phase's frame begins with: which pass this is and how it went.
COMMON = (
    _fact("run", "name of the batch"),
    _fact("phase", "prefill, modify or decode"),
    _fact("round", "which round of the batch, from 0", "int64"),
    _fact("custom_id", "the caller's own name of the stream"),
    _fact("status", "completed or failed"),
    _fact("error_type", "class of the error of a failed pass"),
    _fact("error_message", "message of the error of a failed pass"),
    _fact("worker_id", "index of the worker, -1 for the calling process", "Int64"),
    _fact("worker_pid", "process id of the worker", "Int64"),
    _fact("attempt", "1 for the first try, 0 for a pass that never began", "int64"),
    Definition("start_time", "s", "Start time", "wall clock at the call, since the epoch"),
    _seconds("dispatch_delay", "Dispatch delay", "start_time - start of the phase"),
)

#: Further metrics of a prefill or decode.
GENERATE = (
    _tokens("input_tokens", "Input tokens", "tokens of the prompt that was sent", "int64"),
    _tokens("cached_tokens", "Cached tokens", "prompt tokens whose KV the engine says it reused"),
    _tokens("output_tokens", "Output tokens", "tokens that arrived", "int64"),
    Definition(
        "reported_tokens", "tokens", "Reported tokens", "the engine's own count of them", "Int64"
    ),
    _fact("finish_reason", "the engine's reason to stop"),
    _seconds("ttft", "TTFT", "time of the first event with a token, since the call", reported=True),
    _seconds("tpot", "TPOT", "(last - first) / (output_tokens - 1), of 2 or more", reported=True),
    _gap("itl", "ITL", "icl / tokens of the event that ends it, once a token", reported=True),
    _gap("icl", "ICL", "time between two events of a stream"),
    _seconds("e2el", "E2E latency", "from the call to the end of the stream", reported=True),
    _seconds("scheduled_latency", "Scheduled latency", "dispatch_delay + e2el"),
    _fact("kv_used", "whether the decode after an edit used the edited KV", "boolean"),
    _fact("output_text", "text of this pass"),
)

#: Further metrics of a modify.
MODIFY = (
    _tokens("tokens_before", "Tokens before", "tokens given to the edit", reported=True),
    _tokens("tokens_after", "Tokens after", "tokens that the edit returned", reported=True),
    _tokens("stored_tokens", "Stored tokens", "of these, in whole chunks: stored", reported=True),
    _tokens("recomputed_tokens", "Recomputed tokens", "the rest: computed again", reported=True),
    Definition(
        "compression_ratio",
        "1",
        "Compression ratio",
        "1 - tokens_after / tokens_before",
        summarised=True,
        reported=True,
    ),
    _seconds("retrieve_s", "Retrieve", "fetching the KV", reported=True),
    _seconds("fn_s", "Edit function", "inside the edit function", reported=True),
    _seconds("store_s", "Store", "storing the edited KV", reported=True),
)

#: Columns of the frame of events.
EVENTS = (
    _fact("stream_id", "the stream that the event is of"),
    _fact("event_index", "position in its stream, from 0", "int64"),
    Definition("event_tokens", "tokens", "Tokens", "tokens that the event carried", "int64"),
    Definition("t", "s", "Time", "time of the event, since the call"),
    Definition("icl", "s", "ICL", "time since the event before, missing for the first"),
    Definition("itl", "s", "ITL", "icl / event_tokens"),
)

#: Columns of the frame of failures.
FAILURES = (
    _fact("phase", "the phase that failed"),
    _fact("error_type", "class of the error"),
    _fact("error_message", "its message"),
    _fact("worker_pid", "process id of the worker", "Int64"),
    _fact("exit_code", "of a worker that died: negative for a signal", "Int64"),
    _fact("traceback", "where it was raised"),
)

#: Values of a whole phase. Sums are over the streams that completed; "duration" is the phase's.
TOTALS = (
    Definition("num_streams", "", "Number of Streams", "streams selected for the phase"),
    Definition("duration", "s", "Total Duration (s)", "wall clock of the phase"),
    Definition("input_tokens", "tokens", "Total Input Tokens", "sum of input_tokens"),
    Definition("input_tput", "tokens/s", "Input Throughput (tokens/s)", "input_tokens / duration"),
    Definition("output_tokens", "tokens", "Total Output Tokens", "sum of output_tokens"),
    Definition(
        "output_tput", "tokens/s", "Decode Throughput (tokens/s)", "output_tokens / duration"
    ),
    Definition("completed", "", "Completed", "streams that completed"),
    Definition("failed", "", "Failed", "streams that failed"),
    Definition("total_input_tokens", "tokens", "Input tokens", "sum of input_tokens"),
    Definition("total_output_tokens", "tokens", "Output tokens", "sum of output_tokens"),
    Definition("total_tokens_before", "tokens", "Tokens before", "sum of tokens_before"),
    Definition("total_tokens_after", "tokens", "Tokens after", "sum of tokens_after"),
    Definition("request_throughput", "requests/s", "Request rate", "completed / duration"),
    Definition(
        "output_throughput", "tokens/s", "Output throughput", "total_output_tokens / duration"
    ),
    Definition(
        "decode_rate",
        "tokens/s",
        "Decode rate/stream",
        "sum of (output_tokens - 1) / sum of (last - first), streams of 2 or more tokens",
    ),
    Definition("setup_s", "s", "Setup", "starting workers, before the phase and not part of it"),
)

TOTAL = {definition.name: definition for definition in TOTALS}


def metrics(phase: str) -> tuple[Definition, ...]:
    """All that is known of each stream of ``phase``, in order."""
    return COMMON + (MODIFY if phase == "modify" else GENERATE)


def units(definitions: Iterable[Definition]) -> dict[str, str]:
    """Units by name, of what has one."""
    return {it.name: it.unit for it in definitions if it.unit is not None}


def summarised(phase: str) -> tuple[Definition, ...]:
    """The metrics that ``phase``'s summary has a row for, in order."""
    return tuple(it for it in metrics(phase) if it.summarised)


def reported(phase: str) -> tuple[Definition, ...]:
    """The metrics that ``phase``'s report shows, in order."""
    return tuple(it for it in metrics(phase) if it.reported)
