"""The server's own figures: every ``cacheback_*`` series of its Prometheus page, before and after, subtracted.

Read by name prefix only, so that a metric added at the server shows up here without a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cb_loadtest.load.transport import Link
from cb_sglang.client.calls import Answer, Call

PREFIX = "cacheback_"
MAX_SERIES = 20_000
MAX_PAGE_BYTES = 16 << 20
SCRAPE_SECONDS = 5.0

Series = dict[tuple[str, str], float]
"""Value by sample name and by labels, written ``name=value,name=value``."""


async def scrape(link: Link) -> Series:
    """The series as they are now. Raises the client's errors, so where ``--enable-metrics`` or a key is missing."""
    return await link.run(Call("GET", "/metrics", _read), SCRAPE_SECONDS)


def parse_metrics(page: str) -> Series:
    """The ``cacheback_*`` series of a Prometheus page. Raises ValueError when it is none."""
    wanted = "\n".join(line for line in page.splitlines() if line.removeprefix("# TYPE ").startswith(PREFIX))
    found: Series = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if len(found) >= MAX_SERIES:
                return found
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name, labels] = float(sample.value)
    return found


def changes(before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """What happened in between, by metric and labels.

    A histogram becomes ``{count, mean}`` in its own unit; a counter its growth; anything else its last value. What
    did not move is left out, gauges excepted.
    """
    found: dict[str, Any] = {}
    for (name, labels), value in sorted(after.items()):
        grown = value - before.get((name, labels), 0.0)
        base = name.rpartition("_")[0]
        if name.endswith("_bucket"):
            continue
        if name.endswith("_sum") and (f"{base}_count", labels) in after:
            count = after[f"{base}_count", labels] - before.get((f"{base}_count", labels), 0.0)
            if count > 0:
                found.setdefault(base, {})[labels] = {"count": int(count), "mean": grown / count}
        elif name.endswith("_count") and (f"{base}_sum", labels) in after:
            continue
        elif name.endswith("_total"):
            if grown > 0:
                found.setdefault(name, {})[labels] = grown
        else:
            found.setdefault(name, {})[labels] = value
    return found


def _read(answer: Answer) -> Series:
    if len(answer.body) > MAX_PAGE_BYTES:
        return {}
    try:
        return parse_metrics(answer.body.decode("utf-8", "replace"))
    except ValueError:
        return {}
