"""Three times the load that the server can carry, against four fifths of it.

The capacity is what a closed loop gets. Then requests arrive as a Poisson process, whether the server keeps up or not,
and times count from the moment at which a request was due.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from api import Api, open_api
from serving import served

from cb_loadtest.load.generator import Stop, closed_loop, open_loop
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.schedule import Planned, plan
from cb_loadtest.load.workload import Queries

MAX_RUNNING_ROWS = 256
MAX_WAITING = 8
SENDERS, POSITIONS, BUDGET = 2, 1_024, 64
QUERIES, QUERY_TOKENS = 64, 16
CALLERS = 12  # of the closed loop
CAPACITY_SECONDS = 15.0
CALM_SECONDS = 30.0
SETTLE_SECONDS = 20.0
LOW, HIGH = 0.8, 3.0


@dataclass(slots=True)
class Step:
    """What came of the requests of one step; times in seconds from the moment a request was due.

    late: how much after that moment the generator sent it.
    """

    begun: int = 0
    answered: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    retry_after: Counter[str] = field(default_factory=Counter)
    admitted: Samples = field(default_factory=Samples)
    refused: Samples = field(default_factory=Samples)
    late: Samples = field(default_factory=Samples)

    def summary(self) -> dict[str, Any]:
        """For the report, in milliseconds."""
        return {
            "seconds": round(self.seconds, 2),
            "begun": self.begun,
            "answered": self.answered,
            "messages_per_s": round(self.codes["ok"] / self.seconds, 2),
            "codes": dict(self.codes),
            "retry_after": dict(self.retry_after),
            "admitted_ms": self.admitted.milliseconds(),
            "refused_ms": self.refused.milliseconds(),
            "generator_late_ms": self.late.milliseconds(),
        }


class Load:
    """Requests to some registered senders."""

    def __init__(self, api: Api, senders: list[str], draw: random.Random) -> None:
        self._api = api
        self._senders = senders
        self._queries = [draw.choices(range(1_000, 200_000), k=QUERY_TOKENS) for _ in range(QUERIES)]
        self._loop = asyncio.get_running_loop()
        self._draw = draw

    async def closed(self, callers: int, seconds: float) -> Step:
        """Every caller asks again as soon as it has its answer."""
        with self._step() as step:
            planned = self._planned(1_000_000, None)
            await closed_loop(planned, self._asking(step), concurrency=callers, stop=Stop(), seconds=seconds)
        return step

    async def open(self, rate: float, seconds: float) -> Step:
        """Requests at ``rate`` a second, at moments that are drawn beforehand."""
        with self._step() as step:
            planned = self._planned(math.ceil(2 * rate * seconds) + 100, rate)
            await open_loop(planned, self._asking(step), stop=Stop(), seconds=seconds)
        return step

    def _planned(self, count: int, rate: float | None) -> Iterator[Planned]:
        seed = self._draw.randrange(1 << 30)
        return plan(Queries(count=QUERIES), len(self._senders), count, seed=seed, label="overload", rate=rate)

    @contextmanager
    def _step(self) -> Iterator[Step]:
        step, started = Step(), self._loop.time()
        yield step
        step.seconds = self._loop.time() - started

    def _asking(self, step: Step) -> Any:
        async def perform(request: Planned, due: float) -> None:
            step.begun += 1
            step.late.add(max(0.0, self._loop.time() - due))
            sender, query = self._senders[request.sender], self._queries[request.question % QUERIES]
            try:
                reply = await self._api.ask(sender, query, budget=BUDGET)
            except (aiohttp.ClientError, TimeoutError) as error:
                step.codes[type(error).__name__] += 1
                return
            step.answered += 1
            step.codes[reply.code] += 1
            if reply.status == 200:
                step.admitted.add(self._loop.time() - due)
            else:
                step.refused.add(self._loop.time() - due)
                step.retry_after[str(reply.retry_after)] += 1

        return perform


def run(seconds: float, max_running_rows: int, max_waiting: int, *, seed: int) -> dict[str, Any]:
    """Figures of all three steps, and their comparison."""
    with served("--max-running-rows", str(max_running_rows), "--max-waiting", str(max_waiting)) as url:
        found = asyncio.run(measured(url, seconds, random.Random(seed)))
    return {"max_running_rows": max_running_rows, "max_waiting": max_waiting} | found


async def measured(url: str, seconds: float, draw: random.Random) -> dict[str, Any]:
    async with open_api(url) as api:
        tokens = range(1_000, 200_000)
        senders = [await api.register(draw.choices(tokens, k=POSITIONS)) for _ in range(SENDERS)]
        load = Load(api, senders, draw)
        await load.closed(CALLERS, 5.0)  # warms up
        capacity = await load.closed(CALLERS, CAPACITY_SECONDS)
        rate = capacity.codes["ok"] / capacity.seconds
        low = await load.open(LOW * rate, CALM_SECONDS)
        high = await load.open(HIGH * rate, seconds)
        counters = await settled(api)
        after = await load.open(LOW * rate, CALM_SECONDS)
    p99 = {name: step.admitted.percentile(99) for name, step in (("low", low), ("high", high))}
    return {
        "capacity": capacity.summary(),
        f"open_{LOW:g}x": low.summary(),
        f"open_{HIGH:g}x": high.summary(),
        f"open_{LOW:g}x_afterwards": after.summary(),
        "admitted_p99_ratio": round(p99["high"] / p99["low"], 2) if p99["low"] and p99["high"] else None,
        "counters_after_overload": counters,
    }


async def settled(api: Api) -> dict[str, int]:
    """The server's counters once they are all zero, or as they are after SETTLE_SECONDS."""
    loop = asyncio.get_running_loop()
    end = loop.time() + SETTLE_SECONDS
    while True:
        counters = await api.counters()
        if not any(counters.values()) or loop.time() > end:
            return counters
        await asyncio.sleep(0.2)
