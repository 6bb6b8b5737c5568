"""Models that mix full attention with other layers: which are scored, and what a query may leave behind.

A layer with a state per request (Mamba, linear attention, short convolution) makes the radix tree keep that state
next to the keys. A query must not put its own there: whoever continued the sender would start from it.
"""

from __future__ import annotations

import pytest
from engine_cases import on_engines, random_ask, tokens
from engine_client import Ask, EngineClient, greedy_params
from hf_reference import HfReference, assert_expected

linear = on_engines("linear")


@on_engines("linear", "hybrid")
def test_only_full_attention_layers_are_scored(engine: EngineClient, reference: HfReference) -> None:
    ask = random_ask(201, 20, seed=1, budget=50)
    ((result, _),) = engine.ask(ask)
    assert_expected(result, reference.expected(ask.sender, ask.query, ask.spec))
    assert engine.counters()["scored_layers"] == reference.full_layers
    assert 0 < len(reference.full_layers) < reference.model.config.num_hidden_layers


@linear
@pytest.mark.parametrize(("sender_len", "query_len", "budget"), [(301, 24, 75), (47, 1, 20)])
def test_warm_sender(
    engine: EngineClient, reference: HfReference, sender_len: int, query_len: int, budget: int
) -> None:
    """The query starts from the state that the sender's prefill left, each time."""
    ask = random_ask(sender_len, query_len, seed=2, budget=budget)
    engine.prefill(ask.sender)
    for _ in range(2):
        ((result, cached),) = engine.ask(ask)
        assert_expected(result, reference.expected(ask.sender, ask.query, ask.spec))
        assert cached == sender_len


@linear
@pytest.mark.parametrize("query_len", [20, 120])
def test_cold_query_leaves_no_state_of_its_own(engine: EngineClient, reference: HfReference, query_len: int) -> None:
    """Whole, or cut by chunked prefill: what comes after it on the same sender is right."""
    ask = random_ask(150, query_len, seed=3, budget=40)
    other = Ask(ask.sender, tokens(12, 77), budget=40)
    for each in (ask, other, ask):
        ((result, _),) = engine.ask(each)
        assert_expected(result, reference.expected(each.sender, each.query, each.spec))
    prompt = [*ask.sender, *tokens(5, 78)]
    answer = engine.generate(input_ids=prompt, sampling_params=greedy_params(12), return_logprob=True)
    logprobs = reference.logprobs(prompt, answer["output_ids"])
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(logprobs.max(dim=-1).values.tolist(), abs=1e-3)


@linear
def test_queries_in_one_batch(engine: EngineClient, reference: HfReference) -> None:
    """One sender, several queries, next to another sender's: each has a state of its own."""
    senders = [tokens(n, 9) for n in (90, 130)]
    for sender in senders:
        engine.prefill(sender)
    asks = [Ask(senders[n % 2], tokens(6 + n, 80 + n), budget=30) for n in range(4)]
    for ask, (result, cached) in zip(asks, engine.ask_at_once(*asks), strict=True):
        assert_expected(result, reference.expected(ask.sender, ask.query, ask.spec))
        assert cached == len(ask.sender)
    assert engine.counters()["most_queries"] == len(asks)
