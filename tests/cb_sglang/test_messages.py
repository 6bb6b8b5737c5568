"""From kept positions to spans and text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.messages import GAP, decode_text, runs

WORDS = ["<bos>", " whale", " ship", " sea", " captain", " harpoon"]


class Words:
    """A tokenizer of six words; the first is special."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[i] for i in ids if not (skip_special_tokens and i == 0))


@pytest.mark.parametrize(
    ("positions", "spans"),
    [
        ([], []),
        ([0], [(0, 1)]),
        ([0, 1, 2], [(0, 3)]),
        ([0, 2, 3, 9], [(0, 1), (2, 4), (9, 10)]),
        ([7, 8], [(7, 9)]),
    ],
)
def test_runs(positions: list[int], spans: list[tuple[int, int]]) -> None:
    assert runs(positions) == spans


@given(st.sets(st.integers(min_value=0, max_value=200)).map(sorted))
def test_runs_are_maximal_and_cover_exactly(positions: list[int]) -> None:
    spans = runs(positions)
    assert [p for start, stop in spans for p in range(start, stop)] == positions
    assert all(before[1] < after[0] for before, after in pairwise(spans))


def test_text_has_a_mark_at_every_gap() -> None:
    ids = [0, 1, 2, 3, 4, 5]
    assert decode_text(Words(), ids, [(1, 3), (5, 6)]) == f" whale ship{GAP} harpoon"
    assert decode_text(Words(), ids, [(1, 6)]) == " whale ship sea captain harpoon"


def test_special_tokens_have_no_text_and_no_gap() -> None:
    assert decode_text(Words(), [0, 1, 2, 3], [(0, 1), (3, 4)]) == " sea"
    assert decode_text(Words(), [0, 1], [(0, 1)]) == ""
    assert decode_text(Words(), [0, 1], []) == ""
