"""Messages on the real server: what is kept, how it is encoded, and how it arrives."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from served_api import CASES, ServedApi, document, excerpt, runs_of, sse_events

from cb_sglang.client import CacheBack, Message, Query, Sender
from cb_sglang.messages import GAP

QUESTIONS = (
    "How many square miles did the United States gain?",
    "What does the message say about the harbors of California?",
    "Which river is named?",
    "Who signed the treaty?",
)


def check_shape(message: Message, sender: Sender) -> None:
    """What holds for every message of whatever query."""
    positions = message.positions
    assert message.sender == sender.id and message.sender_positions == sender.positions
    assert positions[0] == 0, "position 0 is always kept"
    assert all(a < b for a, b in pairwise(positions)) and positions[-1] < sender.positions
    assert message.budget.positions == len(positions)
    assert message.spans == runs_of(positions)
    assert (message.token_ids is None) == (message.encoding == "text") != (message.text is None)
    assert 0 < message.voting_positions <= message.query_positions
    assert 0.0 < message.timings.engine_seconds <= message.timings.total_seconds


# --- budgets


@pytest.mark.parametrize("ratio", [1.0, 1.5, 3.7, 8, 50.0, 1e6])
def test_ratio_keeps_the_ceiling(client: CacheBack, sender: Sender, ratio: float) -> None:
    (message,) = client.messages(sender, [QUESTIONS[0]], ratio=ratio)
    check_shape(message, sender)
    assert len(message.positions) == math.ceil(sender.positions / ratio)
    assert message.budget.ratio == ratio and message.budget.budget is None


@pytest.mark.parametrize("budget", [1, 2, 17, 300, 10_000])
def test_budget_keeps_exactly_that_many(client: CacheBack, sender: Sender, budget: int) -> None:
    (message,) = client.messages(sender, [QUESTIONS[0]], budget=budget)
    check_shape(message, sender)
    assert len(message.positions) == min(budget, sender.positions)
    assert message.budget.budget == budget and message.budget.ratio is None


def test_budget_of_one_is_position_0(client: CacheBack, sender: Sender) -> None:
    (message,) = client.messages(sender, [QUESTIONS[1]], budget=1)
    assert message.positions == [0] and message.spans == [(0, 1)]


def test_default_ratio_is_8(client: CacheBack, sender: Sender) -> None:
    (message,) = client.messages(sender, [QUESTIONS[0]])
    assert message.budget.ratio == 8 and len(message.positions) == math.ceil(sender.positions / 8)


def test_a_smaller_budget_keeps_the_best_spans_of_a_larger_one(client: CacheBack, sender: Sender) -> None:
    """Whole spans first, by rank: what 65 positions keep beside the cut span, 129 keep too."""
    small, large = client.messages(
        sender, [Query(query=QUESTIONS[0], budget=65), Query(query=QUESTIONS[0], budget=129)], span_scores=True
    )
    assert small.span_scores is not None and small.span_scores == pytest.approx(large.span_scores)
    whole = {s for s in range(len(small.span_scores)) if set(range(16 * s, 16 * s + 16)) <= set(small.positions)}
    assert len(whole) >= 3
    assert {p for s in whole for p in range(16 * s, 16 * s + 16)} <= set(large.positions)


# --- encodings and options


def test_token_ids_are_the_sender_s(client: CacheBack, sender: Sender) -> None:
    ids = client.tokenize(excerpt("polk_1848"))
    (message,) = client.messages(sender, [QUESTIONS[0]], ratio=4, encoding="token_ids")
    check_shape(message, sender)
    assert message.token_ids == [ids[p] for p in message.positions]


def test_text_is_the_spans_with_gap_marks(client: CacheBack, sender: Sender) -> None:
    ids = client.tokenize(excerpt("polk_1848"))
    (message,) = client.messages(sender, [QUESTIONS[0]], ratio=4, encoding="text")
    check_shape(message, sender)
    texts = client.detokenize([ids[start:stop] for start, stop in message.spans])
    assert message.text == GAP.join(text for text in texts if text)
    assert len(message.text) > 200


def test_everything_kept_is_the_whole_text(client: CacheBack, sender: Sender) -> None:
    (message,) = client.messages(sender, [QUESTIONS[0]], ratio=1, encoding="text")
    assert message.text == excerpt("polk_1848")


def test_span_scores_on_request(client: CacheBack, sender: Sender) -> None:
    with_scores, without = client.messages(
        sender, [Query(query=QUESTIONS[0], span_scores=True, budget=16 * 4), QUESTIONS[0]]
    )
    assert without.span_scores is None
    scores = with_scores.span_scores
    assert scores is not None and len(scores) == math.ceil(sender.positions / 16)
    assert all(math.isfinite(score) and score >= 0 for score in scores)
    # Position 0 is pinned to the best score, so it may lift its span; the others rank as they stand.
    ranked = sorted(range(1, len(scores)), key=lambda s: -scores[s])
    assert set(range(16 * ranked[0], min(16 * ranked[0] + 16, sender.positions))) <= set(with_scores.positions)


def test_options_of_a_query_override_the_call_s(client: CacheBack, sender: Sender) -> None:
    ids = client.tokenize(QUESTIONS[1], add_special_tokens=False)
    total = sender.positions
    got = client.messages(
        sender,
        [
            QUESTIONS[0],
            Query(query=QUESTIONS[0], budget=20, encoding="token_ids"),
            Query(query=ids, ratio=2, selector="mean_query"),
            Query(query=QUESTIONS[0], query_template="{query}", span_scores=False),
            ids,
        ],
        ratio=16,
        encoding="text",
        span_scores=True,
    )
    assert [m.index for m in got] == list(range(5))
    for message in got:
        check_shape(message, sender)
    sixteenth = math.ceil(total / 16)
    assert [len(m.positions) for m in got] == [sixteenth, 20, math.ceil(total / 2), sixteenth, sixteenth]
    assert [m.encoding for m in got] == ["text", "token_ids", "text", "text", "text"]
    assert [m.selector for m in got] == ["cacheback", "cacheback", "mean_query", "cacheback", "cacheback"]
    assert [m.span_scores is None for m in got] == [False, False, False, True, False]
    assert got[1].budget.budget == 20 and got[1].budget.ratio is None, "the call's ratio is replaced"
    # Token ids are taken as they are, and all of them vote; so does a bare query.
    assert got[2].query_positions == got[2].voting_positions == len(ids)
    assert got[3].query_positions == got[3].voting_positions < got[0].query_positions


def test_only_the_question_s_own_rows_vote(client: CacheBack, sender: Sender) -> None:
    """The words around a question change what it is wrapped in, not how many rows vote."""
    templates = (
        "\n\nQuestion: {query}\nAnswer:",
        "\n\nA colleague who has not read any of this wants to know: {query}\nReply:",
        " {query}\n",
    )
    got = client.messages(sender, [Query(query=QUESTIONS[0], query_template=template) for template in templates])
    assert len({m.voting_positions for m in got}) == 1
    assert got[1].query_positions > got[0].query_positions > got[2].query_positions > got[2].voting_positions
    assert got[0].voting_positions == len(client.tokenize(" " + QUESTIONS[0], add_special_tokens=False))


def test_two_questions_get_two_messages(client: CacheBack, sender: Sender) -> None:
    messages = client.messages(sender, QUESTIONS, ratio=8)
    assert len({tuple(message.positions) for message in messages}) > 1
    assert len({message.id for message in messages}) == len(QUESTIONS)


# --- the cache


def test_a_repeated_query_finds_the_sender_and_no_more(client: CacheBack, sender: Sender) -> None:
    """The query's own rows are never served from the cache, or there would be nothing to score with."""
    first, second = (client.messages(sender, [QUESTIONS[2]], span_scores=True)[0] for _ in range(2))
    assert first.cached_positions == second.cached_positions == sender.positions
    assert first.positions == second.positions
    assert first.span_scores == pytest.approx(second.span_scores, rel=1e-4)


