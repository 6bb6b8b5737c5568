"""One prefix read for all queries of a sender in SGLang's FlashInfer backend (layers/attention/flashinfer_backend.py).

FlashInfer attends to a batch's cached prefixes without a causal mask and merges that with the rows' own part by their
log-sum-exp. So neighbouring requests with the same prefix can be planned as one request with all their rows: K and V
are then read once for them, and every row gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request of an extend batch has in the cache: equal ``key``, equal slots; ``length`` positions."""

    key: Hashable
    length: int


@dataclass(frozen=True, slots=True)
class Merged:
    """Neighbouring requests [first, stop) as one; ``kv_start`` of the first in the batch's concatenated slots."""

    first: int
    stop: int
    kv_start: int
    kv_length: int


def merge_neighbours(prefixes: Sequence[Prefix]) -> list[Merged]:
    """Runs of requests with the same prefix, in order. Host work only."""
    merged: list[Merged] = []
    number = offset = 0
    for prefix, run in groupby(prefixes):
        count = sum(1 for _ in run)
        merged.append(Merged(number, number + count, offset, prefix.length))
        number += count
        offset += count * prefix.length
    return merged


def merged_plan(
    merged: Sequence[Merged], qo_indptr: torch.Tensor, kv_indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qo_indptr``, ``kv_indptr`` (int32 [groups + 1]) and ``kv_indices`` of the merged requests; no host sync."""
    borders = torch.tensor([merged[0].first, *(m.stop for m in merged)], device=qo_indptr.device)
    lengths = torch.tensor([0, *(m.kv_length for m in merged)], dtype=torch.int32)
    kv_indptr = lengths.cumsum(dim=0, dtype=torch.int32).to(qo_indptr.device)
    kept = torch.cat([kv_indices[m.kv_start : m.kv_start + m.kv_length] for m in merged])
    return qo_indptr[borders], kv_indptr, kept


class MergingWrapper:
    """Stands for FlashInfer's paged wrapper while SGLang plans it; everything but the plan is the wrapper's own."""

    def __init__(self, wrapper: Any, merged: Sequence[Merged]) -> None:
        self._wrapper = wrapper
        self._merged = merged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As the wrapper's, for the merged requests."""
        plan = merged_plan(self._merged, qo_indptr, kv_indices)
        self._wrapper.begin_forward(*plan, kv_last_page_len[: len(self._merged)], *args, **kwargs)


def planned_once(
    original: Callable[..., Any], updater: Any, wrapper_ragged: Any, wrapper_paged: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook of FlashInferIndicesUpdaterPrefill.call_begin_forward.

    Sliding windows count from a request's own end, masks and speculation from its own rows: those are left alone.
    """
    from cb_sglang.seam.scoring_batch import active

    scoring = active()
    if scoring is not None and len(scoring.prefixes) > 1 and _mergeable(updater, args, kwargs):
        merged = merge_neighbours(scoring.prefixes)
        if len(merged) < len(scoring.prefixes):
            wrapper_paged = MergingWrapper(wrapper_paged, merged)
    return original(updater, wrapper_ragged, wrapper_paged, *args, **kwargs)


def _mergeable(updater: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Behind the two wrappers: req_pool_indices, lens, sum, seq_lens, prefix_lens, start, kv, qo, use_ragged, spec_info.
    use_ragged, spec_info = args[8], args[9]
    return (
        use_ragged
        and spec_info is None
        and updater.attn_backend.dispatch_reason is None
        and all(kwargs.get(name) is None for name in ("multi_item_params", "custom_kv_indices"))
        and kwargs.get("window_left", -1) < 0
    )
