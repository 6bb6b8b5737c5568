"""``/v1/senders``: register, extend, look at and delete senders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack
from urllib.parse import quote

from cb_sglang.client.call import Call, check_names, encode, reader, validated
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import (
    Audit,
    ChatMessage,
    DeletedSender,
    ExtendRequest,
    Message,
    PrivateSpan,
    ReceivedMessage,
    Sender,
    SenderList,
    SenderRequest,
)

AnySender: TypeAlias = Sender | str
"""A sender, or its id."""
AnyMessage: TypeAlias = Message | ReceivedMessage | Mapping[str, Any] | str
"""A message that was received, whole (any server can read it), or by its id (the server that made it can)."""

_MAX_ID_CHARS = 256


class SenderContent(TypedDict, total=False):
    """New content: exactly one of ``prompt``, ``messages`` and ``input_ids``.

    messages: chat turns, rendered by the model's chat template.
    latent_steps: rolls that many latent rows behind the content.
    private: spans of the content, or roles of ``messages``, that take part in scoring and never leave.
    ttl: seconds without a query after which the server forgets the sender.
    """

    prompt: str | None
    messages: Sequence[ChatMessage | Mapping[str, str]] | None
    input_ids: Sequence[int] | None
    latent_steps: int
    private: Sequence[PrivateSpan | Mapping[str, Any]] | None
    ttl: float | None


class SenderOptions(SenderContent, total=False):
    """A sender's content, and what only its registration decides.

    inherits: messages that were received; they lead the new sender.
    pin: keep its positions in the cache, as far as the server's bound on pins allows.
    """

    inherits: Sequence[AnyMessage] | None
    pin: bool


def create_sender(**options: Unpack[SenderOptions]) -> Call[Sender]:
    check_names(options, SenderOptions.__optional_keys__)
    fields = dict(options)
    if options.get("inherits") is not None:
        fields["inherits"] = handed_on(options["inherits"], "inherits")
    return Call("POST", "/v1/senders", reader(Sender), encode(validated(SenderRequest, fields)))


def extend_sender(sender: AnySender, **content: Unpack[SenderContent]) -> Call[Sender]:
    check_names(content, SenderContent.__optional_keys__)
    body = validated(ExtendRequest, content)
    return Call("POST", sender_path(sender) + "/extend", reader(Sender), encode(body))


def list_senders() -> Call[list[Sender]]:
    read = reader(SenderList)
    return Call("GET", "/v1/senders", lambda answer: read(answer).data)


def get_sender(sender: AnySender) -> Call[Sender]:
    return Call("GET", sender_path(sender), reader(Sender))


def delete_sender(sender: AnySender) -> Call[DeletedSender]:
    return Call("DELETE", sender_path(sender), reader(DeletedSender))


def audit(sender: AnySender) -> Call[Audit]:
    return Call("GET", sender_path(sender) + "/audit", reader(Audit))


def sender_id(sender: AnySender) -> str:
    """Raises InvalidRequestError for what cannot be one."""
    name = sender.id if isinstance(sender, Sender) else sender
    if not 0 < len(name) <= _MAX_ID_CHARS or name in {".", ".."}:
        raise InvalidRequestError("sender must be a sender's id, or what create_sender returned", param="sender")
    return name


def sender_ids(senders: Sequence[AnySender]) -> list[str]:
    if isinstance(senders, str | Sender):
        raise InvalidRequestError("senders must be a list; put the sender into one", param="senders")
    return [sender_id(sender) for sender in senders]


def sender_path(sender: AnySender) -> str:
    return f"/v1/senders/{quote(sender_id(sender), safe='')}"


def handed_on(messages: Sequence[AnyMessage] | None, param: str) -> list[Any]:
    """Messages as they are handed on: ids as they are, of a Message what a receiver reads."""
    if isinstance(messages, str | Mapping) or messages is None:
        raise InvalidRequestError(f"{param} must be a list of messages; put the message into one", param=param)
    read = set(ReceivedMessage.model_fields)
    return [m.model_dump(include=read) if isinstance(m, Message) else m for m in messages]
