"""The truth that engines are held against: an eager Hugging Face forward and the plain formulas.

The attention comes from ``output_attentions`` in float32; from there on everything is float64 and written out
as design section 2 says it, sharing no code with cb_kernels but the plain-Python keep law.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cb_kernels.keep import keep_positions_reference
from cb_sglang.spec import SPAN, ScoringSpec

TOLERANCE = 1e-4
TIE = 1e-5
_KEPT_FORWARDS = 12


@dataclass(frozen=True)
class Expected:
    """What a query must answer. ``margin``: how clearly the last kept position wins over the first dropped one."""

    positions: list[int]
    span_scores: list[float]
    margin: float


class HfReference:
    """One model, float32, eager attention."""

    def __init__(self, path: Path) -> None:
        config = AutoConfig.from_pretrained(path)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.full_layers = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._forwards: OrderedDict[tuple[int, ...], list[Tensor]] = OrderedDict()

    @torch.inference_mode()
    def attentions(self, ids: Sequence[int]) -> list[Tensor]:
        """Attention [H, N, N] of each full-attention layer."""
        key = tuple(ids)
        if key not in self._forwards:
            output = self.model.model(torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
            recorded = output.attentions
            # Layers that have no attention at all are left out of it.
            if len(recorded) > len(self.full_layers):
                recorded = [recorded[n] for n in self.full_layers]
            self._forwards[key] = [layer[0] for layer in recorded]
            while len(self._forwards) > _KEPT_FORWARDS:
                self._forwards.popitem(last=False)
        return self._forwards[key]

    def scores(self, sender: Sequence[int], query: Sequence[int], spec: ScoringSpec) -> Tensor:
        """S[t] of design section 2 with position 0 pinned, float64 [T]."""
        length, kv_heads = len(sender), self.model.config.num_key_value_heads
        rows = slice(length + spec.vote_start, length + spec.vote_stop)
        votes = torch.zeros(length, dtype=torch.float64)
        energy, row_energy = votes.clone(), votes.clone()
        for layer in self.attentions([*sender, *query]):
            w = layer[:, rows, :length].double()  # [H, R, T]
            votes += w.mean(dim=(0, 1))
            grouped = w.view(kv_heads, -1, *w.shape[1:]).mean(dim=1)  # [Hkv, R, T]
            energy += (256 * _pool(grouped.mean(dim=1))).square().sum(dim=0)
            row_energy += (256 * _pool(grouped)).square().mean(dim=1).sum(dim=0)
        score = _pool(votes[None])[0]
        if spec.selector == "cacheback":
            tiny = torch.finfo(torch.float32).tiny
            ratio = (row_energy / energy.clamp_min(tiny)).clamp_min(tiny)
            score = score * torch.where((energy == 0) & (row_energy == 0), 1.0, ratio).square()
        score[0] = score.max()
        return score

    def expected(self, sender: Sequence[int], query: Sequence[int], spec: ScoringSpec) -> Expected:
        """The answer to one query."""
        scores = self.scores(sender, query, spec)
        length = len(sender)
        protected = [0, *range(length - spec.latent_len, length)]
        positions = keep_positions_reference(scores.tolist(), spec.budget, protected, span=SPAN)
        spans = [float(span.mean()) for span in scores.split(SPAN)]
        return Expected(positions, spans, _margin(scores.tolist(), spans, positions))

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Log-probabilities [len(output), vocabulary] at each place where ``output`` was chosen."""
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = self.model(ids, logits_to_keep=len(output), use_cache=False).logits[0]
        return logits.double().log_softmax(dim=-1)


def assert_expected(result: dict[str, object], expected: Expected) -> None:
    """Same positions, span scores within a relative 1e-4. Seeds whose selection is a near tie are refused."""
    assert "error" not in result, result
    assert expected.margin > TIE, f"margin {expected.margin:.1e}: this seed's selection is a tie, pick another"
    assert result["positions"] == expected.positions
    assert_close(result["span_scores"], expected.span_scores, TOLERANCE)  # type: ignore[arg-type]


def assert_close(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    """Equal length, and relative error below ``tolerance`` everywhere."""
    assert len(found) == len(wanted)
    worst = max(range(len(wanted)), key=lambda n: abs(found[n] - wanted[n]) / wanted[n])
    error = abs(found[worst] - wanted[worst]) / wanted[worst]
    assert error < tolerance, f"relative error {error:.1e} at {worst}: {found[worst]} against {wanted[worst]}"


def _pool(x: Tensor) -> Tensor:
    return F.max_pool1d(x, kernel_size=7, stride=1, padding=3)


def _margin(scores: list[float], spans: list[float], positions: list[int]) -> float:
    """The smallest relative gap that decides the selection. Exact ties are decided by the keep law alike."""
    kept = set(positions)
    taken = [sum(p in kept for p in range(n * SPAN, min((n + 1) * SPAN, len(scores)))) for n in range(len(spans))]
    sizes = [min(SPAN, len(scores) - n * SPAN) for n in range(len(spans))]
    order = sorted(range(len(spans)), key=lambda n: spans[n], reverse=True)
    gaps = [math.inf]
    for rank in range(len(order) - 1):
        above, below = order[rank], order[rank + 1]
        if taken[above] != taken[below] or 0 < taken[above] < sizes[above]:
            gaps.append((spans[above] - spans[below]) / spans[above])
    for n, size in enumerate(sizes):
        if 0 < taken[n] < size:
            inside = sorted(set(scores[n * SPAN : n * SPAN + size]), reverse=True)
            gaps += [(inside[0] - inside[1]) / inside[0]] if len(inside) > 1 else []
    return min(gaps)
