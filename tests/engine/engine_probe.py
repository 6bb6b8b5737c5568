"""Looks inside the scheduler process of a test engine, through SGLang's own readback of internal state.

Tests must know that the hard case they are named after really took place (a split query, a mixed batch), and that
SGLang's counters are where they were. The probe only reads and counts.
"""

from __future__ import annotations

import gc
from typing import Any

KEY = "cacheback_test_probe"

_counts = {
    "plans": 0,
    "most_queries": 0,
    "most_senders": 0,
    "shared": 0,  # queries that found their sender's keys read already
    "split_queries": 0,
    "with_decode": 0,
    "live_tasks": -1,
}
_wanted = 0  # requests that must wait before the next prefill
_mixed = False  # whether the batch being run decodes as well


def install() -> None:
    """To be called before the engine starts its scheduler process, which inherits the probe."""
    _count_scoring_plans()  # before anything binds plan_scoring
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{state}.get_internal_state", _add_counters, HookType.AFTER)
    init_new = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
    HookRegistry.register(init_new, _note_mode, HookType.AFTER)
    prefill = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
    HookRegistry.register(prefill, _hold_until_enough, HookType.AROUND)
    Scheduler.hold_prefill = _hold_prefill
    Scheduler.count_live_tasks = _count_live_tasks


def _note_mode(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _mixed
    _mixed = forward_batch.forward_mode.is_mixed()
    return forward_batch


def _hold_prefill(scheduler: Any, requests: int) -> None:
    """Start no prefill until so many requests wait. Arrival times then decide no more which of them share a batch."""
    global _wanted
    _wanted = requests
    _counts["most_queries"] = _counts["most_senders"] = 0


def _hold_until_enough(original: Any, scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> Any:
    global _wanted
    if len(scheduler.waiting_queue) < _wanted:
        return None, running_batch
    _wanted = 0
    return original(scheduler, prefill_delayer_single_pass, running_batch)


def _add_counters(output: Any, controller: Any, request: Any) -> Any:
    scheduler = controller.scheduler
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    running = scheduler.running_batch.reqs
    scored = getattr(scheduler.tp_worker.model_runner, "cacheback_layers", None)
    output.internal_state[KEY] = {
        "free": int(allocator.available_size()),
        "evictable": int(tree.evictable_size()),
        "protected": int(tree.protected_size()),
        "tree_tokens": int(tree.total_size()[0]),
        "free_rows": int(scheduler.req_to_token_pool.available_size()),
        "waiting": len(scheduler.waiting_queue),
        "chunked": scheduler.chunked_req is not None,
        "scored_layers": [] if scored is None else list(scored.ordinal),
        "decoded": [len(req.output_ids) for req in running],
        **_counts,
    }
    return output


def _count_live_tasks(scheduler: Any) -> None:
    """How many ScoringTask objects still exist in this process. Slow: looks at every object there is."""
    from cb_sglang.seam.scoring_batch import ScoringTask

    gc.collect()
    _counts["live_tasks"] = sum(type(thing) is ScoringTask for thing in gc.get_objects())


def _count_scoring_plans() -> None:
    from cb_kernels import plan

    plan_scoring = plan.plan_scoring

    def counted(segments: Any, **kwargs: Any) -> Any:
        senders = len({segment.kv_start for segment in segments})
        _counts["plans"] += 1
        _counts["most_queries"] = max(_counts["most_queries"], len(segments))
        _counts["most_senders"] = max(_counts["most_senders"], senders)
        _counts["shared"] += len(segments) - senders
        _counts["split_queries"] += sum(segment.carry is not None for segment in segments)
        _counts["with_decode"] += _mixed
        return plan_scoring(segments, **kwargs)

    plan.plan_scoring = counted
