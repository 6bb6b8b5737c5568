"""With tenants' keys: who may reach which route of SGLang's, and in which radix namespace.

Our own routes ask for a key by themselves (context.py). Of SGLang's, a tenant reaches those that answer a prompt, each
in the tenant's own namespace, and a few that only read; everything else (weights, caches, profiles, metrics of all)
is for the tenant called ``admin``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cb_server import fields
from cb_server.bodies import read_body, replayed
from cb_server.context import service_of
from cb_server.guard import NoSuchEndpointError, count_error, error_response
from cb_server.observe import is_ours
from cb_sglang.content import check_ids
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.tenants import Tenants

ADMIN = "admin"
MAX_TOKENIZED_BYTES = 1 << 20
"""Of a body that SGLang tokenizes on the event loop, where all wait: some 0.4 s on one core."""
_OPEN = {"/health"}
_READ = {"/v1/models", "/model_info", "/get_model_info"}
_PROMPTED = {"/generate", "/v1/completions", "/v1/chat/completions"}
# Headers that do what fields do which are not open: x-override-* any of several, the others the rank and its choice.
_REFUSED_HEADERS = (b"x-override-", b"x-data-parallel-rank", b"x-smg-routing-key")


class TenantAccess:
    """An ASGI middleware. ``namespace_of`` gives a tenant's radix namespace."""

    def __init__(self, app: ASGIApp, *, tenants: Tenants, namespace_of: Callable[[str], str | None]) -> None:
        self._app = app
        self._tenants = tenants
        self._namespace_of = namespace_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        try:
            if scope["type"] != "http":
                raise NoSuchEndpointError("websockets are closed on a server with tenants' keys")
            receive = await self._checked(scope, receive)
        except CacheBackError as error:
            if scope["type"] != "http":
                return await send({"type": "websocket.close", "code": 1008})
            count_error(scope["app"], error.code)
            return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive) -> Receive:
        """What the route may read. Raises AuthenticationError, NoSuchEndpointError, InvalidRequestError."""
        path = scope["path"]
        if path in _OPEN and scope["method"] in ("GET", "HEAD"):
            return receive
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization")
        tenant = self._tenants.authenticate(None if authorization is None else authorization.decode("latin-1"))
        if tenant.name == ADMIN:
            return receive
        scope["headers"] = [each for each in scope["headers"] if not each[0].lower().startswith(_REFUSED_HEADERS)]
        if is_ours(path) or (path in _READ and scope["method"] in ("GET", "HEAD")):
            return receive
        if path not in fields.OPEN or scope["method"] != "POST":
            raise NoSuchEndpointError(f"{scope['method']} {path} is not open to tenants of this server")
        body = await self._checked_body(self._namespace_of(tenant.name), scope, receive)
        kept = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        return replayed(body, receive)

    async def _checked_body(self, namespace: str | None, scope: Scope, receive: Receive) -> bytes:
        """The body that SGLang is to read. Raises InvalidRequestError for what a tenant may not ask."""
        path = scope["path"]
        prompted = path in _PROMPTED
        raw = await read_body(receive, None if prompted else MAX_TOKENIZED_BYTES)
        # Not on the event loop: a body may have megabytes.
        body, highest = await asyncio.to_thread(_parsed, path, raw)
        if prompted:
            # SGLang looks an id up as it is: one beyond the vocabulary ends the scheduler.
            for name, token_id in highest.items():
                check_ids([token_id], (await service_of(Request(scope))).engine.vocab_size, name)
            body.pop("cache_salt", None)
            body["extra_key"] = namespace
        return await asyncio.to_thread(lambda: json.dumps(body).encode())


def _parsed(path: str, raw: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """The body and its highest token ids. Raises InvalidRequestError for one with what is not open to tenants."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not JSON that can be read") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields.check(path, body)
    return body, fields.highest_ids(body)
