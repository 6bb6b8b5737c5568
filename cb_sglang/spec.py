"""What a scoring request carries through SGLang, and what comes back.

A request of ours is an ordinary SGLang request whose spec travels as a dict in ``sampling_params.custom_params``; the
result comes back as ``meta_info["cacheback"][0]``. There are five kinds: a query over a sender (``ScoringSpec``),
answered with kept positions; a measurement of a sender that no query shapes (``StatisticSpec``), answered with one
number a position; the next latent row of a sender (``LatentSpec``); input embeddings (``EmbeddingSpec``); and a pin
(``PinSpec``), which is answered with nothing.
Anybody who may call SGLang's own endpoints can put a dict there: ``read_spec`` trusts nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

from cb_sglang.errors import InvalidRequestError
from cb_sglang.runs import Runs, overlap, size, union

WIRE_KEY = "cacheback"
STATISTIC_KEY = "cacheback_statistic"
LATENT_KEY = "cacheback_latent"
EMBEDDING_KEY = "cacheback_embedding"
PIN_KEY = "cacheback_pin"
CACHEABLE_ROWS_KEY = "cacheback_cacheable_rows"
"""Marks a request whose radix namespace (``extra_key``) stands for its embedding overrides: it may be cached."""
SPAN = 16
MAX_EMBEDDING_ROWS = 1 << 20
_MAX_INT = 1 << 31
_MAX_LIST = 1 << 22


class _Spec:
    __slots__ = ()
    wire_key: ClassVar[str]

    @property
    def match_limit(self) -> int | None:
        """Positions that may come from the radix cache, where that is fewer than SGLang would take."""
        return None

    @property
    def insert_limit(self) -> int | None:
        """Positions that may go into the radix cache, where that is fewer than all."""
        return None

    def to_wire(self) -> dict[str, Any]:
        """As the dict that goes into ``sampling_params.custom_params``."""
        return {self.wire_key: asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class ScoringSpec(_Spec):
    """One query's scoring pass, over sender tokens + query tokens.

    sender_len:  T, the leading positions of the request that are the sender's.
    vote_start, vote_stop: the query rows that vote, counted from the first query token; ``0 <= start < stop``.
    budget:      positions to keep, 1..T (already resolved by the budget law); at most these, with ``coverage``.
    coverage:    when above 0: the smallest budget whose spans hold this share (up to 1) of the score's sum.
    excluded:    positions that are never kept (private ones, those that the receiver has): the borders
                 [start, stop, start, stop, ...] of ascending runs.
    latent_len:  trailing sender positions that are the sender's own latent rows, always kept.
    selector:    name in cb_kernels.selectors; it must be one that scores a query's rows.
    order, alpha, sink_free: the selector's options (cb_kernels.selectors.SelectorOptions).
    want_scores: also return the mean score of every 16-position span.
    """

    wire_key: ClassVar[str] = WIRE_KEY
    sender_len: int
    vote_start: int
    vote_stop: int
    budget: int
    latent_len: int = 0
    selector: str = "cacheback"
    order: float = 2.0
    alpha: float = 2.0
    sink_free: bool = False
    want_scores: bool = False
    coverage: float = 0.0
    excluded: list[int] = field(default_factory=list)

    @property
    def excluded_runs(self) -> Runs:
        """``excluded`` as half-open runs."""
        return tuple(zip(self.excluded[::2], self.excluded[1::2], strict=True))

    @property
    def protected_runs(self) -> Runs:
        """What the keep law protects, where not excluded: position 0 and the latent rows."""
        return (0, 1), (self.sender_len - self.latent_len, self.sender_len)

    @property
    def match_limit(self) -> int:
        """The query's rows must be computed, even if cached."""
        return self.sender_len

    @property
    def insert_limit(self) -> int:
        """The query's tail stays out of the tree."""
        return self.sender_len

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless this fits a request of ``input_len`` tokens."""
        if not 1 <= self.sender_len < input_len:
            raise InvalidRequestError("sender_len must leave at least one query token in the request")
        if not self.vote_start < self.vote_stop <= input_len - self.sender_len:
            raise InvalidRequestError("voting rows must be a non-empty range within the query")
        if not self.latent_len < self.sender_len:
            raise InvalidRequestError("the latent rows must leave at least one other sender position")
        runs = self.excluded
        if len(runs) % 2 or any(a >= b for a, b in pairwise(runs)) or (runs and runs[-1] > self.sender_len):
            raise InvalidRequestError("excluded must hold the borders of ascending runs within the sender")
        if not 0.0 <= self.coverage <= 1.0:
            raise InvalidRequestError("coverage must lie between 0 and 1")
        protected, available = protected_and_available(self.sender_len, self.latent_len, self.excluded_runs)
        if not max(1, protected) <= self.budget <= available:
            raise InvalidRequestError(
                f"budget must lie between the {protected} positions always kept and the {available} that may be"
            )


@dataclass(frozen=True, slots=True)
class StatisticSpec(_Spec):
    """One query-independent measurement of a sender (cb_kernels.statistics).

    sender_len, latent_len: as in ScoringSpec.
    statistic:   name in cb_kernels.statistics.
    first_row:   the first position whose row is measured; everything before it may come from the cache.
    chunk_start, chunk_stop: the sender positions measured, for a statistic that takes a sender in chunks.
    """

    wire_key: ClassVar[str] = STATISTIC_KEY
    sender_len: int
    statistic: str
    first_row: int
    latent_len: int = 0
    chunk_start: int = 0
    chunk_stop: int = 0

    @property
    def match_limit(self) -> int:
        """The measured rows must be computed, even if cached."""
        return self.first_row

    @property
    def insert_limit(self) -> int:
        """What a measurement puts behind the sender stays out of the tree."""
        return self.sender_len

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless this fits a request of ``input_len`` tokens."""
        if not 1 <= self.sender_len <= input_len or self.first_row >= input_len:
            raise InvalidRequestError("sender_len and first_row must lie within the request")
        if not self.chunk_start <= self.chunk_stop <= self.sender_len or self.latent_len >= self.sender_len:
            raise InvalidRequestError("the chunk and the latent rows must lie within the sender")


