"""Reading streams: server-sent events out of bytes, and messages, transfers or text out of events.

The format is that of the HTML standard's "server-sent events", as far as servers use it: fields ``event`` and
``data``, lines ending in LF or CRLF, lines starting with a colon ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, model_validator

from cb_sglang.client.call import parse
from cb_sglang.client.errors import APIConnectionError, APIError, APIResponseError, api_error

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: bytes


class EventParser:
    """Cuts bytes, in chunks of any size, into events of at most ``limit`` bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._name = "message"
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that ``chunk`` completes. Raises APIResponseError when one grows beyond the limit."""
        self._rest += chunk
        lines: list[bytearray] = []
        if b"\n" in chunk:
            *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            event = self._line(bytes(line.removesuffix(b"\r")))
            if event is not None:
                yield event
        if self._size + len(self._rest) > self._limit:
            raise self._too_large()

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._close()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"data":
            self._data.append(value)
            self._size += len(value) + 1
            if self._size > self._limit:
                raise self._too_large()
        return None

    def _close(self) -> Event | None:
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._name, self._data, self._size = "message", [], 0
        return event

    def _too_large(self) -> APIResponseError:
        return APIResponseError(
            f"an event exceeds {self._limit} bytes; raise max_response_bytes", code="response_too_large"
        )


class ItemStream(Generic[M]):
    """The items of one stream, each awaited once, out of its bytes.

    ``kind`` is their event's name, ``key`` tells an item apart from the others, ``awaited`` are all keys.
    """

    def __init__(
        self, kind: str, model: type[M], key: Callable[[M], Hashable], awaited: Iterable[Hashable], limit: int
    ) -> None:
        self._kind, self._model, self._key = kind, model, key
        self._open = dict.fromkeys(awaited)
        self._parser = EventParser(limit)
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[M]:
        for event in self._parser.feed(chunk):
            if event.name == self._kind:
                yield self._item(event.data)
            elif event.name == "error":
                raise _failure(event.data)
            elif event.name == "done":
                if self._open:
                    raise APIResponseError(f"the stream ended without {self._kind}s {list(self._open)}")
                self.done = True
                return

    def end(self) -> None:
        _check_done(self.done)

    def _item(self, data: bytes) -> M:
        item = parse(self._model, data)
        key = self._key(item)
        if key not in self._open:
            raise APIResponseError(f"the stream brought a {self._kind} {key} that was not awaited")
        del self._open[key]
        return item


class ChatStream:
    """The text of an OpenAI chat stream: unnamed events with chunks, then ``[DONE]``. ``limit`` bytes in all."""

    def __init__(self, limit: int) -> None:
        self._parser = EventParser(limit)
        self._limit = limit
        self._size = 0
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[str]:
        self._size += len(chunk)
        if self._size > self._limit:
            raise APIResponseError(
                f"the stream exceeds {self._limit} bytes; raise max_response_bytes", code="response_too_large"
            )
        for event in self._parser.feed(chunk):
            if event.name == "error":
                raise _failure(event.data)
            if event.name != "message":
                continue  # SGLang's extensions
            if event.data == b"[DONE]":
                self.done = True
                return
            part = parse(_ChatChunk, event.data)
            if part.choices is None:
                raise api_error({"error": part.error})
            yield from (choice.delta.content for choice in part.choices if choice.delta.content)

    def end(self) -> None:
        _check_done(self.done)


class _ErrorEvent(BaseModel):
    error: dict[str, Any]
    index: int | None = None


class _Delta(BaseModel):
    content: str | None = None


class _ChunkChoice(BaseModel):
    delta: _Delta


class _ChatChunk(BaseModel):
    """SGLang reports an error after the first chunk as a chunk of its own."""

    choices: list[_ChunkChoice] | None = None
    error: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> _ChatChunk:
        if (self.choices is None) == (self.error is None):
            raise ValueError("it needs choices, or an error")
        return self


def _failure(data: bytes) -> APIError:
    failed = parse(_ErrorEvent, data)
    return api_error({"error": failed.error}, index=failed.index)


def _check_done(done: bool) -> None:
    if not done:
        raise APIConnectionError("the stream broke off before its end; ask again")
