"""Registrations under way: how many calls at once, and how much of the pool that they would evict each other from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cb_sglang.errors import CapacityError, RateLimitError


class Bounded:
    """What is under way, by tenant, at most ``most`` together; one tenant has its share of that.

    One piece that is larger than a bound is let in where nothing else is under way that the bound is for.
    """

    def __init__(self, most: int, tenant_share: float, what: str) -> None:
        self._most, self._share, self._what = most, max(1, int(most * tenant_share)), what
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str, size: int = 1) -> Iterator[None]:
        """Count one in. Raises CapacityError when there are too many, RateLimitError when this tenant has."""
        total, own = self._of.total(), self._of[tenant]
        if total and total + size > self._most:
            raise CapacityError(f"{total} of at most {self._most} {self._what}; try again later")
        if own and own + size > self._share:
            raise RateLimitError(
                f"{own} {self._what}, and the share of a tenant is {self._share}; wait for one of them"
            )
        self._of[tenant] += size
        try:
            yield
        finally:
            self._of[tenant] -= size
            if not self._of[tenant]:
                del self._of[tenant]


class Registrations:
    """``calls``: registrations that are read, tokenised and entered. ``prefills``: positions of those computed."""

    def __init__(self, *, calls: int, positions: int, tenant_share: float) -> None:
        self.calls = Bounded(calls, tenant_share, "registrations are under way")
        self.prefills = Bounded(positions, tenant_share, "positions of new senders are being computed")
