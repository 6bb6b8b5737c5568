"""Grants from the present load: the engine's own counts, and the receivers that this process knows of."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cb_sglang import wire
from cb_sglang.capacity import CapacitySnapshot, Grant, Policy, ReceiverNeed, grant
from cb_sglang.errors import CapacityError
from cb_sglang.seam.engine import Engine
from cb_sglang.tenant_bound import TenantBound, add

_RETRY_SECONDS = 0.1


class Grants:
    """For one event loop.

    pins_to_come: pinned positions that are not among those that the engine says are used.
    max_waiting:  grants that may wait for room in the pool at once.
    tenant_share: the part of the pool, and of those places, that one tenant may hold, in (0, 1].
    """

    def __init__(
        self, engine: Engine, *, pins_to_come: Callable[[int], int], max_waiting: int, tenant_share: float
    ) -> None:
        self.engine = engine
        self._pins_to_come, self._share = pins_to_come, tenant_share
        self._waiting: Counter[str] = Counter()
        self._granted: Counter[str] = Counter()
        self.queue = TenantBound(max_waiting, tenant_share, "messages wait for room in the KV pool")
        """Without an order: a small one need not wait behind one that is too large for now."""

    @property
    def waiting(self) -> int:
        """Receivers whose messages have no grant yet."""
        return self._waiting.total()

    @property
    def granted_positions(self) -> int:
        """What receivers will take whose messages are being made."""
        return self._granted.total()

    @contextmanager
    def receivers(self, tenant: str, count: int, *, of_one: bool = False) -> Iterator[Receivers]:
        """Count so many receivers in, each until its grant; and what they were granted, until this ends.

        of_one: all grants are for messages that one receiver reads; it counts once, with the largest of them.
        """
        mine = Receivers(self, tenant, of_one=of_one)
        mine.count(waiting=count)
        try:
            yield mine
        finally:
            mine.count(waiting=-mine.waiting, granted=-mine.granted_positions)

    async def snapshot(self, tenant: str, asking: Receivers | None = None, *, more: int = 0) -> CapacitySnapshot:
        """What of this server's engine is open to a tenant now, with ``more`` receivers waiting than there are.

        What one receiver (``asking``) holds for its other messages is not in this one's way: its need covers them all.
        """
        load = await self.engine.load()
        own = asking.granted_positions if asking is not None and asking.of_one else 0
        if asking is not None and not asking.waiting:
            more += 1  # it has a grant for another of its messages already, and asks once more
        free = max(0, load.pool_positions - load.used_positions)
        whole = CapacitySnapshot(
            pool_positions=load.pool_positions,
            free_positions=free,
            evictable_positions=0,  # SGLang counts what it may evict as unused
            pinned_positions=min(self._pins_to_come(load.used_positions), free),
            running_positions=self.granted_positions - own,
            context_length=self.engine.context_length,
            receivers=max(1, self.waiting + more),
        )
        if self._share >= 1.0:
            return whole
        most = max(1, int(self._share * whole.pool_positions))
        return replace(
            whole,
            pool_positions=most,
            free_positions=min(whole.usable_positions, max(0, most - self._granted[tenant] + own)),
            pinned_positions=0,
            running_positions=0,
            # Its receivers share its room among themselves.
            receivers=max(1, self._waiting[tenant] + more),
        )

    def count(self, tenant: str, waiting: int, granted: int) -> None:
        """Add to what is counted; by ``Receivers``."""
        add(self._waiting, tenant, waiting)
        add(self._granted, tenant, granted)


class Receivers:
    """Some receivers of one call; or one, of several messages."""

    def __init__(self, grants: Grants, tenant: str, *, of_one: bool) -> None:
        self._grants, self._tenant, self.of_one = grants, tenant, of_one
        self.waiting = self.granted_positions = 0

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
        receivers are in the way, or too many wait.
        """
        described = described or wire.Receiver()
        need = ReceiverNeed(
            context_length=described.context_length or self._grants.engine.context_length,
            prompt_positions=described.prompt_positions,
            reserved_output=described.reserved_output,
            senders=described.senders,
            concurrent=described.concurrent,
        )
        least = min(asked, max(minimum, min_budget or 1))
        if described.context_length is not None or described.pool_positions is not None:
            pool, snapshot = described.pool_positions, None
            if pool is not None:
                snapshot = CapacitySnapshot.idle(pool, need.context_length)
            elsewhere = grant(asked, minimum=least, policy=policy, snapshot=snapshot, receiver=need)
            self._granted(0)
            return elsewhere

        async def attempt() -> Grant | None:
            snapshot = await self._grants.snapshot(self._tenant, self)
            try:
                granted = grant(asked, minimum=least, policy=policy, snapshot=snapshot, receiver=need)
            except CapacityError:
                # What this call holds already is let go with its messages, all of them together.
                if self.granted_positions or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
                return None
            self._granted(need.positions(granted.granted))
            return granted

        first = await attempt()
        if first is not None:
            return first
        with self._grants.queue.counted(self._tenant):
            while True:
                await asyncio.sleep(_RETRY_SECONDS)
                found = await attempt()
                if found is not None:
                    return found

    def count(self, *, waiting: int = 0, granted: int = 0) -> None:
        """Add to what is counted, here and in all."""
        self.waiting += waiting
        self.granted_positions += granted
        self._grants.count(self._tenant, waiting, granted)

    def _granted(self, positions: int) -> None:
        more = max(0, positions - self.granted_positions) if self.of_one else positions
        self.count(waiting=-1 if self.waiting else 0, granted=more)
