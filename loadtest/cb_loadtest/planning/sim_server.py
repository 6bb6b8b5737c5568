"""A simulated server: the real grants and admission in front of a simulated engine and its pool."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import simpy

from cb_loadtest.planning.engine import Engine
from cb_loadtest.planning.pool import Pool
from cb_loadtest.planning.scenario import Outcome, Scenario
from cb_loadtest.planning.sim_engine import SimulatedEngine, Steps
from cb_sglang.admission import MIN_RETRY_AFTER, Admission
from cb_sglang.budget import positions_for_ratio
from cb_sglang.capacity import CapacitySnapshot, Grant, Policy, ReceiverNeed, grant
from cb_sglang.errors import CapacityError, ContextLengthError, RateLimitError
from cb_sglang.grants import Grants
from cb_sglang.seam.engine import EngineLoad


@dataclass(frozen=True, slots=True)
class Shared:
    """What all servers of a run have in common. ``lengths``: positions of every sender, by its number."""

    env: simpy.Environment
    scenario: Scenario
    engine: Engine
    policy: Policy
    lengths: list[int]
    outcome: Outcome
    counting_from: float

    @property
    def counting(self) -> bool:
        return self.env.now >= self.counting_from

    @property
    def receiver(self) -> ReceiverNeed:
        return ReceiverNeed(
            context_length=self.engine.context_length,
            prompt_positions=self.scenario.prompt,
            reserved_output=self.scenario.answer,
        )


@dataclass(frozen=True, slots=True)
class _PoolLoad:
    """What ``Grants`` asks of an engine."""

    pool: Pool
    context_length: int

    async def load(self) -> EngineLoad:
        used = self.pool.positions - self.pool.free - self.pool.evictable
        return EngineLoad(self.pool.positions, used, running_requests=0, waiting_requests=0)


class _Refused(Exception):
    """A request ends without a message; ``retry_after`` in seconds."""

    def __init__(self, reason: str, retry_after: float = MIN_RETRY_AFTER) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


@contextmanager
def _as_refusal() -> Iterator[None]:
    """What admission refuses with, by its reason."""
    try:
        yield
    except CapacityError as error:
        reason = "tenant_share" if isinstance(error, RateLimitError) else "queue_full"
        raise _Refused(reason, error.retry_after or MIN_RETRY_AFTER) from None


class SimulatedServer:
    """One engine with its pool, queue and senders. All of a sender's requests come to the same server."""

    def __init__(self, shared: Shared, number: int) -> None:
        scenario = shared.scenario
        self._shared = shared
        self._env = shared.env
        self._positions = shared.engine.pool_positions
        own = range(number, scenario.senders, scenario.servers)
        self.pool = Pool(self._positions, self._pinned(own))
        self._admission = Admission(scenario.limits, clock=lambda: shared.env.now)
        self._engine = SimulatedEngine(shared.env, shared.engine)
        self._grants = Grants(
            cast(Any, _PoolLoad(self.pool, shared.engine.context_length)),
            pins_to_come=lambda used: 0,  # pinned senders are in the pool from the beginning
            max_waiting=scenario.limits.max_waiting,
            tenant_share=scenario.limits.tenant_share,
        )
        self._rebuilding: dict[int, simpy.Event] = {}
        self._room = shared.env.event()
        for sender in own:  # the most popular have been read before the simulation begins
            if self.pool.free < shared.lengths[sender]:
                break
            self.pool.place(sender, shared.lengths[sender])

    def _pinned(self, own: range) -> Iterator[int]:
        room = self._positions // 2
        for sender in own[: self._shared.scenario.pinned]:
            room -= self._shared.lengths[sender]
            if room < 0:
                return
            yield sender

    def serve(self, tenant: str, sender: int) -> Generator[simpy.Event, Any, float]:
        """One request from its arrival to the end of the answer; returns the seconds of a refusal's Retry-After."""
        shared, outcome, arrived = self._shared, self._shared.outcome, self._env.now
        outcome.requests += shared.counting
        try:
            granted = yield from self._message(tenant, sender)
        except _Refused as refusal:
            if shared.counting:
                outcome.refused[refusal.reason] += 1
            return refusal.retry_after
        if shared.counting:
            outcome.messages += 1
            outcome.message.add(self._env.now - arrived)
            outcome.kept.add(granted.granted / granted.asked)
            outcome.grants[granted.limit] += 1
        yield from self._answer(granted)
        if shared.counting:
            outcome.answers += 1
            outcome.answer.add(self._env.now - arrived)
        return 0.0

    def _message(self, tenant: str, sender: int) -> Generator[simpy.Event, Any, Grant]:
        """As cb_sglang.service does it: the grant, a turn, the sender's KV, all before one deadline; then the score.

        Raises _Refused.
        """
        length = self._shared.lengths[sender]
        if length > self._positions:
            raise _Refused("context")
        with _as_refusal():
            self._admission.check(tenant=tenant, sender=str(sender), rows=1, positions=length)
        deadline = self._env.timeout(self._shared.scenario.limits.default_deadline)
        try:
            with self._grants.receivers(tenant, 1) as mine:
                granted = yield from self._grant(tenant, length, deadline)
                mine.count(waiting=-1, granted=self._shared.receiver.positions(granted.granted))
                yield from self._scored(tenant, sender, length, deadline)
        except _Refused:
            self._tell_room()
            raise
        return granted

    def _scored(self, tenant: str, sender: int, length: int, deadline: simpy.Event) -> Steps:
        rows = self._shared.scenario.rows
        started = self._env.event()

        def start() -> None:
            started.succeed()

        with _as_refusal():
            ticket = self._admission.enter(
                tenant=tenant, sender=str(sender), rows=rows, positions=length, on_start=start
            )
        finished = False
        try:
            yield started | deadline
            if not ticket.running:
                raise _Refused("deadline")
            if self._shared.counting:
                self._shared.outcome.queued.add(ticket.queued_seconds)
            yield from self._bring_in(sender, length, deadline)
            yield self._engine.score(sender, rows=rows, positions=length)
            self.pool.unlock(sender)
            self._tell_room()
            finished = True
        finally:
            self._admission.leave(ticket, finished=finished)

    def _bring_in(self, sender: int, length: int, deadline: simpy.Event) -> Steps:
        """Lock the sender's KV, prefilled again if it was evicted, once for all who wait for it."""
        while sender not in self.pool:
            if self.pool.place(sender, length):
                self._shared.outcome.rebuilds += self._shared.counting
                self._rebuilding[sender] = self._engine.prefill(rows=length)
            else:
                yield from self._wait_for_room(deadline)
        self.pool.lock(sender)
        rebuilt = self._rebuilding.get(sender)
        if rebuilt is not None:
            yield rebuilt
            self._rebuilding.pop(sender, None)

    def _grant(self, tenant: str, length: int, deadline: simpy.Event) -> Generator[simpy.Event, Any, Grant]:
        """What the policy grants; waits for room, in one of the places for that, as cb_sglang.grants does it."""
        scenario = self._shared.scenario
        asked = positions_for_ratio(length, 0, scenario.ratio)
        waiting = False
        with ExitStack() as place:
            while True:
                try:
                    return grant(
                        asked,
                        minimum=min(scenario.min_budget, asked),
                        policy=self._shared.policy,
                        snapshot=self._snapshot(tenant),
                        receiver=self._shared.receiver,
                    )
                except ContextLengthError:
                    raise _Refused("context") from None
                except CapacityError:
                    pass
                if not waiting and not deadline.processed:
                    with _as_refusal():
                        place.enter_context(self._grants.queue.counted(tenant))
                    waiting = True
                yield from self._wait_for_room(deadline)

    def _answer(self, granted: Grant) -> Steps:
        """The receiver, once it has room, reads its message and answers."""
        scenario, taken = self._shared.scenario, self._shared.receiver.positions(granted.granted)
        read = granted.granted + scenario.prompt
        while not self.pool.reserve(taken):
            yield self._room
        yield self._engine.prefill(rows=read)
        yield self._engine.decode(tokens=scenario.answer, positions=read)
        self.pool.release(taken)
        self._tell_room()

    def _snapshot(self, tenant: str) -> CapacitySnapshot:
        asked = self._grants.snapshot(tenant)
        try:
            asked.send(None)  # what it awaits takes no time here, so it ends at once
        except StopIteration as done:
            found: CapacitySnapshot = done.value
            return found
        raise RuntimeError("the server's snapshot waits for something that is not simulated")

    def _wait_for_room(self, deadline: simpy.Event) -> Steps:
        if deadline.processed:
            raise _Refused("pool")
        yield self._room | deadline

    def _tell_room(self) -> None:
        told, self._room = self._room, self._env.event()
        told.succeed()
