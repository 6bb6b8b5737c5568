"""What every route of ours asks for: the process's service, and the tenant that calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from cb_server.guard import ClientClosedRequestError
from cb_server.observe import note_tenant
from cb_server.open_calls import OpenCalls
from cb_sglang import wire
from cb_sglang.errors import CapacityError
from cb_sglang.seam.draining import before_exit
from cb_sglang.seam.engine import Engine
from cb_sglang.service import MessageService
from cb_sglang.tenants import Tenant

T = TypeVar("T")
_LAST_CALL_SECONDS = 300.0
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": wire.ErrorResponse} for code in (400, 401, 404, 413, 429, 502, 503)
}


async def service_of(request: Request) -> MessageService:
    """The process's one service, made on first use: SGLang sets its global state after the routes are mounted.

    Raises CapacityError on a server that is on its way out.
    """
    state = request.app.state
    if state.cacheback_service is None:
        async with state.cacheback_starting:
            if state.cacheback_service is None:
                state.cacheback_service = started = await MessageService.start(
                    Engine.of_this_process(), state.cacheback_settings, state.cacheback_secret
                )
                before_exit(partial(_finish, state.cacheback_open_calls, started))
    service: MessageService = state.cacheback_service
    if service.stopping:
        raise CapacityError("the server is shutting down; send the request to another one, or again later")
    return service


async def _finish(calls: OpenCalls, service: MessageService) -> None:
    await calls.ended(_LAST_CALL_SECONDS)
    await service.close()


def tenant_of(request: Request) -> Tenant:
    """Who calls. Raises AuthenticationError (401); every route of ours depends on it."""
    tenant: Tenant = request.app.state.cacheback_tenants.authenticate(request.headers.get("authorization"))
    note_tenant(request.scope, tenant.name)
    return tenant


Service = Annotated[MessageService, Depends(service_of)]
Caller = Annotated[Tenant, Depends(tenant_of)]


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
