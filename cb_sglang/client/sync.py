"""The blocking client. Its methods only carry the requests of ``calls`` over the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
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


class CacheBack:
    """Client of one server; use it as a context manager, or call ``close``. Safe to share between threads.

    base_url:  where the server listens, without ``/v1``.
    api_key:   sent as ``Authorization: Bearer``; never part of an error message.
    timeout:   seconds without a sign of the server until a call gives up; None waits for ever.
    transport: an httpx transport instead of the network (tests, proxies).
    max_response_bytes: bound of one answer, or of one event of a stream.

    Every method raises InvalidRequestError before sending what the server would refuse anyway, APIError for an
    error answer, APIConnectionError and APITimeoutError when there is none. Nothing is retried.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._http = httpx.Client(transport=transport, **http_settings(base_url, api_key, timeout))
        self._limit = max_response_bytes

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_sender(self, **options: Unpack[SenderOptions]) -> Sender:
        """Register one content (prefilled once, at the server). The same content gives the same id."""
        return self._run(calls.create_sender(**options))

    def extend_sender(self, sender: AnySender, **content: Unpack[SenderContent]) -> Sender:
        """A new sender that goes on where ``sender`` ends; what the two share is not prefilled again."""
        return self._run(calls.extend_sender(sender, **content))

    def list_senders(self) -> list[Sender]:
        return self._run(calls.list_senders())

    def sender(self, sender: AnySender) -> Sender:
        """The sender as it is now. Raises SenderNotFoundError."""
        return self._run(calls.get_sender(sender))

    def delete_sender(self, sender: AnySender) -> DeletedSender:
        return self._run(calls.delete_sender(sender))

    def audit(self, sender: AnySender) -> Audit:
        """Which of the sender's positions went to whom, newest first."""
        return self._run(calls.audit(sender))

    def capacity(self) -> Capacity:
        """The engine's load, and what a receiver that asks for everything now would be granted."""
        return self._run(calls.capacity())

    def messages(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[Message]:
        """One message a query, in the order of the queries; all or none."""
        return self._run(calls.create_messages(sender, queries, options))

    def message_payloads(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[MessagePayload]:
        """``messages`` in the binary form: continuous rows as bytes, not as base64 in JSON; no report on the cut."""
        return self._run(calls.message_payloads(sender, queries, options))

    def stream_messages(
        self, sender: AnySender, queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> Generator[Message, None, None]:
        """The messages as they finish, in any order (``index`` tells whose).

        The first failing query raises its APIError (``error.index``) and ends the stream. Leaving the loop early
        and closing the generator closes the connection.
        """
        return self._stream(calls.stream_messages(sender, queries, options))

    def transfers(
        self, senders: Sequence[AnySender], queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> list[Transfer]:
        """Every sender with every query, one message a pair: the first sender's, then the next one's.

        A pair that fails has its ``error`` and no ``message``; only a failure of the whole call raises.
        """
        return self._run(calls.transfers(senders, queries, options))

    def stream_transfers(
        self, senders: Sequence[AnySender], queries: Sequence[AnyQuery], **options: Unpack[MessageOptions]
    ) -> Generator[Transfer, None, None]:
        """``transfers`` as they finish, in any order (``sender`` and ``query`` tell whose)."""
        return self._stream(calls.stream_transfers(senders, queries, options))

    def chain(self, hops: Sequence[HopContent], query: AnyQuery, **options: Unpack[MessageOptions]) -> list[Hop]:
        """Register the hops in order, each behind the message of the one before it, and ask each with ``query``.

        The last hop's message is the result. A hop that fails raises; the senders before it stay registered.
        """
        chained: list[Hop] = []
        for content in calls.chain_contents(hops, query, options):
            inherits = [chained[-1].message] if chained else None
            sender = self.create_sender(**content, inherits=inherits)
            (message,) = self.messages(sender, [query], **options)
            chained.append(Hop(sender, message))
        return chained

    def chat(
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
        return self._run(calls.chat(messages, fields, source))

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
    ) -> Generator[str, None, None]:
        """``chat``, piece by piece: the pieces together are its text."""
        fields = {"model": model, **openai_fields}
        source = calls.answered_from(senders, received, query, options)
        return self._stream(calls.stream_chat(messages, fields, source))

    def generate(
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
        return self._run(calls.generate(input_ids=input_ids, text=text, sampling_params=params))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids by the server's tokenizer."""
        return self._run(calls.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; special tokens have none."""
        return self._run(calls.detokenize(sequences))

    def models(self) -> list[str]:
        """The names of the models the server serves."""
        return self._run(calls.models())

    def health(self) -> bool:
        """Whether the server generates; False while it starts or stops."""
        return self._run(calls.health())

    def wait_until_ready(self, timeout: float = 300.0, *, on_wait: Callable[[float], None] | None = None) -> None:
        """Probe ``health`` until it is true. Raises APITimeoutError after ``timeout`` seconds.

        ``on_wait(seconds so far)`` is called before every probe; what it raises ends the wait.
        """
        wait = ReadyWait(timeout)
        while True:
            if on_wait is not None:
                on_wait(wait.elapsed)
            reason = "it is still starting"
            try:
                if self._run(calls.health(), timeout=wait.probe_seconds()):
                    return
            except APIConnectionError as error:
                reason = error.message
            time.sleep(wait.pause(reason))

    def _run(self, call: Call[T], *, timeout: float | None = None) -> T:
        builder = AnswerBuilder(self._limit)
        with translated_errors(), self._http.stream(**request_settings(call, timeout)) as response:
            for chunk in response.iter_bytes():
                builder.add(chunk)
            return call.result(builder.answer(response))

    def _stream(self, call: StreamCall[T]) -> Generator[T, None, None]:
        builder, stream = AnswerBuilder(self._limit), call.reader(self._limit)
        with translated_errors(), self._http.stream(**stream_settings(call)) as response:
            if not is_event_stream(response):
                for chunk in response.iter_bytes():
                    builder.add(chunk)
                raise no_stream(builder.answer(response))
            for chunk in response.iter_bytes():
                yield from stream.feed(chunk)
                if stream.done:
                    return
            stream.end()
