"""CPU attention over the paged pool against its plain float64 definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cb_kernels.cpu_attention import (
    ExtendRequest,
    decode_attention,
    extend_attention,
    plan_decode,
    plan_extend,
)
from cb_kernels.cpu_attention_math import attend


def definition(
    requests: list[ExtendRequest],
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    window: int | None,
    logit_cap: float,
) -> tuple[Tensor, Tensor]:
    """Eager float64: keys expanded to all heads, one masked softmax a request."""
    group = q.shape[1] // k_pool.shape[1]
    out = torch.zeros(*q.shape[:2], v_pool.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for r in requests:
        rows = slice(r.row_start, r.row_start + r.row_count)
        k, v = (pool[r.slots].double().repeat_interleave(group, 1) for pool in (k_pool, v_pool))
        s = torch.einsum("ihd,jhd->hij", q[rows].double(), k) * scale
        if logit_cap > 0:
            s = logit_cap * torch.tanh(s / logit_cap)
        at = torch.arange(len(r.slots) - r.row_count, len(r.slots)).unsqueeze(1)
        seen = torch.arange(len(r.slots))
        hidden = seen > at
        if window is not None and window >= 0:
            hidden = hidden | (seen < at - window)
        s = s.masked_fill(hidden, -math.inf)
        lse[rows] = s.logsumexp(-1).T
        out[rows] = torch.einsum("hij,jhd->ihd", s.softmax(-1), v)
    return out, lse


class Batch:
    """Requests over a pool whose unused slots hold NaN."""

    def __init__(
        self,
        shapes: list[tuple[int, int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        senders: tuple[int, ...] = (),
        scattered: bool = True,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """shapes: a request's (sender or -1, private prefix, rows); senders: lengths of shared prefixes."""
        gen = torch.Generator().manual_seed(seed)
        used = sum(senders) + sum(p + r for _, p, r in shapes)
        pool = 2 * used + 7
        order = torch.randperm(pool, generator=gen) if scattered else torch.arange(3, pool)
        free = iter(torch.split(order[:used], [*senders, *(p + r for _, p, r in shapes)]))
        shared = [next(free) for _ in senders]
        self.requests: list[ExtendRequest] = []
        row = 0
        for sender, _, rows in shapes:
            own = next(free)
            slots = own if sender < 0 else torch.cat([shared[sender], own])
            self.requests.append(ExtendRequest(row, rows, slots))
            row += rows
        self.k = torch.full((pool, kv_heads, dim), math.nan)
        self.v = torch.full((pool, kv_heads, value_dim or dim), math.nan)
        for x in (self.k, self.v):
            x[order[:used]] = torch.randn(used, *x.shape[1:], generator=gen)
        self.k, self.v = self.k.to(dtype), self.v.to(dtype)
        self.q = torch.randn(row, heads, dim, generator=gen).to(dtype)
        self.scale = 1.3 / math.sqrt(dim)

    def check(self, window: int | None = None, logit_cap: float = 0.0) -> None:
        plan = plan_extend(self.requests)
        out, lse = extend_attention(plan, self.q, self.k, self.v, scale=self.scale, window=window, logit_cap=logit_cap)
        want, want_lse = definition(self.requests, self.q, self.k, self.v, self.scale, window, logit_cap)
        assert out.dtype == self.q.dtype and lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
        tight = self.q.dtype == torch.float32
        torch.testing.assert_close(out.double(), want, atol=1e-5 if tight else 4e-3, rtol=1e-5 if tight else 4e-3)


