"""Senders over HTTP, without HTTP: registered once however many ask, kept, extended, never another tenant's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from recording_engine import (
    ALICE,
    BOB,
    BOS,
    DOCUMENT,
    VOCABULARY,
    RecordingEngine,
    ask,
    registered,
    row,
    run,
    settle,
)

import cb_sglang.sender_service
from cb_sglang import wire
from cb_sglang.errors import (
    CacheBackError,
    CapacityError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    SenderNotFoundError,
    StoreError,
)
from cb_sglang.registry import Amounts, SenderLimits
from cb_sglang.service import MessageService
from cb_sglang.tenants import Tenant


def failing(error: Exception) -> Callable[..., None]:
    """Something to stand in the place of a store's method."""

    def fail(*args: Any) -> None:
        raise error

    return fail


# --- registering


def test_register_prefills_and_reports() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await service.senders.register(ALICE, wire.SenderRequest(prompt="ab"))
        assert [context.input_ids for context in engine.prefills] == [[BOS, 107, 108]], "with the tokenizer's BOS"
        assert (sender.positions, sender.cached_positions) == (3, 7)
        again = await service.senders.register(ALICE, wire.SenderRequest(input_ids=[BOS, 107, 108]))
        assert again == sender
        # Registered again means cached again: the KV may have been evicted meanwhile.
        assert len(engine.prefills) == 2
        assert service.senders.all(ALICE) == [sender.model_copy(update={"cached_positions": None})]

    run(test)


def test_model_and_tenant_are_parts_of_the_id() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        first, foreign = await registered(service), await registered(service, tenant=BOB)
        engine.fingerprint = "the same model with new weights"
        assert len({first, foreign, await registered(service)}) == 3

    run(test)


