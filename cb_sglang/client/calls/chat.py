"""``POST /v1/chat/completions`` with a ``cacheback`` object: an answer from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel, Field, RootModel

from cb_sglang.client.call import Answer, Call, StreamCall, encode_json, parse, validated
from cb_sglang.client.calls.messages import MessageOptions, option_fields
from cb_sglang.client.calls.senders import AnyMessage, AnySender, handed_on, sender_ids
from cb_sglang.client.events import ChatStream
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import MAX_CHAT_MESSAGES, ChatExtension, ChatMessage

_PATH = "/v1/chat/completions"
_MESSAGE_IDS = "X-CacheBack-Messages"

ChatTurn: TypeAlias = ChatMessage | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """An answer of OpenAI's shape. ``text`` and ``finish_reason`` are the first choice's.

    message_ids: the messages that it was answered from, in their order in the prompt.
    raw:         the whole answer as the server sent it.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    message_ids: list[str]
    raw: dict[str, Any]


def answered_from(
    senders: Sequence[AnySender] | None,
    received: Sequence[AnyMessage] | None,
    query: str | None,
    options: MessageOptions | None,
) -> ChatExtension:
    """What a chat is answered from. Raises InvalidRequestError unless it is one of senders and received messages."""
    if (senders is None) == (received is None):
        raise InvalidRequestError("give senders, to be asked, or received messages, to be read; one of the two")
    source = {"messages": handed_on(received, "received")} if senders is None else {"senders": sender_ids(senders)}
    return validated(ChatExtension, {**source, "query": query, **option_fields(options or {})})


def chat(turns: Sequence[ChatTurn], openai_fields: Mapping[str, Any], extension: ChatExtension) -> Call[ChatCompletion]:
    return Call("POST", _PATH, _completion, _body(turns, openai_fields, extension, stream=False))


def stream_chat(
    turns: Sequence[ChatTurn], openai_fields: Mapping[str, Any], extension: ChatExtension
) -> StreamCall[str]:
    """The text of the one choice, piece by piece."""
    if openai_fields.get("n") not in (None, 1):
        raise InvalidRequestError("a stream has one choice; leave n out, or use chat", param="n")
    return StreamCall(_PATH, _body(turns, openai_fields, extension, stream=True), ChatStream)


def _body(
    turns: Sequence[ChatTurn], openai_fields: Mapping[str, Any], extension: ChatExtension, *, stream: bool
) -> bytes:
    taken = openai_fields.keys() & {"cacheback", "stream"}
    if taken:
        raise InvalidRequestError(
            f"{min(taken)} is no field to give: the arguments and stream_chat stand for it", param=min(taken)
        )
    if isinstance(turns, str | Mapping) or not 1 <= len(turns) <= MAX_CHAT_MESSAGES:
        raise InvalidRequestError(f"messages must be a list of 1 to {MAX_CHAT_MESSAGES} chat turns", param="messages")
    shown = [turn.model_dump() if isinstance(turn, ChatMessage) else turn for turn in turns]
    ours = extension.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return encode_json({**openai_fields, "messages": shown, "stream": stream, "cacheback": ours})


def _completion(answer: Answer) -> ChatCompletion:
    got = parse(_Chat, answer.body)
    ids = answer.headers.get(_MESSAGE_IDS, "")
    return ChatCompletion(
        text=got.choices[0].message.content or "",
        finish_reason=got.choices[0].finish_reason,
        prompt_tokens=got.usage.prompt_tokens,
        completion_tokens=got.usage.completion_tokens,
        message_ids=[each.strip() for each in ids.split(",") if each.strip()],
        raw=parse(_Raw, answer.body).root,
    )


class _Turn(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Turn
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Chat(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


class _Raw(RootModel[dict[str, Any]]):
    pass
