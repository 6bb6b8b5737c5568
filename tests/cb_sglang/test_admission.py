"""Admission in virtual time: bounds, turns, deadlines, and that whoever leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from virtual_time import run_virtually

from cb_sglang.admission import (
    MAX_RETRY_AFTER,
    MIN_RETRY_AFTER,
    Admission,
    AdmissionLimits,
    AdmissionState,
    Load,
    Throughput,
    Ticket,
)
from cb_sglang.errors import CapacityError, InvalidRequestError, RateLimitError

LIMITS = AdmissionLimits(
    max_running_work=100, max_running_rows=10, max_queued_work=300, max_waiting=8, tenant_share=0.5, default_deadline=9
)  # a tenant: 200 units of work, 4 waiting requests
ONE_TENANT = replace(LIMITS, tenant_share=1.0)
IDLE = AdmissionState(running=Load(), queued=Load(), tenants={})


def virtual_admission(limits: AdmissionLimits = LIMITS) -> Admission:
    return Admission(limits, clock=asyncio.get_running_loop().time)


async def work(
    admission: Admission, seconds: float = 1.0, *, rows: int = 5, positions: int = 10, sender: str = "s", **more: Any
) -> float:
    """Hold a place for some seconds; how long it was waited for."""
    async with admission.admit(sender=sender, rows=rows, positions=positions, **{"tenant": "t", **more}) as ticket:
        await asyncio.sleep(seconds)
        return ticket.queued_seconds


def enter(admission: Admission, work: int = 50, *, tenant: str = "t", sender: str = "s", rows: int = 5) -> Ticket:
    return admission.enter(tenant=tenant, sender=sender, rows=rows, positions=work // rows)


def stopped() -> float:
    return 0.0


def test_two_fit_and_the_third_waits() -> None:
    async def test() -> None:
        admission = virtual_admission()
        waited = await asyncio.gather(*(work(admission, 2.0) for _ in range(3)))
        assert waited == [0.0, 0.0, 2.0]
        assert admission.snapshot() == IDLE

    run_virtually(test)


@pytest.mark.parametrize(("rows", "work", "together"), [(5, 50, 2), (5, 51 * 5, 1), (6, 12, 1), (3, 9, 3), (1, 10, 10)])
def test_both_work_and_rows_bound_what_runs(rows: int, work: int, together: int) -> None:
    admission = Admission(AdmissionLimits(max_running_work=100, max_running_rows=10), clock=stopped)
    tickets = [enter(admission, work, rows=rows) for _ in range(20)]
    assert [ticket.running for ticket in tickets] == [True] * together + [False] * (20 - together)


def test_work_larger_than_the_bound_runs_alone() -> None:
    admission = Admission(LIMITS, clock=stopped)
    small = enter(admission, 10)
    large = enter(admission, 150, tenant="other")
    after = enter(admission, 10)
    admission.leave(small, finished=True)
    assert (large.running, after.running) == (False, True)  # less work has its turn first
    admission.leave(after, finished=True)
    late = enter(admission, 10)
    assert (large.running, late.running) == (True, False)
    admission.leave(large, finished=True)
    assert late.running


def test_small_work_does_not_pass_a_head_that_must_wait() -> None:
    admission = Admission(LIMITS, clock=stopped)
    first = enter(admission, 60, sender="a")
    large = enter(admission, 50, sender="b")
    small = [enter(admission, 40, sender="b")]  # would fit beside the first
    assert not large.running and not small[0].running
    admission.leave(first, finished=True)
    assert large.running and small[0].running


def test_a_flood_delays_another_tenant_by_one_turn() -> None:
    admission = Admission(AdmissionLimits(max_running_work=100, max_queued_work=100_000), clock=stopped)
    running = [enter(admission, 100, tenant="flood", sender=str(n)) for n in range(60)]
    guest = enter(admission, 100, tenant="guest")
    turns = 0
    while not guest.running:
        turns += 1
        admission.leave(next(t for t in running if t.running and not t.left), finished=True)
    assert turns <= 2


def test_a_tenant_over_its_share_is_told_so() -> None:
    admission = Admission(LIMITS, clock=stopped)
    for _ in range(4):
        enter(admission, 50)
    with pytest.raises(
        RateLimitError, match=r"holds 200 units of work .* in 4 requests, 2 of them waiting; its share is"
    ):
        enter(admission, 50)
    assert not enter(admission, 50, tenant="other").running  # whose room it leaves


def test_a_tenant_may_not_fill_the_queue_with_small_requests() -> None:
    admission = Admission(LIMITS, clock=stopped)
    enter(admission, 10, rows=10)
    for _ in range(4):
        enter(admission, 1, rows=1)
    with pytest.raises(RateLimitError, match="4 waiting requests") as caught:
        enter(admission, 1, rows=1)
    assert (caught.value.status, caught.value.code) == (429, "tenant_over_share")


def test_what_can_start_at_once_is_never_refused() -> None:
    limits = AdmissionLimits(max_running_work=100, max_queued_work=100, tenant_share=0.1)
    admission = Admission(limits, clock=stopped)
    assert enter(admission, 50).running and enter(admission, 50).running
    with pytest.raises(RateLimitError):
        enter(admission, 1, rows=1)


def test_a_full_queue_is_503_to_a_tenant_within_its_share() -> None:
    by_work, by_requests = Admission(LIMITS, clock=stopped), Admission(LIMITS, clock=stopped)
    for _ in range(4):
        enter(by_work, 50, tenant="a")
        enter(by_work, 50, tenant="b")
    enter(by_requests, 100)
    for n in range(8):
        enter(by_requests, 1, tenant=f"tenant {n}", rows=1)
    for admission, match in ((by_work, "300 of 300 units of work"), (by_requests, "8 of 8 requests")):
        with pytest.raises(CapacityError, match=match) as caught:
            enter(admission, 1, tenant="new", rows=1)
        assert (caught.value.status, caught.value.code) == (503, "server_overloaded")


def test_retry_after_follows_the_measured_throughput() -> None:
    now = 0.0
    limits = AdmissionLimits(max_running_work=100, max_queued_work=400, tenant_share=1.0)
    admission = Admission(limits, clock=lambda: now)

    def retry_after() -> float | None:
        with pytest.raises(CapacityError) as caught:
            enter(admission, 1, tenant="new", rows=1)
        return caught.value.retry_after

    tickets = [enter(admission, 50) for _ in range(10)]
    assert retry_after() == MIN_RETRY_AFTER  # nothing has finished yet
    now = 10.0
    admission.leave(tickets[0], finished=True)
    admission.leave(tickets[1], finished=True)  # 100 units in 10 s
    for ticket in tickets[2:]:
        admission.leave(ticket, finished=False)  # given up: no measure of speed, and idle time is none either
    now = 500.0
    for _ in range(10):
        enter(admission, 50)
    assert retry_after() == pytest.approx(50.0)  # 500 units before it


def test_throughput_forgets_and_stays_within_bounds() -> None:
    throughput = Throughput()
    for _ in range(100):
        throughput.add(work=100, busy_seconds=1.0)
    assert throughput.retry_after(2_000) == pytest.approx(20.0)
    for _ in range(200):
        throughput.add(work=10, busy_seconds=1.0)
    assert throughput.retry_after(200) == pytest.approx(20.0, rel=0.02)
    assert throughput.retry_after(1) == MIN_RETRY_AFTER
    assert throughput.retry_after(10**12) == MAX_RETRY_AFTER


@pytest.mark.parametrize(("deadline", "seconds"), [(None, 9.0), (2.5, 2.5)])
def test_a_deadline_that_passes_in_the_queue_is_503(deadline: float | None, seconds: float) -> None:
    async def test() -> None:
        admission = virtual_admission()
        running = asyncio.create_task(work(admission, 20.0, positions=20))
        late = asyncio.create_task(work(admission, deadline=deadline))
        patient = asyncio.create_task(work(admission, deadline=60))
        with pytest.raises(CapacityError, match=f"waited {seconds:g} s, its deadline") as caught:
            await late
        assert asyncio.get_running_loop().time() == pytest.approx(seconds)
        assert caught.value.status == 503 and caught.value.retry_after == MIN_RETRY_AFTER
        assert admission.snapshot().queued == Load(1, 50, 5)
        assert [await running, await patient] == pytest.approx([0.0, 20.0])
        assert admission.snapshot() == IDLE

    run_virtually(test)


def test_a_cancelled_caller_leaves_the_queue_at_once() -> None:
    async def test() -> None:
        admission = virtual_admission(ONE_TENANT)
        running = asyncio.create_task(work(admission, 5.0, positions=20))
        leaving, next_one = (asyncio.create_task(work(admission, positions=20)) for _ in range(2))
        await asyncio.sleep(1)
        leaving.cancel()
        await asyncio.sleep(0)
        assert admission.snapshot().queued == Load(1, 100, 5)
        assert (await running, await next_one) == (0.0, 5.0)
        assert leaving.cancelled()
        assert admission.snapshot() == IDLE

    run_virtually(test)


def test_a_turn_given_to_a_caller_that_is_cancelled_goes_to_the_next() -> None:
    async def test() -> None:
        admission = virtual_admission(ONE_TENANT)
        place = admission.admit(tenant="t", sender="s", rows=5, positions=20)
        await place.__aenter__()
        leaving, next_one = (asyncio.create_task(work(admission, positions=20)) for _ in range(2))
        await asyncio.sleep(1)
        await place.__aexit__(None, None, None)  # starts the first of them, which has not run since
        leaving.cancel()
        assert await next_one == 1.0
        assert leaving.cancelled()
        assert admission.snapshot() == IDLE

    run_virtually(test)


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
def test_a_body_that_fails_frees_its_place_and_tells_no_throughput(failure: type[BaseException]) -> None:
    async def test() -> None:
        admission = virtual_admission(ONE_TENANT)
        with pytest.raises(failure):
            async with admission.admit(tenant="t", sender="s", rows=5, positions=10):
                await asyncio.sleep(10)
                raise failure
        assert admission.snapshot() == IDLE
        for _ in range(4):
            enter(admission, 100)
        with pytest.raises(CapacityError) as caught:
            enter(admission, 100)
        assert caught.value.retry_after == MIN_RETRY_AFTER

    run_virtually(test)


def test_the_state_is_a_copy_with_every_tenant() -> None:
    admission = Admission(LIMITS, clock=stopped)
    enter(admission, 100, tenant="a")
    waiting = enter(admission, 50, tenant="b")
    state = admission.snapshot()
    admission.leave(waiting, finished=False)
    admission.leave(waiting, finished=False)  # twice changes nothing
    assert state.receivers == 2
    assert (state.running, state.queued) == (Load(1, 100, 5), Load(1, 50, 5))
    assert {name: (load.running, load.queued) for name, load in state.tenants.items()} == {
        "a": (Load(1, 100, 5), Load()),
        "b": (Load(), Load(1, 50, 5)),
    }
    assert set(admission.snapshot().tenants) == {"a"}


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"max_running_work": 0}, "max_running_work must be at least 1, not 0"),
        ({"max_waiting": -1}, "max_waiting must be at least 1"),
        ({"tenant_share": 0.0}, "tenant_share must be above 0 and at most 1, not 0"),
        ({"tenant_share": float("nan")}, "tenant_share"),
        ({"default_deadline": float("inf")}, "default_deadline must be a positive number of seconds"),
    ],
)
def test_limits_out_of_range(setting: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        AdmissionLimits(**setting)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"positions": 0}, {"deadline": 0.0}, {"deadline": float("nan")}])
def test_requests_out_of_range(wrong: dict[str, Any]) -> None:
    async def test() -> None:
        admission = virtual_admission()
        with pytest.raises(InvalidRequestError):
            await work(admission, **wrong)
        assert admission.snapshot() == IDLE

    run_virtually(test)
