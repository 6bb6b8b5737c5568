"""A server with known delays, for the load generator: ``python stub_server.py PORT``.

Words are its tokens. It waits as told by ``POST /stub/settings``, notes when each request came and how long it took
in its own clock (``GET /stub/log``), and can stand still for a while. Nothing is computed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import signal
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BOS = 2
MAX_LOG = 200_000


@dataclass
class Settings:
    """delay:     seconds of a message, drawn uniformly from two numbers.
    token:        seconds of a decoded token.
    prefill:      seconds of a token that is not cached.
    concurrency:  messages that are worked on at once; the others queue.
    stall_after:  messages, then nothing is answered for ``stall`` seconds.
    fail_every:   every so many messages is refused with 503.
    forgetful:    senders are never in the cache.
    radix:        the beginning that a prompt shares with one before it is in the cache.
    room:         positions that a message is granted at most.
    admin:        the only key that /server_info and /metrics take.
    hang:         requests of a route (or of DELETE) that are answered before the next never is.
    interrupt:    sends this process a Ctrl-C a second after one began to hang.
    """

    delay: tuple[float, float] = (0.0, 0.0)
    token: float = 0.0
    prefill: float = 0.0
    concurrency: int = 1_000_000
    stall_after: int | None = None
    stall: float = 0.0
    fail_every: int = 0
    forgetful: bool = False
    radix: bool = False
    room: int = 1 << 30
    admin: str | None = None
    hang: dict[str, int] = field(default_factory=dict)
    interrupt: bool = False


@dataclass
class Stub:
    settings: Settings = field(default_factory=Settings)
    log: list[dict[str, Any]] = field(default_factory=list)
    senders: dict[str, list[int]] = field(default_factory=dict)
    leases: list[float | None] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    hung_at: float | None = None

    def __post_init__(self) -> None:
        self.apply(self.settings)

    def apply(self, settings: Settings) -> None:
        self.settings = settings
        self.log.clear()
        self.draw = random.Random(1)
        self.room = asyncio.Semaphore(self.settings.concurrency)
        self.going = asyncio.Event()
        self.going.set()
        self.messages = 0
        self.stalled_until = 0.0


STUB = web.AppKey("stub", Stub)


@asynccontextmanager
async def logged(stub: Stub, kind: str, request: web.Request) -> AsyncIterator[None]:
    started = now()
    await stub.going.wait()
    yield
    if len(stub.log) < MAX_LOG:
        entry = {"kind": kind, "at": started, "seconds": now() - started}
        stub.log.append(entry | {"key": request.headers.get("Authorization", "").removeprefix("Bearer ")})


def now() -> float:
    return asyncio.get_running_loop().time()


def words(text: str) -> list[int]:
    return [10 + zlib.crc32(word.encode()) % 50_000 for word in text.split()]


@web.middleware
async def doorkeeper(request: web.Request, handler: Any) -> web.StreamResponse:
    stub, route = request.app[STUB], "DELETE" if request.method == "DELETE" else request.path
    settings = stub.settings
    if route in settings.hang:
        settings.hang[route] -= 1
        if settings.hang[route] < 0:
            if stub.hung_at is None and settings.interrupt:
                asyncio.get_running_loop().call_later(1.0, signal.raise_signal, signal.SIGINT)
            stub.hung_at = stub.hung_at or now()
            await asyncio.sleep(1e6)
    operators = settings.admin is not None and route in ("/server_info", "/metrics")
    if operators and request.headers.get("Authorization") != f"Bearer {settings.admin}":
        return web.json_response({"error": {"message": "not open to tenants", "code": "not_found"}}, status=404)
    response: web.StreamResponse = await handler(request)
    return response


async def tokenize(request: web.Request) -> web.Response:
    body = await request.json()
    return web.json_response({"tokens": [BOS] * body["add_special_tokens"] + words(body["prompt"])})


async def register(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    body = await request.json()
    ids = body["input_ids"]
    stub.leases.append(body.get("ttl"))
    name = "snd_" + hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
    cached = len(ids) - 1 if name in stub.senders and not stub.settings.forgetful else 0
    stub.senders[name] = ids
    sender = {"object": "sender", "id": name, "positions": len(ids), "cached_positions": cached}
    return web.json_response(sender | {"fingerprint": "f", "created": 0.0})


async def listed(request: web.Request) -> web.Response:
    found = [
        {"object": "sender", "id": name, "positions": len(ids), "fingerprint": "f", "created": 0.0}
        for name, ids in request.app[STUB].senders.items()
    ]
    return web.json_response({"object": "list", "data": found})


async def delete(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    del request.app[STUB].senders[name]
    return web.json_response({"object": "sender.deleted", "id": name})


async def messages(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    body, settings = await request.json(), stub.settings
    async with logged(stub, "message", request):
        stub.messages += 1
        if stub.messages == settings.stall_after:
            stub.going.clear()
            stub.stalled_until = now() + settings.stall
            asyncio.get_running_loop().call_later(settings.stall, stub.going.set)
            await stub.going.wait()
        if settings.fail_every and stub.messages % settings.fail_every == 0:
            error = {"message": "full", "type": "overloaded_error", "code": "server_overloaded"}
            return web.json_response({"error": error}, status=503, headers={"Retry-After": "1"})
        ids = stub.senders[request.match_info["name"]]
        queued = now()
        async with stub.room:
            begun = now()
            await asyncio.sleep(stub.draw.uniform(*settings.delay))
        timings = {"queue_seconds": begun - queued, "engine_seconds": now() - begun, "total_seconds": now() - queued}
        data = [
            message(request.match_info["name"], ids, index, query, body, settings) | {"timings": timings}
            for index, query in enumerate(body["queries"])
        ]
        return web.json_response({"object": "list", "data": data})


def message(
    name: str, ids: list[int], index: int, query: str | list[int], body: Any, settings: Settings
) -> dict[str, Any]:
    asked = min(body["budget"], len(ids)) if "budget" in body else math.ceil(len(ids) / body["ratio"])
    kept = asked if body.get("policy") == "fixed" else min(asked, settings.room)
    found = {
        "object": "message",
        "id": "msg",
        "sender": name,
        "index": index,
        "encoding": body["encoding"],
        "sender_positions": len(ids),
        "query_positions": len(query if isinstance(query, list) else words(query)),
        "cached_positions": 0 if settings.forgetful else len(ids),
        "positions": list(range(kept)),
        "grant": {"asked": asked, "granted": kept, "limit": "asked" if kept == asked else "pool", "reason": ""},
    }
    if body["encoding"] == "text":
        return found | {"text": "word " * kept, "payload_bytes": 5 * kept}
    return found | {"token_ids": ids[:kept], "payload_bytes": 4 * kept}


async def generate(request: web.Request) -> web.StreamResponse:
    stub = request.app[STUB]
    body = await request.json()
    ids = body["input_ids"] if "input_ids" in body else words(body["text"])
    count = body["sampling_params"]["max_new_tokens"]
    async with logged(stub, "stream" if body.get("stream") else "generate", request):
        cached = 0 if stub.settings.forgetful else longest_prefix(stub, ids)
        await asyncio.sleep(stub.settings.prefill * (len(ids) - cached))
        if not body.get("stream"):
            await asyncio.sleep(stub.settings.token * count)
            return web.json_response(generated(ids, cached, count))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for done in range(1, count + 1):
            await asyncio.sleep(stub.settings.token)
            await response.write(b"data: " + json.dumps(generated(ids, cached, done)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def longest_prefix(stub: Stub, ids: list[int]) -> int:
    """Positions of a registered sender in front of ``ids``; with ``radix``, of any prompt. The last is always new."""
    if stub.settings.radix:
        seen = [*stub.senders.values(), *stub.prompts]
        stub.prompts.append(ids)
        return min(len(ids) - 1, max((shared(known, ids) for known in seen), default=0))
    return max((len(known) for known in stub.senders.values() if ids[: len(known)] == known), default=0)


def shared(one: list[int], other: list[int]) -> int:
    """Leading positions that are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def generated(ids: list[int], cached: int, count: int) -> dict[str, Any]:
    meta = {"prompt_tokens": len(ids), "cached_tokens": cached, "completion_tokens": count}
    return {"text": "word " * count, "output_ids": [11] * count, "meta_info": meta}


