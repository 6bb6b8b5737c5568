"""The text of a message: the kept spans, a mark at every gap."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from recording_engine import rows

from cb_sglang.messages import GAP, decode_text
from cb_sglang.senders import RegisteredSender

WORDS = ["<bos>", " whale", " ship", " sea", " captain", " harpoon"]


class Words:
    """A tokenizer of six words; the first is special."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[i] for i in ids if not (skip_special_tokens and i == 0))


def sender(*ids: int, latent: int = 0) -> RegisteredSender:
    return RegisteredSender(
        id="snd_1",
        tenant="alice",
        fingerprint="f",
        input_ids=array("i", [*ids, *[0] * latent]),
        rows=rows(*[1.0] * latent).shifted(len(ids)) if latent else None,
        latent=latent,
        created=0.0,
    )


@pytest.mark.parametrize(
    ("ids", "positions", "text"),
    [
        ([0, 1, 2, 3, 4, 5], [1, 2, 5], f" whale ship{GAP} harpoon"),
        ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], " whale ship sea captain harpoon"),
        # Special tokens have no text, and make no gap.
        ([0, 1, 2, 3], [0, 3], " sea"),
        ([0, 1], [0], ""),
        ([0, 1], [], ""),
    ],
)
def test_text_has_a_mark_at_every_gap(ids: list[int], positions: list[int], text: str) -> None:
    assert decode_text(Words(), sender(*ids), positions) == text


def test_a_row_has_no_text() -> None:
    assert decode_text(Words(), sender(1, 2, latent=2), [0, 1, 2, 3]) == " whale ship"
    assert decode_text(Words(), sender(1, 2, latent=2), [2, 3]) == ""
