"""What a scoring request carries through SGLang, and what comes back.

A request of ours is an ordinary SGLang request whose spec travels as a dict in ``sampling_params.custom_params``; the
result comes back as ``meta_info["cacheback"][0]``. There are two kinds: a query over a sender (``ScoringSpec``),
answered with kept positions, and a measurement of a sender that no query shapes (``StatisticSpec``), answered with
one number a position. Anybody who may call SGLang's own endpoints can put a dict there: ``read_spec`` trusts nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from cb_sglang.errors import InvalidRequestError

WIRE_KEY = "cacheback"
STATISTIC_KEY = "cacheback_statistic"
SPAN = 16
_MAX_INT = 1 << 31


class _Spec:
    __slots__ = ()
    wire_key: ClassVar[str]

    def to_wire(self) -> dict[str, Any]:
        """As the dict that goes into ``sampling_params.custom_params``."""
        return {self.wire_key: asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class ScoringSpec(_Spec):
    """One query's scoring pass, over sender tokens + query tokens.

    sender_len:  T, the leading positions of the request that are the sender's.
    vote_start, vote_stop: the query rows that vote, counted from the first query token; ``0 <= start < stop``.
    budget:      positions to keep, 1..T (already resolved by the budget law).
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

    @property
    def protected(self) -> int:
        """How many positions the keep law protects: position 0 and the latent rows."""
        return 1 + self.latent_len

    @property
    def match_limit(self) -> int:
        """Positions that may come from the radix cache; the query's rows must be computed, even if cached."""
        return self.sender_len

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless this fits a request of ``input_len`` tokens."""
        if not 1 <= self.sender_len < input_len:
            raise InvalidRequestError("sender_len must leave at least one query token in the request")
        if not self.vote_start < self.vote_stop <= input_len - self.sender_len:
            raise InvalidRequestError("voting rows must be a non-empty range within the query")
        if not self.protected <= self.budget <= self.sender_len:
            raise InvalidRequestError(
                f"budget must lie between the {self.protected} positions always kept and sender_len"
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
        """Positions that may come from the radix cache."""
        return self.first_row

    def check(self, input_len: int) -> None:
        """Raise InvalidRequestError unless this fits a request of ``input_len`` tokens."""
        if not 1 <= self.sender_len <= input_len or self.first_row >= input_len:
            raise InvalidRequestError("sender_len and first_row must lie within the request")
        if not self.chunk_start <= self.chunk_stop <= self.sender_len or self.latent_len >= self.sender_len:
            raise InvalidRequestError("the chunk and the latent rows must lie within the sender")


Spec: TypeAlias = ScoringSpec | StatisticSpec


def read_spec(custom_params: object, *, input_len: int) -> Spec | None:
    """Read a spec back in the scheduler; None when the request is not one of ours.

    Raises InvalidRequestError when the dict is malformed or does not fit a request of ``input_len`` tokens.
    """
    for cls in (ScoringSpec, StatisticSpec):
        if isinstance(custom_params, dict) and cls.wire_key in custom_params:
            return _read(cls, custom_params[cls.wire_key], input_len)
    return None


def _read(cls: type[ScoringSpec] | type[StatisticSpec], raw: object, input_len: int) -> Spec:
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
    }
    if not fits[wanted]:
        raise InvalidRequestError(f"{where} must be of type {wanted}, within bounds")
