"""A simulated server: the real admission and budget code in front of a simulated engine and its pool."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import simpy

from cb_loadtest.planning.engine import Engine
from cb_loadtest.planning.pool import Pool
from cb_loadtest.planning.scenario import Outcome, Scenario
from cb_loadtest.planning.sim_engine import SimulatedEngine, Steps
from cb_sglang.admission import MIN_RETRY_AFTER, Admission
from cb_sglang.budget import positions_for_ratio
from cb_sglang.capacity import CapacitySnapshot, Grant, Policy, ReceiverNeed, grant
from cb_sglang.errors import CapacityError, ContextLengthError, RateLimitError


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


class _Refused(Exception):
    """A request ends without a message; ``retry_after`` in seconds."""

    def __init__(self, reason: str, retry_after: float = MIN_RETRY_AFTER) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


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
        self._without_grant = 0
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
        self._without_grant += 1
        try:
            granted = yield from self._message(tenant, sender)
        except _Refused as refusal:
            self._without_grant -= 1
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
        """Admission, the sender's KV, the grant, the score; raises _Refused. The receiver's positions stay reserved."""
        scenario, length = self._shared.scenario, self._shared.lengths[sender]
        started = self._env.event()

        def start() -> None:
            started.succeed()

        try:
            ticket = self._admission.enter(
                tenant=tenant, sender=str(sender), rows=scenario.rows, positions=length, on_start=start
            )
        except CapacityError as error:
            reason = "tenant_share" if isinstance(error, RateLimitError) else "queue_full"
            raise _Refused(reason, error.retry_after or MIN_RETRY_AFTER) from None
        finished = False
        try:
            deadline = self._env.timeout(scenario.limits.default_deadline)
            yield started | deadline
            if not ticket.running:
                raise _Refused("deadline")
            if self._shared.counting:
                self._shared.outcome.queued.add(ticket.queued_seconds)
            yield from self._bring_in(sender, length, deadline)
            try:
                granted = yield from self._grant(length, deadline)
                self._without_grant -= 1
                yield self._engine.score(sender, rows=scenario.rows, positions=length)
            finally:
                self.pool.unlock(sender)
                self._tell_room()
            finished = True
        finally:
            self._admission.leave(ticket, finished=finished)
        return granted

    def _bring_in(self, sender: int, length: int, deadline: simpy.Event) -> Steps:
        """Lock the sender's KV, prefilled again if it was evicted, once for all who wait for it."""
        if length > self._positions:
            raise _Refused("context")
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

    def _grant(self, length: int, deadline: simpy.Event) -> Generator[simpy.Event, Any, Grant]:
        """What the policy grants, its receiver's positions reserved; waits for room unless the policy is ``fixed``."""
        scenario = self._shared.scenario
        asked = positions_for_ratio(length, 0, scenario.ratio)
        while True:
            try:
                granted = grant(
                    asked,
                    minimum=min(scenario.min_budget, asked),
                    policy=self._shared.policy,
                    snapshot=self._snapshot(),
                    receiver=self._shared.receiver,
                )
            except ContextLengthError:
                raise _Refused("context") from None
            except CapacityError as error:
                if self._shared.policy == "fixed":
                    raise _Refused("pool", error.retry_after or MIN_RETRY_AFTER) from None
                yield from self._wait_for_room(deadline)
                continue
            self.pool.reserve(self._shared.receiver.positions(granted.granted))
            return granted

    def _answer(self, granted: Grant) -> Steps:
        """The receiver reads its message and answers."""
        scenario = self._shared.scenario
        read = granted.granted + scenario.prompt
        yield self._engine.prefill(rows=read)
        yield self._engine.decode(tokens=scenario.answer, positions=read)
        self.pool.release(self._shared.receiver.positions(granted.granted))
        self._tell_room()

    def _snapshot(self) -> CapacitySnapshot:
        """A receiver's positions are taken out of the pool with its grant, so running ones will need no more."""
        return CapacitySnapshot(
            pool_positions=self._positions,
            free_positions=self.pool.free,
            evictable_positions=self.pool.evictable + self.pool.pinned_resting,
            pinned_positions=self.pool.pinned_resting,
            running_positions=0,
            context_length=self._shared.engine.context_length,
            receivers=self._without_grant,
        )

    def _wait_for_room(self, deadline: simpy.Event) -> Steps:
        if deadline.processed:
            raise _Refused("pool")
        yield self._room | deadline

    def _tell_room(self) -> None:
        told, self._room = self._room, self._env.event()
        told.succeed()
