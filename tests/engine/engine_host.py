"""A process that owns one SGLang engine and answers a test over a socket.

SGLang keeps its configuration in process-wide variables, installs signal handlers, and its shutdown kills every
child of the process it runs in. So each test engine lives in a process of its own. It ends when the test closes
the socket, which the kernel does for a test process that dies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    connection, arguments = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).parent))
    import engine_probe
    from sglang.srt.entrypoints.engine import Engine

    class ProbedEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(engine_probe.run_scheduler_process)

    engine = ProbedEngine(**arguments)
    try:
        connection.send(("ready", None, None))
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()


async def _serve(engine: Any, connection: Connection) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def on_message() -> None:
        try:
            number, method, kwargs = connection.recv()
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            closed.set()
            return
        task = loop.create_task(_answer(engine, connection, number, method, kwargs))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), on_message)
    await closed.wait()


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
    if method == "counters":
        return (await manager.get_internal_state())[0][engine_probe.KEY]
    raise ValueError(f"no such method: {method}")


if __name__ == "__main__":
    main()