RAGGED = [
    (0, 0, 5),
    (0, 40, 24),
    (-1, 0, 17),
    (0, 0, 1),
    (-1, 700, 9),
    (1, 3, 64),
    (1, 0, 200),
    (0, 300, 2),
    (-1, 1200, 30),
]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [None, -1, 0, 1, 30, 127, 511, 850, 100_000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 64), (8, 4, 32), (8, 1, 48), (3, 3, 256)])
def test_ragged_batch(heads: int, kv_heads: int, dim: int, window: int | None, scattered: bool) -> None:
    batch = Batch(RAGGED, heads=heads, kv_heads=kv_heads, dim=dim, senders=(900, 70), scattered=scattered, seed=dim)
    batch.check(window)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    senders = tuple(draw(st.lists(st.integers(1, 700), max_size=3)))
    shape = st.tuples(
        st.integers(-1, len(senders) - 1),
        st.sampled_from([0, 0, 1, 63, 64, 65, 255, 300, 600, 900]),
        st.sampled_from([1, 1, 2, 24, 127, 128, 129, 257, 300]),
    )
    kv_heads = draw(st.integers(1, 3))
    dim = draw(st.sampled_from([32, 33, 80, 128]))
    batch = Batch(
        draw(st.lists(shape, min_size=1, max_size=6)),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        dim=dim,
        value_dim=draw(st.sampled_from([dim, dim, 32, 64])),
        senders=senders,
        scattered=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    window = draw(st.one_of(st.none(), st.integers(0, 80), st.integers(81, 1200)))
    batch.check(window, draw(st.sampled_from([0.0, 0.0, 2.0])))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("value_dim", "logit_cap"), [(64, 3.0), (32, 0.0), (96, 5.0)])
def test_soft_cap_and_value_dim(value_dim: int, logit_cap: float, window: int | None) -> None:
    batch = Batch([*RAGGED, (-1, 600, 700)], heads=4, kv_heads=2, dim=64, value_dim=value_dim, senders=(900, 70))
    batch.check(window, logit_cap)


@pytest.mark.parametrize("window", [None, 100])
def test_bfloat16_pool(window: int | None) -> None:
    Batch(RAGGED, heads=8, kv_heads=2, dim=64, senders=(900, 70), dtype=torch.bfloat16).check(window)


@pytest.mark.parametrize("window", [None, 511])
@pytest.mark.parametrize("logit_cap", [0.0, 4.0])
def test_long_cold_prefill(window: int | None, logit_cap: float) -> None:
    Batch([(-1, 0, 1500)], heads=2, kv_heads=1, dim=32, scattered=False).check(window, logit_cap)


