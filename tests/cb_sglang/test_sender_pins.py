"""Pins in the engine follow the registry, whatever overlaps, fails or leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from recording_engine import ALICE, RecordingEngine, ask, registered, run, settle

from cb_sglang.admission import AdmissionLimits
from cb_sglang.errors import EngineError
from cb_sglang.service import MessageService


def in_engine_and_registry(engine: RecordingEngine, service: MessageService) -> tuple[int, int]:
    pinned = sum(len(context.input_ids) for context in engine.pinned.values())
    assert service.senders.pins.held_positions == pinned
    return pinned, service.senders.registry.usage().pinned_positions


def test_who_leaves_takes_nothing_back_that_was_changed_since(tmp_path: Path) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service)
        engine.hold = asyncio.Event()
        leaving, staying = (asyncio.create_task(service.senders.pin(ALICE, sender)) for _ in range(2))
        await settle()
        leaving.cancel()
        await settle()
        engine.hold.set()
        assert (await staying).pinned_positions == 100
        await settle()
        assert in_engine_and_registry(engine, service) == (100, 100)

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        assert service.senders.all(ALICE)[0].pinned_positions == 100

    run(test, data_dir=tmp_path)
    run(after, data_dir=tmp_path)


def test_a_pin_after_a_flush_is_one() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, pin=True)
        engine.pinned.clear()
        await service.senders.pin(ALICE, sender)
        assert in_engine_and_registry(engine, service) == (100, 100)

    run(test)


def test_an_unpin_and_a_pin_at_once_leave_a_pin_that_can_be_let_go() -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, pin=True)
        engine.hold = asyncio.Event()
        unpin = asyncio.create_task(service.senders.unpin(ALICE, sender))
        await settle()
        pin = asyncio.create_task(service.senders.pin(ALICE, sender))
        await settle()
        engine.hold.set()
        await asyncio.gather(unpin, pin)
        assert in_engine_and_registry(engine, service) == (100, 100)
        await service.forget(ALICE, sender)
        await settle()
        assert in_engine_and_registry(engine, service) == (0, 0)

    run(test)


def test_a_caller_that_leaves_keeps_the_pin_that_was_there(tmp_path: Path) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        pinned, loose = await registered(service, pin=True), await registered(service, [1, 2, 3])
        for sender in (pinned, loose):
            engine.hold = asyncio.Event()
            pin = asyncio.create_task(service.senders.pin(ALICE, sender))
            await settle()
            pin.cancel()
            engine.hold.set()
            with pytest.raises(asyncio.CancelledError):
                await pin
            await settle()
            engine.hold = None
        assert service.senders.registry.usage().pinned_positions == 100

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        assert [sender.pinned_positions for sender in service.senders.all(ALICE)] == [100, 0]

    run(test, data_dir=tmp_path)
    run(after, data_dir=tmp_path)


@pytest.mark.parametrize("how", ["forget", "expire"])
def test_what_the_engine_could_not_be_told_is_tried_again(how: str) -> None:
    async def test(engine: RecordingEngine, service: MessageService) -> None:
        sender = await registered(service, pin=True, ttl=5.0)
        engine.fail = EngineError("out of order")
        if how == "forget":
            await service.forget(ALICE, sender)
        else:
            clock = service.senders.registry._clock
            service.senders.registry._clock = lambda: clock() + 10.0
            await service.senders._expire()
        await settle()
        assert in_engine_and_registry(engine, service) == (100, 0)
        engine.fail = None
        service.senders.pins.retry()
        await settle()
        assert in_engine_and_registry(engine, service) == (0, 0)

    run(test)


def test_what_the_engine_holds_is_not_taken_from_the_room_twice(tmp_path: Path) -> None:
    async def before(engine: RecordingEngine, service: MessageService) -> None:
        await registered(service, pin=True)
        # Flushed, its room is kept; held, SGLang counts it as used.
        assert (await service.grants.snapshot("alice")).usable_positions == engine.pool_positions - 100
        engine.used = 100
        assert (await service.grants.snapshot("alice")).usable_positions == engine.pool_positions - 100

    async def after(engine: RecordingEngine, service: MessageService) -> None:
        (sender,) = service.senders.all(ALICE)
        assert (await service.grants.snapshot("alice")).usable_positions == engine.pool_positions - 100
        await ask(service, sender.id, "a", budget=2)
        engine.used = 100
        assert (await service.grants.snapshot("alice")).usable_positions == engine.pool_positions - 100

    for test in (before, after):
        run(test, data_dir=tmp_path, admission=AdmissionLimits(tenant_share=1.0))
