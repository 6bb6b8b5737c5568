"""How every figure of the project looks: colours that colour-blind readers tell apart, markers, quiet axes."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#000000")  # Okabe and Ito
MARKERS = "osD^vPX*<>"
DPI = 150
GREY = "#777777"
_WIDE = 8.0  # spread from which an axis is logarithmic
_MAX_TICKS = 12


def plain(text: str) -> str:
    """Text from outside for a figure: without this, matplotlib would read what stands between dollars as a formula."""
    return text.replace("$", r"\$")


def tidy(axes: Axes) -> None:
    """A light grid behind the data, no box around it."""
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plain_log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, ... written as numbers, on an axis that is logarithmic already."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def values_axis(axes: Axes, values: Iterable[float]) -> None:
    """The y axis for these values: logarithmic when they are all positive and spread widely, else from 0."""
    found = list(values)
    if not found:
        return
    low, high = min(found), max(found)
    if low > 0 and high / low >= _WIDE:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, high * 1.5)
        if high / low < 1_000:
            plain_log_ticks(axes.yaxis)
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    else:
        axes.set_ylim(0, high * 1.1 if high > 0 else 1)


def levels_axis(axes: Axes, levels: Iterable[float]) -> None:
    """The x axis with ticks at the levels, logarithmic to the base 2; levels too near to the last tick get none."""
    found = sorted(set(levels))
    if found[-1] > found[0]:
        axes.set_xscale("log", base=2)
        margin = (found[-1] / found[0]) ** 0.05
        axes.set_xlim(found[0] / margin, found[-1] * margin)
    apart = (found[-1] / found[0]) ** (1 / _MAX_TICKS)
    ticks = found[:1]
    for level in found[1:]:
        if level >= apart * ticks[-1]:
            ticks.append(level)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def counts_axis(axes: Axes, high: float) -> None:
    """The y axis for counts up to ``high``, logarithmic from 1 on, with a place for 0."""
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.set_ylim(-0.2, max(2.0, high * 1.5))
    ticks = [0.0, *(first * 10.0**power for power in range(10) for first in (1, 2, 5))]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick <= max(2.0, high * 1.5)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
