"""The plots of a recall report: recall against ratio, and accuracy against the time to the end of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cb_loadtest.figure_style import COLOURS, DPI, GREY, MARKERS, plain_log_ticks, tidy
from cb_loadtest.recall_report import Report, selectors_of
from cb_loadtest.recall_tables import size_name


def write_plots(report: Report, stem: Path) -> list[Path]:
    """Write ``STEM.png`` (ratios), ``STEM-budgets.png`` and ``STEM-answers.png``, those with something to show."""
    sizes = report["_meta"]["sizes"]
    ratios = [size for size in sizes if not size.startswith("budget:")]
    budgets = [size for size in sizes if size.startswith("budget:")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, figure in (
        ("", recall_figure(report, ratios, "ratio: sender positions for one kept position")),
        ("-budgets", recall_figure(report, budgets, "budget: positions kept of a context")),
        ("-answers", answer_figure(report)),
    ):
        if figure is not None:
            path = stem.with_name(f"{stem.name}{suffix}.png")
            figure.savefig(path, dpi=DPI)
            written.append(path)
    return written


def recall_figure(report: Report, sizes: Sequence[str], label: str) -> Figure | None:
    """One panel for selectors that read the query, one for the others with the default for comparison."""
    meta = report["_meta"]
    names = [name for name in selectors_of(report) if any(size in report[name] for size in sizes)]
    if not names:
        return None
    reading = [name for name in names if name not in meta["query_free"]]
    free = [name for name in names if name in meta["query_free"]]
    default = meta["default_selector"]
    panels = [(title, group) for title, group in (("read the query", reading), ("never see the query", free)) if group]
    figure = Figure(figsize=(5.6 * len(panels) + 0.6, 5.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, group) in zip(all_axes, panels, strict=True):
        if default in names and default not in group:
            _recall_line(axes, report[default], sizes, default, GREY, "None", "--", band=False)
        for number, name in enumerate(group):
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            _recall_line(axes, report[name], sizes, name, colour, marker, "-", band=True)
        axes.set_title(f"Selectors that {title}", fontsize=10)
        axes.set_xlabel(label)
        _size_axis(axes, sizes)
        _percent_axis(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)
    all_axes[0].set_ylabel("gold-token recall (%)")
    figure.suptitle(_headline(report), fontsize=10)
    return figure


def _recall_line(
    axes: Axes,
    cells: Mapping[str, Mapping[str, Any]],
    sizes: Sequence[str],
    name: str,
    colour: str,
    marker: str,
    style: str,
    *,
    band: bool,
) -> None:
    found = [(_number(size), cells[size]) for size in sizes if size in cells]
    found.sort(key=lambda pair: pair[0])
    x = [number for number, _ in found]
    axes.plot(
        x,
        [100 * cell["gold_recall"] for _, cell in found],
        color=colour,
        marker=marker,
        linestyle=style,
        markersize=5,
        linewidth=1.6,
        label=name,
    )
    if band and all(cell["low"] is not None for _, cell in found):
        low, high = ([100 * cell[key] for _, cell in found] for key in ("low", "high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)


def answer_figure(report: Report) -> Figure | None:
    """Strict accuracy against seconds; a line for each selector's messages, and one for the reports."""
    rows = report["_meta"]["answers"]
    if not rows:
        return None
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"message, {row['selector']}" if row["source"] == "message" else _SOURCE_NAMES[row["source"]]
        groups.setdefault(name, []).append(row)
    figure = Figure(figsize=(8.6, 5.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, found) in enumerate(groups.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        x, y = [row["seconds"] for row in found], [100 * row["strict"] for row in found]
        errors = None
        if all(row["strict_low"] is not None for row in found):
            errors = [
                [100 * (row["strict"] - row["strict_low"]) for row in found],
                [100 * (row["strict_high"] - row["strict"]) for row in found],
            ]
        axes.errorbar(
            x,
            y,
            yerr=errors,
            color=colour,
            marker=marker,
            markersize=7,
            capsize=3,
            linewidth=1.2,
            elinewidth=0.8,
            label=name,
        )
        for row, at_x, at_y in zip(found, x, y, strict=True):
            if row["size"]:
                axes.annotate(
                    size_name(row["size"]), (at_x, at_y), xytext=(6, 5), textcoords="offset points", fontsize=8
                )
    axes.set_xscale("log")
    seconds = [row["seconds"] for row in rows]
    axes.set_xlim(min(seconds) / 1.5, max(seconds) * 1.5)
    plain_log_ticks(axes.xaxis)
    axes.set_xlabel("mean time from the question to the end of the answer (s)")
    axes.set_ylabel("strict accuracy (%)")
    _percent_axis(axes)
    figure.legend(loc="outside right center", frameon=False, fontsize=9, title="the receiver read")
    axes.set_title(_headline(report).replace("; ", "\n"), fontsize=10)
    return figure


_SOURCE_NAMES = {"full": "full context (prefix cached)", "nothing": "nothing", "report": "text report"}


def _headline(report: Report) -> str:
    meta = report["_meta"]
    return (
        f"{meta.get('model', 'unknown model')}, {meta['cases']} cases over {meta['documents']} documents; "
        "bands and bars: 95 % bootstrap over documents"
    )


def _size_axis(axes: Axes, sizes: Sequence[str]) -> None:
    numbers = sorted(map(_number, sizes))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)


def _percent_axis(axes: Axes) -> None:
    axes.set_ylim(-3, 103)
    tidy(axes)


def _number(size: str) -> float:
    return float(size.removeprefix("budget:"))
