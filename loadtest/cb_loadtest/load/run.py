"""One run from the first to the last step: prepare, warm up, prime, measure, verify the cache hits, write."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from cb_loadtest.load.background import ChatTraffic
from cb_loadtest.load.bench import Bench, open_bench
from cb_loadtest.load.environment import page_size, provenance, server_info, told
from cb_loadtest.load.generator import Stop
from cb_loadtest.load.interrupt import stop_on_signal
from cb_loadtest.load.live import Live
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.schedule import Planned, plan
from cb_loadtest.load.server_metrics import Series, changes, scrape
from cb_loadtest.load.summary import figures
from cb_loadtest.load.tally import Record, Step, Tally
from cb_loadtest.load.workload import MAX_REQUESTS, Workload
from cb_loadtest.recall_report import write_text
from cb_sglang.client import APIConnectionError
from cb_sglang.errors import CacheBackError

FORMAT = "cb-loadtest run 1"
_DIGESTED_REQUESTS = 256
_SAME_SIZE = 0.01  # share by which messages and text reports may differ in size


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command line asks for.

    levels:  concurrencies of a closed loop, or rates per second of an open one.
    seconds: bound of each round instead of the workload's number of requests.
    timeout: seconds for one HTTP request.
    """

    workload: Workload
    mode: str
    levels: tuple[float, ...]
    ways: tuple[str, ...]
    seconds: float | None = None
    slo_ms: float = 2_000.0
    seed: int = 0
    timeout: float = 600.0
    url: str | None = None
    command: str = ""


class LoadRun:
    """Runs the steps of ``options`` on a bench and keeps what they gave, whatever happens."""

    def __init__(self, options: LoadOptions, bench: Bench, stop: Stop, live: Live, records: TextIO) -> None:
        self.options = options
        self.steps: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.page_size: int | None = None
        self.chats = ChatTraffic(bench, stop)
        self._bench, self._stop, self._live, self._records = bench, stop, live, records
        self._chat_gaps: list[Samples] = []  # of the steps, in their order
        self._start = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """All steps; ends early on a stop. Nothing that the server does is raised after the warm-up."""
        options = self.options
        stages = options.workload.receivers.answer_stages
        for answering in stages:
            await self._stop.unless_asked(self._bench.warm_up(options.ways, answering))
        if options.workload.chats.concurrency:
            self._live.say("chats alone, to compare with")
        async with self.chats.running():
            for answering, level in product(stages, options.levels):
                if not self._stop:
                    await self._level(level, answering)
        for step, gaps in zip(self.steps, self._chat_gaps, strict=True):
            step["chat_itl_ms"] = gaps.milliseconds()  # some ended after their step
            self._write(step)

    async def _scrape(self) -> Series | None:
        return await told(scrape(self._bench.admin), "/metrics", self._stop, self.problems)

    async def _level(self, level: float, answering: bool) -> None:
        """The ways, in turns, at one level."""
        options = self.options
        tallies = {
            way: Tally(Step(way, answering, options.mode, level), options.slo_ms, self.page_size)
            for way in options.ways
        }
        before = await self._scrape()
        for turn in range(options.workload.rounds):
            for tally in tallies.values():
                if self._stop:
                    break
                await self._round(tally, turn)
        after = await self._scrape()
        moved = None if before is None or after is None else changes(before, after)
        for way, tally in tallies.items():
            if tally.started:
                self._live.end(tally)
                self.steps.append(tally.summary() | {"server": moved if way == "message" else None})
                self._chat_gaps.append(tally.chat_gaps)
        if "text_report" in tallies and "message" in tallies:
            self._compare_sizes(tallies["message"])

    def _compare_sizes(self, messages: Tally) -> None:
        """Reports have the size that was asked for; messages only where the server granted it."""
        asked, kept = messages.asked_and_kept
        if abs(asked - kept) > _SAME_SIZE * asked:
            self.problems.append(
                f"{messages.step.title}: messages have {kept:.0f} positions and text reports {asked:.0f}, so they do "
                "not compare; ask for less (receivers.budget, a higher ratio), set receivers.policy to fixed, or take "
                "fewer receivers"
            )

    async def _round(self, tally: Tally, turn: int) -> None:
        bench = self._bench
        planned, count = self._planned(tally.step, turn)
        try:
            await self._stop.unless_asked(bench.prime(tally.step.way))
        except CacheBackError as error:
            self.problems.append(f"{tally.step.title}: priming failed: {error.status} {error.code}: {error.message}")
            if isinstance(error, APIConnectionError):
                self._stop.ask(f"the server is gone: {error.message}")
            return
        if self._stop:
            return
        self._live.begin(tally, count)
        done = 0

        def sink(record: Record) -> None:
            nonlocal done
            done += 1
            self._write(record.line(tally.step, self._start))
            self._live.show(tally, done)

        self.chats.measure_into(tally.chat_gaps)
        await bench.measure(tally, planned, turn=turn, seconds=self.options.seconds, sink=sink)
        self.chats.measure_into(None)
        self._records.flush()

    def _planned(self, step: Step, turn: int) -> tuple[Iterator[Planned], int | None]:
        """The round's requests, and how many there are when that is known."""
        options, workload = self.options, self.options.workload
        count = requests_of(workload, step) if options.seconds is None else None
        rate = step.level if step.mode == "open" else None
        requests = plan(
            workload.queries,
            len(self._bench.content.senders),
            MAX_REQUESTS if count is None else count,
            seed=options.seed,
            label=f"{step.label}/{turn}",
            rate=rate,
        )
        return requests, count

    def digest(self) -> str | None:
        """Hash of the load: texts and the beginning of every step's plan. Equal for equal workload, seed and model.

        None when the run was stopped before there was a load.
        """
        if not self._bench.content.senders:
            return None
        found = hashlib.sha256(self._bench.content.digest().encode())
        for level in self.options.levels:
            requests, _ = self._planned(Step("message", False, self.options.mode, level), 0)
            for one in islice(requests, _DIGESTED_REQUESTS):
                found.update(f"{one.sender},{one.question},{one.offset:.9f};".encode())
        return found.hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        self._records.write(json.dumps(line, allow_nan=False) + "\n")


