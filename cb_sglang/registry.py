"""Who is registered: senders in memory, within bounds in total and per tenant, each on a lease, some of them pinned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from cb_sglang.errors import CacheBackError, CapacityError, InvalidRequestError, RateLimitError, SenderNotFoundError
from cb_sglang.senders import RegisteredSender, SenderContent, new_sender


@dataclass(frozen=True, slots=True)
class Amounts:
    """What senders take, or the most they may: how many, their positions, bytes of rows, and pinned positions."""

    senders: int = 0
    positions: int = 0
    row_bytes: int = 0
    pinned_positions: int = 0

    def plus(self, other: Amounts, sign: int = 1) -> Amounts:
        """Both together, or with ``sign=-1`` what is left without the other."""
        return Amounts(
            self.senders + sign * other.senders,
            self.positions + sign * other.positions,
            self.row_bytes + sign * other.row_bytes,
            self.pinned_positions + sign * other.pinned_positions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderLimits:
    """What an operator sets.

    total:        the bounds for all tenants together.
    tenant_share: the part of each bound that one tenant may take, in (0, 1].
    default_ttl:  lease in seconds of senders whose caller asks for none; None: they stay until they are deleted.
    min_ttl, max_ttl: the leases that a caller may ask for, seconds.

    Raises InvalidRequestError.
    """

    total: Amounts = Amounts(senders=4_096, positions=64_000_000, row_bytes=4 << 30, pinned_positions=0)
    tenant_share: float = 1.0
    default_ttl: float | None = None
    min_ttl: float = 1.0
    max_ttl: float = 366 * 86_400.0

    def __post_init__(self) -> None:
        if not 0.0 < self.tenant_share <= 1.0:
            raise InvalidRequestError(f"the share of a tenant must lie in (0, 1], not {self.tenant_share:g}")
        if self.per_tenant.senders < 1:
            raise InvalidRequestError(
                f"a share of {self.tenant_share:g} of {self.total.senders} senders is none; raise either"
            )
        if not 0.0 < self.min_ttl <= self.max_ttl < float("inf"):
            raise InvalidRequestError(f"leases from {self.min_ttl:g} to {self.max_ttl:g} seconds: give a range above 0")
        if self.default_ttl is not None and not self.min_ttl <= self.default_ttl <= self.max_ttl:
            raise InvalidRequestError(
                f"the default lease of {self.default_ttl:g} s is not between {self.min_ttl:g} and {self.max_ttl:g} s"
            )

    @property
    def per_tenant(self) -> Amounts:
        """The bounds for one tenant."""
        return Amounts(*(int(bound * self.tenant_share) for bound in asdict(self.total).values()))


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a sender stays unasked (``ttl``, seconds) and until when (``expires``, epoch); both None: for good.

    Raises InvalidRequestError for one without the other, and for a ``ttl`` that is not above 0.
    """

    ttl: float | None
    expires: float | None

    def __post_init__(self) -> None:
        if (self.ttl is None) != (self.expires is None) or (self.ttl is not None and not self.ttl > 0.0):
            raise InvalidRequestError(f"a lease of {self.ttl} seconds until {self.expires} is none")

    def over(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now

    def renewed(self, now: float, ttl: float | None) -> Lease:
        """From ``now`` on with ``ttl``; never ends sooner than it did."""
        if ttl is None or self.ttl is None or self.expires is None:
            return Lease(None, None)
        ttl = max(ttl, self.ttl)
        return Lease(ttl, max(self.expires, now + ttl))


@dataclass(frozen=True, slots=True)
class Pin:
    """How many of a sender's positions are pinned, counted from its start: fewer than it has when the cap is near."""

    positions: int
    pinned_positions: int
    change: int = field(default=0, compare=False)
    """Which change of a pin this was, to undo it."""


@dataclass(slots=True)
class _Entry:
    sender: RegisteredSender
    lease: Lease
    pinned: int = 0
    pin_change: int = 0

    @property
    def amounts(self) -> Amounts:
        return Amounts(1, len(self.sender), self.sender.row_bytes, self.pinned)


class SenderRegistry:
    """Senders by tenant and id. Same tenant and content, same id.

    A sender whose lease is over answers to nobody, but holds its room until ``expire`` drops it: call that every few
    seconds and before a registration. One that belongs to another tenant is looked up, and missed, like one that never
    was. Not thread-safe: one event loop calls it, and nothing here blocks.
    """

    def __init__(self, limits: SenderLimits, *, id_key: bytes, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._id_key = id_key
        self._clock = clock
        self._tenants: dict[str, dict[str, _Entry]] = {}
        self._usage: dict[str, Amounts] = {}
        self._total = Amounts()
        self._renewed: dict[str, Lease] = {}
        self._pin_changes = 0

    def make(self, tenant: str, model_fingerprint: str, content: SenderContent) -> RegisteredSender:
        """The tenant's sender of this content: the registered one, or a new one that ``add`` has yet to admit.

        A new one with latent rows is admitted as what ``with_latent_rows`` returns. Only reads, so that a long content
        may be hashed on another thread. Raises InvalidRequestError.
        """
        sender = new_sender(tenant, model_fingerprint, content, id_key=self._id_key, created=self._clock())
        entry = self._entry(tenant, sender.id)
        return entry.sender if entry else sender

    def check_ttl(self, ttl: float | None) -> float | None:
        """The lease to use for what a caller asked, None being nothing. Raises InvalidRequestError."""
        if ttl is None:
            return self.limits.default_ttl
        if not self.limits.min_ttl <= ttl <= self.limits.max_ttl:
            raise InvalidRequestError(
                f"a lease lasts {self.limits.min_ttl:g} to {self.limits.max_ttl:g} seconds, not {ttl:g}", param="ttl"
            )
        return ttl

    def check_room(self, sender: RegisteredSender) -> None:
        """Raises RateLimitError when this tenant may not have this sender too, CapacityError when nobody may."""
        if self._entry(sender.tenant, sender.id) is None:
            more = Amounts(1, len(sender), sender.row_bytes)
            share = self.limits.per_tenant
            _check_within(self.usage(sender.tenant).plus(more), share, "one tenant", RateLimitError)
            _check_within(self._total.plus(more), self.limits.total, "this server", CapacityError)

    def add(self, sender: RegisteredSender, ttl: float | None = None) -> Lease:
        """Admit a sender on a lease; one that is there already keeps the longer of its lease and this one.

        Raises InvalidRequestError for a lease out of bounds or missing latent rows, RateLimitError, CapacityError.
        """
        ttl, now = self.check_ttl(ttl), self._clock()
        entry = self._entry(sender.tenant, sender.id)
        if entry is None:
            lease = Lease(ttl, None if ttl is None else now + ttl)
            self.restore(sender, lease)
            return lease
        return self._renew(entry, now, ttl)

    def restore(self, sender: RegisteredSender, lease: Lease) -> None:
        """Admit a sender that is not there yet on a lease as it stood before a restart. Raises like ``add``."""
        if not sender.complete:
            raise InvalidRequestError(f"the sender's {sender.latent} latent rows have not been rolled out")
        self.check_room(sender)
        entry = _Entry(sender, lease)
        self._tenants.setdefault(sender.tenant, {})[sender.id] = entry
        self._count(sender.tenant, entry.amounts)

    def get(self, tenant: str, sender_id: str) -> RegisteredSender:
        """The sender, for a query: renews its lease. Raises SenderNotFoundError."""
        entry = self._found(tenant, sender_id)
        self._renew(entry, self._clock(), entry.lease.ttl)
        return entry.sender

    def peek(self, tenant: str, sender_id: str) -> RegisteredSender:
        """The sender, its lease as it was. Raises SenderNotFoundError."""
        return self._found(tenant, sender_id).sender

    def holds(self, tenant: str, sender_id: str) -> bool:
        """Whether the sender is there, its lease over or not."""
        return self._entry(tenant, sender_id) is not None

    @property
    def tenants(self) -> int:
        """How many tenants have a sender."""
        return len(self._tenants)

    def lease(self, tenant: str, sender_id: str) -> Lease:
        """Raises SenderNotFoundError."""
        return self._found(tenant, sender_id).lease

    def remove(self, tenant: str, sender_id: str) -> None:
        """Forget a sender, and its pin. Raises SenderNotFoundError."""
        self._drop(self._found(tenant, sender_id))

    def discard(self, tenant: str, sender_id: str) -> bool:
        """Forget a sender, its lease over or not. Whether it was there."""
        entry = self._entry(tenant, sender_id)
        if entry is not None:
            self._drop(entry)
        return entry is not None

    def expire(self, now: float | None = None) -> list[RegisteredSender]:
        """Drop every sender whose lease is over, and its pin; returns them, for their locks and rows to be freed."""
        moment = self._clock() if now is None else now
        over = [entry for own in self._tenants.values() for entry in own.values() if entry.lease.over(moment)]
        for entry in over:
            self._drop(entry)
        return [entry.sender for entry in over]

    def take_renewed(self) -> dict[str, Lease]:
        """The leases, by sender, that were renewed since the last call: what the store has yet to write."""
        renewed, self._renewed = self._renewed, {}
        return renewed

    def pin(self, tenant: str, sender_id: str, positions_cap: int | None = None) -> Pin:
        """Account for a pin on as many leading positions as the sender has, the caps leave, and ``positions_cap`` says.

        In place of the pin that was there; a pin of 0 positions is none. Positions that two senders share count twice.
        Raises SenderNotFoundError.
        """
        entry = self._found(tenant, sender_id)
        self._set_pinned(entry, 0)
        left = min(
            self.limits.total.pinned_positions - self._total.pinned_positions,
            self.limits.per_tenant.pinned_positions - self.usage(tenant).pinned_positions,
        )
        wanted = len(entry.sender) if positions_cap is None else min(len(entry.sender), positions_cap)
        self._set_pinned(entry, max(0, min(wanted, left)))
        return Pin(len(entry.sender), entry.pinned, entry.pin_change)

    def undo_pin(self, tenant: str, sender_id: str, pin: Pin, before: int) -> bool:
        """Account for ``before`` positions in place of ``pin``; not where somebody has pinned or unpinned it since."""
        entry = self._entry(tenant, sender_id)
        if entry is None or entry.pin_change != pin.change:
            return False
        self._set_pinned(entry, before)
        return True

    def unpin(self, tenant: str, sender_id: str) -> None:
        """Raises SenderNotFoundError."""
        self._set_pinned(self._found(tenant, sender_id), 0)

    def pinned_positions(self, tenant: str, sender_id: str) -> int:
        """How many leading positions are pinned. Raises SenderNotFoundError."""
        return self._found(tenant, sender_id).pinned

    def usage(self, tenant: str | None = None) -> Amounts:
        """What is taken by one tenant, or by all."""
        return self._total if tenant is None else self._usage.get(tenant, Amounts())

    def list(self, tenant: str) -> list[RegisteredSender]:
        """The tenant's senders, oldest first."""
        now = self._clock()
        return [entry.sender for entry in self._tenants.get(tenant, {}).values() if not entry.lease.over(now)]

    def _entry(self, tenant: str, sender_id: str) -> _Entry | None:
        return self._tenants.get(tenant, {}).get(sender_id)

    def _found(self, tenant: str, sender_id: str) -> _Entry:
        entry = self._entry(tenant, sender_id)
        if entry is None or entry.lease.over(self._clock()):
            raise SenderNotFoundError("no such sender; register it with POST /v1/senders", param="sender_id")
        return entry

    def _renew(self, entry: _Entry, now: float, ttl: float | None) -> Lease:
        renewed = entry.lease.renewed(now, ttl)
        if renewed != entry.lease:
            entry.lease = self._renewed[entry.sender.id] = renewed
        return renewed

    def _drop(self, entry: _Entry) -> None:
        sender = entry.sender
        self._count(sender.tenant, entry.amounts, sign=-1)
        self._renewed.pop(sender.id, None)
        del self._tenants[sender.tenant][sender.id]
        if not self._tenants[sender.tenant]:
            del self._tenants[sender.tenant], self._usage[sender.tenant]

    def _set_pinned(self, entry: _Entry, positions: int) -> None:
        self._count(entry.sender.tenant, Amounts(pinned_positions=positions - entry.pinned))
        entry.pinned = positions
        self._pin_changes += 1
        entry.pin_change = self._pin_changes

    def _count(self, tenant: str, change: Amounts, sign: int = 1) -> None:
        self._usage[tenant] = self.usage(tenant).plus(change, sign)
        self._total = self._total.plus(change, sign)


def _check_within(taken: Amounts, bounds: Amounts, whose: str, error: type[CacheBackError]) -> None:
    for name, most in asdict(bounds).items():
        if getattr(taken, name) > most:
            raise error(
                f"this sender would exceed the {most} {name.replace('_', ' ')} that {whose} may hold; delete another"
            )
