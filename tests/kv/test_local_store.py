"""The store of chunk files: what is stored is found, shared, evicted in order, and never torn."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_mp.errors import KVError
from lmcache_mp.kv.local import ChunkStore

LAYERS, WIDTH, CHUNK = 3, 4, 4
CHUNK_BYTES = 4 * 2 * LAYERS * CHUNK * WIDTH


def open_store(directory, capacity_chunks=1000, model="m"):
    return ChunkStore(
        directory,
        layers=LAYERS,
        width=WIDTH,
        chunk_size=CHUNK,
        model=model,
        capacity_bytes=capacity_chunks * CHUNK_BYTES,
    )


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def kv_of(tokens):
    """KV whose rows say which token they belong to and what came before."""
    rows = np.cumsum(np.asarray(tokens, np.float32) + 1)
    parts = np.arange(2 * LAYERS * WIDTH, dtype=np.float32).reshape(2, LAYERS, 1, WIDTH)
    return np.ascontiguousarray(rows[:, None] + 1000 * parts)


def chunk_files(directory):
    return sorted(path for path in Path(directory).glob("*/*.*") if not path.name.startswith("."))


def age(directory, seconds):
    """Make everything stored so far look used that long ago."""
    for path in chunk_files(directory):
        info = path.stat()
        moved = info.st_mtime_ns - int(seconds * 1e9)
        os.utime(path, ns=(moved, moved))


def test_what_is_stored_comes_back_bit_for_bit(store):
    tokens = list(range(12))
    assert store.lookup(tokens) == 0
    assert store.retrieve(tokens) is None
    assert store.store(kv_of(tokens), tokens) is True
    assert store.lookup(tokens) == 12
    kv = store.retrieve(tokens)
    assert kv.dtype == np.float32 and kv.flags.c_contiguous
    assert kv.tobytes() == kv_of(tokens).tobytes()


def test_storing_again_reports_that_all_was_there(store):
    tokens = list(range(8))
    assert store.store(kv_of(tokens), tokens) is True
    assert store.store(kv_of(tokens), tokens) is False
    longer = list(range(12))
    assert store.store(kv_of(longer), longer) is True
    assert store.store(kv_of(longer), longer) is False


def test_only_whole_chunks_are_kept(store):
    tokens = list(range(11))
    store.store(kv_of(tokens), tokens)
    assert store.lookup(tokens) == 8
    assert store.retrieve(tokens).tobytes() == kv_of(tokens[:8]).tobytes()
    assert store.store(kv_of(tokens[:3]), tokens[:3]) is False
    assert store.lookup([]) == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=6), st.lists(st.integers(0, 1)))
def test_the_longest_stored_prefix_is_found(sequences, query):
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(directory)
        prefixes = set()
        for tokens in sequences:
            store.store(kv_of(tokens), tokens)
            whole = len(tokens) // CHUNK * CHUNK
            prefixes |= {tuple(tokens[:end]) for end in range(CHUNK, whole + 1, CHUNK)}
        expected = max((len(p) for p in prefixes if list(p) == query[: len(p)]), default=0)
        assert store.lookup(query) == expected
        assert len(chunk_files(directory)) == len(prefixes)  # a shared prefix is kept once
        if expected:
            assert store.retrieve(query).tobytes() == kv_of(query[:expected]).tobytes()


def test_retrieved_kv_is_private_and_writable(store):
    tokens = list(range(4))
    store.store(kv_of(tokens), tokens)
    store.retrieve(tokens)[...] = -1
    assert store.retrieve(tokens).tobytes() == kv_of(tokens).tobytes()


def test_kv_without_its_first_tokens_can_be_stored(store):
    tokens = list(range(12))
    kv = kv_of(tokens)
    store.store(kv[:, :, :4], tokens[:4])
    assert store.store(kv[:, :, 4:], tokens, start=4) is True
    assert store.retrieve(tokens).tobytes() == kv.tobytes()
    with pytest.raises(KVError, match="start=3"):
        store.store(kv[:, :, 3:], tokens, start=3)


def test_salts_and_models_do_not_see_each_other(store, tmp_path):
    tokens = list(range(4))
    store.store(kv_of(tokens), tokens, "a")
    assert store.lookup(tokens, "a") == 4
    assert store.lookup(tokens) == store.lookup(tokens, "b") == 0
    assert open_store(tmp_path / "store", model="other").lookup(tokens, "a") == 0


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (np.zeros((2, LAYERS, 5, WIDTH), np.float32), "shape"),
        (np.zeros((2, LAYERS, 4, WIDTH + 1), np.float32), "shape"),
        (np.zeros((2, LAYERS, 4, WIDTH), np.float64), "float32 is needed"),
        (np.zeros((2, LAYERS, 4, WIDTH), object), "float32 is needed"),
    ],
)
def test_wrong_kv_is_refused_and_nothing_is_stored(store, kv, words):
    with pytest.raises(KVError, match=words):
        store.store(kv, [1, 2, 3, 4])
    assert store.lookup([1, 2, 3, 4]) == 0


def test_tokens_that_are_not_integers_are_refused(store):
    with pytest.raises(KVError, match="integer"):
        store.store(kv_of([1, 2, 3, 4]), [1.5, 2, 3, 4])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("damage", ["short", "long", "gone"])
def test_a_torn_chunk_counts_as_missing_and_is_stored_anew(store, position, damage):
    tokens = list(range(12))
    store.store(kv_of(tokens), tokens)
    path = next(p for p in chunk_files(store.directory) if p.suffix == f".{position}")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "short" else b"x" * (CHUNK_BYTES + 1))
    assert store.lookup(tokens) == position * CHUNK
    assert store.store(kv_of(tokens), tokens) is True
    assert store.retrieve(tokens).tobytes() == kv_of(tokens).tobytes()


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 10)])
def test_a_chunk_lost_after_lookup_ends_the_prefix(store, monkeypatch, damage):
    tokens = list(range(12))
    store.store(kv_of(tokens), tokens)
    victim = next(p for p in chunk_files(store.directory) if p.suffix == ".1")
    allocate = np.empty

    def damage_then_allocate(*args, **kwargs):  # between the look at the files and their reading
        damage(victim)
        return allocate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", damage_then_allocate)
        kv = store.retrieve(tokens)
    assert kv.flags.c_contiguous and kv.tobytes() == kv_of(tokens[:4]).tobytes()


def test_the_directory_is_private(tmp_path):
    open_store(tmp_path / "a" / "b").store(kv_of([1, 2, 3, 4]), [1, 2, 3, 4])
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_directory_that_can_not_be_made_is_a_kv_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVError, match="store_dir"):
        open_store(tmp_path / "file" / "store")


def sequence(number, chunks=1):
    return [1000 * number + i for i in range(chunks * CHUNK)]


def put(store, number, chunks=1, salt=""):
    tokens = sequence(number, chunks)
    return store.store(kv_of(tokens), tokens, salt)


def test_least_recently_used_chunks_go_first(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    for number in range(10):
        age(tmp_path, 1)
        put(store, number)
    age(tmp_path, 1)
    assert store.retrieve(sequence(0)) is not None  # reading counts as use
    age(tmp_path, 1)
    put(store, 10)
    kept = [number for number in range(11) if store.lookup(sequence(number))]
    assert kept == [0, 3, 4, 5, 6, 7, 8, 9, 10]  # down to 90 % of the capacity


def test_a_tail_goes_before_its_prefix(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    put(store, 0, chunks=8)
    age(tmp_path, 10)
    put(store, 1, chunks=4)
    assert store.lookup(sequence(0, 8)) == 5 * CHUNK
    assert store.lookup(sequence(1, 4)) == 4 * CHUNK


def test_chunks_stored_together_are_equally_old_however_long_it_took(tmp_path):
    put(open_store(tmp_path), 0, chunks=900)
    assert len({path.stat().st_mtime_ns for path in chunk_files(tmp_path)}) == 1


def test_storing_a_tail_keeps_its_own_prefix(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    put(store, 0, chunks=5)
    age(tmp_path, 10)
    put(store, 1, chunks=5)
    put(store, 0, chunks=8)
    assert store.lookup(sequence(0, 8)) == 8 * CHUNK
    put(store, 0, chunks=10)  # a full store, and no chunk of it may go
    assert store.lookup(sequence(0, 10)) == 10 * CHUNK


def test_the_budget_holds_over_several_stores(tmp_path):
    stores = [open_store(tmp_path, capacity_chunks=10) for _ in range(3)]
    for number in range(40):
        put(stores[number % 3], number, chunks=1 + number % 4)
        assert len(chunk_files(tmp_path)) <= 10


def test_a_lost_account_is_counted_again(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    put(store, 0, chunks=9)
    (tmp_path / "usage").write_bytes(b"")
    put(store, 1, chunks=3)
    assert len(chunk_files(tmp_path)) <= 10


def test_what_a_killed_process_was_writing_is_removed_when_room_is_needed(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    put(store, 0, chunks=2)
    folder = chunk_files(tmp_path)[0].parent
    left, fresh = folder / ".left", folder / ".fresh"
    for path in (left, fresh):
        path.write_bytes(bytes(4 * CHUNK_BYTES))
    os.utime(left, (1, 1))
    (tmp_path / "usage").unlink()  # so that both are in the account
    put(store, 1, chunks=3)
    assert not left.exists() and fresh.exists()
    assert store.lookup(sequence(0, 2)) == 2 * CHUNK
    assert len(chunk_files(tmp_path)) == 5


def test_pinned_chunks_are_never_evicted(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    store.pin("edit")
    put(store, 0, chunks=4, salt="edit")
    age(tmp_path, 100)
    for number in range(1, 20):
        put(open_store(tmp_path, capacity_chunks=10), number)
    assert store.lookup(sequence(0, 4), "edit") == 4 * CHUNK


def test_pins_are_seen_by_everyone_and_end_with_release(tmp_path):
    store, other = open_store(tmp_path, 10), open_store(tmp_path, 10)
    assert not other.pinned("edit")
    store.pin("edit")
    put(store, 0, chunks=9, salt="edit")
    assert other.pinned("edit") and not other.pinned("") and not other.pinned("another")
    with pytest.raises(KVError):
        put(other, 1, chunks=2)
    other.release("edit")
    assert not store.pinned("edit")
    assert store.lookup(sequence(0, 9), "edit") == 0
    other.release("never used")
    assert put(store, 1, chunks=5) and put(other, 2, chunks=5)
    assert store.lookup(sequence(1, 5)) == store.lookup(sequence(2, 5)) == 5 * CHUNK


def test_what_can_not_fit_names_the_capacity_and_evicts_nothing(tmp_path):
    store = open_store(tmp_path, capacity_chunks=10)
    put(store, 0, chunks=5)
    with pytest.raises(KVError, match=f"{10 * CHUNK_BYTES} bytes.*capacity_bytes"):
        put(store, 1, chunks=11)
    assert store.lookup(sequence(0, 5)) == 5 * CHUNK
    assert put(store, 2, chunks=5)  # and the failed attempt claims no room


def test_clear_empties_the_store_and_leaves_other_files(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.1").write_text("mine")
    store = open_store(tmp_path, capacity_chunks=10)
    store.pin("edit")
    put(store, 0, chunks=4)
    put(store, 1, chunks=4, salt="edit")
    store.clear()
    assert store.lookup(sequence(0, 4)) == store.lookup(sequence(1, 4), "edit") == 0
    assert (tmp_path / "notes" / "a.1").read_text() == "mine"
    assert store.pinned("edit")
    assert put(store, 2, chunks=10)


def test_a_full_disk_is_a_kv_error_and_leaves_nothing_behind(tmp_path):
    pytest.importorskip("resource")
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_local_store import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store({str(tmp_path)!r})
put(store, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # a write past 100 bytes fails
try:
    put(store, 1)
except KVError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "could not store KV" in done.stdout, done.stderr
    assert len(chunk_files(tmp_path)) == 1
    assert not list(tmp_path.glob("*/.*"))


def _store_all(directory, numbers, barrier, capacity_chunks):
    store = open_store(directory, capacity_chunks)
    barrier.wait()
    for number in numbers:
        put(store, number, chunks=6)


@pytest.mark.parametrize("capacity_chunks", [1000, 50])
def test_processes_may_store_the_same_at_once(tmp_path, capacity_chunks):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    numbers = list(range(30))
    arguments = (tmp_path, numbers, barrier, capacity_chunks)
    processes = [context.Process(target=_store_all, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    store = open_store(tmp_path)
    found = [store.lookup(sequence(number, 6)) for number in numbers]
    for number in numbers:
        tokens = sequence(number, 6)
        kv = store.retrieve(tokens)
        assert kv is None or kv.tobytes() == kv_of(tokens[: kv.shape[2]]).tobytes()
    if capacity_chunks == 1000:
        assert found == [6 * CHUNK] * 30
    assert 30 < len(chunk_files(tmp_path)) <= min(capacity_chunks, 30 * 6)
    assert not list(tmp_path.glob("*/.*"))