async def metrics(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    seconds = [entry["seconds"] for entry in stub.log if entry["kind"] == "message"]
    lines = [
        "# TYPE sglang:num_running_reqs gauge",
        "sglang:num_running_reqs 3.0",
        "# HELP cacheback_message_seconds Time of a message.",
        "# TYPE cacheback_message_seconds histogram",
        f'cacheback_message_seconds_bucket{{stage="total",le="+Inf"}} {len(seconds)}',
        f'cacheback_message_seconds_count{{stage="total"}} {len(seconds)}',
        f'cacheback_message_seconds_sum{{stage="total"}} {sum(seconds)}',
        "# TYPE cacheback_grants_total counter",
        f'cacheback_grants_total{{limit="asked"}} {len(seconds)}',
    ]
    return web.Response(text="\n".join(lines) + "\n")


async def server_info(request: web.Request) -> web.Response:
    return web.json_response(
        {"version": "0.0-stub", "page_size": 1, "api_key": "secret", "max_total_num_tokens": 50_000}
    )


async def set_settings(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    stub.apply(Settings(**await request.json()))
    return web.json_response({})


async def read_log(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    return web.json_response({"log": stub.log, "stalled_until": stub.stalled_until})


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def make_app(stub: Stub) -> web.Application:
    app = web.Application(client_max_size=64 << 20, middlewares=[doorkeeper])
    app[STUB] = stub
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/server_info", server_info),
            web.post("/v1/tokenize", tokenize),
            web.post("/v1/senders", register),
            web.get("/v1/senders", listed),
            web.delete("/v1/senders/{name}", delete),
            web.post("/v1/senders/{name}/messages", messages),
            web.post("/generate", generate),
            web.post("/stub/settings", set_settings),
            web.get("/stub/log", read_log),
        ]
    )
    return app


if __name__ == "__main__":
    web.run_app(
        make_app(Stub()),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        access_log=None,
        print=lambda text: print(text, flush=True),
    )
