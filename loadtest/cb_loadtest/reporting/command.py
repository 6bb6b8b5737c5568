"""``cb-loadtest report``: finished measurements as a page and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cb_loadtest.guard import guarded
from cb_loadtest.recall_report import read_report
from cb_loadtest.reporting.inputs import read_capacity, read_run


def report(
    run: Annotated[Path, typer.Option(help="The summary of cb-loadtest run.")] = Path("build/loadtest.json"),
    capacity: Annotated[Path | None, typer.Option(help="The result of cb-loadtest capacity.")] = None,
    recall: Annotated[Path | None, typer.Option(help="The report of cb-loadtest recall --answer.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and the PNG files.")] = Path("build/loadtest"),
) -> None:
    """Write one self-contained HTML page and its plots.

    Latency and throughput against load for the three ways; with more inputs the capacity curve and accuracy against
    time. Exit status: 0, 1 for unusable files.
    """

    def write(console: Console) -> None:
        from cb_loadtest.reporting.report import draw_report, write_report  # matplotlib, which only this command needs

        drawn = draw_report(
            read_run(run),
            None if capacity is None else read_capacity(capacity),
            None if recall is None else read_report(recall),
        )
        for path in write_report(drawn, out):
            console.print(str(path), highlight=False, markup=False, soft_wrap=True)

    guarded(write)
