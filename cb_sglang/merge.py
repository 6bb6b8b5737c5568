"""Several async iterators as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield from all sources as items come. The first error ends it; leaving early cancels the rest.

    Every source runs to its end at its own pace, so that a slow consumer holds none of them up; what it has not taken
    yet is kept.
    """
    taken: asyncio.Queue[T | _Ended] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    taken.put_nowait(item)
        except BaseException as failure:
            error = failure
        taken.put_nowait(_Ended(error))

    pumps = [asyncio.ensure_future(pump(source)) for source in sources]
    try:
        running = len(pumps)
        while running:
            item = await taken.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Ended:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
