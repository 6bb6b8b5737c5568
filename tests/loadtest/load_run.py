"""Whole runs against the stub, in virtual time.

Client and stub share one event loop whose clock jumps, so latencies are the stub's delays and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from rich.console import Console
from stub_server import Settings, Stub, make_app
from virtual_time import run_virtually

from cb_loadtest.load.capacity import CapacityOptions, find_capacity
from cb_loadtest.load.run import LoadOptions, measure_load
from cb_loadtest.load.workload import Workload

T = TypeVar("T")
GRACE = 0.001


def against(stub: Stub, work: Callable[[str], Awaitable[T]]) -> T:
    """What ``work`` returns when it is given the address of ``stub``."""

    async def main() -> T:
        runner = web.AppRunner(await make_app(stub))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await work(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return run_virtually(main, grace=GRACE)


def workload(**changes: Any) -> Workload:
    receivers = {"ratio": 8.0, "max_new_tokens": 4, **changes.pop("receivers", {})}
    senders = {"count": 2, "positions": {"low": 64, "high": 96}, **changes.pop("senders", {})}
    given = {"name": "test", "requests": 8, "warmup": 0, "senders": senders, "queries": {"count": 8}}
    return Workload.model_validate({**given, "receivers": receivers, **changes})


class Run:
    """One measured run: its summary, its lines, the stub that it met, and when it ended."""

    def __init__(
        self, settings: Settings | Stub, chosen: Workload, level: float, mode: str = "closed", **more: Any
    ) -> None:
        self.stub = Stub(settings) if isinstance(settings, Settings) else settings
        records, console = io.StringIO(), io.StringIO()
        options = LoadOptions(chosen, mode, (level,), more.pop("ways", ("message",)), **more)

        async def measure(url: str) -> dict[str, Any]:
            found = await measure_load(options, url, Console(file=console), records)
            self.ended_at = asyncio.get_running_loop().time()
            return found

        self.found = against(self.stub, measure)
        self.console = console.getvalue()
        self.lines = [json.loads(line) for line in records.getvalue().splitlines()]
        json.dumps(self.found, allow_nan=False)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "request"]

    @property
    def step(self) -> dict[str, Any]:
        (step,) = self.found["steps"]
        return dict(step)


def capacity(settings: Settings | Stub, **changes: Any) -> dict[str, Any]:
    """A search against a stub whose senders of 64 positions cost 0.1 ms a position that is not cached."""
    stub = Stub(settings) if isinstance(settings, Settings) else settings
    stub.settings.prefill = 1e-4
    chosen = workload(senders={"count": 1, "positions": {"low": 64, "high": 64}}, **changes.pop("workload", {}))
    given = {"mode": "closed", "slo_ms": 130.0, "highest": 64.0, "requests": 24, **changes}
    options = CapacityOptions(chosen, **given)
    return against(stub, lambda url: find_capacity(options, url, Console(file=io.StringIO())))
