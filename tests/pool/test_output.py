"""What workers print and log: every line arrives, whole, labelled and where it belongs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp.batch import LMCacheBatchedStream
from lmcache_mp.stream import TokenEvent, create_request
from tests.helpers import CountingEngine, TokenKV
from tests.pool.programs import LIMIT, ROOT, program

METHODS = ["forkserver", "spawn"]


@pytest.fixture(params=[1, 2], ids=["one_worker", "two_workers"])
def batch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LMCacheBatchedStream]:
    """Four streams; the last one has no custom_id."""
    with LMCacheBatchedStream(request.param) as made:
        for i in range(4):
            stream = create_request(TokenKV(str(tmp_path)), CountingEngine(), [i + 1] * 9)
            made.add(stream, custom_id=f"row-{i}" if i < 3 else None)
        made.prefill({})
        yield made


def labels(batch: LMCacheBatchedStream) -> list[str]:
    return ["row-0", "row-1", "row-2", list(batch.streams)[3]]


def test_prints_of_edits_come_line_by_line_with_the_streams_label(
    batch: LMCacheBatchedStream, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("first", tokens[0])
        print("two\nlines", end="\n\n")
        print("to err", file=sys.stderr)
        print("the last", end="")
        sys.stderr.write("unfinished")
        return kv, tokens

    batch.modify(edit)
    out, err = capsys.readouterr()
    for i, label in enumerate(labels(batch)):
        mine = [line for line in out.splitlines() if line.startswith(f"[{label}] ")]
        texts = [line.removeprefix(f"[{label}] ") for line in mine]
        assert texts == [f"first {i + 1}", "two", "lines", "", "the last"]
    assert sorted(err.splitlines()) == sorted(
        f"[{label}] {text}" for label in labels(batch) for text in ("to err", "unfinished")
    )


def test_bytes_are_printed_too(
    batch: LMCacheBatchedStream, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("text, ", end="")
        sys.stdout.buffer.write("b\u00fctes\n".encode() + b"\xff")
        sys.stdout.buffer.flush()
        return kv, tokens

    batch.modify(edit)
    expected = [f"[{x}] {text}" for x in labels(batch) for text in ("text, b\u00fctes", r"\xff")]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(expected)


def test_a_line_arrives_while_its_pass_still_runs(tmp_path: Path) -> None:
    class Answers(io.StringIO):
        """Standard output that lets the edit go on once its line is there."""

        def write(self, text: str) -> int:
            if "waiting" in text:
                (tmp_path / "seen").touch()
            return super().write(text)

    def edit(kv: Any, tokens: list[int]) -> Any:
        import time

        print("waiting")
        deadline = time.monotonic() + 30
        while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return kv, tokens, {"seen": (tmp_path / "seen").exists()}

    with LMCacheBatchedStream(1) as batch, contextlib.redirect_stdout(Answers()):
        batch.add(create_request(TokenKV(str(tmp_path)), CountingEngine(), [1] * 9))
        batch.prefill({})
        assert list(batch.modify(edit).to_frame()["seen"]) == [True]


def test_prints_go_to_the_standard_output_of_the_moment(batch: LMCacheBatchedStream) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("here")
        return kv, tokens

    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            batch.modify(edit)
        assert sorted(out.getvalue().splitlines()) == sorted(f"[{x}] here" for x in labels(batch))


class Talks:
    """All its passes print at once, a word at a time, each waiting for the others in between."""

    words = 20

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def open(self) -> None:
        self.barrier = threading.Barrier(self.passes)

    def __call__(self, prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[Any]:
        for word in range(self.words):
            print(word, end=" ")
            print(word, end=" ", file=sys.stderr)
            self.barrier.wait(LIMIT)
        print(prompt[0])
        yield TokenEvent(1)


def test_lines_of_passes_that_print_at_once_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Talks(8)
    with LMCacheBatchedStream(1) as batch:
        for i in range(8):
            request = create_request(TokenKV(str(tmp_path)), engine, [i] * 9)
            batch.add(request, custom_id=f"row-{i}")
        batch.prefill({})
    words = " ".join(map(str, range(Talks.words)))
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"[row-{i}] {words} {i}" for i in range(8)]
    assert sorted(err.splitlines()) == [f"[row-{i}] {words} " for i in range(8)]


class Narrates(TokenKV):
    """Says when it is opened and closed."""

    def open(self) -> None:
        print("opened", end="")

    def close(self) -> None:
        print("closing")
        print("closed", end="")


def test_what_is_printed_outside_of_streams_has_no_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LMCacheBatchedStream(1) as batch:
        request = create_request(Narrates(str(tmp_path)), CountingEngine(), [1] * 9)
        batch.add(request, custom_id="row")
        batch.prefill({})
        assert capsys.readouterr().out == "opened\n"
    assert capsys.readouterr().out == "closing\nclosed\n"


def test_log_records_keep_level_and_name_and_get_the_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import logging
        import threading

        logger = logging.getLogger("my.edits")
        logger.info("100%% of %s", threading.Lock())  # an argument that can't be pickled
        logger.debug("too low")
        try:
            raise KeyError("inner")
        except KeyError:
            logger.exception("it broke")
        return kv, tokens

    caplog.set_level(logging.INFO)
    with LMCacheBatchedStream(1) as batch:
        request = create_request(TokenKV(str(tmp_path)), CountingEngine(), [1] * 9)
        batch.add(request, custom_id="row")
        batch.prefill({})
        [worker] = batch.worker_pids
        batch.modify(edit)
    first, second = [record for record in caplog.records if record.name == "my.edits"]
    assert first.levelno == logging.INFO and second.levelname == "ERROR"
    assert first.getMessage().startswith("[row] 100% of <unlocked")
    assert second.getMessage() == "[row] it broke"
    assert second.exc_text is not None and "KeyError: 'inner'" in second.exc_text
    assert first.funcName == "edit" and first.process == worker


def test_warnings_of_an_edit_go_to_standard_error(
    batch: LMCacheBatchedStream, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        import warnings

        warnings.warn(f"beware of {tokens[0]}", UserWarning, stacklevel=1)
        return kv, tokens

    batch.modify(edit)
    err = capsys.readouterr().err
    for i, label in enumerate(labels(batch)):
        assert any(
            line.startswith(f"[{label}] ") and line.endswith(f"UserWarning: beware of {i + 1}")
            for line in err.splitlines()
        )


@pytest.mark.parametrize(("lines", "length"), [(20_000, 500), (1, 10_000_000)])
def test_any_amount_of_output_arrives(
    lines: int, length: int, batch: LMCacheBatchedStream, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        for _ in range(lines):
            print("x" * length)
        return kv, tokens

    batch.modify(edit)
    out = capsys.readouterr().out
    assert out.count("\n") == 4 * lines
    assert out.count("x") == 4 * lines * length


def test_output_between_phases_waits_for_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Far more than a pipe holds, printed by a thread that an edit has left behind."""

    def edit(kv: Any, tokens: list[int]) -> Any:
        import threading

        def talk() -> None:
            for _ in range(1000):
                print("y" * 5000)
            (tmp_path / "talked").touch()

        thread = threading.Thread(target=talk)
        thread.start()
        return kv, tokens

    def wait(kv: Any, tokens: list[int]) -> Any:
        import time

        deadline = time.monotonic() + 30
        while not (tmp_path / "talked").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return kv, tokens

    with LMCacheBatchedStream(1) as batch:
        batch.add(create_request(TokenKV(str(tmp_path)), CountingEngine(), [1] * 9))
        batch.prefill({})
        batch.modify(edit)
        batch.modify(wait)
    assert capsys.readouterr().out.count("y" * 5000 + "\n") == 1000


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_text_that_the_terminal_can_not_show_is_escaped(
    encoding: str, batch: LMCacheBatchedStream
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("a\udcffb")
        print("after")
        return kv, tokens

    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding)
    with contextlib.redirect_stdout(terminal):
        batch.modify(edit)
    lines = raw.getvalue().decode().splitlines()
    expected = [f"[{x}] {text}" for x in labels(batch) for text in (r"a\udcffb", "after")]
    assert sorted(lines) == sorted(expected)


