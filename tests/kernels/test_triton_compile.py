"""The default configurations compile for A100, H100 and B200 without a GPU, and keep to the registers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cb_kernels.triton_stats import KernelStats, fold_stats, lse_stats, moment_stats, tool
from cb_kernels.triton_tiling import default_tiling

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
if not Path(tool("cuobjdump")).exists() and shutil.which("cuobjdump") is None:
    pytest.skip("this Triton has no NVIDIA tools", allow_module_level=True)

ARCHES = [80, 90, 100]
# Shared memory a program may take on the smallest device of each architecture (A100, H100, B200), bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _own_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    # SGLang, which other tests may have imported, points Triton to the machine's assembler instead of its own.
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)


def assert_keeps_to_the_registers(stats: KernelStats, arch: int) -> None:
    assert stats.stack == 0 and stats.spill_instructions == 0
    assert stats.registers <= 255
    assert stats.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "rows"),
    [
        (2, 128, BF16, 32),  # Qwen3-0.6B
        (4, 128, BF16, 32),  # Qwen3-4B, 8B
        (8, 128, BF16, 32),  # Qwen3-32B
        (4, 128, BF16, 9),  # short queries take small blocks
        (4, 256, BF16, 32),  # Gemma 3 270M
        (3, 80, FP16, 32),
        (1, 128, FP32, 32),
        (8, 128, FP32, 32),
    ],
)
def test_moment_kernel(group: int, head_dim: int, dtype: torch.dtype, rows: int, arch: int) -> None:
    stats = moment_stats(group=group, head_dim=head_dim, dtype=dtype, arch=arch, rows=rows)
    assert_keeps_to_the_registers(stats, arch)
    assert stats.matrix_instructions > 0  # the logits do go through the tensor cores
    if dtype != FP32:
        assert stats.async_copies > 0
        # Two programs fit a multiprocessor (64 Ki registers): one computes while the other waits.
        tiling = default_tiling(group, head_dim, dtype, [rows], arch)
        assert 2 * stats.registers * 32 * tiling.warps <= 65536


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("group", "head_dim", "dtype"), [(4, 128, BF16), (4, 256, BF16), (2, 64, FP32)])
def test_lse_kernel(group: int, head_dim: int, dtype: torch.dtype, arch: int) -> None:
    assert_keeps_to_the_registers(lse_stats(group=group, head_dim=head_dim, dtype=dtype, arch=arch), arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_fold_kernel(arch: int) -> None:
    assert_keeps_to_the_registers(fold_stats(group=4, arch=arch), arch)


def test_int64_indices_and_adding_rounds_keep_to_the_registers() -> None:
    for options in ({"index": "i64"}, {"add": True}, {"sink_free": True}):
        stats = moment_stats(group=4, head_dim=128, dtype=BF16, arch=90, **options)
        assert_keeps_to_the_registers(stats, 90)
