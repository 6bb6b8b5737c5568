"""Senders that SGLang must not evict: a lock of our own on their node of the radix tree.

SGLang 0.5.23 has no pin of its own; a request's lock is let go with the request (mem_cache/common.py). A client of
SGLang's own endpoints could send a PinSpec too: the token, known to the HTTP process and the schedulers alone, tells.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

from cb_sglang.errors import InvalidRequestError
from cb_sglang.spec import PinSpec

VARIABLE = "CB_SGLANG_PIN_TOKEN"
MAX_PINS = 65_536


def allow_pins() -> None:
    """Make this process's token, for the schedulers it will start to inherit."""
    os.environ[VARIABLE] = secrets.token_hex(16)


def token() -> str:
    """This process's token; empty where pins are not allowed."""
    return os.environ.get(VARIABLE, "")


def check_pin(spec: PinSpec) -> None:
    """Raises InvalidRequestError unless the spec comes from our own HTTP process."""
    if not token() or not hmac.compare_digest(spec.token.encode(), token().encode()):
        raise InvalidRequestError("pins are made with POST /v1/senders/{id}/pin, not by requests")


def apply_pin(tree: Any, req: Any, spec: PinSpec) -> None:
    """Hold or let go, once the request's positions are in the tree and before its own lock is gone.

    One that was aborted changes nothing: whoever asked for it has left, and may let go of it next.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if spec.hold and isinstance(req.finished_reason, FINISH_ABORT):
        return
    held: dict[str, Any] = tree.__dict__.setdefault("cacheback_pins", {})
    tree.unlock(held.pop(spec.pin_id, None))
    if spec.hold and req.lock is not None and len(held) < MAX_PINS:
        held[spec.pin_id] = tree.lock(req.lock.node)


def forget_pins(tree: Any) -> None:
    """After the tree was emptied: its locks are gone with it."""
    tree.__dict__.pop("cacheback_pins", None)
