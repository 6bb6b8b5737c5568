"""What every route of ours goes through: bounded JSON bodies in, nested OpenAI errors out.

A route class and not app-wide handlers, because SGLang's own endpoints must keep their own error shapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cb_server.bodies import read_body, replayed
from cb_sglang import wire
from cb_sglang.errors import CacheBackError, CapacityError, InvalidRequestError

logger = logging.getLogger(__name__)

_FORMS = {"text", "token_ids", "object", "id"}
_MAX_PARAM_CHARS = 256


class NoSuchEndpointError(InvalidRequestError):
    """No route of ours has this path and method."""

    status = 404
    type = "not_found_error"
    code = "endpoint_not_found"


class ClientClosedRequestError(CacheBackError):
    """Nobody is left to read the answer; the status is for the log."""

    status = 499
    code = "client_closed_request"


class GuardedRoute(APIRoute):
    """An APIRoute that answers every failure in our error shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                if request.method == "POST":
                    request = await _with_bounded_json(request)
                return await handler(request)
            except CacheBackError as error:
                count_error(request.app, error.code)
                return error_response(error)
            except RequestValidationError as error:
                return error_response(from_validation(error, skip=1))
            except HTTPException as error:
                return error_response(_from_http(error))
            except Exception:
                failure = unexpected(f"{request.method} {request.url.path}")
                count_error(request.app, failure.code)
                return error_response(failure)

        return guarded


def count_error(app: Any, code: str) -> None:
    """In ``/metrics``, once there is a service."""
    service = getattr(app.state, "cacheback_service", None)
    if service is not None:
        service.metrics.error(code)


def unexpected(where: str) -> CacheBackError:
    """Log the exception that is being handled; the answer says nothing of it."""
    logger.exception("unexpected error in %s", where)
    return CacheBackError("internal error; the server's log has the details")


def error_body(error: CacheBackError) -> dict[str, Any]:
    """The error in OpenAI's nested shape."""
    body = wire.ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    return wire.ErrorResponse(error=body).model_dump()


def error_response(error: CacheBackError) -> JSONResponse:
    """The error as an HTTP answer; a full server says when to come back, a closed one how to get in."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(math.ceil(error.retry_after or 1.0))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


async def _with_bounded_json(request: Request) -> Request:
    """Read the body under a bound before anything parses it; the same request, ready to be read again."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError(f"send JSON with Content-Type: application/json, not {media_type or 'none'}")
    body = await read_body(request.receive)
    return Request(request.scope, replayed(body, request.receive))


def from_validation(
    error: RequestValidationError | ValidationError, *, skip: int = 0, prefix: str = ""
) -> InvalidRequestError:
    """The first thing wrong, with the field's path as the caller wrote it: ``queries[2].ratio``.

    ``skip`` parts of the path name the place in the request (the body), ``prefix`` is where the model stands in it.
    """
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    param = _path((*([prefix] if prefix else []), *first["loc"][skip:]))[:_MAX_PARAM_CHARS]
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param}: there is no such field; remove it or correct its name", param=param)
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return InvalidRequestError(f"{param}: {message}" if param else message, param=param or None)
    return InvalidRequestError(f"{param or 'the body'}: {first['msg']}", param=param or None)


def _path(location: tuple[int | str, ...]) -> str:
    path, before, of_list = "", None, None
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            of_list = before
        # pydantic names the form of a query or message (its tag in wire.py) behind its index or field.
        elif not (part in _FORMS and _is_tagged(before, of_list, location[0])):
            path += f".{part}" if path else part
        before = part
    return path


def _is_tagged(before: int | str | None, of_list: int | str | None, first: int | str) -> bool:
    """Whether what stands behind ``before`` is the tag of a form. Chat turns, in a list called messages, have none."""
    if isinstance(before, int):
        return of_list in ("queries", "inherits") or (of_list == "messages" and first == "cacheback")
    return before == "query"


def _from_http(error: HTTPException) -> InvalidRequestError:
    """FastAPI's refusals; what made its JSON reader give up says more than its own message."""
    cause, detail = error.__cause__, str(error.detail)
    if isinstance(cause, UnicodeDecodeError):
        detail = f"the body is not {cause.encoding} at byte {cause.start}; send JSON in UTF-8"
    elif isinstance(cause, RecursionError):
        detail = "the body is nested too deeply; no request needs more than a few levels"
    elif isinstance(cause, ValueError):
        detail = "the body is not JSON that can be read: a number has too many digits"
    failure = InvalidRequestError(detail)
    failure.status = error.status_code
    return failure
