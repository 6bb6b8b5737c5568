"""What a sender is made of: new content as token ids, behind messages that it inherits, with what is private in it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cb_sglang import wire
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.rows import Rows, joined
from cb_sglang.runs import Runs, shifted, union
from cb_sglang.seam.engine import Engine


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a sequence: token ids (PLACEHOLDER_ID where a row stands), rows, and private runs, counted from 0."""

    input_ids: list[int]
    rows: Rows | None = None
    private: Runs = ()


def concatenated(parts: Sequence[Part]) -> Part:
    """The parts one behind the other."""
    ids: list[int] = []
    rows: Rows | None = None
    private: list[tuple[int, int]] = []
    for part in parts:
        if part.rows is not None:
            rows = joined(rows, part.rows.shifted(len(ids)))
        private += shifted(part.private, len(ids))
        ids += part.input_ids
    return Part(ids, rows, union(private))


async def new_content(engine: Engine, request: wire.SenderRequest | wire.ExtendRequest, *, leads: bool) -> Part:
    """The new content of a request. ``leads``: it starts the sequence, so that special tokens may start it.

    Raises InvalidRequestError naming the field at fault.
    """
    if request.input_ids is not None:
        check_ids(request.input_ids, engine.vocab_size, "input_ids")
        return Part(request.input_ids, private=_token_runs(request, len(request.input_ids), ()))
    tokenizer = engine.tokenizer
    field = request.given[0]
    try:
        if request.prompt is not None:
            ids, runs = await engine.tokenizing_long(_from_prompt, tokenizer, request.prompt, request.private, leads)
        else:
            ids, runs = await engine.tokenizing_long(_from_turns, tokenizer, request.messages, request.private, leads)
    except CacheBackError as error:
        error.param = error.param or field
        raise
    if not ids:
        raise InvalidRequestError("the content has no tokens", param=field)
    return Part(ids, private=_token_runs(request, len(ids), runs))


def check_ids(input_ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raises InvalidRequestError for an id beyond the vocabulary."""
    highest = max(input_ids)
    if highest >= vocab_size:
        raise InvalidRequestError(f"token id {highest} is not in the vocabulary of {vocab_size}", param=where)


def _token_runs(request: wire.SenderRequest | wire.ExtendRequest, total: int, found: Runs) -> Runs:
    runs = list(found)
    for index, span in enumerate(request.private):
        if span.tokens is not None:
            if span.tokens[1] > total:
                raise InvalidRequestError(
                    f"tokens end at {span.tokens[1]}; the content has {total} tokens", param=f"private[{index}].tokens"
                )
            runs.append(span.tokens)
    return union(runs)


def _from_prompt(
    tokenizer: Any, prompt: str, private: Sequence[wire.PrivateSpan], leads: bool
) -> tuple[list[int], Runs]:
    spans = [(index, span.chars) for index, span in enumerate(private) if span.chars is not None]
    if not spans:
        return list(tokenizer.encode(prompt, add_special_tokens=leads)), ()
    for index, (_, stop) in spans:
        if stop > len(prompt):
            raise InvalidRequestError(
                f"chars end at {stop}; the prompt has {len(prompt)} characters", param=f"private[{index}].chars"
            )
    ids, offsets = _with_offsets(tokenizer, prompt, leads)
    return ids, _covering(offsets, [run for _, run in spans])


def _from_turns(
    tokenizer: Any, turns: Sequence[wire.ChatMessage], private: Sequence[wire.PrivateSpan], leads: bool
) -> tuple[list[int], Runs]:
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("this model has no chat template; send the content as prompt or input_ids")
    wanted = [turn.model_dump() for turn in turns]
    ids = _apply_chat_template(tokenizer, wanted, tokenize=True)
    roles = {span.role for span in private if span.role is not None}
    absent = roles - {turn.role for turn in turns}
    if absent:
        raise InvalidRequestError(f"no message has the private role {min(absent)!r}", param="private")
    runs: Runs = ()
    if roles:
        text = _apply_chat_template(tokenizer, wanted, tokenize=False)
        found, offsets = _with_offsets(tokenizer, text, special=False)
        if found != ids:
            raise InvalidRequestError(
                "private roles cannot be located with this model's chat template; mark chars or tokens", param="private"
            )
        runs = _covering(offsets, _role_chars(tokenizer, text, wanted, roles))
    bos = getattr(tokenizer, "bos_token_id", None)
    if not leads and ids and ids[0] == bos:
        # The sequence that these turns continue has its own.
        return ids[1:], union((max(0, a - 1), b - 1) for a, b in runs)
    return ids, runs


def _role_chars(tokenizer: Any, text: str, turns: Sequence[dict[str, str]], roles: set[str]) -> list[tuple[int, int]]:
    """Where the contents of these roles' turns stand in the rendered ``text``."""
    # Rendered again with marks around them: the template, or another turn, may say the same as a private one.
    mark = secrets.token_hex(8)
    marked = [dict(turn) for turn in turns]
    for turn in marked:
        content = turn["content"].strip()
        if content and turn["role"] in roles:
            turn["content"] = turn["content"].replace(content, f"{mark}{content}{mark}", 1)
    pieces = _apply_chat_template(tokenizer, marked, tokenize=False).split(mark)
    if "".join(pieces) != text or len(pieces) % 2 == 0:
        raise InvalidRequestError(
            "the chat template changes the turns' text, so that a private role cannot be located; mark tokens",
            param="private",
        )
    borders = list(accumulate(map(len, pieces)))
    return list(zip(borders[:-1:2], borders[1::2], strict=True))


def _with_offsets(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidRequestError(
            "this model's tokenizer gives no character offsets; mark private tokens", param="private"
        )
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def _covering(offsets: Sequence[tuple[int, int]], chars: Sequence[tuple[int, int]]) -> Runs:
    """Every token that holds at least one of the characters."""
    runs = union(chars)
    found: list[tuple[int, int]] = []
    at = before = 0
    for token, (start, stop) in enumerate(offsets):
        # Some tokenizers' offsets leave out the white space that a token begins with.
        start, before = min(start, before), max(before, stop)
        while at < len(runs) and runs[at][1] <= start:
            at += 1
        if at < len(runs) and start < stop and runs[at][0] < stop:
            found.append((token, token + 1))
    return union(found)


def _apply_chat_template(tokenizer: Any, turns: list[dict[str, str]], *, tokenize: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=tokenize, add_generation_prompt=False, return_dict=False)
    except Exception as error:
        # Templates are programs: what they refuse (roles out of order, say) they raise as errors of their own.
        raise InvalidRequestError(f"the model's chat template refused these messages: {error}") from error
