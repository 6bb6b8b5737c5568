"""Messages of one sender, transfers of several, and the capacity that both are granted from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from cb_server.context import ERRORS, Caller, Service, until_disconnect
from cb_server.guard import GuardedRoute, error_body, unexpected
from cb_server.sse import event
from cb_sglang import wire
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.payload import MEDIA_TYPE, encode_batch

T = TypeVar("T")
router = APIRouter(tags=["cacheback"], route_class=GuardedRoute)
_FORMS: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {}, "text/event-stream": {}}}}


@router.post("/v1/senders/{sender_id}/messages", response_model=wire.MessageList, responses=ERRORS | _FORMS)
async def make_messages(
    sender_id: str, body: wire.MessagesRequest, request: Request, caller: Caller, service: Service
) -> Any:
    """One message a query: as one list, with ``stream`` as server-sent events while they finish, or in binary form.

    ``Accept: application/x-safetensors`` gives one safetensors file of all messages (cb_sglang/payload.py).
    """
    binary = MEDIA_TYPE in request.headers.get("accept", "")
    if binary and body.stream:
        raise InvalidRequestError(f"a stream is server-sent events; leave out stream for {MEDIA_TYPE}", param="stream")
    made = service.messages(caller, sender_id, body)
    if body.stream:
        return await _stream(request, made, "message", lambda each: each.message)
    collected = sorted(await until_disconnect(request, _collect(made)), key=lambda each: each.message.index)
    if binary:
        # Tens of megabytes of rows take a tenth of a second.
        return Response(
            await asyncio.to_thread(encode_batch, [each.payload for each in collected]), media_type=MEDIA_TYPE
        )
    return wire.MessageList(data=[each.message for each in collected])


@router.post("/v1/transfers", response_model=wire.TransferList, responses=ERRORS | _FORMS)
async def make_transfers(body: wire.TransfersRequest, request: Request, caller: Caller, service: Service) -> Any:
    """Every sender with every query, one message a pair; a pair that fails says so and leaves the others alone."""
    made = service.transfers(caller, body)
    if body.stream:
        return await _stream(request, made, "transfer", lambda each: each)
    collected = await until_disconnect(request, _collect(made))
    order = {sender: n for n, sender in enumerate(body.senders)}
    return wire.TransferList(data=sorted(collected, key=lambda each: (order[each.sender], each.query)))


@router.get("/v1/capacity", response_model=wire.Capacity, responses=ERRORS)
async def capacity(caller: Caller, service: Service) -> wire.Capacity:
    """The engine's load, and what a receiver that asks for everything now would be granted."""
    return await service.capacity(caller)


async def _collect(made: AsyncGenerator[T, None]) -> list[T]:
    async with aclosing(made):
        return [each async for each in made]


async def _stream(
    request: Request, made: AsyncGenerator[T, None], name: str, shown: Callable[[T], BaseModel]
) -> StreamingResponse:
    # What is wrong with the request shows before the first event, while the status can still say so.
    first = await until_disconnect(request, anext(made))
    return StreamingResponse(_events(first, made, name, shown), media_type="text/event-stream")


async def _events(
    first: T, rest: AsyncGenerator[T, None], name: str, shown: Callable[[T], BaseModel]
) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield event(name, shown(first).model_dump(mode="json"))
        try:
            async for each in rest:
                yield event(name, shown(each).model_dump(mode="json"))
        except CacheBackError as error:
            yield event("error", error_body(error))
        except Exception:
            yield event("error", error_body(unexpected(f"a stream of {name}s")))
    yield event("done", {})
