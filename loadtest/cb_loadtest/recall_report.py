"""From the records of a recall run to its report: plain data, written as JSON, from which tables and plots are made.

At the top level the report has, under every selector, ``ratio -> {gold_recall, all_gold, n, low, high, ...}``;
everything else is under ``_meta``. docs/recall.md describes every field.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cb_loadtest.cases import Case
from cb_loadtest.recall_journal import Record
from cb_loadtest.recall_plan import SERVER_WORDING, Plan
from cb_loadtest.recall_run import Failures
from cb_loadtest.stats import LEVEL, REPLICATES, Estimate, estimate, estimate_difference, linked_clusters

Report = dict[str, Any]
Values = dict[str, float]
_MEASURES = {"gold_recall": "recall", "all_gold": "all_gold"}
MAX_REPORT_BYTES = 256 << 20


class ReportError(ValueError):
    """A file is no report of a recall run."""


def build_report(
    plan: Plan, cases: Sequence[Case], records: Sequence[Record], failures: Failures, run: Mapping[str, Any]
) -> Report:
    """``run`` is what is known of the run itself (model, server, command, ...); it goes to ``_meta`` as it is."""
    clusters = linked_clusters({case.id: [context.text for context in case.contexts] for case in cases})
    tables = _Tables(plan, clusters, records)
    labels = [selector.label for selector in plan.selectors]
    report: Report = {label: tables.cells(label) for label in labels}
    report["_meta"] = {
        **run,
        "default_selector": plan.default.label,
        "query_free": [selector.label for selector in plan.selectors if selector.query_free],
        "sizes": [size.label for size in plan.sizes],
        "cases": len(cases),
        "cases_without_gold": sum(not case.gold for case in cases),
        "documents": len(set(clusters.values())),
        "positions": tables.position_range(),
        "seed": plan.seed,
        "intervals": {
            "level": LEVEL,
            "replicates": REPLICATES,
            "low, high": "percentile bootstrap over documents, each with all its cases",
            "low_by_case, high_by_case": "percentile bootstrap over cases",
        },
        "differences": {label: tables.differences(label) for label in labels if label != plan.default.label},
        "wordings": tables.wordings(),
        "ablation": tables.ablation(),
        "answers": answer_rows(records, clusters, plan.seed),
        "answer_settings": None
        if plan.answer is None
        else {"prompt": plan.answer.prompt, "max_new_tokens": plan.answer.max_new_tokens},
        "failed_count": failures.count,
        "failed": [asdict(failure) for failure in failures.items],
    }
    return report


class _Tables:
    """Recall records, arranged by selector, size, wording and query."""

    def __init__(self, plan: Plan, clusters: Mapping[str, int], records: Iterable[Record]) -> None:
        self._plan = plan
        self._clusters = clusters
        self._by_key: dict[tuple[str, str, int, bool], dict[str, Record]] = defaultdict(dict)
        for record in records:
            if record["measure"] == "recall":
                key = (record["selector"], record["size"], record["wording"], record["irrelevant"])
                self._by_key[key][record["case"]] = record

    def _values(self, measure: str, label: str, size: str, wording: int = 0, irrelevant: bool = False) -> Values:
        found = self._by_key.get((label, size, wording, irrelevant), {})
        return {case: float(record[_MEASURES[measure]]) for case, record in found.items()}

    def _sizes(self) -> list[str]:
        return [size.label for size in self._plan.sizes]

    def cells(self, label: str, wording: int = 0, irrelevant: bool = False) -> dict[str, Any]:
        made = {}
        for size in self._sizes():
            values = self._values("gold_recall", label, size, wording, irrelevant)
            if not values:
                continue
            recall = self._estimate(values)
            whole = self._estimate(self._values("all_gold", label, size, wording, irrelevant))
            found = self._by_key[label, size, wording, irrelevant].values()
            made[size] = {
                "gold_recall": recall.mean,
                "all_gold": whole.mean,
                "n": recall.n,
                "documents": recall.clusters,
                **interval_fields(recall),
                **interval_fields(whole, "all_gold_"),
                "kept": statistics.fmean(record["kept"] for record in found),
            }
        return made

    def _estimate(self, values: Values) -> Estimate:
        return estimate(list(values.values()), [self._clusters[case] for case in values], seed=self._plan.seed)

    def differences(self, label: str) -> dict[str, Any]:
        """The selector's recall minus the default's, case by case."""
        default = self._plan.default.label
        return self._compared(
            (size, measure, values, self._values(measure, default, size))
            for size, measure, values in self._first(label)
        )

    def _compared(self, pairs: Iterable[tuple[str, str, Values, Values]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for size, measure, values, base in pairs:
            found = estimate_difference(values, base, self._clusters, seed=self._plan.seed)
            if found is not None:
                cell = {"difference": found.mean, "n": found.n, **interval_fields(found), "clear": found.clear}
                made.setdefault(size, {})[measure] = cell
        return made

    def wordings(self) -> list[dict[str, Any]]:
        """Every wording; those after the first with their own cells, and differences to the first."""
        rows: list[dict[str, Any]] = []
        for number, template in enumerate(self._plan.wordings):
            row: dict[str, Any] = {"template": SERVER_WORDING if template is None else template}
            if number:
                row["selectors"] = {
                    label: {
                        "cells": self.cells(label, number),
                        "differences": self._compared(
                            (size, measure, self._values(measure, label, size, number), first)
                            for size, measure, first in self._first(label)
                        ),
                    }
                    for label in self._reading()
                }
            rows.append(row)
        return rows

    def ablation(self) -> dict[str, Any] | None:
        """The same with a query that has nothing to do with the case; the differences are own minus irrelevant."""
        if self._plan.irrelevant is None:
            return None
        return {
            "query": self._plan.irrelevant,
            "selectors": {
                label: {
                    "cells": self.cells(label, irrelevant=True),
                    "differences": self._compared(
                        (size, measure, own, self._values(measure, label, size, irrelevant=True))
                        for size, measure, own in self._first(label)
                    ),
                }
                for label in self._reading()
            },
        }

    def _reading(self) -> list[str]:
        return [selector.label for selector in self._plan.selectors if not selector.query_free]

    def _first(self, label: str) -> Iterator[tuple[str, str, Values]]:
        """(size, measure, values) with the first wording and the cases' own queries."""
        for size in self._sizes():
            for measure in _MEASURES:
                yield size, measure, self._values(measure, label, size)

    def position_range(self) -> list[int]:
        """The shortest and the longest case, in positions over all its contexts; empty without records."""
        totals = [record["positions"] for found in self._by_key.values() for record in found.values()]
        return [min(totals), max(totals)] if totals else []


