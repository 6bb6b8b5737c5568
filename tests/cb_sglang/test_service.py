"""The message service on an engine that only records what it is asked: options, bounds, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from cb_sglang import wire
from cb_sglang.errors import (
    CacheBackError,
    CapacityError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    SenderNotFoundError,
)
from cb_sglang.seam.engine import Scored
from cb_sglang.service import MessageService, Settings
from cb_sglang.spec import ScoringSpec

VOCABULARY = 1_000
BOS = 2
DOCUMENT = list(range(100, 200))


class Letters:
    """A tokenizer with one token a character, BOS before a text unless told not to."""

    is_fast = True
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [10 + ord(c) for c in text]

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping
        return {
            "input_ids": self.encode(text, add_special_tokens),
            "offset_mapping": [(n, n + 1) for n in range(len(text))],
        }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i - 10) for i in ids if i != BOS)

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> list[int]:
        if turns[0]["role"] == "villain":
            raise RuntimeError("no such role")
        return self.encode("".join(f"{turn['role']}:{turn['content']};" for turn in turns))


@dataclass
class RecordingEngine:
    """Keeps the first ``budget`` positions; ``hold`` stops it until set, ``fail`` makes it fail."""

    max_input: int = 150
    vocab_size: int = VOCABULARY
    fingerprint: str = "model"
    tokenizer: Letters = field(default_factory=Letters)
    hold: asyncio.Event | None = None
    fail: Exception | None = None
    prefills: list[list[int]] = field(default_factory=list)
    cancelled: int = 0
    scored: list[tuple[list[int], ScoringSpec]] = field(default_factory=list)
    closed: int = 0

    async def tokenizing(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    async def prefill(self, input_ids: list[int]) -> int:
        self.prefills.append(input_ids)
        try:
            await self._work()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 7

    async def score(self, requests: Sequence[tuple[list[int], ScoringSpec]]) -> AsyncGenerator[Scored, None]:
        self.scored += requests
        try:
            # The last query finishes first.
            for index in reversed(range(len(requests))):
                await self._work()
                spec = requests[index][1]
                scores = [0.5] if spec.want_scores else None
                yield Scored(index, list(range(spec.budget)), scores, spec.sender_len, 0.25)
        finally:
            self.closed += 1

    async def _work(self) -> None:
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        if self.fail is not None:
            raise self.fail


def run(test: Callable[[RecordingEngine, MessageService], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """A test with an engine and a service on a loop of its own; it must leave no task behind."""

    async def main() -> None:
        engine = RecordingEngine()
        async with asyncio.timeout(20):
            await test(engine, MessageService(engine, Settings(**settings)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def registered(service: MessageService, ids: list[int] = DOCUMENT) -> str:
    return (await service.register(wire.SenderRequest(input_ids=ids))).id


async def ask(service: MessageService, sender_id: str, *queries: Any, **options: Any) -> list[wire.Message]:
    request = wire.MessagesRequest(queries=list(queries), **options)
    return [message async for message in service.messages(sender_id, request)]


# --- registering


def test_register_prefills_and_reports() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await service.register(wire.SenderRequest(prompt="ab"))
        assert engine.prefills == [[BOS, 107, 108]], "a prompt gets the tokenizer's BOS"
        assert (sender.positions, sender.cached_positions) == (3, 7)
        again = await service.register(wire.SenderRequest(input_ids=[BOS, 107, 108]))
        assert again == sender
        # Registered again means cached again: the KV may have been evicted meanwhile.
        assert len(engine.prefills) == 2

    run(test)


def test_the_model_is_part_of_the_id() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        first = await registered(service)
        engine.fingerprint = "the same model with new weights"
        assert await registered(service) != first

    run(test)


def test_messages_go_through_the_chat_template() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        request = wire.SenderRequest(messages=[wire.ChatMessage(role="u", content="hi")])
        with pytest.raises(InvalidRequestError, match="no chat template; send the content as prompt") as caught:
            await service.register(request)
        assert caught.value.param == "messages"
        engine.tokenizer.chat_template = "any"
        await service.register(request)
        assert engine.tokenizer.decode(engine.prefills[0]) == "u:hi;"

        villain = wire.SenderRequest(messages=[wire.ChatMessage(role="villain", content="hi")])
        with pytest.raises(InvalidRequestError, match="refused these messages: no such role") as caught:
            await service.register(villain)
        assert caught.value.param == "messages"

    run(test)


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        ({"input_ids": [5, VOCABULARY]}, InvalidRequestError, "input_ids"),
        ({"input_ids": [5] * 150}, ContextLengthError, "input_ids"),
        ({"prompt": "x" * 149}, ContextLengthError, "prompt"),
        ({"prompt": "x" * 149, "input_ids": None}, ContextLengthError, "prompt"),
    ],
)
def test_refused_senders_are_not_prefilled(request_: dict[str, Any], error: type[CacheBackError], param: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        with pytest.raises(error) as caught:
            await service.register(wire.SenderRequest(**request_))
        assert caught.value.param == param
        assert engine.prefills == [] and service.senders.list() == []

    run(test)


def test_the_longest_sender_leaves_room_for_one_query_token() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        longest = await registered(service, [5] * 149)
        assert len(await ask(service, longest, [6])) == 1
        with pytest.raises(ContextLengthError, match="come to 151 positions"):
            await ask(service, longest, [6, 7])

    run(test)


def test_a_full_registry_refuses_before_prefilling() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        first = await registered(service)
        with pytest.raises(CapacityError):
            await registered(service, [1, 2, 3])
        assert len(engine.prefills) == 1
        service.forget(first)
        await registered(service, [1, 2, 3])

    run(test, max_senders=1)


def test_a_failed_prefill_registers_nothing_and_can_be_tried_again() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.fail = EngineError("out of order")
        both = await asyncio.gather(registered(service), registered(service), return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in both)
        assert service.senders.list() == []
        engine.fail = None
        await registered(service)
        assert len(engine.prefills) == 2

    run(test)


# --- one prefill for all who wait


def test_registered_at_once_is_prefilled_once() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.hold = asyncio.Event()
        callers = [asyncio.create_task(registered(service)) for _ in range(5)]
        other = asyncio.create_task(registered(service, [1, 2, 3]))
        await settle()
        assert engine.prefills == [DOCUMENT, [1, 2, 3]]
        engine.hold.set()
        assert len(set(await asyncio.gather(*callers))) == 1
        await other

    run(test)


def test_a_caller_who_leaves_takes_nothing_from_the_others() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.hold = asyncio.Event()
        leaving, staying = (asyncio.create_task(registered(service)) for _ in range(2))
        await settle()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert engine.cancelled == 0
        engine.hold.set()
        assert (await staying).startswith("snd_")
        assert len(engine.prefills) == 1

    run(test)


def test_the_last_to_leave_stops_the_prefill() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.hold = asyncio.Event()
        callers = [asyncio.create_task(registered(service)) for _ in range(2)]
        await settle()
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        # Whoever comes at this very moment must not be handed the cancelled one.
        engine.hold.set()
        await registered(service)
        assert (engine.cancelled, len(engine.prefills)) == (1, 2)

    run(test)


# --- what the engine is asked


def test_a_query_is_wrapped_and_only_its_own_rows_vote() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        await ask(service, sender, "who?", ratio=8)
        ((ids, spec),) = engine.scored
        assert ids[:100] == DOCUMENT and engine.tokenizer.decode(ids[100:]) == "<who?>"
        assert spec == ScoringSpec(sender_len=100, vote_start=1, vote_stop=5, budget=13)

    run(test, query_template="<{query}>")


def test_token_ids_are_not_wrapped_and_all_vote() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        await ask(service, await registered(service), [7, 8, 9], budget=5)
        ((ids, spec),) = engine.scored
        assert ids == [*DOCUMENT, 7, 8, 9]
        assert (spec.vote_start, spec.vote_stop, spec.budget) == (0, 3, 5)

    run(test)


@pytest.mark.parametrize(
    ("call", "own", "budget"),
    [
        ({}, {}, 13),  # an eighth of 100
        ({"ratio": 4}, {}, 25),
        ({"budget": 7}, {}, 7),
        ({"budget": 101}, {}, 100),
        ({"ratio": 4}, {"ratio": 2}, 50),
        ({"ratio": 4}, {"budget": 9}, 9),
        ({"budget": 7}, {"ratio": 2}, 50),
        ({"budget": 7}, {"budget": 9}, 9),
    ],
)
def test_a_query_s_budget_replaces_the_call_s(call: dict[str, Any], own: dict[str, Any], budget: int) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        (message,) = await ask(service, await registered(service), wire.Query(query="who?", **own), **call)
        assert engine.scored[0][1].budget == message.budget.positions == len(message.positions) == budget
        asked = own or call or {"ratio": 8.0}
        assert {"ratio": message.budget.ratio, "budget": message.budget.budget} == {
            "ratio": None,
            "budget": None,
            **asked,
        }

    run(test)


def test_other_options_are_inherited_one_by_one() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        queries = ["a", wire.Query(query="b", selector="cacheback", query_template="[{query}]", span_scores=False)]
        options = {"selector": "mean_query", "encoding": "text", "span_scores": True, "query_template": "({query})"}
        messages = sorted(await ask(service, await registered(service), *queries, **options), key=lambda m: m.index)
        specs = [spec for _, spec in engine.scored]
        assert [spec.selector for spec in specs] == [m.selector for m in messages] == ["mean_query", "cacheback"]
        assert [spec.want_scores for spec in specs] == [True, False]
        assert [m.span_scores for m in messages] == [[0.5], None]
        assert [m.encoding for m in messages] == ["text", "text"]
        assert [engine.tokenizer.decode(ids[100:]) for ids, _ in engine.scored] == ["(a)", "[b]"]

    run(test)


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

    run(test)


def test_text_encoding() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        (message,) = await ask(service, await registered(service), "a", budget=3, encoding="text")
        assert message.text == engine.tokenizer.decode(DOCUMENT[:3]) and message.token_ids is None

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


def test_unknown_senders_are_refused_at_once() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        request = wire.MessagesRequest(queries=["a"])
        with pytest.raises(SenderNotFoundError):
            service.messages("snd_unknown", request)
        with pytest.raises(SenderNotFoundError):
            service.forget("snd_unknown")

    run(test)


def test_a_sender_deleted_meanwhile_still_answers() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        messages = service.messages(sender, wire.MessagesRequest(queries=["a", "b"]))
        service.forget(sender)
        assert len([message async for message in messages]) == 2

    run(test)


def test_a_bad_operator_template_stops_the_start() -> None:
    with pytest.raises(InvalidRequestError, match="exactly once"):
        Settings(query_template="no place")


# --- failing and leaving


def test_a_failing_engine_fails_the_call() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.fail = EngineError("out of order")
        with pytest.raises(EngineError, match="out of order"):
            await ask(service, sender, "a", "b")
        assert engine.closed == 1

    run(test)


def test_leaving_closes_the_engine_s_work() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        async with aclosing(service.messages(sender, wire.MessagesRequest(queries=["a", "b", "c"]))) as messages:
            await anext(messages)
        assert engine.closed == 1

        engine.hold = asyncio.Event()
        waiting = asyncio.create_task(ask(service, sender, "a"))
        await settle()
        assert engine.closed == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await settle()
        assert engine.closed == 2

    run(test)
