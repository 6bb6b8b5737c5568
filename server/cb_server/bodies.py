"""Request bodies on the ASGI level: read under a bound, and handed on as if nobody had read them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Receive

from cb_sglang.errors import InvalidRequestError

MAX_BODY_BYTES = 64 << 20


class BodyTooLargeError(InvalidRequestError):
    """The body exceeds MAX_BODY_BYTES."""

    status = 413
    code = "body_too_large"

    def __init__(self) -> None:
        super().__init__(f"the body exceeds {MAX_BODY_BYTES} bytes; send less")


async def read_messages(receive: Receive) -> tuple[list[Message], bool]:
    """The ASGI messages of a body, and whether that is all of it: reading stops beyond MAX_BODY_BYTES."""
    messages: list[Message] = []
    size = 0
    while size <= MAX_BODY_BYTES:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
            return messages, size <= MAX_BODY_BYTES
    return messages, False


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises BodyTooLargeError."""
    messages, complete = await read_messages(receive)
    if not complete:
        raise BodyTooLargeError
    return joined(messages)


def joined(messages: Sequence[Message]) -> bytes:
    """The bytes that these messages bring."""
    return b"".join(message.get("body", b"") for message in messages)


def replayed(messages: Sequence[Message], then: Receive) -> Receive:
    """A ``receive`` that gives these messages, and then what ``then`` gives."""
    pending = list(reversed(messages))

    async def receive() -> Message:
        return pending.pop() if pending else await then()

    return receive


def of_body(body: bytes) -> Message:
    """A whole body as one message."""
    return {"type": "http.request", "body": body, "more_body": False}
