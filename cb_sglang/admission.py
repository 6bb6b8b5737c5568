"""Who may use the engine now: a bounded queue in units of work, fair to tenants and senders.

The work of a query is its rows times its sender's positions (the attention scores it takes); its rows are the tokens
that it puts into the engine's steps, so a bound on running rows keeps chats that decode meanwhile from stalling.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from cb_sglang.errors import CapacityError, InvalidRequestError, RateLimitError
from cb_sglang.fair_queue import EqualWork, by_tenant_and_sender

MIN_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 60.0
THROUGHPUT_HORIZON = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What an operator sets.

    max_running_work: work in the engine at once; one piece that is larger runs alone.
    max_running_rows: query rows in the engine at once; likewise.
    max_queued_work:  work that waits; one piece that is larger may wait alone.
    max_waiting:      requests that wait.
    tenant_share:     the fraction of running and queued work together, and of waiting requests, that one tenant may
                      hold before its further requests are refused instead of queued. What can start at once always may.
    default_deadline: seconds that a request may wait.

    Raises InvalidRequestError for values out of range.
    """

    max_running_work: int = 1 << 27
    max_running_rows: int = 4_096
    max_queued_work: int = 1 << 30
    max_waiting: int = 1_024
    tenant_share: float = 0.5
    default_deadline: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_running_work", "max_running_rows", "max_queued_work", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if not 0.0 < self.tenant_share <= 1.0:
            raise InvalidRequestError(
                f"tenant_share must be above 0 and at most 1, not {self.tenant_share:g}", param="tenant_share"
            )
        _check_deadline("default_deadline", self.default_deadline)


@dataclass(slots=True)
class Load:
    """Requests, their work and their rows."""

    requests: int = 0
    work: int = 0
    rows: int = 0

    def add(self, ticket: Ticket) -> None:
        self.requests += 1
        self.work += ticket.work
        self.rows += ticket.rows

    def subtract(self, ticket: Ticket) -> None:
        self.requests -= 1
        self.work -= ticket.work
        self.rows -= ticket.rows


