"""Selectors beyond the plain ones, and sender statistics, from a running engine against Hugging Face's attention."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from engine_cases import TINY, on_engines, tokens
from engine_client import EngineClient, scored
from hf_reference import TIE, TOLERANCE, HfReference, assert_close
from torch import Tensor

from cb_kernels.keep import keep_positions_reference
from cb_kernels.statistics import get, kvzip_chunks, kvzip_tail
from cb_sglang.spec import SPAN, ScoringSpec, StatisticSpec

SENDER, QUERY, BUDGET = 301, 20, 60


def pool(x: Tensor) -> Tensor:
    return F.max_pool1d(x, kernel_size=7, stride=1, padding=3)


def cacheback(rows: list[Tensor], kv_heads: int, *, order: float, alpha: float) -> Tensor:
    """The score from each layer's attention [H, R, T], float64."""
    votes = sum(w.mean(dim=(0, 1)) for w in rows)
    grouped = [w.view(kv_heads, -1, *w.shape[1:]).mean(dim=1) for w in rows]
    energy = sum(pool(a.mean(dim=1)).pow(order).sum(dim=0) for a in grouped)
    row_energy = sum(pool(a).pow(order).mean(dim=1).sum(dim=0) for a in grouped)
    return pool(votes[None])[0] * (row_energy / energy).pow(alpha / (order - 1))


@on_engines(*TINY, "parallel")
@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("cacheback", {"sink_free": True}),
        ("cacheback", {"order": 3.0, "alpha": 1.0}),
        ("mean_query", {"sink_free": True}),
        ("answer_cue", {}),
    ],
)
def test_selector_options(
    engine: EngineClient, reference: HfReference, selector: str, options: dict[str, float]
) -> None:
    sender, query = list(tokens(SENDER, 5)), list(tokens(QUERY, 6))
    spec = ScoringSpec(SENDER, 2, QUERY - 5, BUDGET, selector=selector, want_scores=True, **options)
    engine.prefill(sender)
    (answer,) = engine.generate(
        input_ids=[[*sender, *query]], sampling_params=[{"max_new_tokens": 1, "custom_params": spec.to_wire()}]
    )
    result, _ = scored(answer)
    assert "error" not in result, result

    kv_heads = reference.model.config.num_key_value_heads
    layers = [w.double()[:, SENDER:, :SENDER].clone() for w in reference.attentions([*sender, *query])]
    sink_free = spec.sink_free or selector == "answer_cue"
    if sink_free:
        for w in layers:
            w[..., 0] = 0
    voting = [w[:, spec.vote_start : spec.vote_stop] for w in layers]
    alpha = 0.0 if selector == "mean_query" else spec.alpha
    wanted = cacheback(voting, kv_heads, order=spec.order, alpha=alpha)
    if selector == "answer_cue":
        wanted = wanted * pool(sum(w[:, -1:].mean(dim=(0, 1)) for w in layers)[None])[0]
    if not sink_free:
        wanted[0] = wanted.max()
    spans = [float(part.mean()) for part in wanted.split(SPAN)]
    assert_close(result["span_scores"], spans, TOLERANCE)
    ranked = sorted(spans, reverse=True)
    assert min((a - b) / a for a, b in itertools.pairwise(ranked[:7])) > TIE
    assert result["positions"] == keep_positions_reference(wanted.tolist(), BUDGET, [0], span=SPAN)


def measured(engine: EngineClient, ids: list[int], spec: StatisticSpec) -> list[float]:
    (answer,) = engine.generate(
        input_ids=[ids], sampling_params=[{"max_new_tokens": 1, "custom_params": spec.to_wire()}]
    )
    result, cached = scored(answer)
    assert "error" not in result, result
    assert cached <= spec.first_row
    return result["scores"]


@on_engines(*TINY, "parallel")
@pytest.mark.parametrize("name", ["h2o", "snapkv", "chunkkv"])
def test_statistics_of_the_senders_own_rows(engine: EngineClient, reference: HfReference, name: str) -> None:
    """Measured over a warm sender; chunked prefill splits the rows of h2o."""
    sender = list(tokens(SENDER, 7))
    engine.prefill(sender)
    scores = measured(engine, sender, StatisticSpec(SENDER, name, get(name).first_row(SENDER, 0)))
    layers = [w.double() for w in reference.attentions(sender)]
    if name == "h2o":
        wanted = sum(w.sum(dim=1).mean(dim=0) for w in layers)
    elif name == "snapkv":
        wanted = sum(w[:, -32:].mean(dim=(0, 1)) for w in layers)
    else:
        kv_heads = reference.model.config.num_key_value_heads
        seen = [w[:, -32:, : SENDER - 32].mean(dim=1).view(kv_heads, -1, SENDER - 32).mean(dim=1) for w in layers]
        seen = [F.avg_pool1d(w, 5, 1, 2) for w in seen]
        peak = sum(w.max() for w in seen) / len(seen) + 1.0
        wanted = torch.cat([torch.stack(seen).mean(dim=(0, 1)), peak.expand(32)])
    assert_close(scores, wanted.tolist(), TOLERANCE)


@on_engines(*TINY, "parallel")
def test_kvzip_repeats_the_text(engine: EngineClient, reference: HfReference) -> None:
    sender, instruction = list(tokens(SENDER, 8)), [7, 8, 9]
    engine.prefill(sender)
    kv_heads = reference.model.config.num_key_value_heads
    for start, stop in kvzip_chunks(SENDER, 0, size=200):
        ids = [*sender, *kvzip_tail(instruction, sender, (start, stop))]
        spec = StatisticSpec(SENDER, "kvzip", SENDER, chunk_start=start, chunk_stop=stop)
        scores = measured(engine, ids, spec)
        total = torch.zeros(stop - start, dtype=torch.float64)
        layers = reference.attentions(ids)
        for layer in layers:
            w = layer.double()[:, SENDER:]  # the causal softmax, renormalised over what KVzip looks at
            seen = w[..., 0] + w[..., start:stop].sum(dim=-1) + w[..., SENDER:].sum(dim=-1)
            share = w[..., start:stop] / seen[..., None]
            total += share.amax(dim=1).view(kv_heads, -1, stop - start).amax(dim=1).mean(dim=0)
        assert_close(scores[start:stop], (total / len(layers)).tolist(), TOLERANCE)
        assert not any(scores[:start]) and not any(scores[stop:])
