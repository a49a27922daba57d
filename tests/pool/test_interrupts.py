"""Ctrl-C is held back while the pool works, and comes through where it does no harm."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from pathlib import Path

import pytest

from lmcache_mp.pool.interrupts import Waker, held_signals
from tests.pool.programs import eventually, program


def test_an_interrupt_waits_until_it_is_let_through() -> None:
    woken: list[int] = []
    with held_signals(lambda: woken.append(1)) as let_through:
        let_through()
        signal.raise_signal(signal.SIGINT)
        assert woken == [1]
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_not_let_through_comes_at_the_end() -> None:
    done = []

    def work() -> None:
        with held_signals(lambda: None):
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    done = []

    def work() -> None:
        with held_signals(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_the_users_own_handler_is_what_it_comes_through_to() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    try:
        with held_signals(lambda: None) as let_through:
            signal.raise_signal(signal.SIGINT)
            assert heard == []
            let_through()
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_without_a_handler_there_is_nothing_to_hold(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_signals(lambda: None) as let_through:
            assert signal.getsignal(signal.SIGINT) is handler
            let_through()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing() -> None:
    handlers: list[object] = []

    def look() -> None:
        with held_signals(lambda: None) as let_through:
            let_through()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_waker_wakes_until_it_is_drained_and_never_waits() -> None:
    waker = Waker()
    with selectors.DefaultSelector() as selector:
        selector.register(waker, selectors.EVENT_READ)
        assert selector.select(0) == []
        waker.wake()
        waker.wake()
        assert len(selector.select(None)) == 1
        waker.drain()
        waker.drain()
        assert selector.select(0) == []
        for _ in range(100_000):
            waker.wake()
    waker.close()
    waker.wake()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks into /proc")
@pytest.mark.parametrize(("method", "rounds"), [("forkserver", 20), ("spawn", 4)])
def test_interrupts_at_any_moment_harm_nothing(method: str, rounds: int, tmp_path: Path) -> None:
    """While workers start, while passes run, and while workers end."""
    text = f"""
    import random
    from tests.pool.programs import processes_of_session
    chance = random.Random(0)
    shoot = threading.Event()
    def shooter():
        while True:
            shoot.wait()
            shoot.clear()
            time.sleep(chance.random() * {0.08 if method == "forkserver" else 0.4})
            os.kill(os.getpid(), signal.SIGINT)
    def cycle(number, interrupted):
        batch = LMCacheBatchedStream(2, start_method={method!r})
        fill(batch, CountingEngine(blocking=number % 2 == 0), 6)
        interrupts = 0
        if interrupted:
            shoot.set()
            try:
                batch.prefill({{}})
                if number % 3 == 0:
                    batch.close()
                wait_for("never")
            except KeyboardInterrupt:
                interrupts += 1
        if number % 3:
            before = [stream.decoded_tokens() for stream in batch.streams.values()]
            assert set(before) <= {{0, 1}}
            assert batch.decode({{"max_tokens": 3}}).to_frame()["status"].eq("completed").all()
            after = [stream.decoded_tokens() for stream in batch.streams.values()]
            assert [b - a for a, b in zip(before, after)] == [3] * 6
        batch.close()
        return interrupts
    def in_use():
        return len(os.listdir("/proc/self/fd")), len(processes_of_session(os.getsid(0)))
    cycle(1, False)
    threading.Thread(target=shooter, daemon=True).start()
    before = in_use()
    say(sum(cycle(number, True) for number in range({rounds})))
    say(before, in_use())
    """
    with program(tmp_path, text) as run:
        assert run.line() == str(rounds)
        before, after = run.line().replace(") (", ")|(").split("|")
        assert before == after
        assert run.end() == 0
        assert run.stderr == ""
        assert eventually(lambda: run.left() == [])
