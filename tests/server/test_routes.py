"""The routes on a service that fails on demand: what the HTTP layer makes of errors, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from mounted_app import ErrorCodes, call, http_scope, mounted_app
from served_api import sse_events

from cb_sglang import wire
from cb_sglang.errors import CacheBackError, CapacityError, EngineError
from cb_sglang.message_payload import MessagePayload
from cb_sglang.messages import Made
from cb_sglang.payload import MEDIA_TYPE, decode_batch
from cb_sglang.tenants import Tenant


def message(index: int) -> Made:
    facts: dict[str, Any] = {"id": f"msg_{index}", "sender": "snd_1", "index": index, "encoding": "token_ids"}
    origin = {"model_fingerprint": "m", "tokenizer_fingerprint": "t", "query_hash": "q"}
    payload = MessagePayload(**facts, **origin, sender_positions=9, positions=(0, 4), token_ids=(5, 6))
    shown = wire.Message(
        **facts,
        **origin,
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
    return Made(shown, payload)


class FailingService:
    """Makes ``good`` messages and then raises ``error``, if there is one."""

    metrics: ErrorCodes

    def __init__(self, good: int, error: Exception | None = None) -> None:
        self.good = good
        self.error = error
        self.closed = False

    @property
    def senders(self) -> FailingService:
        return self

    async def register(self, tenant: Tenant, request: wire.SenderRequest) -> wire.Sender:
        assert self.error is not None
        raise self.error

    async def messages(
        self, tenant: Tenant, sender_id: str, request: wire.MessagesRequest
    ) -> AsyncGenerator[Made, None]:
        try:
            # The last query finishes first.
            for index in reversed(range(self.good)):
                yield message(index)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True

    async def transfers(self, tenant: Tenant, request: wire.TransfersRequest) -> AsyncGenerator[wire.Transfer, None]:
        async for made in self.messages(tenant, "snd_1", request):
            index = made.message.index
            yield wire.Transfer(sender=request.senders[index % 2], query=index // 2, message=made.message)


def post(service: FailingService, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return call(mounted_app(service), "POST", path, json=body, headers=headers)


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
@pytest.mark.parametrize("path", ["/v1/senders", "/v1/senders/snd_1/messages", "stream", "/v1/transfers"])
def test_failures_have_status_and_shape(
    caplog: pytest.LogCaptureFixture, path: str, error: Exception, status: int, kind: str, code: str, text: str
) -> None:
    """Also of a stream, as long as it has not begun."""
    body: dict[str, Any] = {"prompt": "a"}
    if path != "/v1/senders":
        body = {"queries": ["a", "b"], "stream": path == "stream"}
    if path == "/v1/transfers":
        body["senders"] = ["snd_1", "snd_2"]
    good = 1 if path.endswith("messages") else 0
    service = FailingService(good, error)
    answer = post(service, path.replace("stream", "/v1/senders/snd_1/messages"), body)
    assert answer.status_code == status
    if isinstance(error, CacheBackError):
        assert service.metrics.errors == [code]
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
    assert [wire.Message(**data).index for _, data in events[:2]] == [1, 0]
    assert (events[2][1]["error"]["message"], events[2][1]["error"]["code"]) == (text, code)
    assert service.closed


def test_answers_are_in_the_order_of_the_queries_whatever_finishes_first() -> None:
    path, body = "/v1/senders/snd_1/messages", {"queries": ["a", "b", "c"]}
    listed = post(FailingService(3), path, body).json()["data"]
    assert [each["index"] for each in listed] == [0, 1, 2]
    binary = post(FailingService(3), path, body, Accept=MEDIA_TYPE)
    assert binary.headers["content-type"] == MEDIA_TYPE
    assert decode_batch(binary.content) == tuple(message(index).payload for index in range(3))
    both = post(FailingService(3), path, body | {"stream": True}, Accept=MEDIA_TYPE)
    assert both.status_code == 400 and both.json()["error"]["param"] == "stream"


def test_pairs_are_in_the_order_of_senders_and_then_queries() -> None:
    body = {"queries": ["a", "b"], "senders": ["snd_2", "snd_1"]}
    listed = post(FailingService(4), "/v1/transfers", body).json()["data"]
    assert [(each["sender"], each["query"]) for each in listed] == [
        ("snd_2", 0),
        ("snd_2", 1),
        ("snd_1", 0),
        ("snd_1", 1),
    ]
    events = sse_events(post(FailingService(4), "/v1/transfers", body | {"stream": True}).text)
    assert [name for name, _ in events] == ["transfer"] * 4 + ["done"]


def test_a_client_that_leaves_cancels_the_work() -> None:
    """No answer is awaited: the server sees the disconnect and ends what it runs for it."""

    async def test() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        class HangingService:
            @property
            def senders(self) -> HangingService:
                return self

            async def register(self, tenant: Tenant, request: wire.SenderRequest) -> wire.Sender:
                started.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
                raise AssertionError("nobody left")

        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await incoming.put({"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(event: Any) -> None:
            sent.append(event)

        scope = http_scope("POST", "/v1/senders", (b"content-type", b"application/json"))
        app = mounted_app(HangingService())
        running = asyncio.create_task(app(scope, incoming.get, send))
        await started.wait()
        await incoming.put({"type": "http.disconnect"})
        await running
        assert cancelled.is_set()
        assert sent[0]["status"] == 499

    asyncio.run(asyncio.wait_for(test(), 20))
