"""A request as a value: what to send, and how to read the answer. No I/O here, and no request by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, Field, ValidationError

from cb_sglang.client.errors import APIError, APIResponseError, api_error
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import TokenId

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer. ``seconds`` run from sending the request to the last byte of the body."""

    status: int
    body: bytes
    seconds: float
    retry_after: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the reader of its answer.

    ``success`` are the statuses that are no error; ``media_type`` is asked for where it is not JSON.
    """

    method: str
    path: str
    read: Callable[[Answer], T]
    body: bytes | None = None
    success: frozenset[int] = frozenset({200})
    media_type: str | None = None

    def result(self, answer: Answer) -> T:
        """What the answer says. Raises APIError (a subclass of it where the server's code is known)."""
        if answer.status not in self.success:
            raise error_of(answer)
        return self.read(answer)


class StreamReader(Protocol[T_co]):
    """Reads one stream of server-sent events. ``done`` after its closing event."""

    done: bool

    def feed(self, chunk: bytes) -> Iterator[T_co]:
        """What ``chunk`` completes. Raises APIError for an error event, APIResponseError for a malformed one."""

    def end(self) -> None:
        """To be called at the end of the bytes. Raises APIConnectionError unless the stream was complete."""


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[T]):
    """A POST that is answered by a stream. ``reader`` makes what reads it, given the bound of one event in bytes."""

    path: str
    body: bytes
    reader: Callable[[int], StreamReader[T]]


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


def reader(model: type[M]) -> Callable[[Answer], M]:
    """Reads an answer whose whole body is ``model``."""
    return lambda answer: parse(model, answer.body, status=answer.status)


def validated(model: type[M], fields: Mapping[str, Any]) -> M:
    """The request body; the same bounds as at the server, checked before anything is sent."""
    try:
        return model.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        param, problem = _first_problem(error)
        raise InvalidRequestError(problem, param=param) from None


def check_names(given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises InvalidRequestError for an option that there is not."""
    unknown = set(given) - known
    if unknown:
        raise InvalidRequestError(
            f"unknown options: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )


def encode(model: BaseModel) -> bytes:
    """What the caller gave, and nothing else: defaults are the server's to decide."""
    return model.model_dump_json(exclude_none=True, exclude_unset=True).encode()


def encode_json(body: Mapping[str, Any]) -> bytes:
    """Raises InvalidRequestError for what JSON cannot carry."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from None


def token_ids(ids: Sequence[int]) -> list[int]:
    """Checked token ids, at least one."""
    return validated(_TokenIds, {"input_ids": ids}).input_ids


class _TokenIds(BaseModel):
    input_ids: list[TokenId] = Field(min_length=1)


def _first_problem(error: ValidationError) -> tuple[str | None, str]:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    return (str(first["loc"][0]) if first["loc"] else None), (f"{place}: {problem}" if place else problem)
