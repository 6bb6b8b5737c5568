"""Time of the scoring kernels against what the hardware allows. Needs torch (and Triton for a GPU), nothing else:

    python kernels/bench/scoring.py --json scoring.json        # on a GPU: under 8 minutes
    python kernels/bench/scoring.py --quick                    # on a laptop CPU
    python kernels/bench/scoring.py --sweep                    # try other tilings on this GPU

One row is one scored layer: M queries of R rows over one sender of T positions. The compute floor is the time of
2 M R H T D floating-point operations at the device's peak, the memory floor that of reading the keys once and the
queries, and writing the moments, at its bandwidth; "of floor" is the larger one over the time measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor

from cb_kernels.cpu_moments import score_layer_cpu
from cb_kernels.cpu_native import score_layer_native
from cb_kernels.cpu_native_build import native_library
from cb_kernels.moments import Moments
from cb_kernels.plan import QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.reference import layer_lse, layer_moments
from cb_kernels.score import score_layer

# heads, KV heads, head size, layers
MODELS = {
    "Qwen3-0.6B": (16, 8, 128, 28),
    "Qwen3-4B": (32, 8, 128, 36),
    "Qwen3-8B": (32, 8, 128, 36),
    "Qwen3-32B": (64, 8, 128, 64),
    "93M": (8, 4, 64, 12),
}
# Data sheets: dense bfloat16 TFLOP/s, TB/s. The first name found in the device's wins.
PEAKS = {
    "H200": (989.0, 4.8),
    "H100 PCIe": (756.0, 2.0),
    "H100 NVL": (835.0, 3.9),
    "H100": (989.0, 3.35),
    "B200": (2250.0, 8.0),
    "A100": (312.0, 2.0),
    "L40S": (362.0, 0.864),
    "RTX 4090": (165.0, 1.0),
}
ROWS = 32
# The reference holds every logit in float64; beyond this many it is left out.
REFERENCE_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks in FLOP/s and bytes/s, and whether they come from a data sheet or were measured just now."""

    name: str
    flops: float
    bandwidth: float
    source: str


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table; times in milliseconds for one layer of the whole batch."""

    model: str
    implementation: str
    dtype: str
    queries: int
    positions: int
    rows: int
    milliseconds: float
    milliseconds_a_query_all_layers: float
    tflops: float
    gigabytes_per_second: float
    compute_floor_ms: float
    memory_floor_ms: float
    of_floor: float
    tiling: str = ""


class Batch:
    """M queries of R rows over one sender of T positions whose pool slots lie in random order."""

    def __init__(self, model: str, queries: int, positions: int, rows: int, device: str, dtype: torch.dtype):
        self.model, self.queries, self.positions, self.rows = model, queries, positions, rows
        self.device, self.dtype = device, dtype
        self.heads, self.kv_heads, self.head_dim, self.layers = MODELS[model]
        self.scale = self.head_dim**-0.5
        generator = torch.Generator(device).manual_seed(positions + queries)
        count = queries * rows
        shape = (positions + count, self.kv_heads, self.head_dim)
        self.pool = torch.randn(shape, generator=generator, device=device).to(dtype)
        self.q = torch.randn(count, self.heads, self.head_dim, generator=generator, device=device).to(dtype)
        order = torch.randperm(positions + count, generator=generator, device=device)
        # Each query's own rows follow the sender's slots in its own copy of the indices, as in SGLang.
        own = order[positions:].view(queries, rows)
        sender = order[:positions].expand(queries, positions)
        self.kv_indices = torch.cat([sender, own], dim=1).flatten().to(torch.int32)
        self.sender_slots = order[:positions]
        self.own_slots = own
        self.lse = self._lse()

    def keys(self, query: int) -> tuple[Tensor, Tensor]:
        return self.pool[self.sender_slots], self.pool[self.own_slots[query]]

    def _rows(self, query: int) -> slice:
        return slice(query * self.rows, (query + 1) * self.rows)

    def _lse(self) -> Tensor:
        if self.device == "cuda":
            return self.lse_kernel()()
        parts = []
        for query in range(self.queries):
            k_sender, k_own = self.keys(query)
            q = self.q[self._rows(query)]
            parts.append(layer_lse(q, k_sender, k_own, scale=self.scale, own_visible=0, dtype=torch.float32))
        return torch.cat(parts)

    def lse_kernel(self) -> Callable[[], Tensor]:
        from cb_kernels.triton_lse import LseSegment, layer_lse_triton, plan_lse

        span = self.positions + self.rows
        plan = plan_lse(
            [LseSegment(i * self.rows, self.rows, i * span, self.positions + 1) for i in range(self.queries)],
            rows=self.queries * self.rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kv_indices=self.kv_indices,
        )
        return lambda: layer_lse_triton(plan, self.q, self.pool, scale=self.scale)

    def plan(self, layers: int) -> ScoringPlan:
        """All queries on the first copy of the sender's slots, so that they share it."""
        return plan_scoring(
            [QuerySegment(i * self.rows, self.rows, 0, self.positions, self.rows) for i in range(self.queries)],
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layers=layers,
            kv_indices=self.kv_indices,
            device=self.device,
        )

    def reference(self, query: int, dtype: torch.dtype = torch.float64) -> Moments:
        k_sender, k_own = self.keys(query)
        q = self.q[self._rows(query)]
        return layer_moments(q, k_sender, k_own, scale=self.scale, own_visible=0, dtype=dtype)

    @property
    def flop(self) -> float:
        return 2.0 * self.queries * self.rows * self.heads * self.positions * self.head_dim

    @property
    def bytes(self) -> float:
        item = self.pool.element_size()
        keys = self.positions * self.kv_heads * self.head_dim * item
        rows = self.queries * self.rows * self.heads * (self.head_dim * item + 4)
        return float(keys + rows + self.queries * self.positions * 3 * 4)


