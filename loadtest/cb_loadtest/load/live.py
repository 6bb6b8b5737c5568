"""The run as one watches it: a bar at a terminal, plain lines in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cb_loadtest.load.tally import Tally

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 10.0


class Live:
    """``begin`` a step, ``show`` after every request, ``end`` it; a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._next = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, tally: Tally, requests: int | None) -> None:
        self._bar.reset(self._task, description=tally.step.title, total=requests, completed=0)
        self._next = time.monotonic() + (_REFRESH_SECONDS if self._console.is_terminal else _LINE_SECONDS)

    def show(self, tally: Tally, done: int) -> None:
        """Cheap enough for every request: percentiles are worked out a few times a second."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._console.is_terminal:
            self._next = now + _REFRESH_SECONDS
            self._bar.update(self._task, completed=done, description=describe(tally))
        else:
            self._next = now + _LINE_SECONDS
            self.say(f"  {done} done; {describe(tally)}")

    def end(self, tally: Tally) -> None:
        self.say(f"{describe(tally)}, {tally.messages_per_s:.2f}/s")


def describe(tally: Tally) -> str:
    """One line: what the step is, and how it goes."""
    times = [tally.end_to_end.percentile(percent) for percent in (50, 99)]
    p50, p99 = ("-" if t is None else f"{t * 1_000:.0f}" for t in times)
    failed = f", {tally.failed} failed" if tally.failed else ""
    return f"{tally.step.title}: {tally.completed} done{failed}, p50 {p50} ms, p99 {p99} ms"
