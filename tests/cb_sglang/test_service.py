"""The message service on an engine without a model: options, bounds, grants, and what is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from recording_engine import (
    ALICE,
    BOB,
    DOCUMENT,
    VOCABULARY,
    RecordingEngine,
    ask,
    assert_idle,
    registered,
    row,
    run,
    settle,
)

from cb_sglang import wire
from cb_sglang.admission import AdmissionLimits
from cb_sglang.errors import (
    BudgetError,
    CacheBackError,
    CapacityError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    SenderNotFoundError,
    StoreError,
)
from cb_sglang.payload import from_base64
from cb_sglang.seam.engine import EngineLoad
from cb_sglang.service import MessageService
from cb_sglang.settings import Settings
from cb_sglang.spec import ScoringSpec

# --- what the engine is asked


def test_a_query_is_wrapped_and_only_its_own_rows_vote() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        await ask(service, sender, "who?", ratio=8)
        ((context, spec),) = engine.scored
        ids = context.input_ids
        assert ids[:100] == DOCUMENT and engine.tokenizer.decode(ids[100:]) == "<who?>"
        assert spec == ScoringSpec(sender_len=100, vote_start=1, vote_stop=5, budget=13)
        assert context.namespace == engine.prefills[0].namespace, "where the sender's KV is"

    run(test, query_template="<{query}>")


def test_token_ids_are_not_wrapped_and_all_vote() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        await ask(service, await registered(service), [7, 8, 9], budget=5)
        ((context, spec),) = engine.scored
        assert context.input_ids == [*DOCUMENT, 7, 8, 9]
        assert (spec.vote_start, spec.vote_stop, spec.budget) == (0, 3, 5)

    run(test)


@pytest.mark.parametrize(
    ("call", "own", "budget"),
    [
        ({}, {}, 13),  # an eighth of 100
        ({"ratio": 4}, {}, 25),
        ({"budget": 7}, {}, 7),
        ({"budget": 101}, {}, 100),
        ({"coverage": 0.5}, {}, 100),  # the engine finds a smaller one
        ({"ratio": 4}, {"ratio": 2}, 50),
        ({"ratio": 4}, {"budget": 9}, 9),
        ({"budget": 7}, {"ratio": 2}, 50),
        ({"budget": 7}, {"budget": 9}, 9),
        ({"coverage": 0.5}, {"budget": 9}, 9),
        ({"budget": 7}, {"coverage": 0.5}, 100),
    ],
)
def test_a_query_s_budget_replaces_the_call_s(call: dict[str, Any], own: dict[str, Any], budget: int) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        (message,) = await ask(service, await registered(service), wire.Query(query="who?", **own), **call)
        (_, spec) = engine.scored[0]
        assert spec.budget == message.budget.positions == len(message.positions) == budget
        asked = own or call or {"ratio": 8.0}
        assert spec.coverage == asked.get("coverage", 0.0)
        reported = {name: getattr(message.budget, name) for name in ("ratio", "budget", "coverage")}
        assert reported == {"ratio": None, "budget": None, "coverage": None, **asked}

    run(test)


def test_other_options_are_inherited_one_by_one() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        queries = ["a", wire.Query(query="b", selector="cacheback", query_template="[{query}]", span_scores=False)]
        options = {"selector": "mean_query", "encoding": "text", "span_scores": True, "query_template": "({query})"}
        messages = sorted(await ask(service, await registered(service), *queries, **options), key=lambda m: m.index)
        specs = [spec for _, spec in engine.scored]
        assert [spec.selector for spec in specs] == [m.selector for m in messages] == ["mean_query", "cacheback"]
        assert [spec.want_scores for spec in specs] == [True, False]
        assert [m.span_scores is None for m in messages] == [False, True]
        assert messages[0].span_scores is not None and len(messages[0].span_scores) == 7
        assert [m.encoding for m in messages] == ["text", "text"]
        asked = [engine.tokenizer.decode(context.input_ids[100:]) for context, _ in engine.scored]
        assert asked == ["(a)", "[b]"]

    run(test)


def test_the_work_of_one_call_comes_in_bounded_batches() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        messages = await ask(service, sender, *([5] * 3 for _ in range(8)), budget=3)
        assert sorted(message.index for message in messages) == list(range(8))
        # A quarter of the 24 rows that may run at once.
        assert [len(batch) for batch in engine.batches] == [2, 2, 2, 2]
        assert len(await ask(service, sender, [5] * 30, budget=3)) == 1, "one larger query runs alone"

    run(test, admission=AdmissionLimits(max_running_rows=24))


# --- what comes back


def test_messages_come_as_they_finish_and_say_whose_they_are() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        messages = await ask(service, sender, "a", "bb", "ccc", budget=3)
        assert [m.index for m in messages] == [2, 1, 0]
        assert len({m.id for m in messages}) == 3
        last = messages[0]
        assert last.positions == [0, 1, 2] and last.spans == [(0, 3)] and last.token_ids == DOCUMENT[:3]
        assert last.text is None and last.sender == sender and last.sender_positions == 100
        assert last.query_positions - last.voting_positions == len("\n\nQuestion: \nAnswer:")
        assert last.voting_positions == 3 and last.cached_positions == 100
        assert last.timings.engine_seconds == 0.25
        assert (last.model_fingerprint, last.tokenizer_fingerprint) == ("model", "tokenizer")
        assert last.size is not None and last.payload_bytes == 12
        assert (last.size.against_full_kv, last.size.against_embeddings) == (100 * 1024 / 12, 3 * 16 / 12)

    run(test)


@pytest.mark.parametrize("latent", [0, 2])
@pytest.mark.parametrize("encoding", [None, "token_ids", "mixed", "embeddings", "text"])
def test_encodings_hold_the_kept_positions_and_nothing_else(encoding: wire.Encoding | None, latent: int) -> None:
    """The embedding of token n is n in every place; the latent rows are -1 and -2."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, latent_steps=latent)
        if latent and encoding == "token_ids":
            with pytest.raises(InvalidRequestError, match="ask for mixed or embeddings") as caught:
                await ask(service, sender, "a", budget=3, encoding=encoding)
            assert caught.value.param == "encoding"
            return
        (message,) = await ask(service, sender, "a", budget=3 + latent, encoding=encoding)
        assert message.encoding == (encoding or ("mixed" if latent else "token_ids"))
        kept = [0, 1, 2, *range(100, 100 + latent)]
        tokens = [*DOCUMENT[:3], *[0] * latent]
        assert message.positions == kept
        assert message.token_ids == (tokens if message.encoding in ("token_ids", "mixed") else None)
        assert message.text == (engine.tokenizer.decode(DOCUMENT[:3]) if encoding == "text" else None)
        if message.encoding not in ("mixed", "embeddings"):
            assert message.payload is None
            return
        assert message.payload is not None
        payload = from_base64(message.payload)
        assert payload.positions == tuple(kept) and payload.rows is not None
        rolled = [-1.0 - n for n in range(latent)]
        numbers = rolled if message.encoding == "mixed" else [*map(float, DOCUMENT[:3]), *rolled]
        assert payload.rows.data == b"".join(map(row, numbers))
        assert payload.rows.positions == tuple(range(3 + latent - len(numbers), 3 + latent))

    run(test)


