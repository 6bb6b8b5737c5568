"""Our CPU attention backend for SGLang: only the new rows run over the cached prefix.

SGLang's torch_native backend pads a short query to the whole sequence, O(T^2) work for a 24-row query over a long
sender (sglang/srt/layers/attention/torch_native_backend.py). This one hands the paged pool to
cb_kernels.cpu_attention, which reads a prefix shared by several queries once and returns the log-sum-exp that
scoring needs. What it does not cover (cross attention, encoders, split SWA pools) goes to torch_native unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from cb_kernels.cpu_attention import (
    ExtendPlan,
    ExtendRequest,
    decode_attention,
    extend_attention,
    plan_decode,
    plan_extend,
)
from cb_kernels.cpu_native_build import native_library
from cb_sglang.seam.scoring_batch import active

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class CacheBackCpuBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """Extend and decode for decoder self-attention on ``token_to_kv_pool`` ([slots, kv_heads, head_dim])."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        # Compiled now, where it must be, and not in the first query.
        native_library()
        self._extend_plan: ExtendPlan | None = None
        self._decode_plan: ExtendPlan | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._extend_plan, self._decode_plan = None, None
        slots = request_slots(self.req_to_token_pool, forward_batch)
        if forward_batch.forward_mode.is_idle():
            return
        if forward_batch.forward_mode.is_decode():
            self._decode_plan = plan_decode(slots)
        elif forward_batch.extend_seq_lens_cpu is not None:
            self._extend_plan = plan_extend(extend_requests(forward_batch, slots))

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        plan = self._extend_plan
        if plan is None or not self._covers(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        self._write_kv(layer, forward_batch, k, v, save_kv_cache)
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out, lse = extend_attention(
            plan,
            rows,
            *self._pools(layer),
            scale=layer.scaling,
            window=_window(layer),
            logit_cap=layer.logit_cap,
        )
        scoring = active()
        if scoring is not None:
            scoring.lse = lse
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        plan = self._decode_plan
        if plan is None or not self._covers(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        self._write_kv(layer, forward_batch, k, v, save_kv_cache)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = decode_attention(
            rows,
            *self._pools(layer),
            plan,
            scale=layer.scaling,
            window=_window(layer),
            logit_cap=layer.logit_cap,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _covers(self, layer: RadixAttention) -> bool:
        return (
            layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and not self.use_sliding_window_kv_pool
        )

    def _pools(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _write_kv(self, layer: Any, forward_batch: ForwardBatch, k: Any, v: Any, save: bool) -> None:
        if save and k is not None and v is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)


def request_slots(req_to_token_pool: Any, forward_batch: ForwardBatch) -> list[torch.Tensor]:
    """Per request, the pool slot (int64) of each of its positions 0..seq_len-1."""
    table, lengths = req_to_token_pool.req_to_token, forward_batch.seq_lens.tolist()
    rows = forward_batch.req_pool_indices.tolist()
    return [table[row, :length].to(torch.int64) for row, length in zip(rows, lengths, strict=True)]


def extend_requests(forward_batch: ForwardBatch, slots: list[torch.Tensor]) -> list[ExtendRequest]:
    """The extend batch's requests as cb_kernels sees them: rows in the flat q, and slots."""
    requests, start = [], 0
    for count, request in zip(forward_batch.extend_seq_lens_cpu, slots, strict=True):
        requests.append(ExtendRequest(row_start=start, row_count=int(count), slots=request))
        start += int(count)
    return requests


def _window(layer: RadixAttention) -> int | None:
    size = layer.sliding_window_size
    return size if size is not None and size > -1 else None