@dataclass(slots=True)
class TenantLoad:
    """What one tenant holds."""

    running: Load = field(default_factory=Load)
    queued: Load = field(default_factory=Load)

    @property
    def requests(self) -> int:
        return self.running.requests + self.queued.requests

    @property
    def work(self) -> int:
        return self.running.work + self.queued.work


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """The load at one moment: in all, and of every tenant that holds anything. One request is one receiver."""

    running: Load
    queued: Load
    tenants: dict[str, TenantLoad]

    @property
    def receivers(self) -> int:
        """Receivers in flight or queued."""
        return self.running.requests + self.queued.requests


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place, in the queue and then in the engine. ``queued_seconds`` is set when it starts."""

    tenant: str
    sender: str
    rows: int
    positions: int
    on_start: Callable[[], None]
    arrived: float
    queued_seconds: float = 0.0
    running: bool = False
    left: bool = False

    @property
    def work(self) -> int:
        return self.rows * self.positions


class Throughput:
    """Work a second while any runs, over about the last THROUGHPUT_HORIZON busy seconds."""

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0

    def add(self, *, work: int = 0, busy_seconds: float = 0.0) -> None:
        """Count finished work, or time during which some was running."""
        self._work += work
        self._seconds += busy_seconds
        if self._seconds > THROUGHPUT_HORIZON:
            kept = THROUGHPUT_HORIZON / 2 / self._seconds
            self._work, self._seconds = self._work * kept, self._seconds * kept

    def retry_after(self, work: int) -> float:
        """Seconds until this much work is done, within [MIN_RETRY_AFTER, MAX_RETRY_AFTER]."""
        if not self._work:
            return MIN_RETRY_AFTER
        return min(MAX_RETRY_AFTER, max(MIN_RETRY_AFTER, work * self._seconds / self._work))


class Admission:
    """Admits requests to the engine within ``limits``; for one thread.

    ``admit`` is for asyncio. ``enter`` and ``leave`` are the same without it, for a clock that is not the machine's.
    """

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._queue: EqualWork[Ticket] = by_tenant_and_sender()
        self._running = Load()
        self._queued = Load()
        self._tenants: dict[str, TenantLoad] = {}
        self._throughput = Throughput()
        self._counted_until = clock()

    @asynccontextmanager
    async def admit(
        self, *, tenant: str, sender: str, rows: int, positions: int, deadline: float | None = None
    ) -> AsyncIterator[Ticket]:
        """Wait for a turn, hold the place for the body, then free it, however the body ends.

        ``deadline``: the most seconds to wait. A caller that is cancelled leaves the queue at once.

        Raises RateLimitError (429) and CapacityError (503) as ``enter``, and CapacityError when the deadline passes.
        """
        seconds = self.limits.default_deadline if deadline is None else deadline
        _check_deadline("deadline", seconds)
        started = asyncio.Event()
        ticket = self.enter(tenant=tenant, sender=sender, rows=rows, positions=positions, on_start=started.set)
        finished = False
        try:
            await self._turn(ticket, started, seconds)
            yield ticket
            finished = True
        finally:
            self.leave(ticket, finished=finished)

    def enter(
        self, *, tenant: str, sender: str, rows: int, positions: int, on_start: Callable[[], None] = lambda: None
    ) -> Ticket:
        """Queue a request; ``on_start``, which must not raise, is called once it may run, perhaps before this returns.

        The caller must ``leave`` in the end, whether it ran or not.

        Raises RateLimitError (429) when it would have to wait and its tenant holds its share already; CapacityError
        (503) when it would have to wait and the queue is full. Both say when to come back.
        """
        ticket = Ticket(tenant, sender, rows, positions, on_start, self._clock())
        self._check(ticket)
        self._queue.push(ticket)
        self._queued.add(ticket)
        self._tenants.setdefault(tenant, TenantLoad()).queued.add(ticket)
        self._start_next()
        return ticket

    def check(self, *, tenant: str, sender: str, rows: int, positions: int) -> None:
        """Raises what ``enter`` would raise now; nothing is entered."""
        self._check(Ticket(tenant, sender, rows, positions, lambda: None, self._clock()))

    def _check(self, ticket: Ticket) -> None:
        if ticket.rows < 1 or ticket.positions < 1:
            raise InvalidRequestError(f"a query needs rows and positions, not {ticket.rows} and {ticket.positions}")
        if self._queued.requests or not self._can_start(ticket):
            self._check_may_wait(ticket)

    def leave(self, ticket: Ticket, *, finished: bool) -> None:
        """Free the place and start whose turn it is. ``finished``: its work was done, so it tells the throughput.

        Leaving twice changes nothing.
        """
        if ticket.left:
            return
        ticket.left = True
        load = self._tenants[ticket.tenant]
        if ticket.running:
            self._count_busy_seconds()
            self._throughput.add(work=ticket.work if finished else 0)
            self._running.subtract(ticket)
            load.running.subtract(ticket)
        else:
            self._queue.remove(ticket, served=False)
            self._queued.subtract(ticket)
            load.queued.subtract(ticket)
        if not load.requests:
            del self._tenants[ticket.tenant]
        self._start_next()

    def snapshot(self) -> AdmissionState:
        """The load now; a copy."""
        return AdmissionState(
            running=replace(self._running),
            queued=replace(self._queued),
            tenants={
                name: TenantLoad(replace(load.running), replace(load.queued)) for name, load in self._tenants.items()
            },
        )

    async def _turn(self, ticket: Ticket, started: asyncio.Event, seconds: float) -> None:
        if ticket.running:
            return
        try:
            async with asyncio.timeout(seconds):
                await started.wait()
        except TimeoutError:
            raise CapacityError(
                f"the request waited {seconds:g} s, its deadline, without a turn; try again later, or allow more time",
                retry_after=self._throughput.retry_after(self._running.work + self._queued.work),
            ) from None

    def _can_start(self, ticket: Ticket) -> bool:
        if not self._running.requests:
            return True
        return (
            self._running.work + ticket.work <= self.limits.max_running_work
            and self._running.rows + ticket.rows <= self.limits.max_running_rows
        )

    def _start_next(self) -> None:
        # Smaller work behind a head that does not fit yet must wait too, or else large work would never start.
        while len(self._queue) and self._can_start(ticket := self._queue.head()):
            self._count_busy_seconds()
            self._queue.remove(ticket, served=True)
            load = self._tenants[ticket.tenant]
            for queued, running in ((self._queued, self._running), (load.queued, load.running)):
                queued.subtract(ticket)
                running.add(ticket)
            ticket.running = True
            ticket.queued_seconds = self._clock() - ticket.arrived
            ticket.on_start()

    def _check_may_wait(self, ticket: Ticket) -> None:
        limits, held = self.limits, self._tenants.get(ticket.tenant, TenantLoad())
        share_of_work = limits.tenant_share * (limits.max_running_work + limits.max_queued_work)
        share_of_waiting = max(1.0, limits.tenant_share * limits.max_waiting)
        # A share of all is no share: what refuses then is the whole queue.
        over_work = held.requests and held.work + ticket.work > share_of_work
        if limits.tenant_share < 1.0 and (over_work or held.queued.requests + 1 > share_of_waiting):
            raise RateLimitError(
                f"this tenant holds {held.work} units of work (query rows x sender positions) in {held.requests} "
                f"requests, {held.queued.requests} of them waiting; its share is {share_of_work:.0f} units and "
                f"{share_of_waiting:.0f} waiting requests; wait for some to finish",
                retry_after=self._throughput.retry_after(held.work),
            )
        queued = self._queued
        if (queued.requests and queued.work + ticket.work > limits.max_queued_work) or (
            queued.requests + 1 > limits.max_waiting
        ):
            raise CapacityError(
                f"the queue is full: {queued.requests} of {limits.max_waiting} requests with {queued.work} of "
                f"{limits.max_queued_work} units of work (query rows x sender positions); try again later",
                retry_after=self._throughput.retry_after(self._running.work + queued.work),
            )

    def _count_busy_seconds(self) -> None:
        """Before the running work changes."""
        now = self._clock()
        if self._running.requests:
            self._throughput.add(busy_seconds=now - self._counted_until)
        self._counted_until = now


def _check_deadline(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequestError(f"{name} must be a positive number of seconds, not {seconds:g}", param=name)
