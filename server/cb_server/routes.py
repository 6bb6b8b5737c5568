"""The endpoints: senders, and messages made from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from cb_server.guard import ClientClosedRequestError, GuardedRoute, error_body
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
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": wire.ErrorResponse} for code in (400, 404, 413, 502, 503)
}


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
    service.senders.remove(sender_id)
    return wire.DeletedSender(id=sender_id)


@router.post("/{sender_id}/messages", response_model=wire.MessageList, responses=_ERRORS)
async def make_messages(
    sender_id: str, body: wire.MessagesRequest, request: Request, service: Service
) -> Any:
    """One message a query: all as one list, or with ``stream`` as server-sent events while they finish."""
    made = service.messages(sender_id, body)
    if not body.stream:
        return await until_disconnect(request, _collect(made))
    # What is wrong with the request shows before the first message, while the status can still say so.
    first = await until_disconnect(request, anext(made))
    return StreamingResponse(_events(first, made), media_type="text/event-stream")


async def _collect(made: AsyncIterator[wire.Message]) -> wire.MessageList:
    messages = [message async for message in made]
    return wire.MessageList(data=sorted(messages, key=lambda message: message.index))


async def _events(first: wire.Message, rest: AsyncIterator[wire.Message]) -> AsyncIterator[bytes]:
    yield event("message", first.model_dump(mode="json"))
    try:
        async for message in rest:
            yield event("message", message.model_dump(mode="json"))
    except CacheBackError as error:
        yield event("error", error_body(error))
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
