"""What a recall run asks for: selectors with options, sizes, wordings, and the units they multiply to.

A unit is one message (or one a context) for one case. Its key is made of the case's content and of exactly what
is sent, so a finished unit is recognised again by a resumed run, and only by a run that would ask the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cb_loadtest.cases import Case
from cb_sglang.budget import MAX_RATIO, positions_for_budget, positions_for_ratio
from cb_sglang.client import Query
from cb_sglang.errors import InvalidRequestError

SELECTORS = (
    "cacheback",
    "answer_cue",
    "cacheback+sink_free",
    "mean_query",
    "bm25",
    "snapkv",
    "h2o",
    "chunkkv",
    "kvzip",
    "streaming_llm",
    "random",
)
DEFAULT_SELECTOR = "cacheback"
QUERY_FREE = frozenset({"snapkv", "h2o", "chunkkv", "kvzip", "streaming_llm", "random"})
"""Selectors that never see the query: no wording and no irrelevant query can change what they keep."""

RATIOS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
IRRELEVANT_QUERY = "At what temperature does water boil on the top of a high mountain?"
SERVER_WORDING = "default"
"""In place of a query template: the server's own."""

MAX_UNITS_A_CASE = 100_000
_OPTIONS: dict[str, type[float] | type[int] | type[bool]] = {
    "order": float,
    "alpha": float,
    "sink_free": bool,
    "seed": int,
}
_NAME = re.compile(r"[A-Za-z][\w.:-]{0,63}")
_TRUTHS = {"true": True, "false": False}


