"""What may be under way at once: bounded in all and for each tenant, and given back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cb_sglang.errors import CapacityError, RateLimitError
from cb_sglang.registrations import Bounded


def test_bounds_in_all_and_for_each_tenant() -> None:
    positions = Bounded(100, 0.5, "positions")
    with ExitStack() as first:
        # Alone, one may be larger than the share; then another of the tenant waits.
        first.enter_context(positions.counted("a", 60))
        with pytest.raises(RateLimitError, match="60 positions, and the share of a tenant is 50"):
            first.enter_context(positions.counted("a", 1))
        first.enter_context(positions.counted("b", 40))
        with pytest.raises(CapacityError, match="100 of at most 100 positions") as caught:
            first.enter_context(positions.counted("c"))
        assert type(caught.value) is CapacityError
    # Whatever was let in or refused, nothing is left of it; and what exceeds all is let in alone.
    with positions.counted("c", 500), pytest.raises(CapacityError), positions.counted("a"):
        pass
    with ExitStack() as last:
        for tenant in "aabb":
            last.enter_context(positions.counted(tenant, 25))
