"""The endpoints: senders, and messages made from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from cb_server.guard import ClientClosedRequestError, GuardedRoute, NoSuchEndpointError, error_body, unexpected
from cb_server.sse import event
from cb_sglang import wire
from cb_sglang.errors import CacheBackError
from cb_sglang.seam.engine import Engine
from cb_sglang.service import MessageService, report

T = TypeVar("T")


def service_of(request: Request) -> MessageService:
    """The process's one service, made on first use: SGLang sets its global state after the routes are mounted."""
    state = request.app.state
    if state.cacheback_service is None:
        state.cacheback_service = MessageService(Engine.of_this_process(), state.cacheback_settings)
    service: MessageService = state.cacheback_service
    return service


Service = Annotated[MessageService, Depends(service_of)]
router = APIRouter(prefix="/v1/senders", tags=["cacheback"], route_class=GuardedRoute)
_ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": wire.ErrorResponse} for code in (400, 404, 413, 502, 503)}


@router.post("", response_model=wire.Sender, responses=_ERRORS)
async def register_sender(body: wire.SenderRequest, request: Request, service: Service) -> wire.Sender:
    """Prefill a context once and get an id for it. The same content has the same id."""
    return await until_disconnect(request, service.register(body))


@router.get("", response_model=wire.SenderList)
async def list_senders(service: Service) -> wire.SenderList:
    """Every registered sender, oldest first."""
    return wire.SenderList(data=[report(s) for s in service.senders.list()])


@router.get("/{sender_id}", response_model=wire.Sender, responses=_ERRORS)
async def get_sender(sender_id: str, service: Service) -> wire.Sender:
    """One sender."""
    return report(service.senders.get(sender_id))


@router.delete("/{sender_id}", response_model=wire.DeletedSender, responses=_ERRORS)
async def delete_sender(sender_id: str, service: Service) -> wire.DeletedSender:
    """Forget a sender. Its KV leaves the cache when SGLang needs the room."""
    service.forget(sender_id)
    return wire.DeletedSender(id=sender_id)


@router.post("/{sender_id}/messages", response_model=wire.MessageList, responses=_ERRORS)
async def make_messages(sender_id: str, body: wire.MessagesRequest, request: Request, service: Service) -> Any:
    """One message a query: all as one list, or with ``stream`` as server-sent events while they finish."""
    made = service.messages(sender_id, body)
    if not body.stream:
        return await until_disconnect(request, _collect(made))
    # What is wrong with the request shows before the first message, while the status can still say so.
    first = await until_disconnect(request, anext(made))
    return StreamingResponse(_events(first, made), media_type="text/event-stream")


@router.api_route("", methods=["PUT", "PATCH", "DELETE"], include_in_schema=False)
@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
async def no_such_endpoint(request: Request) -> Any:
    """Whatever else is asked below our prefix (an id with a slash, say), refused in our error shape."""
    raise NoSuchEndpointError(
        f"there is no {request.method} here; there are POST and GET /v1/senders, GET and DELETE /v1/senders/{{id}}, "
        "and POST /v1/senders/{id}/messages, with an id as POST /v1/senders returned it"
    )


async def _collect(made: AsyncIterator[wire.Message]) -> wire.MessageList:
    messages = [message async for message in made]
    return wire.MessageList(data=sorted(messages, key=lambda message: message.index))


async def _events(first: wire.Message, rest: AsyncGenerator[wire.Message, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield event("message", first.model_dump(mode="json"))
        try:
            async for message in rest:
                yield event("message", message.model_dump(mode="json"))
        except CacheBackError as error:
            yield event("error", error_body(error))
        except Exception:
            yield event("error", error_body(unexpected("a message stream")))
    yield event("done", {})


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Run ``work``; when the client leaves, cancel it, which aborts its requests in the engine."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientClosedRequestError("the client closed the connection")
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
