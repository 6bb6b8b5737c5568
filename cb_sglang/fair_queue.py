"""Whose turn it is: tenants, then their senders, get equal amounts of work; one sender's work keeps its order."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """Hashable by identity. ``work`` is at least 1."""

    @property
    def tenant(self) -> str: ...
    @property
    def sender(self) -> str: ...
    @property
    def work(self) -> int: ...


JobT = TypeVar("JobT", bound=Job)


class Line(Protocol[JobT]):
    """Jobs in the order in which they should be served."""

    def __len__(self) -> int:
        """How many jobs wait."""

    def push(self, job: JobT) -> None:
        """Add a job."""

    def head(self) -> JobT:
        """The next job; there must be one."""

    def remove(self, job: JobT, *, served: bool) -> None:
        """Take out a waiting job: the head to serve it, or any because nobody waits for it any more."""


class FirstCome(Generic[JobT]):
    """Jobs in the order of their arrival."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobT, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, job: JobT) -> None:
        self._jobs[job] = None

    def head(self) -> JobT:
        return next(iter(self._jobs))

    def remove(self, job: JobT, *, served: bool) -> None:
        del self._jobs[job]


class EqualWork(Generic[JobT]):
    """Lines that take turns, so that each gets the same work while it waits: self-clocked fair queueing.

    Each line's tag is the work up to which it was served plus its head's work; the lowest tag goes first, and the clock
    moves there. A line that joins starts at the clock, so nothing of idle lines is kept. A head waits for at most about
    its own work from every other line, hence nobody starves. O(log lines) an operation.

    Source: Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994.
    """

    def __init__(self, key: Callable[[JobT], str], make_line: Callable[[], Line[JobT]]) -> None:
        self._key = key
        self._make_line = make_line
        self._lines: dict[str, Line[JobT]] = {}
        self._served: dict[str, int] = {}
        self._ranks: dict[str, tuple[int, int, str]] = {}  # tag, arrival, key
        self._heap: list[tuple[int, int, str]] = []  # of ranks, with outdated ones between them
        self._arrivals = count()
        self._clock = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, job: JobT) -> None:
        key = self._key(job)
        if key not in self._lines:
            self._lines[key] = self._make_line()
            self._served[key] = self._clock
        self._lines[key].push(job)
        self._size += 1
        self._rank(key)

    def head(self) -> JobT:
        while self._ranks.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._lines[self._heap[0][2]].head()

    def remove(self, job: JobT, *, served: bool) -> None:
        key = self._key(job)
        if served:
            self._served[key] += job.work
            self._clock = max(self._clock, self._served[key])
        self._lines[key].remove(job, served=served)
        self._size -= 1
        if len(self._lines[key]):
            self._rank(key)
        else:
            del self._lines[key], self._served[key], self._ranks[key]

    def _rank(self, key: str) -> None:
        tag = self._served[key] + self._lines[key].head().work
        if key in self._ranks and self._ranks[key][0] == tag:
            return
        self._ranks[key] = (tag, next(self._arrivals), key)
        heapq.heappush(self._heap, self._ranks[key])
        if len(self._heap) > 2 * len(self._lines) + 16:
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)


def by_tenant_and_sender() -> EqualWork[JobT]:
    """Equal work for tenants first, then for the senders of each."""
    return EqualWork(lambda job: job.tenant, lambda: EqualWork(lambda job: job.sender, FirstCome))
