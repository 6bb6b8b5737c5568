"""The table of selectors, and the one way to run one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cb_kernels import statistics
from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments, pin_first
from cb_kernels.selectors.options import SelectorOptions
from cb_kernels.selectors.spans import span_count


class Needs(Enum):
    """What has to be measured before a selector can run."""

    NOTHING = "nothing"
    """The sender's length."""
    QUERY_ROWS = "query_rows"
    """The moments of the query's voting rows."""
    QUERY_AND_CUE_ROWS = "query_and_cue_rows"
    """Those, and apart the moments of the wrapped query's last row alone, with the same ``sink_free``."""
    STATISTIC = "statistic"
    """A statistic of the sender (cb_kernels.statistics)."""
    TEXT = "text"
    """The query's text and the text of each 16-position span."""


@dataclass(frozen=True, slots=True)
class SelectorContext:
    """What a selector may look at. What its ``Needs`` do not name is None.

    * ``length``: T; the last ``latent_len`` positions are latent rows.
    * ``moments``, ``cue``: of the voting rows, and of the last row; [T] each.
    * ``statistic``: float32 [T], averaged over tensor-parallel ranks and added up over chunks.
    * ``query``, ``span_texts``: the query's text, and one text for each of the ceil(T / 16) spans.
    * ``device``: where scores are wanted if nothing else here has a device.
    """

    length: int
    latent_len: int = 0
    options: SelectorOptions = field(default_factory=SelectorOptions)
    moments: Moments | None = None
    cue: Moments | None = None
    statistic: Tensor | None = None
    query: str | None = None
    span_texts: Sequence[str] | None = None
    device: torch.device | str = "cpu"

    def require_moments(self) -> Moments:
        """``moments``; ScoringInputError if they were not measured or are not [T]."""
        return _check_moments("moments", self.moments, self.length)

    def require_cue(self) -> Moments:
        """``cue``; ScoringInputError if it was not measured or is not [T]."""
        return _check_moments("cue", self.cue, self.length)

    def require_statistic(self) -> Tensor:
        """``statistic``; ScoringInputError if it was not measured or is not [T]."""
        if self.statistic is None or self.statistic.shape != (self.length,):
            got = None if self.statistic is None else tuple(self.statistic.shape)
            raise ScoringInputError(f"the selector needs a statistic of shape [{self.length}]; got {got}")
        return self.statistic

    def require_text(self) -> tuple[str, Sequence[str]]:
        """``query`` and ``span_texts``; ScoringInputError if missing or not one text a span."""
        if self.query is None or self.span_texts is None or len(self.span_texts) != span_count(self.length):
            got = "no text" if self.span_texts is None else f"{len(self.span_texts)} texts"
            raise ScoringInputError(
                f"the selector needs the query's text and those of {span_count(self.length)} spans; got {got}"
            )
        return self.query, self.span_texts


Selector: TypeAlias = Callable[[SelectorContext], Tensor]

_REQUIRE: dict[Needs, Callable[[SelectorContext], object]] = {
    Needs.NOTHING: lambda context: None,
    Needs.QUERY_ROWS: SelectorContext.require_moments,
    Needs.QUERY_AND_CUE_ROWS: lambda context: (context.require_moments(), context.require_cue()),
    Needs.STATISTIC: SelectorContext.require_statistic,
    Needs.TEXT: SelectorContext.require_text,
}


@dataclass(frozen=True, slots=True)
class SelectorEntry:
    """A registered selector: what it needs, and, called with a context, its scores.

    * ``statistic``: name in cb_kernels.statistics, exactly if ``needs`` is STATISTIC.
    * ``sink_free_rows``: whether rows must be accumulated with position 0 left out; None leaves it to the request.
    * ``options``: names of the ``SelectorOptions`` it reads.
    """

    name: str
    function: Selector
    needs: Needs
    statistic: str | None
    sink_free_rows: bool | None
    options: frozenset[str]

    @property
    def query_independent(self) -> bool:
        """True if equal options give equal scores for every query, so that they can be kept with the sender."""
        return self.needs in (Needs.NOTHING, Needs.STATISTIC)

    def effective(self, options: SelectorOptions) -> SelectorOptions:
        """``options`` as this selector uses them: ``sink_free`` as its rows must be, what it does not read at its
        default. Requests with equal ``order`` and ``sink_free`` here can share a scoring plan."""
        read: dict[str, Any] = {name: getattr(options, name) for name in self.options}
        if self.sink_free_rows is not None:
            read["sink_free"] = self.sink_free_rows
        return SelectorOptions(**read)

    def __call__(self, context: SelectorContext) -> Tensor:
        """Scores float32 [T]. Position 0 is pinned to the maximum here, for every selector alike unless sink-free.

        Raises ``ScoringInputError`` if the context lacks what the selector needs, or if the function returns anything
        but [T] real numbers.
        """
        if context.length < 1 or not 0 <= context.latent_len < context.length:
            raise ScoringInputError(
                f"length must be at least 1 and latent_len in 0..length-1; got {context.length}, {context.latent_len}"
            )
        _REQUIRE[self.needs](context)
        scores = self.function(context)
        if not isinstance(scores, Tensor) or scores.shape != (context.length,) or scores.is_complex():
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ScoringInputError(f"selector {self.name} must return a tensor [{context.length}]; got {got}")
        # Without the sink, position 0 is kept because it is protected; pinned, it would carry its whole span along.
        return scores.float() if self.effective(context.options).sink_free else pin_first(scores.float())


