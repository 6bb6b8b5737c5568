"""What the tests of the client share: answers of a server, and both clients over a mock transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from cb_sglang.client import AsyncCacheBack, CacheBack

Handler = Callable[[httpx.Request], httpx.Response]
KINDS = ("sync", "async")
MESSAGE_IDS = [f"msg_{n:032x}" for n in range(4)]

SENDER: dict[str, Any] = {
    "object": "sender",
    "id": "snd_1",
    "positions": 64,
    "cached_positions": 0,
    "fingerprint": "f0",
    "created": 1.5,
}


def message(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "object": "message",
        "id": f"msg_{index}",
        "sender": "snd_1",
        "index": index,
        "encoding": "token_ids",
        "selector": "cacheback",
        "sender_positions": 64,
        "query_positions": 9,
        "voting_positions": 4,
        "cached_positions": 64,
        "budget": {"ratio": 8.0, "positions": 8},
        "positions": list(range(8)),
        "spans": [[0, 8]],
        "token_ids": list(range(100, 108)),
        "timings": {"engine_seconds": 0.1, "total_seconds": 0.2},
    } | changes


def event(name: str, data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n".encode()


def use(kind: str, handler: Handler, name: str, *args: Any, **kwargs: Any) -> Any:
    """What the method ``name`` of a client over ``handler`` returns; a stream as a list."""
    settings = kwargs.pop("settings", {})
    transport = httpx.MockTransport(handler)
    if kind == "sync":
        with CacheBack("http://test", transport=transport, **settings) as client:
            result = getattr(client, name)(*args, **kwargs)
            return list(result) if name.startswith("stream_") else result

    async def run() -> Any:
        async with AsyncCacheBack("http://test", transport=transport, **settings) as client:
            result = getattr(client, name)(*args, **kwargs)
            if name.startswith("stream_"):
                return [item async for item in result]
            return await result

    return asyncio.run(run())


def answering(status: int, content: Any, **headers: str) -> Handler:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda request: httpx.Response(status, content=body, headers=named)


def streaming(*events: bytes) -> Handler:
    return answering(200, b"".join(events), Content_Type="text/event-stream; charset=utf-8")


def refuse(request: httpx.Request) -> httpx.Response:
    raise AssertionError("nothing may be sent")
