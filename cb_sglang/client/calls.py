"""Every request of the client as a value: what to send, and how to read the answer. No I/O here.

The sync and the async client only carry these over the wire, so a request is written once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from cb_sglang.client.errors import APIError, APIResponseError, api_error
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import (
    ChatMessage,
    DeletedSender,
    Encoding,
    Message,
    MessageList,
    MessagesRequest,
    Query,
    Sender,
    SenderList,
    SenderRequest,
    TokenId,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer. ``seconds`` run from sending the request to the last byte of the body."""

    status: int
    body: bytes
    seconds: float
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the reader of its answer. ``accept`` are the statuses that are no error."""

    method: str
    path: str
    read: Callable[[Answer], T]
    body: bytes | None = None
    accept: frozenset[int] = frozenset({200})

    def result(self, answer: Answer) -> T:
        """What the answer says. Raises APIError (a subclass of it where the server's code is known)."""
        if answer.status not in self.accept:
            raise error_of(answer)
        return self.read(answer)


@dataclass(frozen=True, slots=True)
class MessagesCall(Call[list[Message]]):
    """The call for one message a query; ``count`` queries."""

    count: int = 0


class MessageOptions(TypedDict, total=False):
    """How to cut messages. What is left out, the server decides.

    ratio:   1 or more; keeps ceil(T / ratio) of the sender's T positions. Not together with ``budget``.
    budget:  keeps min(budget, T) positions.
    encoding: ``token_ids`` or ``text``.
    selector: name of the scoring rule.
    query_template: what the query is wrapped in; contains ``{query}`` once.
    span_scores: also return the mean score of every 16-position span.
    """

    ratio: float | None
    budget: int | None
    encoding: Encoding | None
    selector: str | None
    query_template: str | None
    span_scores: bool | None


@dataclass(frozen=True, slots=True)
class Completion:
    """What ``generate`` returns. ``seconds`` is the client's wall time, ``cached_tokens`` needed no prefill."""

    text: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str | None
    seconds: float


# --- senders


def create_sender(
    *,
    prompt: str | None = None,
    messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
    input_ids: Sequence[int] | None = None,
) -> Call[Sender]:
    body = _validated(SenderRequest, {"prompt": prompt, "messages": messages, "input_ids": input_ids})
    return Call("POST", "/v1/senders", _reader(Sender), _encode(body))


def list_senders() -> Call[list[Sender]]:
    read = _reader(SenderList)
    return Call("GET", "/v1/senders", lambda answer: read(answer).data)


def get_sender(sender: Sender | str) -> Call[Sender]:
    return Call("GET", _sender_path(sender), _reader(Sender))


def delete_sender(sender: Sender | str) -> Call[DeletedSender]:
    return Call("DELETE", _sender_path(sender), _reader(DeletedSender))


# --- messages


def create_messages(
    sender: Sender | str,
    queries: Sequence[str | Sequence[int] | Query],
    options: Mapping[str, Any],
    *,
    stream: bool = False,
) -> MessagesCall:
    """Without ``stream`` the result is in the order of ``queries``; with it, ``MessageStream`` reads the events."""
    if isinstance(queries, str | bytes):
        raise InvalidRequestError("queries must be a list; put the query into one", param="queries")
    unknown = set(options) - MessageOptions.__optional_keys__
    if unknown:
        raise InvalidRequestError(
            f"unknown options: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(MessageOptions.__optional_keys__))}"
        )
    body = _validated(MessagesRequest, {"queries": queries, "stream": stream, **options})

    count = len(body.queries)

    def read(answer: Answer) -> list[Message]:
        data = sorted(_reader(MessageList)(answer).data, key=lambda message: message.index)
        if [message.index for message in data] != list(range(count)):
            raise APIResponseError(
                f"{count} queries were answered by the messages {[m.index for m in data]}",
                status=answer.status,
            )
        return data

    return MessagesCall("POST", _sender_path(sender) + "/messages", read, _encode(body), count=count)


# --- SGLang's own endpoints


def health() -> Call[bool]:
    """503 is SGLang's "not yet", not an error here."""
    return Call("GET", "/health", lambda answer: answer.status == 200, accept=frozenset({200, 503}))


def models() -> Call[list[str]]:
    """OpenAI's ``/v1/models``: the names of the models that are served."""
    read = _reader(_Models)
    return Call("GET", "/v1/models", lambda answer: [model.id for model in read(answer).data])


def generate(
    *, input_ids: Sequence[int] | None, text: str | None, sampling_params: Mapping[str, Any]
) -> Call[Completion]:
    if (input_ids is None) == (text is None):
        raise InvalidRequestError("give exactly one of input_ids and text")
    content = {"text": text} if input_ids is None else {"input_ids": _token_ids(input_ids)}
    body = _encode_json({**content, "sampling_params": dict(sampling_params)})
    read = _reader(_Generated)

    def completion(answer: Answer) -> Completion:
        got = read(answer)
        return Completion(
            text=got.text,
            output_ids=got.output_ids,
            prompt_tokens=got.meta_info.prompt_tokens,
            cached_tokens=got.meta_info.cached_tokens,
            finish_reason=(got.meta_info.finish_reason or _FinishReason()).type,
            seconds=answer.seconds,
        )

    return Call("POST", "/generate", completion, body)


def tokenize(text: str, *, add_special_tokens: bool) -> Call[list[int]]:
    body = _encode_json({"prompt": text, "add_special_tokens": add_special_tokens})
    read = _reader(_Tokenized)
    return Call("POST", "/v1/tokenize", lambda answer: read(answer).tokens, body)


def detokenize(sequences: Sequence[Sequence[int]]) -> Call[list[str]]:
    """The text of each sequence, special tokens left out. SGLang reads an empty one as "no batch": refused."""
    if not sequences:
        raise InvalidRequestError("sequences must not be empty", param="sequences")
    body = _encode_json({"tokens": [_token_ids(ids) for ids in sequences]})
    read = _reader(_Detokenized)

    def texts(answer: Answer) -> list[str]:
        got = read(answer).text
        if len(got) != len(sequences):
            raise APIResponseError(f"{len(sequences)} sequences became {len(got)} texts", status=answer.status)
        return got

    return Call("POST", "/v1/detokenize", texts, body)


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _FinishReason(BaseModel):
    type: str | None = None


class _MetaInfo(BaseModel):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _FinishReason | None = None


class _Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: _MetaInfo


class _Tokenized(BaseModel):
    tokens: list[int]


class _Detokenized(BaseModel):
    text: list[str]


class _TokenIds(BaseModel):
    input_ids: list[TokenId] = Field(min_length=1)


# --- reading and writing


def error_of(answer: Answer) -> APIError:
    """The error of an answer whose status is not one of success, whatever its body holds."""
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        body = None  # not ours: a proxy's page, say; the status has to do
    return api_error(body, status=answer.status, retry_after=answer.retry_after)


def parse(model: type[M], data: bytes, *, status: int = 200) -> M:
    """``data`` as ``model``. Raises APIResponseError with the first thing that is wrong."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise APIResponseError(
            f"the server's answer is no {model.__name__.lstrip('_')}: {_first_problem(error)[1]}", status=status
        ) from None


def _reader(model: type[M]) -> Callable[[Answer], M]:
    return lambda answer: parse(model, answer.body, status=answer.status)


def _validated(model: type[M], fields: Mapping[str, Any]) -> M:
    """The request body; the same bounds as at the server, checked before anything is sent."""
    try:
        return model.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        param, problem = _first_problem(error)
        raise InvalidRequestError(problem, param=param) from None


def _first_problem(error: ValidationError) -> tuple[str | None, str]:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    return (str(first["loc"][0]) if first["loc"] else None), (f"{place}: {problem}" if place else problem)


def _token_ids(ids: Sequence[int]) -> list[int]:
    return _validated(_TokenIds, {"input_ids": ids}).input_ids


def _encode(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_none=True).encode()


def _encode_json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from None


def _sender_path(sender: Sender | str) -> str:
    name = sender.id if isinstance(sender, Sender) else sender
    if not 0 < len(name) <= _MAX_ID_CHARS or name in {".", ".."}:
        raise InvalidRequestError("sender must be a sender's id, or what create_sender returned", param="sender")
    return f"/v1/senders/{quote(name, safe='')}"
