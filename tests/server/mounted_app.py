"""Our routes on an app that has no SGLang: only a stand-in for its chat route, and a service of the test's choice."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from cb_server.app import mount
from cb_server.chat_route import PATH
from cb_sglang.settings import Settings
from cb_sglang.tenants import Tenants

SECRET = bytes(32)
SGLANG_HEADER = "X-SGLang"


class ErrorCodes:
    """Stands for the service's metrics: keeps the codes of the answered errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, code: str) -> None:
        self.errors.append(code)


def mounted_app(service: Any, tenants: Tenants | None = None) -> FastAPI:
    """``service`` takes the place of the MessageService; the chat route echoes the body, with its size in a header."""
    app = FastAPI()

    @app.post(PATH)
    async def chat(request: Request) -> Response:
        body = await request.body()
        return Response(body, headers={SGLANG_HEADER: str(len(body))}, media_type=request.headers.get("content-type"))

    @app.api_route("/{anything:path}", methods=["GET", "POST"])
    async def elsewhere(request: Request) -> Response:
        return Response(await request.body(), headers={SGLANG_HEADER: request.url.path})

    mount(app, Settings(), Tenants() if tenants is None else tenants, SECRET)
    # SGLang's catch-all would be in front of ours.
    app.router.routes.sort(key=lambda route: getattr(route, "path", "").startswith("/{anything"))
    if service is not None:
        service.metrics, service.stopping = ErrorCodes(), False
    app.state.cacheback_service = service
    return app


def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to an ASGI app, with httpx's options."""

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path, **options)

    return asyncio.run(asyncio.wait_for(one(), 20))


def http_scope(method: str, path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """What a server hands to an ASGI app, for the tests that look at single ASGI messages."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
    }
