"""Server-sent events (WHATWG HTML, section 9.2), as much of them as we send."""

from __future__ import annotations

import json
from typing import Any


def event(name: str, data: dict[str, Any]) -> bytes:
    """One event on the wire."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
