"""A server of our own for a measurement, and the processes it consists of."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from cb_loadtest.local_server import exit_on_terminate, ready_server

LOG = Path("build/reliability-server.log")


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The address of a ready server on the embedded model, started with ``options``; it is gone afterwards."""
    console = Console(stderr=True)
    with exit_on_terminate(), ready_server(None, LOG, console, serve_options=options) as url:
        yield url


def server_processes() -> list[psutil.Process]:
    """The server's own process first, then those that it has started."""
    (server,) = psutil.Process().children()
    return [server, *server.children(recursive=True)]


def kill_server() -> None:
    """SIGKILL to all of its processes at once."""
    os.killpg(os.getpgid(server_processes()[0].pid), signal.SIGKILL)
