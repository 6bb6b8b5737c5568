"""Scores and kept positions of a running engine equal an eager Hugging Face forward, whatever the cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_cases import TINY, on_engines, prose, random_ask, tokens, words
from engine_client import Ask, EngineClient
from hf_reference import HfReference, assert_close, assert_expected


def check(reference: HfReference, ask: Ask, result: dict[str, object]) -> None:
    assert_expected(result, reference.expected(ask.sender, ask.query, ask.spec))


def spoil_pool(engine: EngineClient, seed: int) -> None:
    """Use pool slots in a scattered order, so that senders do not lie in consecutive ones."""
    engine.generate(
        input_ids=[list(tokens(n, seed)) for n in (70, 33, 121, 18)],
        sampling_params={"max_new_tokens": 3, "temperature": 0},
    )


@on_engines(*TINY)
@pytest.mark.parametrize("selector", ["cacheback", "mean_query"])
@pytest.mark.parametrize(("sender_len", "query_len", "budget"), [(301, 24, 75), (47, 1, 20), (160, 9, 160)])
def test_warm_sender(
    engine: EngineClient,
    reference: HfReference,
    selector: str,
    sender_len: int,
    query_len: int,
    budget: int,
) -> None:
    """Asked twice: the query's rows are computed again, never read back, and the answer is the same."""
    ask = random_ask(sender_len, query_len, seed=1, budget=budget, selector=selector)
    engine.prefill(ask.sender)
    for _ in range(2):
        ((result, cached),) = engine.ask(ask)
        check(reference, ask, result)
        assert cached == engine.cached(ask.sender)
    assert result["positions"][0] == 0


@on_engines(*TINY)
def test_query_that_is_cached_as_plain_text(engine: EngineClient, reference: HfReference) -> None:
    """An ordinary request may have put sender + query into the tree; the query's rows still vote."""
    ask = random_ask(200, 20, seed=2, budget=50)
    engine.greedy([*ask.ids, *tokens(30, 5)], 2)
    ((result, cached),) = engine.ask(ask)
    check(reference, ask, result)
    assert cached == engine.cached(ask.sender)


@on_engines(*TINY)
def test_sender_never_cached_or_flushed(engine: EngineClient, reference: HfReference) -> None:
    """Cold is only slower. The sender is in the tree afterwards."""
    ask = random_ask(230, 17, seed=3, budget=60)
    for _ in range(2):
        ((cold, cold_cached),) = engine.ask(ask)
        ((warm, warm_cached),) = engine.ask(ask)
        check(reference, ask, cold)
        check(reference, ask, warm)
        assert (cold_cached, warm_cached) == (0, engine.cached(ask.sender))
        engine.flush()


@on_engines(*TINY)
def test_half_cached_sender(engine: EngineClient, reference: HfReference) -> None:
    """Another sender shares the front only."""
    ask = random_ask(250, 12, seed=4, budget=60)
    engine.prefill([*ask.sender[:100], *tokens(60, 9)])
    ((result, cached),) = engine.ask(ask)
    check(reference, ask, result)
    assert cached == engine.cached(ask.sender[:100])


@on_engines("small")
def test_evicted_sender(engine: EngineClient, reference: HfReference) -> None:
    """Other senders push this one out of the pool of 3,000; it comes back with the next query."""
    ask = random_ask(280, 14, seed=5, budget=70)
    engine.prefill(ask.sender)
    for seed in range(12):
        engine.prefill(tokens(400, 100 + seed))
    for expected_cached in (0, 280):
        ((result, cached),) = engine.ask(ask)
        check(reference, ask, result)
        assert cached == expected_cached


@on_engines(*TINY, "parallel")
def test_vote_range(engine: EngineClient, reference: HfReference) -> None:
    """Rows before, inside and after the voting range are all computed; only those inside vote."""
    whole = random_ask(190, 30, seed=6, budget=48)
    asks = [replace(whole, start=start, stop=stop) for start, stop in ((0, 1), (7, 21), (29, 30), (3, 30))]
    engine.prefill(whole.sender)
    answers = engine.ask(*asks)
    for ask, (result, _) in zip(asks, answers, strict=True):
        check(reference, ask, result)
    assert len({tuple(result["span_scores"]) for result, _ in answers}) == len(asks)


@on_engines(*TINY)
def test_latent_rows_are_kept(engine: EngineClient, reference: HfReference) -> None:
    ask = random_ask(170, 11, seed=7, budget=40, latent_len=21)
    ((result, _),) = engine.ask(ask)
    check(reference, ask, result)
    assert {0, *range(149, 170)} <= set(result["positions"])


@on_engines(*TINY, "parallel")
def test_many_queries_and_senders_in_one_batch(engine: EngineClient, reference: HfReference) -> None:
    """Each query of a batch answers what it answers alone."""
    spoil_pool(engine, seed=8)
    senders = [tokens(n, 8) for n in (144, 83, 210)]
    asks = [
        Ask(senders[n % 3], tokens(length, 50 + n), budget=30 + n, start=n % 2, selector=selector)
        for n, (length, selector) in enumerate(
            [(5, "cacheback"), (24, "cacheback"), (9, "mean_query"), (2, "cacheback"), (13, "mean_query")]
        )
    ]
    for sender in senders:
        engine.prefill(sender)
    together = engine.ask_at_once(*asks)
    # Keys are read once for queries on one sender, if all its pages are full.
    read = 3 if engine.page_size == 1 else 4
    counters = engine.counters()
    assert (counters["most_queries"], counters["most_senders"]) == (len(asks), read)
    for ask, (result, cached) in zip(asks, together, strict=True):
        check(reference, ask, result)
        assert cached == engine.cached(ask.sender)
        ((alone, _),) = engine.ask(ask)
        assert alone["positions"] == result["positions"]
        assert_close(result["span_scores"], alone["span_scores"], 2e-5)


