"""The routes on a service that fails on demand: what the HTTP layer makes of errors, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from served_api import sse_events

from cb_server.app import mount
from cb_sglang import wire
from cb_sglang.errors import CacheBackError, CapacityError, EngineError
from cb_sglang.service import Settings


def message(index: int) -> wire.Message:
    return wire.Message(
        id=f"msg_{index}",
        sender="snd_1",
        index=index,
        encoding="token_ids",
        selector="cacheback",
        sender_positions=9,
        query_positions=3,
        voting_positions=1,
        cached_positions=9,
        budget=wire.BudgetReport(ratio=8.0, positions=2),
        positions=[0, 4],
        spans=[(0, 1), (4, 5)],
        token_ids=[5, 6],
        timings=wire.Timings(engine_seconds=0.1, total_seconds=0.2),
    )


class FailingService:
    """Makes ``good`` messages and then raises ``error``."""

    def __init__(self, good: int, error: Exception) -> None:
        self.good = good
        self.error = error
        self.closed = False

    async def register(self, request: wire.SenderRequest) -> wire.Sender:
        raise self.error

    async def messages(self, sender_id: str, request: wire.MessagesRequest) -> AsyncGenerator[wire.Message, None]:
        try:
            for index in range(self.good):
                yield message(index)
            raise self.error
        finally:
            self.closed = True


def post(service: FailingService, path: str, body: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    mount(app, Settings())
    app.state.cacheback_service = service

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.post(path, json=body)

    return asyncio.run(call())


INTERNAL = "internal error; the server's log has the details"
ERRORS = [
    (EngineError("out of order"), 502, "engine_error", "engine_error", "out of order"),
    (CapacityError("full; delete one"), 503, "overloaded_error", "server_overloaded", "full; delete one"),
    (CacheBackError("odd", param="queries"), 500, "server_error", "internal_error", "odd"),
    # What nobody expected is for the log; it may hold paths or other people's data.
    (
        RuntimeError("/secret/path"),
        500,
        "server_error",
        "internal_error",
        "internal error; the server's log has the details",
    ),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "text"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("path", ["/v1/senders", "/v1/senders/snd_1/messages", "stream"])
def test_failures_have_status_and_shape(
    caplog: pytest.LogCaptureFixture, path: str, error: Exception, status: int, kind: str, code: str, text: str
) -> None:
    """Also of a stream, as long as it has not begun."""
    body = {"prompt": "a"} if path == "/v1/senders" else {"queries": ["a", "b"], "stream": path == "stream"}
    good = 1 if path.endswith("messages") else 0
    answer = post(FailingService(good, error), path.replace("stream", "/v1/senders/snd_1/messages"), body)
    assert answer.status_code == status
    assert answer.json() == {
        "error": {"message": text, "type": kind, "param": getattr(error, "param", None), "code": code}
    }
    assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)
    assert ("/secret/path" in caplog.text) == isinstance(error, RuntimeError)


@pytest.mark.parametrize(("error", "status", "kind", "code", "text"), ERRORS, ids=lambda value: type(value).__name__)
def test_a_stream_that_fails_midway_says_so(error: Exception, status: int, kind: str, code: str, text: str) -> None:
    service = FailingService(2, error)
    answer = post(service, "/v1/senders/snd_1/messages", {"queries": ["a", "b", "c"], "stream": True})
    assert answer.status_code == 200
    events = sse_events(answer.text)
    assert [name for name, _ in events] == ["message", "message", "error", "done"]
    assert [wire.Message(**data).index for _, data in events[:2]] == [0, 1]
    assert (events[2][1]["error"]["message"], events[2][1]["error"]["code"]) == (text, code)
    assert service.closed


def test_a_client_that_leaves_cancels_the_work() -> None:
    """No answer is awaited: the server sees the disconnect and ends what it runs for it."""

    async def test() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        class HangingService:
            async def register(self, request: wire.SenderRequest) -> wire.Sender:
                started.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
                raise AssertionError("nobody left")

        app = FastAPI()
        mount(app, Settings())
        app.state.cacheback_service = HangingService()
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await incoming.put({"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(event: Any) -> None:
            sent.append(event)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/senders",
            "raw_path": b"/v1/senders",
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        running = asyncio.create_task(app(scope, incoming.get, send))  # type: ignore[arg-type]
        await started.wait()
        await incoming.put({"type": "http.disconnect"})
        await running
        assert cancelled.is_set()
        assert sent[0]["status"] == 499

    asyncio.run(asyncio.wait_for(test(), 20))
