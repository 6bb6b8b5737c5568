"""With tenants' keys: closed by default, prompts in the tenant's own radix namespace, the rest for the admin."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from mounted_app import SECRET, call, http_scope, mounted_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from cb_server import bodies
from cb_server.access import TenantAccess
from cb_sglang.tenants import Tenants, namespace, new_key

NAMES = ("alice", "bob", "admin")
KEYS, LINES = zip(*(new_key(name) for name in NAMES), strict=True)
TENANTS = Tenants.parse("\n".join(LINES), "test")
HEADERS = {name: {"Authorization": f"Bearer {key}"} for name, key in zip(NAMES, KEYS, strict=True)}
MANAGEMENT = ["/flush_cache", "/update_weights_from_disk", "/start_profile", "/metrics", "/abort_request", "/v1/loads"]
OURS = ["/v1/senders", "/v1/senders/snd_1/messages", "/v1/transfers", "/v1/capacity"]
PROMPTED = ["/generate", "/v1/completions", "/v1/chat/completions"]


def app() -> Starlette:
    """An app that shows what reached it, behind the middleware."""

    async def show(request: Request) -> JSONResponse:
        body = await request.body()
        shown = {"method": request.method, "path": request.url.path, "body": body.decode()}
        return JSONResponse(shown | {"length": request.headers.get("content-length")})

    async def accept(socket: WebSocket) -> None:
        await socket.accept()

    methods = ["GET", "POST", "PUT", "DELETE", "HEAD"]
    shown = Starlette(routes=[WebSocketRoute("/{path:path}", accept), Route("/{path:path}", show, methods=methods)])
    shown.add_middleware(TenantAccess, tenants=TENANTS, namespace_of=lambda name: namespace(SECRET, name))
    return shown


def post(path: str, body: Any, who: str | None = "alice", method: str = "POST") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(app(), method, path, content=content, headers=None if who is None else HEADERS[who])


@pytest.mark.parametrize("path", [*MANAGEMENT, *OURS, *PROMPTED, "/", "/v1/models", "/health_generate", "/docs"])
@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", "Basic " + KEYS[0], KEYS[0], "Bearer " + "x" * 600]
)
def test_without_a_key_every_route_is_closed(path: str, key: str | None) -> None:
    answer = call(app(), "POST", path, json={}, headers=None if key is None else {"Authorization": key})
    assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_only_health_is_open_and_only_to_look_at() -> None:
    assert call(app(), "GET", "/health").status_code == 200
    assert call(app(), "HEAD", "/health").status_code == 200
    assert call(app(), "POST", "/health").status_code == 401


@pytest.mark.parametrize(
    "path", [*MANAGEMENT, "/", "/health_generate", "/v1/senders_of_all", "/generate/", "//generate"]
)
def test_what_is_not_for_tenants_does_not_exist_for_them(path: str) -> None:
    for method in ("GET", "POST"):
        answer = post(path, {}, method=method)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "endpoint_not_found"
        assert post(path, {}, who="admin", method=method).status_code == 200


@pytest.mark.parametrize("path", [*OURS, "/v1/models", "/tokenize"])
def test_what_tenants_may_reach_is_as_they_sent_it(path: str) -> None:
    body = b'{"extra_key" : "mine"} '
    assert post(path, body).json() | {"length": None} == {
        "method": "POST",
        "path": path,
        "body": body.decode(),
        "length": None,
    }


@pytest.mark.parametrize("path", PROMPTED)
@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"text": "a", "extra_key": "theirs", "cache_salt": "theirs"},
        {"text": "a", "extra_key": None, "cache_salt": ["x"], "unknown": {"deep": [1, 2.5, "é"]}},
    ],
    ids=["plain", "forged", "odd"],
)
def test_prompts_are_in_the_tenant_s_own_namespace(path: str, body: dict[str, Any]) -> None:
    seen = {}
    for who in ("alice", "bob"):
        reached = post(path, body, who).json()
        parsed = json.loads(reached["body"])
        seen[who] = parsed.pop("extra_key")
        assert parsed == {name: value for name, value in body.items() if name not in ("extra_key", "cache_salt")}
        assert int(reached["length"]) == len(reached["body"].encode())
    assert seen == {who: namespace(SECRET, who) for who in seen} and len(set(seen.values())) == 2


@pytest.mark.parametrize("field", ["session_params", "session_id", "custom_logit_processor", "rid", "bootstrap_room"])
def test_what_reaches_beyond_the_namespace_is_refused(field: str) -> None:
    answer = post("/generate", {"text": "a", field: "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert post("/generate", {"text": "a", field: None}).status_code == 200
    assert post("/generate", {"text": "a", field: "x"}, who="admin").status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000, b"1" * 5_000], ids=range(7))
def test_what_is_no_object_is_refused(body: bytes) -> None:
    answer = post("/generate", body)
    assert answer.status_code == 400 and "error" in answer.json()


def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    assert post("/generate", {"text": "a" * 50}).status_code == 200
    answer = post("/generate", {"text": "a" * 100})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer " + KEYS[2].encode())]], ids=["no key", "admin"])
def test_websockets_are_closed(headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = http_scope("GET", "/generate", *headers) | {"type": "websocket", "subprotocols": []}
    asyncio.run(app()(scope, receive, send))
    assert [event["type"] for event in sent] == ["websocket.close"]


def test_lifespan_needs_no_key() -> None:
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware = TenantAccess(inner, tenants=TENANTS, namespace_of=lambda name: None)
    asyncio.run(middleware({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


def test_a_mounted_app_with_keys_is_closed_and_one_without_is_open() -> None:
    body = {"messages": []}
    assert call(mounted_app(None), "POST", "/v1/chat/completions", json=body).status_code == 200
    assert call(mounted_app(None), "POST", "/flush_cache").status_code == 200
    closed = mounted_app(None, TENANTS)
    assert call(closed, "POST", "/v1/chat/completions", json=body).status_code == 401
    assert call(closed, "POST", "/flush_cache", headers=HEADERS["alice"]).status_code == 404
    reached = call(closed, "POST", "/v1/chat/completions", json=body, headers=HEADERS["alice"])
    assert reached.json() == body | {"extra_key": namespace(SECRET, "alice")}
