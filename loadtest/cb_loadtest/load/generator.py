"""The two loops that make load. Both take what to do as a function, and the clock from the event loop.

Closed loop: so many receivers, each asking again as soon as it is served. Open loop: requests arrive when the plan
says so, whether the server keeps up or not, and their waiting counts from that moment. A stalled server therefore
shows in every request that was due meanwhile, not in one ("coordinated omission").
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from cb_loadtest.load.schedule import Planned
from cb_loadtest.load.workload import MAX_CONCURRENCY

T = TypeVar("T")
_FULL_PAUSE = 0.005

Perform = Callable[[Planned, float], Awaitable[None]]
"""Make one request that is due at a time of the loop's clock, and record it. Must not raise."""


class Stop:
    """Asked for once, by Ctrl-C or by a run that sees no sense in going on; ``reason`` says why."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = asyncio.Event()

    def __bool__(self) -> bool:
        return self.reason is not None

    def ask(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self._event.set()

    async def within(self, seconds: float) -> bool:
        """Sleep; True at once when the stop is asked for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return bool(self)

    async def unless_asked(self, work: Awaitable[T]) -> T | None:
        """What ``work`` returns or raises; None when the stop came first, and then ``work`` is cancelled."""
        task, stopping = asyncio.ensure_future(work), asyncio.create_task(self._event.wait())
        try:
            if not self:
                await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopping.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)


async def closed_loop(
    planned: Iterable[Planned], perform: Perform, *, concurrency: int, stop: Stop, seconds: float | None = None
) -> None:
    """Keep ``concurrency`` requests on their way until the plan is done; after ``seconds`` nothing new begins.

    On a stop the requests on their way are cancelled.
    """
    loop = asyncio.get_running_loop()
    end = None if seconds is None else loop.time() + seconds
    due = iter(planned)

    async def receiver() -> None:
        for request in due:
            if stop or (end is not None and loop.time() >= end):
                return
            await perform(request, loop.time())

    await _all_or_stop({asyncio.create_task(receiver()) for _ in range(concurrency)}, stop)


async def open_loop(
    planned: Iterable[Planned],
    perform: Perform,
    *,
    stop: Stop,
    seconds: float | None = None,
    max_in_flight: int = MAX_CONCURRENCY,
) -> None:
    """Begin every request at its offset; those with an offset of ``seconds`` or more are left out."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    room = asyncio.Semaphore(max_in_flight)
    flying: set[asyncio.Task[None]] = set()

    async def one(request: Planned) -> None:
        try:
            await perform(request, start + request.offset)
        finally:
            room.release()

    for request in planned:
        if seconds is not None and request.offset >= seconds:
            break
        wait = start + request.offset - loop.time()
        if stop or (wait > 0 and await stop.within(wait)):
            break
        while room.locked():
            if await stop.within(_FULL_PAUSE):
                return await _all_or_stop(flying, stop)
        await room.acquire()
        task = asyncio.create_task(one(request))
        flying.add(task)
        task.add_done_callback(flying.discard)
    await _all_or_stop(flying, stop)


async def _all_or_stop(running: set[asyncio.Task[None]], stop: Stop) -> None:
    """Wait for the tasks; a stop cancels those that are left. What a task raises is raised."""
    tasks = list(running)  # the caller's set shrinks as they end
    try:
        await stop.unless_asked(asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
