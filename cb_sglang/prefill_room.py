"""Prefills of whole senders in turn, by what they take of the pool."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrefillRoom:
    """Positions that may be computed at once, first come first served: more would evict each other from the pool."""

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, positions: int) -> AsyncIterator[None]:
        """Wait for so many; all there are, where it is more."""
        size = min(positions, self._most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            self._next()
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += size
            else:
                self._waiting.remove((size, turn))
            self._next()

    def _next(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            self._free -= size
            turn.set_result(None)
