"""A process that owns one SGLang engine and answers a test over a connection.

SGLang keeps its configuration in process-wide variables, installs signal handlers, and its shutdown kills every
child of the process it runs in. So each test engine lives in a process of its own, forked from one that has imported
SGLang (engine_client.py). It ends when the test closes the connection, which the kernel does for a test process that
dies.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main(connection: Connection, log: Path, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """Serve until the other end of ``connection`` is closed; output goes to ``log``."""
    _settle(log)
    os.environ.update(environment)
    import engine_probe
    from sglang.srt.entrypoints.engine import Engine

    engine_probe.install()
    engine = Engine(**arguments)
    try:
        # Flushing the cache collects garbage: half a second over everything that was imported, unless that is frozen.
        engine.freeze_gc()
        connection.send(("ready", None, None))
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()


def run_command(log: Path, arguments: list[str]) -> None:
    """The ``cb-sglang`` command, in this process; output goes to ``log``."""
    _settle(log)
    from cb_sglang.cli import app

    app(arguments)


def _settle(log: Path) -> None:
    """A process group of our own, and children that are forked: SGLang would spawn them, and import all again."""
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None


async def _serve(engine: Any, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        try:
            # Not with add_reader: uvloop would make the socket non-blocking, and a long message comes in pieces.
            number, method, kwargs = await loop.run_in_executor(None, connection.recv)
        except (EOFError, OSError):
            return
        task = loop.create_task(_answer(engine, connection, number, method, kwargs))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(engine: Any, connection: Connection, number: int, method: str, kwargs: dict[str, Any]) -> None:
    try:
        result = await _call(engine, method, kwargs)
        connection.send((number, "ok", result))
    except Exception as error:
        connection.send((number, "raised", f"{type(error).__name__}: {error}"))


async def _call(engine: Any, method: str, kwargs: dict[str, Any]) -> Any:
    import engine_probe

    manager = engine.tokenizer_manager
    if method == "generate":
        return await engine.async_generate(**kwargs)
    if method == "flush":
        return (await manager.flush_cache()).success
    if method == "abort":
        return manager.abort_request(**kwargs)
    if method in ("count_live_tasks", "hold_prefill"):
        return engine.collective_rpc(method, **kwargs)
    if method == "ours":
        return await _ours(manager, **kwargs)
    if method == "counters":
        return (await manager.get_internal_state())[0][engine_probe.KEY]
    raise ValueError(f"no such method: {method}")


async def _ours(manager: Any, call: str, arguments: tuple[Any, ...]) -> Any:
    """A call of the engine as our HTTP process sees it."""
    from cb_sglang.seam.engine import Engine

    result = getattr(Engine(manager, max_input=8192, pool_positions=1 << 20), call)(*arguments)
    return [each async for each in result] if hasattr(result, "__aiter__") else await result
