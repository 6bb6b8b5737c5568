"""The compiled CPU kernel beyond its sums (those: test_scoring, test_golden): how it is built, picked and bounded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cb_kernels import cpu_native_build
from cb_kernels.cpu_moments import score_layer_cpu
from cb_kernels.cpu_native import score_layer_native, takes_natively
from cb_kernels.cpu_native_build import SWITCH, build, cache_directory, native_library
from cb_kernels.errors import ScoringInputError
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.score import score_layer

compiled = pytest.mark.skipif(native_library() is None, reason="no compiled kernel on this machine")

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 11, 700, 4, 2, 32


class Batch:
    """Three queries over one sender; keys in slots of a pool that are not in order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(1)
        self.q = torch.randn(3 * ROWS, HEADS, DIM, generator=draw).to(dtype)
        self.pool = torch.randn(LENGTH + 9, KV_HEADS, DIM, generator=draw).to(dtype)
        self.lse = 6.0 + torch.rand(3 * ROWS, HEADS, generator=draw)
        self.slots = torch.randperm(LENGTH + 9, generator=draw)[:LENGTH]

    def plan(self, *, order: float = 2.0, carry: Carry | None = None, scratch_bytes: int = 1 << 20) -> ScoringPlan:
        total = ROWS + 1 if carry else ROWS
        first = QuerySegment(0, ROWS, 0, LENGTH, total, carry)
        rest = [QuerySegment(i * ROWS, ROWS, 0, LENGTH, ROWS) for i in (1, 2)]
        return plan_scoring(
            [first, *rest],
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            layers=1,
            kv_indices=self.slots,
            device="cpu",
            order=order,
            scratch_bytes=scratch_bytes,
        )


SUMS = ("votes", "energy", "row_energy")


def assert_same_bits(one: ScoringPlan, other: ScoringPlan) -> None:
    for first, second in zip(one.finish(), other.finish(), strict=True):
        assert first is not None and second is not None
        assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in SUMS)


@compiled
def test_the_result_has_the_same_bits_whatever_the_number_of_threads() -> None:
    batch, threads = Batch(), torch.get_num_threads()
    plans = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            plans.append(batch.plan())
            score_layer_native(plans[-1], 0, batch.q, batch.pool, batch.lse, scale=0.2)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(plans[0].sum_a, plans[1].sum_a) and torch.equal(plans[0].sum_p, plans[2].sum_p)
    assert_same_bits(plans[0], plans[2])


