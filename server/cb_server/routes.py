"""All routes of ours, in the order in which they are tried."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cb_server import message_routes, sender_routes
from cb_server.guard import GuardedRoute, NoSuchEndpointError

router = APIRouter()
_rest = APIRouter(prefix="/v1/senders", route_class=GuardedRoute)


@_rest.api_route("", methods=["PUT", "PATCH", "DELETE"], include_in_schema=False)
@_rest.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
async def no_such_endpoint(request: Request) -> Any:
    """Whatever else is asked below our prefix (an id with a slash, say), refused in our error shape."""
    raise NoSuchEndpointError(
        f"there is no {request.method} here; there are POST and GET /v1/senders, GET and DELETE /v1/senders/{{id}}, "
        "POST /v1/senders/{id}/messages and /extend, PUT and DELETE /v1/senders/{id}/pin, GET "
        "/v1/senders/{id}/audit, POST /v1/transfers and GET /v1/capacity, with an id as POST /v1/senders returned it"
    )


for each in (sender_routes.router, message_routes.router, _rest):
    router.include_router(each)
