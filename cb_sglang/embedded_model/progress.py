"""Progress of a build: a rich bar on a terminal, nothing in a log file or in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressFn = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``: bytes, or seconds while waiting, or 0 and 1 of 1."""

JOIN = "joining the parts"
WEIGHTS = "converting the weights"
TOKENIZER = "writing the tokenizer"
WAIT = "waiting for another process"


def _ignore(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@contextmanager
def progress_bar() -> Iterator[ProgressFn]:
    """A bar on stderr, one line a stage. Silent when stderr is no terminal or ``CI`` is set."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield _ignore
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("[bold]embedded model[/bold] {task.description:<28}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=None if stage == WAIT else total)
        bar.update(tasks[stage], completed=done)

    with bar:
        yield show
