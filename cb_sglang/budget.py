"""The budget law (design section 2; paper section 3): how many positions a message may keep.

Pure arithmetic on integers: no torch, no SGLang, so that clients and planners can import it.
"""

from __future__ import annotations

import math

from cb_sglang.errors import BudgetError, ContextLengthError

MAX_RATIO = 1_000_000.0


def positions_for_ratio(total: int, inherited: int, ratio: float) -> int:
    """Relative budget: all ``inherited`` leading positions plus ``ceil((total - inherited) / ratio)``.

    Raises BudgetError unless ``1 <= ratio <= MAX_RATIO`` and ``0 <= inherited <= total``.
    """
    if not math.isfinite(ratio) or not 1.0 <= ratio <= MAX_RATIO:
        raise BudgetError(f"ratio must be between 1 and {MAX_RATIO:g}, not {ratio:g}", param="ratio")
    if not 0 <= inherited <= total:
        raise BudgetError(f"inherited positions ({inherited}) must lie between 0 and the total ({total})")
    return inherited + math.ceil((total - inherited) / ratio)


def positions_for_budget(total: int, budget: int) -> int:
    """Fixed budget: ``min(budget, total)`` positions. Raises BudgetError when ``budget < 1``."""
    if budget < 1:
        raise BudgetError(f"budget must be at least 1 position, not {budget}", param="budget")
    return min(budget, total)


def check_window(*, context_length: int, prompt: int, messages: int, reserved_output: int) -> None:
    """Window law: receiver prompt + all messages + reserved output must fit the receiver's context.

    Raises ContextLengthError naming the overshoot in positions.
    """
    over = prompt + messages + reserved_output - context_length
    if over > 0:
        raise ContextLengthError(
            f"prompt ({prompt}) + messages ({messages}) + reserved output ({reserved_output}) exceed the context "
            f"length ({context_length}) by {over} positions; lower the budget or the reserved output"
        )