@on_engines("small")
def test_sender_is_read_once_in_an_old_tree(engine: EngineClient) -> None:
    """Tree nodes are numbered: sharing must not end where Python stops to keep small numbers as one object."""
    nodes = [[3 + n, 3 + n] for n in range(300)]
    engine.generate(input_ids=nodes, sampling_params={"max_new_tokens": 0})
    asks = [Ask(tokens(90, 9), tokens(8, 55 + n), budget=20) for n in range(3)]
    engine.prefill(asks[0].sender)
    engine.ask_at_once(*asks)
    counters = engine.counters()
    assert (counters["most_queries"], counters["most_senders"]) == (3, 1)


@on_engines(*TINY)
def test_cold_queries_on_one_sender_in_one_call(engine: EngineClient, reference: HfReference) -> None:
    """Nobody prefilled the sender, and all queries arrive at once."""
    asks = [Ask(tokens(120, 10), tokens(8 + n, 60 + n), budget=32) for n in range(4)]
    for ask, (result, _) in zip(asks, engine.ask_at_once(*asks), strict=True):
        check(reference, ask, result)


@on_engines(*TINY)
@pytest.mark.parametrize("offset", [1, 2, 13, 39])
def test_chunk_boundary_inside_the_query(engine: EngineClient, reference: HfReference, offset: int) -> None:
    """The sender is cold and its chunks end so that ``offset`` rows of the query fall into the one before last."""
    chunk = engine.chunk
    ask = random_ask(2 * chunk - offset, 40, seed=11 + offset, budget=60)
    before = engine.counters()["split_queries"]
    ((result, cached),) = engine.ask(ask)
    check(reference, ask, result)
    assert cached == 0
    assert engine.counters()["split_queries"] == before + 2
    ((again, cached),) = engine.ask(ask)
    check(reference, ask, again)
    assert cached == engine.cached(ask.sender)


@on_engines(*TINY)
@pytest.mark.parametrize("voting", [(0, None), (10, -5)])
def test_query_longer_than_a_chunk(
    engine: EngineClient, reference: HfReference, voting: tuple[int, int | None]
) -> None:
    """A warm sender and a query over three chunks; the voting range may start and end inside chunks."""
    length = 2 * engine.chunk + 31
    start, stop = voting
    ask = random_ask(150, length, seed=20, budget=44, start=start, stop=stop and length + stop)
    engine.prefill(ask.sender)
    before = engine.counters()["split_queries"]
    ((result, cached),) = engine.ask(ask)
    check(reference, ask, result)
    assert cached == engine.cached(ask.sender)
    assert engine.counters()["split_queries"] - before == 3


@on_engines(*TINY, "parallel")
def test_chunk_shared_by_queries(engine: EngineClient, reference: HfReference) -> None:
    """Many short queries overflow a chunk: whole ones and a split one share forward passes."""
    sender, rows = tokens(100, 30), engine.chunk // 3 + 5
    asks = [Ask(sender, tokens(rows + n, 70 + n), budget=40) for n in range(7)]
    engine.prefill(sender)
    before = engine.counters()["split_queries"]
    for ask, (result, _) in zip(asks, engine.ask_at_once(*asks), strict=True):
        check(reference, ask, result)
    assert engine.counters()["split_queries"] > before, "no query was split"


@on_engines("paged")
@pytest.mark.parametrize("sender_len", [15, 16, 17, 95, 97])
def test_sender_ends_inside_a_page(engine: EngineClient, reference: HfReference, sender_len: int) -> None:
    """What of the sender does not fill a page is computed again with each query."""
    ask = random_ask(sender_len, 10, seed=40, budget=12)
    engine.prefill(ask.sender)
    for _ in range(2):
        ((result, cached),) = engine.ask(ask)
        check(reference, ask, result)
        assert cached == sender_len // 16 * 16


@on_engines("embedded")
def test_embedded_model(engine: EngineClient, reference: HfReference) -> None:
    """Real weights, real prose: warm, cold, several at once, and a chunk boundary inside a query."""
    sender = prose(300)
    questions = [
        words("\n\nQuestion: How are two strings compared?\nAnswer:"),
        words("\n\nQuestion: What happens when the target of an assignment is a slice?\nAnswer:"),
    ]
    asks = [
        Ask(sender, question, budget, 4, len(question) - 1, selector)
        for question, budget, selector in zip(questions, (75, 38), ("cacheback", "mean_query"), strict=True)
    ]
    split = Ask(sender[:115], questions[1], 29)
    for _ in range(2):
        for ask, (result, _) in zip(asks, engine.ask(*asks), strict=True):
            check(reference, ask, result)
    engine.flush()
    ((result, cached),) = engine.ask(split)
    check(reference, split, result)
    assert cached == 0
