"""Whose turn it is: equal work, bounded waits, order within a sender."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_sglang.fair_queue import EqualWork, by_tenant_and_sender

examples = settings(max_examples=50, deadline=None)


@dataclass(frozen=True, eq=False)
class Job:
    tenant: str
    sender: str
    work: int
    number: int = 0


def queue_of(*jobs: Job) -> EqualWork[Job]:
    queue: EqualWork[Job] = by_tenant_and_sender()
    for job in jobs:
        queue.push(job)
    return queue


def serve(queue: EqualWork[Job]) -> Job:
    job = queue.head()
    queue.remove(job, served=True)
    return job


def serve_all(queue: EqualWork[Job]) -> list[Job]:
    return [serve(queue) for _ in range(len(queue))]


def test_senders_take_turns_and_keep_their_order() -> None:
    queue = queue_of(*(Job("t", sender, 10, n) for sender in "abc" for n in range(3)))
    order = [(job.sender, job.number) for job in serve_all(queue)]
    assert order == [(sender, n) for n in range(3) for sender in "abc"]
    assert len(queue) == 0


def test_turns_are_counted_in_work() -> None:
    queue = queue_of(*(Job("t", "large", 40, n) for n in range(3)), *(Job("t", "small", 10, n) for n in range(12)))
    first = Counter(job.sender for job in (serve(queue) for _ in range(10)))
    assert first == {"large": 2, "small": 8}  # 80 units each


def test_tenants_come_before_senders() -> None:
    many = [Job("many", f"sender {n}", 10) for n in range(30)]
    one = [Job("one", "sender", 10) for _ in range(5)]
    order = [job.tenant for job in serve_all(queue_of(*many, *one))]
    assert order[:10] == ["many", "one"] * 5  # 30 senders get their tenant no more than one does


def test_the_same_sender_of_two_tenants_has_two_places() -> None:
    queue = queue_of(*(Job("a", "shared", 10, n) for n in range(4)), Job("b", "shared", 10))
    assert [job.tenant for job in serve_all(queue)].index("b") == 1


def test_coming_back_gives_no_priority() -> None:
    queue = queue_of(Job("t", "patient", 10))
    turns = []
    for _ in range(3):
        queue.push(Job("t", "hasty", 10))  # never two at once, always there again
        turns.append(serve(queue).sender)
    assert turns.count("patient") == 1


def test_who_leaves_the_queue_changes_no_other_turn() -> None:
    jobs = [Job("t", sender, 10, n) for n in range(3) for sender in "ab"]
    queue = queue_of(*jobs)
    queue.remove(jobs[0], served=False)
    queue.remove(jobs[3], served=False)
    assert len(queue) == 4
    assert [(job.sender, job.number) for job in serve_all(queue)] == [("a", 1), ("b", 0), ("a", 2), ("b", 2)]


def test_many_that_leave_leave_nothing_behind() -> None:
    queue = queue_of(Job("t", "stays", 7))
    for n in range(2_000):
        jobs = [Job("t", "leaves", 5 + n % 3), Job("t", "leaves too", 5)]
        for job in jobs:
            queue.push(job)
        for job in jobs:
            queue.remove(job, served=False)
    inner = queue._lines["t"]
    assert isinstance(inner, EqualWork)
    assert len(queue) == len(inner._lines) == 1
    assert len(queue._heap) < 20 and len(inner._heap) < 20
    assert serve(queue).sender == "stays"


@pytest.mark.parametrize("level", ["tenant", "sender"])
@examples
@given(works=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=30), min_size=2, max_size=5))
def test_lines_that_wait_get_equal_work(level: str, works: list[list[int]]) -> None:
    by_tenant = level == "tenant"
    queue = queue_of(
        *(
            Job(str(n) if by_tenant else "t", "s" if by_tenant else str(n), work)
            for n, line in enumerate(works)
            for work in line
        )
    )
    served, left = Counter[int](), [len(line) for line in works]
    while all(left):
        job = serve(queue)
        line = int(getattr(job, level))
        served[line] += job.work
        left[line] -= 1
        # Golestani's bound: two lines that both wait differ by at most a largest piece of each.
        assert max(served[n] - max(works[n]) for n in range(len(works))) <= min(
            served[n] + max(works[n]) for n in range(len(works))
        )


@examples
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=5, max_size=60))
def test_nobody_waits_for_much_more_than_its_own_work(work: int, others: list[tuple[int, int]]) -> None:
    queue = queue_of(*(Job("t", str(sender), size) for sender, size in others))
    last = Job("t", "last", work)
    queue.push(last)
    before = Counter[str]()
    while (job := serve(queue)) is not last:
        before[job.sender] += job.work
        assert before[job.sender] <= work + 20
        queue.push(Job("t", job.sender, job.work))  # the others never run dry
