"""Continuous rows: input embeddings at given positions, as bytes, so that neither torch nor a device is needed.

A position with a row has no token id (a latent row), or one whose embedding the row is (the ``embeddings`` encoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np

from cb_sglang.errors import InvalidRequestError

RowDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPONENT = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
PLACEHOLDER_ID = 0
"""The token id that stands at a position with a row; the row replaces its embedding."""


@dataclass(frozen=True, slots=True)
class Rows:
    """``len(positions)`` rows of ``hidden`` numbers each.

    positions: ascending positions in the sequence they belong to.
    dtype:     element type; ``data`` holds the rows one after another, little-endian, dense.

    Raises InvalidRequestError for a dtype that is not one of the three, positions that do not ascend, a size that does
    not fit, NaN or infinity.
    """

    positions: tuple[int, ...]
    dtype: RowDtype
    hidden: int
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in get_args(RowDtype):
            raise InvalidRequestError(f"rows must have one of the dtypes {', '.join(ITEM_BYTES)}, not {self.dtype}")
        if self.hidden < 1 or len(self.data) != len(self.positions) * self.hidden * ITEM_BYTES[self.dtype]:
            raise InvalidRequestError(
                f"{len(self.data)} bytes are not {len(self.positions)} rows of {self.hidden} {self.dtype} numbers"
            )
        if any(a >= b for a, b in pairwise(self.positions)) or (self.positions and self.positions[0] < 0):
            raise InvalidRequestError("the positions of rows must ascend from 0 on, each once")
        exponent = _EXPONENT[self.dtype]
        bits = np.frombuffer(self.data, dtype="<u4" if ITEM_BYTES[self.dtype] == 4 else "<u2")
        if bool(((bits & exponent) == exponent).any()):
            raise InvalidRequestError("rows must be finite numbers; there is a NaN or an infinity")

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * ITEM_BYTES[self.dtype]

    def take(self, positions: Sequence[int]) -> Rows:
        """The rows at these positions, renumbered 0, 1, ... in their order. Raises KeyError where there is no row."""
        index = {position: n for n, position in enumerate(self.positions)}
        size = self.row_bytes
        parts = [self.data[index[p] * size : (index[p] + 1) * size] for p in positions]
        return Rows(tuple(range(len(parts))), self.dtype, self.hidden, b"".join(parts))

    def before(self, position: int) -> Rows | None:
        """The rows before a position; None where there are none."""
        kept = [p for p in self.positions if p < position]
        return self.take(kept).at(kept) if kept else None

    def at(self, positions: Sequence[int]) -> Rows:
        """The same rows at other positions, one each."""
        return Rows(tuple(positions), self.dtype, self.hidden, self.data)

    def shifted(self, offset: int) -> Rows:
        """The same rows, ``offset`` positions later."""
        return self.at([p + offset for p in self.positions])


def joined(first: Rows | None, second: Rows) -> Rows:
    """Two sets of rows of one sequence, the second behind the first. Raises InvalidRequestError unless they match."""
    if first is None:
        return second
    if (first.dtype, first.hidden) != (second.dtype, second.hidden):
        raise InvalidRequestError(
            f"rows of {first.hidden} {first.dtype} numbers and of {second.hidden} {second.dtype} do not go together"
        )
    return Rows(first.positions + second.positions, first.dtype, first.hidden, first.data + second.data)
