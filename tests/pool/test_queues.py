"""Frames over a socket: whole or not at all, and a parent that never waits."""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp.pool.queues import ParentEnd, WorkerEnd

HEADER = struct.Struct("<Q")
LARGE = os.urandom(8 << 20)


def framed(frame: bytes) -> bytes:
    return HEADER.pack(len(frame)) + frame


@pytest.fixture
def pair() -> Iterator[tuple[ParentEnd, WorkerEnd]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ParentEnd(ours), WorkerEnd(theirs)


@pytest.fixture
def raw() -> Iterator[tuple[ParentEnd, socket.socket]]:
    """A parent's end, and a bare socket in a worker's place."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ParentEnd(ours), theirs


def receive(parent: ParentEnd, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        assert select.select([parent], [], [], 60)[0], "nothing came"
        arrived, closed = parent.receive()
        frames += arrived
        assert not closed or len(frames) == count
    return frames


def receive_to_the_end(parent: ParentEnd) -> list[bytes]:
    frames, closed = parent.receive()
    while not closed:
        assert select.select([parent], [], [], 60)[0], "no end of file came"
        arrived, closed = parent.receive()
        frames += arrived
    return frames


@given(st.lists(st.binary(max_size=12), max_size=4), st.data())
def test_frames_arrive_however_their_bytes_are_cut(
    frames: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(map(framed, frames))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))) | {0, len(stream)})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent, arrived = ParentEnd(ours), []
        for start, end in itertools.pairwise(cuts):
            theirs.sendall(stream[start:end])
            got, closed = parent.receive()
            arrived += got
            assert not closed
    assert arrived == frames


def test_every_boundary_of_a_byte(raw: tuple[ParentEnd, socket.socket]) -> None:
    parent, worker = raw
    frames = [b"", b"a", b"bc" * 9]
    arrived = []
    for byte in b"".join(map(framed, frames)):
        worker.sendall(bytes([byte]))
        arrived += parent.receive()[0]
    assert arrived == frames


def test_nothing_to_receive_is_no_end(pair: tuple[ParentEnd, WorkerEnd]) -> None:
    assert pair[0].receive() == ([], False)


def test_commands_and_results_keep_their_order(pair: tuple[ParentEnd, WorkerEnd]) -> None:
    parent, worker = pair
    for i in range(20):
        parent.send(b"%d" % i)
        worker.send(b"%d" % -i)
    assert [worker.receive() for _ in range(20)] == [b"%d" % i for i in range(20)]
    assert receive(parent, 20) == [b"%d" % -i for i in range(20)]


def test_the_parent_never_waits_for_a_worker_that_does_not_read(
    pair: tuple[ParentEnd, WorkerEnd],
) -> None:
    parent, worker = pair
    parent.send(LARGE)
    parent.send(b"next")
    assert parent.waiting
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend([worker.receive(), worker.receive()]))
    thread.start()
    while parent.waiting:
        assert select.select([], [parent], [], 60)[1], "the worker does not read"
        parent.flush()
    thread.join(60)
    assert got == [LARGE, b"next"]


def test_a_large_result_comes_whole(pair: tuple[ParentEnd, WorkerEnd]) -> None:
    parent, worker = pair
    thread = threading.Thread(target=worker.send, args=(LARGE,))
    thread.start()
    assert receive(parent, 1) == [LARGE]
    thread.join(60)


def test_results_of_several_threads_do_not_mix(pair: tuple[ParentEnd, WorkerEnd]) -> None:
    parent, worker = pair
    results = [bytes([i]) * 300_000 for i in range(8)]
    threads = [threading.Thread(target=worker.send, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    assert sorted(receive(parent, 8)) == results
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 12])
def test_half_a_frame_of_a_dead_worker_is_dropped(
    raw: tuple[ParentEnd, socket.socket], kept: int
) -> None:
    parent, worker = raw
    worker.sendall(framed(b"whole") + framed(b"never whole")[:kept])
    worker.close()
    assert receive_to_the_end(parent) == [b"whole"]
    assert parent.receive() == ([], True)


def test_sending_to_a_dead_worker_is_no_error(raw: tuple[ParentEnd, socket.socket]) -> None:
    parent, worker = raw
    worker.close()
    parent.send(LARGE)
    parent.send(b"more")
    assert not parent.waiting, "a selector must not be woken for it for ever"
    assert parent.receive() == ([], True)


def test_a_worker_sees_the_end_of_its_parent(pair: tuple[ParentEnd, WorkerEnd]) -> None:
    parent, worker = pair
    parent.send(b"last")
    parent.close()
    assert worker.receive() == b"last"
    with pytest.raises(EOFError):
        worker.receive()
    with pytest.raises(OSError):  # noqa: PT011  # which one depends on the platform
        worker.send(LARGE)


def test_half_a_command_of_a_dead_parent_is_an_end(raw: tuple[ParentEnd, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(b"command")[:10])
        ours.close()
        with pytest.raises(EOFError):
            WorkerEnd(theirs).receive()
