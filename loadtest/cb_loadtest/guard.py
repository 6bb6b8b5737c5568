"""Around every command: errors and signals become a line and an exit status, without a traceback."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.console import Console
from rich.text import Text

from cb_loadtest.cases import CaseError
from cb_loadtest.converters import ConvertError
from cb_loadtest.local_server import exit_on_terminate
from cb_loadtest.recall import RecallError
from cb_loadtest.recall_journal import JournalError
from cb_loadtest.recall_plan import PlanError
from cb_loadtest.recall_report import ReportError
from cb_loadtest.recall_tables import MarkerError
from cb_loadtest.served import ServerDiedError
from cb_sglang.errors import CacheBackError

_ERRORS = (
    CacheBackError,
    CaseError,
    ConvertError,
    JournalError,
    MarkerError,
    RecallError,
    ReportError,
    ServerDiedError,
    OSError,
)


def guarded(run: Callable[[Console], None], advice: str = "") -> None:
    """Run; exit status 1 for an error, 2 for an unusable plan, 130 after Ctrl-C.

    ``advice`` is said after an interruption, and after errors of the server's side.
    """
    console = Console()
    try:
        with exit_on_terminate():
            run(console)
    except KeyboardInterrupt:
        console.print("interrupted" + (f"; {advice}" if advice else ""), highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except PlanError as error:
        raise typer.BadParameter(str(error)) from None
    except _ERRORS as error:
        note = f"\n{advice}" if advice and isinstance(error, CacheBackError | ServerDiedError) else ""
        console.print(Text.assemble(("cb-loadtest: ", "bold red"), f"{error}{note}"), soft_wrap=True)
        raise typer.Exit(1) from None