def seconds(call: Callable[[], object], device: str, *, repeats: int) -> float:
    """Median time of a call; on a GPU with a cold L2 cache, as in a model where other layers come between."""
    if device != "cuda":
        times = []
        call()
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def describe(device: str) -> Device:
    """The device's peaks: from its data sheet where known, else measured with a matrix product and a copy."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for known, (tflops, terabytes) in PEAKS.items():
            if known in name:
                return Device(name, tflops * 1e12, terabytes * 1e12, "data sheet")
        dtype, size, length = torch.bfloat16, 8192, 1 << 28
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        dtype, size, length = torch.float32, 1536, 1 << 25
    a = torch.randn(size, size, device=device, dtype=dtype)
    product = torch.empty_like(a)
    flops = 2 * size**3 / seconds(lambda: torch.mm(a, a, out=product), device, repeats=5)
    source = torch.ones(length, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    bandwidth = 8 * length / seconds(lambda: target.copy_(source), device, repeats=5)
    return Device(name, flops, bandwidth, "measured")


def measure(
    batch: Batch, name: str, call: Callable[[], object], peaks: Device, repeats: int, tiling: str = ""
) -> Result:
    """Time one implementation on one batch."""
    took = seconds(call, batch.device, repeats=repeats)
    compute, memory = batch.flop / peaks.flops, batch.bytes / peaks.bandwidth
    return Result(
        model=batch.model,
        implementation=name,
        dtype=str(batch.dtype).removeprefix("torch."),
        queries=batch.queries,
        positions=batch.positions,
        rows=batch.rows,
        milliseconds=took * 1e3,
        milliseconds_a_query_all_layers=took * 1e3 * batch.layers / batch.queries,
        tflops=batch.flop / took / 1e12,
        gigabytes_per_second=batch.bytes / took / 1e9,
        compute_floor_ms=compute * 1e3,
        memory_floor_ms=memory * 1e3,
        of_floor=max(compute, memory) / took,
        tiling=tiling,
    )


def layer_call(batch: Batch, repeats: int, score: Callable[..., None] = score_layer) -> Callable[[], None]:
    """``score_layer`` as the engine calls it, one layer after another; or one backend's."""
    plan = batch.plan(layers=repeats + 10)

    def call() -> None:
        score(plan, plan.layers_done, batch.q, batch.pool, batch.lse, scale=batch.scale)

    return call


