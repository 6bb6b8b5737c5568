"""Where a sender's tokens stand in its text, and how much of the evidence a message keeps.

Measured from outside, over HTTP: the tokens are laid along the text by what each of them decodes to.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Chars = tuple[int, int]
"""Characters [start, stop) of a text."""

Segment = tuple[str, bool]
"""A piece of text, and whether it is marked."""

MAX_GROUP = 64
"""Most tokens that share characters one with the next: far more than tokenizers make of a text."""


class AlignmentError(ValueError):
    """The tokens do not spell the text."""


def align_tokens(
    text: str, ids: Sequence[int], detokenize: Callable[[Sequence[Sequence[int]]], list[str]]
) -> list[Chars]:
    """The characters of every token of ``ids``, the tokens of ``text``.

    ``detokenize`` gives the text of each of several token sequences (special tokens have none). Tokens that only
    together spell characters (bytes of one) get all of them each; a special token gets none (start = stop).
    Raises AlignmentError when the tokens spell something else, as when the tokenizer changes the text.
    """
    pieces = detokenize([[token] for token in ids]) if ids else []
    found: list[Chars] = []
    at = 0
    while len(found) < len(ids):
        first = len(found)
        stop = _match(text, at, pieces[first])
        width = 1
        if stop is None:
            widths = range(2, min(MAX_GROUP, len(ids) - first) + 1)
            longer = detokenize([ids[first : first + width] for width in widths]) if widths else []
            matches = ((w, _match(text, at, piece)) for w, piece in zip(widths, longer, strict=True))
            width, stop = next(((w, end) for w, end in matches if end is not None), (0, None))
        if stop is None:
            raise AlignmentError(
                f"token {first} ({pieces[first]!r}) does not continue the text at character {at}: "
                f"{text[at : at + 20]!r}"
            )
        found += [(at, stop)] * width
        at = stop
    if text[at:].strip():
        raise AlignmentError(f"the tokens end at character {at} of {len(text)}")
    return found


def _match(text: str, at: int, piece: str) -> int | None:
    """Where ``piece`` ends when ``text`` goes on with it from ``at``, else None.

    Some tokenizers leave out the space before a word when they decode it alone; it is counted with the word.
    """
    if text.startswith(piece, at):
        return at + len(piece)
    space = at
    while space < len(text) and text[space].isspace():
        space += 1
    return space + len(piece) if text.startswith(piece, space) else None


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text and the characters of each of its tokens (of each position of its sender)."""

    text: str
    chars: list[Chars]

    def tokens_over(self, gold: Sequence[Chars]) -> frozenset[int]:
        """The tokens that overlap any of the character spans ``gold``."""
        return frozenset(
            token
            for token, (start, stop) in enumerate(self.chars)
            if start < stop and any(start < end and begin < stop for begin, end in gold)
        )

    def span_segments(self, span: Chars, gold: Sequence[Chars]) -> list[Segment]:
        """The text of the tokens [start, stop) of ``span``, cut where evidence begins and ends (marked)."""
        start, stop = self.chars[span[0]][0], self.chars[span[1] - 1][1]
        return cut(self.text, (start, stop), gold)

    def evidence_segments(self, gold: Chars, kept: Collection[int]) -> list[Segment]:
        """The characters of ``gold``, cut where kept tokens (marked) begin and end."""
        return cut(self.text, gold, [self.chars[token] for token in sorted(kept)])


def cut(text: str, window: Chars, marks: Sequence[Chars]) -> list[Segment]:
    """``text[window]`` in pieces, in order: those inside any of ``marks`` marked, neighbours never alike."""
    start, stop = window
    flags = bytearray(stop - start)
    for begin, end in marks:
        low, high = max(begin, start) - start, min(end, stop) - start
        if low < high:
            flags[low:high] = b"\x01" * (high - low)
    pieces: list[Segment] = []
    begin = 0
    for at in range(1, len(flags) + 1):
        if at == len(flags) or flags[at] != flags[begin]:
            pieces.append((text[start + begin : start + at], bool(flags[begin])))
            begin = at
    return pieces


def evidence_recall(kept: Collection[int], gold: Collection[int]) -> float:
    """Gold-token recall: the share of the tokens ``gold`` that are among ``kept``. ValueError without gold."""
    if not gold:
        raise ValueError("there are no gold tokens; recall says nothing here")
    return len(set(gold) & set(kept)) / len(set(gold))


def answers(reply: str, references: Sequence[Sequence[str]]) -> bool:
    """The strict score: every group of ``references`` has a string that occurs in the reply."""
    return reference_share(reply, references) == 1.0


def reference_share(reply: str, references: Sequence[Sequence[str]]) -> float:
    """The loose score: the share of the groups that have a string that occurs in the reply.

    Compared are words, without case, accents, punctuation and thousands separators. A string of four letters or
    more may go on ("desert" occurs in "deserted"), a number or a shorter one may not ("4" does not occur in
    "1943"). A string like "(B)" is the letter of a choice: it must be the first one that the reply names.
    ValueError without groups.
    """
    if not references:
        raise ValueError("there are no reference answers; accuracy says nothing here")
    words = _words(reply)
    return sum(any(_occurs(text, reply, words) for text in group) for group in references) / len(references)


_CHOICE = re.compile(r"\(([A-Z])\)|^\W*([A-Z])(?=[).:,\n]|\s*$)|[Aa]nswer is:?\s*([A-Z])\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"\d+(?:\.\d+)+|\w+")
_STEM = 4


def _occurs(reference: str, reply: str, words: str) -> bool:
    if re.fullmatch(r"\([A-Z]\)", reference):
        named = _CHOICE.search(reply)
        return named is not None and reference[1] in named.groups()
    wanted = _words(reference)
    if not wanted.strip():  # no words at all, only signs
        return reference.casefold() in reply.casefold()
    last = wanted.split()[-1]
    return (wanted.rstrip() if len(last) >= _STEM and last.isalpha() else wanted) in words


def _words(text: str) -> str:
    """The words of ``text`` as they are compared, with a space before and after each."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).casefold()
    return f" {' '.join(_WORD.findall(_THOUSANDS.sub('', plain)))} "
