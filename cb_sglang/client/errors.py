"""What the client raises.

An answer of the server that says "error" becomes an APIError that is also the class the server raised, so
``except SenderNotFoundError`` reads the same on both sides of the wire.
"""

from __future__ import annotations

import re
from typing import Any

from cb_sglang.errors import (
    AuthenticationError,
    BudgetError,
    CacheBackError,
    CapacityError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    RateLimitError,
    SenderNotFoundError,
    StoreError,
)


class APIError(CacheBackError):
    """The server answered with an error.

    status:      HTTP status; for an error event of a stream, the status its code stands for.
    type, code, param, message: as the server sent them.
    index:       which query of a stream failed, when one did.
    retry_after: seconds after which the server suggests to try again, when it does.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        index: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = self.status if status is None else status
        self.type = self.type if type is None else type
        self.code = self.code if code is None else code
        self.index = index
        self.retry_after = retry_after


class APIInvalidRequestError(APIError, InvalidRequestError):
    """The server found the request unusable as it stands."""


class APIBudgetError(APIError, BudgetError):
    """The server refused the budget."""


class APIContextLengthError(APIError, ContextLengthError):
    """The server found sender, query or both too long."""


class APISenderNotFoundError(APIError, SenderNotFoundError):
    """The server knows no such sender."""


class APICapacityError(APIError, CapacityError):
    """The server is at a bound of its own."""


class APIRateLimitError(APIError, RateLimitError):
    """This API key holds its share of the server already; ``retry_after`` says when to come back."""


class APIAuthenticationError(APIError, AuthenticationError):
    """The server wants an API key, or does not know this one."""


class APIStoreError(APIError, StoreError):
    """The server's file of senders cannot be read or written."""


class APIEngineError(APIError, EngineError):
    """SGLang failed behind the server."""


class APIResponseError(APIError):
    """The answer is not one of a cb-sglang server: malformed, incomplete, or larger than the client accepts."""

    type = "response_error"
    code = "malformed_response"


class APIConnectionError(CacheBackError):
    """The server could not be reached, or the connection broke before the answer was complete."""

    status = 503
    type = "connection_error"
    code = "connection_failed"


class APITimeoutError(APIConnectionError):
    """No answer within the client's timeout."""

    status = 504
    code = "timeout"


_BY_CODE: dict[str, type[APIError]] = {
    InvalidRequestError.code: APIInvalidRequestError,
    BudgetError.code: APIBudgetError,
    ContextLengthError.code: APIContextLengthError,
    SenderNotFoundError.code: APISenderNotFoundError,
    CapacityError.code: APICapacityError,
    RateLimitError.code: APIRateLimitError,
    AuthenticationError.code: APIAuthenticationError,
    StoreError.code: APIStoreError,
    EngineError.code: APIEngineError,
}
_BY_STATUS: dict[int, type[APIError]] = {
    400: APIInvalidRequestError,
    401: APIAuthenticationError,
    413: APIInvalidRequestError,
    422: APIInvalidRequestError,
    429: APIRateLimitError,
    503: APICapacityError,
}


def api_error(
    body: Any, *, status: int | None = None, index: int | None = None, retry_after: float | None = None
) -> APIError:
    """The error that ``body``, the parsed JSON of an error answer, speaks of; it need not be well formed.

    Read are our nested shape, SGLang's flat one (``{"object": "error", "message": ...}``) and a bare string.
    Without a ``status`` (an event of a stream) the status is the one that the error's code stands for; SGLang's codes
    are statuses.
    """
    inner = body.get("error", body) if isinstance(body, dict) else body
    fields = inner if isinstance(inner, dict) else {"message": inner}
    code = _string(fields.get("code"))
    if status is None and code is not None and re.fullmatch(r"[45][0-9]{2}", code):
        status = int(code)
    cls = _BY_CODE.get(code or "") or _BY_STATUS.get(status or 0, APIError)
    message = _string(fields.get("message")) or f"the server answered with HTTP status {status or cls.status}"
    return cls(
        message,
        status=status,
        type=_string(fields.get("type")),
        code=code,
        param=_string(fields.get("param")),
        index=index,
        retry_after=retry_after,
    )


def _string(value: object) -> str | None:
    """``value`` as text (SGLang writes numbers as codes); None when it is empty or no plain value."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)[:4096] or None
