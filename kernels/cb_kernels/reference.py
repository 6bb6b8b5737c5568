"""The definition, written plainly: the whole attention matrix in float64, then the sums.

Slow and memory hungry on purpose. Every kernel is tested against this file; nothing serves from it.
Formulas: arXiv 2609.32046, restated in section 2 of the design page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments, check_order, energy_scale, max_pool7


def layer_moments(
    q: Tensor,
    k_sender: Tensor,
    k_own: Tensor,
    *,
    scale: float,
    own_visible: int,
    dtype: torch.dtype = torch.float64,
    vote_rows: slice | None = None,
    sink_free: bool = False,
    order: float = 2.0,
) -> Moments:
    """Moments of one layer, float32 [T] each.

    ``q`` [R, H, D] and the keys ``k_sender`` [T, Hkv, D], ``k_own`` [R_own, Hkv, D] are post-RoPE and
    unscaled. Row i sees all T sender keys and ``k_own[: own_visible + i + 1]``: ``own_visible`` own keys come
    before the first row of ``q``. ``vote_rows`` picks the rows that vote (all of them by default).
    ``sink_free`` zeroes the attention on position 0 before pooling. ``order`` is the exponent of the energies.

    Raises ``ScoringInputError`` if the shapes do not fit together.
    """
    check_order(order)
    rows, heads, _ = _check(q, k_sender, k_own, own_visible)
    length, kv_heads = k_sender.shape[0], k_sender.shape[1]
    logits = _logits(q, k_sender, k_own, scale=scale, own_visible=own_visible, dtype=dtype)
    weights = torch.softmax(logits, dim=-1)[..., :length]  # [H, R, T]
    grouped = weights.reshape(kv_heads, heads // kv_heads, rows, length).mean(dim=1)  # [Hkv, R, T]
    if vote_rows is not None:
        grouped = grouped[:, vote_rows]
        if grouped.shape[1] == 0:
            raise ScoringInputError(f"vote_rows {vote_rows} selects none of the {rows} rows")
    if sink_free:
        grouped = grouped.clone()
        grouped[..., 0] = 0
    row_mean = grouped.mean(dim=1)  # [Hkv, T]
    size = energy_scale(order)
    energy = (size * max_pool7(row_mean)).pow(order).sum(dim=0)
    row_energy = (size * max_pool7(grouped)).pow(order).mean(dim=1).sum(dim=0)
    return Moments(row_mean.mean(dim=0).float(), energy.float(), row_energy.float())


def layer_lse(
    q: Tensor,
    k_sender: Tensor,
    k_own: Tensor,
    *,
    scale: float,
    own_visible: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Natural-log log-sum-exp of the scaled logits over all that each row sees, float32 [R, H].

    Arguments as in ``layer_moments``.
    """
    _check(q, k_sender, k_own, own_visible)
    logits = _logits(q, k_sender, k_own, scale=scale, own_visible=own_visible, dtype=dtype)
    return torch.logsumexp(logits, dim=-1).transpose(0, 1).float().contiguous()


def _logits(
    q: Tensor, k_sender: Tensor, k_own: Tensor, *, scale: float, own_visible: int, dtype: torch.dtype
) -> Tensor:
    """Scaled logits [H, R, T + R_own] with the keys a row may not see at minus infinity."""
    rows, heads, _ = q.shape
    length, own = k_sender.shape[0], k_own.shape[0]
    keys = torch.cat([k_sender, k_own]).to(dtype).repeat_interleave(heads // k_sender.shape[1], dim=1)
    logits = torch.einsum("rhd,thd->hrt", q.to(dtype), keys) * scale
    last_seen = own_visible + torch.arange(rows, device=q.device)
    hidden = torch.arange(own, device=q.device)[None, :] > last_seen[:, None]
    logits[..., length:].masked_fill_(hidden, float("-inf"))
    return logits


def _check(q: Tensor, k_sender: Tensor, k_own: Tensor, own_visible: int) -> tuple[int, int, int]:
    if q.ndim != 3 or k_sender.ndim != 3 or k_own.ndim != 3:
        raise ScoringInputError("q, k_sender and k_own must be [rows, heads, head_dim]")
    rows, heads, head_dim = q.shape
    if rows == 0 or k_sender.shape[0] == 0:
        raise ScoringInputError("scoring needs at least one row and one sender position")
    if k_sender.shape[1:] != k_own.shape[1:] or k_sender.shape[2] != head_dim:
        raise ScoringInputError(
            f"head shapes differ: q {tuple(q.shape)}, k_sender {tuple(k_sender.shape)}, k_own {tuple(k_own.shape)}"
        )
    if heads % k_sender.shape[1]:
        raise ScoringInputError(f"{heads} query heads are not a multiple of {k_sender.shape[1]} KV heads")
    if own_visible < 0 or own_visible + rows > k_own.shape[0]:
        raise ScoringInputError(
            f"rows {own_visible}..{own_visible + rows - 1} need as many own keys; k_own has {k_own.shape[0]}"
        )
    return rows, heads, head_dim