def implementations(device: str) -> dict[str, Callable[..., None]]:
    """What can score a layer on this device."""
    if device == "cuda":
        return {"triton": score_layer}
    found: dict[str, Callable[..., None]] = {"cpu in torch": score_layer_cpu}
    if native_library() is not None:
        found["cpu compiled"] = score_layer_native
    return found


def relative_error(batch: Batch, score: Callable[..., None]) -> float:
    """A kernel against the float64 definition, worst over the first and the last query."""
    plan = batch.plan(layers=1)
    score(plan, 0, batch.q, batch.pool, batch.lse, scale=batch.scale)
    results = plan.finish()
    worst = 0.0
    for query in {0, batch.queries - 1}:
        got, want = results[query], batch.reference(query)
        assert got is not None
        for field in ("votes", "energy", "row_energy"):
            truth = getattr(want, field).double()
            difference = (getattr(got, field).double() - truth).abs() / truth.abs().clamp_min(1e-30)
            worst = max(worst, float(difference.max()))
    return worst


HEADER = (
    f"{'model':<12}{'impl':<14}{'dtype':<10}{'M':>4}{'T':>8}{'ms/layer':>10}{'ms/query':>10}{'TFLOP/s':>9}"
    f"{'GB/s':>8}{'floors ms (flop, bytes)':>25}{'of floor':>10}"
)


def line(result: Result) -> str:
    floors = f"{result.compute_floor_ms:.4g}, {result.memory_floor_ms:.4g}"
    return (
        f"{result.model:<12}{result.implementation:<14}{result.dtype:<10}{result.queries:>4}"
        f"{result.positions:>8}{result.milliseconds:>10.3f}{result.milliseconds_a_query_all_layers:>10.2f}"
        f"{result.tflops:>9.3f}{result.gigabytes_per_second:>8.1f}{floors:>25}{result.of_floor:>10.1%}"
        f"{'  ' + result.tiling if result.tiling else ''}"
    )


def gpu_cases(quick: bool) -> list[tuple[str, int, int]]:
    """(model, M, T), the most telling first, since the run may be cut short."""
    if quick:
        return [("Qwen3-8B", 1, 4096), ("Qwen3-8B", 16, 4096)]
    counts, lengths = (16, 1, 64, 4), (49_152, 4096, 131_072, 16_384)
    cases = [("Qwen3-8B", count, length) for length in lengths for count in counts]
    others = ("Qwen3-0.6B", "Qwen3-32B", "Qwen3-4B")
    cases += [(model, count, length) for model in others for length in (16_384, 131_072) for count in (16, 1)]
    return cases


def cpu_cases(quick: bool) -> list[tuple[str, int, int]]:
    if quick:
        return [("93M", 1, 4096), ("93M", 4, 4096)]
    return [(model, count, 4096) for model in ("93M", "Qwen3-0.6B", "Qwen3-8B") for count in (1, 4, 16)]


def sweep(peaks: Device, report: Callable[[Result], None], late: Callable[[], bool]) -> None:
    """Other tilings of the moment kernel at M = 16, T = 16,384; those the compiler refuses are named."""
    from cb_kernels.triton_moments import score_layer_triton
    from cb_kernels.triton_tiling import Tiling, default_tiling

    for model in ("Qwen3-8B", "Qwen3-0.6B", "Qwen3-32B"):
        batch = Batch(model, 16, 16_384, ROWS, "cuda", torch.bfloat16)
        major, minor = torch.cuda.get_device_capability()
        group = batch.heads // batch.kv_heads
        default = default_tiling(group, batch.head_dim, batch.dtype, [ROWS], major * 10 + minor)
        sizes = [size for size in (8, 16, 32, 64) if 32 <= size * group <= 256]
        shapes = itertools.product((64, 128), sizes, (4, 8), (2, 3, 4), (40, 60, 120))
        tilings = [default] + [
            Tiling(lanes, size, warps, stages, heads_inner=default.heads_inner, target_steps=steps)
            for lanes, size, warps, stages, steps in shapes
            if lanes * size * group <= 16_384 and (steps == 60 or stages == 3)
        ]
        for tiling in tilings:
            if late():
                return
            text = (
                f"lanes={tiling.lanes} rows={tiling.block_rows} warps={tiling.warps} stages={tiling.stages} "
                f"steps={tiling.target_steps}"
            )
            plan = batch.plan(layers=40)

            def call(batch: Batch = batch, plan: ScoringPlan = plan, tiling: Tiling = tiling) -> None:
                score_layer_triton(
                    plan, plan.layers_done, batch.q, batch.pool, batch.lse, scale=batch.scale, tiling=tiling
                )

            try:
                report(measure(batch, "triton", call, peaks, 10, text))
            except Exception as problem:  # a tiling may need more shared memory than there is
                print(f"{model:<12}{text}: {type(problem).__name__}: {str(problem)[:80]}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--sweep", action="store_true", help="try other tilings (GPU)")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no new case after this long")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a query")
    return parser.parse_args()


