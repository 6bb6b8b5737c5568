"""An event loop whose clock jumps to the next timer: hours pass at once, and times are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Does not wait for the clock: the time that it should have waited has passed instead.

    It gives sockets ``grace`` real seconds first. Both ends are in this process, so what was sent is there at once.
    """

    def __init__(self, grace: float) -> None:
        super().__init__()
        self.now = 0.0
        self._grace = grace

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None and timeout <= 0 else self._grace)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("nothing is left to happen: the test would wait for ever")
        self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, grace: float) -> None:
        self._virtual = _Selector(grace)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]], *, grace: float = 0.0) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(grace)) as runner:
        return runner.run(main())
