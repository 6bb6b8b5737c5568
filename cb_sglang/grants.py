"""Grants from the present load: the engine's own counts, and the receivers that this process knows of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cb_sglang import wire
from cb_sglang.capacity import CapacitySnapshot, Grant, Policy, ReceiverNeed, grant
from cb_sglang.errors import CapacityError
from cb_sglang.registry import SenderRegistry
from cb_sglang.seam.engine import Engine

_RETRY_SECONDS = 0.1


class Grants:
    """For one event loop."""

    def __init__(self, engine: Engine, registry: SenderRegistry) -> None:
        self.engine = engine
        self._registry = registry
        self.waiting = 0
        """Receivers whose messages have no grant yet."""
        self.granted_positions = 0
        """What receivers will take whose messages are being made."""

    @contextmanager
    def receivers(self, count: int, *, of_one: bool = False) -> Iterator[Receivers]:
        """Count so many receivers in, each until its grant; and what they were granted, until this ends.

        of_one: all grants are for messages that one receiver reads; it counts once, with the largest of them.
        """
        mine = Receivers(self, count, of_one=of_one)
        self.waiting += count
        try:
            yield mine
        finally:
            self.waiting -= mine.waiting
            self.granted_positions -= mine.granted_positions

    async def snapshot(self, more: int = 0) -> CapacitySnapshot:
        """This server's engine now, with ``more`` receivers waiting than there are."""
        load = await self.engine.load()
        pinned = self._registry.usage().pinned_positions
        free = max(0, load.pool_positions - load.used_positions)
        return CapacitySnapshot(
            pool_positions=load.pool_positions,
            free_positions=free,
            evictable_positions=0,  # SGLang counts what it may evict as unused
            pinned_positions=min(pinned, free),
            running_positions=self.granted_positions,
            context_length=self.engine.context_length,
            receivers=max(1, self.waiting + more),
        )


class Receivers:
    """Some receivers of one call; or one, of several messages."""

    def __init__(self, grants: Grants, waiting: int, *, of_one: bool) -> None:
        self._grants = grants
        self._of_one = of_one
        self.waiting = waiting
        self.granted_positions = 0

    async def grant(
        self,
        asked: int,
        minimum: int,
        *,
        policy: Policy,
        min_budget: int | None,
        described: wire.Receiver | None,
        deadline: float,
    ) -> Grant:
        """The grant of one of them. Where the pool has no room now, waits for it until ``deadline`` (monotonic).

        Raises what cb_sglang.capacity.grant raises; CapacityError at once where only this call's own
        receivers are in the way.
        """
        described = described or wire.Receiver()
        elsewhere = described.context_length is not None or described.pool_positions is not None
        need = ReceiverNeed(
            context_length=described.context_length or self._grants.engine.context_length,
            prompt_positions=described.prompt_positions,
            reserved_output=described.reserved_output,
            senders=described.senders,
            concurrent=described.concurrent,
        )
        least = min(asked, max(minimum, min_budget or 1))
        while True:
            try:
                if not elsewhere:
                    snapshot: CapacitySnapshot | None = self._without_own(await self._grants.snapshot())
                elif described.pool_positions is not None:
                    snapshot = CapacitySnapshot.idle(described.pool_positions, need.context_length)
                else:
                    snapshot = None
                found = grant(asked, minimum=least, policy=policy, snapshot=snapshot, receiver=need)
            except CapacityError:
                # What this call holds already is let go with its messages, all of them together.
                if self.granted_positions or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._count(0 if elsewhere else need.positions(found.granted))
            return found

    def _without_own(self, snapshot: CapacitySnapshot) -> CapacitySnapshot:
        """What one receiver holds for its other messages is not in this one's way: its need covers them all."""
        own = self.granted_positions if self._of_one else 0
        return replace(snapshot, running_positions=snapshot.running_positions - own)

    def _count(self, positions: int) -> None:
        if self.waiting:
            self.waiting -= 1
            self._grants.waiting -= 1
        more = max(0, positions - self.granted_positions) if self._of_one else positions
        self.granted_positions += more
        self._grants.granted_positions += more
