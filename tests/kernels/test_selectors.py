"""Every selector's formula, the table they are in, their options, and energies of other orders."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from cb_kernels import selectors
from cb_kernels.errors import ScoringInputError
from cb_kernels.keep import keep_positions_reference
from cb_kernels.moments import Moments, cacheback_score, energy_scale
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.reference import layer_lse, layer_moments
from cb_kernels.score import score_layer
from cb_kernels.selectors import Needs, SelectorContext, SelectorEntry, SelectorOptions, get, load, registry, selector
from cb_kernels.selectors.bm25 import words
from cb_kernels.selectors.spans import span_count, span_means, spread

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("c*.safetensors"))
BUILT_IN = [
    "answer_cue",
    "bm25",
    "cacheback",
    "chunkkv",
    "h2o",
    "kvzip",
    "mean_query",
    "random",
    "snapkv",
    "streaming_llm",
]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, SelectorEntry]]:
    """Each test registers into a copy of the table."""
    copy = dict(registry._SELECTORS)
    monkeypatch.setattr(registry, "_SELECTORS", copy)
    yield copy


def random_moments(length: int, seed: int = 0) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    votes, energy, factor = torch.rand(3, length, generator=generator)
    return Moments(votes, energy, energy * (1 + 5 * factor))


def full_context(length: int, options: SelectorOptions | None = None) -> SelectorContext:
    """Everything a selector may ask for."""
    return SelectorContext(
        length,
        latent_len=min(3, length - 1),
        options=options or SelectorOptions(),
        moments=random_moments(length, 1),
        cue=random_moments(length, 2),
        statistic=torch.rand(length, generator=torch.Generator().manual_seed(3)),
        query="What about the river?",
        span_texts=[f"span {i} of the river" if i % 3 else "nothing" for i in range(span_count(length))],
    )


def pool7(x: list[float]) -> list[float]:
    return [max(x[max(0, t - 3) : t + 4]) for t in range(len(x))]


def pinned(x: list[float]) -> list[float]:
    return [max(x), *x[1:]]


def assert_scores(got: Tensor, want: list[float], rtol: float = 1e-5, *, pin: bool = True) -> None:
    assert got.dtype == torch.float32
    wanted = torch.tensor(pinned(want) if pin else want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=1e-12)


def test_the_table() -> None:
    assert selectors.names() == BUILT_IN
    assert [n for n in BUILT_IN if get(n).query_independent] == [
        "chunkkv",
        "h2o",
        "kvzip",
        "random",
        "snapkv",
        "streaming_llm",
    ]
    for name in BUILT_IN:
        entry = get(name)
        assert entry.name == name
        assert entry.statistic == (name if entry.needs is Needs.STATISTIC else None)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 200), data=st.data())
def test_every_selector_fits_the_keep_law(name: str, length: int, data: st.DataObject) -> None:
    """[T] finite float32 scores, position 0 at the maximum unless sink-free, the input untouched, the same again."""
    context = full_context(length)
    before = None if context.statistic is None else context.statistic.clone()
    scores = get(name)(context)
    assert scores.shape == (length,) and scores.dtype == torch.float32 and bool(torch.isfinite(scores).all())
    assert scores[0] == scores.max() or get(name).sink_free_rows
    assert torch.equal(scores, get(name)(context))
    assert context.statistic is not None and before is not None and torch.equal(context.statistic, before)
    latent = context.latent_len
    protected = {0, *range(length - latent, length)}
    budget = data.draw(st.integers(len(protected), length))
    kept = keep_positions_reference(scores.tolist(), budget, sorted(protected))
    assert len(kept) == budget and protected <= set(kept)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.floats(1.5, 8.0), st.floats(0.0, 6.0))
def test_formulas_over_moments(length: int, seed: int, order: float, alpha: float) -> None:
    moments, cue = random_moments(length, seed), random_moments(length, seed + 1)
    options = SelectorOptions(order=order, alpha=alpha)
    context = SelectorContext(length, options=options, moments=moments, cue=cue)
    q = pool7(moments.votes.double().tolist())
    ratios = (moments.row_energy.double() / moments.energy.double()).tolist()
    s = [a * (r ** (1 / (order - 1))) ** alpha for a, r in zip(q, ratios, strict=True)]
    last = pool7(cue.votes.double().tolist())
    assert_scores(get("cacheback")(context), s, rtol=1e-4)
    assert_scores(get("mean_query")(context), q)
    assert_scores(get("answer_cue")(context), [a * b for a, b in zip(s, last, strict=True)], rtol=1e-4, pin=False)
    free = SelectorContext(length, options=SelectorOptions(order, alpha, sink_free=True), moments=moments)
    assert_scores(get("cacheback")(free), s, rtol=1e-4, pin=False)
    assert_scores(get("mean_query")(free), q, pin=False)
    flat = SelectorContext(length, options=SelectorOptions(alpha=0.0), moments=moments)
    assert torch.equal(get("cacheback")(flat), get("mean_query")(context))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
def test_formulas_over_statistics(length: int) -> None:
    statistic = torch.rand(length, generator=torch.Generator().manual_seed(length))
    context = SelectorContext(length, statistic=statistic)
    values = statistic.double().tolist()
    for name in ("h2o", "kvzip"):
        assert_scores(get(name)(context), values)
    assert_scores(get("snapkv")(context), pool7(values))
    chunks = [values[a : a + 16] for a in range(0, length, 16)]
    assert_scores(get("chunkkv")(context), [sum(c) / len(c) for c in chunks for _ in c])


def test_streaming_llm_keeps_the_sink_and_the_tail() -> None:
    scores = get("streaming_llm")(SelectorContext(100))
    assert_scores(scores, [float(j) for j in range(100)])
    assert keep_positions_reference(scores.tolist(), 21, [0]) == [0, *range(80, 100)]


def test_random_is_seeded_a_span_at_a_time() -> None:
    def draw(length: int, seed: int) -> Tensor:
        return get("random")(SelectorContext(length, options=SelectorOptions(seed=seed)))

    # Python promises this number from this seed on every machine and version.
    torch.testing.assert_close(draw(40, 7)[16:32], torch.full((16,), 0.15084917392450192))
    assert torch.equal(draw(40, 7), draw(40, 7)) and not torch.equal(draw(40, 7), draw(40, 8))
    spans = draw(16_000, 2**63 - 1)[16:].view(-1, 16)
    assert torch.equal(spans, spans[:, :1].expand_as(spans))
    assert len(spans[:, 0].unique()) > 990 and 0.45 < float(spans.mean()) < 0.55 and float(spans.min()) >= 0


def bm25_by_definition(query: list[str], spans: list[list[str]]) -> list[float]:
    average = sum(map(len, spans)) / len(spans)
    scores = []
    for span in spans:
        total = 0.0
        for word in query:
            n = sum(word in other for other in spans)
            tf = span.count(word)
            idf = math.log(1 + (len(spans) - n + 0.5) / (n + 0.5))
            total += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(span) / average))
        scores.append(total)
    return scores


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["river", "bank", "ox", "zoo", "Über"]), max_size=12), min_size=1, max_size=6),
    st.lists(st.sampled_from(["river", "BANK", "absent"]), max_size=4),
    st.integers(1, 16),
)
def test_bm25(spans: list[list[str]], query: list[str], last: int) -> None:
    length = 16 * (len(spans) - 1) + last
    context = SelectorContext(length, query=" ".join(query), span_texts=[", ".join(s) + "!" for s in spans])
    want = [0.0] * len(spans)
    if any(spans):
        want = bm25_by_definition([w.lower() for w in query], [[w.lower() for w in s] for s in spans])
    assert_scores(get("bm25")(context), [want[j // 16] for j in range(length)])


def test_bm25_words_and_small_corpora() -> None:
    assert words("Don't_stop: the 2nd ÉTÉ—now!") == ["don", "t", "stop", "the", "2nd", "été", "now"]
    # A word that every span but one holds must still count for the spans that hold it.
    context = SelectorContext(48, query="gate", span_texts=["a gate", "a gate", "a wall"])
    assert get("bm25")(context)[16] > get("bm25")(context)[32] == 0


def test_spans() -> None:
    x = torch.arange(35.0)
    assert span_means(x).tolist() == [7.5, 23.5, 33.0]
    assert spread(span_means(x), 35).shape == (35,) and spread(span_means(x), 35)[34] == 33.0
    assert span_count(32) == 2 and span_means(x[:1]).tolist() == [0.0]


@pytest.mark.parametrize("case", CASES)
def test_golden_scores_through_the_table(case: str) -> None:
    """The default options are the paper's selector."""
    with safe_open(str(GOLDEN / f"{case}.safetensors"), "pt") as file:
        names = ("votes", "energy", "row_energy", "votes_pooled", "score")
        votes, energy, row_energy, pooled, score = (file.get_tensor(name) for name in names)
        length = int(file.metadata()["T"])
        selections = {k: file.get_tensor(k) for k in file.keys() if k.startswith("sel.")}  # noqa: SIM118
        latent = int(file.metadata()["latent_steps"])
    context = SelectorContext(length, latent, moments=Moments(votes, energy, row_energy))
    got = {"cacheback": get("cacheback")(context), "qsnap": get("mean_query")(context)}
    torch.testing.assert_close(got["cacheback"][1:], score[1:], rtol=1e-6, atol=1e-38)
    assert torch.equal(got["qsnap"][1:], pooled[1:])
    protected = [0, *range(length - latent, length)]
    for key, kept in selections.items():
        name, budget, span = key.split(".")[1:]
        if name == "qsnap":
            assert keep_positions_reference(got[name].tolist(), int(budget[1:]), protected, (), int(span[1:])) == (
                kept.tolist()
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 1.0}, "order must be greater than 1"),
        ({"order": 8.1}, "at most 8"),
        ({"order": float("nan")}, "order must be a finite number"),
        ({"order": True}, "order must be a finite number"),
        ({"order": "2"}, "order must be a finite number"),
        ({"alpha": -0.1}, r"alpha must lie in 0\.\.16"),
        ({"alpha": 17}, r"alpha must lie in 0\.\.16"),
        ({"alpha": float("inf")}, "alpha must be a finite number"),
        ({"sink_free": 1}, "sink_free must be true or false"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 1 << 63}, "seed must be an integer"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
    ],
)
def test_bad_options_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScoringInputError, match=message):
        SelectorOptions(**change)  # type: ignore[arg-type]