def interval_fields(found: Estimate, prefix: str = "") -> dict[str, float | None]:
    """``low`` and ``high`` over documents, and over cases; None where there is nothing to resample."""
    by_document, by_case = found.by_document or (None, None), found.by_case or (None, None)
    return {
        f"{prefix}low": by_document[0],
        f"{prefix}high": by_document[1],
        f"{prefix}low_by_case": by_case[0],
        f"{prefix}high_by_case": by_case[1],
    }


def answer_rows(records: Iterable[Record], clusters: Mapping[str, int], seed: int) -> list[dict[str, Any]]:
    """One row for each thing the receiver read: accuracy with intervals, and seconds to the end of the answer."""
    groups: dict[tuple[str, str | None, str | None], list[Record]] = defaultdict(list)
    for record in records:
        if record["measure"] == "answer":
            groups[record["source"], record["selector"], record["size"]].append(record)
    rows = []
    for (source, selector, size), found in groups.items():
        numbers = [clusters[record["case"]] for record in found]
        strict = estimate([record["strict"] for record in found], numbers, seed=seed)
        loose = estimate([record["loose"] for record in found], numbers, seed=seed)
        seconds = [record["seconds"] for record in found]
        rows.append(
            {
                "source": source,
                "selector": selector,
                "size": size,
                "n": strict.n,
                "strict": strict.mean,
                **interval_fields(strict, "strict_"),
                "loose": loose.mean,
                **interval_fields(loose, "loose_"),
                "seconds": statistics.fmean(seconds),
                "seconds_median": statistics.median(seconds),
                "given_tokens": statistics.fmean(record["given_tokens"] for record in found),
                "cached_tokens": statistics.fmean(record["cached_tokens"] for record in found),
            }
        )
    return rows


def selectors_of(report: Report) -> list[str]:
    return [name for name in report if not name.startswith("_")]


def write_text(path: Path, text: str) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as stream:
        stream.write(text)
    temporary = Path(stream.name)
    temporary.chmod(0o644)
    temporary.replace(path)


def write_report(path: Path, report: Report) -> None:
    write_text(path, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_report(path: Path) -> Report:
    """Raises ReportError."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ReportError(f"{path} is longer than {MAX_REPORT_BYTES} bytes; it is no report of a recall run")
        report = json.loads(path.read_text(encoding="utf-8"))
    except ReportError:
        raise
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from None
    if not isinstance(report, dict) or "differences" not in (report.get("_meta") or {}):
        raise ReportError(f"{path} is no report of a recall run")
    return report