def test_messages_go_through_the_chat_template() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        request = wire.SenderRequest(messages=[wire.ChatMessage(role="u", content="hi")])
        with pytest.raises(InvalidRequestError, match="no chat template; send the content as prompt") as caught:
            await service.senders.register(ALICE, request)
        assert caught.value.param == "messages"
        engine.tokenizer.chat_template = "any"
        await service.senders.register(ALICE, request)
        assert engine.tokenizer.decode(engine.prefills[0].input_ids) == "u: hi;"

        villain = wire.SenderRequest(messages=[wire.ChatMessage(role="villain", content="hi")])
        with pytest.raises(InvalidRequestError, match="refused these messages: no such role") as caught:
            await service.senders.register(ALICE, villain)
        assert caught.value.param == "messages"

    run(test)


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        ({"input_ids": [5, VOCABULARY]}, InvalidRequestError, "input_ids"),
        ({"input_ids": [5] * 150}, ContextLengthError, "input_ids"),
        ({"input_ids": [5] * 140, "latent_steps": 10}, ContextLengthError, "input_ids"),
        ({"prompt": "x" * 149}, ContextLengthError, "prompt"),
        ({"prompt": "xy", "private": [{"chars": [0, 3]}]}, InvalidRequestError, "private[0].chars"),
        ({"input_ids": [5, 6], "private": [{"tokens": [1, 3]}]}, InvalidRequestError, "private[0].tokens"),
        ({"input_ids": [5, 6], "ttl": 0.5}, InvalidRequestError, "ttl"),
        ({"input_ids": [5, 6], "inherits": ["msg_" + "0" * 32]}, InvalidRequestError, "inherits[0]"),
    ],
    ids=str,
)
def test_refused_senders_are_not_prefilled(request_: dict[str, Any], error: type[CacheBackError], param: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        with pytest.raises(error) as caught:
            await service.senders.register(ALICE, wire.SenderRequest(**request_))
        assert caught.value.param == param
        assert engine.prefills == [] and service.senders.all(ALICE) == []

    run(test)


def test_a_full_registry_refuses_before_prefilling() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        first = await registered(service)
        with pytest.raises(CapacityError):
            await registered(service, [1, 2, 3])
        assert len(engine.prefills) == 1
        await service.forget(ALICE, first)
        await registered(service, [1, 2, 3])

    run(test, senders=SenderLimits(total=Amounts(senders=1, positions=1_000, row_bytes=0)))


def test_registrations_under_way_are_bounded() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.hold = asyncio.Event()
        first = asyncio.create_task(registered(service))
        await settle()
        with pytest.raises(CapacityError, match="1 senders are being registered"):
            await registered(service, [1, 2, 3])
        engine.hold.set()
        await first
        await registered(service, [1, 2, 3])

    run(test, max_registrations=1)


def test_what_is_not_in_the_cache_is_computed_no_more_at_once_than_the_pool_holds() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        seen = await registered(service, [7, 8, 9])
        engine.hold = asyncio.Event()
        # The same content twice is computed once.
        callers = [asyncio.create_task(registered(service, ids)) for ids in (DOCUMENT, DOCUMENT, DOCUMENT[:-1])]
        await settle()
        service.senders._seen_cached[seen] -= 10.0
        asked = asyncio.create_task(ask(service, seen, "a", budget=2))
        await settle()
        assert [len(context.input_ids) for context in engine.prefills] == [3, 100, 3], (
            "one waits, who is cached does not"
        )
        engine.hold.set()
        await asked
        assert len(set(await asyncio.gather(*callers))) == 2 and len(engine.prefills) == 4

    run(test, engine=RecordingEngine(pool_positions=150))


def test_a_failed_prefill_registers_nothing_and_can_be_tried_again() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.fail = EngineError("out of order")
        both = await asyncio.gather(registered(service), registered(service), return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in both)
        assert service.senders.all(ALICE) == []
        engine.fail = None
        await registered(service)
        assert engine.prefills[-1].input_ids == DOCUMENT

    run(test)


# --- one prefill for all who wait


def test_registered_at_once_is_prefilled_once_and_rolled_out_once() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.hold = asyncio.Event()
        callers = [asyncio.create_task(registered(service, latent_steps=2)) for _ in range(5)]
        other = asyncio.create_task(registered(service, [1, 2, 3]))
        await settle()
        engine.hold.set()
        (sender,) = set(await asyncio.gather(*callers))
        await other
        assert [context.input_ids for context in engine.rollouts] == [DOCUMENT]
        assert sorted(len(context.input_ids) for context in engine.prefills) == [3, 102]
        # What is registered has its rows, so that neither a query nor another registration rolls them again.
        await ask(service, sender, [5], budget=10)
        await registered(service, latent_steps=2)
        assert len(engine.rollouts) == 1

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


# --- the store


@pytest.mark.parametrize("callers", [1, 3])
def test_a_failed_save_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch, callers: int) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(service.senders._store, "save", failing(StoreError("disk full")))
            outcomes = await asyncio.gather(*(registered(service) for _ in range(callers)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreError] * callers, "each caller learns why"
        assert service.senders.all(ALICE) == []
        await registered(service)
        assert len(service.senders.all(ALICE)) == 1

    run(test)


def test_a_failed_save_takes_no_acknowledged_sender_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        with monkeypatch.context() as broken:
            broken.setattr(service.senders._store, "save", failing(StoreError("disk full")))
            with pytest.raises(StoreError):
                await registered(service)
        assert service.senders.get(ALICE, sender).id == sender

    run(test)


def test_a_restart_loses_no_sender_no_row_and_no_record(tmp_path: Path) -> None:
    known: dict[str, Any] = {}

    async def before(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, latent_steps=2, private=[{"tokens": [3, 9]}])
        await registered(service, [1, 2, 3], tenant=BOB)
        (message,) = await ask(service, sender, [5], budget=10)
        known.update(sender=service.senders.get(ALICE, sender), message=message)

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        sender, message = known["sender"], known["message"]
        assert service.senders.all(ALICE) == [sender] and len(service.senders.all(BOB)) == 1
        assert (await registered(service, latent_steps=2, private=[{"tokens": [3, 9]}])) == sender.id
        assert engine.rollouts == [], "latent rows come from the store"
        (again,) = await ask(service, sender.id, [5], budget=10)
        assert (again.positions, again.payload_bytes) == (message.positions, message.payload_bytes)
        (further,) = await ask(service, sender.id, [5], budget=10, exclude=[message.id])
        assert not set(further.positions) & set(message.positions)
        assert {entry.message for entry in (await service.senders.audit(ALICE, sender.id)).data} == {
            message.id,
            again.id,
            further.id,
        }

    run(before, data_dir=tmp_path)
    run(after, data_dir=tmp_path)


def test_the_forgotten_and_the_expired_are_not_kept(tmp_path: Path) -> None:
    """Neither in memory nor on the disk: what was theirs may be secret."""

    async def before(engine: RecordingEngine, service: MessageService) -> None:
        forgotten, expired = await registered(service), await registered(service, [7, 8, 9], ttl=1.0)
        await service.forget(ALICE, forgotten)
        clock = service.senders.registry._clock
        service.senders.registry._clock = lambda: clock() + 2.0
        assert service.senders.all(ALICE) == []
        # A registration makes room first.
        kept = await registered(service, [1, 2, 3])
        for name in (forgotten, expired):
            with pytest.raises(SenderNotFoundError):
                service.senders.get(ALICE, name)
        await service.senders._database.run(lambda: None)
        with service.senders._database.transaction() as db:
            assert db.execute("SELECT id FROM senders").fetchall() == [(kept,)]

    run(before, data_dir=tmp_path)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_a_pin_does_not_outlive_its_sender(leaves: bool) -> None:
    """The engine comes to a long pin after the unpin that a deletion has sent meanwhile."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.hold = asyncio.Event()
        pin = asyncio.create_task(service.senders.pin(ALICE, sender))
        await settle()
        under_way, engine.hold = engine.hold, None
        await service.forget(ALICE, sender)
        if leaves:
            pin.cancel()
        under_way.set()
        with pytest.raises(asyncio.CancelledError if leaves else SenderNotFoundError):
            await pin
        await settle()
        assert engine.pinned == {} and service.senders.registry.usage().pinned_positions == 0

    run(test)


# --- other tenants


def calls(service: MessageService, tenant: Tenant, sender: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every way to name a sender."""

    async def get() -> object:
        return service.senders.get(tenant, sender)

    return {
        "get": get,
        "messages": lambda: ask(service, sender, "a", tenant=tenant),
        "extend": lambda: service.senders.extend(tenant, sender, wire.ExtendRequest(input_ids=[5])),
        "audit": lambda: service.senders.audit(tenant, sender),
        "blocks": lambda: service.blocks(tenant, wire.ChatExtension(senders=[sender]), "a"),
        "forget": lambda: service.forget(tenant, sender),
    }


def test_a_foreign_sender_is_one_that_never_was() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        absent, foreign = calls(service, BOB, "snd_" + "0" * 32), calls(service, BOB, sender)
        for name in absent:
            told = []
            for call in (absent[name], foreign[name]):
                with pytest.raises(SenderNotFoundError) as caught:
                    await call()
                told.append((caught.value.message, caught.value.param, caught.value.code))
            assert told[0] == told[1], name
        assert service.senders.all(BOB) == [] and len(service.senders.all(ALICE)) == 1
        assert len(engine.prefills) == 1 and engine.scored == []

    run(test)


def test_tenants_share_no_cache() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        for tenant in (ALICE, BOB):
            await registered(service, tenant=tenant)
            await registered(service, tenant=tenant, latent_steps=1)
        namespaces = [context.namespace for context in engine.prefills]
        assert None not in namespaces
        assert len(set(namespaces)) == 4, "nor do sequences whose token ids do not tell their rows"

    run(test)


# --- extending and inheriting


def test_an_extended_sender_has_all_that_its_parent_has() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        parent = await registered(service, [5, 6, 7], latent_steps=1, private=[{"tokens": [1, 2]}])
        request = wire.ExtendRequest(input_ids=[8, 9], latent_steps=1, private=[{"tokens": [0, 1]}])
        child = await service.senders.extend(ALICE, parent, request)
        assert (child.parent, child.positions, child.latent, child.private_positions) == (parent, 7, 1, 2)
        found = service.senders.registry.peek(ALICE.name, child.id)
        assert list(found.input_ids) == [5, 6, 7, 0, 8, 9, 0]
        assert found.private == ((1, 2), (4, 5))
        assert found.rows is not None and found.rows.positions == (3, 6)
        assert found.rows.data == row(-1.0) * 2
        # The rollout began where the parent's row stands.
        assert engine.rollouts[-1].rows is not None and engine.rollouts[-1].rows.positions == (3,)
        assert service.senders.get(ALICE, parent).positions == 4, "the parent is as it was"

    run(test)


def test_messages_lead_the_sender_that_inherits_them() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        source = await registered(service, latent_steps=1)
        by_id, as_object = await ask(service, source, [5], [5, 6], budget=3)
        received = [by_id.id, wire.ReceivedMessage(**as_object.model_dump())]
        sender = await service.senders.register(ALICE, wire.SenderRequest(prompt="ab", inherits=received))
        assert (sender.inherited, sender.positions) == (6, 8)
        found = service.senders.registry.peek(ALICE.name, sender.id)
        assert list(found.input_ids) == [*DOCUMENT[:2], 0, *DOCUMENT[:2], 0, 107, 108], "without a BOS amid"
        assert found.rows is not None and found.rows.positions == (2, 5)
        (message,) = await ask(service, sender.id, [5], ratio=2.0)
        assert len(message.positions) == 6 + 1, "the inherited and half of the rest"

    run(test)


def test_another_tenant_s_message_is_not_on_record() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        (message,) = await ask(service, await registered(service), [5], budget=3)
        for name in (message.id, "msg_" + "0" * 32):
            with pytest.raises(InvalidRequestError, match=f"{name} is not on record") as caught:
                await registered(service, tenant=BOB, inherits=[name])
            assert caught.value.param == "inherits[0]"
            with pytest.raises(InvalidRequestError, match=f"{name} is not on record"):
                await service.blocks(BOB, wire.ChatExtension(messages=[name]), "")

    run(test)


def test_the_ranks_of_one_content_are_one() -> None:
    """With data parallelism each rank has a cache of its own: every query must find the sender's."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        engine.ranks = 3
        sender = await registered(service)
        await ask(service, sender, "a", "b")
        used = [*engine.prefills, *(context for context, _ in engine.scored)]
        assert len({context.rank for context in used}) == 1 and used[0].rank in range(3)

    run(test)


def test_a_pin_comes_back_after_a_flush_and_after_a_restart(tmp_path: Path) -> None:
    async def before(engine: RecordingEngine, service: MessageService) -> None:
        sender, loose = await registered(service, pin=True), await registered(service, [1, 2, 3], pin=True)
        await service.senders.unpin(ALICE, loose)
        assert list(engine.pinned) == [sender]
        engine.pinned.clear()
        service.senders._seen_cached.clear()  # as after a second
        await ask(service, sender, [5], budget=10)
        assert list(engine.pinned) == [sender]

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        pinned, loose = service.senders.all(ALICE)
        assert (pinned.pinned_positions, loose.pinned_positions) == (100, 0) and engine.pinned == {}
        for sender in (loose, pinned):
            await ask(service, sender.id, [5], budget=2)
        assert list(engine.pinned) == [pinned.id]

    run(before, data_dir=tmp_path)
    run(after, data_dir=tmp_path)


def test_a_query_that_misses_looks_again() -> None:
    """What was in the cache a moment before may have been flushed since."""

    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, pin=True)
        assert (await ask(service, sender, [5], budget=10))[0].cache_miss is None
        engine.pinned.clear()
        engine.cached = 7
        assert (await ask(service, sender, [5], budget=10))[0].cache_miss == "evicted"
        assert engine.pinned == {}
        engine.cached = None
        assert (await ask(service, sender, [5], budget=10))[0].cache_miss == "evicted"
        assert list(engine.pinned) == [sender]

    run(test)


def test_a_registration_that_is_left_in_its_last_step_is_none(tmp_path: Path) -> None:
    """Neither while the server lives nor after a restart; one that was there before stays."""

    async def before(engine: RecordingEngine, service: MessageService) -> None:
        known = await registered(service, [1, 2, 3])
        blocked = threading.Event()
        service.senders._database.run(blocked.wait)
        for ids in (DOCUMENT, [1, 2, 3]):
            call = asyncio.create_task(registered(service, ids))
            while len(service.senders.all(ALICE)) < 2 and ids is DOCUMENT:
                await asyncio.sleep(0.001)
            await settle()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert [sender.id for sender in service.senders.all(ALICE)] == [known]
        blocked.set()

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        assert [sender.positions for sender in service.senders.all(ALICE)] == [3]

    run(before, data_dir=tmp_path)
    run(after, data_dir=tmp_path)


def test_upkeep_survives_what_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        seen = []

        def fails() -> None:
            seen.append(1)
            raise RuntimeError("disk full")

        service.senders.on_upkeep = fails
        while len(seen) < 2:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(cb_sglang.sender_service, "_UPKEEP_SECONDS", 0.001)
    run(test)