def test_options_at_their_bounds() -> None:
    SelectorOptions(order=8, alpha=0, seed=(1 << 63) - 1)
    SelectorOptions(order=1.0001, alpha=16, sink_free=True)


def test_effective_options_drop_what_a_selector_does_not_read() -> None:
    asked = SelectorOptions(order=3.0, alpha=1.0, sink_free=True, seed=5)
    assert get("cacheback").effective(asked) == SelectorOptions(order=3.0, alpha=1.0, sink_free=True)
    assert get("mean_query").effective(asked) == SelectorOptions(sink_free=True)
    assert get("answer_cue").effective(SelectorOptions()) == SelectorOptions(sink_free=True)
    assert get("random").effective(asked) == SelectorOptions(seed=5)
    assert get("h2o").effective(asked) == SelectorOptions()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_context_without_the_needed_is_refused(name: str) -> None:
    needs = get(name).needs
    if needs is Needs.NOTHING:
        assert get(name)(SelectorContext(20)).shape == (20,)
        return
    with pytest.raises(ScoringInputError, match="the selector needs"):
        get(name)(SelectorContext(20))
    wrong = full_context(40)
    with pytest.raises(ScoringInputError, match="the selector needs"):
        get(name)(
            SelectorContext(
                20,
                moments=wrong.moments,
                cue=wrong.cue,
                statistic=wrong.statistic,
                query=wrong.query,
                span_texts=wrong.span_texts,
            )
        )


