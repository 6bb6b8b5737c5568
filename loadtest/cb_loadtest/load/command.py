"""``cb-loadtest run`` and ``cb-loadtest capacity``: the load generator on the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console

from cb_loadtest.guard import guarded
from cb_loadtest.load.calls import WAYS
from cb_loadtest.load.capacity import CapacityOptions, run_capacity
from cb_loadtest.load.interrupt import INTERRUPTED
from cb_loadtest.load.run import LoadOptions, run_load
from cb_loadtest.load.transport import most_connections
from cb_loadtest.load.view import capacity_table, print_table, summary_table
from cb_loadtest.load.workload import MAX_CONCURRENCY, MAX_REQUESTS, Answers, Workload, load_workload, shipped_workloads
from cb_loadtest.local_server import ready_server
from cb_loadtest.recall import without_credentials
from cb_loadtest.recall_plan import PlanError, parse_list

MAX_LEVELS = 64
MAX_RATE = 100_000.0
SERVE_OPTIONS = ("--enable-metrics",)
_HIGHEST = {"closed": 256.0, "open": 100.0}

Mode: TypeAlias = Literal["closed", "open"]
Url = Annotated[
    str | None,
    typer.Option(
        help="Measure this server, instead of starting one. CB_SGLANG_API_KEYS (a,b,...) are sent, "
        "and CB_SGLANG_ADMIN_KEY to /server_info and /metrics."
    ),
]
WorkloadName = Annotated[
    str, typer.Option("--workload", help=f"A TOML file, or one of {', '.join(shipped_workloads())}.")
]
ModeOption = Annotated[
    Mode,
    typer.Option(help="closed: so many receivers at any time; open: arrivals at a rate, whatever the server does."),
]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 31) - 1, help="Equal seeds give equal load.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds until one request counts as failed.")]


def run(
    url: Url = None,
    workload: WorkloadName = "one_sender",
    mode: ModeOption = "closed",
    concurrency: Annotated[str, typer.Option(help="Closed loop: comma-separated numbers of receivers.")] = "1,4,16",
    rate: Annotated[str, typer.Option(help="Open loop: comma-separated requests per second.")] = "2",
    ways: Annotated[str, typer.Option(help="Comma-separated; what is compared.")] = ",".join(WAYS),
    requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_REQUESTS, help="Requests of a step, instead of the workload's.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, max=86_400, help="Bound each round in time, instead of requests.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Turns of the ways, instead of the workload's.")
    ] = None,
    answers: Annotated[Answers | None, typer.Option(help="Do receivers answer; instead of the workload's.")] = None,
    slo_ms: Annotated[float, typer.Option(min=1, help="Objective for a whole request, for the goodput.")] = 2_000.0,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    out: Annotated[Path, typer.Option(help="Every request and every step, as JSON lines.")] = Path(
        "build/loadtest.jsonl"
    ),
    summary: Annotated[Path, typer.Option("--json", help="The summary.")] = Path("build/loadtest.json"),
) -> None:
    """Measure messages, text reports and full contexts on one server, in one run.

    Ctrl-C ends the run with a report of what was measured. Exit status: 0, 1 when the server failed, 2 for unusable
    arguments, 130 after Ctrl-C.
    """

    def measure(console: Console) -> None:
        chosen = _changed(load_workload(workload), requests, rounds, answers)
        options = LoadOptions(
            workload=chosen,
            mode=mode,
            levels=_levels(concurrency, mode, "--concurrency") if mode == "closed" else _levels(rate, mode, "--rate"),
            ways=_ways(ways),
            seconds=seconds,
            slo_ms=slo_ms,
            seed=seed,
            timeout=timeout,
            url=url,
            command=_command(url),
        )
        with ready_server(url, summary.parent / "loadtest-server.log", console, serve_options=SERVE_OPTIONS) as address:
            found = run_load(options, address, console, out, summary)
        print_table(console, summary_table(found))
        console.print(f"written to {out} and {summary}", highlight=False, soft_wrap=True)
        _exit(found, console)

    guarded(measure)


def capacity(
    slo_p99: Annotated[float, typer.Option(min=1, help="The 99th percentile of a request must not exceed this (ms).")],
    url: Url = None,
    workload: WorkloadName = "one_sender",
    mode: ModeOption = "closed",
    highest: Annotated[
        float | None, typer.Option(help="Largest load to try: receivers, or requests per second.")
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_REQUESTS,
            help="Requests of a probe; open: it lasts until so many should have come, but for that no longer than a "
            "tenth of --max-seconds.",
        ),
    ] = 200,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3_600,
            help="Longest probe; open: shortest, and never below 10 objectives or 10 arrivals.",
        ),
    ] = 20.0,
    max_probes: Annotated[int, typer.Option(min=1, max=200, help="Bound of the search.")] = 24,
    max_seconds: Annotated[float, typer.Option(min=1, max=86_400, help="Bound of the search.")] = 600.0,
    answers: Annotated[Answers | None, typer.Option(help="Do receivers answer; instead of the workload's.")] = None,
    seed: Seed = 0,
    timeout: Timeout = 60.0,
    out: Annotated[Path, typer.Option("--json", help="Knee, service model and curve.")] = Path("build/capacity.json"),
) -> None:
    """Find the largest load that holds the objective, and what it would be for other senders and ratios.

    Exit status: 0, 1 when the server failed or not even the smallest load holds, 2 for unusable arguments, 130 after
    Ctrl-C.
    """

    def measure(console: Console) -> None:
        chosen = _changed(load_workload(workload), None, None, answers)
        most = _HIGHEST[mode] if highest is None else highest
        (most,) = _levels(f"{most:g}", mode, "--highest")
        options = CapacityOptions(
            workload=chosen,
            mode=mode,
            slo_ms=slo_p99,
            highest=most,
            requests=requests,
            seconds=seconds,
            max_probes=max_probes,
            max_seconds=max_seconds,
            seed=seed,
            timeout=timeout,
            url=url,
            command=_command(url),
        )
        with ready_server(url, out.parent / "loadtest-server.log", console, serve_options=SERVE_OPTIONS) as address:
            found = run_capacity(options, address, console, out)
        print_table(console, capacity_table(found))
        console.print(f"written to {out}", highlight=False, soft_wrap=True)
        _say_problems(found, console)
        if found["stopped"]:
            console.print(found["stopped"], highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(130 if found["stopped"] == INTERRUPTED else 1)
        if found["knee"]["level"] is None:
            raise typer.Exit(1)

    guarded(measure)


def _exit(found: dict[str, Any], console: Console) -> None:
    _say_problems(found, console)
    if found["stopped"] == INTERRUPTED:
        console.print("interrupted; the report has what was measured until then")
        raise typer.Exit(130)
    if found["stopped"]:
        console.print(found["stopped"], style="bold red", highlight=False, markup=False, soft_wrap=True)
    if found["stopped"] or not any(step["completed"] for step in found["steps"]):
        raise typer.Exit(1)


def _say_problems(found: dict[str, Any], console: Console) -> None:
    for problem in found["problems"]:
        console.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _changed(workload: Workload, requests: int | None, rounds: int | None, answers: Answers | None) -> Workload:
    """The workload with what the command line says instead."""
    changes: dict[str, Any] = {}
    if requests is not None:
        changes["requests"] = requests
    if rounds is not None:
        changes["rounds"] = rounds
    if answers is not None:
        changes["receivers"] = workload.receivers.model_copy(update={"answers": answers})
    return workload.model_copy(update=changes)


def _levels(text: str, mode: Mode, what: str) -> tuple[float, ...]:
    """Numbers of receivers, or rates per second. Raises PlanError that names the option ``what``."""
    most = float(most_connections()) if mode == "closed" else MAX_RATE
    try:
        levels = tuple(float(int(item)) if mode == "closed" else float(item) for item in parse_list(text, what))
    except ValueError:
        raise PlanError(f"{what}: {text!r} is no list of {'whole ' if mode == 'closed' else ''}numbers") from None
    if not all(0 < level <= most for level in levels) or len(levels) > MAX_LEVELS or len({*levels}) < len(levels):
        more = "; for more receivers raise ulimit -n" if mode == "closed" and most < MAX_CONCURRENCY else ""
        raise PlanError(f"{what}: give at most {MAX_LEVELS} different numbers, above 0 and at most {most:g}{more}")
    return levels


def _ways(text: str) -> tuple[str, ...]:
    """Raises PlanError."""
    ways = tuple(parse_list(text, "--ways"))
    if len({*ways}) < len(ways) or not {*ways} <= {*WAYS}:
        raise PlanError(f"--ways: {text!r}; choose from {', '.join(WAYS)}, each once")
    return ways


def _command(url: str | None) -> str:
    """The command as it was given, without a password that an address may hold."""
    words = sys.argv[1:]
    if url is not None:
        words = [word.replace(url, without_credentials(url)) for word in words]
    return shlex.join(["cb-loadtest", *words])
