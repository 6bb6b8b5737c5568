"""Ordinary chats beside the load: streams that go on all the time, so that one sees whether they stall."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cb_loadtest.load.calls import generate_stream_body
from cb_loadtest.load.content import Content
from cb_loadtest.load.generator import Stop
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.transport import Link
from cb_loadtest.load.workload import Chats
from cb_sglang.errors import CacheBackError

_PAUSE_AFTER_FAILURE = 0.5


class ChatTraffic:
    """Keeps ``chats.concurrency`` streams going while ``running``; ``gaps`` collects their inter-token latencies.

    ``alone`` are the latencies before any load, to compare with. Failed chats are counted by code, not raised.
    """

    def __init__(self, link: Link, chats: Chats, content: Content, seed: int, stop: Stop) -> None:
        self.alone = Samples()
        self.errors: Counter[str] = Counter()
        self._gaps: Samples | None = None
        self._link, self._chats, self._content, self._stop = link, chats, content, stop
        self._draw = random.Random(f"chats/{seed}")

    def measure_into(self, gaps: Samples | None) -> None:
        """Where latencies go from now on; None leaves them out."""
        self._gaps = gaps

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Chats while the context lasts; before it begins, one of each alone."""
        count = self._chats.concurrency
        self.measure_into(self.alone)
        await asyncio.gather(*(self._chat() for _ in range(count)))
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
        try:
            await self._link.stream(generate_stream_body(prompt, self._chats.max_new_tokens), self._add)
        except CacheBackError as error:
            self.errors[f"{error.status} {error.code}"] += 1
            await self._stop.within(_PAUSE_AFTER_FAILURE)

    def _add(self, gap: float) -> None:
        if self._gaps is not None:
            self._gaps.add(gap)