@compiled
def test_strided_tensors_are_read_as_they_lie() -> None:
    """q and the pool as SGLang may hand them: parts of wider rows."""
    batch = Batch()
    straight, strided = batch.plan(), batch.plan()
    score_layer_native(straight, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    q = torch.cat([batch.q, batch.q], dim=1)[:, :HEADS]
    pool = torch.stack([batch.pool, batch.pool], dim=1)[:, 1]
    score_layer_native(strided, 0, q, pool, batch.lse.t().contiguous().t(), scale=0.2)
    assert torch.equal(strided.sum_a, straight.sum_a) and torch.equal(strided.sum_p, straight.sum_p)


@compiled
def test_keys_strided_along_d_go_to_torch() -> None:
    """The compiled kernel would need a copy of the whole pool."""
    batch = Batch()
    straight, across = batch.plan(), batch.plan()
    score_layer(straight, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    score_layer(across, 0, batch.q, batch.pool.transpose(1, 2).contiguous().transpose(1, 2), batch.lse, scale=0.2)
    assert "cpu_native" in straight.workspace and "cpu_native" not in across.workspace
    torch.testing.assert_close(across.sum_p, straight.sum_p, rtol=1e-5, atol=1e-37)


@compiled
def test_its_exponential_is_good_to_float32() -> None:
    """One row whose logits are given exactly: the votes are 2^x for x from -120 to 0."""
    exponents = torch.linspace(-120.0, 0.0, 5000)
    pool = torch.zeros(5000, 1, 16)
    pool[:, 0, 0] = exponents
    plan = plan_scoring(
        [QuerySegment(0, 1, 0, 5000, 1)],
        heads=1,
        kv_heads=1,
        head_dim=16,
        layers=1,
        kv_indices=torch.arange(5000),
        device="cpu",
    )
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 1.0
    score_layer_native(plan, 0, q, pool, torch.zeros(1, 1), scale=0.6931471805599453)
    (moments,) = plan.finish()
    assert moments is not None
    # The factor ln 2 times log2(e) rounds once or twice, which shifts x by its last bit: not the exponential's doing.
    error = (moments.votes.double() / exponents.double().exp2() - 1).abs()
    assert float((error - exponents.abs() * 2.0**-23).max()) < 4e-7


@compiled
def test_weights_below_float32_are_zero_and_nan_is_not_hidden() -> None:
    batch = Batch()
    batch.lse[0] = float("inf")
    batch.lse[1] = 1e4
    plan = batch.plan()
    score_layer_native(plan, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    assert bool(torch.isfinite(plan.sum_a).all())
    batch.q[0] = float("nan")
    plan = batch.plan()
    score_layer_native(plan, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    poisoned, healthy, _ = plan.finish()
    assert poisoned is not None and bool(poisoned.votes.isnan().all())
    assert healthy is not None and bool(torch.isfinite(healthy.votes).all())


@compiled
def test_slots_outside_the_pool_are_refused() -> None:
    """Here an index error would be a read of foreign memory."""
    batch = Batch()
    for bad in (-1, LENGTH + 9):
        batch.slots[5] = bad
        with pytest.raises(ScoringInputError, match="the pool has 709"):
            score_layer_native(batch.plan(), 0, batch.q, batch.pool, batch.lse, scale=0.2)


@compiled
def test_scratch_stays_within_the_plans_bound() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        batch = Batch()
        plan = batch.plan()
        score_layer_native(plan, 0, batch.q, batch.pool, batch.lse, scale=0.2)
        scratch: Tensor = plan.workspace["cpu_native"].scratch
        assert 1 < scratch.shape[0] < 64 and scratch.numel() * 4 <= plan.scratch_bytes
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_switched_off_the_torch_path_is_taken_and_agrees(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    batch = Batch(dtype)
    fast, slow, torch_only = batch.plan(), batch.plan(), batch.plan()
    score_layer(fast, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    monkeypatch.setenv(SWITCH, "0")
    assert not takes_natively(slow, batch.pool)
    score_layer(slow, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    score_layer_cpu(torch_only, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    assert "cpu_native" in fast.workspace and "cpu_native" not in slow.workspace
    for name in ("sum_a", "sum_p"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), rtol=1e-5, atol=1e-37)
    assert_same_bits(slow, torch_only)
    with pytest.raises(ScoringInputError, match="use score_layer"):
        score_layer_native(batch.plan(), 0, batch.q, batch.pool, batch.lse, scale=0.2)


def test_other_orders_go_to_torch() -> None:
    batch = Batch()
    carry = Carry.empty(layers=1, kv_heads=KV_HEADS, sender_len=LENGTH, device="cpu")
    plan = batch.plan(order=3.0, carry=carry)
    assert not takes_natively(plan, batch.pool)
    score_layer(plan, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    first, second, _ = plan.finish()
    assert first is None and second is not None and float(second.energy.min()) > 0.0


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process that has not looked for the library yet, and one after the test."""
    cpu_native_build._load.cache_clear()
    yield
    cpu_native_build._load.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_scores_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    batch = Batch()
    plan, expected = batch.plan(), batch.plan()
    score_layer(plan, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    score_layer_cpu(expected, 0, batch.q, batch.pool, batch.lse, scale=0.2)
    assert_same_bits(plan, expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "needs g++" in record.getMessage()


@pytest.mark.usefixtures("fresh")
def test_a_source_that_does_not_compile_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(cpu_native_build, "_SOURCE", source)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("CB_SGLANG_CACHE", str(tmp_path / "cache"))
    assert native_library() is None
    assert "broken.cpp" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_a_cpu_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(OSError, match="AVX2"):
        build(tmp_path)


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernel that compiles in no time, in place of the real one."""
    if native_library() is None:
        pytest.skip("no compiler, or no AVX2")
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(cpu_native_build, "_SOURCE", source)
    return source


def test_a_library_is_compiled_once_and_again_when_its_source_changes(small_source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    first = build(folder)
    stamp = first.stat().st_mtime_ns
    assert build(folder) == first and first.stat().st_mtime_ns == stamp
    assert folder.stat().st_mode & 0o777 == 0o700 and first.stat().st_mode & 0o077 == 0
    for number in range(6):
        small_source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
        assert build(folder) != first
    assert len(list(folder.iterdir())) == 4, "old libraries are removed"


def test_nothing_is_loaded_from_where_others_can_write(small_source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    library = build(folder)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="not ours alone"):
        build(folder)
    folder.chmod(0o700)
    library.chmod(0o722)
    with pytest.raises(PermissionError, match="not ours alone"):
        build(folder)
    library.chmod(0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="others can replace"):
        build(folder)
    folder.parent.chmod(0o1777)  # as /tmp: others cannot rename what is ours
    assert build(folder) == library


@compiled
def test_it_brings_no_openmp_runtime_of_its_own() -> None:
    """Its threads must be torch's: no libgomp among what the library asks the loader for."""
    assert b"libgomp" not in build(cache_directory()).read_bytes()
