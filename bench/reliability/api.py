"""Requests to the server and what came back, refusals included: here they are results, not exceptions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from cb_loadtest.load.transport import open_session

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its status, JSON, seconds from request to the last byte, and the ``Retry-After`` of a refusal."""

    status: int
    body: Any
    seconds: float
    retry_after: float | None

    @property
    def code(self) -> str:
        """What the answer was, as a key to count by: ``ok``, or the status and our error code."""
        if self.status == 200:
            return "ok"
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return f"{self.status} {error.get('code') if isinstance(error, dict) else 'without a code'}"


class Api:
    """One API key's way to the server at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self._session = session
        self._url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def call(self, method: str, path: str, body: Any = None) -> Reply:
        """Raises aiohttp.ClientError and TimeoutError when there is no answer."""
        started = time.perf_counter()
        async with self._session.request(
            method,
            self._url + path,
            json=body,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        ) as response:
            found = await response.json(content_type=None)
            after = response.headers.get("Retry-After")
            return Reply(response.status, found, time.perf_counter() - started, None if after is None else float(after))

    async def result(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer that must be 200. Raises RuntimeError when it is not."""
        reply = await self.call(method, path, body)
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {reply.body}")
        return reply.body

    async def register(self, input_ids: list[int], **options: Any) -> str:
        """The id of a new sender. Raises RuntimeError."""
        sender: str = (await self.result("POST", "/v1/senders", {"input_ids": input_ids, **options}))["id"]
        return sender

    async def ask(self, sender: str, query: Any, **options: Any) -> Reply:
        """One query, one message."""
        return await self.call("POST", f"/v1/senders/{sender}/messages", {"queries": [query], **options})

    async def counters(self) -> dict[str, int]:
        """What must be zero on an idle server: our queue, and SGLang's own counts of requests and locked positions."""
        ours = await self.result("GET", "/v1/capacity")
        (engine,) = (await self.result("GET", "/v1/loads"))["loads"]
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        return {name: ours[name] for name in ("running", "queued", "receivers")} | {n: engine[n] for n in names}


@asynccontextmanager
async def open_api(url: str, key: str | None = None) -> AsyncIterator[Api]:
    """An ``Api`` with a session of its own."""
    async with open_session() as session:
        yield Api(session, url, key)
