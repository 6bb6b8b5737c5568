"""A ready server for a run: the one at an address, or one of our own on the embedded model, stopped at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from cb_loadtest.served import ServerProcess, free_port, serve_command
from cb_sglang.client import CacheBack
from cb_sglang.client.transport import DEFAULT_TIMEOUT
from cb_sglang.errors import CacheBackError

START_SECONDS = 900.0  # our own server; the first start builds the embedded model
READY_SECONDS = 60.0  # a server that is said to be there
API_KEY_VARIABLE = "CB_SGLANG_API_KEY"


@contextmanager
def ready_client(
    base_url: str | None, log: Path, console: Console, *, timeout: float | None = DEFAULT_TIMEOUT
) -> Iterator[CacheBack]:
    """A client of a server that generates: of the one at ``base_url``, or else of our own, which logs to ``log``.

    The API key is read from CB_SGLANG_API_KEY. Raises ServerDiedError when our own server ends by itself, whatever
    error of the client that led to.
    """
    with _ready(base_url, log, console, timeout, ()) as (_, client):
        yield client


@contextmanager
def ready_server(
    base_url: str | None, log: Path, console: Console, *, serve_options: Sequence[str] = ()
) -> Iterator[str]:
    """The address of a server that generates, as in ``ready_client``; our own is started with ``serve_options``."""
    with _ready(base_url, log, console, DEFAULT_TIMEOUT, serve_options) as (url, _):
        yield url


@contextmanager
def _ready(
    base_url: str | None, log: Path, console: Console, timeout: float | None, serve_options: Sequence[str]
) -> Iterator[tuple[str, CacheBack]]:
    with (
        _served(base_url, log, console, serve_options) as (url, server),
        # A transport of its own keeps environment proxies away from the loopback address.
        CacheBack(
            url,
            api_key=os.environ.get(API_KEY_VARIABLE),
            timeout=timeout,
            transport=httpx.HTTPTransport() if server else None,
        ) as client,
    ):
        started = time.perf_counter()
        with console.status("waiting for the server") as status:
            _wait(client, server, status)
        console.print(f"ready after {time.perf_counter() - started:.0f} s", highlight=False, soft_wrap=True)
        yield url, client


@contextmanager
def _served(
    base_url: str | None, log: Path, console: Console, serve_options: Sequence[str]
) -> Iterator[tuple[str, ServerProcess | None]]:
    if base_url is not None:
        yield base_url, None
        return
    port = free_port()
    with ServerProcess([*serve_command(port), *serve_options], log) as server:
        console.print(f"starting cb-sglang serve on port {port}; its log: {log}", highlight=False, soft_wrap=True)
        try:
            yield f"http://127.0.0.1:{port}", server
        except CacheBackError:
            server.check(2.0)  # a server that died explains a broken connection better than the connection does
            raise
        finally:
            console.print("stopping the server", highlight=False, soft_wrap=True)


def _wait(client: CacheBack, server: ServerProcess | None, status: Status) -> None:
    """Until the server generates, saying what it is doing. Raises ServerDiedError when ours ends instead."""

    def say(seconds: float) -> None:
        doing = ""
        if server is not None:
            server.check()
            doing = escape(server.last_line()[:90])
        status.update(f"waiting for the server, {seconds:.0f} s [dim]{doing}[/dim]")

    client.wait_until_ready(READY_SECONDS if server is None else START_SECONDS, on_wait=say)


@contextmanager
def exit_on_terminate() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that the server is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
