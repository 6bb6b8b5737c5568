"""``POST /v1/chat/completions``: SGLang's own, and with a ``cacheback`` object answered from messages.

A request without the object reaches SGLang's route as it came, byte for byte; this route only looks at its body.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cb_server.bodies import read
from cb_server.context import service_of, tenant_of, until_disconnect
from cb_server.guard import count_error, error_response, from_validation, unexpected
from cb_sglang import wire
from cb_sglang.chat import last_user_text, with_blocks
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.seam.chat import complete_chat

PATH = "/v1/chat/completions"
FIELD = "cacheback"
MESSAGES_HEADER = "X-CacheBack-Messages"
_MESSAGE_ID = re.compile("msg_[0-9a-f]{32}")


def mount(app: FastAPI) -> None:
    """Put this route before SGLang's. Raises LookupError when SGLang has none."""
    original = next((route for route in app.router.routes if getattr(route, "path", None) == PATH), None)
    if original is None:
        raise LookupError(f"SGLang's app has no route {PATH}")
    app.router.routes.insert(0, Route(PATH, endpoint=ChatWithMessages(original), methods=["POST"]))


class ChatWithMessages:
    """An ASGI application in front of SGLang's route."""

    def __init__(self, original: BaseRoute) -> None:
        self._original = original

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = await read(receive)
        parsed = None
        if seen.complete and b'"cacheback"' in seen.body:
            parsed = await asyncio.to_thread(_with_field, seen.body)
        if parsed is None:
            return await self._original.handle(scope, seen.then(receive), send)
        with scope["app"].state.cacheback_open_calls.one():
            response = await _guarded(parsed, Request(scope, receive))
            await response(scope, receive, send)


async def _guarded(parsed: dict[str, Any], request: Request) -> Any:
    """The answer, or the error as one."""
    try:
        return await _answer(parsed, request)
    except CacheBackError as error:
        count_error(request.app, error.code)
        return error_response(error)
    except (RequestValidationError, ConnectionError):
        raise  # SGLang's own handler answers for its part of the body
    except Exception:
        failure = unexpected(f"POST {PATH}")
        count_error(request.app, failure.code)
        return error_response(failure)


async def _answer(body: dict[str, Any], request: Request) -> Any:
    tenant, service = tenant_of(request), await service_of(request)
    try:
        wanted = wire.ChatExtension.model_validate(body.pop(FIELD))
    except ValidationError as error:
        raise from_validation(error, prefix=FIELD) from None
    turns = body.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InvalidRequestError("messages must be a list of chat turns", param="messages")
    if body.get("input_ids") is not None:
        raise InvalidRequestError("give chat turns, not input_ids, to answer from messages", param="input_ids")
    for name in ("chat_template", "chat_template_kwargs"):
        if body.get(name) is not None:
            raise InvalidRequestError(f"{name} cannot go with messages; leave it out", param=name)
    query = wanted.query or (last_user_text(turns) if wanted.senders is not None else "")
    blocks, ids = await until_disconnect(request, service.blocks(tenant, wanted, query))
    body["messages"], inserts = with_blocks(turns, blocks)
    response = await complete_chat(body, request, inserts=inserts, namespace=service.senders.namespace(tenant.name))
    # A message object's id is whatever the client wrote there.
    response.headers[MESSAGES_HEADER] = ",".join(name for name in ids if _MESSAGE_ID.fullmatch(name))
    return response


def _with_field(body: bytes) -> dict[str, Any] | None:
    """The parsed body, if it is an object with our field; anything else is SGLang's to read."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and parsed.get(FIELD) is not None else None
