"""The async client: the same calls as ``sync.py``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from cb_sglang.client import calls
from cb_sglang.client.call import Call, StreamCall
from cb_sglang.client.calls import (
    AnyMessage,
    AnyQuery,
    AnySender,
    ChatCompletion,
    ChatTurn,
    Completion,
    Hop,
    HopContent,
    MessageOptions,
    SenderContent,
    SenderOptions,
)
from cb_sglang.client.errors import APIConnectionError
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
    stream_settings,
    translated_errors,
)
from cb_sglang.payload import MessagePayload
from cb_sglang.wire import Audit, Capacity, DeletedSender, Message, Sender, Transfer

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

    async def create_sender(self, **options: Unpack[SenderOptions]) -> Sender:
        """Register one content (prefilled once, at the server). The same content gives the same id."""
        return await self._run(calls.create_sender(**options))

    async def extend_sender(self, sender: AnySender, **content: Unpack[SenderContent]) -> Sender:
        """A new sender that goes on where ``sender`` ends; what the two share is not prefilled again."""
        return await self._run(calls.extend_sender(sender, **content))

    async def list_senders(self) -> list[Sender]:
        return await self._run(calls.list_senders())

    async def sender(self, sender: AnySender) -> Sender:
        """The sender as it is now. Raises SenderNotFoundError."""
        return await self._run(calls.get_sender(sender))

    async def delete_sender(self, sender: AnySender) -> DeletedSender:
        return await self._run(calls.delete_sender(sender))

    async def audit(self, sender: AnySender) -> Audit:
        """Which of the sender's positions went to whom, newest first."""
        return await self._run(calls.audit(sender))

    async def capacity(self) -> Capacity:
        """The engine's load, and what a receiver that asks for everything now would be granted."""
        return await self._run(calls.capacity())

    async def messages(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[Message]:
        """One message a query, in the order of the queries; all or none."""
        return await self._run(calls.create_messages(sender, queries, options))

    async def message_payloads(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[MessagePayload]:
        """``messages`` in the binary form: continuous rows as bytes, not as base64 in JSON; no report on the cut."""
        return await self._run(calls.message_payloads(sender, queries, options))

    def stream_messages(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> AsyncGenerator[Message, None]:
        """``async for`` over the messages as they finish, in any order (``index`` tells whose).

        The first failing query raises its APIError (``error.index``) and ends the stream. To leave the loop early
        and free the connection at once, wrap the generator in ``contextlib.aclosing``.
        """
        return self._stream(calls.stream_messages(sender, queries, options))

    async def transfers(
        self, senders: Sequence[AnySender], queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[Transfer]:
        """Every sender with every query, one message a pair: the first sender's, then the next one's.

        A pair that fails has its ``error`` and no ``message``; only a failure of the whole call raises.
        """
        return await self._run(calls.transfers(senders, queries, options))

    def stream_transfers(
        self, senders: Sequence[AnySender], queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> AsyncGenerator[Transfer, None]:
        """``transfers`` as they finish, in any order (``sender`` and ``query`` tell whose)."""
        return self._stream(calls.stream_transfers(senders, queries, options))

    async def chain(self, hops: Sequence[HopContent], query: AnyQuery, **options: Unpack[MessageOptions]) -> list[Hop]:
        """Register the hops in order, each behind the message of the one before it, and ask each with ``query``.

        The last hop's message is the result. A hop that fails raises; the senders before it stay registered.
        """
        chained: list[Hop] = []
        for content in calls.chain_contents(hops, query, options):
            inherits = [chained[-1].message] if chained else None
            sender = await self.create_sender(**content, inherits=inherits)
            (message,) = await self.messages(sender, [query], **options)
            chained.append(Hop(sender, message))
        return chained

    async def chat(
        self,
        messages: Sequence[ChatTurn],
        *,
        senders: Sequence[AnySender] | None = None,
        received: Sequence[AnyMessage] | None = None,
        query: str | None = None,
        options: MessageOptions | None = None,
        model: str = "default",
        **openai_fields: Any,
    ) -> ChatCompletion:
        """OpenAI's chat completion, answered from messages: of ``senders``, asked for it, or ``received`` before.

        ``query`` asks the senders; by default the last user turn does. ``options`` say how to cut the messages,
        ``openai_fields`` are more of OpenAI's (``max_tokens``, ``temperature``, ...).
        """
        fields = {"model": model, **openai_fields}
        source = calls.answered_from(senders, received, query, options)
        return await self._run(calls.chat(messages, fields, source))

    def stream_chat(
        self,
        messages: Sequence[ChatTurn],
        *,
        senders: Sequence[AnySender] | None = None,
        received: Sequence[AnyMessage] | None = None,
        query: str | None = None,
        options: MessageOptions | None = None,
        model: str = "default",
        **openai_fields: Any,
    ) -> AsyncGenerator[str, None]:
        """``chat``, piece by piece: the pieces together are its text."""
        fields = {"model": model, **openai_fields}
        source = calls.answered_from(senders, received, query, options)
        return self._stream(calls.stream_chat(messages, fields, source))

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

    async def _stream(self, call: StreamCall[T]) -> AsyncGenerator[T, None]:
        builder, stream = AnswerBuilder(self._limit), call.reader(self._limit)
        with translated_errors():
            async with self._http.stream(**stream_settings(call)) as response:
                if not is_event_stream(response):
                    async for chunk in response.aiter_bytes():
                        builder.add(chunk)
                    raise no_stream(builder.answer(response))
                async for chunk in response.aiter_bytes():
                    for item in stream.feed(chunk):
                        yield item
                    if stream.done:
                        return
                stream.end()