def test_an_evicted_sender_answers_the_same(server: ServedApi, client: CacheBack, sender: Sender) -> None:
    warm = client.messages(sender, QUESTIONS, ratio=8)
    server.flush()
    cold = client.messages(sender, QUESTIONS, ratio=8)
    assert [m.positions for m in cold] == [m.positions for m in warm]
    assert {m.cached_positions for m in warm} == {sender.positions}
    assert cold[0].cached_positions < sender.positions
    # The cold call put the sender back into the cache.
    assert client.messages(sender, [QUESTIONS[0]])[0].cached_positions == sender.positions


# --- streaming


def test_stream_has_every_message_and_then_done(client: CacheBack, http: httpx.Client, sender: Sender) -> None:
    body: dict[str, Any] = {"queries": list(QUESTIONS), "ratio": 8, "encoding": "text"}
    whole = http.post(f"/v1/senders/{sender.id}/messages", json=body).json()
    assert whole["object"] == "list" and [m["index"] for m in whole["data"]] == [0, 1, 2, 3]

    streamed = http.post(f"/v1/senders/{sender.id}/messages", json={**body, "stream": True})
    assert streamed.headers["content-type"].partition(";")[0] == "text/event-stream"
    events = sse_events(streamed.text)
    assert [name for name, _ in events] == ["message"] * 4 + ["done"]
    assert events[-1][1] == {}
    messages = sorted((Message(**data) for _, data in events[:-1]), key=lambda m: m.index)
    for one, other in zip(messages, whole["data"], strict=True):
        check_shape(one, sender)
        for name in (
            "object",
            "index",
            "encoding",
            "positions",
            "text",
            "budget",
            "query_positions",
            "voting_positions",
        ):
            assert one.model_dump(mode="json")[name] == other[name]

    by_client = {m.index: m.positions for m in client.stream_messages(sender, QUESTIONS, ratio=8)}
    assert [by_client[n] for n in range(4)] == [m.positions for m in messages]


