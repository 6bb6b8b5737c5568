"""The merged plan of shared prefixes: the same attention, from fewer reads. FlashInfer itself needs a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cb_sglang.seam.check import CUDA_FUNCTIONS
from cb_sglang.seam.shared_prefix import Merged, MergingWrapper, Prefix, merge_neighbours


class PagedWrapper:
    """FlashInfer's paged prefill, page size 1, no mask, in plain torch."""

    is_cuda_graph_enabled = False
    read = 0

    def begin_forward(self, qo: Tensor, kv: Tensor, indices: Tensor, last_page_len: Tensor, *args: Any) -> None:
        assert len(last_page_len) == len(qo) - 1 == len(kv) - 1 and args == ("more",)
        self.plan = (qo.tolist(), kv.tolist(), indices)

    def forward(self, q: Tensor, k_pool: Tensor) -> tuple[Tensor, Tensor]:
        """Output [rows, D] and log-sum-exp [rows]; the keys stand in for the values."""
        qo, kv, indices = self.plan
        out, lse = torch.zeros_like(q), torch.full((len(q),), float("-inf"))
        for n in range(len(qo) - 1):
            keys, rows = k_pool[indices[kv[n] : kv[n + 1]].long()], slice(qo[n], qo[n + 1])
            self.read += len(keys)
            if len(keys):
                logits = q[rows] @ keys.T
                lse[rows] = logits.logsumexp(dim=1)
                out[rows] = logits.softmax(dim=1) @ keys
        return out, lse


@settings(max_examples=40, deadline=None)
@given(
    senders=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=8),
    lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_merged_requests_get_the_same_attention(senders: list[tuple[int, int]], lengths: list[int]) -> None:
    torch.manual_seed(0)
    slots = [torch.randperm(64)[:length].to(torch.int32) for length in lengths]
    prefixes = [Prefix(sender, lengths[sender]) for sender, _ in senders]
    qo = torch.tensor([0, *(rows for _, rows in senders)]).cumsum(0).to(torch.int32)
    kv = torch.tensor([0, *(lengths[sender] for sender, _ in senders)]).cumsum(0).to(torch.int32)
    # SGLang makes the buffer of slots somewhat longer than it needs.
    indices = torch.cat([*(slots[sender] for sender, _ in senders), torch.zeros(16, dtype=torch.int32)])
    q, k_pool = torch.randn(int(qo[-1]), 8), torch.randn(64, 8)

    plain, merged = PagedWrapper(), PagedWrapper()
    plain.begin_forward(qo, kv, indices, torch.ones(len(senders)), "more")
    shared = merge_neighbours(prefixes)
    wrapper = MergingWrapper(merged, shared)
    assert wrapper.is_cuda_graph_enabled is False, "all else is the wrapper's own"
    wrapper.begin_forward(qo, kv, indices, torch.ones(len(senders)), "more")
    for ours, theirs in zip(merged.forward(q, k_pool), plain.forward(q, k_pool), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert merged.read == sum(m.kv_length for m in shared) <= plain.read


def test_only_neighbours_with_equal_keys_are_merged() -> None:
    prefixes = [Prefix("a", 5), Prefix("a", 5), Prefix(object(), 5), Prefix("a", 5), Prefix("a", 4)]
    assert merge_neighbours(prefixes) == [
        Merged(0, 2, 0, 5),
        Merged(2, 3, 10, 5),
        Merged(3, 4, 15, 5),
        Merged(4, 5, 20, 4),
    ]


def test_sglangs_planning_function_is_as_expected() -> None:
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill

    (wanted,) = CUDA_FUNCTIONS.values()
    found = tuple(inspect.signature(FlashInferIndicesUpdaterPrefill.call_begin_forward).parameters)
    assert found[: len(wanted)] == wanted
