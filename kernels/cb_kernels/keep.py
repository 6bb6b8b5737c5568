"""The keep law: which positions of a sender fit into a budget. Every selector is cut with it.

Section 2 of the design page (arXiv 2609.32046): tile the positions into spans, take whole spans by mean
score, and let the span that overshoots give one contiguous piece around its best position.
``keep_positions_reference`` says it in plain Python; ``keep_positions`` does it for a whole batch on the
device without a host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.errors import BudgetError

DEFAULT_SPAN = 16

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class KeepResult:
    """Kept positions of M queries.

    * ``mask`` bool [M, Tmax]: True where kept.
    * ``positions`` int32 [M, Bmax]: the kept positions in ascending order, then -1.
    * ``count`` int64 [M]: how many are kept.
    """

    mask: Tensor
    positions: Tensor
    count: Tensor


def check_budget(budget: int, length: int, protected_count: int) -> None:
    """Raise ``BudgetError`` unless ``budget`` positions out of ``length`` can hold the protected ones.

    Plain integers, so that a caller can refuse before any device work.
    """
    if length < 1:
        raise BudgetError(f"a sender needs at least one position; got {length}")
    if budget < 1:
        raise BudgetError(f"a budget must be at least 1 position; got {budget}")
    if budget < protected_count:
        raise BudgetError(
            f"budget {budget} is smaller than the {protected_count} protected positions (position 0 and the "
            f"sender's own latent rows); use at least {protected_count}"
        )


def keep_positions_reference(
    scores: Sequence[float],
    budget: int,
    protected: Sequence[int],
    excluded: Sequence[int] = (),
    span: int = DEFAULT_SPAN,
) -> list[int]:
    """Kept positions of one query, ascending: exactly ``min(budget, T - excluded)`` of them.

    ``scores`` are T float32 values (NaN ranks lowest). ``protected`` positions are always kept and count;
    ``excluded`` ones are never kept and take no part in span means; a position in both is excluded.
    The span that overshoots gives a run of its free positions (neighbours but for taken ones in between)
    whose centre is nearest the span's best score; ties: the shorter run, then the lower start.

    Raises ``BudgetError`` for a budget too small for the protected positions.
    """
    length = len(scores)
    barred = set(excluded)
    kept = set(protected) - barred
    if span < 1:
        raise BudgetError(f"span must be at least 1 position; got {span}")
    if any(not 0 <= p < length for p in kept | barred):
        raise BudgetError(f"protected and excluded positions must lie in 0..{length - 1}")
    check_budget(budget, length, len(kept))
    values = [_finite(s) for s in scores]

    spans = [range(start, min(start + span, length)) for start in range(0, length, span)]

    def mean(positions: range) -> float:
        total, count = 0.0, 0
        for p in positions:
            if p not in barred:
                total += values[p]
                count += 1
        return total / count if count else float("-inf")

    for positions in sorted(spans, key=mean, reverse=True):  # a stable sort: equal means keep their order
        free = [p for p in positions if p not in kept and p not in barred]
        room = budget - len(kept)
        if len(free) <= room:
            kept.update(free)
            continue
        if room > 0:
            # A protected position may be the peak: what lies around it is what the query asked for.
            best = max((p for p in positions if p not in barred), key=lambda p: values[p])  # first of equals
            ends = list(zip(free, free[room - 1 :], strict=False))  # first and last position of every run
            nearest = min((abs(a + b - 2 * best), b - a, a, i) for i, (a, b) in enumerate(ends))
            kept.update(free[nearest[-1] : nearest[-1] + room])
        break
    return sorted(kept)


def keep_positions(
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    *,
    max_budget: int,
    protected: Tensor,
    excluded: Tensor | None = None,
    span: int = DEFAULT_SPAN,
) -> KeepResult:
    """The keep law for M queries at once, on the device of ``scores``, without a host sync.

    ``scores`` float32 [M, Tmax], ``lengths`` and ``budgets`` integer [M], ``protected`` and ``excluded`` bool
    [M, Tmax]; what lies at or beyond a query's length is ignored. ``max_budget`` is the host's upper bound on
    ``budgets`` and the width of ``positions``. Equal to ``keep_positions_reference`` row by row, bit for bit.

    A budget too small for the protected positions cannot be seen from here: call ``check_budget`` first.
    (Without it such a row keeps the protected positions, and ``count`` exceeds the budget.)
    Raises ``BudgetError`` for shapes or sizes that do not fit.
    """
    _check_batch(scores, lengths, budgets, max_budget, protected, excluded, span)
    rows, length = scores.shape
    device = scores.device
    ranked = _rank_spans(scores, lengths, excluded, span)
    values, usable, order = ranked.values, ranked.usable, ranked.order
    spans = order.shape[1]
    kept = _pad(protected, usable.shape[1]) & usable
    free = usable & ~kept

    free_count = free.view(rows, spans, span).sum(dim=2)
    ranked_free = free_count.gather(1, order)
    after = ranked_free.cumsum(dim=1)
    before = after - ranked_free
    room = (budgets.to(torch.int64) - kept.sum(dim=1))[:, None]
    whole = torch.zeros_like(after, dtype=torch.bool).scatter(1, order, after <= room)
    kept = kept | (free & whole.repeat_interleave(span, dim=1))

    # At most one span overshoots; where none does, ``need`` is 0 and the run below is empty.
    overshoots = (before < room) & (after > room)
    rank = overshoots.to(torch.int8).argmax(dim=1, keepdim=True)
    cut = order.gather(1, rank)
    need = torch.where(overshoots.any(dim=1, keepdim=True), room - before.gather(1, rank), 0)
    piece = _best_run(values, usable, free, cut, need, span)
    at = cut * span + torch.arange(span, device=device)
    kept = kept.scatter(1, at, kept.gather(1, at) | piece)[:, :length]

    count = kept.sum(dim=1)
    slot = torch.where(kept, kept.cumsum(dim=1) - 1, max_budget).clamp_max(max_budget)
    positions = torch.full((rows, max_budget + 1), -1, dtype=torch.int32, device=device)
    index = torch.arange(length, dtype=torch.int32, device=device).expand(rows, length)
    positions = positions.scatter(1, slot, index)[:, :max_budget].contiguous()
    return KeepResult(mask=kept, positions=positions, count=count)


@dataclass(frozen=True, slots=True)
class _RankedSpans:
    """``values`` and ``usable`` [M, spans * span]; ``total`` float64 and ``order``, best span first, [M, spans]."""

    values: Tensor
    usable: Tensor
    total: Tensor
    order: Tensor


def _rank_spans(scores: Tensor, lengths: Tensor, excluded: Tensor | None, span: int) -> _RankedSpans:
    rows, length = scores.shape
    device = scores.device
    spans = -(-length // span)
    padded = spans * span

    inside = torch.arange(padded, device=device) < lengths.to(torch.int64)[:, None]
    usable = inside if excluded is None else inside & ~_pad(excluded, padded)

    # Summing in float64, left to right, gives on every device the very number the plain loop gives, so that
    # ties and near ties fall alike. Adding 0.0 turns -0.0 into 0.0, which a radix sort would rank apart.
    values = torch.nan_to_num(scores.float(), nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    values = _pad(values, padded) + 0.0
    weighed = torch.where(usable, values.double(), 0.0).view(rows, spans, span)
    total = torch.zeros(rows, spans, dtype=torch.float64, device=device)
    for offset in range(span):
        total = total + weighed[:, :, offset]
    usable_count = usable.view(rows, spans, span).sum(dim=2)
    means = torch.where(usable_count > 0, total / usable_count.clamp_min(1), float("-inf"))
    order = torch.sort(means + 0.0, dim=1, descending=True, stable=True).indices
    return _RankedSpans(values, usable, total, order)


def coverage_budgets(
    scores: Tensor,
    lengths: Tensor,
    caps: Tensor,
    coverage: Tensor,
    *,
    protected: Tensor,
    excluded: Tensor | None = None,
    span: int = DEFAULT_SPAN,
) -> Tensor:
    """The smallest budgets, int64 [M], whose spans hold the share ``coverage`` [M] (0..1) of the scores' sum.

    Spans are taken whole, in the keep law's order; protected positions count. Scores below 0 hold nothing. Never more
    than ``caps`` [M], nor fewer than the protected positions. Other arguments as in ``keep_positions``; no host sync.
    """
    ranked = _rank_spans(scores, lengths, excluded, span)
    rows, spans = ranked.order.shape
    kept = _pad(protected, ranked.usable.shape[1]) & ranked.usable
    held = torch.where(ranked.usable, ranked.values.double().clamp_min(0.0), 0.0)
    free_mass = torch.where(kept, 0.0, held).view(rows, spans, span).sum(dim=2).gather(1, ranked.order)
    free_count = (ranked.usable & ~kept).view(rows, spans, span).sum(dim=2).gather(1, ranked.order)
    always = torch.where(kept, held, 0.0).sum(dim=1, keepdim=True)
    # Column n: what the first n spans and the protected positions hold.
    mass = torch.cat([always, always + free_mass.cumsum(dim=1)], dim=1)
    size = torch.nn.functional.pad(free_count.cumsum(dim=1), (1, 0)) + kept.sum(dim=1, keepdim=True)
    # The last column is the whole sum up to rounding, so that a coverage of 1 ends there at the latest.
    enough = mass >= coverage.double()[:, None] * mass[:, -1:]
    wanted = size.gather(1, enough.to(torch.int8).argmax(dim=1, keepdim=True))[:, 0]
    return torch.minimum(wanted, caps.to(torch.int64)).clamp_min(1)


def _best_run(values: Tensor, usable: Tensor, free: Tensor, cut: Tensor, need: Tensor, span: int) -> Tensor:
    """The run of ``need`` [M, 1] free positions of span ``cut`` [M, 1] nearest its peak: bool [M, span]."""
    offsets = torch.arange(span, device=values.device)
    at = cut * span + offsets
    is_free, is_usable = free.gather(1, at), usable.gather(1, at)
    # argmax does not promise the first of equals; the smallest offset among the maxima does.
    candidates = torch.where(is_usable, values.gather(1, at), float("-inf"))
    at_maximum = is_usable & (candidates == candidates.amax(dim=1, keepdim=True))
    peak = torch.where(at_maximum, offsets, span).amin(dim=1, keepdim=True)

    rank = is_free.cumsum(dim=1) - 1
    free_offsets = torch.where(is_free, offsets, span).sort(dim=1).values  # [M, span]: i-th free offset
    last_rank = offsets + need - 1
    first, last = free_offsets, free_offsets.gather(1, last_rank.clamp(0, span - 1))
    valid = last_rank < is_free.sum(dim=1, keepdim=True)
    # Three keys in one integer: distance of the centre (doubled), reach, start.
    base = 2 * span + 1
    key = ((first + last - 2 * peak).abs() * base + (last - first)) * base + first
    start = torch.where(valid, key, torch.iinfo(torch.int64).max).argmin(dim=1, keepdim=True)
    return is_free & (rank >= start) & (rank < start + need)


def _finite(score: float) -> float:
    if score != score:
        return -_LARGEST
    return min(max(float(score), -_LARGEST), _LARGEST)


def _pad(x: Tensor, width: int) -> Tensor:
    """``x`` [M, T] widened to [M, width] with zeros (False)."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


def _check_batch(
    scores: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    max_budget: int,
    protected: Tensor,
    excluded: Tensor | None,
    span: int,
) -> None:
    if scores.ndim != 2 or scores.shape[0] < 1 or scores.shape[1] < 1:
        raise BudgetError(f"scores must be [M, Tmax] with M, Tmax >= 1; got {tuple(scores.shape)}")
    if lengths.shape != (scores.shape[0],) or budgets.shape != (scores.shape[0],):
        raise BudgetError(
            f"lengths and budgets must be [{scores.shape[0]}]; got {tuple(lengths.shape)} and {tuple(budgets.shape)}"
        )
    for name, mask in (("protected", protected), ("excluded", excluded)):
        if mask is not None and (mask.dtype != torch.bool or mask.shape != scores.shape):
            raise BudgetError(f"{name} must be bool {tuple(scores.shape)}; got {mask.dtype} {tuple(mask.shape)}")
    if max_budget < 1 or span < 1:
        raise BudgetError(f"max_budget and span must be at least 1; got {max_budget} and {span}")