def test_impossible_lengths_are_refused() -> None:
    for length, latent in ((0, 0), (5, 5), (5, -1)):
        with pytest.raises(ScoringInputError, match="length must be"):
            get("streaming_llm")(SelectorContext(length, latent))


def test_registering() -> None:
    @selector("first_half", needs=Needs.NOTHING, options=("seed",))
    def first_half(context: SelectorContext) -> Tensor:
        return (torch.arange(context.length) < context.length // 2).int()

    assert get("first_half").function is first_half
    assert get("first_half")(SelectorContext(4)).tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ScoringInputError, match="registered already"):
        selector("first_half")(first_half)
    with pytest.raises(ScoringInputError, match="goes with needs=STATISTIC"):
        selector("x", needs=Needs.STATISTIC)(first_half)
    with pytest.raises(ScoringInputError, match="goes with needs=STATISTIC"):
        selector("x", statistic="h2o")(first_half)
    with pytest.raises(ScoringInputError, match="unknown statistic"):
        selector("x", needs=Needs.STATISTIC, statistic="h3o")(first_half)
    with pytest.raises(ScoringInputError, match=r"no such option: \['dose'\]"):
        selector("x", options=("dose",))(first_half)
    with pytest.raises(ScoringInputError, match=r"unknown selector 'x'; choose one of answer_cue, .*first_half"):
        get("x")


@pytest.mark.parametrize("returned", [torch.zeros(5), torch.zeros(4, 1), [0.0] * 4, torch.zeros(4).cfloat(), None])
def test_a_selector_that_returns_something_else_is_refused(returned: object) -> None:
    selector("odd", needs=Needs.NOTHING)(lambda context: returned)  # type: ignore[arg-type, return-value]
    with pytest.raises(ScoringInputError, match=r"selector odd must return a tensor \[4\]"):
        get("odd")(SelectorContext(4))