@dataclass(frozen=True, slots=True)
class LatentSpec(_Spec):
    """The latent row that follows the request's tokens: its last hidden row, rescaled (design section 2).

    step: how many rows have been rolled before this one.
    """

    wire_key: ClassVar[str] = LATENT_KEY
    step: int

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless this fits a request of ``input_len`` tokens."""
        if not self.step < input_len:
            raise InvalidRequestError("a latent row needs a sender before it")


@dataclass(frozen=True, slots=True)
class EmbeddingSpec(_Spec):
    """The model's input embeddings of ``token_ids``, as it feeds them (a model may scale its table)."""

    wire_key: ClassVar[str] = EMBEDDING_KEY
    token_ids: list[int]

    @property
    def insert_limit(self) -> int:
        """The request is a carrier of one token that nobody will ask for again."""
        return 0

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless there is something to look up. The vocabulary is checked at the model."""
        if not 1 <= len(self.token_ids) <= MAX_EMBEDDING_ROWS:
            raise InvalidRequestError(f"between 1 and {MAX_EMBEDDING_ROWS} embeddings can be looked up at once")


@dataclass(frozen=True, slots=True)
class PinSpec(_Spec):
    """Keep the request's positions in the radix cache until they are let go of (seam/pins.py).

    pin_id: what is held or let go of; a second hold takes the place of the first.
    """

    wire_key: ClassVar[str] = PIN_KEY
    pin_id: str
    hold: bool
    token: str

    @property
    def insert_limit(self) -> int | None:
        """Letting go takes a carrier of one token, which is not to stay."""
        return None if self.hold else 0

    def check(self, input_len: int) -> None:
        """Nothing of it depends on the request."""


Spec: TypeAlias = ScoringSpec | StatisticSpec | LatentSpec | EmbeddingSpec | PinSpec
_KINDS: tuple[type[Spec], ...] = (ScoringSpec, StatisticSpec, LatentSpec, EmbeddingSpec, PinSpec)


def protected_and_available(sender_len: int, latent_len: int, excluded: Runs) -> tuple[int, int]:
    """How many positions are always kept (position 0 and the latent rows), and how many may be, beside ``excluded``."""
    protected = union([(0, 1), (sender_len - latent_len, sender_len)])
    always = sum(stop - start - overlap(excluded, start, stop) for start, stop in protected)
    return always, sender_len - size(excluded)


def read_spec(custom_params: object, *, input_len: int) -> Spec | None:
    """Read a spec back in the scheduler; None when the request is not one of ours.

    Raises InvalidRequestError when the dict is malformed or does not fit a request of ``input_len`` tokens.
    """
    for cls in _KINDS:
        if isinstance(custom_params, dict) and cls.wire_key in custom_params:
            return _read(cls, custom_params[cls.wire_key], input_len)
    return None


def _read(cls: type[Spec], raw: object, input_len: int) -> Spec:
    where = f"custom_params.{cls.wire_key}"
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise InvalidRequestError(f"{where} must be an object")
    try:
        spec = cls(**raw)
    except TypeError as error:
        raise InvalidRequestError(f"{where}: {error}") from None
    for name in cls.__slots__:
        _check_field(f"{where}.{name}", cls.__annotations__[name], getattr(spec, name))
    spec.check(input_len)
    return spec


def _check_field(where: str, wanted: str, value: object) -> None:
    fits = {
        "int": type(value) is int and 0 <= value < _MAX_INT,
        "float": isinstance(value, int | float) and type(value) is not bool and abs(value) < _MAX_INT,
        "bool": type(value) is bool,
        "str": type(value) is str and len(value) <= 256,
        "list[int]": isinstance(value, list)
        and len(value) <= _MAX_LIST
        and all(type(each) is int and 0 <= each < _MAX_INT for each in value),
    }
    if not fits[wanted]:
        raise InvalidRequestError(f"{where} must be of type {wanted}, within bounds")
