"""A text registered as a sender by its token ids, so that every position's characters are known."""

from __future__ import annotations

from dataclasses import dataclass

from cb_loadtest.evidence import TokenText, align_tokens
from cb_sglang.client import CacheBack, Sender


@dataclass(frozen=True, slots=True)
class Document:
    """A sender, its token ids, and where each of them stands in the text."""

    sender: Sender
    ids: list[int]
    tokens: TokenText


def register_text(client: CacheBack, text: str) -> Document:
    """Tokenise at the server and register. Raises AlignmentError when the tokens do not spell the text."""
    ids = client.tokenize(text)
    tokens = TokenText(text, align_tokens(text, ids, client.detokenize))
    return Document(client.create_sender(input_ids=ids), ids, tokens)