@pytest.mark.parametrize("selector", ["cacheback", "snapkv", "streaming_llm", "bm25"])
def test_latent_rows_are_always_kept(selector: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, latent_steps=3)
        (message,) = await ask(service, sender, "a", budget=4, selector=selector)
        assert message.positions == [0, 100, 101, 102]
        with pytest.raises(BudgetError, match="ask for at least 4") as caught:
            await ask(service, sender, "a", budget=3, selector=selector)
        assert caught.value.param == "budget"

    run(test)


@pytest.mark.parametrize("selector", ["random", "streaming_llm", "snapkv", "chunkkv", "h2o", "kvzip", "bm25"])
def test_selectors_that_need_no_query_rows_need_no_scoring_pass(selector: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        first = await ask(service, sender, "a", "b", budget=20, selector=selector)
        measured = len(engine.measured)
        second = await ask(service, sender, [5], budget=20, selector=selector)
        assert engine.scored == [] and len(engine.measured) == measured, "measured once a sender"
        assert [len(message.positions) for message in first + second] == [20] * 3
        assert first[0].cached_positions == 100

    run(test)


def test_coverage_takes_no_more_spans_than_it_must() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        # Of 100 units of score 64 lie in the second span, and 32 in the fourth.
        engine.score_of = {p: 4.0 if 16 <= p < 32 else 2.0 if 48 <= p < 64 else 0.0 for p in range(100)}.__getitem__
        sender = await registered(service)
        for coverage, spans in ((0.5, [(0, 1), (16, 32)]), (0.9, [(0, 1), (16, 32), (48, 64)])):
            options: dict[str, Any] = {"selector": "h2o", "coverage": coverage}
            (message,) = await ask(service, sender, "a", **options, selector_options={"sink_free": True})
            kept = [span for span in message.spans if span != (0, 16)]
            assert kept[-1] == spans[-1] and message.budget.coverage == coverage
            assert len(message.positions) <= 16 + sum(stop - start for start, stop in spans[1:])

    run(test)


# --- what is refused


@pytest.mark.parametrize(
    ("queries", "options", "param"),
    [
        (["a", " "], {}, "queries[1]"),
        (["a", [VOCABULARY]], {}, "queries[1]"),
        (["a", "x" * 60], {}, "queries[1]"),
        (["a"], {"selector": "oracle"}, "selector"),
        (["a", wire.Query(query="b", selector="oracle")], {}, "queries[1].selector"),
        ([wire.Query(query="b", budget=3)], {"selector": "oracle"}, "selector"),
        (["a"], {"query_template": "none"}, "query_template"),
        (["a", wire.Query(query="b", query_template="none")], {}, "queries[1].query_template"),
    ],
)
def test_one_refused_query_refuses_the_call(queries: list[Any], options: dict[str, Any], param: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await ask(service, await registered(service), *queries, **options)
        assert caught.value.param == param and caught.value.status == 400
        assert engine.scored == [], "nothing was computed"

    run(test)


def test_the_longest_sender_leaves_room_for_one_query_token() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        longest = await registered(service, [5] * 149)
        assert len(await ask(service, longest, [6])) == 1
        with pytest.raises(ContextLengthError, match="come to 151 positions"):
            await ask(service, longest, [6, 7])

    run(test)


def test_unknown_senders_are_refused_at_once() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        request = wire.MessagesRequest(queries=["a"])
        with pytest.raises(SenderNotFoundError):
            service.messages(ALICE, "snd_unknown", request)

    run(test)


def test_a_sender_deleted_meanwhile_still_answers() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        messages = service.messages(ALICE, sender, wire.MessagesRequest(queries=["a", "b"]))
        await service.forget(ALICE, sender)
        assert len([message async for message in messages]) == 2

    run(test)


@pytest.mark.parametrize(
    "wrong",
    [{"query_template": "no place"}, {"max_registrations": 0}, {"max_audit": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_settings_stop_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Settings(**wrong)
    assert caught.value.param in wrong


# --- grants


def test_a_grant_is_what_the_message_has_and_says_what_bound_it() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        receiver = wire.Receiver(context_length=60, prompt_positions=20, reserved_output=10, senders=2)
        (message,) = await ask(service, sender, "a", budget=50, receiver=receiver)
        assert message.grant is not None
        assert (message.grant.asked, message.grant.granted, message.grant.limit) == (50, 15, "window")
        assert len(message.positions) == 15
        engine.used = engine.pool_positions - 80
        few, more = await ask(service, sender, "a", "b", budget=50)
        assert len(few.positions) == len(more.positions) == 40, "the two fit together"
        assert {each.grant.limit for each in (few, more) if each.grant} <= {"share", "pool"}
        (fit,) = await ask(service, sender, "a", budget=100, policy="fit", min_budget=5)
        assert fit.grant is not None and (fit.grant.granted, fit.grant.limit) == (80, "pool")
        with pytest.raises(ContextLengthError):
            await ask(service, sender, "a", budget=50, policy="fixed", receiver=receiver)

    run(test)


def test_what_does_not_fit_now_waits_until_its_deadline() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.used = engine.pool_positions - 5
        with pytest.raises(CapacityError, match="are usable now"):
            await ask(service, sender, "a", budget=50, policy="fixed", deadline=0.01)
        assert_idle(service)
        assert engine.scored == []
        waiting = asyncio.create_task(ask(service, sender, "a", budget=50, policy="fixed"))
        await settle()
        assert service.grants.waiting == 1 and not waiting.done()
        engine.used = 0
        (message,) = await waiting
        assert len(message.positions) == 50

    run(test)


def test_capacity_counts_the_receivers_there_are() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.used = 1_000
        idle = await service.capacity(ALICE)
        assert (idle.receivers, idle.used_positions, idle.running, idle.grant.granted) == (0, 1_000, 0, 2_000)
        engine.hold = asyncio.Event()
        running = asyncio.create_task(ask(service, sender, "a", budget=50))
        await settle()
        busy = await service.capacity(ALICE)
        assert busy.running == 1 and service.grants.granted_positions == 50
        engine.used = engine.pool_positions
        full = await service.capacity(ALICE)
        assert (full.grant.granted, full.grant.limit) == (0, "pool")
        engine.used = 0
        engine.hold.set()
        await running

    run(test)


def test_a_chat_over_several_senders_is_one_receiver() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        senders = [await registered(service, [n] * 80) for n in (1, 2, 3)]
        engine.used = engine.pool_positions - 220  # each message for three would be more than the pool
        engine.hold = asyncio.Event()
        receiver = wire.Receiver(prompt_positions=30, reserved_output=40)
        wanted = wire.ChatExtension(senders=senders, budget=50, receiver=receiver)
        chat = asyncio.create_task(service.blocks(ALICE, wanted, "a"))
        await settle()
        assert (service.grants.waiting, service.grants.granted_positions) == (0, 220)
        engine.hold.set()
        blocks, _ = await chat
        assert [len(block.part.input_ids) for block in blocks if block.part] == [50, 50, 50]

    run(test)


# --- failing and leaving: however a call ends, ``run`` finds its places and grants given back


class BrokenLoad(RecordingEngine):
    async def load(self) -> EngineLoad:
        raise EngineError("no load")


def test_a_failing_engine_fails_the_call() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.fail = EngineError("out of order")
        with pytest.raises(EngineError, match="out of order"):
            await ask(service, sender, "a", "b")
        assert engine.closed == 1
        assert_idle(service)
        with pytest.raises(EngineError, match="out of order"):
            await ask(service, sender, "a", "b", selector="snapkv")
        assert_idle(service)
        service.grants.engine = BrokenLoad()  # type: ignore[assignment]
        with pytest.raises(EngineError, match="no load"):
            await ask(service, sender, "a", "b")

    run(test)


def test_leaving_closes_the_engine_s_work() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        request = wire.MessagesRequest(queries=["a", "b", "c"])
        async with aclosing(service.messages(ALICE, sender, request)) as messages:
            await anext(messages)
            assert service.grants.granted_positions > 0, "held until all is sent"
        assert engine.closed == 1
        assert_idle(service)

        engine.hold = asyncio.Event()
        waiting = asyncio.create_task(ask(service, sender, "a"))
        await settle()
        assert engine.closed == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert engine.closed == 2

    run(test)


def test_leaving_the_queue_gives_the_place_to_the_next() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.hold = asyncio.Event()
        first, leaving, next_ = (asyncio.create_task(ask(service, sender, [5], budget=3)) for _ in range(3))
        await settle()
        load = service.admission.snapshot()
        assert (load.running.requests, load.queued.requests) == (1, 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        engine.hold.set()
        assert len((await first) + (await next_)) == 2
        assert len(engine.batches) == 2, "who left was never scored"

    run(test, admission=AdmissionLimits(max_running_rows=1, tenant_share=1.0))


def test_waiting_longer_than_the_deadline_ends_a_call() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.hold = asyncio.Event()
        first = asyncio.create_task(ask(service, sender, [5], budget=3))
        await settle()
        with pytest.raises(CapacityError, match="without a turn"):
            await ask(service, sender, [5], budget=3, deadline=0.01)
        engine.hold.set()
        await first

    run(test, admission=AdmissionLimits(max_running_rows=1, tenant_share=1.0))


def test_a_call_does_not_wait_for_one_that_waits_for_it() -> None:
    """The pool is granted to the first call, whose second query waits for the place of one that waits for the pool."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender, other = await registered(service), await registered(service, [8] * 50)
        engine.used = engine.pool_positions - 60
        options: dict[str, Any] = {"budget": 30, "policy": "fixed", "deadline": 0.5}
        engine.hold = asyncio.Event()
        first = asyncio.create_task(ask(service, sender, [5], [6], **options))
        await settle()
        second = asyncio.create_task(ask(service, other, [7], **options | {"budget": 40}))
        await settle()
        engine.hold.set()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []

    run(test, admission=AdmissionLimits(max_running_rows=1, tenant_share=1.0))


# --- the record


def test_a_message_is_on_record_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        receiver = wire.Receiver(label="team 7")
        request = wire.MessagesRequest(queries=["a", "b"], budget=3, receiver=receiver)
        async with aclosing(service.messages(ALICE, sender, request)) as messages:
            async for made in messages:
                (newest, *_) = (await service.senders.audit(ALICE, sender)).data
                assert (newest.message, newest.receiver) == (made.message.id, "team 7")
                assert (newest.spans, newest.encoding) == ([(0, 3)], "token_ids")

        def fail(*args: Any) -> None:
            raise StoreError("disk full")

        monkeypatch.setattr(service.senders._audit, "record", fail)
        sent: list[wire.Message] = []
        with pytest.raises(StoreError):
            sent += await ask(service, sender, "a", "b")
        assert sent == []
        monkeypatch.undo()
        assert len((await service.senders.audit(ALICE, sender)).data) == 2

    run(test)


# --- transfers


async def pairs(service: MessageService, **request: Any) -> list[wire.Transfer]:
    made: AsyncGenerator[wire.Transfer, None] = service.transfers(ALICE, wire.TransfersRequest(**request))
    return sorted([pair async for pair in made], key=lambda pair: (pair.sender, pair.query))


def test_a_pair_that_fails_fails_alone() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        mine, foreign = await registered(service), await registered(service, tenant=BOB)
        absent = "snd_" + "f" * 32
        found = await pairs(service, senders=[mine, foreign, absent], queries=["a", " "], budget=3)
        outcome = {(pair.sender, pair.query): pair for pair in found}
        assert len(outcome) == 6
        made = outcome[mine, 0].message
        assert made is not None and (made.sender, made.index, len(made.positions)) == (mine, 0, 3)
        blank = outcome[mine, 1].error
        assert blank is not None and blank.param == "queries[1]"
        for query in (0, 1):
            assert outcome[foreign, query].error == outcome[absent, query].error
            assert outcome[foreign, query].message is None

    run(test)


def test_leaving_transfers_ends_every_pair() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        senders = [await registered(service, [n] * 20) for n in range(5, 9)]
        request = wire.TransfersRequest(senders=senders, queries=["a", "b"])
        async with aclosing(service.transfers(ALICE, request)) as made:
            await anext(made)
        assert engine.closed == len(engine.batches)

    run(test)


def test_what_nobody_expected_is_told_without_its_text() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.fail = RuntimeError("a secret bug")
        (transfer,) = await pairs(service, senders=[sender], queries=["a"])
        assert transfer.message is None and transfer.error is not None
        assert transfer.error.code == "internal_error" and "secret" not in transfer.error.message

    run(test)


# --- what a chat is answered from


def test_one_block_a_sender_in_the_order_asked() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        senders = [await registered(service, [n] * 20) for n in (7, 5, 6)]
        wanted = wire.ChatExtension(senders=senders, budget=2)
        blocks, ids = await service.blocks(ALICE, wanted, "who?")
        assert [block.label for block in blocks] == senders
        assert [block.part is not None and block.part.input_ids for block in blocks] == [[7] * 2, [5] * 2, [6] * 2]
        records = [(await service.senders.audit(ALICE, sender)).data[0].message for sender in senders]
        assert ids == records
        asked = {engine.tokenizer.decode(context.input_ids[20:]) for context, _ in engine.scored}
        assert asked == {"\n\nQuestion: who?\nAnswer:"}

    run(test)


@pytest.mark.parametrize("encoding", ["token_ids", "mixed", "embeddings", "text"])
def test_given_messages_are_read_by_id_and_as_objects(encoding: wire.Encoding) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        latent = 0 if encoding == "token_ids" else 1
        sender = await registered(service, latent_steps=latent)
        (message,) = await ask(service, sender, "a", budget=3, encoding=encoding)
        received = wire.ReceivedMessage(**message.model_dump())
        wanted = wire.ChatExtension(messages=[message.id, received])
        (by_id, as_object), ids = await service.blocks(ALICE, wanted, "")
        assert ids == [message.id] * 2
        assert by_id.label == as_object.label == sender
        if encoding == "text":
            assert by_id.text == as_object.text == message.text
            return
        assert by_id.part is not None and as_object.part is not None
        if encoding == "embeddings":
            # Rows for all positions against token ids with rows where there are no tokens: the same sequence.
            assert as_object.part.input_ids == [0] * 3
        else:
            assert by_id.part == as_object.part
        assert by_id.part.input_ids == [*DOCUMENT[: 3 - latent], *[0] * latent]
        assert (by_id.part.rows is not None) == bool(latent)

    run(test)


def test_a_chat_fails_as_a_whole_and_leaves_nothing() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        wanted = wire.ChatExtension(senders=[sender, "snd_absent"])
        with pytest.raises(CacheBackError) as caught:
            await service.blocks(ALICE, wanted, "who?")
        assert caught.value.status == 404

    run(test)
