"""A simulated engine's KV pool: senders stay until something else needs their slots, receivers reserve theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Pool:
    """Counts positions: reserved + senders in use + senders at rest + free = the whole pool.

    Senders at rest are evicted in the order of their last use; pinned ones never are, once they are in.
    """

    def __init__(self, positions: int, pinned: Iterable[int] = ()) -> None:
        self.positions = positions
        self.free = positions
        self.evictions = 0
        self._pinned = frozenset(pinned)
        self._lengths: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()
        self.evictable = 0

    def __contains__(self, sender: int) -> bool:
        return sender in self._lengths

    def place(self, sender: int, length: int) -> bool:
        """Bring in a sender that is not there, evicting others for it; False when they would not be enough."""
        if not self.reserve(length):
            return False
        self._lengths[sender] = length
        self._rest(sender)
        return True

    def lock(self, sender: int) -> None:
        """Keep a sender that is there from being evicted, until as many calls of ``unlock``."""
        users = self._users.get(sender, 0)
        if not users and sender not in self._pinned:
            del self._resting[sender]
            self.evictable -= self._lengths[sender]
        self._users[sender] = users + 1

    def unlock(self, sender: int) -> None:
        self._users[sender] -= 1
        if not self._users[sender]:
            del self._users[sender]
            self._rest(sender)

    def reserve(self, positions: int) -> bool:
        """Take positions, evicting senders at rest for them; False, and nothing changes, when there are too few."""
        if positions > self.free + self.evictable:
            return False
        while positions > self.free:
            sender, _ = self._resting.popitem(last=False)
            length = self._lengths.pop(sender)
            self.evictable -= length
            self.free += length
            self.evictions += 1
        self.free -= positions
        return True

    def release(self, positions: int) -> None:
        self.free += positions

    def _rest(self, sender: int) -> None:
        if sender not in self._pinned:
            self._resting[sender] = None
            self.evictable += self._lengths[sender]
