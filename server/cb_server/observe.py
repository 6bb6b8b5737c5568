"""Request ids, and one line of JSON in the log for every request that is ours.

A line says when, who, which route, how it ended, how long it took and how many bytes went either way. It never holds
content, keys, or ids of senders.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cb_server.open_calls import OpenCalls

logger = logging.getLogger("cacheback.access")

REQUEST_ID_HEADER = "X-Request-Id"
PATHS = ("/v1/senders", "/v1/transfers", "/v1/capacity")
_HEADER = REQUEST_ID_HEADER.lower().encode()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TENANT = "cacheback_tenant"


def is_ours(path: str) -> bool:
    """Whether a path is one of our routes, or below one."""
    return any(path == ours or path.startswith(f"{ours}/") for ours in PATHS)


def note_tenant(scope: Scope, tenant: str) -> None:
    """Tell the log who calls; on a path of SGLang's (a chat answered from messages) also that the request is ours."""
    scope.setdefault("state", {})[_TENANT] = tenant


def write_to_stderr() -> None:
    """Write the lines as they are, whatever format SGLang gives to those of its own."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class AccessLog:
    """An ASGI middleware, to be put around all others. Whatever is not ours passes through unchanged.

    ``calls`` counts the open ones on our paths.
    """

    def __init__(self, app: ASGIApp, calls: OpenCalls) -> None:
        self._app, self._calls = app, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = _Exchange(scope, receive, send)
        try:
            with self._calls.one() if is_ours(scope["path"]) else nullcontext():
                await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            exchange.failed = True
            raise
        finally:
            if exchange.ours:
                logger.info(json.dumps(exchange.line()))


class _Exchange:
    """One request and its response, as they pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here, so that the routes inside share this dict with us.
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._scope, self._receive, self._send = scope, receive, send
        self._started = time.perf_counter()
        self._request_id = _request_id(scope)
        self._status = 0
        self._bytes_in = self._bytes_out = 0
        self._complete = self._disconnected = self.failed = False

    @property
    def ours(self) -> bool:
        return is_ours(self._scope["path"]) or _TENANT in self._state

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_in += len(message.get("body", b""))
        # Behind a whole response, a disconnect is how every connection ends.
        self._disconnected |= message["type"] == "http.disconnect" and not self._complete
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self.ours:
                kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != _HEADER]
                message = {**message, "headers": [*kept, (_HEADER, self._request_id.encode())]}
        elif message["type"] == "http.response.body":
            self._bytes_out += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        await self._send(message)

    def line(self) -> dict[str, Any]:
        """``status``: 499 when the client left before the end, 500 when the answer broke off, else as it was sent."""
        status = self._status
        if self._disconnected:
            status = 499
        elif self.failed or not self._complete:
            status = 500
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self._request_id,
            "method": self._scope["method"][:16],
            "route": _route(self._scope),
            "status": status,
            "seconds": round(time.perf_counter() - self._started, 6),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "tenant": self._state.get(_TENANT),
        }


def _request_id(scope: Scope) -> str:
    """The client's own where it can stand in a log as it is, or a new one."""
    given = next((value for name, value in scope["headers"] if name.lower() == _HEADER), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The path with names in place of ids; of a request that was refused before it came to a route, its prefix."""
    template = getattr(scope.get("route"), "path", None)
    if isinstance(template, str):
        return template
    path: str = scope["path"]
    return next((ours if path == ours else f"{ours}/..." for ours in PATHS if path.startswith(ours)), "...")
