"""Several async iterators as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def merge(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield from all sources as items come. The first error ends it; leaving early cancels the rest."""
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                source = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(source.aclose() for source in sources), return_exceptions=True)
