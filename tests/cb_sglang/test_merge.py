"""Several async iterators as one: all of every source, the first error, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from cb_sglang.merge import merge


class Source:
    """Yields its items, each when it is let; knows whether it was closed."""

    def __init__(self, *items: str, error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.given = 0
        self.ended = 0

    async def __call__(self) -> AsyncGenerator[str, None]:
        try:
            for item in self.items:
                await self.gate.wait()
                self.given += 1
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.ended += 1


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_items_come_in_the_order_in_which_they_are_yielded() -> None:
    async def test() -> None:
        late, early = Source("a", "b"), Source("c", "d")
        late.gate.clear()
        found = []
        async with aclosing(merge(late(), early())) as merged:
            async for item in merged:
                found.append(item)
                if item == "d":
                    late.gate.set()
        assert found == ["c", "d", "a", "b"]
        assert late.ended == early.ended == 1
        assert [item async for item in merge()] == []

    run(test)


def test_a_slow_consumer_holds_no_source_up() -> None:
    async def test() -> None:
        source = Source("a", "b", "c")
        async with aclosing(merge(source())) as merged:
            assert await anext(merged) == "a"
            await asyncio.sleep(0.001)
            assert (source.given, source.ended) == (3, 1)
            assert [item async for item in merged] == ["b", "c"]

    run(test)


def test_the_first_error_ends_all() -> None:
    async def test() -> None:
        failing, waiting = Source("a", error=ValueError("out of order")), Source("b")
        waiting.gate.clear()
        found = []
        with pytest.raises(ValueError, match="out of order"):
            async for item in merge(failing(), waiting()):
                found.append(item)
        assert found == ["a"], "what came before the error is not lost"
        assert (failing.ended, waiting.ended, waiting.given) == (1, 1, 0)

    run(test)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_early_closes_every_source(how: str) -> None:
    async def test() -> None:
        sources = [Source("a"), Source("b", "c"), Source("d")]
        sources[2].gate.clear()

        async def consume() -> None:
            async with aclosing(merge(*(source() for source in sources))) as merged:
                await anext(merged)
                if how == "cancel":
                    await asyncio.Event().wait()

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(0.001)
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        assert [source.ended for source in sources] == [1, 1, 1]

    run(test)


def test_never_begun_begins_nothing() -> None:
    async def test() -> None:
        source = Source("a")
        async with aclosing(merge(source())):
            pass
        assert (source.given, source.ended) == (0, 0)

    run(test)
