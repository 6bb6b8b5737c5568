"""``cb-loadtest capacity``: the knee of one workload, the costs behind it, and the curve that follows from both."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cb_loadtest.load.background import ChatTraffic
from cb_loadtest.load.bench import Bench, open_bench
from cb_loadtest.load.environment import page_size, provenance, server_info, told
from cb_loadtest.load.fitting import fitted_curve
from cb_loadtest.load.generator import Stop
from cb_loadtest.load.interrupt import stop_on_signal
from cb_loadtest.load.live import Live
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.schedule import plan
from cb_loadtest.load.search import Knee, KneeSearch, Probe, p99_with_failures, pace
from cb_loadtest.load.tally import Record, Step, Tally
from cb_loadtest.load.workload import MAX_REQUESTS, Workload
from cb_loadtest.recall_report import write_text
from cb_sglang.errors import CacheBackError

FORMAT = "cb-loadtest capacity 1"
_LEAST_ARRIVALS = 10  # that an open probe waits for, in the mean
_LEAST_OBJECTIVES = 10  # in the time of an open probe, or the pace would be that of a few slow requests
_FOR_REQUESTS = 0.1  # of the search's time, at most, for one open probe to get its requests


@dataclass(frozen=True, slots=True)
class CapacityOptions:
    """What the command line asks for.

    slo_ms:      objective for the 99th percentile of a whole request, failed ones counted as endless.
    highest:     largest concurrency or rate to try.
    requests:    of one probe. Closed loop: at most, but never fewer than twice the concurrency. Open loop: it lasts
                 until so many should have come, or a tenth of ``max_seconds``.
    seconds:     of one probe. Closed loop: at most. Open loop: at least, and 10 objectives and 10 arrivals at least.
    max_seconds: of the search; what runs then is finished.
    """

    workload: Workload
    mode: str
    slo_ms: float
    highest: float
    requests: int = 200
    seconds: float = 20.0
    max_probes: int = 24
    max_seconds: float = 600.0
    seed: int = 0
    timeout: float = 60.0
    url: str | None = None
    command: str = ""


def run_capacity(options: CapacityOptions, url: str, console: Console, out: Path) -> dict[str, Any]:
    """Search, fit, write, return what is written. Raises the client's errors when the server fails before the search.

    A search that is interrupted, or whose server dies, writes what was found; then there is no fit.
    """
    found = asyncio.run(find_capacity(options, url, console))
    write_text(out, json.dumps(found, indent=2, allow_nan=False) + "\n")
    return found


async def find_capacity(options: CapacityOptions, url: str, console: Console) -> dict[str, Any]:
    """Knee, service model and curve, all measured beside the workload's chats, with where they come from."""
    stop = Stop()
    workload = options.workload
    with stop_on_signal(stop), Live(console) as live:
        live.say(f"preparing workload {workload.name}")
        async with open_bench(
            url,
            workload,
            seed=options.seed,
            timeout=options.timeout,
            stop=stop,
            say=live.say,
        ) as bench:
            problems: list[str] = []
            server = await told(server_info(bench.admin), "/server_info", stop, problems) or {}
            chats = ChatTraffic(bench, stop)
            search = Search(options, bench, stop, live, chats, page_size(server))
            fitted: dict[str, Any] = {"service_model": None, "curve": []}
            async with chats.running():
                knee = await search.run()
                if not stop:
                    live.say("measuring calls of several sizes, for the service model")
                    closed, pool = options.mode == "closed", server.get("max_total_num_tokens")
                    try:
                        work = fitted_curve(
                            bench,
                            slo_ms=options.slo_ms,
                            receivers=int(knee.level) if closed and knee.level is not None else None,
                            p99_ms=knee.p99_ms,
                            pool=None if pool is None else int(pool),
                            answering=workload.receivers.answer_stages[-1],
                        )
                        fitted = await stop.unless_asked(work) or fitted
                    except CacheBackError as error:
                        stop.ask(f"the fit failed: {error.message}")
            if search.misses:
                problems.append(
                    f"{search.misses} requests of the probes did not find their sender in the cache, so prefills are "
                    "in their times and in the knee; give the server a larger KV pool, or the workload fewer senders"
                )
            return {
                "format": FORMAT,
                "mode": options.mode,
                "slo_p99_ms": options.slo_ms,
                "knee": {"level": knee.level, "p99_ms": knee.p99_ms, "ended": knee.ended},
                "probes": [
                    _json_probe(probe) | {"chat_itl_ms": gaps.milliseconds()}
                    for probe, gaps in zip(knee.probes, search.chat_gaps, strict=True)
                ],
                "problems": problems,
                "stopped": stop.reason,
                "chats": chats.report(),
                **fitted,
                "workload": workload.model_dump(),
                "seed": options.seed,
                **provenance(server, options.url, options.command),
            }


