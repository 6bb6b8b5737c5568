"""Reading a stream of messages: server-sent events out of bytes, and Messages out of events.

The format is that of the HTML standard's "server-sent events", as far as servers use it: fields ``event`` and
``data``, lines ending in LF or CRLF, lines starting with a colon ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from cb_sglang.client.calls import parse
from cb_sglang.client.errors import APIConnectionError, APIResponseError, api_error
from cb_sglang.wire import Message


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


class _ErrorEvent(BaseModel):
    error: dict[str, Any]
    index: int | None = None


class MessageStream:
    """The messages of ``count`` queries out of the bytes of one stream. ``done`` after the closing event."""

    def __init__(self, count: int, limit: int) -> None:
        self._parser = EventParser(limit)
        self._open = set(range(count))
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """The messages that ``chunk`` completes.

        Raises APIError for an error event, APIResponseError for one that has no business here.
        """
        for event in self._parser.feed(chunk):
            if event.name == "message":
                yield self._message(event.data)
            elif event.name == "error":
                failed = parse(_ErrorEvent, event.data)
                raise api_error({"error": failed.error}, index=failed.index)
            elif event.name == "done":
                if self._open:
                    raise APIResponseError(f"the stream ended without messages {sorted(self._open)}")
                self.done = True
                return

    def end(self) -> None:
        """To be called at the end of the bytes. Raises APIConnectionError unless the stream was complete."""
        if not self.done:
            raise APIConnectionError("the stream broke off before its end; ask again")

    def _message(self, data: bytes) -> Message:
        message = parse(Message, data)
        if message.index not in self._open:
            raise APIResponseError(f"the stream brought a message {message.index} that was not awaited")
        self._open.remove(message.index)
        return message
