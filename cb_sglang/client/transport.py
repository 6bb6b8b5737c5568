"""What the sync and the async client share around the wire: settings, bounds, waiting, httpx's exceptions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from cb_sglang import __version__
from cb_sglang.client.call import Answer, Call, StreamCall, error_of
from cb_sglang.client.errors import APIConnectionError, APIResponseError, APITimeoutError
from cb_sglang.errors import CacheBackError, InvalidRequestError

DEFAULT_BASE_URL = "http://127.0.0.1:30000"
DEFAULT_TIMEOUT = 600.0
MAX_RESPONSE_BYTES = 256 << 20
_CONNECT_SECONDS = 10.0
_PROBE_SECONDS = 30.0  # SGLang's health check itself takes at least one second, more under load
_PROBE_PAUSE = 0.5
_JSON = "application/json"


def http_settings(base_url: str, api_key: str | None, timeout: float | None) -> dict[str, Any]:
    """Arguments for httpx.Client and httpx.AsyncClient. Raises InvalidRequestError for unusable ones."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidRequestError(f"base_url must look like {DEFAULT_BASE_URL}, not {base_url!r}", param="base_url")
    if timeout is not None and not timeout > 0:
        raise InvalidRequestError("timeout must be more than 0 seconds, or None", param="timeout")
    headers = {"Accept-Encoding": "identity", "User-Agent": f"cb-sglang/{__version__}"}
    if api_key is not None:
        # The key itself must not end up in a message.
        if not api_key or any(not "!" <= c <= "~" for c in api_key):
            raise InvalidRequestError("api_key must be printable ASCII without spaces", param="api_key")
        headers["Authorization"] = f"Bearer {api_key}"
    connect = _CONNECT_SECONDS if timeout is None else min(timeout, _CONNECT_SECONDS)
    return {"base_url": url, "headers": headers, "timeout": httpx.Timeout(timeout, connect=connect)}


def request_settings(call: Call[Any], timeout: float | None = None) -> dict[str, Any]:
    """Arguments for ``stream()`` of both httpx clients; ``timeout`` seconds override the client's."""
    settings: dict[str, Any] = {"method": call.method, "url": call.path, "headers": {}}
    if call.media_type is not None:
        settings["headers"]["Accept"] = call.media_type
    if call.body is not None:
        settings["content"] = call.body
        settings["headers"]["Content-Type"] = _JSON
    if timeout is not None:
        settings["timeout"] = timeout
    return settings


def stream_settings(call: StreamCall[Any]) -> dict[str, Any]:
    """The same for a call that is answered by a stream."""
    return {"method": "POST", "url": call.path, "content": call.body, "headers": {"Content-Type": _JSON}}


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raises httpx's exceptions as ours."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise APITimeoutError(f"no answer in time ({type(error).__name__}); raise the client's timeout") from error
    except httpx.DecodingError as error:
        raise APIResponseError(f"the answer's content encoding is broken: {error}") from error
    except httpx.RequestError as error:
        raise APIConnectionError(
            f"the server cannot be reached or broke off: {error or type(error).__name__}"
        ) from error


class AnswerBuilder:
    """Collects one answer of at most ``limit`` bytes; made when the request is sent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started = time.perf_counter()
        self._body = bytearray()

    def add(self, chunk: bytes) -> None:
        """Raises APIResponseError beyond the limit."""
        if len(self._body) + len(chunk) > self._limit:
            raise APIResponseError(
                f"the answer exceeds {self._limit} bytes; raise max_response_bytes", code="response_too_large"
            )
        self._body += chunk

    def answer(self, response: httpx.Response) -> Answer:
        return Answer(
            status=response.status_code,
            body=bytes(self._body),
            seconds=time.perf_counter() - self._started,
            retry_after=_seconds(response.headers.get("Retry-After")),
            headers=response.headers,
        )


def is_event_stream(response: httpx.Response) -> bool:
    kind: str = response.headers.get("Content-Type", "")
    return response.status_code == 200 and kind.partition(";")[0].strip().lower() == "text/event-stream"


def no_stream(answer: Answer) -> CacheBackError:
    """The error of an answer to a streaming request that is no stream."""
    if answer.status != 200:
        return error_of(answer)
    return APIResponseError("the server answered a streaming request with something else", status=200)


class ReadyWait:
    """The clock of ``wait_until_ready``: how long to probe and to pause, and when to give up."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._started = time.monotonic()
        self._last = "no answer yet"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def probe_seconds(self) -> float:
        return max(0.1, min(_PROBE_SECONDS, self._timeout - self.elapsed))

    def pause(self, reason: str) -> float:
        """Seconds to sleep before the next probe. Raises APITimeoutError when the time is over."""
        self._last = reason
        left = self._timeout - self.elapsed
        if left <= 0:
            raise APITimeoutError(f"the server was not ready within {self._timeout:g} seconds: {self._last}")
        return min(_PROBE_PAUSE, left)


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; the form with a date, which our server does not send, is left out."""
    return float(header) if header is not None and header.isascii() and header.isdecimal() else None
