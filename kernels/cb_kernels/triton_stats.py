"""Compile a kernel for a GPU that is not there, and read what the compiler made of it.

python -m cb_kernels.triton_stats --arch 80 90 100
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cb_kernels.triton_kernels import fold_kernel, lse_kernel, moment_kernel
from cb_kernels.triton_lse import lse_constants
from cb_kernels.triton_moments import FOLD_TILE, moment_constants
from cb_kernels.triton_tiling import Tiling, default_tiling

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Strides that real pools do not make multiples of 16 are left general.
ALIGNED = (
    "q_row_stride",
    "q_head_stride",
    "k_slot_stride",
    "k_head_stride",
    "lse_row_stride",
    "partial_row_stride",
    "partial_split_stride",
)
MATRIX_OPCODES = ("HMMA", "HGMMA", "UTCHMMA")


@dataclass(frozen=True, slots=True)
class KernelStats:
    """What ``cuobjdump`` and ``nvdisasm`` say: registers and stack bytes a thread, shared bytes a program."""

    registers: int
    stack: int
    spill_instructions: int
    shared: int
    instructions: int
    matrix_instructions: int
    async_copies: int
    """Copies that run ahead of the loop; none means that the software pipeline is gone."""


def compile_stats(
    kernel: Any, constants: dict[str, Any], *, dtype: torch.dtype, arch: int, warps: int, index: str = "i32"
) -> KernelStats:
    """Compile ``kernel`` for ``sm_{arch}``, no GPU needed; ``index`` is the type of ``kv_indices``."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("q", "k_pool"):
            signature[name] = "*" + TYPE_NAMES[dtype]
        elif name == "kv_indices":
            signature[name] = "*" + index
        elif name in ("work", "fold"):
            signature[name] = "*i64"
        elif name == "scale_log2":
            signature[name] = "fp32"
        elif name.endswith("stride"):
            signature[name] = "i32"
        else:
            signature[name] = "*fp32"
        if signature[name].startswith("*") or name in ALIGNED:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    return _read_binary(compiled.asm["cubin"], compiled.metadata.shared)


def moment_stats(
    *,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    arch: int,
    rows: int = 32,
    tiling: Tiling | None = None,
    index: str = "i32",
    add: bool = False,
    sink_free: bool = False,
) -> KernelStats:
    """``moment_kernel`` with the default tiling for queries of ``rows`` rows, or with the given one."""
    tiling = tiling or default_tiling(group, head_dim, dtype, [rows], arch)
    constants = moment_constants(tiling, 8, group, head_dim, sink_free=sink_free, add=add)
    return compile_stats(moment_kernel, constants, dtype=dtype, arch=arch, warps=tiling.warps, index=index)


def fold_stats(*, group: int, arch: int) -> KernelStats:
    """``fold_kernel`` for 8 KV heads."""
    constants = {"KV_HEADS": 8, "GROUP": group, "TILE": FOLD_TILE}
    return compile_stats(fold_kernel, constants, dtype=torch.float32, arch=arch, warps=4)


def lse_stats(*, group: int, head_dim: int, dtype: torch.dtype, arch: int, rows: int = 32) -> KernelStats:
    """``lse_kernel`` as ``plan_lse`` would launch it."""
    tiling = default_tiling(group, head_dim, dtype, [rows])
    constants = lse_constants(group, head_dim, tiling)
    return compile_stats(lse_kernel, constants, dtype=dtype, arch=arch, warps=tiling.warps)


def tool(name: str) -> str:
    """Path of one of the NVIDIA tools that come with Triton."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_binary(cubin: bytes, shared: int) -> KernelStats:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run(
            [tool("cuobjdump"), "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        listing = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump reports no resources: {usage[:200]!r}")
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", listing)
    return KernelStats(
        registers=int(resources[1]),
        stack=int(resources[2]),
        spill_instructions=sum(op in ("LDL", "STL") for op in opcodes),
        shared=shared,
        instructions=len(opcodes),
        matrix_instructions=sum(op in MATRIX_OPCODES for op in opcodes),
        async_copies=opcodes.count("LDGSTS"),
    )


def main() -> None:
    """Print a table over the usual models."""
    parser = argparse.ArgumentParser(description="registers, spills and shared memory of the Triton kernels")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--group", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    dtype = next(kind for kind, name in TYPE_NAMES.items() if name == options.dtype)
    print(f"{'kernel':8}{'arch':>5}{'g':>3}{'D':>5}{'regs':>6}{'stack':>7}{'smem':>8}{'instr':>7}{'mma':>5}")
    for arch, head_dim, group in itertools.product(options.arch, options.head_dim, options.group):
        shape = {"group": group, "head_dim": head_dim, "dtype": dtype, "arch": arch}
        for name, stats in (("moment", moment_stats(**shape)), ("lse", lse_stats(**shape))):
            print(
                f"{name:8}{arch:5}{group:3}{head_dim:5}{stats.registers:6}{stats.stack:7}{stats.shared:8}"
                f"{stats.instructions:7}{stats.matrix_instructions:5}",
                flush=True,
            )


if __name__ == "__main__":
    main()
