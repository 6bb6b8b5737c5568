"""What is private never leaves: in no encoding, by no selector, in no field, through no descendant of the sender."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from recording_engine import ALICE, RecordingEngine, ask, registered, row, run

from cb_kernels import selectors
from cb_sglang import wire
from cb_sglang.errors import BudgetError, InvalidRequestError
from cb_sglang.payload import from_base64
from cb_sglang.service import MessageService
from cb_sglang.spec import SPAN

PUBLIC, SECRET = 100, 777
"""The token of every public position, and that of every private one."""
PRIVATE = ((0, 1), (20, 23), (47, 48), (80, 90))
IDS = [SECRET if any(start <= p < stop for start, stop in PRIVATE) else PUBLIC for p in range(100)]
SPANS = [{"tokens": list(run)} for run in PRIVATE]
ENCODINGS: tuple[wire.Encoding, ...] = ("token_ids", "mixed", "embeddings", "text")
SELECTORS = tuple(selectors.names())


def is_private(position: int) -> bool:
    return any(start <= position < stop for start, stop in PRIVATE)


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def assert_public(engine: RecordingEngine, message: wire.Message) -> None:
    """No field of the message has a private position, its token, its character or its embedding."""
    assert message.positions and not any(map(is_private, message.positions))
    assert not any(is_private(p) for start, stop in message.spans for p in range(start, stop))
    assert SECRET not in numbers(message.model_dump(mode="json", exclude={"timings", "payload"}))
    assert engine.tokenizer.decode([SECRET]) not in json.dumps(message.model_dump(mode="json"), ensure_ascii=False)
    if message.payload is not None:
        payload = from_base64(message.payload)
        assert list(payload.positions) == message.positions
        assert SECRET not in (payload.token_ids or ())
        assert payload.rows is None or row(SECRET) not in payload.rows.data


def near_private(span: int) -> bool:
    """Whether a 16-position span holds a private position, or one that max-pooling (7 wide) carries into it."""
    return any(is_private(p) for p in range(max(0, span * SPAN - 3), (span + 1) * SPAN + 3))


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_encoding_and_no_selector_lets_it_out(encoding: wire.Encoding, selector: str) -> None:
    """All that a query finds is private, and the budget is all there is: yet nothing of it may come."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.score_of = lambda position: 1_000.0 if is_private(position) else 1.0
        sender = await registered(service, IDS, private=SPANS)
        query = engine.tokenizer.decode([SECRET])
        options: dict[str, Any] = {"encoding": encoding, "selector": selector, "span_scores": True}
        cuts: list[dict[str, Any]] = [{"budget": 100}, {"budget": 17}, {"coverage": 1.0}, {"coverage": 0.5}]
        for cut in cuts:
            (message,) = await ask(service, sender, query, **cut, **options)
            assert_public(engine, message)
            assert message.span_scores is not None and len(message.span_scores) == 7
            assert all(message.span_scores[n] is None for n in range(7) if near_private(n))
        (everything,) = await ask(service, sender, query, budget=100, **options)
        assert everything.positions == [p for p in range(100) if not is_private(p)]

    run(test)


@pytest.mark.parametrize("selector", SELECTORS)
def test_span_scores_do_not_depend_on_private_scores(selector: str) -> None:
    """Also not through position 0, which is pinned to the highest score there is."""
    told = []
    for secret in (1_000.0, 3.0):

        async def test(engine: RecordingEngine, service: MessageService, secret: float = secret) -> None:
            def smooth(position: int) -> float:
                return 1.0 + position / 100

            def pooled(position: int) -> float:
                """Raised next to what is private, as max-pooling does; 0 pinned, as the registry does."""
                near = any(is_private(p) for p in range(position - 3, position + 4) if 0 < p < 100)
                return secret if near or position == 0 else smooth(position)

            engine.score_of = pooled
            # Position 0 itself is public here.
            sender = await registered(service, [PUBLIC, *IDS[1:]], private=SPANS[1:])
            (message,) = await ask(service, sender, "a", budget=10, selector=selector, span_scores=True)
            told.append(message.span_scores)

        run(test)
    assert told[0] == told[1]


