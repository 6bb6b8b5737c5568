"""Which fields of a body a tenant may use on SGLang's routes, and what they may hold.

SGLang trusts whoever calls it: many of its fields name what is not the caller's (a request, a rank, a key of a cache
that all share), and a value that its scheduler does not expect ends the server. So what is not named here is refused.
A field that is named has bounds where SGLang checks none, and else only its own check.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cb_sglang.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_SEQUENCES = 1_024
MAX_TEXT_CHARS = 4 << 20
_MAX_LOGPROBS = 128
_MAX_ITEMS = 1_024
_MAX_STOP_CHARS = 1_024
_MAX_SHOWN_CHARS = 256
_INT32 = (1 << 31) - 1
_MEDIA_SCHEMES = ("data:", "http://", "https://")
_MEDIA_PARTS = ("image_url", "video_url", "audio_url", "input_audio")
_MEDIA_KEYS = {"url", "detail", "data", "format"}


@dataclass(frozen=True, slots=True)
class Field:
    """What a field may hold: ``says`` it in words. ``each``: a batch may also give a list, one for each prompt."""

    says: str
    holds: Callable[[Any], bool]
    each: bool = False


def check(path: str, body: dict[str, Any]) -> None:
    """Raises InvalidRequestError for a field of the body that is not open, or not with its value."""
    prompts = _prompts(body)
    for params in _samplings(body):
        _check_fields(params, _SAMPLING_PARAMS, prompts)
    _check_fields(body, OPEN[path], prompts)
    choices = max(params.get("n") or 1 for params in (body, *_samplings(body)))
    if choices * (prompts or 1) > MAX_SEQUENCES:
        raise InvalidRequestError(f"prompts times n must be at most {MAX_SEQUENCES}; send less at once", param="n")


def highest_ids(body: dict[str, Any]) -> dict[str, int]:
    """The highest token id of each field of a checked body whose ids SGLang does not compare with its vocabulary."""
    found: dict[str, int] = {}
    for holder in (body, *_samplings(body)):
        for name in ("input_ids", "prompt", "stop_token_ids"):
            for ids in _batch(holder.get(name)) or [holder.get(name)]:
                if isinstance(ids, list) and ids:
                    found[name] = max(found.get(name, 0), max(ids))
    return found


def _check_fields(given: dict[str, Any], fields: dict[str, Field], prompts: int | None) -> None:
    for name, value in given.items():
        if value is None:
            continue
        shown = name[:_MAX_SHOWN_CHARS]
        field = fields.get(name)
        if field is _NOT_ASKED and not value:
            continue
        if field is None or field is _NOT_ASKED:
            raise InvalidRequestError(f"{shown} is not open to tenants of this server; leave it out", param=shown)
        listed = field.each and isinstance(value, list) and len(value) == prompts
        if not all(field.holds(one) for one in (value if listed else [value])):
            raise InvalidRequestError(f"{shown} must be {field.says}", param=shown)


def _prompts(body: dict[str, Any]) -> int | None:
    """How many prompts a batch has; None: one, and no batch."""
    given = next((body[name] for name in ("text", "input_ids", "prompt") if body.get(name) is not None), None)
    batch = _batch(given)
    return None if batch is None else len(batch)


def _samplings(body: dict[str, Any]) -> list[dict[str, Any]]:
    sampling = body.get("sampling_params")
    return [one for one in (sampling if isinstance(sampling, list) else [sampling]) if isinstance(one, dict)]


def _batch(value: Any) -> list[Any] | None:
    """The prompts of a batch; None for one prompt."""
    return value if isinstance(value, list) and value and isinstance(value[0], str | list) else None


def _is_ids(value: Any) -> bool:
    try:
        return isinstance(value, list) and (not value or min(array("q", value)) >= 0)
    except (TypeError, OverflowError):
        return False


def _are_ids(value: Any) -> bool:
    return _is_ids(value) or (isinstance(value, list) and len(value) <= MAX_SEQUENCES and all(map(_is_ids, value)))


def _are_few_ids(value: Any) -> bool:
    return _are_ids(value) and all(len(ids) <= _MAX_ITEMS for ids in (value, *value) if isinstance(ids, list))


def _are_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    if not 1 <= len(texts) <= MAX_SEQUENCES or not all(isinstance(text, str) for text in texts):
        return False
    return sum(map(len, texts)) <= MAX_TEXT_CHARS


def _are_stops(value: Any) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= _MAX_ITEMS and all(isinstance(stop, str) and len(stop) <= _MAX_STOP_CHARS for stop in stops)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        return False
    return all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values())


def _is_medium(value: Any) -> bool:
    """A path would be one of the server's; an object may bring features with a hash of its own choice."""
    return isinstance(value, str) and value.startswith(_MEDIA_SCHEMES)


def _are_media(value: Any) -> bool:
    rows = value if isinstance(value, list) else [value]
    return all(one is None or _is_medium(one) for row in rows for one in (row if isinstance(row, list) else [row]))


