"""The functions of SGLang that we wrap.

Those of the cache's reset, the start and the end aside, they concern only requests that carry a spec of ours; for
everything else the original runs untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cb_sglang.custom_selectors import load_allowed
from cb_sglang.seam import check
from cb_sglang.seam.draining import finish_ours_first
from cb_sglang.seam.pins import apply_pin, forget_pins
from cb_sglang.seam.readiness import report_refusal
from cb_sglang.seam.scoring_batch import ScoringBatch, activated, active
from cb_sglang.seam.shared_prefix import planned_once
from cb_sglang.seam.task import ScoringTask, has_cacheable_rows
from cb_sglang.spec import WIRE_KEY, PinSpec


def apply() -> None:
    """Check every seam, then register the CPU backend and the hooks. Raises SeamError, and registers nothing then."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check.check_seams()
    load_allowed()
    _register_cpu_backend()
    for target, hook in (HOOKS | CUDA_HOOKS if torch.cuda.is_available() else HOOKS).items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)


def _register_cpu_backend() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from cb_sglang.seam.cpu_platform import BACKEND_NAME

    def create(runner: Any) -> Any:
        from cb_sglang.seam.cpu_backend import CacheBackCpuBackend

        return CacheBackCpuBackend(runner)

    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(create)


def cap_prefix_match(original: Callable[..., int], req: Any, input_len: int) -> int:
    """A query's rows must be computed even if the tree holds them: match the sender only."""
    limit = original(req, input_len)
    task = ScoringTask.of(req)
    own = None if task is None or task.spec is None else task.spec.match_limit
    return limit if own is None else min(limit, own)


def match_with_rows(original: Callable[..., None], req: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang neither matches nor inserts a request with embedding overrides, since its token ids do not tell them.

    Where the radix namespace does (one per sender with rows), both are safe.
    """
    if not has_cacheable_rows(req):
        return original(req, *args, **kwargs)
    req.skip_radix_cache_insert = False
    overrides, req.positional_embed_overrides = req.positional_embed_overrides, None
    try:
        return original(req, *args, **kwargs)
    finally:
        req.positional_embed_overrides = overrides


def keep_query_out_of_tree(original: Callable[..., None], tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    """Insert the sender's part (it may have been evicted), never the query's tail.

    Layers with a state per request hold the state after the query by then, and the tree would keep it as the sender's:
    nothing more is inserted for them.
    """
    task = ScoringTask.of(req)
    limit = None if task is None or task.spec is None else task.spec.insert_limit
    if limit is not None and up_to > limit:
        up_to = 0 if tree.supports_mamba() else limit
    original(tree, req, up_to=up_to, **kwargs)
    if task is not None and isinstance(task.spec, PinSpec) and req.finished():
        apply_pin(tree, req, task.spec)


def forget_pins_on_reset(original: Callable[..., None], tree: Any) -> None:
    """Flushing the cache takes the pins with it; the next query or pin rebuilds what it needs."""
    original(tree)
    forget_pins(tree)


def attach_scoring_batch(original: Callable[..., Any], cls: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Find the voting rows while the host lengths are at hand."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    forward_batch = original(cls, batch, *args, **kwargs)
    if forward_batch.forward_mode.is_extend_without_speculative():
        forward_batch.cacheback = scoring = ScoringBatch.plan(batch)
        if scoring is not None and scoring.wants_hidden:
            forward_batch.capture_hidden_mode = max(forward_batch.capture_hidden_mode, CaptureHiddenMode.LAST)
    return forward_batch


def score_pass(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Open the accumulation before the model runs and select after it."""
    scoring = _scoring(forward_batch)
    if scoring is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    scoring.begin(runner)
    with activated(scoring):
        output = original(runner, forward_batch, *args, **kwargs)
    scoring.finish(output.logits_output.hidden_states if scoring.wants_hidden else None)
    return output


def score_layer(
    original: Callable[..., Any],
    layer: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """After a layer's attention, q is post-RoPE and the pool holds every key of this batch."""
    output = original(layer, q, k, v, forward_batch, *args, **kwargs)
    scoring = active()
    if scoring is not None:
        scoring.score(layer, q)
    return output


def refuse_prefill_graph(original: Callable[..., bool], graph_runner: Any, forward_batch: Any) -> bool:
    """A captured prefill graph would replay the kernels without calling us."""
    return _scoring(forward_batch) is None and original(graph_runner, forward_batch)


def answer_with_result(original: Callable[..., None], processor: Any, i: int, req: Any, logits_output: Any) -> None:
    """Hand the result to this request alone, as ``meta_info["cacheback"]``."""
    original(processor, i, req, logits_output)
    task = ScoringTask.of(req)
    if task is not None and task.result is not None and not req.customized_info:
        req.customized_info = {WIRE_KEY: [task.result]}


def keep_flashinfer_lse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """FlashInfer has the merged LSE of prefix and own rows in hand and drops it; its logarithm is to base 2."""
    output, lse = original(*args, **kwargs)
    scoring = active()
    if scoring is not None:
        scoring.lse = lse * math.log(2.0)
    return output, lse


def _scoring(forward_batch: Any) -> ScoringBatch | None:
    return getattr(forward_batch, "cacheback", None)


# Below sglang.srt; check.py holds the signature that each hook relies on.
HOOKS: dict[str, Callable[..., Any]] = {
    "managers.schedule_batch.Req._compute_max_prefix_len": cap_prefix_match,
    "managers.schedule_batch.Req.init_next_round_input": match_with_rows,
    "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint": keep_query_out_of_tree,
    "mem_cache.unified_radix_cache.UnifiedRadixCache.reset": forget_pins_on_reset,
    "model_executor.forward_batch_info.ForwardBatch.init_new": attach_scoring_batch,
    "model_executor.model_runner.ModelRunner.forward": score_pass,
    "layers.radix_attention.RadixAttention.forward": score_layer,
    "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph": refuse_prefill_graph,
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_collect_customized_info": answer_with_result,
    "managers.scheduler.Scheduler.get_init_info": report_refusal,
    "managers.tokenizer_manager.TokenizerManager.sigterm_watchdog": finish_ours_first,
}

# Exists only where FlashInfer does.
CUDA_HOOKS: dict[str, Callable[..., Any]] = {
    "layers.attention.flashinfer_backend._safe_merge_state": keep_flashinfer_lse,
    "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward": planned_once,
}
