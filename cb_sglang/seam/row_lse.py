"""The log-sum-exp of the voting rows, for attention backends that do not leave it: one extra pass over the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cb_kernels.cpu_attention import ExtendRequest, extend_attention, plan_extend

if TYPE_CHECKING:
    from cb_sglang.seam.layers import ScoredLayers


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Neighbouring rows of one request in the batch's flat q. ``slots`` [n]: the pool slots of all that the last of
    them sees; the rows' own positions are its last ``row_count``."""

    row_start: int
    row_count: int
    slots: torch.Tensor


class RowLse:
    """Planned once a batch, called for each scored layer."""

    def __init__(self, layers: ScoredLayers, rows: Sequence[SeenRows], *, total_rows: int, dtype: torch.dtype) -> None:
        self._on_gpu = rows[0].slots.is_cuda
        if self._on_gpu:
            from cb_kernels.triton_lse import LseSegment, plan_lse

            segments, offset = [], 0
            for each in rows:
                seen = len(each.slots) - each.row_count + 1
                segments.append(LseSegment(each.row_start, each.row_count, offset, seen))
                offset += len(each.slots)
            self._triton_plan = plan_lse(
                segments,
                rows=total_rows,
                heads=layers.heads,
                kv_heads=layers.kv_heads,
                head_dim=layers.head_dim,
                dtype=dtype,
                kv_indices=torch.cat([each.slots for each in rows]),
            )
        else:
            self._plan = plan_extend([ExtendRequest(r.row_start, r.row_count, r.slots.long()) for r in rows])

    def __call__(self, q: torch.Tensor, k_pool: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 [rows, heads], natural log; -inf for rows that were not planned."""
        if self._on_gpu:
            from cb_kernels.triton_lse import layer_lse_triton

            return layer_lse_triton(self._triton_plan, q, k_pool, scale=scale)
        # The keys stand in for the values: only the LSE is wanted.
        return extend_attention(self._plan, q, k_pool, k_pool, scale=scale)[1]
