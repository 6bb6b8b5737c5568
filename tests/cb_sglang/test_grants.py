"""Grants from the present load, and their counters, which must come back to zero however a call ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from recording_engine import RecordingEngine
from virtual_time import run_virtually

import cb_sglang.grants
from cb_sglang import wire
from cb_sglang.capacity import Grant
from cb_sglang.errors import CapacityError, ContextLengthError, RateLimitError
from cb_sglang.grants import Grants, Receivers

DEADLINE = 30.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A test on a clock that jumps; the counters must be zero in the end."""

    def run(test: Callable[[RecordingEngine, Grants], Coroutine[Any, Any, None]], *, share: float = 1.0) -> None:
        async def main() -> None:
            engine = RecordingEngine(pool_positions=1_000, context_length=600)
            grants = Grants(engine, pins_to_come=lambda used: 0, max_waiting=3, tenant_share=share)  # type: ignore[arg-type]
            monkeypatch.setattr(cb_sglang.grants.time, "monotonic", asyncio.get_running_loop().time)
            await test(engine, grants)
            assert (grants.waiting, grants.granted_positions) == (0, 0)

        run_virtually(main)

    return run


async def grant(receivers: Receivers, asked: int, **options: Any) -> Grant:
    given: dict[str, Any] = {"policy": "share", "min_budget": None, "described": None, "deadline": DEADLINE} | options
    return await receivers.grant(asked, given.pop("minimum", 1), **given)


def test_receivers_count_until_their_grant_and_positions_until_the_end(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        with grants.receivers("a", 2) as two, grants.receivers("a", 1) as one:
            assert grants.waiting == 3
            assert (await grant(two, 900)).granted == 333
            assert (grants.waiting, grants.granted_positions) == (2, 333)
            assert (await grants.snapshot("a")).usable_positions == 667
            assert (await grant(one, 900)).granted == 333
            assert (await grant(two, 900)).granted == 334
            assert (grants.waiting, grants.granted_positions) == (0, 1_000)
        assert (await grants.snapshot("a")).usable_positions == 1_000

    run(test)


def test_a_grant_counts_the_receiver_s_prompt_and_all_its_senders(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        described = wire.Receiver(prompt_positions=100, reserved_output=50, senders=3)
        with grants.receivers("a", 1) as one:
            found = await grant(one, 100, described=described)
            assert (found.granted, grants.granted_positions) == (100, 450)

    run(test)


@pytest.mark.parametrize(
    ("described", "granted"),
    [
        ({"pool_positions": 50}, 50),
        ({"pool_positions": 5_000, "context_length": 5_000}, 900),
        # Of an engine elsewhere that nobody described only the window is known.
        ({"context_length": 300}, 300),
        ({"pool_positions": 400, "context_length": 500, "concurrent": 4}, 100),
    ],
)
def test_a_receiver_elsewhere_takes_nothing_here(run: Any, described: dict[str, int], granted: int) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions
        with grants.receivers("a", 1) as one:
            assert (await grant(one, 900, described=wire.Receiver(**described))).granted == granted
            assert grants.granted_positions == 0 and grants.waiting == 0

    run(test)


def test_a_full_pool_is_waited_for(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, setattr, engine, "used", 0)
        with grants.receivers("a", 1) as one:
            assert (await grant(one, 100)).granted == 100
            assert loop.time() == pytest.approx(5.0, abs=0.11)

    run(test)


def test_the_deadline_ends_the_wait(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions
        with pytest.raises(CapacityError, match="usable now"), grants.receivers("a", 2) as two:
            await grant(two, 100)
        assert 29.0 < asyncio.get_running_loop().time() <= DEADLINE

    run(test)


def test_what_cannot_fit_at_any_time_is_not_waited_for(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions
        with pytest.raises(ContextLengthError), grants.receivers("a", 1) as one:
            await grant(one, 700, policy="fixed")
        assert asyncio.get_running_loop().time() == 0.0

    run(test)


def test_a_call_does_not_wait_for_itself(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        with grants.receivers("a", 2) as two:
            assert (await grant(two, 600, policy="fixed")).granted == 600
            with pytest.raises(CapacityError):
                await grant(two, 600, policy="fixed")
        assert asyncio.get_running_loop().time() == 0.0

    run(test)


def test_a_minimum_binds_and_does_not_exceed_what_is_asked(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = 960
        with grants.receivers("a", 4) as four:
            assert (await grant(four, 100, minimum=15)).granted == 15
            assert (await grant(four, 100, min_budget=25)).granted == 25
            assert grants.granted_positions == 40
        with grants.receivers("a", 1) as one:
            assert (await grant(one, 20, min_budget=500)).granted == 20

    run(test)


def test_a_cancelled_wait_is_not_counted(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions

        async def wait() -> None:
            with grants.receivers("a", 3) as three:
                await grant(three, 100)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        assert grants.waiting == 3
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(test)


def test_messages_of_one_receiver_count_once(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        described = wire.Receiver(prompt_positions=100, reserved_output=50, senders=3, context_length=None)
        with grants.receivers("a", 1, of_one=True) as fan_in:
            assert grants.waiting == 1
            for asked, counted in ((50, 300), (140, 570), (90, 570)):
                assert (await grant(fan_in, asked, described=described)).granted == asked
                assert (grants.waiting, grants.granted_positions) == (0, counted)
            with grants.receivers("a", 1) as other:
                assert (await grant(other, 900)).granted == 430
            # What the other one holds is in its way, what it holds itself is not.
            assert (await grant(fan_in, 140, described=described)).granted == 140
            assert grants.granted_positions == 570

    run(test)


def test_a_receiver_that_asks_again_counts_beside_the_others(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        described = wire.Receiver(senders=2)
        with grants.receivers("a", 1, of_one=True) as first, grants.receivers("a", 1, of_one=True) as second:
            for receiver in (first, second):
                for _ in range(2):
                    assert (await grant(receiver, 900, described=described)).granted == 250
            assert grants.granted_positions == 1_000

    run(test)


def test_a_tenant_has_its_share_of_the_pool_to_itself(run: Any) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        with grants.receivers("a", 2) as a, grants.receivers("b", 1) as b:
            # Half of 1,000 positions for each; two receivers of "a" share its half.
            assert [(await grant(a, 900)).granted for _ in range(2)] == [250, 250]
            assert (await grant(b, 900)).granted == 500
            with grants.receivers("c", 1) as c, pytest.raises(CapacityError, match="0 of the 500 that it may have"):
                await grant(c, 900)
        with grants.receivers("a", 1) as one, pytest.raises(ContextLengthError, match="may have 500 of the KV pool"):
            await grant(one, 550, policy="fixed")

    run(test, share=0.5)


@pytest.mark.parametrize(("share", "refused"), [(1.0, (CapacityError, 3)), (0.5, (RateLimitError, 1))])
def test_those_who_wait_are_bounded(run: Any, share: float, refused: tuple[type[CapacityError], int]) -> None:
    async def test(engine: RecordingEngine, grants: Grants) -> None:
        engine.used = engine.pool_positions
        error, most = refused

        async def wait() -> None:
            with grants.receivers("a", 1) as one:
                await grant(one, 50)

        waiting = [asyncio.create_task(wait()) for _ in range(most)]
        await asyncio.sleep(1.0)
        with pytest.raises(CapacityError, match=f"{most} messages") as caught:
            await wait()
        assert type(caught.value) is error and asyncio.get_running_loop().time() < 1.1, "at once"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        engine.used = 0
        await wait()

    run(test, share=share)
