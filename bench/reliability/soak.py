"""A mixed load for minutes: do memory, descriptors or locked KV positions grow?

Senders come with leases and go by deletion and expiry, clients leave in the middle. The slopes are least squares over
the second half, when caches and pools have been touched once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from api import Api, Reply, open_api
from overload import settled
from serving import served, server_processes

WORKERS = 4
SAMPLE_SECONDS = 5.0
LEASE_SECONDS = 30.0
MAX_SENDERS = 24
# A pool that the senders overflow, so that eviction is part of it, and whose pages have soon all been touched.
POOL = 8_192
MEBI = 1 << 20
ROLES = {"sglang::sched": "scheduler", "sglang::detok": "detokenizer"}


class Mix:
    """What the workers do; ``counts`` holds how often what came of it."""

    def __init__(self, api: Api, draw: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._api = api
        self._draw = draw
        self._senders: list[str] = []
        self._weighted: dict[Callable[[], Awaitable[Reply | None]], int] = {
            self.register: 4,
            self.query: 8,
            self.transfer: 2,
            self.chat: 2,
            self.extend: 1,
            self.pin: 1,
            self.delete: 3,
            self.leave: 3,
        }

    async def work(self, until: float) -> None:
        """One operation after the other until the loop's clock says ``until``."""
        loop = asyncio.get_running_loop()
        operations, weights = list(self._weighted), list(self._weighted.values())
        while loop.time() < until:
            (operation,) = self._draw.choices(operations, weights)
            if not self._senders or len(self._senders) > MAX_SENDERS:
                operation = self.delete if self._senders else self.register
            reply = await operation()
            self.counts[f"{operation.__name__}: {'left' if reply is None else reply.code}"] += 1

    async def register(self) -> Reply:
        body = {"input_ids": self._ids(self._draw.randrange(50, 600)), "ttl": LEASE_SECONDS}
        return self._kept(await self._api.call("POST", "/v1/senders", body))

    async def query(self) -> Reply:
        return await self._api.ask(self._sender(), self._ids(16), ratio=8)

    async def transfer(self) -> Reply:
        senders = list({self._sender(), self._sender()})
        body = {"senders": senders, "queries": [self._ids(12), self._ids(20)], "budget": 16}
        return await self._api.call("POST", "/v1/transfers", body)

    async def chat(self) -> Reply:
        turns = [{"role": "user", "content": "What does it say of the sea?"}]
        extension = {"senders": [self._sender()], "budget": 32}
        body = {"model": "default", "messages": turns, "max_tokens": 8, "cacheback": extension}
        return await self._api.call("POST", "/v1/chat/completions", body)

    async def extend(self) -> Reply:
        body = {"input_ids": self._ids(64), "ttl": LEASE_SECONDS}
        return self._kept(await self._api.call("POST", f"/v1/senders/{self._sender()}/extend", body))

    async def pin(self) -> Reply:
        return await self._api.call("PUT", f"/v1/senders/{self._sender()}/pin")

    async def delete(self) -> Reply:
        sender = self._senders.pop(self._draw.randrange(len(self._senders)))
        return await self._api.call("DELETE", f"/v1/senders/{sender}")

    async def leave(self) -> Reply | None:
        """Hang up on a registration or a call of eight queries, at some moment."""
        if self._draw.random() < 0.5:
            call = self._api.call("POST", "/v1/senders", {"input_ids": self._ids(800), "ttl": LEASE_SECONDS})
        else:
            body = {"queries": [self._ids(24) for _ in range(8)]}
            call = self._api.call("POST", f"/v1/senders/{self._sender()}/messages", body)
        with suppress(TimeoutError):
            return await asyncio.wait_for(call, self._draw.uniform(0.005, 0.5))
        return None

    def _kept(self, reply: Reply) -> Reply:
        if reply.status == 200:
            self._senders.append(reply.body["id"])
        return reply

    def _sender(self) -> str:
        return self._draw.choice(self._senders) if self._senders else "snd_none"

    def _ids(self, count: int) -> list[int]:
        return self._draw.choices(range(1_000, 200_000), k=count)


def run(seconds: float, seed: int) -> dict[str, Any]:
    """What came of the operations, the slopes per minute, and the samples that they are from."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served("--data-dir", folder, "--max-total-tokens", str(POOL), "--deadline", "60") as url,
    ):
        return asyncio.run(measured(url, seconds, random.Random(seed)))


async def measured(url: str, seconds: float, draw: random.Random) -> dict[str, Any]:
    processes = by_role(server_processes())
    samples: list[dict[str, float]] = []
    async with open_api(url) as api:
        mix = Mix(api, draw)
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def sampling() -> None:
            while True:
                samples.append({"minute": (loop.time() - started) / 60.0} | await sampled(api, processes))
                await asyncio.sleep(SAMPLE_SECONDS)

        sampler = asyncio.create_task(sampling())
        await asyncio.gather(*(mix.work(started + seconds) for _ in range(WORKERS)))
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        # Pins end with their senders' leases.
        await asyncio.sleep(LEASE_SECONDS + 5.0)
        counters = await settled(api)
        last = await sampled(api, processes)
    return {
        "seconds": seconds,
        "operations": dict(sorted(mix.counts.items())),
        "slopes_per_minute": slopes(samples),
        "first_sample": samples[0],
        "middle_sample": samples[len(samples) // 2],
        "last_sample": samples[-1],
        "idle_afterwards": last,
        "counters_afterwards": counters,
        "samples": samples,
    }


async def sampled(api: Api, processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Memory in MiB and descriptors of each process, positions of the KV pool that are locked, and the senders."""
    found: dict[str, float] = {}
    for role, process in processes.items():
        found[f"{role}_rss_mib"] = process.memory_info().rss / MEBI
        found[f"{role}_fds"] = process.num_fds()
    (engine,) = (await api.result("GET", "/v1/loads"))["loads"]
    capacity = await api.result("GET", "/v1/capacity")
    senders = (await api.result("GET", "/v1/senders"))["data"]
    return found | {
        "kv_used": engine["num_used_tokens"],
        "kv_free": engine["max_total_num_tokens"] - engine["num_used_tokens"],
        "pinned": capacity["pinned_positions"],
        "queued": capacity["queued"],
        "senders": len(senders),
    }


def by_role(processes: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """The HTTP process (the first), the scheduler and the detokenizer."""
    found = {"http": processes[0]}
    for process in processes[1:]:
        role = ROLES.get(process.name()[:13])
        if role is not None:
            found[role] = process
    return found


def slopes(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Least squares over the second half, per minute."""
    half = samples[len(samples) // 2 :]
    minutes = [sample["minute"] for sample in half]
    if len(half) < 2:
        return {}
    names = [name for name in half[0] if name != "minute"]
    return {name: round(float(np.polyfit(minutes, [s[name] for s in half], 1)[0]), 3) for name in names}
