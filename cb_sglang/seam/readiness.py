"""At start: can the loaded model be scored, the way it is served?

Only the scheduler process knows, once the model and its KV pool are there. It says so in SGLang's own report that it is
ready. ``cb-sglang serve`` refuses to start on it; plain ``sglang serve`` goes on, and its log says why messages are
not available.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from cb_sglang.errors import SeamError

logger = logging.getLogger(__name__)

REFUSAL = "cacheback_refusal"


def report_refusal(original: Callable[..., dict[str, Any]], scheduler: Any) -> dict[str, Any]:
    """Hook in the scheduler process: add the reason to its report, if there is one."""
    report = original(scheduler)
    reason = _refusal(scheduler)
    if reason is not None:
        logger.warning("cb-sglang: messages are not available: %s", reason)
        report[REFUSAL] = reason
    return report


def _refusal(scheduler: Any) -> str | None:
    from cb_sglang.seam.layers import ScoredLayers

    try:
        ScoredLayers.of(scheduler.tp_worker.model_runner)
    except SeamError as error:
        return error.message
    except Exception as error:
        # A kind of model that we have never seen must not keep SGLang from serving it.
        logger.exception("cb-sglang cannot read the layers of this model")
        return f"the layers of this model cannot be read ({type(error).__name__}: {error})"
    return None


def require_scorable_model() -> None:
    """In the server's process, before plugins are loaded: make its start fail where the scheduler reports a reason."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", refuse_to_serve, HookType.BEFORE
    )


def refuse_to_serve(
    server_args: Any,
    tokenizer_manager: Any,
    template_manager: Any,
    port_args: Any,
    scheduler_infos: list[dict[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Raise SeamError with the reason a scheduler gave."""
    for info in scheduler_infos:
        if REFUSAL in info:
            raise SeamError(info[REFUSAL])
