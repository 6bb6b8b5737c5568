"""Request ids and the access log, around small ASGI apps and around our routes without an engine."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mounted_app import ErrorCodes
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cb_server import observe
from cb_server.observe import AccessLog, note_tenant
from cb_server.open_calls import OpenCalls
from cb_server.routes import router
from cb_sglang.errors import SenderNotFoundError
from cb_sglang.tenants import DEFAULT_TENANT, Tenant, Tenants

KEY = "cb_a-key-that-must-not-be-logged"
SECRET_TEXT = "content that must not be logged"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The lines so far."""
    caplog.set_level(logging.INFO, logger="cacheback.access")
    return lambda: [json.loads(each.getMessage()) for each in caplog.records if each.name == "cacheback.access"]


def ask(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path, **options)

    return asyncio.run(call())


async def _echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    if request.url.path == "/v1/chat/completions" and b"cacheback" in body:
        note_tenant(request.scope, "team-a")
    return PlainTextResponse(body.decode() or "nothing", headers={"X-Request-Id": "of-the-app"})


async def _events(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b"first", b"second"):
            yield part

    return StreamingResponse(parts())


async def _broken(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        raise RuntimeError("broke off")

    return StreamingResponse(parts())


def logged(app: ASGIApp) -> AccessLog:
    return AccessLog(app, OpenCalls())


@pytest.fixture
def app() -> ASGIApp:
    return logged(
        Starlette(
            routes=[
                Route("/v1/senders", _echo, methods=["POST"]),
                Route("/v1/transfers", _events, methods=["POST"]),
                Route("/v1/capacity", _broken),
                Route("/v1/chat/completions", _echo, methods=["POST"]),
                Route("/generate", _echo, methods=["POST"]),
            ]
        )
    )


def test_a_request_is_one_line_without_content(app: ASGIApp, log: Callable[[], list[dict[str, Any]]]) -> None:
    answer = ask(app, "POST", "/v1/senders", content=SECRET_TEXT, headers={"Authorization": f"Bearer {KEY}"})

    assert answer.text == SECRET_TEXT
    (line,) = log()
    assert line["request_id"] == answer.headers["X-Request-Id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/senders", 200)
    assert line["bytes_in"] == line["bytes_out"] == len(SECRET_TEXT)
    assert line["tenant"] is None
    assert 0 <= line["seconds"] < 60
    assert line["time"].endswith("+00:00")
    assert KEY not in json.dumps(line) and SECRET_TEXT not in json.dumps(line)


@pytest.mark.parametrize("given", ["a", "trace-1.2_3", "x" * 64])
def test_a_clients_request_id_is_kept(app: ASGIApp, log: Callable[[], list[dict[str, Any]]], given: str) -> None:
    answer = ask(app, "POST", "/v1/senders", headers={"X-Request-Id": given})

    assert answer.headers.get_list("X-Request-Id") == [given]  # in place of the app's own, and once
    assert log()[0]["request_id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "two words", 'quote"', "ünïcode", "a/b"])
def test_any_other_request_id_is_replaced(app: ASGIApp, given: str) -> None:
    first = ask(app, "POST", "/v1/senders", headers=[(b"x-request-id", given.encode())]).headers["X-Request-Id"]
    second = ask(app, "POST", "/v1/senders", headers=[(b"x-request-id", given.encode())]).headers["X-Request-Id"]

    assert len(first) == 32 and int(first, 16) >= 0
    assert first != second


def test_sglangs_routes_pass_unchanged(app: ASGIApp, log: Callable[[], list[dict[str, Any]]]) -> None:
    answer = ask(app, "POST", "/generate", content="prompt")

    assert answer.headers["X-Request-Id"] == "of-the-app"
    assert log() == []


def test_a_chat_is_ours_when_it_is_answered_from_messages(
    app: ASGIApp, log: Callable[[], list[dict[str, Any]]]
) -> None:
    plain = ask(app, "POST", "/v1/chat/completions", content="{}")
    assert plain.headers["X-Request-Id"] == "of-the-app" and log() == []

    ours = ask(app, "POST", "/v1/chat/completions", content='{"cacheback": {}}')
    (line,) = log()
    assert ours.headers["X-Request-Id"] == line["request_id"] != "of-the-app"
    assert (line["route"], line["tenant"]) == ("/v1/chat/completions", "team-a")


def test_a_stream_is_logged_when_it_ends(app: ASGIApp, log: Callable[[], list[dict[str, Any]]]) -> None:
    answer = ask(app, "POST", "/v1/transfers")

    assert answer.text == "firstsecond"
    (line,) = log()
    assert (line["status"], line["bytes_out"]) == (200, len("firstsecond"))
    assert line["request_id"] == answer.headers["X-Request-Id"]


def test_an_answer_that_breaks_off_is_an_error(app: ASGIApp, log: Callable[[], list[dict[str, Any]]]) -> None:
    ask(app, "GET", "/v1/capacity")

    assert [(line["status"], line["bytes_out"]) for line in log()] == [(500, len("first"))]


class Connection:
    """A client that sends a request and leaves once ``stays`` parts of the answer have come."""

    def __init__(self, path: str, stays: int) -> None:
        self.scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        self._left = asyncio.Event()
        self._stays = stays
        self._asked = False
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            if not self._stays:
                self._left.set()
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if len([each for each in self.sent if each.get("body")]) >= self._stays:
            self._left.set()


@pytest.mark.parametrize("stays", [0, 1])
def test_a_client_that_leaves_is_499(log: Callable[[], list[dict[str, Any]]], stays: int) -> None:
    async def endless(request: Request) -> StreamingResponse:
        await request.body()

        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield b"part"
                await asyncio.sleep(0)

        return StreamingResponse(parts())

    async def run() -> None:
        connection = Connection("/v1/transfers", stays)
        app = logged(Starlette(routes=[Route("/v1/transfers", endless, methods=["POST"])]))
        await asyncio.wait_for(app(connection.scope, connection.receive, connection.send), 10)

    asyncio.run(run())
    assert [(line["status"], line["route"]) for line in log()] == [(499, "/v1/transfers")]


def test_the_end_of_a_connection_behind_a_whole_answer_is_none(log: Callable[[], list[dict[str, Any]]]) -> None:
    async def answers_then_listens(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all of it"})
        assert (await receive())["type"] == "http.disconnect"

    async def run() -> None:
        connection = Connection("/v1/senders", stays=1)
        await logged(answers_then_listens)(connection.scope, connection.receive, connection.send)

    asyncio.run(run())
    assert [line["status"] for line in log()] == [200]


class NoSenders:
    """A service whose ``senders`` have nothing."""

    metrics, stopping = ErrorCodes(), False

    @property
    def senders(self) -> NoSenders:
        return self

    def get(self, tenant: Tenant, sender_id: str) -> Any:
        assert tenant == DEFAULT_TENANT
        raise SenderNotFoundError("no such sender", param="sender_id")


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/senders/snd_of_somebody", "/v1/senders/{sender_id}"),
        ("/v1/senders/snd_of_somebody/else", "/v1/senders/{rest:path}"),
    ],
)
def test_our_routes_are_logged_by_template(log: Callable[[], list[dict[str, Any]]], path: str, route: str) -> None:
    inner = FastAPI()
    inner.state.cacheback_tenants = Tenants()
    inner.state.cacheback_service = NoSenders()
    inner.include_router(router)
    answer = ask(logged(inner), "GET", path)

    assert answer.status_code == 404
    (line,) = log()
    assert (line["route"], line["status"]) == (route, 404)
    assert "snd_of_somebody" not in json.dumps(line)


def test_a_request_that_came_to_no_route_is_logged_by_its_prefix(log: Callable[[], list[dict[str, Any]]]) -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("no key", status_code=401)(scope, receive, send)

    ask(logged(refuses), "DELETE", "/v1/senders/snd_of_somebody")
    ask(logged(refuses), "GET", "/v1/senders")
    ask(logged(refuses), "GET", "/v1/senders_of_another_service")

    assert [(line["route"], line["status"]) for line in log()] == [("/v1/senders/...", 401), ("/v1/senders", 401)]


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger in place of the process's, which other tests listen to."""
    made = logging.Logger("cacheback.access.of-this-test")
    monkeypatch.setattr(observe, "logger", made)
    yield made


def test_lines_are_written_once_and_as_they_are(
    app: ASGIApp, own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    observe.write_to_stderr()
    observe.write_to_stderr()
    ask(app, "POST", "/v1/senders", headers={"X-Request-Id": "one"})

    (line,) = stderr.getvalue().splitlines()
    assert json.loads(line)["request_id"] == "one"
