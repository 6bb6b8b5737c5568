"""Prefills in turn, and room given back however they end."""

from __future__ import annotations

import asyncio

from cb_sglang.prefill_room import PrefillRoom


def test_prefills_wait_in_turn_and_leave_whenever_they_want() -> None:
    async def test() -> None:
        room, running = PrefillRoom(100), []

        async def prefill(name: str, positions: int, until: asyncio.Event) -> None:
            async with room.taken(positions):
                running.append(name)
                try:
                    await until.wait()
                finally:
                    running.remove(name)

        ends = {name: asyncio.Event() for name in "abcde"}
        sizes = {"a": 60, "b": 500, "c": 30, "d": 30, "e": 40}
        tasks = {name: asyncio.create_task(prefill(name, sizes[name], ends[name])) for name in "abcde"}
        await asyncio.sleep(0)
        assert running == ["a"], "what would fit does not pass the large one"
        tasks["b"].cancel()
        await asyncio.sleep(0.001)
        assert running == ["a", "c"]
        tasks["a"].cancel()
        await asyncio.sleep(0.001)
        assert sorted(running) == ["c", "d", "e"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        async with room.taken(100):
            pass
        assert room._free == 100 and not room._waiting

    asyncio.run(asyncio.wait_for(test(), 20))


def test_one_larger_than_the_room_has_it_alone() -> None:
    async def test() -> None:
        room = PrefillRoom(100)
        async with room.taken(500):
            other = asyncio.create_task(room.taken(1).__aenter__())
            await asyncio.sleep(0.001)
            assert not other.done()
        await other

    asyncio.run(asyncio.wait_for(test(), 20))