@pytest.mark.parametrize("edge", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("rows", [1, 24, 300])
def test_window_at_the_border_of_prefix_and_own_rows(rows: int, edge: int) -> None:
    """Windows that just reach, or just miss, the first position, the border, and the first own row."""
    batch = Batch([(-1, 400, rows)], heads=2, kv_heads=1, dim=32)
    for reach in (400, rows, 400 + rows):
        if reach + edge >= 0:
            batch.check(reach + edge)


@pytest.mark.parametrize("shared_mask", [False, True])
def test_plain_math_agrees_with_the_fused_operator(shared_mask: bool) -> None:
    """The same call through both ways; some rows see nothing of the first two key blocks."""
    gen = torch.Generator().manual_seed(3)
    q = torch.randn(2, 2, 3, 40, 32, generator=gen)
    k, v = torch.randn(2, 2, 1300, 32, generator=gen), torch.randn(2, 2, 1300, 32, generator=gen)
    mask = torch.zeros(2, 1, 40, 1300)
    mask[0, :, 10:, :1100] = mask[1, :, :30, 900:] = -math.inf
    if shared_mask:
        mask = mask[0, 0]
    else:
        q = q[:, :, :1]
    out, lse = attend(q, k, v, scale=0.2, mask=mask)
    # An enormous cap changes nothing but the way; a narrower v takes the plain way too.
    for plain_out, plain_lse in (
        attend(q, k, v, scale=0.2, mask=mask, logit_cap=1e6),
        attend(q, k, v[..., :16], scale=0.2, mask=mask),
    ):
        torch.testing.assert_close(plain_out, out[..., : plain_out.shape[-1]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(plain_lse, lse, atol=1e-5, rtol=0)


def test_several_threads_split_the_keys() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            Batch([(-1, 2048, 3), (-1, 1111, 1)], heads=2, kv_heads=1, dim=64).check()
    finally:
        torch.set_num_threads(before)


def test_shared_prefix_is_read_once() -> None:
    batch = Batch([(0, 0, 24)] * 5 + [(-1, 0, 24)], heads=4, kv_heads=1, dim=32, senders=(1024,))
    plan = plan_extend(batch.requests)
    assert [(s.members, s.length) for s in plan.shared] == [((0, 1, 2, 3, 4), 1024)]
    passes = plan.passes(None, 4)
    assert [(p.batch, p.rows_each, p.keys_each) for p in passes] == [(1, 120, 1024), (5, 24, 24), (1, 24, 24)]
    assert plan.passes(-1, 4) is passes and plan.passes(5000, 4) is passes
    # 511 before the last row: 488 of the shared slots are seen by all 24 rows, 512 - 488 + 23 more by some.
    windowed = plan.passes(511, 4)
    assert (windowed[0].rows_each, windowed[0].keys_each) == (120, 448)


def test_consecutive_slots_are_not_copied() -> None:
    slots = torch.arange(100, 100 + 1000)
    main, tail = plan_extend([ExtendRequest(0, 10, slots)]).passes(None, 1)
    assert main.keys == slice(100, 100 + 960) and tail.keys == slice(1060, 1100)


def test_grouping_takes_what_saves_most_and_stops_at_64() -> None:
    base = torch.arange(0, 2000)
    other = 5000 + torch.arange(0, 2000)

    def request(row: int, common: int, total: int, tag: int) -> ExtendRequest:
        own = 10_000 + 1000 * tag + torch.arange(total - common)
        return ExtendRequest(row, 1, torch.cat([base[:common], own]))

    plan = plan_extend(
        [
            request(0, 1500, 1600, 0),
            request(1, 1500, 1501, 1),
            request(2, 1500, 1700, 2),
            request(3, 64, 100, 3),
            request(4, 64, 90, 4),
            request(5, 63, 200, 5),
            request(6, 63, 200, 6),
            ExtendRequest(7, 1, other),
            ExtendRequest(8, 1, torch.cat([other[:700], base[:50]])),
            ExtendRequest(9, 300, torch.cat([other[:700], base[50:400]])),
        ]
    )
    assert sorted((s.members, s.length) for s in plan.shared) == [
        ((0, 1, 2), 1500),
        ((3, 4), 64),
        ((7, 8), 700),
    ]


def test_own_rows_are_never_taken_for_a_prefix() -> None:
    """Two requests may name the same slots throughout; their last rows still see no later key."""
    slots = torch.arange(300)
    requests = [ExtendRequest(0, 5, slots), ExtendRequest(5, 100, slots), ExtendRequest(105, 1, slots[:150])]
    gen = torch.Generator().manual_seed(1)
    k, v = (torch.randn(300, 2, 32, generator=gen) for _ in range(2))
    q = torch.randn(106, 4, 32, generator=gen)
    out, lse = extend_attention(plan_extend(requests), q, k, v, scale=0.2)
    want, want_lse = definition(requests, q, k, v, 0.2, None, 0.0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 0, 511, 900])
@pytest.mark.parametrize("shared", [False, True])
def test_decode(dtype: torch.dtype, window: int | None, shared: bool) -> None:
    shapes = [(0, n, 1) for n in (0, 5, 900)] if shared else [(-1, n, 1) for n in (0, 1, 300, 2000)]
    batch = Batch(shapes, heads=4, kv_heads=1, dim=64, senders=(1000,) if shared else (), dtype=dtype)
    slots = [r.slots for r in batch.requests]
    out = decode_attention(batch.q, batch.k, batch.v, slots, scale=batch.scale, window=window)
    want, _ = definition(batch.requests, batch.q, batch.k, batch.v, batch.scale, window, 0.0)
    tight = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), want, atol=tight, rtol=tight)
    planned = torch.empty_like(out)
    again = decode_attention(
        batch.q, batch.k, batch.v, plan_decode(slots), scale=batch.scale, window=window, out=planned
    )
    assert again is planned and torch.equal(planned, out)


