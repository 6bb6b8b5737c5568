"""One recall run from the first to the last step: cases, server, journal, measuring, report, tables and plots."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cb_loadtest.cases import Case, load_cases
from cb_loadtest.local_server import ready_client
from cb_loadtest.recall_journal import Journal
from cb_loadtest.recall_plan import Plan, PlanError
from cb_loadtest.recall_report import Report, build_report, write_report
from cb_loadtest.recall_run import Runner, unit_count
from cb_loadtest.recall_tables import terminal_view, write_markdown
from cb_sglang import __version__
from cb_sglang.client import CacheBack
from cb_sglang.errors import CacheBackError

OWN_SERVER = "started by this run, with the embedded model"


class RecallError(RuntimeError):
    """The run measured nothing; the message says what failed first."""


@dataclass(frozen=True, slots=True)
class RecallOptions:
    """What the command line asks for. ``base_url`` None starts a server; ``timeout`` in seconds, for one call."""

    plan: Plan
    cases: Path
    out: Path
    base_url: str | None = None
    limit: int | None = None
    resume: bool = False
    markdown: Path | None = None
    plots: bool = True
    timeout: float = 3_600.0
    argv: Sequence[str] = ()

    @property
    def journal(self) -> Path:
        return self.out.with_suffix(".units.jsonl")


def run_recall(options: RecallOptions, console: Console) -> Report:
    """Measure, write every output, print the tables.

    Raises PlanError, CaseError, JournalError, RecallError, ServerDiedError and the client's errors; what was measured
    until then is in the journal.
    """
    cases = load_cases(options.cases, limit=options.limit)
    if not unit_count(options.plan, cases):
        raise PlanError(f"{options.cases}: no case has gold spans, so there is no recall; --answer needs `answer`")
    log = options.out.parent / "recall-server.log"
    with ready_client(options.base_url, log, console, timeout=options.timeout) as client:
        report = measure(client, cases, options, console)
    write_report(options.out, report)
    written = [options.out]
    if options.markdown is not None:
        write_markdown(options.markdown, report)
        written.append(options.markdown)
    if options.plots:
        from cb_loadtest.plots import write_plots  # matplotlib takes a second to import

        written += write_plots(report, options.out.with_suffix(""))
    console.print(terminal_view(report))
    console.print(f"written to {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
    return report


def measure(client: CacheBack, cases: Sequence[Case], options: RecallOptions, console: Console) -> Report:
    """The report of a run against a server that is ready. Raises RecallError when nothing at all was measured."""
    started = time.monotonic()
    model = ", ".join(client.models())
    with Journal(options.journal, model_fingerprint(client), resume=options.resume) as journal:
        before = len(journal.records)
        with _progress(console) as progress:
            task = progress.add_task("", total=unit_count(options.plan, cases))

            def say(text: str) -> None:
                progress.update(task, description=text[:40])
                if not console.is_terminal:  # a log has no bar
                    console.print(f"{progress.tasks[task].percentage:3.0f} % {text}", highlight=False, markup=False)

            runner = Runner(
                client,
                options.plan,
                journal,
                on_unit=lambda count: progress.advance(task, count),
                on_case=say,
            )
            records = runner.run(cases)
        measured_now = len(journal.records) - before
    if not records:
        raise RecallError(f"nothing could be measured; the first failure: {runner.failures.items[0].error}")
    run = {
        "version": __version__,
        "model": model,
        "server": OWN_SERVER if options.base_url is None else without_credentials(options.base_url),
        "command": command_line(options),
        "cases_file": options.cases.name,
        "finished": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(time.monotonic() - started, 1),
        "units": len(records),
        "units_measured_in_this_run": measured_now,
    }
    return build_report(options.plan, cases, records, runner.failures, run)


def model_fingerprint(client: CacheBack) -> str:
    """What the server's senders depend on besides their tokens (model, weights), as the hash of a tiny sender."""
    known = {sender.id for sender in client.list_senders()}
    sender = client.create_sender(prompt="cb-loadtest recall")
    if sender.id not in known:
        with suppress(CacheBackError):
            client.delete_sender(sender)
    return sender.fingerprint


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def command_line(options: RecallOptions) -> str:
    """The command as it was given, without a password that an address may hold."""
    shown = [*options.argv]
    if options.base_url is not None:
        shown = [word.replace(options.base_url, without_credentials(options.base_url)) for word in shown]
    return shlex.join(["cb-loadtest", *shown])


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
