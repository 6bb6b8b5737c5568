"""The tables of a recall report, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cb_loadtest.recall_report import Report, selectors_of, write_text

BEGIN = "<!-- recall tables: begin -->"
END = "<!-- recall tables: end -->"
MAX_FAILURES_SHOWN = 20
_SOURCES = {"full": "full context", "nothing": "nothing", "message": "message", "report": "text report"}


class MarkerError(ValueError):
    """A Markdown file has only one of the two marks, or several."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A number with the ends of its interval; ``strong`` when the interval leaves out 0."""

    text: str
    interval: tuple[str, str] | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table, the same for every output. The first ``names`` columns are text, the others numbers."""

    title: str
    header: list[str]
    note: str = ""
    names: int = 1
    rows: list[list[Cell]] = field(default_factory=list)

    @property
    def caption(self) -> str:
        """The note, and before it what the intervals are."""
        with_intervals = any(cell.interval for row in self.rows for cell in row)
        about = "With 95 % bootstrap intervals over documents." if with_intervals else "One document: no intervals."
        return f"{about} {self.note}".rstrip()


def grids(report: Report) -> list[Grid]:
    """All tables that the report has figures for."""
    meta = report["_meta"]
    made = [
        _recall_grid(report, "gold_recall", "Gold-token recall, %", ""),
        _recall_grid(report, "all_gold", "Cases with every gold token kept, %", "all_gold_"),
        _difference_grid(
            f"Gold-token recall, difference to {meta['default_selector']} in points",
            meta["differences"],
            meta["sizes"],
        ),
    ]
    ablation = meta["ablation"]
    if ablation is not None:
        made.append(_against_grid("Recall with a fixed irrelevant query, %", ablation["selectors"], meta["sizes"]))
        differences = {label: entry["differences"] for label, entry in ablation["selectors"].items()}
        made.append(_difference_grid("Own query minus irrelevant query, points", differences, meta["sizes"]))
    for row in meta["wordings"][1:]:
        template = _shown(row["template"])
        made.append(_against_grid(f"Recall with the wording {template}, %", row["selectors"], meta["sizes"]))
        differences = {label: entry["differences"] for label, entry in row["selectors"].items()}
        title = f"Wording {template} minus {_shown(meta['wordings'][0]['template'])}, points"
        made.append(_difference_grid(title, differences, meta["sizes"]))
    made.append(_answer_grid(meta["answers"]))
    return [grid for grid in made if grid.rows]


def _recall_grid(report: Report, measure: str, title: str, prefix: str) -> Grid:
    meta = report["_meta"]
    grid = Grid(title, ["selector", "query", *map(size_name, meta["sizes"])], names=2)
    for label in selectors_of(report):
        if report[label]:
            cells = [_percent(report[label].get(size), measure, prefix) for size in meta["sizes"]]
            grid.rows.append([Cell(label), Cell("no" if label in meta["query_free"] else "yes"), *cells])
    return grid


def _against_grid(title: str, selectors: Mapping[str, Any], sizes: Sequence[str]) -> Grid:
    grid = Grid(title, ["selector", *map(size_name, sizes)])
    for label, entry in selectors.items():
        if entry["cells"]:
            cells = [_percent(entry["cells"].get(size), "gold_recall", "") for size in sizes]
            grid.rows.append([Cell(label), *cells])
    return grid


def _difference_grid(title: str, differences: Mapping[str, Any], sizes: Sequence[str]) -> Grid:
    grid = Grid(title, ["selector", *map(size_name, sizes)], "Bold: the interval leaves out 0.")
    for label, by_size in differences.items():
        if by_size:
            cells = [by_size.get(size, {}).get("gold_recall") for size in sizes]
            grid.rows.append([Cell(label), *map(_points, cells)])
    return grid


def _answer_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    header = ["read", "selector", "size", "strict %", "loose %", "seconds", "tokens", "cached", "n"]
    note = (
        "Strict: every reference group is in the answer; loose: the share of the groups. Seconds: mean time from the "
        "question to the end of the answer, senders prefilled. Tokens: what it was given; cached: how much of "
        "its prompt needed no prefill. The full context is in this server's cache, as it would not be elsewhere."
    )
    grid = Grid("The receiver's answers, by what it read", header, note, names=3)
    for row in rows:
        grid.rows.append(
            [
                Cell(_SOURCES[row["source"]]),
                Cell(row["selector"] or ""),
                Cell(size_name(row["size"]) if row["size"] else ""),
                _percent(row, "strict", "strict_"),
                _percent(row, "loose", "loose_"),
                Cell(f"{row['seconds']:.2f}"),
                Cell(f"{row['given_tokens']:.0f}"),
                Cell(f"{row['cached_tokens']:.0f}"),
                Cell(str(row["n"])),
            ]
        )
    return grid


def size_name(size: str) -> str:
    """``"8"`` is "8x", ``"budget:256"`` is "256 pos."."""
    return f"{size.removeprefix('budget:')} pos." if size.startswith("budget:") else f"{size}x"


def _percent(cell: Mapping[str, Any] | None, measure: str, prefix: str) -> Cell:
    if cell is None:
        return Cell("–")
    low, high = cell[f"{prefix}low"], cell[f"{prefix}high"]
    interval = None if low is None else (f"{100 * low:.0f}", f"{100 * high:.0f}")
    return Cell(f"{100 * cell[measure]:.0f}", interval)


def _points(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell("–")
    low, high = cell["low"], cell["high"]
    interval = None if low is None else (_signed(low), _signed(high))
    return Cell(_signed(cell["difference"]), interval, cell["clear"])


def _signed(value: float) -> str:
    points = round(100 * value)
    return f"{points:+d}" if points else "0"


def _shown(template: str) -> str:
    return repr(template) if template != "default" else "of the server"


# --- terminal


def terminal_view(report: Report) -> RenderableType:
    """Every table, the run's facts, and what failed."""
    parts: list[RenderableType] = [_rich_table(grid) for grid in grids(report)]
    return Group(*parts, *(Text(line, style="dim") for line in facts(report)), *_failure_lines(report))