def test_a_closed_or_missing_standard_output_stops_nothing(
    batch: LMCacheBatchedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(kv: Any, tokens: list[int]) -> Any:
        print("nobody hears")
        return kv, tokens

    closed = io.StringIO()
    closed.close()
    for stdout in (closed, None):
        monkeypatch.setattr(sys, "stdout", stdout)
        frame = batch.modify(edit).to_frame()
        assert set(frame["status"]) == {"completed"}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_past_python_goes_to_standard_error(method: str, tmp_path: Path) -> None:
    text = f"""
    def edit(kv, tokens):
        subprocess.run(["echo", "from a subprocess"], check=True)
        os.write(1, b"from file descriptor 1\\n")
        print("from python")
        return kv, tokens
    with LMCacheBatchedStream(1, start_method={method!r}) as batch:
        fill(batch, CountingEngine(), 1)
        batch.prefill({{}})
        batch.modify(edit)
    say("end")
    """
    with program(tmp_path, text) as run:
        assert run.line() == "[row-0] from python"
        assert run.line() == "end"
        assert run.end() == 0
        assert run.stderr == "from a subprocess\nfrom file descriptor 1\n"


def test_prints_appear_in_a_notebooks_cell(tmp_path: Path) -> None:
    """A notebook run as users run it: the kernel is a process without a terminal."""
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(text)
        for text in (
            "from lmcache_mp.batch import LMCacheBatchedStream\n"
            "from lmcache_mp.stream import create_request\n"
            "from tests.helpers import CountingEngine, TokenKV\n"
            "batch = LMCacheBatchedStream(1)\n"
            f"request = create_request(TokenKV({str(tmp_path)!r}), CountingEngine(), [1] * 9)\n"
            "_ = batch.add(request, custom_id='row')\n"
            "_ = batch.prefill({})",
            "def edit(kv, tokens):\n"
            "    print('shown', len(tokens))\n"
            "    return kv, tokens\n"
            "_ = batch.modify(edit)",
            "batch.close()",
        )
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    client = nbclient.NotebookClient(book, timeout=int(LIMIT), kernel_name="python3")
    client.execute(env=environment, cwd=str(ROOT))
    shown = [
        "".join(output.get("text", "") for output in cell.outputs if output.name == "stdout")
        for cell in book.cells
    ]
    assert shown == ["", "[row] shown 8\n", ""]
