"""Grants against the laws they follow, written out a second time, and what they come to together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_sglang.budget import check_window
from cb_sglang.capacity import CapacitySnapshot, Grant, Limit, Policy, ReceiverNeed, grant
from cb_sglang.errors import BudgetError, CacheBackError, CapacityError, ContextLengthError, InvalidRequestError

POOL = CapacitySnapshot(
    pool_positions=100_000,
    free_positions=40_000,
    evictable_positions=30_000,
    pinned_positions=10_000,
    running_positions=12_000,
    context_length=32_768,
    receivers=16,
)  # 48,000 usable; 3,000 for each of 16
RECEIVER = ReceiverNeed(context_length=8_192, prompt_positions=500, reserved_output=700, senders=2)


def granted(asked: int, policy: Policy = "share", minimum: int = 64, **load: int) -> Grant:
    return grant(asked, minimum=minimum, policy=policy, snapshot=replace(POOL, **load), receiver=RECEIVER)


@pytest.mark.parametrize(
    ("asked", "policy", "load", "positions", "limit", "reason"),
    [
        (900, "share", {}, 900, "asked", "all 900 positions that were asked for fit"),
        (
            901,
            "share",
            {},
            900,
            "share",
            "(48000 usable / 16 receivers - 500 prompt - 700 reserved output) / 2 senders",
        ),
        (3_496, "share", {"receivers": 1}, 3_496, "asked", "all 3496"),
        (3_497, "share", {"receivers": 1}, 3_496, "window", "(8192 context - 500 prompt - 700 reserved output) / 2"),
        (3_497, "fit", {}, 3_496, "window", "= 3496 positions a message"),
        (3_000, "fit", {"running_positions": 54_999}, 1_900, "pool", "(5001 usable - 500 prompt"),
        (3_000, "share", {"context_length": 3_200, "receivers": 1}, 1_000, "window", "(3200 context"),
        (901, "share", {"receivers": 100}, 64, "share", "do not hold 100 such receivers at once"),
        (3_496, "fixed", {}, 3_496, "asked", "all 3496"),
    ],
)
def test_the_limit_that_binds(
    asked: int, policy: Policy, load: dict[str, int], positions: int, limit: Limit, reason: str
) -> None:
    made = granted(asked, policy, **load)
    assert (made.asked, made.granted, made.limit) == (asked, positions, limit)
    assert reason in made.reason


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: granted(63), BudgetError, r"budget \(63 positions\) must be at least the minimum \(64\)"),
        (lambda: granted(1, minimum=0), BudgetError, "at least 1"),
        (lambda: granted(3_497, "fixed"), ContextLengthError, "exceed the context length .8192. by 2 positions"),
        (lambda: granted(9_000, "share", 3_497), ContextLengthError, "by 2 positions; lower the budget"),
        (lambda: granted(3_000, "fixed", running_positions=58_000), CapacityError, "needs 7200 positions; 2000 of"),
        (lambda: granted(3_000, "fit", running_positions=58_673), CapacityError, "needs 1328 positions; 1327 of"),
        (lambda: granted(3_000, "share", running_positions=58_673), CapacityError, "try again later"),
        (
            lambda: granted(3_000, "fit", pool_positions=1_327, free_positions=1_327, evictable_positions=0),
            ContextLengthError,
            "it may have 1327 of the KV pool at most; lower the budget",
        ),
        (lambda: granted(3_000, "most"), InvalidRequestError, "policy must be one of fixed, fit, share, not most"),  # type: ignore[arg-type]
        (lambda: replace(POOL, free_positions=70_001), InvalidRequestError, "exceed the pool"),
        (lambda: replace(POOL, receivers=0), InvalidRequestError, "receivers must be at least 1, not 0"),
        (lambda: replace(POOL, running_positions=-1), InvalidRequestError, "running_positions must be at least 0"),
        (lambda: replace(RECEIVER, senders=0), InvalidRequestError, "senders must be at least 1"),
    ],
)
def test_refusals_say_what_to_change(call: object, error: type[CacheBackError], match: str) -> None:
    assert callable(call)
    with pytest.raises(error, match=match) as caught:
        call()
    assert type(caught.value) is error


def test_the_larger_of_known_and_told_receivers_counts() -> None:
    told = replace(RECEIVER, concurrent=32)
    crowd = grant(900, minimum=64, policy="share", snapshot=POOL, receiver=told)
    assert crowd == granted(900, receivers=32)
    assert granted(900, receivers=16) == grant(900, minimum=64, policy="share", snapshot=POOL, receiver=RECEIVER)
    alone = replace(RECEIVER, concurrent=1)  # a caller cannot talk the load away
    assert grant(901, minimum=64, policy="share", snapshot=POOL, receiver=alone).granted == 900


def test_a_receiver_elsewhere() -> None:
    there = CapacitySnapshot.idle(pool_positions=20_000, context_length=8_192)
    told = replace(RECEIVER, concurrent=10)
    assert grant(3_000, minimum=1, policy="share", snapshot=there, receiver=told).granted == 400
    unknown = grant(9_000, minimum=1, policy="share", snapshot=None, receiver=told)
    assert (unknown.granted, unknown.limit) == (3_496, "window")
    assert (unknown.pool_positions, unknown.share_positions) == (None, None)


@st.composite
def snapshots(draw: st.DrawFn) -> CapacitySnapshot:
    pool = draw(st.integers(400, 6_000))
    free = draw(st.integers(pool // 2, pool))
    return CapacitySnapshot(
        pool_positions=pool,
        free_positions=free,
        evictable_positions=draw(st.integers(0, pool - free)),
        pinned_positions=draw(st.integers(0, 300)),
        running_positions=draw(st.integers(0, 300)),
        context_length=draw(st.integers(200, 3_000)),
        receivers=draw(st.integers(1, 12)),
    )


needs = st.builds(
    ReceiverNeed,
    context_length=st.integers(200, 3_000),
    prompt_positions=st.integers(0, 60),
    reserved_output=st.integers(0, 60),
    senders=st.integers(1, 4),
    concurrent=st.integers(1, 12),
)
untold = needs.map(lambda need: replace(need, concurrent=1))
examples = settings(max_examples=50, deadline=None)
policies = st.sampled_from(get_args(Policy))
budgets = st.tuples(st.integers(1, 60), st.integers(0, 400)).map(lambda drawn: (drawn[0], sum(drawn)))  # minimum, asked


def outcome(asked: int, minimum: int, policy: Policy, snapshot: CapacitySnapshot, receiver: ReceiverNeed) -> int:
    """The grant, or 0 for a refusal."""
    try:
        return grant(asked, minimum=minimum, policy=policy, snapshot=snapshot, receiver=receiver).granted
    except CacheBackError:
        return 0


def taken(receiver: ReceiverNeed, message: int) -> int:
    return receiver.prompt_positions + receiver.reserved_output + receiver.senders * message


def is_allowed(
    message: int, asked: int, minimum: int, policy: Policy, snapshot: CapacitySnapshot, receiver: ReceiverNeed
) -> bool:
    """The laws again, by trying a message of this size against each."""
    need = taken(receiver, message)
    receivers = max(snapshot.receivers, receiver.concurrent)
    room = snapshot.free_positions + snapshot.evictable_positions
    room -= snapshot.pinned_positions + snapshot.running_positions
    fits_with_others = policy != "share" or message == minimum or need * receivers <= room
    fits_window = need <= min(snapshot.context_length, receiver.context_length)
    return fits_window and fits_with_others and need <= room and message <= asked


@examples
@given(budgets, policies, snapshots(), needs)
def test_a_grant_is_the_largest_that_exceeds_no_limit(
    budget: tuple[int, int], policy: Policy, snapshot: CapacitySnapshot, receiver: ReceiverNeed
) -> None:
    minimum, asked = budget
    message = outcome(asked, minimum, policy, snapshot, receiver)
    sizes = [asked] if policy == "fixed" else range(minimum, asked + 2)
    assert message == max((m for m in sizes if is_allowed(m, asked, minimum, policy, snapshot, receiver)), default=0)


@examples
@given(budgets, policies, snapshots(), needs)
def test_a_grant_reports_its_bounds(
    budget: tuple[int, int], policy: Policy, snapshot: CapacitySnapshot, receiver: ReceiverNeed
) -> None:
    minimum, asked = budget
    if not outcome(asked, minimum, policy, snapshot, receiver):
        return
    made = grant(asked, minimum=minimum, policy=policy, snapshot=snapshot, receiver=receiver)
    bounds = {
        "asked": made.asked,
        "window": made.window_positions,
        "pool": made.pool_positions,
        "share": made.share_positions,
    }
    assert made.granted == min(bound for bound in bounds.values() if bound is not None) == bounds[made.limit]
    assert (made.share_positions is None) == (policy != "share")
    assert str(made.granted) in made.reason
    check_window(
        context_length=receiver.context_length,
        prompt=receiver.prompt_positions,
        messages=receiver.senders * made.granted,
        reserved_output=receiver.reserved_output,
    )


@examples
@given(budgets, policies, snapshots(), needs, st.tuples(*[st.integers(0, 400)] * 5))
def test_more_load_never_gives_more(
    budget: tuple[int, int], policy: Policy, snapshot: CapacitySnapshot, receiver: ReceiverNeed, more: tuple[int, ...]
) -> None:
    loaded = replace(
        snapshot,
        free_positions=max(0, snapshot.free_positions - more[0]),
        evictable_positions=max(0, snapshot.evictable_positions - more[1]),
        pinned_positions=snapshot.pinned_positions + more[2],
        running_positions=snapshot.running_positions + more[3],
        receivers=snapshot.receivers + more[4],
    )
    minimum, asked = budget
    assert outcome(asked, minimum, policy, loaded, receiver) <= outcome(asked, minimum, policy, snapshot, receiver)


@examples
@given(st.lists(needs, min_size=1, max_size=12), budgets, snapshots())
def test_grants_from_one_snapshot_fit_together(
    receivers: list[ReceiverNeed], budget: tuple[int, int], snapshot: CapacitySnapshot
) -> None:
    minimum, asked = budget
    shared = replace(snapshot, receivers=len(receivers))
    room = shared.usable_positions // len(receivers)
    at_once = [receiver for receiver in receivers if taken(receiver, minimum) <= room]  # the others take turns
    messages = [(receiver, outcome(asked, minimum, "share", shared, receiver)) for receiver in at_once]
    assert sum(taken(receiver, message) for receiver, message in messages if message) <= shared.usable_positions


@examples
@given(st.lists(untold, min_size=1, max_size=12), budgets, policies, snapshots(), st.randoms(use_true_random=False))
def test_order_of_arrival_neither_starves_nor_overfills(
    receivers: list[ReceiverNeed], budget: tuple[int, int], policy: Policy, snapshot: CapacitySnapshot, random: Random
) -> None:
    minimum, asked = budget
    now = replace(snapshot, receivers=len(receivers))
    shares = {id(receiver): outcome(asked, minimum, "share", now, receiver) for receiver in receivers}
    all_fit = all(taken(r, minimum) <= now.usable_positions // len(receivers) for r in receivers)
    usable, total = now.usable_positions, 0
    random.shuffle(receivers)
    for receiver in receivers:
        message = outcome(asked, minimum, policy, now, receiver)
        need = taken(receiver, message) if message else 0
        total += need
        if policy == "share" and all_fit:
            assert message >= shares[id(receiver)]  # whatever those before it got
        left = max(1, now.receivers - 1)
        now = replace(now, running_positions=now.running_positions + need, receivers=left)
    assert total <= usable


@examples
@given(untold, budgets, snapshots())
def test_more_receivers_than_fit_are_served_in_turns(
    receiver: ReceiverNeed, budget: tuple[int, int], snapshot: CapacitySnapshot
) -> None:
    minimum, asked = budget
    now = idle = replace(snapshot, receivers=12)
    running: list[int] = []
    waiting = 12 if outcome(asked, minimum, "share", idle, receiver) else 0
    while waiting:
        message = outcome(asked, minimum, "share", now, receiver)
        if message:
            running.append(taken(receiver, message))
            waiting -= 1
        else:
            running.pop(0)  # would fail if it were refused with nothing running
        now = replace(idle, running_positions=idle.running_positions + sum(running), receivers=max(1, waiting))


def test_planners_need_no_engine() -> None:
    code = "import sys, cb_sglang.capacity, cb_sglang.admission; print({'torch', 'sglang'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
