"""The float64 definition, checked against sums written out as loops, and the score formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments, cacheback_score, max_pool7, mean_query_score, pin_first
from cb_kernels.reference import layer_lse, layer_moments


def _loops(
    q: Tensor, k_sender: Tensor, k_own: Tensor, scale: float, own_visible: int, sink_free: bool = False
) -> tuple[list[float], list[float], list[float]]:
    """Votes, energy and row energy straight from the formulas, one number at a time."""
    rows, heads, _ = q.shape
    length, kv_heads, _ = k_sender.shape
    group = heads // kv_heads
    attention = [[[0.0] * length for _ in range(rows)] for _ in range(kv_heads)]
    for h in range(heads):
        c = h // group
        for i in range(rows):
            seen = [k_sender[t, c] for t in range(length)] + [k_own[s, c] for s in range(own_visible + i + 1)]
            logits = [scale * float(q[i, h] @ k) for k in seen]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            for t in range(length):
                if not (sink_free and t == 0):
                    attention[c][i][t] += math.exp(logits[t] - top) / total / group

    def pool(x: list[float], t: int) -> float:
        return max(x[max(0, t - 3) : t + 4])

    votes, energy, row_energy = [0.0] * length, [0.0] * length, [0.0] * length
    for c in range(kv_heads):
        mean = [sum(attention[c][i][t] for i in range(rows)) / rows for t in range(length)]
        for t in range(length):
            votes[t] += mean[t] / kv_heads
            energy[t] += (256 * pool(mean, t)) ** 2
            row_energy[t] += sum((256 * pool(attention[c][i], t)) ** 2 for i in range(rows)) / rows
    return votes, energy, row_energy


@pytest.mark.parametrize("sink_free", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "rows", "length", "visible"), [(4, 2, 5, 19, 0), (3, 1, 2, 4, 3)])
def test_layer_moments_is_the_definition(
    heads: int, kv_heads: int, rows: int, length: int, visible: int, sink_free: bool
) -> None:
    torch.manual_seed(1)
    q = torch.randn(rows, heads, 8, dtype=torch.float64)
    k_sender = torch.randn(length, kv_heads, 8, dtype=torch.float64)
    k_own = torch.randn(rows + visible + 1, kv_heads, 8, dtype=torch.float64)
    got = layer_moments(q, k_sender, k_own, scale=0.7, own_visible=visible, sink_free=sink_free)
    want = _loops(q, k_sender, k_own, 0.7, visible, sink_free)
    for have, expected in zip((got.votes, got.energy, got.row_energy), want, strict=True):
        torch.testing.assert_close(have, torch.tensor(expected), rtol=1e-6, atol=0)


def test_later_own_keys_are_invisible() -> None:
    torch.manual_seed(2)
    q, k_sender = torch.randn(3, 2, 8), torch.randn(9, 1, 8)
    k_own = torch.randn(5, 1, 8)
    changed = k_own.clone()
    changed[4] = 100.0  # row 2 sees own keys 0..3 when one key precedes the rows
    before = layer_moments(q, k_sender, k_own, scale=1.0, own_visible=1)
    after = layer_moments(q, k_sender, changed, scale=1.0, own_visible=1)
    assert torch.equal(before.votes, after.votes)
    assert not torch.equal(before.votes, layer_moments(q, k_sender, changed, scale=1.0, own_visible=2).votes)


def test_vote_rows_equals_a_query_of_those_rows() -> None:
    torch.manual_seed(3)
    q, k_sender, k_own = torch.randn(6, 4, 8), torch.randn(30, 2, 8), torch.randn(6, 2, 8)
    part = layer_moments(q, k_sender, k_own, scale=0.5, own_visible=0, vote_rows=slice(2, 5))
    alone = layer_moments(q[2:5], k_sender, k_own, scale=0.5, own_visible=2)
    torch.testing.assert_close(part.row_energy, alone.row_energy, rtol=1e-6, atol=0)
    torch.testing.assert_close(part.votes, alone.votes, rtol=1e-6, atol=0)


def test_lse_normalises_the_votes() -> None:
    """exp(logit - lse) summed over what a row sees is 1."""
    torch.manual_seed(4)
    q, k_sender, k_own = torch.randn(4, 2, 8), torch.randn(12, 1, 8), torch.randn(4, 1, 8)
    lse = layer_lse(q, k_sender, k_own, scale=0.3, own_visible=0)
    for i in range(4):
        seen = torch.cat([k_sender, k_own[: i + 1]])[:, 0]
        mass = torch.exp(0.3 * seen @ q[i].T - lse[i]).sum(dim=0)
        torch.testing.assert_close(mass, torch.ones(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 50])
def test_max_pool7_is_the_windowed_maximum(length: int) -> None:
    torch.manual_seed(length)
    x = torch.randn(3, length)
    want = torch.stack([x[:, max(0, t - 3) : t + 4].amax(dim=1) for t in range(length)], dim=1)
    assert torch.equal(max_pool7(x), want)


def test_score_orders_and_exponents() -> None:
    moments = Moments(torch.tensor([0.5, 0.1]), torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]))
    pooled = torch.tensor([0.5, 0.5])
    torch.testing.assert_close(mean_query_score(moments), pooled)
    torch.testing.assert_close(cacheback_score(moments), pooled * torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(cacheback_score(moments, alpha=0.0), pooled)
    torch.testing.assert_close(cacheback_score(moments, order=3.0), pooled * torch.tensor([2.0, 1.0]))


def test_pin_first_copies() -> None:
    score = torch.tensor([[1.0, 5.0, 2.0], [3.0, 1.0, 0.0]])
    assert pin_first(score).tolist() == [[5.0, 5.0, 2.0], [3.0, 1.0, 0.0]]
    assert score[0, 0] == 1.0


def test_bad_inputs_are_refused() -> None:
    q, k_sender, k_own = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(3, 2, 8)
    with pytest.raises(ScoringInputError, match="own keys"):
        layer_moments(q, k_sender, k_own, scale=1.0, own_visible=1)
    with pytest.raises(ScoringInputError, match="multiple"):
        layer_moments(q[:, :3], k_sender, k_own, scale=1.0, own_visible=0)
    with pytest.raises(ScoringInputError, match="differ"):
        layer_moments(q, k_sender[..., :4], k_own, scale=1.0, own_visible=0)
    with pytest.raises(ScoringInputError, match="selects none"):
        layer_moments(q, k_sender, k_own, scale=1.0, own_visible=0, vote_rows=slice(3, 9))
    with pytest.raises(ScoringInputError, match="order"):
        cacheback_score(Moments(*torch.ones(3, 4)), order=1.0)
    with pytest.raises(ScoringInputError, match="at least one position"):
        max_pool7(torch.empty(0))
    with pytest.raises(ScoringInputError, match="at least one position"):
        pin_first(torch.empty(2, 0))
