"""The embedded engine on a tiny random model: same bits in any company, KV reused, nothing left."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from lmcache_mp.engines.llama import Llama
from lmcache_mp.engines.local import LocalContext, connect_local
from lmcache_mp.errors import EngineError, KVError, UsageError
from lmcache_mp.kv.context import KVContext, PinningContext

MODEL = "random:0"
BLOCK = 256


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Temporary stores of a test go into a directory of its own, in its subprocesses as well."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


@pytest.fixture
def ctx(temporary):
    with connect_local(MODEL) as context:
        yield context


def prompt_of(length, seed=0):
    """Random token ids, none of them special."""
    return np.random.default_rng(seed).integers(100, 200, length).tolist()


def run(ctx, prompt, salt="", **params):
    return list(ctx.post_completion(prompt, {"max_tokens": 12, **params}, salt))


def ids(events):
    return [event.token_id for event in events]


def text(events):
    return "".join(event.text for event in events)


GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


# Decoding


def test_greedy_decoding_is_reproducible_and_ends_at_max_tokens(ctx):
    events = run(ctx, prompt_of(20), **GREEDY)
    assert len(events) == 12
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert [event.cached_tokens for event in events] == [0] + [None] * 11
    assert ids(run(ctx, prompt_of(20), **GREEDY)) == ids(events)
    assert text(events) == ctx.decode(ids(events))


def test_greedy_decoding_takes_the_likeliest_token_of_the_model(ctx):
    prompt = prompt_of(20)
    model = Llama.open(MODEL)
    for token in ids(run(ctx, prompt, **GREEDY, max_tokens=5)):
        assert token == int(np.argmax(model.prefill(prompt, model.new_cache())))
        prompt = [*prompt, token]


def test_a_seed_fixes_the_tokens_and_no_seed_does_not(ctx):
    first = ids(run(ctx, prompt_of(20), **SEEDED))
    assert ids(run(ctx, prompt_of(20), **SEEDED)) == first
    assert ids(run(ctx, prompt_of(20), **{**SEEDED, "seed": 6})) != first
    unseeded = {**SEEDED, "seed": None, "temperature": 2.0}
    assert ids(run(ctx, prompt_of(20), **unseeded)) != ids(run(ctx, prompt_of(20), **unseeded))


def test_text_stops_before_a_stop_string_and_nothing_follows(ctx):
    whole = run(ctx, prompt_of(20), **SEEDED, max_tokens=30)
    output = text(whole)
    for start in range(1, len(output) - 4, 3):
        stop = output[start : start + 4]  # most of these are cut by a token's end
        events = run(ctx, prompt_of(20), **SEEDED, max_tokens=30, stop=[stop, "never there"])
        assert text(events) == output[: output.index(stop)]
        assert ids(events) == ids(whole)[: len(events)]
        assert events[-1].finish_reason == "stop"
        assert {event.finish_reason for event in events[:-1]} <= {None}


def test_text_that_only_began_like_a_stop_string_is_given_back(ctx):
    whole = text(run(ctx, prompt_of(20), **SEEDED))
    assert text(run(ctx, prompt_of(20), **SEEDED, stop=whole[-2:] + "\0")) == whole
    early = run(ctx, prompt_of(20), **SEEDED, stop=whole[4:7], min_tokens=12)
    assert text(early) == whole


def test_a_stop_token_is_the_last_and_has_no_text(ctx):
    whole = run(ctx, prompt_of(20), **SEEDED)
    stop = ids(whole)[6]
    events = run(ctx, prompt_of(20), **SEEDED, stop_token_ids=[stop])
    assert ids(events) == ids(whole)[: ids(whole).index(stop) + 1]
    assert events[-1].text == "" and events[-1].finish_reason == "stop"
    later = run(ctx, prompt_of(20), **SEEDED, stop_token_ids=[stop], min_tokens=12)
    assert len(later) == 12 and stop not in ids(later)[:11]


def test_the_end_of_the_sequence_ends_the_pass(ctx):
    """At a high temperature every token is about as likely: some seed ends the sequence soon."""
    eos = set(ctx.config.eos_ids)
    params = {"temperature": 50.0, "max_tokens": 200}
    for seed in range(50):
        events = run(ctx, prompt_of(8), **params, seed=seed)
        if events[-1].finish_reason == "stop":
            break
    assert ids(events)[-1] in eos and not eos & set(ids(events)[:-1])
    longer = run(ctx, prompt_of(8), **params, seed=seed, ignore_eos=True)
    assert len(longer) == 200 and ids(longer)[: len(events)] == ids(events)
    least = run(ctx, prompt_of(8), **params, seed=seed, min_tokens=len(events) + 5)
    assert len(least) >= len(events) + 5


def test_characters_of_several_tokens_come_whole(ctx):
    pieces = run(ctx, ctx.encode("x"), temperature=3.0, seed=1, ignore_eos=True, max_tokens=300)
    assert text(pieces) == ctx.decode(ids(pieces))
    assert any(event.text == "" for event in pieces)


def test_generation_ends_with_the_context(ctx):
    room = 3
    prompt = prompt_of(ctx.config.context_length - room)
    events = list(ctx.post_completion(prompt, {**GREEDY, "max_tokens": None}, ""))
    assert len(events) == room and events[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, 2.0], "token 1 .*2.0"),
        ([True], "True"),
        (["1"], "not an integer"),
        ([-1], "-1"),
        ([10**9], "vocabulary"),
        (range(10, 110), None),
        (np.array([1, 2]), None),
    ],
    ids=str,
)
def test_prompts_are_checked_before_anything_runs(ctx, prompt, words):
    if words is None:
        ctx.post_completion.check_prompt(prompt)
        assert len(run(ctx, prompt, **GREEDY, max_tokens=2)) == 2
        return
    with pytest.raises(UsageError, match=words):
        ctx.post_completion.check_prompt(prompt)
    with pytest.raises(UsageError, match=words):
        ctx.post_completion(prompt, {}, "")


def test_a_prompt_as_long_as_the_context_is_refused(ctx):
    with pytest.raises(UsageError, match="context"):
        ctx.post_completion.check_prompt([100] * ctx.config.context_length)


def test_wrong_parameters_and_salts_are_refused_at_the_call(ctx):
    with pytest.raises(UsageError, match="max_token'"):
        ctx.post_completion([100], {"max_token": 3}, "")
    with pytest.raises(UsageError, match="cache_salt"):
        ctx.post_completion([100], {}, "a/b")


# KV reuse


def test_a_warm_store_gives_the_same_tokens_and_the_same_kv(ctx):
    prompt = prompt_of(700)
    cold = run(ctx, prompt, **SEEDED)
    kv = ctx.retrieve(prompt)
    warm = run(ctx, prompt, **SEEDED)
    assert cold[0].cached_tokens == 0 and warm[0].cached_tokens == 2 * BLOCK
    assert ids(warm) == ids(cold)
    with connect_local(MODEL, chunk_size=100) as other:  # here a part of it is stored before
        run(other, [*prompt[:390], 5, 6, 7], **GREEDY)
        half_warm = run(other, prompt, **SEEDED)
        assert half_warm[0].cached_tokens == BLOCK
        assert ids(half_warm) == ids(cold)
        assert other.lookup(prompt) == 700
        assert other.retrieve(prompt)[:, :, : kv.shape[2]].tobytes() == kv.tobytes()


def test_only_the_prompt_is_stored_and_only_whole_chunks(ctx):
    prompt = prompt_of(40)
    events = run(ctx, prompt, **GREEDY, max_tokens=30)
    assert ctx.lookup(prompt + ids(events)) == 32
    assert ctx.lookup(prompt, "another salt") == 0


def test_a_shared_prefix_is_on_disk_once(ctx):
    prefix = prompt_of(320)
    for seed in range(4):
        run(ctx, prefix + prompt_of(16, seed=seed + 1), **GREEDY, max_tokens=1)
    assert len(list(ctx.store_dir.glob("*/*.*"))) == 320 // 16 + 4


def test_the_last_prompt_token_is_always_computed(ctx):
    prompt = prompt_of(BLOCK)
    cold = run(ctx, prompt, **GREEDY)
    warm = run(ctx, prompt, **GREEDY)
    assert warm[0].cached_tokens == 0 and ids(warm) == ids(cold)


def edited(ctx, salt, length=80, scale=0.0):
    """Store KV with every other token dropped and the values scaled; returns its tokens."""
    prompt = prompt_of(2 * length)
    run(ctx, prompt, **GREEDY, max_tokens=1)
    kv = ctx.retrieve(prompt)[:, :, ::2].copy()
    kv[1] *= scale
    ctx.pin(salt)
    assert ctx.store(kv, prompt[::2], salt) is True
    return prompt[::2]


def test_edited_kv_is_reused_whole_and_decides_the_tokens(ctx):
    tokens = edited(ctx, "edit")
    events = run(ctx, tokens, "edit", **SEEDED)
    assert events[0].cached_tokens == len(tokens) - 1
    plain = run(ctx, tokens, **SEEDED)
    assert ids(events) != ids(plain)
    kept = edited(ctx, "edit-kept", scale=1.0)
    assert ids(run(ctx, kept, "edit-kept", **SEEDED)) != ids(events)


def test_after_an_edit_generated_tokens_are_stored_too(ctx):
    tokens = edited(ctx, "edit")
    events = run(ctx, tokens, "edit", **GREEDY, max_tokens=37)
    sequence = tokens + ids(events)
    assert ctx.lookup(sequence, "edit") == (len(sequence) - 1) // 16 * 16 > len(tokens)
    assert ctx.lookup(sequence) <= len(tokens)
    more = run(ctx, sequence, "edit", **GREEDY, max_tokens=3)
    assert more[0].cached_tokens == (len(sequence) - 1) // 16 * 16
    # Going on from stored KV is the same as never having stopped.
    whole = run(ctx, edited(ctx, "edit-2"), "edit-2", **GREEDY, max_tokens=40)
    assert ids(whole) == ids(events) + ids(more)


def test_the_same_edit_gives_the_same_tokens(ctx):
    first = run(ctx, edited(ctx, "one"), "one", **SEEDED)
    assert ids(run(ctx, edited(ctx, "two"), "two", **SEEDED)) == ids(first)


def test_a_pass_after_an_edit_that_is_given_up_stores_nothing(ctx):
    tokens = edited(ctx, "edit")
    longer = tokens + prompt_of(64, seed=9)
    events = ctx.post_completion(longer, dict(GREEDY), "edit")
    next(events)
    events.close()
    assert ctx.lookup(longer, "edit") == len(tokens)


def test_clear_empties_the_store(ctx):
    prompt = prompt_of(BLOCK + 20)
    before = run(ctx, prompt, **SEEDED)
    ctx.clear()
    assert ctx.lookup(prompt) == 0
    after = run(ctx, prompt, **SEEDED)
    assert after[0].cached_tokens == 0 and ids(after) == ids(before)


# Company


def in_threads(jobs):
    """Run callables at once, each in a thread of its own; their results, or what they raised."""
    results = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def work(index):
        barrier.wait()
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_the_same_tokens_and_kv_alone_and_among_others():
    prompts = [prompt_of(length, seed=length) for length in (5, 40, 300, 270, 16, 90, 33, 64)]
    prompts += [[*prompts[2][:280], 7], prompts[3], prompts[0] + prompts[1], [101]]
    params = [{**SEEDED, "seed": i, "max_tokens": 8 + 3 * i} for i in range(len(prompts))]
    alone, kv = [], []
    for prompt, param in zip(prompts, params, strict=True):
        with connect_local(MODEL) as single:
            alone.append(ids(run(single, prompt, **param)))
            kv.append(single.retrieve(prompt))
    with connect_local(MODEL) as shared:
        for _ in range(2):  # cold, then warm
            together = in_threads(
                [
                    lambda p=p, q=q: ids(run(shared, p, **q))
                    for p, q in zip(prompts, params, strict=True)
                ]
            )
            assert together == alone
            for prompt, expected in zip(prompts, kv, strict=True):
                got = shared.retrieve(prompt)
                assert (got is None) == (expected is None)
                assert got is None or got.tobytes() == expected.tobytes()


def test_passes_interleaved_in_one_thread_do_not_wait_for_each_other(ctx):
    prompts = [prompt_of(20, seed=i) for i in range(11)]  # more than there are slots
    expected = [ids(run(ctx, prompt, **SEEDED)) for prompt in prompts]
    passes = [ctx.post_completion(p, {**SEEDED, "max_tokens": 12}, "") for p in prompts]
    firsts = [next(one).token_id for one in reversed(passes)]
    assert firsts == [tokens[0] for tokens in reversed(expected)]
    assert [
        [tokens[0], *ids(one)] for tokens, one in zip(expected, passes, strict=True)
    ] == expected


@pytest.fixture
def work(monkeypatch):
    """What the model is asked to do from now on: ("prefill", tokens) and ("decode", rows)."""
    done = []
    prefill, decode = Llama.prefill, Llama.decode

    def noted_prefill(self, tokens, cache):
        done.append(("prefill", len(tokens)))
        return prefill(self, tokens, cache)

    def noted_decode(self, tokens, caches):
        done.append(("decode", len(tokens)))
        return decode(self, tokens, caches)

    monkeypatch.setattr(Llama, "prefill", noted_prefill)
    monkeypatch.setattr(Llama, "decode", noted_decode)
    return done


def test_new_prompts_do_not_stop_those_that_are_decoding(ctx, work):
    params = {**GREEDY, "max_tokens": 12}
    first = ctx.post_completion(prompt_of(20), params, "")
    next(first)
    new = [ctx.post_completion(prompt_of(30 + i), params, "") for i in range(3)]
    next(new[-1])
    assert work == [
        ("prefill", 20),
        ("decode", 1),
        ("prefill", 30),
        ("decode", 2),
        ("prefill", 31),
        ("decode", 3),
        ("prefill", 32),
    ]


def test_at_most_eight_passes_are_decoded_at_once(ctx, work):
    prompts = [prompt_of(20, seed=i) for i in range(19)]
    in_threads([lambda p=p: run(ctx, p, **GREEDY) for p in prompts])
    assert max(rows for what, rows in work if what == "decode") == 8
    assert sum(rows for what, rows in work if what == "decode") == 19 * 11


@pytest.mark.parametrize("how", ["close", "drop"])
def test_passes_given_up_free_their_slots(ctx, work, how):
    endless = {**GREEDY, "max_tokens": None}
    passes = [ctx.post_completion(prompt_of(20, seed=i), endless, "") for i in range(16)]
    for one in passes[:8]:
        next(one)
    if how == "close":
        for one in passes:
            one.close()
            one.close()
            assert list(one) == []
    one = None
    del passes
    work.clear()
    assert len(run(ctx, prompt_of(20), **GREEDY)) == 12
    assert sum(rows for what, rows in work if what == "decode") == 11


def test_a_finished_pass_holds_no_kv(ctx, monkeypatch):
    caches = []
    new_cache = Llama.new_cache

    def noted(self, **kind):
        cache = new_cache(self, **kind)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(Llama, "new_cache", noted)
    events = ctx.post_completion(prompt_of(20), {**GREEDY, "max_tokens": 3}, "")
    next(events)
    assert caches[0]() is not None
    assert len(list(events)) == 2
    assert caches[0]() is None


def test_a_slow_consumer_does_not_hold_up_the_others(ctx):
    slow = ctx.post_completion(prompt_of(20), {**SEEDED, "max_tokens": 12}, "")
    expected = ids(run(ctx, prompt_of(20), **SEEDED))
    taken = [next(slow).token_id]
    others = in_threads([lambda i=i: run(ctx, prompt_of(30, seed=i), **GREEDY) for i in range(9)])
    assert all(len(events) == 12 for events in others)
    assert taken + ids(slow) == expected


def test_a_pass_that_fails_leaves_the_others_alone(temporary):
    chunk_bytes = 4 * 2 * 16
    with connect_local(MODEL) as small:
        width = small.config.kv_heads * small.config.head_dim
        capacity = chunk_bytes * small.config.layers * width * 8
    with connect_local(MODEL, capacity_bytes=capacity) as small:
        jobs = [lambda i=i: run(small, prompt_of(20, seed=i), **GREEDY) for i in range(5)]
        jobs.insert(2, lambda: run(small, prompt_of(16 * 9), **GREEDY))
        results = in_threads(jobs)
        failed = results.pop(2)
        assert isinstance(failed, KVError) and "capacity_bytes" in str(failed)
        assert [len(events) for events in results] == [12] * 5


def test_a_failing_step_fails_all_that_were_in_it_and_no_later_pass(ctx, monkeypatch):
    passes = [ctx.post_completion(prompt_of(20, seed=i), dict(GREEDY), "") for i in range(3)]
    for one in passes:
        next(one)
    with monkeypatch.context() as patch:  # running out of memory can't be had otherwise

        def fail(*_):
            raise MemoryError("no room for logits")

        patch.setattr(Llama, "decode", fail)
        for one in passes:
            with pytest.raises(EngineError, match="MemoryError: no room") as caught:
                list(one)
            assert isinstance(caught.value.__cause__, MemoryError)
            assert list(one) == []
    assert len(run(ctx, prompt_of(20), **GREEDY)) == 12


def test_an_interrupt_reaches_the_thread_that_works(ctx, monkeypatch):
    passes = [ctx.post_completion(prompt_of(20, seed=i), dict(GREEDY), "") for i in range(2)]
    for one in passes:
        next(one)
    with monkeypatch.context() as patch:

        def interrupt(*_):
            raise KeyboardInterrupt

        patch.setattr(Llama, "decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(passes[0])
        with pytest.raises(EngineError, match="KeyboardInterrupt"):
            list(passes[1])
    assert len(run(ctx, prompt_of(20), **GREEDY)) == 12


def test_a_pass_can_be_cancelled_from_another_thread(ctx):
    endless = {**GREEDY, "max_tokens": None}
    events = ctx.post_completion(prompt_of(20), endless, "")
    begun, ended = threading.Event(), []

    def consume():
        try:
            for _ in events:
                begun.set()
        except EngineError as error:
            ended.append(str(error))

    thread = threading.Thread(target=consume)
    thread.start()
    assert begun.wait(60)
    events.cancel()
    thread.join(60)
    assert ended == ["the pass was cancelled"]
    assert len(run(ctx, prompt_of(20), **GREEDY)) == 12


# The recipe


def test_it_is_a_kv_context_that_can_pin(ctx):
    assert isinstance(ctx, PinningContext)
    assert ctx.kind == "kv" and ctx.chunk_size == 16
    context: KVContext = ctx
    assert context.lookup([1, 2, 3]) == 0
    assert ctx.post_completion.max_in_flight == 8


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunk_size": 0},
        {"chunk_size": True},
        {"chunk_size": 1.5},
        {"capacity_bytes": 0},
        {"model": "/nowhere/model.gguf"},
        {"model": "random:x"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(temporary, arguments):
    with pytest.raises(UsageError):
        connect_local(**{"model": MODEL, **arguments})
    assert not list(temporary.iterdir())


def test_the_parent_never_loads_weights(ctx, monkeypatch):
    monkeypatch.setattr(Llama, "open", None)  # a tripwire
    tokens = ctx.encode("hello there")
    assert ctx.decode(tokens) == "hello there"
    ctx.post_completion.check_prompt(tokens)
    assert ctx.rope is not None
    ctx.pin("salt")
    assert ctx.lookup(tokens) == 0


def test_a_copy_made_by_pickle_is_the_same_thing(ctx):
    context, engine = (
        pickle.loads(cloudpickle.dumps(thing)) for thing in (ctx, ctx.post_completion)
    )
    assert len(cloudpickle.dumps(ctx)) < 2000
    prompt = prompt_of(40)
    events = list(engine(prompt, {**GREEDY, "max_tokens": 4}, ""))
    assert context.lookup(prompt) == ctx.lookup(prompt) == 32
    assert ids(events) == ids(run(ctx, prompt, **GREEDY, max_tokens=4))


def test_a_copy_keeps_a_temporary_store_alive(temporary):
    original = connect_local(MODEL)
    copy = pickle.loads(cloudpickle.dumps(original))
    del original
    assert len(run(copy, prompt_of(40), **GREEDY)) == 12
    copy.close()
    assert not list(temporary.iterdir())


def _work(context_pickle, engine_pickle, prompts, results):
    context, engine = pickle.loads(context_pickle), pickle.loads(engine_pickle)
    for prompt in prompts:
        tokens = ids(engine(prompt, {**SEEDED, "max_tokens": 12}, ""))
        kv = context.retrieve(prompt)
        results.put((tuple(prompt), tokens, kv.tobytes()))
    engine.close()
    context.close()


def test_workers_share_one_store_and_give_the_same_bits(temporary, ctx):
    prompts = [prompt_of(length, seed=length % 3) for length in (40, 300, 61, 290, 100, 310)]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    pickles = cloudpickle.dumps(ctx), cloudpickle.dumps(ctx.post_completion)
    workers = [
        spawn.Process(target=_work, args=(*pickles, part, results))
        for part in (prompts, prompts[::-1])
    ]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=60) for _ in range(2 * len(prompts))]
    for worker in workers:
        worker.join()
    assert ctx.lookup(prompts[1]) == 288  # what workers stored is there for the parent
    assert ctx.store_dir.exists()
    with connect_local(MODEL) as fresh:
        for prompt, tokens, kv in got:
            assert tokens == ids(run(fresh, list(prompt), **SEEDED))
            assert kv == fresh.retrieve(prompt).tobytes()


# Directories


def test_close_removes_the_temporary_store(temporary):
    ctx = connect_local(MODEL)
    run(ctx, prompt_of(40), **GREEDY)
    assert [ctx.store_dir] == list(temporary.iterdir())
    ctx.close()
    ctx.close()
    assert not list(temporary.iterdir())
    with pytest.raises(KVError, match="was closed"):
        ctx.lookup([1])
    with pytest.raises(KVError, match="was closed"):
        run(ctx, [101])


def test_the_temporary_store_lives_as_long_as_anything_needs_it(temporary):
    engine = connect_local(MODEL).post_completion
    events = engine(prompt_of(40), {**GREEDY, "max_tokens": 3}, "")
    del engine
    assert len(list(events)) == 3
    assert list(temporary.iterdir())
    del events
    assert not list(temporary.iterdir())


def test_a_named_store_stays_and_is_found_again(tmp_path):
    prompt = prompt_of(BLOCK + 40)
    with connect_local(MODEL, store_dir=tmp_path / "kv") as first:
        cold = run(first, prompt, **SEEDED)
    with connect_local(MODEL, store_dir=tmp_path / "kv") as second:
        warm = run(second, prompt, **SEEDED)
        assert warm[0].cached_tokens == BLOCK and ids(warm) == ids(cold)
    with connect_local("random:1", store_dir=tmp_path / "kv") as other:
        assert other.lookup(prompt) == 0


def maker(then):
    """Another process that makes a temporary store and does something; its handle and the path."""
    program = (
        "from lmcache_mp.engines.local import connect_local\n"
        f"ctx = connect_local({MODEL!r}); ctx.pin('x'); print(ctx.store_dir, flush=True)\n{then}"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
    return process, Path(process.stdout.readline().strip())


def test_an_ending_process_removes_its_temporary_store(temporary):
    process, path = maker("import sys; keep = ctx; sys.exit(3)")
    process.communicate()
    assert process.returncode == 3
    assert path.parent == temporary and not path.exists()


def test_a_killed_process_leaves_its_store_to_the_next(temporary):
    process, path = maker("input()")
    with connect_local(MODEL):
        assert path.exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    with connect_local(MODEL) as ctx:
        assert list(temporary.iterdir()) == [ctx.store_dir]


def _hold_store(context_pickle, pipe):
    context: LocalContext = pickle.loads(context_pickle)
    context.open()
    pipe.send("open")
    pipe.recv()
    context.close()
    pipe.send("closed")
    pipe.recv()


def test_the_last_worker_removes_the_store_of_a_maker_that_is_gone(temporary):
    ctx = connect_local(MODEL)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    worker = spawn.Process(target=_hold_store, args=(cloudpickle.dumps(ctx), there))
    worker.start()
    assert here.recv() == "open"
    ctx.close()
    assert ctx.store_dir.exists()
    here.send("close")
    assert here.recv() == "closed"
    assert not ctx.store_dir.exists()
    here.send("end")
    worker.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_go_on_and_leaves_the_store(ctx):
    expected = ids(run(ctx, prompt_of(40), **SEEDED))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = ids(run(ctx, prompt_of(40), **SEEDED)) == expected
            ctx.close()
            status = 0 if same and ctx.store_dir.exists() else 2
        finally:
            os._exit(status)
    os.close(write)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ctx.store_dir.exists()
    assert ids(run(ctx, prompt_of(40), **SEEDED)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_a_thread_decodes_is_not_stuck(ctx, monkeypatch):
    expected = ids(run(ctx, prompt_of(40), **SEEDED))
    decoding, go_on = threading.Event(), threading.Event()
    decode = Llama.decode

    def slow(self, tokens, caches):
        decoding.set()
        go_on.wait(60)
        return decode(self, tokens, caches)

    monkeypatch.setattr(Llama, "decode", slow)
    thread = threading.Thread(target=run, args=(ctx, prompt_of(20)), kwargs=GREEDY)
    thread.start()
    assert decoding.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        go_on.set()
        os._exit(0 if ids(run(ctx, prompt_of(40), **SEEDED)) == expected else 2)
    go_on.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
