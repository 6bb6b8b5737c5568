"""At start: does this SGLang still look as our hooks and calls expect?

A renamed function, a new parameter or a missing attribute is found here, in one clear error, and not as a wrong
score later. What is compared is the parameter list of each function and the presence of each attribute.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version

import torch

from cb_sglang.errors import SeamError
from cb_sglang.seam import SGLANG_VERSION

_SRT = "sglang.srt"

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "managers.schedule_batch.Req._compute_max_prefix_len": ("self", "input_len"),
    "managers.schedule_batch.Req.init_next_round_input": ("self", "tree_cache", "cow_mamba"),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint": ("self", "req", "up_to", "kwargs"),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.supports_mamba": ("self",),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.reset": ("self",),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.lock": ("self", "node_id"),
    "mem_cache.unified_radix_cache.UnifiedRadixCache.unlock": ("self", "lock"),
    "model_executor.forward_batch_info.ForwardBatch.init_new": ("batch", "model_runner"),
    "model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative": ("self",),
    "model_executor.model_runner.ModelRunner.forward": ("self", "forward_batch"),
    "layers.radix_attention.RadixAttention.forward": ("self", "q", "k", "v", "forward_batch"),
    "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph": ("self", "forward_batch"),
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_collect_customized_info": ("self", "i", "req", "logits_output"),
    "managers.scheduler.Scheduler.get_init_info": ("self",),
    "layers.attention.attention_registry.register_attention_backend": ("name",),
    "layers.attention.torch_native_backend.TorchNativeAttnBackend.init_forward_metadata": ("self", "forward_batch"),
    "layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend": (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache",
    ),
    "managers.tokenizer_manager.TokenizerManager.generate_request": ("self", "obj", "request"),
    "managers.tokenizer_manager.TokenizerManager.config_value": ("self",),
    "managers.tokenizer_manager.TokenizerManager.sigterm_watchdog": ("self",),
    "entrypoints.http_server._setup_and_run_http_server": (
        "server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos",
    ),
}  # fmt: skip

# Used by the HTTP process alone; a scheduler need not import them.
SERVER_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "entrypoints.http_server.launch_server": ("server_args",),
    "entrypoints.openai.serving_base.OpenAIServingBase.handle_request": ("self", "request", "raw_request"),
    "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        "self", "request", "raw_request",
    ),
    "managers.tokenizer_control_mixin.TokenizerControlMixin.get_loads": ("self",),
}  # fmt: skip

# Looked at where there is CUDA; elsewhere the module may not even import.
CUDA_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward": (
        "self", "wrapper_ragged", "wrapper_paged", "req_pool_indices", "paged_kernel_lens", "paged_kernel_lens_sum",
        "seq_lens", "prefix_lens", "kv_start_idx", "kv_indptr", "qo_indptr", "use_ragged", "spec_info",
    ),
}  # fmt: skip

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    # What our code reads off objects whose attributes are set in __init__ or declared as fields.
    "managers.schedule_batch.Req": (
        "sampling_params",
        "origin_input_ids",
        "last_node",
        "customized_info",
        "finished_reason",
        "kv",
        "lock",
        "positional_embed_overrides",
        "skip_radix_cache_insert",
        "extra_key",
    ),
    "model_executor.forward_batch_info.ForwardBatch": ("req_pool_indices", "seq_lens", "extend_seq_lens_cpu"),
    "model_executor.model_runner.ModelRunner": ("req_to_token_pool", "token_to_kv_pool", "use_mla_backend"),
    "managers.io_struct.GenerateReqInput": (
        "input_ids",
        "sampling_params",
        "rid",
        "stream",
        "extra_key",
        "positional_embed_overrides",
        "priority",
    ),
    "managers.embed_types.PositionalEmbeds": ("embeds", "positions"),
    "managers.tokenizer_manager.TokenizerManager": ("gracefully_exit", "server_status"),
}


def functions(*, server: bool) -> dict[str, tuple[str, ...]]:
    """What must look as expected here; ``server``: in the HTTP process."""
    return FUNCTIONS | (SERVER_FUNCTIONS if server else {}) | (CUDA_FUNCTIONS if torch.cuda.is_available() else {})


def check_seams(*, server: bool = False) -> None:
    """Raise SeamError naming every seam that does not fit, the SGLang version wanted and the one found.

    server: also those that only the HTTP process uses.
    """
    wanted = functions(server=server)
    problems = [p for p in map(function_problem, wanted, wanted.values()) if p]
    problems += [p for p in map(attribute_problem, ATTRIBUTES, ATTRIBUTES.values()) if p]
    if problems:
        raise SeamError(
            f"cb-sglang needs sglang=={SGLANG_VERSION}, found {version('sglang')}; these places differ: "
            + "; ".join(problems)
            + f". Install the version wanted (pip install 'sglang=={SGLANG_VERSION}')."
        )


def function_problem(target: str, wanted: tuple[str, ...]) -> str | None:
    try:
        function = pkgutil.resolve_name(f"{_SRT}.{target}")
    except (ImportError, AttributeError):
        return f"{target} is missing"
    found = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    # A class method resolves without its first parameter, unless a hook has wrapped it already.
    found = found[1:] if found[:1] == ("cls",) else found
    return None if found[: len(wanted)] == wanted else f"{target} takes {found}, not {wanted}"


def attribute_problem(target: str, wanted: tuple[str, ...]) -> str | None:
    try:
        cls = pkgutil.resolve_name(f"{_SRT}.{target}")
    except (ImportError, AttributeError):
        return f"{target} is missing"
    source = inspect.getsource(cls)
    missing = [name for name in wanted if name not in source]
    return f"{target} no longer has {', '.join(missing)}" if missing else None
