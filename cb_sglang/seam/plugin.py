"""Entry point of group ``sglang.srt.plugins``: SGLang calls ``register`` at the start of every process of its own."""

from __future__ import annotations

import logging
import sys

from cb_sglang.errors import CacheBackError

logger = logging.getLogger(__name__)


def register() -> None:
    """Put our hooks in, where requests are scheduled. On a mismatch SGLang runs as if we were not installed."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        # The detokenizer: nothing of ours runs there, and importing the model code would cost it seconds and memory.
        return
    from cb_sglang.seam import hooks

    try:
        hooks.apply()
    except CacheBackError as error:
        # SGLang swallows a plugin's exception; `cb-sglang serve` runs the same check and refuses to start.
        logger.error("cb-sglang is inactive in this process: %s", error)
