"""Continuous rows as bytes: what fits together, and finite numbers only."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_examples import finite_bytes, rows

from cb_sglang.errors import InvalidRequestError
from cb_sglang.rows import ITEM_BYTES, RowDtype, Rows

# Sign and fraction vary; the exponent is all ones.
NOT_FINITE: dict[RowDtype, tuple[int, ...]] = {
    "float32": (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF),
    "bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF),
    "float16": (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float64"}, "not float64"),
        ({"hidden": 0}, "0 float16 numbers"),
        ({"hidden": 3}, "12 bytes are not 3 rows of 3 float16 numbers"),
        ({"positions": (1, 4)}, "12 bytes are not 2 rows"),
        ({"data": bytes(11)}, "11 bytes"),
        ({"positions": (1, 1, 2)}, "must ascend"),
        ({"positions": (4, 1, 5)}, "must ascend"),
        ({"positions": (-1, 1, 5)}, "from 0 on"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"positions": (1, 4, 6), "dtype": "float16", "hidden": 2, "data": bytes(12)}
    assert len(Rows(**right)) == 3
    with pytest.raises(InvalidRequestError, match=says):
        Rows(**{**right, **changes})


@pytest.mark.parametrize(
    ("dtype", "bits"), [(dtype, bits) for dtype, all_bits in NOT_FINITE.items() for bits in all_bits]
)
def test_nan_and_infinity_are_refused(dtype: RowDtype, bits: int) -> None:
    item = bits.to_bytes(ITEM_BYTES[dtype], "little")
    with pytest.raises(InvalidRequestError, match="finite"):
        Rows((0, 1), dtype, 2, bytes(3 * ITEM_BYTES[dtype]) + item)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 0xFF7FFFFF), ("bfloat16", 0xFF7F), ("float16", 0xFBFF)])
def test_the_largest_number_is_accepted(dtype: RowDtype, bits: int) -> None:
    data = bits.to_bytes(ITEM_BYTES[dtype], "little")
    assert Rows((0,), dtype, 1, data).data == data


@given(data=st.data(), bits=st.binary(min_size=4, max_size=4))
@settings(deadline=None)
def test_finite_is_what_numpy_calls_finite(data: st.DataObject, bits: bytes) -> None:
    dtype: RowDtype = data.draw(st.sampled_from(get_args(RowDtype)))
    # bfloat16 is the upper half of a float32.
    wide = b"".join(bytes(2) + bits[n : n + 2] for n in (0, 2)) if dtype == "bfloat16" else bits
    numbers = np.frombuffer(wide, dtype="<f2" if dtype == "float16" else "<f4")
    count = len(bits) // ITEM_BYTES[dtype]
    if np.isfinite(numbers).all():
        assert Rows(tuple(range(count)), dtype, 1, bits).data == bits
    else:
        with pytest.raises(InvalidRequestError, match="finite"):
            Rows(tuple(range(count)), dtype, 1, bits)


@given(rows((2, 3, 8, 20)), st.sets(st.sampled_from((2, 3, 8, 20))).map(sorted))
@settings(deadline=None)
def test_take_gives_the_same_bytes_renumbered(all_rows: Rows, chosen: list[int]) -> None:
    taken = all_rows.take(chosen)
    assert taken.positions == tuple(range(len(chosen)))
    assert (taken.dtype, taken.hidden) == (all_rows.dtype, all_rows.hidden)
    width = all_rows.row_bytes
    for n, position in enumerate(chosen):
        at = all_rows.positions.index(position) * width
        assert taken.data[n * width : (n + 1) * width] == all_rows.data[at : at + width]


def test_take_where_there_is_no_row() -> None:
    with pytest.raises(KeyError):
        Rows((2, 3), "float32", 1, bytes(8)).take([3, 4])


def test_shifted_moves_positions_only() -> None:
    before = Rows((0, 2), "bfloat16", 2, finite_bytes(bytes(range(8)), "bfloat16"))
    assert before.shifted(5) == Rows((5, 7), "bfloat16", 2, before.data)
    assert before.shifted(5).shifted(-5) == before
    with pytest.raises(InvalidRequestError, match="from 0 on"):
        before.shifted(-1)
