"""One piece of work for all that ask for it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Callers that ask for the same key while it is under way share one run; when the last of them leaves, it ends."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[asyncio.Task[T], set[object]]] = {}

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``start()``, or of the run that is under way for ``key``. Its error reaches every caller."""
        if key not in self._running:
            self._running[key] = (asyncio.create_task(start()), set())
        task, waiting = self._running[key]
        caller = object()
        waiting.add(caller)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.discard(caller)
            if not waiting:
                task.cancel()
                if self._running.get(key, (None,))[0] is task:
                    del self._running[key]
