"""Which request comes when: drawn from the seed in advance, so that nothing the server does can change it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cb_loadtest.load.workload import Queries


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: which sender is asked which question. ``offset``: seconds from the step's start (open loop)."""

    index: int
    sender: int
    question: int
    offset: float = 0.0


def plan(
    queries: Queries, senders: int, count: int, *, seed: int, label: str, rate: float | None = None
) -> Iterator[Planned]:
    """``count`` requests, one after another; with ``rate`` (per second) as a Poisson process.

    ``label`` tells steps apart. The ways of a step share it, so they are asked the same.
    """
    picks = random.Random(f"requests/{seed}/{label}")
    arrivals = random.Random(f"arrivals/{seed}/{label}")
    order = list(range(queries.count))
    picks.shuffle(order)
    fresh, offset = 0, 0.0
    for index in range(count):
        if fresh and picks.random() < queries.repeated_share:
            question = order[picks.randrange(min(fresh, queries.count))]
        else:
            question = order[fresh % queries.count]
            fresh += 1
        if rate is not None:
            offset += arrivals.expovariate(rate)
        yield Planned(index, picks.randrange(senders), question, offset)
