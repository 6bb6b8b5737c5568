"""Ordinary chats beside the load: streams that go on all the time, so that one sees whether they stall."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cb_loadtest.load.bench import Bench
from cb_loadtest.load.calls import generate_stream_body
from cb_loadtest.load.generator import Stop
from cb_loadtest.load.samples import Samples
from cb_sglang.errors import CacheBackError

_PAUSE_AFTER_FAILURE = 0.5


class ChatTraffic:
    """Keeps the workload's chats streaming on the first link while ``running``, if it has any.

    ``alone`` are the latencies before any load, to compare with. Failed chats are counted by code, not raised.
    """

    def __init__(self, bench: Bench, stop: Stop) -> None:
        self.alone = Samples()
        self.errors: Counter[str] = Counter()
        self._gaps: Samples | None = None
        self._link, self._chats, self._content, self._stop = bench.links[0], bench.workload.chats, bench.content, stop
        self._draw = bench.fresh("chats")

    def measure_into(self, gaps: Samples | None) -> None:
        """Where inter-token latencies that begin from now on go; None leaves them out.

        One that has begun counts whole where it began, even if it ends later: ``gaps`` may still grow until the chats
        end. Those that are cut off by that end are left out.
        """
        self._gaps = gaps

    def report(self) -> dict[str, Any] | None:
        """Latencies without load and failed chats by code; None where there are no chats."""
        if not self._chats.concurrency:
            return None
        return {"alone_itl_ms": self.alone.milliseconds(), "errors": dict(self.errors)}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Chats while the context lasts; before it begins, one of each alone."""
        count = self._chats.concurrency
        self.measure_into(self.alone)
        await self._stop.unless_asked(asyncio.gather(*(self._chat() for _ in range(count))))
        self.measure_into(None)
        tasks = [asyncio.create_task(self._forever()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forever(self) -> None:
        while not self._stop:
            await self._chat()

    async def _chat(self) -> None:
        words = self._draw.choices(self._content.words, k=self._chats.prompt_positions)
        prompt = ",".join(map(str, [*self._content.bos, *words]))
        begun: Samples | None = None

        def on_tokens(ended: list[float]) -> None:
            nonlocal begun
            if begun is not None:
                begun.extend(ended)
            begun = self._gaps

        try:
            await self._link.stream(generate_stream_body(prompt, self._chats.max_new_tokens), on_tokens)
        except CacheBackError as error:
            self.errors[f"{error.status} {error.code}"] += 1
            await self._stop.within(_PAUSE_AFTER_FAILURE)
