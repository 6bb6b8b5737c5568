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

from starlette.types import ASGIApp, Receive, Scope, Send

from cb_server.bodies import read_body, replayed
from cb_server.guard import NoSuchEndpointError, count_error, error_response
from cb_server.observe import is_ours
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.tenants import Tenant, Tenants

ADMIN = "admin"
_OPEN = {"/health"}
_READ = {"/v1/models", "/model_info", "/get_model_info", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
_PROMPTED = {"/generate", "/v1/completions", "/v1/chat/completions"}
# What names another request's state, or code: a tenant's own namespace does not hold these apart.
_REFUSED_FIELDS = (
    "session_params",
    "session_id",
    "custom_logit_processor",
    "rid",
    "bootstrap_room",
    "chat_template",
    "chat_template_kwargs",
)


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
        if tenant.name == ADMIN or path in _READ or is_ours(path):
            return receive
        if path not in _PROMPTED or scope["method"] != "POST":
            raise NoSuchEndpointError(f"{scope['method']} {path} is not open to tenants of this server")
        return replayed(await self._in_namespace(tenant, scope, receive), receive)

    async def _in_namespace(self, tenant: Tenant, scope: Scope, receive: Receive) -> bytes:
        # Not on the event loop: a body may have megabytes.
        body = await asyncio.to_thread(_rewritten, await read_body(receive), self._namespace_of(tenant.name))
        kept = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        return body


def _rewritten(body: bytes, namespace: str | None) -> bytes:
    """A prompt's body in a radix namespace. Raises InvalidRequestError for what a tenant may not ask."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not JSON that can be read") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError("the body must be a JSON object")
    for name in _REFUSED_FIELDS:
        if parsed.get(name) is not None:
            raise InvalidRequestError(f"{name} is not open to tenants of this server; leave it out", param=name)
    if any(name.startswith("cacheback") for params in _custom_params(parsed) for name in params):
        raise InvalidRequestError(
            "messages have endpoints of their own; leave out custom_params", param="custom_params"
        )
    parsed.pop("cache_salt", None)
    parsed["extra_key"] = namespace
    return json.dumps(parsed).encode()


def _custom_params(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Wherever a request of SGLang's can carry them (``/generate``: one or a list of sampling_params)."""
    sampling = body.get("sampling_params")
    holders = [body, *(sampling if isinstance(sampling, list) else [sampling])]
    found = (holder.get("custom_params") for holder in holders if isinstance(holder, dict))
    return [params for params in found if isinstance(params, dict)]
