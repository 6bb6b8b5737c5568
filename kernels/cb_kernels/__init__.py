"""Scoring and selection math on tensors: torch and Triton, nothing of SGLang or HTTP.

The way through: ``plan_scoring`` lays out a batch, ``score_layer`` accumulates each scored layer, ``finish``
gives ``Moments``, ``cacheback_score`` or another formula makes scores of them, ``keep_positions`` cuts those
to a budget.
"""

from __future__ import annotations

from cb_kernels.errors import BudgetError, ScoringInputError
from cb_kernels.keep import KeepResult, check_budget, keep_positions, keep_positions_reference
from cb_kernels.moments import Moments, cacheback_score, max_pool7, mean_query_score, pin_first
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.score import score_layer

__all__ = [
    "BudgetError",
    "Carry",
    "KeepResult",
    "Moments",
    "QuerySegment",
    "ScoringInputError",
    "ScoringPlan",
    "cacheback_score",
    "check_budget",
    "keep_positions",
    "keep_positions_reference",
    "max_pool7",
    "mean_query_score",
    "pin_first",
    "plan_scoring",
    "score_layer",
]