def _are_turns(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    contents = [turn.get("content") for turn in value if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return all(_is_part(part[kind]) for part in parts for kind in _MEDIA_PARTS if part.get(kind) is not None)


def _is_part(value: Any) -> bool:
    given = {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else {"url": value}
    return given.keys() <= _MEDIA_KEYS and ("url" not in given or _is_medium(given["url"]))


def _whole(low: int, high: int) -> Field:
    return Field(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _number(low: float, high: float) -> Field:
    return Field(
        f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high
    )


def _as_they_are(names: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field("", lambda value: True))


_FLAG = Field("true or false", lambda value: isinstance(value, bool), each=True)
_NAME = Field("a string", lambda value: isinstance(value, str), each=True)
_TEXTS = f"a string or 1 to {MAX_SEQUENCES} of them, of {MAX_TEXT_CHARS} characters together"
_IDS = f"a list of token ids, or at most {MAX_SEQUENCES} such lists"
_FEW_IDS = Field(f"a list of at most {_MAX_ITEMS} token ids", _are_few_ids)
_TURNS = Field("a list of chat turns, media in them as data: or http(s): URLs without settings but detail", _are_turns)
_MEDIA = Field("data: or http(s): URLs", _are_media)

_SAMPLING = {
    "n": _whole(1, MAX_CHOICES),
    # Numbers that become none or infinite as float32, or none as int32, end the scheduler.
    "temperature": _number(0, 1_000),
    "repetition_penalty": _number(0.01, 2),
    "top_k": _whole(-1, 1 << 30),
    "logit_bias": Field(f"at most {_MAX_ITEMS} token ids with a number from -100 to 100 each", _is_bias),
    "stop": Field(f"strings of at most {_MAX_STOP_CHARS} characters", _are_stops),
    "stop_token_ids": Field(f"a list of at most {_MAX_ITEMS} token ids", lambda v: _is_ids(v) and len(v) <= _MAX_ITEMS),
} | _as_they_are(
    "top_p min_p frequency_penalty presence_penalty regex ebnf no_stop_trim ignore_eos skip_special_tokens"
)
# Not open; but SGLang's own clients send them, empty or false.
_NOT_ASKED = Field("", lambda value: False)
_SAMPLING_PARAMS = (
    _SAMPLING
    | {"stop_regex": _NOT_ASKED}
    | {"max_new_tokens": _whole(0, _INT32), "min_new_tokens": _whole(0, _INT32)}
    | _as_they_are("json_schema structural_tag sampling_seed spaces_between_special_tokens")
)
# Both are replaced by the tenant's namespace.
_REPLACED = _as_they_are("extra_key cache_salt")
_OPENAI = (
    _SAMPLING
    | {"max_tokens": _whole(0, _INT32), "min_tokens": _whole(0, _INT32), "lora_path": replace(_NAME, each=False)}
    | _as_they_are(
        "model user seed stream stream_options response_format return_cached_tokens_details return_token_ids"
    )
    | _REPLACED
)
_GENERATE = {
    "text": Field(_TEXTS, _are_texts),
    "input_ids": Field(_IDS, _are_ids),
    "sampling_params": Field("an object, or one for each prompt of a batch", lambda v: isinstance(v, dict), each=True),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "return_logprob": _FLAG,
    "logprob_start_len": replace(_whole(-1, _INT32), each=True),
    "top_logprobs_num": replace(_whole(0, _MAX_LOGPROBS), each=True),
    "token_ids_logprob": _FEW_IDS,
    "lora_path": _NAME,
    "return_routed_experts": _NOT_ASKED,
    "return_hidden_states": _NOT_ASKED,
} | _as_they_are("stream return_text_in_logprobs return_prompt_token_ids")
_COMPLETIONS = (
    _OPENAI
    | {
        "prompt": Field(f"{_TEXTS}, or {_IDS}", lambda value: _are_texts(value) or _are_ids(value)),
        "suffix": Field(_TEXTS, _are_texts),
        "best_of": _whole(1, MAX_CHOICES),
        "logprobs": _whole(0, _MAX_LOGPROBS),
    }
    | _as_they_are("echo json_schema")
)
_CHAT = (
    _OPENAI
    | {
        "messages": _TURNS,
        "input_ids": Field("a list of token ids", _is_ids),
        "max_completion_tokens": _whole(0, _INT32),
        "top_logprobs": _whole(0, _MAX_LOGPROBS),
    }
    | _as_they_are("logprobs tools tool_choice parallel_tool_calls reasoning_effort reasoning thinking")
    | _as_they_are(
        "separate_reasoning stream_reasoning continue_final_message return_prompt_token_ids return_meta_info"
    )
    # OpenAI's, which SGLang does not read.
    | _as_they_are("audio function_call functions metadata modalities prediction prompt_cache_key")
    | _as_they_are("prompt_cache_retention safety_identifier service_tier store verbosity web_search_options")
    # Ours (chat_route.py), with checks of its own.
    | _as_they_are("cacheback")
)
_TOKENIZE = {"prompt": Field(_TEXTS, _are_texts), "messages": _TURNS} | _as_they_are(
    "model tools tool_choice reasoning_effort continue_final_message add_special_tokens add_generation_prompt"
)
_DETOKENIZE = {"tokens": Field(_IDS, _are_ids)} | _as_they_are("model skip_special_tokens")

OPEN = {
    "/generate": _GENERATE | _REPLACED,
    "/v1/completions": _COMPLETIONS,
    "/v1/chat/completions": _CHAT,
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
}
"""The routes that take a body, with the fields that are open on each."""
