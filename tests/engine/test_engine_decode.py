"""Decoding next to queries, and our CPU attention backend against Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_cases import on_engines, prose, random_ask, tokens
from engine_client import EngineClient, greedy_params
from hf_reference import HfReference, assert_expected

tiny = on_engines("small", "paged", "hybrid")

GENERATED = 300


def assert_greedy(reference: HfReference, prompt: Sequence[int], answer: dict[str, object]) -> None:
    """Every token is Hugging Face's choice, with Hugging Face's log-probability."""
    output: list[int] = answer["output_ids"]  # type: ignore[assignment]
    logprobs = reference.logprobs(prompt, output)
    assert logprobs.argmax(dim=-1).tolist() == output
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]  # type: ignore[index]
    wanted = logprobs.max(dim=-1).values.tolist()
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("length", [5, 33, 200, 1000])
def test_greedy_tokens_equal_hugging_face(engine: EngineClient, reference: HfReference, length: int) -> None:
    """Cold in chunks, then warm: sliding windows and grouped query heads are right in prefill and decode."""
    prompt = prose(length) if engine.chunk == 512 else tokens(length, 1)
    for _ in range(2):
        answer = engine.generate(input_ids=list(prompt), sampling_params=greedy_params(12), return_logprob=True)
        assert_greedy(reference, prompt, answer)


@tiny
def test_greedy_batch_of_different_lengths(engine: EngineClient, reference: HfReference) -> None:
    shared = tokens(70, 2)
    prompts = [(*shared, *tokens(n, 3)) for n in (1, 40, 17, 90)]
    answers = engine.generate(
        input_ids=[list(p) for p in prompts], sampling_params=greedy_params(40), return_logprob=True
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(reference, prompt, answer)


@tiny
def test_queries_arrive_while_others_decode(engine: EngineClient, reference: HfReference) -> None:
    """Long generations keep their greedy tokens, the queries their scores; mixed chunks really mix."""
    prompts = [tokens(n, 4) for n in (60, 111)]
    alone = [engine.greedy(prompt, GENERATED)["output_ids"] for prompt in prompts]
    asks = [random_ask(140 + 30 * n, 20 + engine.chunk * (n % 2), seed=50 + n, budget=40) for n in range(4)]
    engine.flush()
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
    assert [engine.wait(generation)["output_ids"] for generation in generations] == alone
    mixed = engine.counters()["with_decode"] - before["with_decode"]
    assert (mixed > 0) == (engine.page_size == 16), "only the paged engine mixes chunks"
