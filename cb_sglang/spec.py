"""What a scoring request carries through SGLang, and what comes back.

A query is an ordinary SGLang request over sender tokens + query tokens. Its ScoringSpec travels as the dict
``sampling_params.custom_params["cacheback"]``; the result comes back as ``meta_info["cacheback"][0]``.
Anybody who may call SGLang's own endpoints can put a dict there, so ``from_wire`` trusts nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cb_sglang.errors import InvalidRequestError

WIRE_KEY = "cacheback"
SPAN = 16
_MAX_INT = 1 << 31


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """One query's scoring pass.

    sender_len:  T, the leading positions of the request that are the sender's.
    vote_start, vote_stop: the query rows that vote, counted from the first query token; ``0 <= start < stop``.
    budget:      positions to keep, 1..T (already resolved by the budget law).
    latent_len:  trailing sender positions that are the sender's own latent rows, always kept.
    selector:    name in cb_kernels.selectors.
    want_scores: also return the mean score of every 16-position span.
    """

    sender_len: int
    vote_start: int
    vote_stop: int
    budget: int
    latent_len: int = 0
    selector: str = "cacheback"
    want_scores: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As the dict that goes into ``sampling_params.custom_params``."""
        return {WIRE_KEY: asdict(self)}

    @classmethod
    def from_wire(cls, custom_params: object, *, input_len: int) -> ScoringSpec | None:
        """Read a spec back in the scheduler; None when the request is not a scoring request.

        Raises InvalidRequestError when the dict is malformed or does not fit a request of ``input_len`` tokens.
        """
        if not isinstance(custom_params, dict) or WIRE_KEY not in custom_params:
            return None
        raw = custom_params[WIRE_KEY]
        if not isinstance(raw, dict) or not set(raw) <= set(cls.__slots__):
            raise InvalidRequestError(
                f"custom_params.{WIRE_KEY} must be an object with the keys {cls.__slots__}"
            )
        try:
            spec = cls(**raw)
        except TypeError as error:
            raise InvalidRequestError(f"custom_params.{WIRE_KEY}: {error}") from None
        numbers = (spec.sender_len, spec.vote_start, spec.vote_stop, spec.budget, spec.latent_len)
        if any(type(n) is not int or not 0 <= n < _MAX_INT for n in numbers):
            raise InvalidRequestError(f"custom_params.{WIRE_KEY}: lengths must be integers in 0..2^31-1")
        if not isinstance(spec.selector, str) or not isinstance(spec.want_scores, bool):
            raise InvalidRequestError(
                f"custom_params.{WIRE_KEY}: selector must be a string, want_scores a bool"
            )
        if not 1 <= spec.sender_len < input_len:
            raise InvalidRequestError("sender_len must leave at least one query token in the request")
        if not spec.vote_start < spec.vote_stop <= input_len - spec.sender_len:
            raise InvalidRequestError("voting rows must be a non-empty range within the query")
        if not 1 <= spec.budget <= spec.sender_len:
            raise InvalidRequestError("budget must lie between 1 and sender_len")
        if spec.protected > spec.budget:
            raise InvalidRequestError(f"budget must be at least {spec.protected}, the positions always kept")
        return spec

    @property
    def protected(self) -> int:
        """How many positions the keep law protects: position 0 and the latent rows."""
        return 1 + self.latent_len
