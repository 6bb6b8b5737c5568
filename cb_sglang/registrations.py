"""Registrations under way: how many at once, and how much of the pool that they would evict each other from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cb_sglang.errors import CapacityError, RateLimitError
from cb_sglang.registry import Amounts
from cb_sglang.senders import RegisteredSender


class Registrations:
    """At most ``senders`` at once of ``positions`` together; one tenant has its share of both.

    One that is larger than its tenant's share is let in where the tenant has no other under way.
    """

    def __init__(self, *, senders: int, positions: int, tenant_share: float) -> None:
        self._most = Amounts(senders, positions)
        self._share = Amounts(max(1, int(senders * tenant_share)), int(positions * tenant_share))
        self._of: dict[str, Amounts] = {}

    @contextmanager
    def counted(self, sender: RegisteredSender) -> Iterator[None]:
        """Count one in. Raises CapacityError when the server has too many, RateLimitError when this tenant has."""
        more, own = Amounts(1, len(sender)), self._of.get(sender.tenant, Amounts())
        total = Amounts()
        for each in self._of.values():
            total = total.plus(each)
        _check(total, more, self._most, "the most at once; try again later", CapacityError)
        _check(own, more, self._share, "the share of this tenant; wait for one of them", RateLimitError)
        self._of[sender.tenant] = own.plus(more)
        try:
            yield
        finally:
            left = self._of[sender.tenant].plus(more, sign=-1)
            if left.senders:
                self._of[sender.tenant] = left
            else:
                del self._of[sender.tenant]


def _check(now: Amounts, more: Amounts, most: Amounts, whose: str, error: type[CapacityError]) -> None:
    after = now.plus(more)
    if now.senders and (after.senders > most.senders or after.positions > most.positions):
        raise error(
            f"{now.senders} senders of {now.positions} positions are being registered, and {most.senders} of "
            f"{most.positions} positions are {whose}"
        )
