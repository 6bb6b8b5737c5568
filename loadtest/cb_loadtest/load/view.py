"""What the commands print at their end."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cb_loadtest.reporting.inputs import Times

_WIDTH = 110


def print_table(console: Console, table: Table) -> None:
    """Whole in a log too, whose width nobody knows."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(table)


def capacity_table(found: dict[str, Any]) -> Table:
    """The knee, and the curve that follows from the fitted costs."""
    knee = found["knee"]
    unit = "receivers" if found["mode"] == "closed" else "requests/s"
    level = "no load" if knee["level"] is None else f"{knee['level']:.4g} {unit}"
    kept_up = " and kept up with" if found["mode"] == "open" else ""
    held = f"within p99 of {found['slo_p99_ms']:g} ms{kept_up}"
    table = Table(title=f"{level} {held} ({knee['ended']}); by the fitted costs:")
    for column in ("sender positions", "ratio", "receivers", "limit", "that also read here", "limit"):
        table.add_column(column, justify="right")
    for point in found["curve"]:
        table.add_row(
            f"{point['positions']:,}{'*' if point['extrapolated'] else ''}",
            f"{point['ratio']:g}",
            f"{point['receivers']:,}",
            point["limit"],
            f"{point['receivers_on_this_server']:,}",
            point["limit_on_this_server"],
        )
    table.caption = "* beyond the lengths that were measured"
    return table


def summary_table(found: dict[str, Any]) -> Table:
    """The steps of a run, a row each; times are p50 / p99."""
    title = f"workload {found['workload']['name']}, {found['mode']} loop, seed {found['seed']}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("way", "load", "done", "failed", "per s", "message ms", "TTEOA ms", "cached", "goodput/s"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=column != "way")
    for step in found["steps"]:
        table.add_row(
            step["way"].replace("_", " ") + (" + answer" if step["answering"] else ""),
            f"{step['level']:g}",
            str(step["completed"]),
            str(step["failed"]),
            f"{step['messages_per_s']:.2f}",
            _p50_p99(step["time_to_message_ms"]),
            _p50_p99(step["tteoa_ms"]),
            "-" if step["cached_share"] is None else f"{step['cached_share']:.1%}",
            f"{step['request_goodput']:.2f}",
        )
    generator = found["generator"]
    table.caption = f"generator: {generator['cpu_ms_per_request']:.2f} ms of CPU a request; " + _cache(found["cache"])
    return table


def _cache(cache: dict[str, Any]) -> str:
    if cache["misses"] is None:
        hits = "cache hits: not judged, the server's page size is not known"
    else:
        hits = f"cache hits verified: {cache['verified_hits']}, misses: {cache['misses']}"
    warm = cache["warm_full_contexts"]
    return f"{hits}; {warm} full contexts were cached" if warm else hits


def _p50_p99(times: dict[str, Any] | None) -> str:
    """The maximum, and so called, where requests are too few for a p99."""
    if times is None or times["p50"] is None:
        return "-"
    p99, is_maximum = Times.model_validate(times).percentile("p99")
    return f"{times['p50']:,.0f} / {'max ' if is_maximum else ''}{p99:,.0f}"
