"""Admission against a plain model, step by step, and under many callers that come, wait, give up and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from virtual_time import run_virtually

from cb_sglang.admission import Admission, AdmissionLimits, Load, Ticket
from cb_sglang.errors import CapacityError, RateLimitError

LIMITS = AdmissionLimits(
    max_running_work=40, max_running_rows=12, max_queued_work=80, max_waiting=8, tenant_share=0.6, default_deadline=5
)
tenants = st.sampled_from("abc")
senders = st.sampled_from("xyz")
rows = st.integers(1, 14)
positions = st.integers(1, 8)


def load(tickets: Iterable[Ticket]) -> Load:
    total = Load()
    for ticket in tickets:
        total.add(ticket)
    return total


def runs_within_limits(running: Load) -> bool:
    within = running.work <= LIMITS.max_running_work and running.rows <= LIMITS.max_running_rows
    return within or running.requests == 1


class AdmissionMachine(RuleBasedStateMachine):
    """The model is the list of tickets that have not left, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.admission = Admission(LIMITS, clock=lambda: self.now)
        self.tickets: list[Ticket] = []
        self.starts = 0
        self.left_running = 0

    @property
    def running(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.running]

    @property
    def queued(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if not ticket.running]

    def start(self) -> None:
        self.starts += 1

    @rule(tenant=tenants, sender=senders, rows=rows, positions=positions)
    def enter(self, tenant: str, sender: str, rows: int, positions: int) -> None:
        work, held = rows * positions, [ticket for ticket in self.tickets if ticket.tenant == tenant]
        must_wait = bool(self.queued) or not runs_within_limits(
            Load(len(self.running) + 1, load(self.running).work + work, load(self.running).rows + rows)
        )
        over_share = (held and load(held).work + work > 0.6 * 120) or sum(not t.running for t in held) + 1 > 0.6 * 8
        full = len(self.queued) == 8 or (self.queued and load(self.queued).work + work > 80)
        try:
            ticket = self.admission.enter(
                tenant=tenant, sender=sender, rows=rows, positions=positions, on_start=self.start
            )
        except CapacityError as error:
            assert must_wait
            assert over_share if isinstance(error, RateLimitError) else (full and not over_share)
            assert error.retry_after is not None and 1 <= error.retry_after <= 60
        else:
            assert not (must_wait and (over_share or full))
            assert ticket.running or must_wait
            self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), finished=st.booleans())
    def leave(self, data: st.DataObject, finished: bool) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.left_running += ticket.running
        self.tickets.remove(ticket)
        self.admission.leave(ticket, finished=finished)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_counts_what_there_is(self) -> None:
        state = self.admission.snapshot()
        assert (state.running, state.queued) == (load(self.running), load(self.queued))
        assert state.receivers == len(self.tickets) and self.starts == self.left_running + len(self.running)
        assert {name: (held.running, held.queued) for name, held in state.tenants.items()} == {
            name: (load(t for t in self.running if t.tenant == name), load(t for t in self.queued if t.tenant == name))
            for name in {ticket.tenant for ticket in self.tickets}
        }

    @invariant()
    def it_exceeds_no_limit(self) -> None:
        assert runs_within_limits(load(self.running))
        assert len(self.queued) <= 8
        assert load(self.queued).work <= 80 or len(self.queued) == 1

    @invariant()
    def somebody_runs_while_others_wait(self) -> None:
        assert self.running or not self.queued

    @invariant()
    def work_of_one_sender_keeps_its_order(self) -> None:
        for place in {(ticket.tenant, ticket.sender) for ticket in self.queued}:
            running = [ticket.running for ticket in self.tickets if (ticket.tenant, ticket.sender) == place]
            assert running == sorted(running, reverse=True)

    def teardown(self) -> None:
        while self.tickets:
            ticket = self.running[0]  # there is one, or those that wait would wait for ever
            self.tickets.remove(ticket)
            self.admission.leave(ticket, finished=True)
        state = self.admission.snapshot()
        assert (state.running, state.queued, state.tenants) == (Load(), Load(), {})


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@dataclass(frozen=True)
class Caller:
    at: int
    tenant: str
    sender: str
    rows: int
    positions: int
    seconds: int
    fails: bool
    deadline: float
    cancelled_at: int | None


callers = st.builds(
    Caller,
    at=st.integers(0, 12),
    tenant=tenants,
    sender=senders,
    rows=rows,
    positions=positions,
    seconds=st.integers(0, 4),
    fails=st.booleans(),
    deadline=st.sampled_from([1.0, 3.0, 1_000.0]),
    cancelled_at=st.none() | st.integers(0, 16),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(callers, min_size=1, max_size=25))
def test_every_caller_gets_a_turn_or_an_error_and_nothing_is_left(drawn: list[Caller]) -> None:
    run_virtually(lambda: call_all(drawn))


async def call_all(drawn: list[Caller]) -> None:
    loop = asyncio.get_running_loop()
    admission = Admission(LIMITS, clock=loop.time)
    inside: list[Ticket] = []

    async def call(caller: Caller) -> str:
        await asyncio.sleep(caller.at)
        arrived = loop.time()
        place = admission.admit(
            tenant=caller.tenant,
            sender=caller.sender,
            rows=caller.rows,
            positions=caller.positions,
            deadline=caller.deadline,
        )
        try:
            async with place as ticket:
                assert ticket.queued_seconds == loop.time() - arrived <= caller.deadline
                inside.append(ticket)
                try:
                    assert runs_within_limits(load(inside))
                    await asyncio.sleep(caller.seconds)
                    if caller.fails:
                        raise ZeroDivisionError
                finally:
                    inside.remove(ticket)
        except CapacityError as error:
            assert loop.time() - arrived == (caller.deadline if "its deadline" in error.message else 0.0)
            return "refused"
        except ZeroDivisionError:
            return "failed"
        return "done"

    tasks = [asyncio.create_task(call(caller)) for caller in drawn]
    for task, caller in zip(tasks, drawn, strict=True):
        if caller.cancelled_at is not None:
            loop.call_at(caller.cancelled_at, task.cancel)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome, caller in zip(outcomes, drawn, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            assert caller.cancelled_at is not None
        else:
            assert outcome in ("refused", "failed" if caller.fails else "done")
    state = admission.snapshot()
    assert (state.running, state.queued, state.tenants) == (Load(), Load(), {})
