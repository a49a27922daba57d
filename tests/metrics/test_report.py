"""The report: LMCache's table and keys, what comes after them, JSON, pickles, sections by hand."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lmcache_mp.errors import RemoteError, UsageError
from lmcache_mp.metrics import Metrics, PhaseData, check_format, check_width
from lmcache_mp.metrics.formats import quantity
from tests.metrics.phases import (
    BROKEN,
    CHUNKED,
    NONE,
    THREE,
    Edit,
    failure,
    generate_phase,
    modify_phase,
)


def emitted(metrics: Metrics, **options) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        metrics.emit(**options)
    return out.getvalue()


# Of an odd rest, an odd width has the larger half on the left, an even width on the right.
PREFILL = """\
========= Batched Stream Metrics (prefill) ========
------------------ Configuration ------------------
Number of Streams:                                2
--------------------- Results ---------------------
Total Duration (s):                            1.50
Total Input Tokens:                              20
Input Throughput (tokens/s):                  13.33
===================================================
"""
DECODE = """\
================ Batched Stream Metrics (decode) ================
------------------------- Configuration -------------------------
Number of Streams:                                              2
---------------------------- Results ----------------------------
Total Duration (s):                                          1.50
Total Output Tokens:                                            6
Decode Throughput (tokens/s):                                4.00
=================================================================
"""
MODIFY = """\
======================== Batched Stream Modify Metrics =========================
----------------------------------- Results ------------------------------------
Total Duration (s):                                                         1.50
================================================================================
"""


@pytest.mark.parametrize(
    ("data", "width", "table"),
    [
        (generate_phase(THREE, THREE, phase="prefill", duration=1.5), 51, PREFILL),
        (generate_phase(THREE, THREE, duration=1.5), 65, DECODE),
        (modify_phase(Edit(), duration=1.5), 80, MODIFY),
    ],
    ids=["prefill", "decode", "modify"],
)
def test_lmcache_table(data, width, table):
    metrics = Metrics.from_phase(data, width=width)
    assert emitted(metrics, extras=False) == table
    with_extras = emitted(metrics)
    assert with_extras.startswith(table)
    assert len(with_extras) > len(table)


def test_a_line_too_long_for_the_width_keeps_one_space():
    table = emitted(Metrics.from_phase(generate_phase(THREE), width=20), extras=False)
    assert "\nDecode Throughput (tokens/s): 1.50\n" in table


def test_undefined_rates_are_not_zero():
    table = emitted(Metrics.from_phase(generate_phase(duration=0.0), width=40), extras=False)
    assert "\nDecode Throughput (tokens/s):        N/A\n" in table


@pytest.mark.parametrize("width", [*range(20, 101), 200])
@pytest.mark.parametrize(
    "data",
    [generate_phase(THREE, BROKEN), generate_phase(), modify_phase(Edit(), duration=1e-7)],
    ids=["decode", "empty", "modify"],
)
def test_our_block_fits_the_width(data, width):
    metrics = Metrics.from_phase(data, width=width)
    block = emitted(metrics)[len(emitted(metrics, extras=False)) :].splitlines()
    assert max(map(len, block)) <= width
    assert block[-1] == "=" * width
    for text in ("p50", "p90", "p95", "p99"):
        assert any(text in line for line in block)


@pytest.mark.parametrize("width", range(20, 101))
def test_values_of_our_block_never_touch(width):
    lines = emitted(Metrics.from_phase(generate_phase(THREE, CHUNKED), width=width)).splitlines()
    assert not any(re.search(r"[a-z]\d+\.?\d* (ms|s)\b", line) for line in lines)


def test_our_block_says_what_was_measured():
    text = emitted(Metrics.from_phase(generate_phase(THREE, BROKEN)))
    rows = {line.split("  ")[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["TTFT"][:2] == ["100", "ms"]
    assert " ".join(rows["ITL"]) == "30.0 ms 10.0 ms 30.0 ms 38.0 ms 39.0 ms 39.8 ms"
    assert {"TPOT", "E2E latency"} <= set(rows)
    assert rows["Failed:"] == ["1"]


def test_the_block_of_a_modify():
    text = emitted(Metrics.from_phase(modify_phase(Edit())))
    for label in ("Tokens before", "Tokens after", "Stored tokens", "Recomputed tokens"):
        assert f"\n{label} " in text
    for label in ("Compression ratio", "Retrieve", "Edit function", "Store"):
        assert f"\n{label} " in text
    assert "0.375" in text
    assert "200 ms" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12.3456, "s", "12.3 s"),
        (1234.5, "s", "1234 s"),
        (0.0042, "s", "4.20 ms"),
        (0.0009996, "s", "1.00 ms"),
        (9.996, "s", "10.0 s"),
        (4.2e-5, "s", "42.0 us"),
        (1.5e-9, "s", "1.50 ns"),
        (0.0, "s", "0 s"),
        (100.0, "s", "100 s"),
        (0.5, "1", "0.500"),
        (-0.25, "1", "-0.250"),
        (1234567, "", "1234567"),
        (237.84, "tokens/s", "238 tokens/s"),
        (float("nan"), "s", "N/A"),
        (None, "s", "N/A"),
    ],
)
def test_three_significant_digits_with_a_unit(value, unit, text):
    assert quantity(value, unit) == text


def test_json_is_strict_and_says_what_to_dict_says():
    data = generate_phase(NONE, BROKEN, duration=0.0)
    metrics = Metrics.from_phase(data, fmt="json")
    metrics["results"].add("score", "Score", np.float64(0.5))
    metrics["results"].add("hits", "Hits", np.int64(3))
    metrics["results"].add("bad", "Bad", float("inf"))
    metrics["results"].add("where", "Where", Path("out"))
    metrics["results"].add("each", "Each", {"a": np.array([1.0, np.nan])})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    parsed = json.loads(emitted(metrics), parse_constant=refuse)
    assert parsed == metrics.to_dict()
    results = parsed["metrics"]["results"]
    assert (results["score"], results["hits"], results["bad"]) == (0.5, 3, None)
    assert results["where"] == "out"
    assert results["each"] == {"a": [1.0, None]}


@pytest.mark.parametrize(
    ("data", "title", "config", "results"),
    [
        (
            generate_phase(THREE, phase="prefill"),
            "Batched Stream Metrics (prefill)",
            ["num_streams"],
            ["duration", "input_tokens", "input_tput"],
        ),
        (
            generate_phase(THREE),
            "Batched Stream Metrics (decode)",
            ["num_streams"],
            ["duration", "output_tokens", "output_tput"],
        ),
        (modify_phase(Edit()), "Batched Stream Modify Metrics", ["num_streams"], ["duration"]),
    ],
    ids=["prefill", "decode", "modify"],
)
def test_to_dict_has_the_keys_of_lmcache_first(data, title, config, results):
    got = Metrics.from_phase(data).to_dict()
    assert got["title"] == title
    metrics = got["metrics"]
    assert set(metrics) == {"config", "results", "latency"}
    assert list(metrics["config"])[: len(config)] == config
    assert list(metrics["results"])[: len(results)] == results
    assert list(metrics["results"])[len(results) : len(results) + 2] == ["completed", "failed"]
    scalars = [value for section in metrics.values() for value in section.values()]
    assert {type(value) for value in scalars} <= {int, float, str, type(None)}


def test_without_extras_json_has_only_the_keys_of_lmcache():
    metrics = Metrics.from_phase(generate_phase(THREE), fmt="json")
    assert json.loads(emitted(metrics, extras=False))["metrics"] == {
        "config": {"num_streams": 1},
        "results": {"duration": 2.0, "output_tokens": 3, "output_tput": 1.5},
    }


def test_repr_counts_the_streams():
    text = repr(Metrics.from_phase(generate_phase(THREE, THREE, BROKEN)))
    assert "2 ok, 1 failed" in text
    assert repr(Metrics("By hand")) == "<Metrics 'By hand'>"


def test_markdown_is_tables():
    metrics = Metrics.from_phase(generate_phase(THREE), fmt="markdown")
    metrics["results"].add("pipe", "a|b", "c|d")
    lines = emitted(metrics).splitlines()
    assert lines[0] == "## Batched Stream Metrics (decode)"
    assert "| Total Duration (s) | 2.00 |" in lines
    assert "| a\\|b | c\\|d |" in lines
    assert "| TTFT | 100 ms | 0 s | 100 ms | 100 ms | 100 ms | 100 ms |" in lines
    assert not any("TTFT" in line for line in emitted(metrics, extras=False).splitlines())


def test_sections_by_hand():
    metrics = Metrics("Scores", width=30)
    section = metrics.add_section("quality", "Quality")
    section.add("accuracy", "Accuracy", 0.875)
    metrics["quality"].add("judge", "Judge", None)
    metrics.add("model", "Model", "tiny")
    metrics.add("seed", "Seed", 7)
    assert emitted(metrics).splitlines() == [
        "=========== Scores ===========",
        "Model:                    tiny",
        "Seed:                        7",
        "---------- Quality -----------",
        "Accuracy:                 0.88",
        "Judge:                     N/A",
        "==============================",
    ]
    assert metrics.to_dict() == {
        "title": "Scores",
        "metrics": {"model": "tiny", "seed": 7, "quality": {"accuracy": 0.875, "judge": None}},
    }
    with pytest.raises(ValueError, match="quality"):
        metrics.add_section("quality", "Again")
    with pytest.raises(KeyError):
        metrics["missing"]
    with pytest.raises(UsageError, match="by hand"):
        metrics.to_frame()


def test_an_entry_of_the_users_is_kept_over_ours():
    metrics = Metrics.from_phase(generate_phase(THREE))
    metrics["results"].add("completed", "Completed", "mine")
    metrics.add_section("latency", "Latency").add("budget_ms", "Budget (ms)", 5)
    got = metrics.to_dict()["metrics"]
    assert got["results"]["completed"] == "mine"
    assert (got["latency"]["budget_ms"], got["latency"]["mean_ttft_ms"]) == (5, pytest.approx(100))


def test_handlers_get_the_title_and_the_sections():
    class Keeper:
        def emit(self, title, sections):
            self.got = (title, [(it.key, it.label, list(it.entries)) for it in sections])

    metrics, keeper = Metrics.from_phase(modify_phase(Edit())), Keeper()
    metrics.title = "Renamed"
    metrics.add_handler(keeper)
    assert emitted(metrics).startswith("=" * 35 + " Renamed ")
    entries = [("duration", "Total Duration (s)", 2.0)]
    assert keeper.got == ("Renamed", [("results", "Results", entries)])


@pytest.mark.parametrize("fmt", ["xml", "", None, 3, "Terminal"])
def test_an_unknown_format_names_those_there_are(fmt):
    for call in (check_format, lambda it: Metrics("T", fmt=it)):
        with pytest.raises(UsageError, match="terminal, json, markdown"):
            call(fmt)


@pytest.mark.parametrize("width", [19, 0, -5, 80.0, "80", None, True])
def test_a_wrong_width_is_refused(width):
    with pytest.raises(ValueError, match="width"):
        check_width(width)


def test_right_formats_and_widths():
    assert [check_format(fmt) for fmt in ("terminal", "json", "markdown")]
    assert check_width(20) == 20
    assert type(check_width(np.int64(100))) is int


def test_html_is_balanced_escaped_and_without_colours_of_its_own():
    metrics = Metrics.from_phase(generate_phase(THREE))
    metrics["results"].add("x", "<b>bold</b>", "a & b")
    text = metrics._repr_html_()
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert open_tags == []
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert "a &amp; b" in text
    assert "TTFT" in text
    assert "#" not in text
    assert "rgb" not in text


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_a_report_pickles_whatever_its_errors_are():
    data = generate_phase(THREE, BROKEN, BROKEN, texts=["a", "b", "c"])
    odd = replace(failure("s2", "decode"), exception=Unpicklable(1, 2), error_type="Unpicklable")
    metrics = Metrics.from_phase(replace(data, failures={**data.failures, "s2": odd}))
    metrics["results"].add("score", "Score", 0.5)
    metrics.add_handler(type("Local", (), {"emit": lambda self, title, sections: None})())
    copy = pickle.loads(pickle.dumps(metrics))
    assert emitted(copy) == emitted(metrics)
    assert copy.to_dict() == metrics.to_dict()
    assert copy.to_frame().equals(metrics.to_frame())
    assert copy.failures.equals(metrics.failures)


def test_an_error_that_cannot_be_rebuilt_leaves_its_message():
    odd = replace(failure("s0", "decode"), exception=Unpicklable(1, 2), error_type="Unpicklable")
    data = replace(generate_phase(BROKEN), failures={"s0": odd})
    stand_in = pickle.loads(pickle.dumps(data.portable())).failures["s0"].exception
    assert isinstance(stand_in, RemoteError)
    assert str(stand_in) == "it broke"


def test_parts_of_different_lengths_are_refused():
    data = generate_phase(THREE, THREE)
    with pytest.raises(ValueError, match="count of streams"):
        replace(data, custom_ids=[None])
    with pytest.raises(ValueError, match="count of streams"):
        replace(data, texts=["only one"])
    with pytest.raises(ValueError, match="none of prefill"):
        PhaseData("encode", 0.0, [], [], data.records[:0])


def test_a_report_without_frames_does_not_import_pandas():
    code = (
        "import sys; from tests.metrics.phases import THREE, generate_phase;"
        "from lmcache_mp.metrics import Metrics; m = Metrics.from_phase(generate_phase(THREE));"
        "m.emit(); m.to_dict(); sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