def test_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text(
        "import torch\n"
        "def newest(context):\n"
        "    return torch.arange(context.length)\n"
        "newest.cacheback_needs = 'nothing'\n"
        "def votes(context):\n"
        "    return context.moments.votes\n"
        "def heavy(context):\n"
        "    return context.statistic\n"
        "heavy.cacheback_needs, heavy.cacheback_statistic = 'statistic', 'h2o'\n"
        "def lost(context):\n"
        "    return context.statistic\n"
        "lost.cacheback_needs = 'statistic'\n"
        "def odd(context):\n"
        "    return None\n"
        "odd.cacheback_needs = 'everything'\n"
        "number = 3\n"
    )
    (tmp_path / "broken_rules.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    newest = load("my_rules:newest")
    assert newest.needs is Needs.NOTHING and newest.name == "my_rules:newest" and get("my_rules:newest") is newest
    assert newest(SelectorContext(3)).tolist() == [2.0, 1.0, 2.0]
    assert load("my_rules:newest") is newest
    assert load("my_rules:votes").needs is Needs.QUERY_ROWS
    assert load("my_rules:heavy").statistic == "h2o"
    for spec, message in [
        ("my_rules", "is written"),
        ("my_rules:a.b", "is written"),
        ("my rules:f", "is written"),
        ("../my_rules:f", "is written"),
        ("no_such_rules:f", "importing no_such_rules failed: ModuleNotFoundError"),
        ("broken_rules:f", "importing broken_rules failed: ZeroDivisionError"),
        ("my_rules:absent", "my_rules has no function absent"),
        ("my_rules:number", "my_rules has no function number"),
        ("my_rules:odd", "cacheback_needs must be one of nothing, query_rows"),
        ("my_rules:lost", "goes with needs=STATISTIC"),
    ]:
        with pytest.raises(ScoringInputError, match=message):
            load(spec)
        assert spec not in selectors.names()
    sys.modules.pop("my_rules", None)


def test_load_takes_any_callable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("callable_rules")
    monkeypatch.setattr(module, "rule", lambda context: torch.ones(context.length), raising=False)
    monkeypatch.setitem(sys.modules, "callable_rules", module)
    assert load("callable_rules:rule")(SelectorContext(2, moments=random_moments(2))).tolist() == [1.0, 1.0]


# Energies of orders other than 2.

ROWS, LENGTH, LAYERS, HEADS, KV_HEADS, DIM = 9, 150, 2, 4, 2, 16


def _problem(sharpness: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shape = (LAYERS, LENGTH, KV_HEADS, DIM)
    keys = torch.randn(shape, generator=generator)
    own = torch.randn(LAYERS, ROWS, KV_HEADS, DIM, generator=generator)
    q = sharpness * torch.randn(LAYERS, ROWS, HEADS, DIM, generator=generator)
    return list(q), list(keys), list(own)


def _plan(order: float, row_count: int = ROWS, carry: Carry | None = None, sink_free: bool = False) -> ScoringPlan:
    return plan_scoring(
        [QuerySegment(0, row_count, 0, LENGTH, ROWS, carry)],
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        layers=LAYERS,
        kv_indices=torch.arange(LENGTH),
        device="cpu",
        order=order,
        sink_free=sink_free,
    )


@pytest.mark.parametrize("sink_free", [False, True])
@pytest.mark.parametrize("order", [1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.5, 8.0])
def test_kernel_and_definition_agree_at_every_order(order: float, sink_free: bool) -> None:
    queries, keys, owns = _problem(1.5)
    want: Moments | None = None
    plan = _plan(order, sink_free=sink_free)
    carry = Carry.empty(layers=LAYERS, kv_heads=KV_HEADS, sender_len=LENGTH, device="cpu")
    parts = [_plan(order, 4, carry, sink_free), None]
    for layer, (q, k, own) in enumerate(zip(queries, keys, owns, strict=True)):
        moments = layer_moments(q, k, own, scale=0.25, own_visible=0, order=order, sink_free=sink_free)
        want = moments if want is None else want + moments
        lse = layer_lse(q, k, own, scale=0.25, own_visible=0)
        score_layer(plan, layer, q, k, lse, scale=0.25)
        assert parts[0] is not None
        score_layer(parts[0], layer, q[:4], k, lse[:4], scale=0.25)
    assert parts[0] is not None and parts[0].finish() == [None]
    rest = _plan(order, ROWS - 4, carry, sink_free)
    for layer, (q, k, own) in enumerate(zip(queries, keys, owns, strict=True)):
        lse = layer_lse(q, k, own, scale=0.25, own_visible=0)
        score_layer(rest, layer, q[4:], k, lse[4:], scale=0.25)
    assert want is not None
    for got in (*plan.finish(), *rest.finish()):
        assert got is not None
        for name in ("votes", "energy", "row_energy"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(
            cacheback_score(got, order=order), cacheback_score(want, order=order), rtol=5e-4, atol=0
        )


@pytest.mark.parametrize("order", [1.25, 2.0, 3.0, 8.0])
def test_rho_follows_its_definition_without_the_scale(order: float) -> None:
    """The scale cancels: rho from plain float64 attention, written out for one layer."""
    (q, *_), (k, *_), (own, *_) = _problem(1.0)
    moments = layer_moments(q, k, own, scale=0.25, own_visible=0, order=order)
    rho = (moments.row_energy.double() / moments.energy.double()) ** (1 / (order - 1))
    for t in (0, 1, 77, LENGTH - 1):
        energy = row_energy = 0.0
        for head in range(KV_HEADS):
            rows = []
            for i in range(ROWS):
                near = torch.zeros(LENGTH, dtype=torch.float64)
                for h in (2 * head, 2 * head + 1):
                    seen = torch.cat([k[:, head], own[: i + 1, head]]).double()
                    near += (0.25 * seen @ q[i, h].double()).softmax(dim=0)[:LENGTH] / 2
                rows.append(near)
            window = slice(max(0, t - 3), t + 4)
            energy += float(torch.stack(rows).mean(dim=0)[window].max()) ** order
            row_energy += sum(float(r[window].max()) ** order for r in rows) / ROWS
        assert float(rho[t]) == pytest.approx((row_energy / energy) ** (1 / (order - 1)), rel=1e-4)


@pytest.mark.parametrize("order", [2.5, 4.0, 8.0])
def test_extreme_attention_neither_overflows_nor_makes_nan(order: float) -> None:
    """One-hot rows, and positions whose powers underflow: the ratio is 1 there, and every score is finite."""
    queries, keys, owns = _problem(2000.0)
    plan = _plan(order)
    for layer, (q, k, own) in enumerate(zip(queries, keys, owns, strict=True)):
        score_layer(plan, layer, q, k, layer_lse(q, k, own, scale=0.25, own_visible=0), scale=0.25)
    (moments,) = plan.finish()
    assert moments is not None and bool(((moments.energy == 0) & (moments.row_energy == 0)).any())
    for alpha in (0.0, 2.0, 16.0):
        score = cacheback_score(moments, order=order, alpha=alpha)
        assert bool(torch.isfinite(score).all()) and bool((score >= 0).all())
    both_zero = (moments.energy == 0) & (moments.row_energy == 0)
    plain = cacheback_score(moments, order=order, alpha=0.0)
    assert torch.equal(cacheback_score(moments, order=order)[both_zero], plain[both_zero])


def test_scores_stay_within_float32() -> None:
    moments = Moments(torch.tensor([2.0, 0.0]), torch.ones(2), torch.tensor([1e10, 1e10]))
    score = cacheback_score(moments, alpha=16.0)
    assert score.tolist() == [torch.finfo(torch.float32).max] * 2


@pytest.mark.parametrize("order", [1.01, 2.0, 2.01, 3.0, 5.5, 8.0])
def test_the_scale_leaves_room_for_every_sum(order: float) -> None:
    scale = energy_scale(order)
    assert math.log2(scale) == int(math.log2(scale))
    # Attention 1 everywhere: 128 layers, 128 KV heads, 65,536 rows.
    assert scale**order * 2**30 < torch.finfo(torch.float32).max
    # Attention of one part in ten million still counts.
    assert (scale * 1e-7) ** order > torch.finfo(torch.float32).tiny


def test_orders_that_a_backend_cannot_take_are_refused() -> None:
    shared = {"heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 1, "kv_indices": torch.arange(9), "device": "cpu"}
    segment = QuerySegment(0, 1, 0, 9, 1)
    with pytest.raises(ScoringInputError, match="Triton kernel accumulates energies of order 2 only; got order 3"):
        plan_scoring([segment], **shared, order=3.0, backend="triton")  # type: ignore[arg-type]
    plan_scoring([segment], **shared, order=2.0, backend="triton")  # type: ignore[arg-type]
    for order in (1.0, 0.5, 9.0, float("nan")):
        with pytest.raises(ScoringInputError, match="order must be greater than 1 and at most 8"):
            plan_scoring([segment], **shared, order=order)  # type: ignore[arg-type]
        with pytest.raises(ScoringInputError, match="order must be greater than 1 and at most 8"):
            cacheback_score(random_moments(4), order=order)