_SELECTORS: dict[str, SelectorEntry] = {}
_ALL_OPTIONS = frozenset(f.name for f in fields(SelectorOptions))
_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def selector(
    name: str,
    *,
    needs: Needs = Needs.QUERY_ROWS,
    statistic: str | None = None,
    sink_free_rows: bool | None = None,
    options: Iterable[str] = _ALL_OPTIONS,
) -> Callable[[Selector], Selector]:
    """Register a function under ``name``; see ``SelectorEntry`` for the rest.

    Raises ``ScoringInputError`` when the name is taken, or ``statistic`` or an option is not known.
    """

    def register(function: Selector) -> Selector:
        _register(SelectorEntry(name, function, needs, statistic, sink_free_rows, frozenset(options)))
        return function

    return register


def get(name: str) -> SelectorEntry:
    """The selector of that name. Raises ScoringInputError naming those that exist."""
    if name not in _SELECTORS:
        raise ScoringInputError(f"unknown selector {name!r}; choose one of {', '.join(names())}")
    return _SELECTORS[name]


def names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_SELECTORS)


def load(spec: str) -> SelectorEntry:
    """Import ``package.module:function`` and register the function under ``spec`` itself.

    This runs the module's code: only for specs that the server's operator has allowed, never for a client's. The
    function may carry ``cacheback_needs`` (a ``Needs`` or its value; QUERY_ROWS without it), and then
    ``cacheback_statistic`` (a name). Loading a spec again returns the first entry.

    Raises ``ScoringInputError`` saying what is wrong with the spec, the module or the function.
    """
    if spec in _SELECTORS:
        return _SELECTORS[spec]
    if not _SPEC.fullmatch(spec):
        raise ScoringInputError(f'a custom selector is written "package.module:function"; got {spec!r}')
    module_name, function_name = spec.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module's own code raises
        raise ScoringInputError(f"selector {spec}: importing {module_name} failed: {error!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ScoringInputError(f"selector {spec}: {module_name} has no function {function_name}")
    needs = getattr(function, "cacheback_needs", Needs.QUERY_ROWS)
    try:
        needs = Needs(needs)
    except ValueError:
        allowed = ", ".join(n.value for n in Needs)
        raise ScoringInputError(f"selector {spec}: cacheback_needs must be one of {allowed}; got {needs!r}") from None
    statistic = getattr(function, "cacheback_statistic", None)
    return _register(SelectorEntry(spec, function, needs, statistic, None, _ALL_OPTIONS))


def _register(entry: SelectorEntry) -> SelectorEntry:
    if entry.name in _SELECTORS:
        raise ScoringInputError(f"selector {entry.name!r} is registered already")
    if (entry.needs is Needs.STATISTIC) != (entry.statistic is not None):
        raise ScoringInputError(f"selector {entry.name}: a statistic's name goes with needs=STATISTIC, and only there")
    if entry.statistic is not None:
        statistics.get(entry.statistic)
    if not entry.options <= _ALL_OPTIONS:
        raise ScoringInputError(f"selector {entry.name}: no such option: {sorted(entry.options - _ALL_OPTIONS)}")
    _SELECTORS[entry.name] = entry
    return entry


def _check_moments(what: str, moments: Moments | None, length: int) -> Moments:
    if moments is None or moments.votes.shape != (length,):
        got = None if moments is None else tuple(moments.votes.shape)
        raise ScoringInputError(f"the selector needs {what} of shape [{length}]; got {got}")
    return moments
