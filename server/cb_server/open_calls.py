"""How many calls are being answered, so that the last one can be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class OpenCalls:
    """For one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one until its answer is out, or its client has left."""
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    async def ended(self, seconds: float) -> None:
        """Wait for the last one, so many seconds at most: a client may never read its answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none.wait()
