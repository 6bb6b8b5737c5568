"""Every error that cb_sglang raises on purpose, in one tree.

Each error carries the HTTP status and OpenAI-style ``type``, ``code`` and ``param`` that the server answers with,
so that the HTTP layer needs no table of its own. Messages say what to change.
"""

from __future__ import annotations


class CacheBackError(Exception):
    """Base of all our errors. ``param`` names the request field at fault, when there is one."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(CacheBackError):
    """The request cannot be served as it stands; the message says what to change."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class BudgetError(InvalidRequestError):
    """The budget is out of range or too small for the positions that must be kept."""

    code = "invalid_budget"


class ContextLengthError(InvalidRequestError):
    """Sender, query or both do not fit the model's context or the KV pool."""

    code = "context_length_exceeded"


class SenderNotFoundError(CacheBackError):
    """No such sender (never registered, deleted, or not the caller's)."""

    status = 404
    type = "not_found_error"
    code = "sender_not_found"


class CapacityError(CacheBackError):
    """A bound of the server is reached; trying again later can help: in ``retry_after`` seconds, where it is known."""

    status = 503
    type = "overloaded_error"
    code = "server_overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class RateLimitError(CapacityError):
    """The tenant holds its share of the server; its own work has to finish first."""

    status = 429
    type = "rate_limit_error"
    code = "tenant_over_share"


class EngineError(CacheBackError):
    """SGLang refused or failed a request of ours."""

    status = 502
    type = "engine_error"
    code = "engine_error"


class SeamError(CacheBackError):
    """This SGLang does not look as cb-sglang needs it; raised at start, never per request."""

    code = "sglang_mismatch"


class AuthenticationError(CacheBackError):
    """No API key, or none that this server knows."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class StoreError(CacheBackError):
    """The file of senders cannot be opened, read or written; the message says why."""

    status = 503
    code = "store_unavailable"
