"""One attention call on the CPU that also returns its log-sum-exp, and the merge of two such results.

Source: shared design, kernels page ("CPU"); online softmax and LSE merge as in FlashAttention (Dao et al.,
2022) and cascade inference (FlashInfer, Ye et al., 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_KEY_BLOCK = 512
_SCORE_FLOATS = 1 << 22
_SPLIT_MIN_KEYS = 256
_FLASH_ROW_BLOCK = 32


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of `q` over `k`, `v` without expanding the keys to all heads.

    Shapes: q [B, Hkv, G, n, D]; k [B, Hkv, T, D]; v [B, Hkv, T, Dv] (float32, any strides). Each kv head
    serves G * n rows. mask: additive float32 (0 or -inf), [n, T] or [B, 1, n, T]; no row may be masked
    whole. causal: row i sees keys 0..i (needs T >= n, mask None). Returns out [B, Hkv, G, n, Dv] and the
    natural-log LSE [B, Hkv, G, n]. Raises ValueError for an empty key set (the fused operator would divide
    by zero and end the process).
    """
    if k.shape[2] == 0:
        raise ValueError("attend needs at least one key; leave calls without keys out of the plan")
    if logit_cap > 0.0 or v.shape[-1] != q.shape[-1]:
        return _attend_plain(q, k, v, scale, mask, causal, logit_cap)
    return _attend_fused(q, k, v, scale, mask, causal)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a second result, over other keys, into (out, lse) in place: out, part [..., Dv], lse [...],
    float32."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    batch, kv_heads, group, n, _ = q.shape
    # The operator reads its last dimension as contiguous without checking.
    rows, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.flatten(1, 2), k, v))
    keys = k.shape[2]
    split = 1
    if batch == 1 and mask is None and not causal:
        split = _key_splits(kv_heads * group * math.ceil(n / _FLASH_ROW_BLOCK), keys)
    if split > 1:
        # The operator is parallel over (batch, head, row block) only: make parts of the keys batch entries.
        rows = rows.expand(split, -1, -1, -1)
        k, v = (x[0].view(kv_heads, split, keys // split, -1).transpose(0, 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if split > 1:
        total = lse.logsumexp(0, keepdim=True)
        out = out.mul((lse - total).exp_().unsqueeze(-1)).sum(0, keepdim=True)
        lse = total
    shape = (batch, kv_heads, group, n)
    return out.reshape(*shape, -1), lse.reshape(shape)


def _key_splits(tasks: int, keys: int) -> int:
    """Parts (a power of two that divides `keys`) to cut the keys into, so that every thread has work."""
    threads = torch.get_num_threads()
    split = 1
    if tasks >= 2 * threads:
        return split
    while split < threads and keys % (2 * split) == 0 and keys // (2 * split) >= _SPLIT_MIN_KEYS:
        split *= 2
    return split


def _attend_plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """Blocked online softmax in float32, for what the fused operator does not know (soft cap, Dv != D)."""
    batch, kv_heads, group, n, dim = q.shape
    keys, value_dim = v.shape[2], v.shape[3]
    out = torch.empty(batch, kv_heads, group, n, value_dim)
    lse = torch.empty(batch, kv_heads, group, n)
    row_block = max(16, _SCORE_FLOATS // (batch * kv_heads * group * _KEY_BLOCK))
    for a in range(0, n, row_block):
        b = min(n, a + row_block)
        rows = q[:, :, :, a:b].reshape(batch, kv_heads, group * (b - a), dim) * scale
        shape = (batch, kv_heads, group, b - a)
        high = torch.full((*shape, 1), -math.inf)
        total = torch.zeros_like(high)
        acc = torch.zeros(*shape, value_dim)
        for c in range(0, min(keys, b) if causal else keys, _KEY_BLOCK):
            d = min(keys, c + _KEY_BLOCK)
            s = (rows @ k[:, :, c:d].transpose(2, 3)).view(*shape, d - c)
            if logit_cap > 0.0:
                s = s.div_(logit_cap).tanh_().mul_(logit_cap)
            if mask is not None:
                part = mask[..., a:b, c:d]
                s += part if part.dim() == 2 else part.unsqueeze(2)
            elif causal and d > a + 1:
                s.masked_fill_(torch.arange(c, d) > torch.arange(a, b).unsqueeze(1), -math.inf)
            new_high = torch.maximum(high, s.amax(-1, keepdim=True))
            # A row may see nothing of its first blocks; exp(-inf - 0) = 0 where exp(-inf + inf) is NaN.
            safe = new_high.masked_fill(new_high == -math.inf, 0.0)
            s = s.sub_(safe).exp_()
            decay = (high - safe).exp_()
            total.mul_(decay).add_(s.sum(-1, keepdim=True))
            pv = s.flatten(2, 3) @ v[:, :, c:d]
            acc.mul_(decay).add_(pv.view(*shape, value_dim))
            high = new_high
        out[:, :, :, a:b] = acc.div_(total)
        lse[:, :, :, a:b] = high.add_(total.log()).squeeze(-1)
    return out, lse
