"""SIGTERM: SGLang waits for the requests in its engine and ends; what we do around them is finished first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.2
_finishing: list[Callable[[], Awaitable[None]]] = []


def before_exit(finish: Callable[[], Awaitable[None]]) -> None:
    """Have ``finish`` awaited after SIGTERM, while the engine still works. It must come to an end."""
    _finishing.append(finish)


async def finish_ours_first(original: Callable[..., Awaitable[None]], manager: Any) -> None:
    """Around TokenizerManager.sigterm_watchdog. Does not wait where SGLang would not: on a dead engine, or when told so
    (SGL_FORCE_SHUTDOWN)."""
    while not manager.gracefully_exit:
        await asyncio.sleep(_LOOK_SECONDS)
    finishing = asyncio.create_task(_finish())
    while not finishing.done() and not _is_forced(manager):
        await asyncio.wait({finishing}, timeout=_LOOK_SECONDS)
    finishing.cancel()
    await original(manager)


async def _finish() -> None:
    for finish in _finishing:
        try:
            await finish()
        except Exception:
            logger.exception("not all was finished before the server's end")


def _is_forced(manager: Any) -> bool:
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.utils import get_bool_env_var

    return manager.server_status == ServerStatus.UnHealthy or bool(get_bool_env_var("SGL_FORCE_SHUTDOWN"))
