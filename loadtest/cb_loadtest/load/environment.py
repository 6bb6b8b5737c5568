"""What a run was made on: this machine, and what the server says of itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import RootModel

from cb_loadtest.load.generator import Stop
from cb_loadtest.load.transport import Link
from cb_loadtest.local_server import API_KEY_VARIABLE
from cb_loadtest.recall import OWN_SERVER, without_credentials
from cb_sglang import __version__
from cb_sglang.client.calls import Answer, Call, parse
from cb_sglang.errors import CacheBackError

API_KEYS_VARIABLE = "CB_SGLANG_API_KEYS"
ADMIN_KEY_VARIABLE = "CB_SGLANG_ADMIN_KEY"
T = TypeVar("T")

# A list of what may be told: the rest of the server's arguments holds keys.
_TOLD = (
    "version",
    "served_model_name",
    "device",
    "dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "page_size",
    "context_length",
    "max_total_num_tokens",
)


def api_keys() -> list[str]:
    """The tenants' keys, of the environment: never of a file or the command line."""
    given = os.environ.get(API_KEYS_VARIABLE) or os.environ.get(API_KEY_VARIABLE) or ""
    return [key for key in (part.strip() for part in given.split(",")) if key]


def admin_key() -> str | None:
    """The operator's key, for ``/server_info`` and ``/metrics`` alone; a server with tenants' keys refuses theirs."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or None


class _Info(RootModel[dict[str, Any]]):
    pass


def page_size(server: dict[str, Any]) -> int | None:
    """Of the server's cache, in positions; None where it does not tell."""
    size = server.get("page_size")
    return size if isinstance(size, int) else None


def machine() -> dict[str, Any]:
    """The generator's machine, which is also the server's when that is local."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
    }


def versions(server: dict[str, Any]) -> dict[str, str]:
    """Of what took part, as far as it is known."""
    found = {"cb-sglang": __version__, "python": platform.python_version()}
    if isinstance(server.get("version"), str):
        found["sglang"] = server["version"]
    return found


def provenance(server: dict[str, Any], url: str | None, command: str) -> dict[str, Any]:
    """Where figures come from; ``url`` None is a server of our own, ``server`` what ``server_info`` gave."""
    return {
        "server": OWN_SERVER if url is None else without_credentials(url),
        "server_info": server,
        "machine": machine(),
        "versions": versions(server),
        "command": command,
        "finished": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


async def told(work: Awaitable[T], route: str, stop: Stop, problems: list[str]) -> T | None:
    """What a route of the operator's tells; None after a stop, and when it is refused: then ``problems`` says so."""
    try:
        return await stop.unless_asked(work)
    except CacheBackError as error:
        if not any(line.startswith(route) for line in problems):
            advice = ""
            if api_keys() and error.status in (401, 404):
                advice = f"; give the admin's key in {ADMIN_KEY_VARIABLE}"
            elif route == "/metrics":
                advice = "; start the server with --enable-metrics"
            problems.append(f"{route} could not be read: {error.status} {error.message}{advice}")
        return None


async def server_info(link: Link) -> dict[str, Any]:
    """What the server tells of its model and engine. Raises the client's errors."""
    info = await link.run(Call("GET", "/server_info", _read))
    return {name: info[name] for name in _TOLD if isinstance(info.get(name), str | int | float)}


def _read(answer: Answer) -> dict[str, Any]:
    return parse(_Info, answer.body, status=answer.status).root


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
