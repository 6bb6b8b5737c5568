"""How many of something may be under way at once, in all and for each tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cb_sglang.errors import CapacityError, RateLimitError


class TenantBound:
    """At most ``most`` at once; one tenant has its share of them. ``what``: said of them in errors."""

    def __init__(self, most: int, tenant_share: float, what: str) -> None:
        self._most, self._share, self._what = most, max(1, int(most * tenant_share)), what
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Count one in. Raises CapacityError when there are too many, RateLimitError when this tenant has."""
        if self._of.total() >= self._most:
            raise CapacityError(f"{self._most} {self._what}, the most at once; try again later")
        if self._of[tenant] >= self._share:
            raise RateLimitError(f"{self._share} {self._what} for this tenant, its share; wait for one of them")
        add(self._of, tenant, 1)
        try:
            yield
        finally:
            add(self._of, tenant, -1)


def add(counter: Counter[str], tenant: str, change: int) -> None:
    """Count; tenants that hold nothing are not kept."""
    counter[tenant] += change
    if not counter[tenant]:
        del counter[tenant]
