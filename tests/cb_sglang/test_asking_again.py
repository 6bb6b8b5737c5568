"""Follow-ups: ``exclude`` and ``since`` bring what the receiver has not had, of this sender and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from recording_engine import ALICE, BOB, RecordingEngine, ask, registered, run

from cb_sglang import wire
from cb_sglang.errors import InvalidRequestError
from cb_sglang.service import MessageService

UNKNOWN = "msg_" + "0" * 32


@pytest.mark.parametrize("selector", ["cacheback", "snapkv", "bm25"])
@pytest.mark.parametrize("latent", [0, 2])
def test_three_follow_ups_are_disjoint_and_within_their_budget(selector: str, latent: int) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.score_of = lambda position: float(position * 37 % 101)
        sender = await registered(service, latent_steps=latent)
        had: list[wire.Message] = []
        for _ in range(4):
            (message,) = await ask(
                service, sender, "a", budget=25, selector=selector, exclude=[each.id for each in had]
            )
            assert len(message.positions) == 25
            assert not set(message.positions) & {p for each in had for p in each.positions}
            had.append(message)
        assert had[0].positions[0] == 0 and had[0].positions[-latent or 25 :] == list(range(100, 100 + latent))

    run(test)


def test_since_is_a_message_with_all_that_it_excluded() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        had: list[wire.Message] = []
        for _ in range(4):
            since: dict[str, Any] = {"since": had[-1].id} if had else {}
            (message,) = await ask(service, sender, "a", budget=20, **since)
            had.append(message)
        assert [each.positions for each in had] == [list(range(n * 20, n * 20 + 20)) for n in range(4)]
        # Two lines of follow-ups of one receiver come together again.
        (other,) = await ask(service, sender, "a", budget=20, exclude=[had[3].id], since=had[1].id)
        assert other.positions == [*range(40, 60)]
        (rest,) = await ask(service, sender, "a", budget=99, since=had[3].id)
        assert rest.positions == list(range(80, 100)), "no more than there is"

    run(test)


def test_each_query_of_a_call_has_its_own_past() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        (first,) = await ask(service, sender, "a", budget=10)
        queries = [wire.Query(query="a", exclude=[]), wire.Query(query="b")]
        fresh, again = sorted(
            await ask(service, sender, *queries, budget=10, exclude=[first.id]), key=lambda message: message.index
        )
        assert (fresh.positions, again.positions) == (first.positions, list(range(10, 20)))
        (further,) = await ask(service, sender, "a", budget=10, since=again.id)
        assert further.positions == list(range(20, 30))

    run(test)


def test_what_a_parent_sent_its_child_need_not_send() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        parent = await registered(service)
        (first,) = await ask(service, parent, "a", budget=10)
        child = await service.senders.extend(ALICE, parent, wire.ExtendRequest(input_ids=[5, 6]))
        grandchild = await service.senders.extend(ALICE, child.id, wire.ExtendRequest(input_ids=[7]))
        (second,) = await ask(service, grandchild.id, "a", budget=10, exclude=[first.id])
        assert second.positions == list(range(10, 20))

    run(test)


@pytest.mark.parametrize("field", ["exclude", "since"])
def test_a_message_of_others_is_one_that_never_was(field: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender, other, foreign = (
            await registered(service),
            await registered(service, [5, 6, 7]),
            await registered(service, tenant=BOB),
        )
        child = await service.senders.extend(ALICE, sender, wire.ExtendRequest(input_ids=[5]))
        names = [
            (await ask(service, other, "a", budget=2))[0].id,
            (await ask(service, foreign, "a", budget=2, tenant=BOB))[0].id,
            (await ask(service, child.id, "a", budget=2))[0].id,
            UNKNOWN,
        ]
        told = []
        for name in names:
            with pytest.raises(InvalidRequestError) as caught:
                await ask(service, sender, "a", **{field: [name] if field == "exclude" else name})
            assert caught.value.param is not None and caught.value.param.endswith(field)
            told.append(caught.value.message.replace(name, UNKNOWN))
        assert len(set(told)) == 1, told

    run(test)


@pytest.mark.parametrize("own", [False, True])
def test_the_error_names_the_field_that_the_caller_wrote(own: bool) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        query = wire.Query(query="b", since=UNKNOWN) if own else "b"
        call: dict[str, Any] = {} if own else {"since": UNKNOWN}
        with pytest.raises(InvalidRequestError) as caught:
            await ask(service, sender, wire.Query(query="a", since=None), query, **call)
        assert caught.value.param == ("queries[1].since" if own else "since")

    run(test)


def test_span_scores_and_cache_do_not_depend_on_what_was_sent() -> None:
    """Excluded is not private: the receiver has those positions."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        (first,) = await ask(service, sender, "a", budget=10, span_scores=True)
        (again,) = await ask(service, sender, "a", budget=10, span_scores=True, exclude=[first.id])
        assert again.span_scores == first.span_scores
        assert engine.scored[0][0] == engine.scored[1][0]

    run(test)