def _rich_table(grid: Grid) -> Table:
    table = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        caption=grid.caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(grid.header):
        table.add_column(name, justify="left" if number < grid.names else "right", no_wrap=number == 0)
    for row in grid.rows:
        table.add_row(*map(_rich_cell, row))
    return table


def _rich_cell(cell: Cell) -> Text:
    """The interval on a line of its own, so that seven ratios fit a terminal."""
    text = Text(cell.text, style="bold" if cell.strong else "")
    return text if cell.interval is None else text.append(f"\n{'..'.join(cell.interval)}", style="dim not bold")


def _failure_lines(report: Report) -> list[Text]:
    return [Text(line, style="red") for line in failure_lines(report)]


# --- Markdown


def markdown(report: Report) -> str:
    """The run's facts, every table and what failed."""
    parts = ["\n".join(f"- {line}" for line in facts(report))]
    for grid in grids(report):
        lines = [f"### {_escaped(grid.title)}", "", _markdown_row(grid.header), _rule(grid)]
        lines += [_markdown_row([_markdown_cell(cell) for cell in row]) for row in grid.rows]
        parts.append("\n".join([*lines, "", grid.caption]))
    failed = failure_lines(report)
    if failed:
        parts.append("\n".join(["### Not measured", "", *(f"- {_escaped(line)}" for line in failed)]))
    return "\n\n".join(parts) + "\n"


def _markdown_cell(cell: Cell) -> str:
    text = cell.text if cell.interval is None else f"{cell.text} [{', '.join(cell.interval)}]"
    return f"**{text}**" if cell.strong else text


def _rule(grid: Grid) -> str:
    return "|" + "|".join("---" if number < grid.names else "---:" for number in range(len(grid.header))) + "|"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_markdown(path: Path, report: Report) -> None:
    """Write the tables to ``path``: between its two marks where it has them, else as the whole file.

    Raises MarkerError when the marks do not form one pair.
    """
    text = markdown(report)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN in before or END in before:
        head, _, rest = before.partition(BEGIN)
        _, found, tail = rest.partition(END)
        if before.count(BEGIN) != 1 or before.count(END) != 1 or not found:
            raise MarkerError(f"{path} must have one {BEGIN} and after it one {END}")
        text = f"{head}{BEGIN}\n\n{text}\n{END}{tail}"
    write_text(path, text)


# --- both


def facts(report: Report) -> list[str]:
    """What was measured, in a few lines."""
    meta = report["_meta"]
    positions = meta["positions"]
    contexts = f", {positions[0]:,} to {positions[1]:,} positions a case" if positions else ""
    lines = [
        f"Model: {meta.get('model', 'unknown')}; server: {meta.get('server', 'unknown')}; "
        f"cb-sglang {meta.get('version', 'unknown')}; {meta.get('finished', 'date unknown')}",
        f"{meta['cases']} cases over {meta['documents']} documents{contexts}; seed {meta['seed']}; "
        f"{meta['intervals']['replicates']:,} bootstrap replicates",
        f"Query template: {_shown(meta['wordings'][0]['template'])}",
    ]
    if meta["ablation"] is not None:
        lines.append(f"Irrelevant query of the ablation: {meta['ablation']['query']}")
    if meta["cases_without_gold"]:
        lines.append(f"{meta['cases_without_gold']} cases have no gold spans; they count for answers only")
    if meta.get("command"):
        lines.append(f"Command: `{meta['command']}`")
    return lines


def failure_lines(report: Report) -> list[str]:
    """The failures, the first ``MAX_FAILURES_SHOWN`` of them."""
    meta = report["_meta"]
    if not meta["failed_count"]:
        return []
    lines = [f"{meta['failed_count']} failures; the figures are over what was measured:"]
    for failure in meta["failed"][:MAX_FAILURES_SHOWN]:
        size = failure["size"] and size_name(failure["size"])
        where = " ".join(part for part in (failure["case"], failure["selector"], size) if part)
        lines.append(f"{where}: {failure['error']}")
    more = meta["failed_count"] - MAX_FAILURES_SHOWN
    return [*lines, f"and {more} more, in the JSON file"] if more > 0 else lines
