"""The wire of the load generator: the client's call values and SGLang's token streams, carried by aiohttp.

httpx needs several times the CPU per request; a generator that is busy with itself measures itself.
"""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel

from cb_loadtest.load.workload import MAX_CONCURRENCY
from cb_sglang.client import APIConnectionError, APIResponseError, APITimeoutError
from cb_sglang.client.calls import Answer, Call, error_of, parse
from cb_sglang.client.errors import api_error
from cb_sglang.client.events import EventParser
from cb_sglang.client.transport import MAX_RESPONSE_BYTES, http_settings
from cb_sglang.errors import CacheBackError

T = TypeVar("T")
_OTHER_FILES = 320  # chats, records, the libraries' own
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # below the 5 s after which uvicorn closes an idle connection, maybe just as a request is sent
_END = b"[DONE]"


class OpenFilesError(CacheBackError):
    """This process may open no more files, so no request was made; that says nothing of the server."""

    type = "generator_error"
    code = "too_many_open_files"


@dataclass(slots=True)
class TokenTimes:
    """When the tokens of a streamed answer arrived, on the loop's clock.

    ``gaps`` are the inter-token latencies in seconds; tokens that came in one event share its gap.
    """

    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    gaps: list[float] = field(default_factory=list)


class Meta(BaseModel):
    """What SGLang says of an answer, in tokens; ``cached_tokens`` of the prompt needed no prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(BaseModel):
    meta_info: Meta = Meta()
    error: dict[str, Any] | None = None


class Link:
    """One API key's way to the server. ``timeout`` is for a whole request, in seconds.

    Every method raises APIError for an error answer, APIConnectionError or APITimeoutError when there is none.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str, api_key: str | None, timeout: float) -> None:
        settings = http_settings(base_url, api_key, timeout)
        self._session = session
        self._base = str(settings["base_url"]).rstrip("/")
        self._headers = {**settings["headers"], "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_SECONDS)

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """What the answer to ``call`` says; ``timeout`` seconds instead of the link's."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with self._request(call.method, call.path, call.body, timeout) as response:
            body = await _bounded(response)
            return call.result(Answer(response.status, body, loop.time() - started))

    async def stream(self, body: bytes, on_tokens: Callable[[list[float]], None] | None = None) -> TokenTimes:
        """``/generate`` with a body that asks for a stream, read to its end.

        ``on_tokens`` is called whenever tokens arrive, with the gaps that end there: none at the first token.
        """
        loop = asyncio.get_running_loop()
        times, parser = TokenTimes(), EventParser(MAX_RESPONSE_BYTES)
        started = loop.time()
        async with self._request("POST", "/generate", body) as response:
            if response.status != 200:
                raise error_of(Answer(response.status, await _bounded(response), loop.time() - started))
            async for piece in response.content.iter_any():
                now = loop.time()
                for event in parser.feed(piece):
                    if event.data == _END:
                        return times
                    gaps, tokens = len(times.gaps), times.completion_tokens
                    _take(times, event.data, now)
                    if on_tokens is not None and times.completion_tokens > tokens:
                        on_tokens(times.gaps[gaps:])
        raise APIConnectionError("the stream of tokens broke off before its end")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None, timeout: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limits = self._timeout if timeout is None else aiohttp.ClientTimeout(total=timeout)
        with _translated_errors():
            async with self._session.request(
                method, self._base + path, data=body, headers=self._headers, timeout=limits
            ) as response:
                yield response


def open_session() -> aiohttp.ClientSession:
    """A session whose pool never makes a request wait: the loops bound themselves, and queues belong to the server."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS), trust_env=False
    )


def most_connections() -> int:
    """Requests that may be on their way at once. Raises this process's limit of open files as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONCURRENCY if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONCURRENCY, soft - _OTHER_FILES))


def _take(times: TokenTimes, data: bytes, now: float) -> None:
    chunk = parse(_Chunk, data)
    if chunk.error is not None:
        raise api_error({"error": chunk.error})
    new = chunk.meta_info.completion_tokens - times.completion_tokens
    if new < 1:
        return
    if times.completion_tokens == 0:
        times.first = now
    else:
        times.gaps += [(now - times.last) / new] * new
    times.last = now
    times.prompt_tokens = chunk.meta_info.prompt_tokens
    times.cached_tokens = chunk.meta_info.cached_tokens
    times.completion_tokens = chunk.meta_info.completion_tokens


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        if len(body) + len(piece) > MAX_RESPONSE_BYTES:
            raise APIResponseError(f"the answer exceeds {MAX_RESPONSE_BYTES} bytes", code="response_too_large")
        body += piece
    return bytes(body)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise APITimeoutError("no answer in time; raise --timeout") from error
    except aiohttp.ClientError as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise OpenFilesError("no file is left for a connection; raise ulimit -n") from error
        raise APIConnectionError(
            f"the server cannot be reached or broke off: {error or type(error).__name__}"
        ) from error
