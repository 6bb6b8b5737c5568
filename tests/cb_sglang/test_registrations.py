"""How many registrations may be under way, and of how many positions."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cb_sglang.errors import CapacityError, RateLimitError
from cb_sglang.registrations import Registrations
from cb_sglang.senders import RegisteredSender, SenderContent, new_sender


def sender(tenant: str, positions: int) -> RegisteredSender:
    return new_sender(tenant, "model", SenderContent(input_ids=[1] * positions), id_key=b"key", created=0.0)


def test_positions_and_number_are_bounded_in_all_and_for_each_tenant() -> None:
    under_way = Registrations(senders=4, positions=100, tenant_share=0.5)
    with ExitStack() as first:
        # Alone, one may be larger than the share; then another of the tenant waits.
        first.enter_context(under_way.counted(sender("a", 60)))
        with pytest.raises(RateLimitError, match="1 senders of 60 positions"), under_way.counted(sender("a", 1)):
            pass
        first.enter_context(under_way.counted(sender("b", 20)))
        first.enter_context(under_way.counted(sender("b", 20)))
        for tenant, refusal in (("c", CapacityError), ("b", CapacityError)):
            with pytest.raises(CapacityError) as caught, under_way.counted(sender(tenant, 1)):
                pass
            assert type(caught.value) is refusal
    # Whatever was let in or refused, nothing is left of it.
    with ExitStack() as second:
        for tenant in "aabb":
            second.enter_context(under_way.counted(sender(tenant, 20)))
        with pytest.raises(CapacityError, match="4 senders of 80 positions"), under_way.counted(sender("c", 1)):
            pass
