"""The blocking client. Its methods only carry the calls of ``calls.py`` over the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
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

    def create_sender(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
    ) -> Sender:
        """Register one content (prefilled once, at the server). The same content gives the same id."""
        return self._run(calls.create_sender(prompt=prompt, messages=messages, input_ids=input_ids))

    def list_senders(self) -> list[Sender]:
        return self._run(calls.list_senders())

    def sender(self, sender: Sender | str) -> Sender:
        """The sender as it is now. Raises SenderNotFoundError."""
        return self._run(calls.get_sender(sender))

    def delete_sender(self, sender: Sender | str) -> DeletedSender:
        return self._run(calls.delete_sender(sender))

    def messages(
        self,
        sender: Sender | str,
        queries: Sequence[str | Sequence[int] | Query],
        **options: Unpack[MessageOptions],
    ) -> list[Message]:
        """One message a query, in the order of the queries; all or none."""
        return self._run(calls.create_messages(sender, queries, options))

    def stream_messages(
        self,
        sender: Sender | str,
        queries: Sequence[str | Sequence[int] | Query],
        **options: Unpack[MessageOptions],
    ) -> Generator[Message, None, None]:
        """The messages as they finish, in any order (``index`` tells whose).

        The first failing query raises its APIError (``error.index``) and ends the stream. Leaving the loop early
        and closing the generator closes the connection.
        """
        return self._stream(calls.create_messages(sender, queries, options, stream=True))

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

    def _stream(self, call: MessagesCall) -> Generator[Message, None, None]:
        builder, stream = AnswerBuilder(self._limit), MessageStream(call.count, self._limit)
        with translated_errors(), self._http.stream(**request_settings(call)) as response:
            if not is_event_stream(response):
                for chunk in response.iter_bytes():
                    builder.add(chunk)
                raise no_stream(builder.answer(response))
            for chunk in response.iter_bytes():
                yield from stream.feed(chunk)
                if stream.done:
                    return
            stream.end()
