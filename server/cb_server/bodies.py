"""Request bodies on the ASGI level: read under a bound, and handed on as if nobody had read them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Message, Receive

from cb_sglang.errors import InvalidRequestError

MAX_BODY_BYTES = 64 << 20


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than it may be."""

    status = 413
    code = "body_too_large"

    def __init__(self, most: int) -> None:
        super().__init__(f"the body exceeds {most} bytes; send less")


@dataclass(frozen=True, slots=True)
class Read:
    """What has been read of a body. ``complete``: it was all; ``gone``: the client has left meanwhile."""

    body: bytes
    complete: bool
    gone: bool

    def then(self, receive: Receive) -> Receive:
        """A ``receive`` that gives this, and then what ``receive`` gives, as if nobody had read it."""
        pending: list[Message] = [{"type": "http.request", "body": self.body, "more_body": not self.complete}]
        if self.gone:
            pending = [{"type": "http.disconnect"}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


async def read(receive: Receive, most: int | None = None) -> Read:
    """The body, as far as ``most`` bytes (MAX_BODY_BYTES) and the next message of it."""
    most = MAX_BODY_BYTES if most is None else most
    body = bytearray()
    while len(body) <= most:
        message = await receive()
        if message["type"] != "http.request":
            return Read(bytes(body), complete=False, gone=True)
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return Read(bytes(body), complete=True, gone=False)
    return Read(bytes(body), complete=False, gone=False)


async def read_body(receive: Receive, most: int | None = None) -> bytes:
    """The whole body; empty when the client has left. Raises BodyTooLargeError beyond ``most`` (MAX_BODY_BYTES)."""
    most = MAX_BODY_BYTES if most is None else most
    found = await read(receive, most)
    if found.gone:
        return b""
    if not found.complete or len(found.body) > most:
        raise BodyTooLargeError(most)
    return found.body


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a whole body, and then what ``receive`` gives."""
    return Read(body, complete=True, gone=False).then(receive)
