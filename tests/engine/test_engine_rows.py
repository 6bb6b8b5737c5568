"""Continuous rows on a real engine: looked up, rolled on, cached, scored, pinned; held against Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import on_engines, tokens
from engine_client import Ask, EngineClient
from hf_reference import HfReference, assert_expected
from torch import Tensor

from cb_sglang.rows import PLACEHOLDER_ID, Rows
from cb_sglang.seam.engine import Context
from cb_sglang.spec import ScoringSpec

ENGINES = ("small", "paged", "hybrid")


def as_tensor(rows: Rows) -> Tensor:
    return torch.frombuffer(bytearray(rows.data), dtype=torch.float32).view(len(rows), rows.hidden)


def embedded(reference: HfReference, ids: Sequence[int]) -> Tensor:
    """The model's input embeddings [n, hidden], scaled where the model scales them."""
    with torch.inference_mode():
        looked_up: Tensor = reference.model.get_input_embeddings()(torch.tensor(list(ids)))
    return looked_up.clone()


@torch.inference_mode()
def next_row(reference: HfReference, before: Tensor) -> Tensor:
    """The latent row [hidden] that follows the rows [n, hidden], from a whole forward pass."""
    norm = embedded(reference, range(reference.model.config.vocab_size)).double().norm(dim=1).mean().float()
    hidden: Tensor = reference.model.model(inputs_embeds=before[None], use_cache=False).last_hidden_state[0, -1]
    return hidden / hidden.norm().clamp_min(1e-6) * norm


def attentions(reference: HfReference, embeds: Tensor) -> list[Tensor]:
    """What HfReference.attentions gives, from embeddings."""
    with torch.inference_mode():
        recorded = reference.model.model(inputs_embeds=embeds[None], output_attentions=True, use_cache=False).attentions
    return [recorded[n][0] for n in reference.full_layers]


@on_engines(*ENGINES)
def test_embeddings_are_those_that_the_model_feeds(engine: EngineClient, reference: HfReference) -> None:
    ids = tokens(70, 1)
    torch.testing.assert_close(as_tensor(engine.ours("embeddings", ids)), embedded(reference, ids), rtol=0, atol=0)


@on_engines(*ENGINES)
@pytest.mark.parametrize("rows_before", [False, True])
def test_latent_rows(engine: EngineClient, reference: HfReference, rows_before: bool) -> None:
    """Rolled behind tokens, and behind tokens with a foreign row among them; longer than a chunk of prefill."""
    ids = list(tokens(150, 2))
    start = embedded(reference, ids)
    context = Context(ids, namespace="rolled")
    if rows_before:
        row = engine.ours("embeddings", tokens(1, 3)).at([40])
        ids[40] = PLACEHOLDER_ID
        start[40] = as_tensor(row)[0]
        context = replace(context, input_ids=ids, rows=row, namespace="with a row")
    rows = as_tensor(engine.ours("latent_rows", context, 4))
    # Step by step from the engine's own rows: these models magnify what rounding has left in the step before.
    expected = [next_row(reference, torch.cat([start, rows[:step]])) for step in range(4)]
    torch.testing.assert_close(rows, torch.stack(expected), rtol=2e-4, atol=2e-5)


@on_engines(*ENGINES)
def test_queries_over_latent_rows(
    engine: EngineClient, reference: HfReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores equal an eager forward over the same embeddings; the rows come from the cache, in their namespace only."""
    ids, query = tokens(120, 4), tokens(9, 5)
    context = Context(list(ids), namespace="latent")
    rows = engine.ours("latent_rows", context, 5).shifted(120)
    sender = replace(context.followed_by([PLACEHOLDER_ID] * 5), rows=rows)
    engine.ours("prefill", sender)
    whole = torch.cat([embedded(reference, ids), as_tensor(rows), embedded(reference, query)])
    monkeypatch.setattr(reference, "attentions", lambda _: attentions(reference, whole))
    ask = Ask((*ids, *[PLACEHOLDER_ID] * 5), query, budget=40, latent_len=5)
    for _ in range(2):
        (scored,) = engine.ours("score", [(sender.followed_by(list(query)), ask.spec)])
        expected = reference.expected(ask.sender, ask.query, ask.spec)
        assert_expected({"positions": scored.positions, "span_scores": scored.span_scores}, expected)
        assert scored.positions[-5:] == list(range(120, 125))
        assert scored.cached_positions == engine.cached(ask.sender)
    other = replace(sender.followed_by(list(query)), namespace="another")
    (scored,) = engine.ours("score", [(other, ask.spec)])
    assert scored.cached_positions == 0


@on_engines("small")
def test_rows_without_a_namespace_are_never_cached(engine: EngineClient) -> None:
    """As in SGLang itself: token ids do not tell what stands there."""
    row = engine.ours("embeddings", tokens(1, 6)).at([3])
    context = Context([*tokens(3, 7), PLACEHOLDER_ID, *tokens(60, 8)], row)
    assert [engine.ours("prefill", context) for _ in range(2)] == [0, 0]
    assert engine.settled_counters()["tree_tokens"] == 0


@on_engines("small", "paged")
def test_excluded_positions_and_coverage(engine: EngineClient) -> None:
    context = Context(list(tokens(200, 9)))
    query = context.followed_by(list(tokens(12, 10)))
    spec = ScoringSpec(sender_len=200, vote_start=0, vote_stop=12, budget=60)
    barred = replace(spec, excluded=[0, 1, 30, 90])
    shares = [replace(spec, budget=200, coverage=share) for share in (0.2, 0.7, 1.0)]
    found = engine.ours("score", [(query, each) for each in (spec, barred, *shares)])
    positions = [set(each.positions) for each in sorted(found, key=lambda each: each.index)]
    assert len(positions[1]) == 60 and not positions[1] & {0, *range(30, 90)}
    assert 0 in positions[0] and positions[0] & set(range(30, 90))
    assert positions[2] < positions[3] <= positions[4]


@on_engines("small")
def test_a_pinned_sender_outlives_what_evicts_the_others(engine: EngineClient) -> None:
    pinned, loose = Context(list(tokens(400, 11))), Context(list(tokens(400, 12)))
    engine.ours("pin", pinned, "p")
    engine.ours("prefill", loose)
    assert engine.until(lambda c: c["protected"] == 400)
    for seed in range(12):
        engine.prefill(tokens(400, 100 + seed))
    cached: dict[str, Any] = {"pinned": engine.ours("prefill", pinned), "loose": engine.ours("prefill", loose)}
    assert cached == {"pinned": 399, "loose": 0}
    engine.ours("unpin", "p")
    assert engine.until(lambda c: c["protected"] == 0)


@on_engines("paged")
def test_senders_are_evicted_after_everything_else_and_before_pins(engine: EngineClient) -> None:
    first, second, pinned = (Context(list(tokens(1_600, 20 + n))) for n in range(3))
    engine.ours("pin", pinned, "p")
    engine.ours("prefill", first)
    engine.ours("prefill", second)
    for seed in range(8):
        engine.greedy(tokens(800, 200 + seed), 20)
    assert [engine.ours("prefill", context) for context in (second, first)] == [1_584, 1_584]
    # Among themselves, the one that was not asked for longest goes first.
    for seed in range(3):
        engine.ours("prefill", Context(list(tokens(1_600, 300 + seed))))
    cached = [engine.ours("prefill", context) for context in (pinned, first, second)]
    assert cached[:2] == [1_584, 1_584] and cached[2] < 800
    engine.ours("unpin", "p")
    assert engine.until(lambda c: c["protected"] == 0)
