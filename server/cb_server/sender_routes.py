"""``/v1/senders``: register, extend, look at, pin and delete senders."""

from __future__ import annotations

from fastapi import APIRouter, Request

from cb_server.context import ERRORS, Caller, Service, until_disconnect
from cb_server.guard import GuardedRoute
from cb_sglang import wire
from cb_sglang.service import MessageService

router = APIRouter(prefix="/v1/senders", tags=["cacheback"], route_class=GuardedRoute)


@router.post("", response_model=wire.Sender, responses=ERRORS)
async def register_sender(body: wire.SenderRequest, request: Request, caller: Caller, service: Service) -> wire.Sender:
    """Prefill a context once and get an id for it. The same content has the same id."""
    sender = await until_disconnect(request, service.senders.register(caller, body))
    return _counted(service, sender)


@router.get("", response_model=wire.SenderList, responses=ERRORS)
async def list_senders(caller: Caller, service: Service) -> wire.SenderList:
    """Every sender of the caller's, oldest first."""
    return wire.SenderList(data=service.senders.all(caller))


@router.get("/{sender_id}", response_model=wire.Sender, responses=ERRORS)
async def get_sender(sender_id: str, caller: Caller, service: Service) -> wire.Sender:
    """One sender."""
    return service.senders.get(caller, sender_id)


@router.delete("/{sender_id}", response_model=wire.DeletedSender, responses=ERRORS)
async def delete_sender(sender_id: str, caller: Caller, service: Service) -> wire.DeletedSender:
    """Forget a sender. Its KV leaves the cache when SGLang needs the room."""
    await service.forget(caller, sender_id)
    return wire.DeletedSender(id=sender_id)


@router.post("/{sender_id}/extend", response_model=wire.Sender, responses=ERRORS)
async def extend_sender(
    sender_id: str, body: wire.ExtendRequest, request: Request, caller: Caller, service: Service
) -> wire.Sender:
    """A new sender that goes on where this one ends; what the two share stays in the cache."""
    sender = await until_disconnect(request, service.senders.extend(caller, sender_id, body))
    return _counted(service, sender)


@router.put("/{sender_id}/pin", response_model=wire.Sender, responses=ERRORS)
async def pin_sender(sender_id: str, request: Request, caller: Caller, service: Service) -> wire.Sender:
    """Keep the sender's KV in the cache; ``pinned_positions`` says how much of it the cap left room for."""
    return await until_disconnect(request, service.senders.pin(caller, sender_id))


@router.delete("/{sender_id}/pin", response_model=wire.Sender, responses=ERRORS)
async def unpin_sender(sender_id: str, caller: Caller, service: Service) -> wire.Sender:
    """Let the cache evict the sender again."""
    return await service.senders.unpin(caller, sender_id)


@router.get("/{sender_id}/audit", response_model=wire.Audit, responses=ERRORS)
async def audit_sender(sender_id: str, caller: Caller, service: Service) -> wire.Audit:
    """Which of the sender's positions went to whom, newest first."""
    return await service.senders.audit(caller, sender_id)


def _counted(service: MessageService, sender: wire.Sender) -> wire.Sender:
    found_all = service.engine.found_all(sender.cached_positions or 0, sender.positions)
    service.metrics.registered(sender, missed=not found_all)
    return sender
