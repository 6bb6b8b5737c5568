"""From three sums over the attention of a query's rows to the score of each sender position.

The sums (``Moments``) are all that ever leaves the attention kernels. The formulas are those of the CacheBack
score, arXiv 2609.32046, restated in section 2 of the design page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError

POOL_WIDTH = 7
POOL_REACH = POOL_WIDTH // 2

# Attention is multiplied by this before it is squared, so that the squares of small weights stay clear of
# float32's underflow. It cancels in every score.
ENERGY_SCALE = 256.0

MAX_ORDER = 8.0


@dataclass(frozen=True, slots=True)
class Moments:
    """What one query's rows say about the T positions of one sender, summed over the scored layers.

    With ``A[l, c, i, t]`` the attention of row i on position t, averaged over the query heads of KV head c:

    * ``votes`` float32 [T]: sum over layers of the mean of A over KV heads and rows (not pooled).
    * ``energy`` float32 [T]: sum over layers and KV heads of ``(256 * maxpool7(mean_i A))^2``.
    * ``row_energy`` float32 [T]: sum over layers and KV heads of ``mean_i (256 * maxpool7(A_i))^2``.

    Energies of another order p have p for the exponent 2 and ``energy_scale(p)`` for 256.
    """

    votes: Tensor
    energy: Tensor
    row_energy: Tensor

    def __add__(self, other: Moments) -> Moments:
        """Sum over two disjoint sets of layers."""
        return Moments(self.votes + other.votes, self.energy + other.energy, self.row_energy + other.row_energy)


def check_order(order: float) -> None:
    """Raise ``ScoringInputError`` unless ``order`` is one that float32 energies can carry: 1 < order <= 8."""
    if not 1.0 < order <= MAX_ORDER:
        raise ScoringInputError(
            f"order must be greater than 1 and at most {MAX_ORDER:g} (the paper uses 2); got {order}"
        )


def energy_scale(order: float) -> float:
    """What attention is multiplied by before it is raised to the power ``order``; a power of two.

    Up to order 2 that is 256, as in the paper's implementation. Higher powers underflow sooner, so they get the
    largest scale whose power stays within 2^96: float32 then has room for sums of 2^31 such terms, and attention
    down to 4e-9 (order 8) or 2e-17 (order 4) still counts.
    """
    return ENERGY_SCALE if order <= 2.0 else 2.0 ** math.floor(96.0 / order)


def max_pool7(x: Tensor) -> Tensor:
    """Running maximum over a window of 7 along the last dimension, stride 1, same length as ``x``.

    Positions outside ``x`` never win. Any shape [..., T] with T >= 1, any floating dtype.
    """
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ScoringInputError(f"max_pool7 needs at least one position; got shape {tuple(x.shape)}")
    length = x.shape[-1]
    padded = torch.nn.functional.pad(x, (POOL_REACH, POOL_REACH), value=float("-inf"))
    # Windows of 2, then 4, then two overlapping windows of 4 make a window of 7.
    two = torch.maximum(padded[..., :-1], padded[..., 1:])
    four = torch.maximum(two[..., :-2], two[..., 2:])
    return torch.maximum(four[..., :length], four[..., POOL_REACH : POOL_REACH + length])


def mean_query_score(moments: Moments) -> Tensor:
    """Mean query attention: the pooled votes, float32 [T]. Position 0 is not pinned (see ``pin_first``)."""
    return max_pool7(moments.votes)


def cacheback_score(moments: Moments, *, order: float = 2.0, alpha: float = 2.0) -> Tensor:
    """The CacheBack score ``maxpool7(votes) * rho^alpha``, float32 [T]; position 0 is not pinned.

    ``rho = (row_energy / energy)^(1 / (order - 1))`` exceeds 1 where a few rows, not all, lean on a position.
    It is 1 where both energies are 0. ``order`` is the order p that the energies were accumulated with (see
    ``plan_scoring``). ``alpha`` = 0 gives ``mean_query_score``. Scores beyond float32 become its largest number.

    Raises ``ScoringInputError`` unless 1 < order <= 8.
    """
    check_order(order)
    energy, row_energy = moments.energy, moments.row_energy
    tiny = torch.finfo(torch.float32).tiny
    ratio = (row_energy / energy.clamp_min(tiny)).clamp_min(tiny)
    ratio = torch.where((energy == 0) & (row_energy == 0), torch.ones_like(ratio), ratio)
    largest = torch.finfo(torch.float32).max
    boost = ratio.pow(alpha / (order - 1.0)).clamp_max(largest)
    return (mean_query_score(moments) * boost).clamp_max(largest)


def pin_first(score: Tensor) -> Tensor:
    """A copy of ``score`` [..., T] whose position 0 holds the maximum along T, so that it ranks first."""
    if score.ndim == 0 or score.shape[-1] == 0:
        raise ScoringInputError(f"pin_first needs at least one position; got shape {tuple(score.shape)}")
    pinned = score.clone()
    pinned[..., 0] = score.amax(dim=-1)
    return pinned
