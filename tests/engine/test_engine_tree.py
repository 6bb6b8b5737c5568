"""What scoring leaves in SGLang's radix tree and pools: the sender, and nothing else."""

from __future__ import annotations

import pytest
from engine_cases import TINY, on_engines, random_ask, tokens
from engine_client import Ask, EngineClient, greedy_params

from cb_sglang.spec import WIRE_KEY


@on_engines(*TINY)
@pytest.mark.parametrize("prefilled", [True, False])
def test_queries_stay_out_of_the_tree(engine: EngineClient, prefilled: bool) -> None:
    """SGLang's own counters do not grow with queries, also with split ones."""
    sender = tokens(131, 1)
    asks = [Ask(sender, tokens(n, 2), budget=30) for n in (3, 40, engine.chunk + 70)]
    if prefilled:
        engine.prefill(sender)
    for ask in asks:
        engine.ask(ask)
        counters = engine.settled_counters()
        assert counters["tree_tokens"] == counters["evictable"] == engine.cached(sender)
    plain = engine.greedy(asks[1].ids, 1)
    assert plain["meta_info"]["cached_tokens"] == engine.cached(sender)


@on_engines(*TINY)
def test_ordinary_requests_are_untouched(engine: EngineClient) -> None:
    """No result in their meta_info, whole prompts cached, also beside queries in one call."""
    ask = random_ask(90, 20, seed=3, budget=20)
    plain = {**greedy_params(3), "custom_params": {"somebody": "else"}}
    for _ in range(2):
        answers = engine.generate(
            input_ids=[ask.ids, list(tokens(64, 4)), list(tokens(50, 5))],
            sampling_params=[ask.sampling, plain, greedy_params(3)],
        )
    assert WIRE_KEY in answers[0]["meta_info"]
    for answer in answers[1:]:
        assert WIRE_KEY not in answer["meta_info"]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers[1:]]
    assert cached == [n // engine.page_size * engine.page_size for n in (63, 49)]


@on_engines("small", "paged")
@pytest.mark.parametrize("warm", [True, False])
def test_abort_in_flight(engine: EngineClient, warm: bool) -> None:
    """Queries aborted while they wait, or between two chunks, give everything back."""
    sender = tokens(600, 6)
    if warm:
        engine.prefill(sender)
    kept = engine.settled_counters()
    futures = []
    for n in range(4):
        ask = Ask(sender, tokens(700, 20 + n), budget=60)
        futures.append(engine.submit("generate", input_ids=ask.ids, sampling_params=ask.sampling, rid=f"gone-{n}"))
    engine.until(lambda c: c["chunked"])
    for n in range(4):
        engine.call("abort", rid=f"gone-{n}")
    reasons = [engine.wait(future)["meta_info"]["finish_reason"]["type"] for future in futures]
    assert "abort" in reasons, "all queries finished before they could be aborted"
    counters = engine.settled_counters()
    assert counters["free"] + counters["evictable"] == kept["free"] + kept["evictable"]
    assert counters["free_rows"] == kept["free_rows"]
    assert counters["tree_tokens"] <= engine.cached(sender)


@on_engines("small")
def test_more_queries_than_the_pool_holds(engine: EngineClient) -> None:
    """Twelve cold senders of 400 positions in a pool of 3,000: the queue drains and every query is answered."""
    asks = [random_ask(400, 20, seed=200 + n, budget=50) for n in range(12)]
    for result, _ in engine.ask_at_once(*asks):
        assert len(result["positions"]) == 50
