"""One request of ours in the scheduler process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cb_kernels import selectors, statistics
from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments
from cb_kernels.plan import Carry
from cb_sglang.errors import CacheBackError
from cb_sglang.seam.pins import check_pin
from cb_sglang.spec import CACHEABLE_ROWS_KEY, PinSpec, ScoringSpec, Spec, StatisticSpec, read_spec

VOTES, CUE = "votes", "cue"


@dataclass(slots=True)
class ScoringTask:
    """It hangs on SGLang's Req and dies with it.

    carries:   per row set, the sums of the forward passes so far, while chunked prefill has it split.
    moments:   per row set, what is complete.
    statistic: the measurement under way.
    """

    spec: Spec | None
    input_len: int = 0
    carries: dict[str, Carry] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    statistic: statistics.Statistic | None = None
    result: dict[str, Any] | None = None

    @classmethod
    def of(cls, req: Any) -> ScoringTask | None:
        """The request's task, made on first sight; None for an ordinary request."""
        if not hasattr(req, "cacheback_task"):
            req.cacheback_task = cls._read(req)
        task: ScoringTask | None = req.cacheback_task
        return task

    @classmethod
    def _read(cls, req: Any) -> ScoringTask | None:
        input_len = len(req.origin_input_ids)
        try:
            spec = read_spec(req.sampling_params.custom_params, input_len=input_len)
            if isinstance(spec, ScoringSpec):
                selector_options(spec)
                if selectors.get(spec.selector).needs not in (
                    selectors.Needs.QUERY_ROWS,
                    selectors.Needs.QUERY_AND_CUE_ROWS,
                ):
                    raise ScoringInputError(f"selector {spec.selector!r} does not score a query's rows")
            elif isinstance(spec, StatisticSpec):
                statistics.get(spec.statistic)
            elif isinstance(spec, PinSpec):
                check_pin(spec)
                return cls(spec=spec, input_len=input_len, result={})
        except (CacheBackError, ScoringInputError) as error:
            return cls(spec=None, result={"error": str(error)})
        return cls(spec=spec, input_len=input_len) if spec is not None else None

    def row_sets(self) -> dict[str, tuple[int, int]]:
        """The positions [start, stop) of each set of rows whose moments the query's selector needs."""
        spec = self.spec
        if not isinstance(spec, ScoringSpec):
            return {}
        sets = {VOTES: (spec.sender_len + spec.vote_start, spec.sender_len + spec.vote_stop)}
        if selectors.get(spec.selector).needs is selectors.Needs.QUERY_AND_CUE_ROWS:
            # The row that would predict the answer's first token.
            sets[CUE] = (self.input_len - 1, self.input_len)
        return sets

    def settle(self, result: dict[str, Any]) -> None:
        """Leave the result and let go of everything that held device memory."""
        self.carries.clear()
        self.moments.clear()
        self.statistic = None
        self.result = result


def selector_options(spec: ScoringSpec) -> selectors.SelectorOptions:
    """The spec's options as the selectors take them. Raises ScoringInputError when one is out of range."""
    return selectors.SelectorOptions(order=spec.order, alpha=spec.alpha, sink_free=spec.sink_free)


def has_cacheable_rows(req: Any) -> bool:
    """Whether the request has embedding overrides that its ``extra_key`` vouches for.

    Overrides cannot come over SGLang's own HTTP endpoints, so that a client who sets the mark alone changes nothing.
    """
    params = req.sampling_params.custom_params
    marked = isinstance(params, dict) and params.get(CACHEABLE_ROWS_KEY) is True
    return marked and req.positional_embed_overrides is not None and bool(req.extra_key)
