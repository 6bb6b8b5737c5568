"""Decoding next to queries, and our CPU attention backend against Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_cases import TINY, on_engines, prose, random_ask, tokens
from engine_client import EngineClient, greedy_params
from hf_reference import HfReference, assert_expected

GENERATED = 120


def assert_greedy(reference: HfReference, prompt: Sequence[int], answer: dict[str, Any]) -> None:
    """Every token is Hugging Face's choice, with Hugging Face's log-probability if the answer has it."""
    logprobs = reference.logprobs(prompt, answer["output_ids"])
    assert logprobs.argmax(dim=-1).tolist() == answer["output_ids"]
    if "output_token_logprobs" in answer["meta_info"]:
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(logprobs.max(dim=-1).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("length", [33, 200])
def test_greedy_tokens_equal_hugging_face(
    engine: EngineClient, reference: HfReference, engine_name: str, length: int
) -> None:
    """Cold in chunks, then warm: sliding windows and grouped query heads are right in prefill and decode."""
    prompt = prose(length) if engine_name == "embedded" else tokens(length, 1)
    for _ in range(2):
        answer = engine.generate(input_ids=list(prompt), sampling_params=greedy_params(12), return_logprob=True)
        assert_greedy(reference, prompt, answer)


@on_engines(*TINY)
def test_greedy_batch_of_different_lengths(engine: EngineClient, reference: HfReference) -> None:
    shared = tokens(70, 2)
    prompts = [tokens(5, 1), *((*shared, *tokens(n, 3)) for n in (1, 40, 17, 90)), tokens(1000, 1)]
    answers = engine.generate(
        input_ids=[list(p) for p in prompts], sampling_params=greedy_params(40), return_logprob=True
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(reference, prompt, answer)


@on_engines(*TINY)
def test_queries_arrive_while_others_decode(engine: EngineClient, reference: HfReference) -> None:
    """Generations keep their greedy tokens, the queries their scores; mixed chunks really mix."""
    prompts = [tokens(n, 4) for n in (60, 111)]
    asks = [random_ask(140 + 30 * n, 20 + engine.chunk * (n % 2), seed=50 + n, budget=40) for n in range(4)]
    before = engine.counters()
    generations = [
        engine.submit("generate", input_ids=list(prompt), sampling_params=greedy_params(GENERATED))
        for prompt in prompts
    ]
    engine.until(lambda c: len(c["decoded"]) == 2 and min(c["decoded"]) > 1)
    answers = []
    for ask in asks:
        answers += engine.ask(ask)
        if len(answers) == 2:
            assert not any(g.done() for g in generations), "the generations ended before two queries were answered"
    for ask, (result, _) in zip(asks, answers, strict=True):
        assert_expected(result, reference.expected(ask.sender, ask.query, ask.spec))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_greedy(reference, prompt, engine.wait(generation))
    mixed = engine.counters()["with_decode"] - before["with_decode"]
    assert (mixed > 0) == (engine.page_size == 16), "only the paged engine mixes chunks"
