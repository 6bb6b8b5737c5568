"""What may be under way at once: registrations by number, prefills of whole senders by what they take of the pool."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from cb_sglang.errors import CapacityError, RateLimitError


class Registrations:
    """At most ``most`` calls at once; one tenant has its share of them."""

    def __init__(self, most: int, tenant_share: float) -> None:
        self._most, self._share = most, max(1, int(most * tenant_share))
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Count one in. Raises CapacityError when there are too many, RateLimitError when this tenant has."""
        if self._of.total() >= self._most:
            raise CapacityError(f"{self._most} senders are being registered, the most at once; try again later")
        if self._of[tenant] >= self._share:
            raise RateLimitError(f"{self._share} senders of this tenant are being registered, its share; wait for one")
        self._of[tenant] += 1
        try:
            yield
        finally:
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]


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
