"""Pins: what the registry says is to be held in SGLang's cache, brought about in the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from cb_sglang.errors import SenderNotFoundError
from cb_sglang.registry import SenderRegistry
from cb_sglang.seam.engine import Context, Engine
from cb_sglang.senders import RegisteredSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    sender: RegisteredSender
    positions: int


class SenderPins:
    """For one event loop. Whoever changes a pin in the registry lets ``settle`` follow, or ``settle_later``.

    One sender's calls to the engine come one after the other, so that none of them overtakes another.
    """

    def __init__(
        self, engine: Engine, registry: SenderRegistry, context_of: Callable[[RegisteredSender], Context]
    ) -> None:
        self._engine, self._registry, self._context_of = engine, registry, context_of
        self._held: dict[str, _Held] = {}
        """What the engine holds, or may: a pin counts from the moment that it is asked for."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._later: set[asyncio.Task[None]] = set()

    @property
    def held_positions(self) -> int:
        """Pinned positions that the engine counts as used already."""
        return sum(held.positions for held in self._held.values())

    def wanted(self, sender: RegisteredSender) -> int:
        """How many leading positions the registry says are pinned."""
        try:
            return self._registry.pinned_positions(sender.tenant, sender.id)
        except SenderNotFoundError:
            return 0

    async def settle(self, sender: RegisteredSender, *, again: bool = False) -> None:
        """Hold or let go, as the registry says now. Raises EngineError.

        again: also where it should be held already, because a flush of the cache or a restart has let go of it.
        """
        lock = self._locks.setdefault(sender.id, asyncio.Lock())
        async with lock:
            wanted, held = self.wanted(sender), self._held.get(sender.id)
            if wanted and (again or held is None or held.positions != wanted):
                self._held[sender.id] = _Held(sender, wanted)
                await self._engine.pin(_leading(self._context_of(sender), wanted), sender.id)
            elif not wanted and held is not None:
                await self._engine.unpin(sender.id, self._context_of(sender).rank)
                del self._held[sender.id]

    def settle_later(self, sender: RegisteredSender) -> asyncio.Task[None]:
        """The same on a task of its own: whoever asked may leave. What it raises is logged, and tried again."""
        task = asyncio.create_task(self._settled(sender))
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return task

    def retry(self) -> None:
        """Let go of what the engine was not, or could not be, told of. To be called every few seconds."""
        for held in list(self._held.values()):
            lock = self._locks.get(held.sender.id)
            if not self.wanted(held.sender) and (lock is None or not lock.locked()):
                self.settle_later(held.sender)

    async def _settled(self, sender: RegisteredSender) -> None:
        try:
            await self.settle(sender)
        except Exception:
            logger.exception("a pin could not be let go of; it is tried again")


def _leading(whole: Context, positions: int) -> Context:
    rows = None if whole.rows is None else whole.rows.before(positions)
    return replace(whole, input_ids=whole.input_ids[:positions], rows=rows)
