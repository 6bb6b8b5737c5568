"""Received messages in a chat prompt: labelled blocks in the last user turn, token ids and rows put in after rendering.

A chat template takes text. So each message that is not text stands as a marker in it; once the prompt is token ids, the
marker's are replaced by the message's own, which are never rendered, re-tokenised or parsed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_sglang.content import Part, concatenated
from cb_sglang.errors import InvalidRequestError

_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Block:
    """One message for the prompt: what it is called there, and its text, or else its token ids and rows."""

    label: str
    text: str | None
    part: Part | None


@dataclass(frozen=True, slots=True)
class Insert:
    """What is to stand in the prompt's tokens in place of a marker."""

    marker: str
    part: Part


def with_blocks(turns: Sequence[dict[str, Any]], blocks: Sequence[Block]) -> tuple[list[dict[str, Any]], list[Insert]]:
    """Chat turns with the blocks before the last user turn's text (a turn of their own, where there is none)."""
    text, inserts = "", []
    nonce = secrets.token_hex(8)
    for number, block in enumerate(blocks, start=1):
        content = block.text
        if content is None:
            assert block.part is not None
            # Unguessable, so that no content can hold it.
            content = f"<cacheback-{nonce}-{number}>"
            inserts.append(Insert(content, block.part))
        text += f"[Message {number} of {len(blocks)}, from {block.label}]\n{content}\n[End of message {number}]\n\n"
    changed = [dict(turn) for turn in turns]
    last = next((turn for turn in reversed(changed) if turn.get("role") == "user"), None)
    if last is None:
        changed.append({"role": "user", "content": text})
    elif isinstance(last.get("content"), list):
        last["content"] = [{"type": "text", "text": text}, *last["content"]]
    else:
        last["content"] = text + str(last.get("content") or "")
    return changed, inserts


def last_user_text(turns: Sequence[Any]) -> str:
    """The text of the last user turn. Raises InvalidRequestError when there is none to ask with."""
    for turn in reversed(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            content = turn.get("content")
            if isinstance(content, list):
                content = "\n".join(
                    str(each.get("text", ""))
                    for each in content
                    if isinstance(each, dict) and each.get("type") == "text"
                )
            if isinstance(content, str) and content.strip():
                return content
            break
    raise InvalidRequestError(
        "there is no text in the last user message to ask the senders with; give cacheback.query",
        param="cacheback.query",
    )


def spliced(tokenizer: Any, input_ids: Sequence[int], inserts: Sequence[Insert]) -> Part:
    """The prompt with every marker replaced by its part; the tokens around stay as they are.

    Markers are found by decoding, whatever tokens they came to; what a token has beside its marker is encoded anew.
    Raises InvalidRequestError when one cannot be found, as with a template that drops or changes the user's text.
    """
    pieces: list[Part] = []
    rest = list(input_ids)
    for insert in inserts:
        first, last, before, after = _locate(tokenizer, rest, insert.marker)
        pieces += [Part(rest[:first] + before), insert.part]
        rest = after + rest[last:]
    return concatenated([*pieces, Part(rest)])


def _locate(tokenizer: Any, ids: list[int], marker: str) -> tuple[int, int, list[int], list[int]]:
    """The tokens [first, last) that hold the marker, and those of the text that they hold before and after it."""

    def text(stop: int) -> str:
        return str(tokenizer.decode(ids[:stop], skip_special_tokens=False))

    # The shortest prefix whose text has the marker, then the longest that has nothing of it.
    low, high = 0, len(ids)
    whole = text(high)
    at = whole.find(marker)
    if at < 0:
        raise InvalidRequestError(
            "the chat template left no place for the messages; ask for encoding text", param="cacheback.encoding"
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if marker in text(middle) else (middle + 1, high)
    last = low

    def is_before(stop: int) -> bool:
        prefix = text(stop)
        return len(prefix) <= at and whole.startswith(prefix)

    first, high = max(0, last - _WINDOW), last
    while first < high:
        middle = (first + high + 1) // 2
        first, high = (middle, high) if is_before(middle) else (first, middle - 1)
    # Where characters are several tokens, a prefix that ends within one is no prefix of the text.
    while not is_before(first):
        first -= 1
    before, after = whole[len(text(first)) : at], text(last)[at + len(marker) :]
    return first, last, _encode(tokenizer, before), _encode(tokenizer, after)


def _encode(tokenizer: Any, text: str) -> list[int]:
    def ids(of: str) -> list[int]:
        return list(tokenizer.encode(of, add_special_tokens=False))

    # Behind another character, because some tokenizers put a space before whatever they are given.
    for anchor in ("a", "\n") if text else ():
        head, both = ids(anchor), ids(anchor + text)
        if both[: len(head)] == head:
            return both[len(head) :]
    return ids(text) if text else []
