"""Statistics of the sender's own rows against their definitions, written out in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from cb_kernels import statistics
from cb_kernels.errors import ScoringInputError
from cb_kernels.keep import keep_positions_reference
from cb_kernels.moments import pin_first
from cb_kernels.selectors import SelectorContext, get
from cb_kernels.selectors.spans import span_means, spread
from cb_kernels.statistics import ChunkKv, KvZip, SnapKv, Statistic, kvzip_chunks, kvzip_tail
from cb_kernels.statistics.attention import attention_blocks

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("c*.safetensors"))
MARGINS: dict[str, dict[str, list[float] | None]] = json.loads((GOLDEN / "margins.json").read_text())


@dataclass(frozen=True)
class Model:
    """Random q [T + tail, H, D] and k [T + tail, Hkv, D] of each layer. The first key is a sink."""

    length: int
    latent: int = 0
    tail: int = 0
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    layers: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float32
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        total = self.length + self.tail
        for _ in range(self.layers):
            k = torch.randn(total, self.kv_heads, self.head_dim, generator=generator)
            k[0] *= 2
            q = 1.5 * torch.randn(total, self.heads, self.head_dim, generator=generator)
            self.q.append(q.to(self.dtype))
            self.k.append(k.to(self.dtype))

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def attention(self, layer: int) -> Tensor:
        """The whole causal matrix, float64 [H, T + tail, T + tail]."""
        k = self.k[layer].double().repeat_interleave(self.group, dim=1)
        logits = torch.einsum("ihd,jhd->hij", self.q[layer].double(), k) * self.scale
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
        return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)

    def statistic(self, name: str, **options: object) -> Statistic:
        return statistics.get(name)(
            sender_len=self.length,
            latent_len=self.latent,
            heads=self.heads,
            kv_heads=self.kv_heads,
            layers=self.layers,
            device="cpu",
            **options,  # type: ignore[arg-type]
        )

    def feed(self, statistic: Statistic, cuts: list[int]) -> Tensor:
        """What it finds in forward passes over rows ``cuts[i] .. cuts[i + 1]``, each through all layers."""
        return self.fed(statistic, cuts).finish()

    def fed(self, statistic: Statistic, cuts: list[int]) -> Statistic:
        for start, stop in pairwise(cuts):
            for layer in range(self.layers):
                statistic.add(
                    layer,
                    self.q[layer][start:stop],
                    self.k[layer][:stop],
                    scale=self.scale,
                    first_position=start,
                )
        return statistic


def h2o_by_definition(model: Model) -> Tensor:
    want = torch.zeros(model.length, dtype=torch.float64)
    for layer in range(model.layers):
        a = model.attention(layer)[:, : model.length, : model.length]
        for j in range(model.length - model.latent):
            want[j] += a[:, j:, j].sum() / model.heads
    return want


def _window(model: Model, size: int = 32) -> slice:
    stop = model.length - model.latent
    return slice(max(0, stop - size), stop)


def snapkv_by_definition(model: Model) -> Tensor:
    rows = _window(model)
    return sum(
        (model.attention(layer)[:, rows, : model.length].mean(dim=(0, 1)) for layer in range(model.layers)),
        torch.zeros(model.length, dtype=torch.float64),
    )


def chunkkv_by_definition(model: Model) -> Tensor:
    rows = _window(model)
    before = rows.start
    want = torch.zeros(model.length, dtype=torch.float64)
    for layer in range(model.layers):
        mean = model.attention(layer)[:, rows, :before].mean(dim=1)
        smooth = torch.zeros_like(mean)
        for j in range(before):
            smooth[:, j] = mean[:, max(0, j - 2) : j + 3].sum(dim=1) / 5
        grouped = smooth.view(model.kv_heads, model.group, before).mean(dim=1)
        want[:before] += grouped.mean(dim=0) / model.layers
        want[rows] += ((grouped.max() if before else 0.0) + 1) / model.layers
    return want


def kvzip_by_definition(model: Model, chunk: tuple[int, int]) -> Tensor:
    columns = [0, *range(*chunk)]
    want = torch.zeros(model.length, dtype=torch.float64)
    for layer in range(model.layers):
        for head in range(model.kv_heads):
            best = torch.zeros(chunk[1] - chunk[0], dtype=torch.float64)
            for row in range(model.length, model.length + model.tail):
                keys = model.k[layer][[*columns, *range(model.length, row + 1)], head].double()
                for query in range(head * model.group, (head + 1) * model.group):
                    weights = (keys @ model.q[layer][row, query].double() * model.scale).softmax(dim=0)
                    best = torch.maximum(best, weights[1 : len(columns)])
            want[slice(*chunk)] += best / (model.kv_heads * model.layers)
    return want


DEFINITIONS: dict[str, Callable[[Model], Tensor]] = {
    "h2o": h2o_by_definition,
    "snapkv": snapkv_by_definition,
    "chunkkv": chunkkv_by_definition,
}

SHAPES = {
    "one position": Model(length=1),
    "shorter than the window": Model(length=20, latent=3),
    "exactly the window": Model(length=32),
    "one more": Model(length=33, kv_heads=1, group=4),
    "latent rows": Model(length=90, latent=17, kv_heads=3, group=1),
    "grouped": Model(length=150, kv_heads=2, group=3, layers=3),
    "half precision": Model(length=70, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(name: str, shape: str) -> None:
    model = SHAPES[shape]
    got = model.feed(model.statistic(name), [0, model.length])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), DEFINITIONS[name](model), rtol=2e-6, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cuts_into_passes_and_blocks_agree_with_the_definition(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 80))
    latent = data.draw(st.integers(0, min(10, length - 1)))
    model = Model(
        length,
        latent,
        kv_heads=data.draw(st.sampled_from([1, 2])),
        group=data.draw(st.sampled_from([1, 3])),
        seed=data.draw(st.integers(0, 99)),
    )
    name = data.draw(st.sampled_from(sorted(DEFINITIONS)))
    first = statistics.get(name).first_row(length, latent)
    start = data.draw(st.integers(0, first))
    cuts = sorted({start, length, *data.draw(st.lists(st.integers(start, length), max_size=4))})
    statistic = model.statistic(name, scratch_bytes=data.draw(st.sampled_from([1 << 10, 1 << 14, 1 << 20])))
    torch.testing.assert_close(model.feed(statistic, cuts).double(), DEFINITIONS[name](model), rtol=2e-6, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_kvzip_matches_the_definition(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 50))
    latent = data.draw(st.integers(0, length - 2))
    tail = data.draw(st.integers(1, 20))
    model = Model(length, latent, tail, group=data.draw(st.sampled_from([1, 2, 3])), seed=data.draw(st.integers(0, 99)))
    total = torch.zeros(length)
    want = torch.zeros(length, dtype=torch.float64)
    for chunk in kvzip_chunks(length, latent, size=data.draw(st.integers(1, 60))):
        cut = data.draw(st.integers(length, length + tail))
        cuts = sorted({data.draw(st.sampled_from([0, length])), cut, length + tail})
        statistic = model.statistic("kvzip", chunk=chunk, scratch_bytes=data.draw(st.sampled_from([1 << 10, 1 << 20])))
        total += model.feed(statistic, cuts)
        want += kvzip_by_definition(model, chunk)
    torch.testing.assert_close(total.double(), want, rtol=2e-6, atol=1e-9)
    assert total[0] == 0 and not total[length - latent :].any() and bool((total[1 : length - latent] > 0).all())


@pytest.mark.parametrize("name", ["h2o", "snapkv", "chunkkv", "kvzip"])
def test_ranks_that_hold_some_heads_average_to_the_whole(name: str) -> None:
    """Once they have agreed on the peaks, if there are any."""
    model = Model(length=60, latent=4, tail=12, kv_heads=4, group=2)
    options = {"chunk": (1, 40)} if name == "kvzip" else {}
    cuts = [0, 72] if name == "kvzip" else [0, 60]
    whole = model.feed(model.statistic(name, **options), cuts)
    ranks = []
    for rank in range(2):
        part = replace(model, kv_heads=2, q=[], k=[])
        part.q[:] = [q[:, 4 * rank : 4 * rank + 4] for q in model.q]
        part.k[:] = [k[:, 2 * rank : 2 * rank + 2] for k in model.k]
        ranks.append(part.fed(part.statistic(name, **options), cuts))
    peaks = torch.stack([statistic.peaks for statistic in ranks]).amax(dim=0)
    for statistic in ranks:
        statistic.peaks.copy_(peaks)
    mean = torch.stack([statistic.finish() for statistic in ranks]).mean(dim=0)
    torch.testing.assert_close(mean, whole, rtol=1e-6, atol=1e-9)


def test_attention_blocks_never_exceed_the_scratch() -> None:
    q, keys = torch.randn(4, 300, 8), torch.randn(500, 8)
    sizes = [w.numel() for w in attention_blocks(q, keys, scale=0.3, before=200, scratch_bytes=1 << 16)]
    assert len(sizes) > 10 and max(sizes) * 8 <= 1 << 16


def test_rows_before_and_after_the_needed_ones_are_ignored() -> None:
    model = Model(length=80, latent=10, tail=6)
    for name in DEFINITIONS:
        narrow = model.feed(model.statistic(name), [statistics.get(name).first_row(80, 10), 80])
        assert torch.equal(narrow, model.feed(model.statistic(name), [0, 86]))


def test_first_row() -> None:
    assert {n: statistics.get(n).first_row(100, 8) for n in statistics.names()} == {
        "chunkkv": 60,
        "h2o": 0,
        "kvzip": 100,
        "snapkv": 60,
    }
    assert SnapKv.first_row(20, 8) == 0


def test_missing_repeated_and_late_rows_are_refused() -> None:
    model = Model(length=50)

    def add(statistic: Statistic, start: int, stop: int, layer: int = 0) -> None:
        statistic.add(layer, model.q[layer][start:stop], model.k[layer][:stop], scale=model.scale, first_position=start)

    h2o = model.statistic("h2o")
    with pytest.raises(ScoringInputError, match="go on with the row of position 0, got 5"):
        add(h2o, 5, 50)
    add(h2o, 0, 20)
    with pytest.raises(ScoringInputError, match="position 20, got 10"):
        add(h2o, 10, 50)
    add(h2o, 20, 50)
    with pytest.raises(ScoringInputError, match=r"up to \(not including\) 50 in all 2"):
        h2o.finish()
    add(h2o, 0, 50, layer=1)
    h2o.finish()
    with pytest.raises(ScoringInputError, match="already finished"):
        h2o.finish()
    with pytest.raises(ScoringInputError, match="already finished"):
        add(h2o, 0, 50)
    with pytest.raises(ScoringInputError, match="got no further than 50"):
        model.statistic("kvzip", chunk=(1, 50)).finish()


def test_bad_numbers_and_shapes_are_refused() -> None:
    model = Model(length=50, latent=5)
    q, k = model.q[0], model.k[0]
    statistic = model.statistic("snapkv")
    bad: list[tuple[Tensor, Tensor, int, int, str]] = [
        (q, k, 2, 0, "layer must lie in 0..1"),
        (q[:, :3], k, 0, 0, "q must be"),
        (q[:0], k[:0], 0, 0, "n >= 1"),
        (q[10:], k[:49], 0, 10, "keys of all positions"),
        (q, k, 0, -1, "keys of all positions"),
    ]
    for queries, keys, layer, first, message in bad:
        with pytest.raises(ScoringInputError, match=message):
            statistic.add(layer, queries, keys, scale=1.0, first_position=first)
    shared = {"latent_len": 0, "heads": 4, "kv_heads": 2, "layers": 1, "device": "cpu"}
    for change, message in [
        ({"sender_len": 0}, "sender_len"),
        ({"sender_len": 5, "latent_len": 5}, "latent_len"),
        ({"sender_len": 5, "heads": 3}, "multiple"),
        ({"sender_len": 5, "scratch_bytes": 0}, "scratch_bytes"),
        ({"sender_len": 5, "window": 0}, "window"),
        ({"sender_len": 5, "pool": 4}, "pool must be odd"),
        ({"sender_len": 5, "chunk": (1, 3)}, "takes no chunk"),
    ]:
        with pytest.raises(ScoringInputError, match=message):
            ChunkKv(**{**shared, **change})
    with pytest.raises(ScoringInputError, match="needs a chunk"):
        KvZip(sender_len=5, **shared)
    for chunk in [(0, 3), (3, 3), (2, 6)]:
        with pytest.raises(ScoringInputError, match=r"within 1\.\.5"):
            KvZip(sender_len=5, chunk=chunk, **shared)
    with pytest.raises(ScoringInputError, match="chunkkv, h2o, kvzip, snapkv"):
        statistics.get("h3o")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9000), st.integers(0, 50), st.integers(1, 3000))
def test_kvzip_chunks_cover_every_scored_position_once(length: int, latent: int, size: int) -> None:
    latent = min(latent, length - 1)
    chunks = kvzip_chunks(length, latent, size)
    assert [p for start, stop in chunks for p in range(start, stop)] == list(range(1, length - latent))
    assert all(stop - start <= size for start, stop in chunks)


def test_kvzip_tail() -> None:
    ids = list(range(100, 150))
    assert kvzip_tail([7, 8], ids, (1, 20)) == [7, 8, *range(101, 120)]
    assert kvzip_tail([7, 8], ids, (20, 40)) == [7, 8, *range(112, 120), *range(120, 140)]
    assert kvzip_tail([], ids, (4, 6)) == [101, 102, 103, 104, 105]
    assert kvzip_chunks(4001, 0) == [(1, 2001), (2001, 4001)]
    with pytest.raises(ScoringInputError, match=r"within 1\.\.50"):
        kvzip_tail([7], ids, (40, 51))
    with pytest.raises(ScoringInputError, match="at least one position"):
        kvzip_chunks(10, 0, 0)


def _golden(case: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(GOLDEN / f"{case}.safetensors"), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def _golden_chunkkv(tensors: dict[str, Tensor], meta: dict[str, str]) -> Tensor:
    """Through the statistic, with the window's rows in two passes; latent rows are part of the original's window."""
    length, options = int(meta["T"]), json.loads(meta["chunkkv"])
    window = tensors["layer0.window_q"].shape[1]
    statistic = ChunkKv(
        sender_len=length,
        latent_len=0,
        heads=int(meta["heads"]),
        kv_heads=int(meta["kv_heads"]),
        layers=int(meta["layers"]),
        device="cpu",
        window=options["window_size"],
        pool=options["kernel_size"],
    )
    middle = length - window // 2
    for start, stop in ((length - window, middle), (middle, length)):
        for i in range(int(meta["layers"])):
            k = tensors[f"layer{i}.k"][:, :length]
            if f"layer{i}.window_k_tail" in tensors:
                k = torch.cat([k[:, : length - window], tensors[f"layer{i}.window_k_tail"]], dim=1)
            q = tensors[f"layer{i}.window_q"][:, start - length + window : stop - length + window]
            statistic.add(
                i,
                q.transpose(0, 1),
                k[:, :stop].transpose(0, 1),
                scale=float(meta["scaling"]),
                first_position=start,
            )
    return statistic.finish()


@pytest.mark.parametrize("case", CASES)
def test_golden_chunkkv(case: str) -> None:
    tensors, meta = _golden(case)
    length, latent = int(meta["T"]), int(meta["latent_steps"])
    chunk = json.loads(meta["chunkkv"])["chunk_size"]
    statistic = _golden_chunkkv(tensors, meta)
    scores = pin_first(spread(span_means(statistic, chunk), length, chunk))
    if chunk == 16:
        assert torch.equal(get("chunkkv")(SelectorContext(length, latent, statistic=statistic)), scores)
    # c8's logits are in the hundreds.
    rtol = 2e-5 if case.startswith("c8") else 1e-6
    torch.testing.assert_close(scores[1:], tensors["chunkkv_score"][1:], rtol=rtol, atol=0)
    compared = 0
    for key in (k for k in tensors if k.startswith("sel.chunkkv.")):
        budget, span = (int(part[1:]) for part in key.split(".")[2:])
        margin = MARGINS[case][key]
        if margin is not None and margin[0] is not None and margin[0] < 1e-4:
            continue
        kept = keep_positions_reference(scores.tolist(), budget, [0, *range(length - latent, length)], (), span)
        assert kept == tensors[key].tolist(), key
        compared += 1
    assert compared > 2
