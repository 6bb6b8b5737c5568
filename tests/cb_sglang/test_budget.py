"""The budget law in exact arithmetic, and that clients can import it without an engine."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.budget import MAX_RATIO, check_window, positions_for_budget, positions_for_ratio
from cb_sglang.errors import BudgetError, ContextLengthError

totals = st.integers(min_value=0, max_value=4_194_304)


@pytest.mark.parametrize(
    ("total", "inherited", "ratio", "kept"),
    [
        (1, 0, 8, 1),
        (8, 0, 8, 1),
        (9, 0, 8, 2),
        (4_096, 0, 16, 256),
        (4_097, 0, 16, 257),
        (100, 0, 1, 100),
        (100, 0, MAX_RATIO, 1),
        (10, 0, 2.5, 4),
        (100, 40, 8, 48),  # all 40 inherited, and an eighth of the other 60, rounded up
        (100, 100, 8, 100),
        (0, 0, 8, 0),
    ],
)
def test_ratio(total: int, inherited: int, ratio: float, kept: int) -> None:
    assert positions_for_ratio(total, inherited, ratio) == kept


@given(totals, st.data(), st.integers(min_value=1, max_value=1_000_000))
def test_ratio_is_the_exact_ceiling(total: int, data: st.DataObject, ratio: int) -> None:
    inherited = data.draw(st.integers(min_value=0, max_value=total))
    kept = positions_for_ratio(total, inherited, ratio)
    assert kept == inherited + math.ceil(Fraction(total - inherited, ratio))
    assert inherited <= kept <= total


@given(totals, st.floats(min_value=1.0, max_value=MAX_RATIO), st.floats(min_value=1.0, max_value=MAX_RATIO))
def test_a_larger_ratio_never_keeps_more(total: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert positions_for_ratio(total, 0, large) <= positions_for_ratio(total, 0, small) <= total
    assert total == 0 or positions_for_ratio(total, 0, large) >= 1


@pytest.mark.parametrize("ratio", [0.0, 0.999, -8.0, MAX_RATIO * 1.01, math.inf, -math.inf, math.nan])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(BudgetError, match="ratio must be between 1 and 1e") as caught:
        positions_for_ratio(100, 0, ratio)
    assert (caught.value.param, caught.value.status, caught.value.code) == ("ratio", 400, "invalid_budget")


@pytest.mark.parametrize("inherited", [-1, 101])
def test_more_inherited_than_there_are(inherited: int) -> None:
    with pytest.raises(BudgetError, match="inherited"):
        positions_for_ratio(100, inherited, 8)


@given(totals, st.integers(min_value=1, max_value=1 << 31))
def test_budget_is_the_minimum(total: int, budget: int) -> None:
    assert positions_for_budget(total, budget) == min(total, budget)


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_out_of_range(budget: int) -> None:
    with pytest.raises(BudgetError, match="at least 1 position") as caught:
        positions_for_budget(100, budget)
    assert caught.value.param == "budget"


def test_window_holds_to_the_last_position() -> None:
    check_window(context_length=1_000, prompt=300, messages=600, reserved_output=100)
    with pytest.raises(ContextLengthError, match="by 1 positions; lower the budget"):
        check_window(context_length=1_000, prompt=300, messages=601, reserved_output=100)


def test_the_law_needs_no_engine() -> None:
    code = "import sys, cb_sglang.budget as b; print({'torch', 'sglang'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