def main() -> int:
    options = parse()
    deadline = time.monotonic() + float(options.seconds)
    results: list[Result] = []
    errors: dict[str, float] = {}
    skipped: list[str] = []

    def late() -> bool:
        return time.monotonic() > deadline

    def report(result: Result) -> None:
        results.append(result)
        print(line(result), flush=True)

    on_gpu = torch.cuda.is_available()
    peaks = {device: describe(device) for device in (["cuda"] if on_gpu else []) + ["cpu"]}
    for device, peak in peaks.items():
        print(
            f"{device}: {peak.name}; peaks ({peak.source}): {peak.flops / 1e12:.3g} TFLOP/s, "
            f"{peak.bandwidth / 1e9:.4g} GB/s"
        )
    if not on_gpu:
        print("No CUDA device: Triton is not timed here (its interpreter is for tests).")
    print(HEADER)
    if options.sweep:
        if not on_gpu:
            print("--sweep needs a GPU", file=sys.stderr)
            return 2
        sweep(peaks["cuda"], report, late)
    else:
        work = [("cuda", torch.bfloat16, case) for case in gpu_cases(options.quick)] if on_gpu else []
        cpu = cpu_cases(options.quick or on_gpu)
        # The CPU first: on a GPU machine those are two short cases.
        for device, dtype, (model, queries, positions) in [("cpu", torch.float32, case) for case in cpu] + work:
            label = f"{model} M={queries} T={positions} on {device}"
            if late():
                skipped.append(label)
                continue
            batch = Batch(model, queries, positions, options.rows, device, dtype)
            repeats = 5 if device == "cpu" else 20
            for name, score in implementations(device).items():
                report(measure(batch, name, layer_call(batch, repeats, score), peaks[device], repeats))
            if device == "cuda":
                report(measure(batch, "triton lse", batch.lse_kernel(), peaks[device], repeats))
            if options.rows * batch.heads * positions <= REFERENCE_LOGITS:
                for name, score in implementations(device).items():
                    errors[f"{label}, {name}"] = relative_error(batch, score)
                if queries == 1:
                    exact = torch.float32  # float64 is for truth, not for speed

                    def call(batch: Batch = batch, exact: torch.dtype = exact) -> None:
                        batch.reference(0, exact)

                    report(measure(batch, "reference", call, peaks[device], 3))
    for label in skipped:
        print(f"skipped after {options.seconds:.0f} s: {label}")
    wrong = {label: value for label, value in errors.items() if value > (1e-3 if "cuda" in label else 1e-4)}
    if errors:
        print(f"largest relative deviation from the float64 definition: {max(errors.values()):.1e}")
    if options.json:
        content = {
            "torch": torch.__version__,
            "devices": {device: asdict(peak) for device, peak in peaks.items()},
            "results": [asdict(result) for result in results],
            "relative_errors": errors,
            "skipped": skipped,
            "seconds": options.seconds + time.monotonic() - deadline,
        }
        options.json.write_text(json.dumps(content, indent=1))
    for label, value in wrong.items():
        print(f"WRONG: {label}: relative deviation {value:.1e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