def requests_of(workload: Workload, step: Step) -> int:
    """Requests of a round; in a closed loop two or more for each receiver, so that it asks while others are served."""
    share = 1.0 if step.way == "message" else workload.baseline_share
    count = max(1, round(workload.requests * share / workload.rounds))
    return count if step.mode == "open" else max(count, 2 * int(step.level))


def run_load(options: LoadOptions, url: str, console: Console, records: Path, summary: Path) -> dict[str, Any]:
    """Measure the server at ``url``, write both files, return the summary.

    An interrupted run, and one whose server died, write what was measured. Raises the client's errors when the
    server fails before anything could be.
    """
    records.parent.mkdir(parents=True, exist_ok=True)
    with records.open("w", encoding="utf-8") as stream:
        found = asyncio.run(measure_load(options, url, console, stream))
    write_text(summary, json.dumps(found, indent=2, allow_nan=False) + "\n")
    return found


async def measure_load(options: LoadOptions, url: str, console: Console, records: TextIO) -> dict[str, Any]:
    """The summary of a run; every request goes to ``records`` as it ends, and the steps at the end."""
    stop = Stop()
    with stop_on_signal(stop), Live(console) as live:
        live.say(f"preparing workload {options.workload.name}")
        async with open_bench(
            url,
            options.workload,
            seed=options.seed,
            timeout=options.timeout,
            stop=stop,
            say=live.say,
        ) as bench:
            run = LoadRun(options, bench, stop, live, records)
            server = await told(server_info(bench.admin), "/server_info", stop, run.problems) or {}
            run.page_size = page_size(server)
            await run.run()
            return {
                "format": FORMAT,
                **figures(run.steps, bench),
                "problems": run.problems,
                "stopped": stop.reason,
                "steps": run.steps,
                "chats": run.chats.report(),
                "workload": options.workload.model_dump(),
                "workload_digest": run.digest(),
                "seed": options.seed,
                "slo_ms": options.slo_ms,
                "mode": options.mode,
                "levels": list(options.levels),
                **provenance(server, options.url, options.command),
            }
