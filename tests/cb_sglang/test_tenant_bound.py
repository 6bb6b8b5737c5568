"""What may be under way at once, in all and for each tenant."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cb_sglang.errors import CapacityError, RateLimitError
from cb_sglang.tenant_bound import TenantBound


def test_all_and_each_tenant_are_bounded() -> None:
    calls = TenantBound(4, 0.5, "senders are being registered")
    with ExitStack() as first:
        for tenant in "aab":
            first.enter_context(calls.counted(tenant))
        with pytest.raises(RateLimitError, match="2 senders are being registered for this tenant"):
            first.enter_context(calls.counted("a"))
        first.enter_context(calls.counted("b"))
        with pytest.raises(CapacityError, match="4 senders are being registered") as caught:
            first.enter_context(calls.counted("c"))
        assert type(caught.value) is CapacityError
    # Whatever was let in or refused, nothing is left of it.
    with ExitStack() as last:
        for tenant in "aabb":
            last.enter_context(calls.counted(tenant))
