"""SGLang's own endpoints, as far as agents and the load-test need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from cb_sglang.client.call import Answer, Call, encode_json, reader, token_ids
from cb_sglang.client.errors import APIResponseError
from cb_sglang.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Completion:
    """What ``generate`` returns. ``seconds`` is the client's wall time, ``cached_tokens`` needed no prefill."""

    text: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str | None
    seconds: float


def health() -> Call[bool]:
    """503 is SGLang's "not yet", not an error here."""
    return Call("GET", "/health", lambda answer: answer.status == 200, success=frozenset({200, 503}))


def models() -> Call[list[str]]:
    """OpenAI's ``/v1/models``: the names of the models that are served."""
    read = reader(_Models)
    return Call("GET", "/v1/models", lambda answer: [model.id for model in read(answer).data])


def generate(
    *, input_ids: Sequence[int] | None, text: str | None, sampling_params: Mapping[str, Any]
) -> Call[Completion]:
    if (input_ids is None) == (text is None):
        raise InvalidRequestError("give exactly one of input_ids and text")
    content = {"text": text} if input_ids is None else {"input_ids": token_ids(input_ids)}
    body = encode_json({**content, "sampling_params": dict(sampling_params)})
    read = reader(_Generated)

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
    body = encode_json({"prompt": text, "add_special_tokens": add_special_tokens})
    read = reader(_Tokenized)
    return Call("POST", "/v1/tokenize", lambda answer: read(answer).tokens, body)


def detokenize(sequences: Sequence[Sequence[int]]) -> Call[list[str]]:
    """The text of each sequence, special tokens left out. SGLang reads an empty one as "no batch": refused."""
    if not sequences:
        raise InvalidRequestError("sequences must not be empty", param="sequences")
    body = encode_json({"tokens": [token_ids(ids) for ids in sequences]})
    read = reader(_Detokenized)

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
