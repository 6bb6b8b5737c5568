"""The scoring pass on a CPU, compiled: what ``cpu_moments`` computes, in one parallel region a layer.

The torch path makes some sixty parallel regions a layer, and at the end of each the threads wait for one another:
milliseconds, where something else runs on the machine. Here the threads draw blocks of positions until none is left
(see ``cpu_native.cpp``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.cpu_native_build import native_library
from cb_kernels.errors import ScoringInputError
from cb_kernels.plan import ScoringPlan

_WORKSPACE = "cpu_native"
_KEY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Layer(ctypes.Structure):
    """``struct Layer`` of cpu_native.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "lse", "keys", "slots", "items", "segments")),
        *((name, ctypes.c_void_p) for name in ("sum_a", "sum_p", "scratch")),
        *((name, ctypes.c_int64) for name in ("q_stride", "slot_stride", "head_stride", "item_count", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "head_dim", "width", "key_type", "sink_free", "threads")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What does not change from layer to layer. The int64 tensors are arrays of the C structs' fields.

    * ``slots`` [sum of T]: the pool slots of each sender.
    * ``items`` [I, 7], ``segments`` [S, 3]: ``struct Item``, ``struct Segment``.
    * ``scratch`` float32 [threads, floats a thread].
    """

    slots: Tensor
    first_slot: int
    last_slot: int
    items: Tensor
    segments: Tensor
    scratch: Tensor


def takes_natively(plan: ScoringPlan, k_pool: Tensor) -> bool:
    """Whether ``score_layer_native`` can run this: on the CPU, order 2, keys contiguous along D, and a library."""
    fits = plan.device.type == "cpu" and plan.order == 2.0 and k_pool.stride(-1) == 1
    return fits and native_library() is not None


def score_layer_native(plan: ScoringPlan, layer: int, q: Tensor, k_pool: Tensor, lse: Tensor, *, scale: float) -> None:
    """Accumulate one scored layer into ``plan``; arguments and errors as in ``score_layer``.

    Computes in float32, in as many threads as torch would. Raises ``ScoringInputError`` also for what
    ``takes_natively`` refuses, and for slots outside the pool.
    """
    plan.check_layer(layer, q, k_pool, lse)
    library = native_library()
    if library is None or not takes_natively(plan, k_pool):
        raise ScoringInputError("this is not for the compiled kernel; use score_layer, which picks one that fits")
    work: _Work = plan.workspace.get(_WORKSPACE) or _prepare(plan, library)
    plan.workspace[_WORKSPACE] = work
    if work.first_slot < 0 or work.last_slot >= k_pool.shape[0]:
        raise ScoringInputError(
            f"kv_indices name slots {work.first_slot} to {work.last_slot}; the pool has {k_pool.shape[0]}"
        )
    q, lse = q.float(), lse.contiguous()
    if q.stride(2) != 1 or q.stride(1) != plan.head_dim:
        q = q.contiguous()
    arguments = _Layer(
        q=q.data_ptr(),
        lse=lse.data_ptr(),
        keys=k_pool.data_ptr(),
        slots=work.slots.data_ptr(),
        items=work.items.data_ptr(),
        segments=work.segments.data_ptr(),
        sum_a=plan.sum_a.data_ptr(),
        sum_p=plan.sum_p.data_ptr(),
        scratch=work.scratch.data_ptr(),
        q_stride=q.stride(0),
        slot_stride=k_pool.stride(0),
        head_stride=k_pool.stride(1),
        item_count=work.items.shape[0],
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        width=plan.width,
        key_type=_KEY_TYPES[k_pool.dtype],
        sink_free=int(plan.sink_free),
        threads=min(torch.get_num_threads(), work.scratch.shape[0]),
        scale=scale,
    )
    library.cb_score_layer(ctypes.byref(arguments))
    _fold(plan, layer, library)


def _fold(plan: ScoringPlan, layer: int, library: ctypes.CDLL) -> None:
    plan.add_carries(layer)
    library.cb_fold_layer(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (plan.sum_a, plan.sum_p, plan.inverse_rows)),
        ctypes.c_int64(plan.kv_heads),
        ctypes.c_int64(plan.width),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (plan.votes, plan.energy, plan.row_energy)),
    )
    plan.layers_done = layer + 1


def _prepare(plan: ScoringPlan, library: ctypes.CDLL) -> _Work:
    library.cb_max_block.restype = library.cb_scratch_floats.restype = ctypes.c_int64
    block = int(library.cb_max_block())
    slots: list[Tensor] = []
    items: list[tuple[int, ...]] = []
    segments: list[tuple[int, int, int]] = []
    slot_start = 0
    for group in plan.groups:
        slots.append(plan.kv_indices[group.kv_start : group.kv_start + group.sender_len])
        members = (len(segments), len(group.members))
        segments += [
            (plan.segments[index].row_start, plan.segments[index].row_count, plan.offsets[index])
            for index in group.members
        ]
        items += [
            (slot_start, group.sender_len, start, min(block, group.sender_len - start), head, *members)
            for start in range(0, group.sender_len, block)
            for head in range(plan.kv_heads)
        ]
        slot_start += group.sender_len
    floats = int(library.cb_scratch_floats(ctypes.c_int64(plan.head_dim)))
    threads = max(1, min(torch.get_num_threads(), len(items), plan.scratch_bytes // (4 * floats)))
    used = torch.cat(slots).to(torch.int64)
    return _Work(
        slots=used,
        first_slot=int(used.min()),
        last_slot=int(used.max()),
        items=torch.tensor(items, dtype=torch.int64),
        segments=torch.tensor(segments, dtype=torch.int64),
        scratch=torch.empty(threads, floats, dtype=torch.float32),
    )