class PlanError(ValueError):
    """What was asked for on the command line cannot be run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector and its options, as ``selector_options`` of the HTTP API.

    Written ``name+option=value+option``: ``cacheback+alpha=4+sink_free`` (an option without a value is true).
    """

    name: str
    options: tuple[tuple[str, float | int | bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Raises PlanError."""
        name, *given = re.split(r"\+(?=[a-z_])", text.strip())
        if not _NAME.fullmatch(name):
            raise PlanError(f"{text!r} is no selector; write a name, with options as name+alpha=4+sink_free")
        options: dict[str, float | int | bool] = {}
        for option in given:
            key, equals, value = option.partition("=")
            if key not in _OPTIONS:
                raise PlanError(f"{text!r}: unknown option {key!r}; there are {', '.join(_OPTIONS)}")
            if key in options:
                raise PlanError(f"{text!r}: option {key!r} is given twice")
            options[key] = _option_value(key, value if equals else "true", text)
        return cls(name, tuple(sorted(options.items())))

    @property
    def label(self) -> str:
        """The selector as it was written, with the options in a fixed order; its name in every output."""
        parts = [self.name]
        for key, value in self.options:
            parts.append(key if value is True else f"{key}={str(value).lower() if value is False else f'{value:g}'}")
        return "+".join(parts)

    @property
    def query_free(self) -> bool:
        return self.name in QUERY_FREE


def _option_value(key: str, value: str, text: str) -> float | int | bool:
    kind = _OPTIONS[key]
    try:
        if kind is bool:
            return _TRUTHS[value]
        number = kind(value)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else "a whole number" if kind is int else "a number"
        raise PlanError(f"{text!r}: {key} must be {expected}, not {value!r}") from None
    if not math.isfinite(number):
        raise PlanError(f"{text!r}: {key} must be finite")
    return number


@dataclass(frozen=True, slots=True)
class Size:
    """How much a message keeps: a ratio, or a budget in positions. Exactly one is given."""

    ratio: float | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.budget is None):
            raise PlanError("give a ratio or a budget")
        if self.ratio is not None and not 1.0 <= self.ratio <= MAX_RATIO:
            raise PlanError(f"a ratio must be between 1 and {MAX_RATIO:g}, not {self.ratio:g}")
        if self.budget is not None and not 1 <= self.budget < 1 << 31:
            raise PlanError(f"a budget must be between 1 and {(1 << 31) - 1} positions, not {self.budget}")

    @property
    def label(self) -> str:
        """Its name in every output: ``"8"`` for ratio 8, ``"budget:256"`` for 256 positions."""
        return f"{self.ratio:g}" if self.ratio is not None else f"budget:{self.budget}"

    def positions(self, total: int) -> int:
        """Positions kept of ``total``, by the budget law (no position is inherited here)."""
        if self.budget is not None:
            return positions_for_budget(total, self.budget)
        assert self.ratio is not None
        return positions_for_ratio(total, 0, self.ratio)

    def fields(self) -> dict[str, Any]:
        return {"budget": self.budget} if self.budget is not None else {"ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The receiver's answers: from the full context, from nothing, and from a message and a report of each size."""

    selectors: tuple[Selector, ...]
    sizes: tuple[Size, ...]
    max_new_tokens: int
    prompt: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One recall run. The first wording is the one the main figures are measured with.

    wordings:   query templates; None is the server's own.
    irrelevant: a query that no document answers, for the ablation; None leaves it out.
    """

    selectors: tuple[Selector, ...]
    sizes: tuple[Size, ...]
    wordings: tuple[str | None, ...] = (None,)
    irrelevant: str | None = None
    seed: int = 0
    answer: AnswerPlan | None = None

    def __post_init__(self) -> None:
        if len(self.selectors) * len(self.sizes) * (len(self.wordings) + 1) > MAX_UNITS_A_CASE:
            raise PlanError(f"more than {MAX_UNITS_A_CASE} messages a case; ask for less")
        for what, labels in (
            ("selector", [selector.label for selector in self.selectors]),
            ("ratio or budget", [size.label for size in self.sizes]),
            ("query template", [SERVER_WORDING if wording is None else wording for wording in self.wordings]),
        ):
            if not labels:
                raise PlanError(f"give at least one {what}")
            label, count = Counter(labels).most_common(1)[0]
            if count > 1:
                raise PlanError(f"the {what} {label!r} is given twice")

    @property
    def default(self) -> Selector:
        """The selector the others are compared with."""
        names = (selector for selector in self.selectors if selector.label == DEFAULT_SELECTOR)
        return next(names, self.selectors[0])


@dataclass(frozen=True, slots=True)
class Unit:
    """One message to ask for, of a case that is known from the context. ``wording`` counts the plan's wordings."""

    selector: Selector
    size: Size
    wording: int
    irrelevant: bool
    query: str
    """What is sent, as JSON: the fields of a query object."""

    key: str

    def fields(self) -> dict[str, Any]:
        sent: dict[str, Any] = json.loads(self.query)
        return sent


def case_digest(case: Case) -> str:
    """Of everything that a measurement on this case depends on."""
    return hashlib.sha256(case.model_dump_json(exclude={"demo"}).encode()).hexdigest()


def key_of(digest: str, sent: str) -> str:
    return hashlib.sha256(f"{digest}\n{sent}".encode()).hexdigest()[:24]


def message_fields(selector: Selector, size: Size, *, case: Case, seed: int) -> dict[str, Any]:
    """The fields of a query object but the query and its wording. ``random`` gets a seed for every case."""
    options = dict(selector.options)
    if selector.name == "random":
        options.setdefault("seed", zlib.crc32(f"{seed} {case.id}".encode()) >> 1)
    fields: dict[str, Any] = {"selector": selector.name, **size.fields()}
    if options:
        fields["selector_options"] = options
    return fields


def as_query(fields: dict[str, Any]) -> Query:
    """The query object of these fields. Raises InvalidRequestError, as the client does for what it cannot send."""
    try:
        return Query.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def units(plan: Plan, case: Case) -> list[Unit]:
    """Every message of the plan for one case; none when the case has no gold spans."""
    if not case.gold:
        return []
    digest = case_digest(case)

    def make() -> Iterator[Unit]:
        for selector in plan.selectors:
            for wording, irrelevant in _variants(plan, selector):
                for size in plan.sizes:
                    fields = message_fields(selector, size, case=case, seed=plan.seed)
                    fields["query"] = plan.irrelevant if irrelevant else case.question
                    template = plan.wordings[wording]
                    if template is not None:
                        fields["query_template"] = template
                    sent = json.dumps(fields, sort_keys=True, ensure_ascii=False)
                    yield Unit(selector, size, wording, irrelevant, sent, key_of(digest, sent))

    return list(make())


def _variants(plan: Plan, selector: Selector) -> Iterator[tuple[int, bool]]:
    """(wording, irrelevant) pairs; the ablation is run with the first wording."""
    yield 0, False
    if selector.query_free:
        return
    yield from ((wording, False) for wording in range(1, len(plan.wordings)))
    if plan.irrelevant is not None:
        yield 0, True


def parse_list(text: str | None, what: str) -> list[str]:
    """The items of a comma-separated list; none for None. Raises PlanError for an empty item."""
    if text is None:
        return []
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise PlanError(f"{what}: {text!r} has an empty item; write a,b,c")
    return items


def parse_sizes(ratios: Sequence[str], budgets: Sequence[str]) -> tuple[Size, ...]:
    """Raises PlanError."""
    try:
        return (*(Size(ratio=float(r)) for r in ratios), *(Size(budget=int(b)) for b in budgets))
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"ratios must be numbers and budgets whole numbers ({error})") from None
