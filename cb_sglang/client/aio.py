"""The async client: the same calls as ``sync.py``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from cb_sglang.client import calls
from cb_sglang.client.calls import Call, Completion, MessageOptions, MessagesCall
from cb_sglang.client.errors import APIConnectionError
from cb_sglang.client.events import MessageStream
from cb_sglang.client.transport import (
    DEFAULT_BASE_URL,
    DEFAULT_TIMEOUT,
    MAX_RESPONSE_BYTES,
    AnswerBuilder,
    ReadyWait,
    http_settings,
    is_event_stream,
    no_stream,
    request_settings,
    translated_errors,
)
from cb_sglang.wire import ChatMessage, DeletedSender, Message, Query, Sender

T = TypeVar("T")


class AsyncCacheBack:
    """``CacheBack`` for asyncio: arguments, results and errors are the same. Close it with ``aclose``."""

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._http = httpx.AsyncClient(transport=transport, **http_settings(base_url, api_key, timeout))
        self._limit = max_response_bytes

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def create_sender(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
    ) -> Sender:
        """Register one content (prefilled once, at the server). The same content gives the same id."""
        return await self._run(calls.create_sender(prompt=prompt, messages=messages, input_ids=input_ids))

    async def list_senders(self) -> list[Sender]:
        return await self._run(calls.list_senders())

    async def sender(self, sender: Sender | str) -> Sender:
        """The sender as it is now. Raises SenderNotFoundError."""
        return await self._run(calls.get_sender(sender))

    async def delete_sender(self, sender: Sender | str) -> DeletedSender:
        return await self._run(calls.delete_sender(sender))

    async def messages(
        self,
        sender: Sender | str,
        queries: Sequence[str | Sequence[int] | Query],
        **options: Unpack[MessageOptions],
    ) -> list[Message]:
        """One message a query, in the order of the queries; all or none."""
        return await self._run(calls.create_messages(sender, queries, options))

    def stream_messages(
        self,
        sender: Sender | str,
        queries: Sequence[str | Sequence[int] | Query],
        **options: Unpack[MessageOptions],
    ) -> AsyncGenerator[Message, None]:
        """``async for`` over the messages as they finish, in any order (``index`` tells whose).

        The first failing query raises its APIError (``error.index``) and ends the stream. To leave the loop early
        and free the connection at once, wrap the generator in ``contextlib.aclosing``.
        """
        return self._stream(calls.create_messages(sender, queries, options, stream=True))

    async def generate(
        self,
        *,
        input_ids: Sequence[int] | None = None,
        text: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> Completion:
        """SGLang's ``/generate``; ``sampling`` are more of its sampling parameters (``stop``, ``top_p``, ...)."""
        params = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling}
        return await self._run(calls.generate(input_ids=input_ids, text=text, sampling_params=params))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids by the server's tokenizer."""
        return await self._run(calls.tokenize(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; special tokens have none."""
        return await self._run(calls.detokenize(sequences))

    async def models(self) -> list[str]:
        """The names of the models the server serves."""
        return await self._run(calls.models())

    async def health(self) -> bool:
        """Whether the server generates; False while it starts or stops."""
        return await self._run(calls.health())

    async def wait_until_ready(self, timeout: float = 300.0, *, on_wait: Callable[[float], None] | None = None) -> None:
        """Probe ``health`` until it is true. Raises APITimeoutError after ``timeout`` seconds.

        ``on_wait(seconds so far)`` is called before every probe; what it raises ends the wait.
        """
        wait = ReadyWait(timeout)
        while True:
            if on_wait is not None:
                on_wait(wait.elapsed)
            reason = "it is still starting"
            try:
                if await self._run(calls.health(), timeout=wait.probe_seconds()):
                    return
            except APIConnectionError as error:
                reason = error.message
            await asyncio.sleep(wait.pause(reason))

    async def _run(self, call: Call[T], *, timeout: float | None = None) -> T:
        builder = AnswerBuilder(self._limit)
        with translated_errors():
            async with self._http.stream(**request_settings(call, timeout)) as response:
                async for chunk in response.aiter_bytes():
                    builder.add(chunk)
                return call.result(builder.answer(response))

    async def _stream(self, call: MessagesCall) -> AsyncGenerator[Message, None]:
        builder, stream = AnswerBuilder(self._limit), MessageStream(call.count, self._limit)
        with translated_errors():
            async with self._http.stream(**request_settings(call)) as response:
                if not is_event_stream(response):
                    async for chunk in response.aiter_bytes():
                        builder.add(chunk)
                    raise no_stream(builder.answer(response))
                async for chunk in response.aiter_bytes():
                    for message in stream.feed(chunk):
                        yield message
                    if stream.done:
                        return
                stream.end()