# --- what it is all for


@pytest.mark.parametrize(
    "names",
    [
        ("polk-area", "polk-gold-diggers", "polk-quicksilver-crews"),
        ("clinton-budget", "clinton-long-term-care", "clinton-social-promotion"),
    ],
    ids=lambda names: names[0].partition("-")[0],
)
def test_messages_hold_the_evidence(client: CacheBack, names: tuple[str, ...]) -> None:
    """An eighth of a document, and the sentences that answer the question are in it, word for word."""
    cases = [CASES[name] for name in names]
    sender = client.create_sender(prompt=document(cases[0]))
    messages = client.messages(sender, [case.question for case in cases], ratio=8, encoding="text")
    found = [[gold in (m.text or "") for case in cases for gold in case.gold_texts()] for m in messages]
    owners = [number for number, case in enumerate(cases) for _ in case.gold_texts()]
    for number, case in enumerate(cases):
        own = [hit for hit, owner in zip(found[number], owners, strict=True) if owner == number]
        assert own and all(own), f"{case.id}: {case.gold_texts()} not in {messages[number].text!r}"
        assert not all(found[number]), "a message is made for its own question, not for every question"
        assert len(messages[number].positions) == math.ceil(sender.positions / 8)
    client.delete_sender(sender)


# --- many at once


def test_concurrent_calls_equal_calls_made_alone(server: ServedApi, client: CacheBack) -> None:
    """Eight receivers with four questions each, over three senders, one of them cold."""
    senders = [client.create_sender(prompt=excerpt(name)) for name in ("polk_1848", "clinton_1999", "moby_dick_line")]
    calls = [
        (senders[number % 3], [f"{question} Say it in {number + 2} words." for question in QUESTIONS], 4 + number)
        for number in range(8)
    ]

    def ask(call: tuple[Sender, list[str], int]) -> list[tuple[int, list[int], str | None]]:
        messages = client.messages(call[0], call[1], ratio=call[2], encoding="text")
        return [(m.index, m.positions, m.text) for m in messages]

    alone = [ask(call) for call in calls]
    server.flush()
    client.create_sender(prompt=excerpt("polk_1848"))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, calls))
    assert together == alone
    for sender in senders:
        client.delete_sender(sender)
