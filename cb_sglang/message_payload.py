"""The value behind every wire form of a message: its labels, kept positions, and content in one encoding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from cb_sglang.errors import InvalidRequestError
from cb_sglang.rows import PLACEHOLDER_ID, Rows
from cb_sglang.runs import Runs, runs_of

PayloadEncoding: TypeAlias = Literal["token_ids", "embeddings", "mixed", "text"]
TOKEN_ID_BYTES = 4
LABELS = ("id", "sender", "model_fingerprint", "tokenizer_fingerprint", "query_hash")
NUMBERS = ("index", "sender_positions")
_LABEL = re.compile(r"[A-Za-z0-9._:/@+=-]{1,256}")
_BOUND = 1 << 31
_PARTS: dict[str, frozenset[str]] = {
    "token_ids": frozenset({"token_ids"}),
    "embeddings": frozenset({"rows"}),
    "mixed": frozenset({"token_ids", "rows"}),
    "text": frozenset({"text"}),
}


@dataclass(frozen=True, slots=True)
class MessagePayload:
    """What a receiver needs of one message, and what it must know to refuse it.

    id, sender, fingerprints, query_hash: 1 to 256 letters, digits or ``._:/@+=-``.
    index:            which query of the call it answers.
    sender_positions: T.
    positions:        the n kept positions, ascending, below T.
    token_ids:        token_ids, mixed: one a kept position; PLACEHOLDER_ID where a row stands.
    rows:             embeddings, mixed: ``rows.positions`` index the message, 0 to n - 1; embeddings: a row a position.
    text:             text: the kept spans decoded.

    Raises InvalidRequestError when these do not fit together.
    """

    id: str
    sender: str
    index: int
    encoding: PayloadEncoding
    model_fingerprint: str
    tokenizer_fingerprint: str
    query_hash: str
    sender_positions: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...] | None = None
    rows: Rows | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        for name in LABELS:
            if not _LABEL.fullmatch(getattr(self, name)):
                raise InvalidRequestError(f"{name} must be 1 to 256 letters, digits or ._:/@+=-")
        for name in NUMBERS:
            if not 0 <= getattr(self, name) < _BOUND:
                raise InvalidRequestError(f"{name} must be from 0 to 2^31 - 1")
        self._check_parts()
        self._check_positions()
        self._check_content()

    def _check_parts(self) -> None:
        if self.encoding not in _PARTS:
            names = ", ".join(get_args(PayloadEncoding))
            raise InvalidRequestError(f"unknown encoding {self.encoding[:64]}; use one of {names}")
        needed = _PARTS[self.encoding]
        for part in ("token_ids", "rows", "text"):
            if (getattr(self, part) is not None) != (part in needed):
                verb = "needs" if part in needed else "takes no"
                raise InvalidRequestError(f"a message of encoding {self.encoding} {verb} {part}")

    def _check_positions(self) -> None:
        if any(a >= b for a, b in pairwise(self.positions)):
            raise InvalidRequestError("positions must ascend, each once")
        if self.positions and not (self.positions[0] >= 0 and self.positions[-1] < self.sender_positions):
            raise InvalidRequestError(f"positions must lie in the sender's {self.sender_positions} positions, 0 and up")

    def _check_content(self) -> None:
        kept = len(self.positions)
        if self.token_ids is not None:
            if len(self.token_ids) != kept:
                raise InvalidRequestError(f"{len(self.token_ids)} token_ids for {kept} positions; give one for each")
            if self.token_ids and not (min(self.token_ids) >= 0 and max(self.token_ids) < _BOUND):
                raise InvalidRequestError("token_ids must be from 0 to 2^31 - 1")
        if self.rows is not None:
            if self.encoding == "embeddings" and self.rows.positions != tuple(range(kept)):
                raise InvalidRequestError(f"{len(self.rows)} rows for {kept} positions; embeddings has one for each")
            if self.rows.positions and self.rows.positions[-1] >= kept:
                raise InvalidRequestError(f"a row at {self.rows.positions[-1]}; the message has {kept} positions")
            if self.token_ids is not None and any(self.token_ids[p] != PLACEHOLDER_ID for p in self.rows.positions):
                raise InvalidRequestError(f"the token id of a position with a row must be {PLACEHOLDER_ID}")
        if self.text is not None:
            utf8(self.text)

    @property
    def spans(self) -> Runs:
        """The runs of neighbouring kept positions, [start, stop) each."""
        return runs_of(self.positions)

    @property
    def payload_bytes(self) -> int:
        """Bytes of content: 4 a token id, a row's own bytes, the UTF-8 of text; no positions, no labels."""
        ids = TOKEN_ID_BYTES * len(self.token_ids or ())
        rows = len(self.rows.data) if self.rows is not None else 0
        return ids + rows + len(utf8(self.text or ""))


def utf8(text: str) -> bytes:
    """Raises InvalidRequestError for a text that UTF-8 cannot carry."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("text holds half of a surrogate pair, which UTF-8 cannot carry") from error
