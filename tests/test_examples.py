"""The example's prompts: each a passage, a question, and an answer that stands in the passage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lmcache_mp

PROMPTS = [
    json.loads(line)
    for line in Path(__file__)
    .parent.parent.joinpath("examples", "prompts.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


def test_a_dozen_prompts_with_ids_of_their_own():
    assert len({prompt["custom_id"] for prompt in PROMPTS}) == len(PROMPTS) == 12


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["custom_id"])
def test_the_answer_stands_in_the_passage_and_not_in_the_question(prompt):
    assert set(prompt) == {"custom_id", "prompt", "reference"}
    passage, question = prompt["prompt"].split("\n\nQuestion: ")
    assert question.endswith("?\nAnswer:")
    assert len(prompt["reference"].split()) <= 4
    assert prompt["reference"] in passage
    assert prompt["reference"].lower() not in question.lower()


def test_no_two_prompts_share_a_beginning():
    assert len({prompt["prompt"][:20] for prompt in PROMPTS}) == len(PROMPTS)


@pytest.mark.weights
def test_prompts_are_400_to_900_tokens_long():
    context = lmcache_mp.connect_local()
    try:
        lengths = {prompt["custom_id"]: len(context.encode(prompt["prompt"])) for prompt in PROMPTS}
    finally:
        context.close()
    assert {name: n for name, n in lengths.items() if not 400 <= n <= 900} == {}