def test_private_rows_stay_too() -> None:
    """A latent row of the parent is an ordinary position of its child, and may be private there by inheritance."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        # Of the registered content the row cannot be private; of what it is received in, it can.
        source = await registered(service, [PUBLIC] * 4, latent_steps=1)
        (received,) = await ask(service, source, [5], budget=5)
        request = wire.SenderRequest(
            input_ids=[SECRET, PUBLIC], inherits=[received.id], private=[wire.PrivateSpan(tokens=(0, 1))]
        )
        sender = await service.senders.register(ALICE, request)
        assert (sender.inherited, sender.private_positions) == (5, 1)
        for encoding in ("mixed", "embeddings", "text"):
            (message,) = await ask(service, sender.id, [5], budget=7, encoding=encoding)
            assert message.positions == [0, 1, 2, 3, 4, 6]
            assert message.payload is None or row(SECRET) not in (from_base64(message.payload).rows or row).data

    run(test)


def test_descendants_keep_it() -> None:
    """Through extend twice, through messages by id and as objects, and through what follow-ups exclude."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.score_of = lambda position: 1_000.0 if is_private(position) else 1.0
        parent = await registered(service, IDS, private=SPANS)
        child = await service.senders.extend(ALICE, parent, wire.ExtendRequest(input_ids=[PUBLIC] * 4))
        grandchild = await service.senders.extend(
            ALICE, child.id, wire.ExtendRequest(input_ids=[SECRET], private=[wire.PrivateSpan(tokens=(0, 1))])
        )
        assert (child.private_positions, grandchild.private_positions) == (15, 16)
        seen: list[str] = []
        positions: set[int] = set()
        for name, encoding in itertools.product((parent, child.id, grandchild.id), ENCODINGS):
            (message,) = await ask(service, name, "a", budget=4, encoding=encoding)
            assert_public(engine, message)
        for _ in range(4):
            (message,) = await ask(service, grandchild.id, "a", budget=25, exclude=seen)
            assert_public(engine, message)
            assert not positions & set(message.positions)
            positions |= set(message.positions)
            seen.append(message.id)
        assert len(positions) == 105 - 16
        with pytest.raises(InvalidRequestError, match="no position is left"):
            await ask(service, grandchild.id, "a", budget=25, exclude=seen)
        blocks, _ = await service.blocks(ALICE, wire.ChatExtension(messages=list(seen)), "")
        assert all(block.part is not None and SECRET not in block.part.input_ids for block in blocks)

    run(test)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_record_says_which_positions_left(encoding: wire.Encoding) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, IDS, private=SPANS)
        (message,) = await ask(service, sender, "a", budget=30, encoding=encoding)
        (entry,) = (await service.senders.audit(ALICE, sender)).data
        assert (entry.message, entry.spans) == (message.id, message.spans)

    run(test)


def test_all_private_has_nothing_to_send() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, [SECRET] * 5, private=[{"tokens": [0, 3]}, {"tokens": [2, 5]}])
        with pytest.raises(InvalidRequestError, match="no position is left") as caught:
            await ask(service, sender, "a", budget=5)
        assert caught.value.param == "queries[0]" and engine.scored == []

    run(test)


def test_latent_rows_are_kept_beside_a_private_start() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, IDS, private=SPANS, latent_steps=2)
        (message,) = await ask(service, sender, "a", budget=2)
        assert message.positions == [100, 101], "position 0 is private, and no budget is held for it"
        with pytest.raises(BudgetError, match="ask for at least 2"):
            await ask(service, sender, "a", budget=1)

    run(test)


def parts(text: str, chars: Sequence[int]) -> str:
    return text[chars[0] : chars[1]]


def test_characters_and_roles_are_marked_in_the_text() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        prompt = "the key is 4711, the door is green"
        chars = [11, 15]
        assert parts(prompt, chars) == "4711"
        request = wire.SenderRequest(prompt=prompt, private=[wire.PrivateSpan(chars=(chars[0], chars[1]))])
        sender = await service.senders.register(ALICE, request)
        (message,) = await ask(service, sender.id, "a", budget=99, encoding="text")
        assert message.text is not None and message.text.replace(" [...] ", "") == "the key is , the door is green"

        engine.tokenizer.chat_template = "any"
        turns = [wire.ChatMessage(role="system", content=" 4711 "), wire.ChatMessage(role="user", content="green door")]
        chat = wire.SenderRequest(messages=turns, private=[wire.PrivateSpan(role="system")])
        sender = await service.senders.register(ALICE, chat)
        (message,) = await ask(service, sender.id, "a", budget=99, encoding="text")
        assert message.text == "system:  [...] ;user: green door;"

    run(test)