class Search:
    """The knee of a workload on a bench; ``page`` is the page size of the server's cache, where it is known.

    misses:    requests of the probes whose sender was not in the cache, as far as that is known.
    chat_gaps: of each probe; they are whole when the chats have ended.
    """

    def __init__(
        self, options: CapacityOptions, bench: Bench, stop: Stop, live: Live, chats: ChatTraffic, page: int | None
    ) -> None:
        self.misses = 0
        self.chat_gaps: list[Samples] = []
        self._options, self._bench, self._stop, self._live, self._page = options, bench, stop, live, page
        self._chats = chats
        self._answering = options.workload.receivers.answer_stages[-1]
        self._number = 0
        self._end = asyncio.get_running_loop().time() + options.max_seconds

    async def run(self) -> Knee:
        options = self._options
        await self._stop.unless_asked(self._bench.warm_up(["message"], self._answering))
        closed = options.mode == "closed"
        return await KneeSearch(
            self._probe,
            slo_ms=options.slo_ms,
            lowest=1.0 if closed else min(0.25, options.highest),
            highest=options.highest,
            whole=closed,
            max_probes=options.max_probes,
            out_of_time=self._out_of_time,
        ).run()

    async def _probe(self, level: float) -> Probe | None:
        """One load, its senders in the cache; each probe draws requests of its own. None when it was cut short."""
        options, closed = self._options, self._options.mode == "closed"
        self._number += 1
        tally = Tally(Step("message", self._answering, options.mode, level), options.slo_ms, self._page)
        count = max(options.requests, 2 * int(level)) if closed else None
        planned = plan(
            options.workload.queries,
            len(self._bench.content.senders),
            MAX_REQUESTS if count is None else count,
            seed=options.seed,
            label=f"probe/{self._number}/{level:g}",
            rate=None if closed else level,
        )
        times: list[tuple[float, float]] = []

        def sink(record: Record) -> None:
            if record.outcome is not None:
                times.append((record.due_at, record.ended_at))
            self._live.show(tally, tally.completed)

        self._live.begin(tally, count)
        try:
            await self._stop.unless_asked(self._bench.prime("message"))
        except CacheBackError as error:
            self._stop.ask(f"priming failed: {error.message}")
        seconds = options.seconds if closed else self._open_seconds(level)
        self._chats.measure_into(tally.chat_gaps)
        await self._bench.measure(tally, planned, turn=self._number, seconds=seconds, sink=sink)
        self._chats.measure_into(None)
        finished = tally.completed + tally.failed
        if self._stop or not finished:
            return None
        self._live.end(tally)
        self.misses += tally.misses or 0
        self.chat_gaps.append(tally.chat_gaps)
        p99 = p99_with_failures([1_000 * (ended - due) for due, ended in times], tally.failed)
        return Probe(level, p99, finished, tally.failed, tally.messages_per_s, 1.0 if closed else pace(times))

    def _open_seconds(self, level: float) -> float:
        """Of a probe in an open loop. It is bound by time alone, or a backlog would have no time to grow."""
        options = self._options
        for_requests = min(options.requests / level, _FOR_REQUESTS * options.max_seconds)
        wanted = max(_LEAST_ARRIVALS / level, _LEAST_OBJECTIVES * options.slo_ms / 1_000, for_requests)
        return max(options.seconds, min(wanted, options.max_seconds))

    def _out_of_time(self) -> str | None:
        if self._stop:
            return self._stop.reason
        if asyncio.get_running_loop().time() >= self._end:
            return f"the {self._options.max_seconds:g} seconds are used up"
        return None


def _json_probe(probe: Probe) -> dict[str, Any]:
    """JSON has no infinity; a p99 of failed requests is null."""
    return asdict(probe) | {"p99_ms": None if probe.p99_ms == float("inf") else round(probe.p99_ms, 3)}
