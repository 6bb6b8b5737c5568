"""The life of senders, registry and store together, against a model that is a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_sglang.database import Database
from cb_sglang.errors import CapacityError, RateLimitError, SenderNotFoundError
from cb_sglang.registry import Amounts, Lease, Pin, SenderLimits, SenderRegistry
from cb_sglang.rows import Rows
from cb_sglang.senders import RegisteredSender, SenderContent
from cb_sglang.store import SenderStore

TENANTS = ("a", "b")
CONTENTS = (
    SenderContent(input_ids=[1]),
    SenderContent(input_ids=[1, 2]),
    SenderContent(input_ids=[1, 2], private=[(0, 1)]),
    SenderContent(input_ids=[1, 2, 3, 4, 5]),
    SenderContent(input_ids=[1, 2, 3, 4, 5], inherited=2),
    SenderContent(input_ids=[0, 2, 3, 4], rows=Rows((0,), "bfloat16", 2, b"\0\1\2\3")),
    SenderContent(input_ids=[7], latent=2),
)
LATENT_ROWS = Rows((0, 1), "bfloat16", 2, bytes(8))
BOUNDS = Amounts(senders=6, positions=16, row_bytes=16, pinned_positions=8)
SHARE = Amounts(senders=4, positions=12, row_bytes=12, pinned_positions=6)
LIMITS = SenderLimits(total=BOUNDS, tenant_share=0.75, default_ttl=40.0, min_ttl=5.0, max_ttl=100.0)

tenants = st.sampled_from(TENANTS)
contents = st.integers(0, len(CONTENTS) - 1)
ttls = st.sampled_from([None, 5.0, 30.0, 100.0])
nth = st.integers(0, BOUNDS.senders - 1)
Key = tuple[str, int]


@dataclass
class Known:
    """One sender as the model has it; ``stored`` is the end of the lease as it stands on the disk."""

    sender: RegisteredSender
    ttl: float
    expires: float
    stored: float
    renewed: bool = False
    pinned: int = 0

    @property
    def amounts(self) -> Amounts:
        return Amounts(1, len(self.sender), self.sender.row_bytes, self.pinned)


def any_alive(machine: SenderLives) -> bool:
    return bool(machine.alive())


class SenderLives(RuleBasedStateMachine):
    @initialize(first=st.lists(st.tuples(tenants, contents, ttls), min_size=2, max_size=4))
    def start(self, first: list[tuple[str, int, float | None]]) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.now = 1_000.0
        self.known: dict[Key, Known] = {}
        self.open()
        for tenant, content, ttl in first:
            self.register(tenant, content, ttl)

    def open(self) -> None:
        self.database = Database(self.directory / "senders.db")
        self.store = SenderStore(self.database, model_fingerprint="model")
        self.registry = SenderRegistry(LIMITS, id_key=b"key", clock=lambda: self.now)
        for stored in self.store.load(self.now):
            self.registry.restore(stored.sender, stored.lease)

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            shutil.rmtree(self.directory)

    def taken(self, tenant: str | None = None) -> Amounts:
        total = Amounts()
        for (owner, _), known in self.known.items():
            if tenant in (None, owner):
                total = total.plus(known.amounts)
        return total

    def alive(self) -> list[Known]:
        return [known for known in self.known.values() if known.expires > self.now]

    def pick(self, n: int) -> Known:
        return self.alive()[n % len(self.alive())]

    @rule(tenant=tenants, content=contents, ttl=ttls)
    def register(self, tenant: str, content: int, ttl: float | None) -> None:
        self.tick()
        sender = self.registry.make(tenant, "model", CONTENTS[content])
        if not sender.complete:
            sender = sender.with_latent_rows(LATENT_ROWS)
        known, lasts = self.known.get((tenant, content)), ttl or 40.0
        if known is not None:
            assert sender is known.sender
            known.ttl = max(known.ttl, lasts)
            renewed = max(known.expires, self.now + known.ttl)
            known.renewed |= renewed != known.expires
            known.expires = known.stored = renewed
        else:
            more = Amounts(1, len(sender), sender.row_bytes)
            mine, everybodys = self.taken(tenant).plus(more), self.taken().plus(more)
            if exceeds(mine, SHARE) or exceeds(everybodys, BOUNDS):
                refusal = RateLimitError if exceeds(mine, SHARE) else CapacityError
                with pytest.raises(CapacityError) as caught:
                    self.registry.add(sender, ttl)
                assert type(caught.value) is refusal
                return
            expires = self.now + lasts
            self.known[tenant, content] = Known(sender, lasts, expires, stored=expires)
        self.store.save(sender, self.registry.add(sender, ttl))

    @rule(asker=tenants, tenant=tenants, content=contents)
    def ask_for_any(self, asker: str, tenant: str, content: int) -> None:
        known = self.known.get((tenant, content))
        if asker != tenant or known is None or known.expires <= self.now:
            sender_id = self.registry.make(tenant, "model", CONTENTS[content]).id
            for call in (self.registry.get, self.registry.pin, self.registry.unpin, self.registry.remove):
                with pytest.raises(SenderNotFoundError):
                    call(asker, sender_id)

    @precondition(any_alive)
    @rule(n=nth)
    def query(self, n: int) -> None:
        known = self.pick(n)
        assert self.registry.get(known.sender.tenant, known.sender.id) is known.sender
        known.renewed |= self.now + known.ttl > known.expires
        known.expires = max(known.expires, self.now + known.ttl)

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        """What the server does every few seconds: drop what is over, write what was renewed."""
        dropped = {sender.id for sender in self.registry.expire()}
        assert dropped == {known.sender.id for known in self.known.values() if known.expires <= self.now}
        self.store.remove(dropped)
        self.known = {key: known for key, known in self.known.items() if known.expires > self.now}
        renewals = self.registry.take_renewed()
        assert renewals.keys() == {known.sender.id for known in self.known.values() if known.renewed}
        self.store.renew(renewals)
        for known in self.known.values():
            known.stored, known.renewed = known.expires, False

    @precondition(any_alive)
    @rule(n=nth, cap=st.sampled_from([None, None, 0, 1, 3]))
    def pin(self, n: int, cap: int | None) -> None:
        known = self.pick(n)
        known.pinned, tenant, total = 0, known.sender.tenant, len(known.sender)
        left_of_mine = SHARE.pinned_positions - self.taken(tenant).pinned_positions
        left = min(left_of_mine, BOUNDS.pinned_positions - self.taken().pinned_positions)
        known.pinned = min(total, left, total if cap is None else cap)
        if cap == 0:
            self.registry.unpin(tenant, known.sender.id)
        else:
            assert self.registry.pin(tenant, known.sender.id, cap) == Pin(total, known.pinned)

    @precondition(any_alive)
    @rule(n=nth)
    def remove(self, n: int) -> None:
        known = self.pick(n)
        self.registry.remove(known.sender.tenant, known.sender.id)
        self.store.remove([known.sender.id])
        self.known = {key: other for key, other in self.known.items() if other is not known}

    @precondition(any_alive)
    @rule()
    def restart(self) -> None:
        """Renewals that were not written are lost with the process, and pins are."""
        self.database.close()
        self.known = {key: known for key, known in self.known.items() if known.stored > self.now}
        for known in self.known.values():
            known.expires, known.pinned, known.renewed = known.stored, 0, False
        self.open()
        for known in self.known.values():
            restored = self.registry.peek(known.sender.tenant, known.sender.id)
            assert restored == known.sender
            known.sender = restored

    @invariant()
    def the_same_senders_as_the_model(self) -> None:
        for tenant in TENANTS:
            assert self.registry.list(tenant) == [one.sender for one in self.alive() if one.sender.tenant == tenant]
        for known in self.alive():
            owner, sender_id = known.sender.tenant, known.sender.id
            assert self.registry.lease(owner, sender_id) == Lease(known.ttl, known.expires)
            assert self.registry.pinned_positions(owner, sender_id) == known.pinned

    @invariant()
    def never_more_than_the_bounds(self) -> None:
        assert self.registry.usage() == self.taken() and not exceeds(self.taken(), BOUNDS)
        for tenant in TENANTS:
            assert self.registry.usage(tenant) == self.taken(tenant) and not exceeds(self.taken(tenant), SHARE)


def exceeds(taken: Amounts, bounds: Amounts) -> bool:
    return any(getattr(taken, name) > getattr(bounds, name) for name in Amounts.__slots__)


TestSenderLives = SenderLives.TestCase
TestSenderLives.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
