"""Ctrl-C as a wish to stop: what was measured is still reported."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cb_loadtest.load.generator import Stop

INTERRUPTED = "interrupted"


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for a stop; a second one acts as it would have without this."""
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        loop.call_soon_threadsafe(stop.ask, INTERRUPTED)

    before.update({number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield
    finally:
        restore()