def test_slots_in_several_runs() -> None:
    """Runs (a prompt, later turns) between scattered slots: some are read in place, the rest gathered."""
    first, second, third = torch.arange(0, 500), torch.arange(600, 1100), torch.arange(1300, 1650)
    slots = torch.cat([first, torch.arange(2000, 1900, -3), second, third, torch.arange(1800, 1890, 2)])
    gen = torch.Generator().manual_seed(2)
    k, v = torch.randn(2100, 1, 64, generator=gen), torch.randn(2100, 1, 64, generator=gen)
    for rows in (1, 20, 400):
        requests = [ExtendRequest(0, rows, slots)]
        q = torch.randn(rows, 4, 64, generator=gen)
        for window in (None, 900):
            out, lse = extend_attention(plan_extend(requests), q, k, v, scale=0.2, window=window)
            want, want_lse = definition(requests, q, k, v, 0.2, window, 0.0)
            torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
            torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


def test_out_argument_and_unclaimed_rows() -> None:
    batch = Batch([(-1, 100, 7)], heads=2, kv_heads=1, dim=32)
    q = torch.cat([batch.q, torch.full((3, 2, 32), math.nan)])
    plan = plan_extend(batch.requests)
    out, lse = extend_attention(plan, q, batch.k, batch.v, scale=batch.scale)
    assert torch.equal(out[7:], torch.zeros(3, 2, 32)) and bool((lse[7:] == -math.inf).all())
    for dtype in (torch.float32, torch.bfloat16):
        given_out = torch.full((10, 2, 32), 5.0, dtype=dtype)
        same, _ = extend_attention(plan, q, batch.k, batch.v, scale=batch.scale, out=given_out)
        assert same is given_out
        torch.testing.assert_close(given_out[:7], out[:7].to(dtype))
        assert bool((given_out[7:] == 5.0).all())


def test_strided_pools_and_int32_slots() -> None:
    batch = Batch(RAGGED, heads=4, kv_heads=2, dim=64, senders=(900, 70))
    want, want_lse = extend_attention(plan_extend(batch.requests), batch.q, batch.k, batch.v, scale=0.1)
    narrow = [ExtendRequest(r.row_start, r.row_count, r.slots.int()) for r in batch.requests]
    both = torch.stack([batch.k, batch.v], dim=-1)
    out, lse = extend_attention(plan_extend(narrow), batch.q, both[..., 0], both[..., 1], scale=0.1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_bad_requests_are_refused() -> None:
    slots = torch.arange(10)
    for bad, says in (
        ([], "at least one request"),
        ([ExtendRequest(0, 0, slots)], "at least one row"),
        ([ExtendRequest(0, 11, slots)], "do not fit"),
        ([ExtendRequest(0, 2, slots), ExtendRequest(1, 2, slots)], "overlap"),
        ([ExtendRequest(0, 2, slots - 1)], "negative"),
        ([ExtendRequest(0, 2, slots.float())], "int64"),
    ):
        with pytest.raises(ValueError, match=says):
            plan_extend(bad)


def test_bad_tensors_are_refused() -> None:
    plan = plan_extend([ExtendRequest(0, 2, torch.arange(10))])
    q, pool = torch.zeros(2, 4, 32), torch.zeros(10, 2, 32)
    for args, kwargs, says in (
        ((q[:1], pool, pool), {}, "row 1"),
        ((q, pool[:9], pool[:9]), {}, "slot 9"),
        ((q[:, :3], pool, pool), {}, "multiple"),
        ((q, pool[..., :16], pool), {}, "dim"),
        ((q, pool, pool), {"logit_cap": -1.0}, "logit_cap"),
        ((q, pool, pool), {"out": torch.zeros(2, 4, 31)}, "out must be"),
    ):
        with pytest.raises(ValueError, match=says):
            extend_attention(plan, *args, scale=0.1, **kwargs)
    with pytest.raises(TypeError, match="float16"):
        extend_attention(plan, q, pool.half(), pool, scale=0.1)
    with pytest.raises(ValueError, match="at least one key"):
        attend(torch.zeros(1, 1, 1, 2, 32), torch.zeros(1, 1, 0, 32), torch.zeros(1, 1, 0, 32), scale=1.0)
