"""From kept positions to what a receiver can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GAP = " [...] "


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as maximal runs of neighbours, [start, stop) each."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def decode_text(tokenizer: Any, input_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> str:
    """The kept spans of a sender as text, in order, with a mark at every gap (the ``text`` encoding)."""
    texts = (tokenizer.decode(list(input_ids[a:b]), skip_special_tokens=True) for a, b in spans)
    return GAP.join(text for text in texts if text)
