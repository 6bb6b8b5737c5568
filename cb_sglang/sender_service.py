"""Senders over HTTP, without HTTP: registered, extended, kept over a restart, forgotten."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from cb_sglang import wire
from cb_sglang.audit import AuditLog, AuditRecord
from cb_sglang.audit_writer import AuditWriter
from cb_sglang.content import Part, concatenated, new_content
from cb_sglang.database import Database
from cb_sglang.errors import (
    CacheBackError,
    ContextLengthError,
    InvalidRequestError,
)
from cb_sglang.prefill_room import PrefillRoom
from cb_sglang.received import received_part
from cb_sglang.registry import SenderRegistry
from cb_sglang.runs import Runs, size, union
from cb_sglang.seam.engine import Context, Engine
from cb_sglang.sender_pins import SenderPins
from cb_sglang.senders import RegisteredSender, SenderContent
from cb_sglang.settings import Settings
from cb_sglang.single_flight import SingleFlight
from cb_sglang.store import SenderStore
from cb_sglang.tenant_bound import TenantBound
from cb_sglang.tenants import Tenant, namespace, sender_id_key

logger = logging.getLogger(__name__)
_UPKEEP_SECONDS = 2.0
_TRUSTED_SECONDS = 1.0
_PRESUMED_SECONDS = 30.0
"""So long a sender is not expected to have been evicted; it need not wait for room to be computed in."""
_MAX_LINEAGE = 1_024


@dataclass(frozen=True, slots=True)
class _Ready:
    """A sender whose KV is in the cache, and how much of it was before."""

    sender: RegisteredSender
    cached: int


class SenderService:
    """One per server process; safe for concurrent calls on one event loop. Make it with ``start``."""

    def __init__(self, engine: Engine, settings: Settings, *, secret: bytes, database: Database) -> None:
        self.engine = engine
        self.settings = settings
        total = replace(settings.senders.total, pinned_positions=int(settings.pin_share * engine.pool_positions))
        self.registry = SenderRegistry(replace(settings.senders, total=total), id_key=sender_id_key(secret))
        self._secret = secret
        self._database = database
        self._store = SenderStore(database, model_fingerprint=engine.fingerprint)
        self._audit = AuditLog(database, total=settings.max_audit, tenant_share=settings.senders.tenant_share)
        self._writer = AuditWriter(database, self._audit)
        self._prefills: SingleFlight[_Ready] = SingleFlight()
        self._registrations: SingleFlight[_Ready] = SingleFlight()
        self._under_way = TenantBound(
            settings.max_registrations, settings.senders.tenant_share, "senders are being registered"
        )
        self._room = PrefillRoom(engine.pool_positions * engine.ranks)
        self.on_upkeep: Callable[[], None] = lambda: None
        """Called every few seconds."""
        self._seen_cached: dict[str, float] = {}
        """When senders were last known to be in the cache (monotonic seconds)."""
        self.pins = SenderPins(engine, self.registry, self.context)
        self._upkeep: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, engine: Engine, settings: Settings, secret: bytes) -> SenderService:
        """With the senders that a server before it has kept. Raises StoreError."""
        database = Database(None if settings.data_dir is None else settings.data_dir / "senders.sqlite")
        service = cls(engine, settings, secret=secret, database=database)
        await service._load()
        service._upkeep = asyncio.create_task(service._keep_up())
        return service

    # --- what a caller does

    async def register(self, tenant: Tenant, request: wire.SenderRequest) -> wire.Sender:
        """Prefill a sender and make it addressable. The same content gets the same id and is prefilled once.

        Raises InvalidRequestError, ContextLengthError, CapacityError, RateLimitError, EngineError, StoreError.
        """
        with self._under_way.counted(tenant.name):
            received = await self.received(tenant, request.inherits or [], "inherits")
            new = await new_content(self.engine, request, leads=not received)
            part = concatenated([*received, new])
            # Whether a received position may be passed on was its first sender's to say: it left, so it may.
            content = SenderContent(
                input_ids=part.input_ids,
                rows=part.rows,
                inherited=sum(len(each.input_ids) for each in received),
                latent=request.latent_steps,
                private=part.private,
            )
            return await self._admit(tenant, content, request)

    async def extend(self, tenant: Tenant, sender_id: str, request: wire.ExtendRequest) -> wire.Sender:
        """A new sender: this one and then the new content. Raises like ``register``, and SenderNotFoundError."""
        parent = self.registry.get(tenant.name, sender_id)
        with self._under_way.counted(tenant.name):
            new = await new_content(self.engine, request, leads=False)
            part = concatenated([Part(list(parent.input_ids), parent.rows, parent.private), new])
            content = SenderContent(
                input_ids=part.input_ids,
                rows=part.rows,
                inherited=parent.inherited,
                latent=request.latent_steps,
                private=part.private,
                parent=parent.id,
            )
            return await self._admit(tenant, content, request)

    def all(self, tenant: Tenant) -> list[wire.Sender]:
        """The caller's senders, oldest first."""
        return [self.report(sender) for sender in self.registry.list(tenant.name)]

    def get(self, tenant: Tenant, sender_id: str) -> wire.Sender:
        """Raises SenderNotFoundError."""
        return self.report(self.registry.peek(tenant.name, sender_id))

    async def forget(self, tenant: Tenant, sender_id: str) -> None:
        """Delete a sender. Raises SenderNotFoundError, StoreError."""
        sender = self.registry.peek(tenant.name, sender_id)
        # From the store first: where that fails, the sender is still there, and not back after a restart.
        await self._database.run(self._store.remove, [sender_id])
        self.registry.remove(tenant.name, sender_id)
        self._seen_cached.pop(sender_id, None)
        self.pins.settle_later(sender)

    async def pin(self, tenant: Tenant, sender_id: str) -> wire.Sender:
        """Keep a sender's KV from being evicted: as many leading positions as the cap leaves (``pinned_positions``).

        A flush of the cache or a restart takes the KV all the same; with its next query it is there again, and pinned.
        Raises SenderNotFoundError, EngineError, StoreError.
        """
        sender = self.registry.get(tenant.name, sender_id)
        await self._pin(sender)
        return self.report(sender)

    async def unpin(self, tenant: Tenant, sender_id: str) -> wire.Sender:
        """Let SGLang evict a sender again. Raises SenderNotFoundError, StoreError."""
        sender = self.registry.get(tenant.name, sender_id)
        self.registry.unpin(tenant.name, sender_id)
        stored = self._database.run(self._store.pin, sender_id, False)
        await asyncio.shield(self.pins.settle_later(sender))
        await stored
        return self.report(sender)

    async def audit(self, tenant: Tenant, sender_id: str) -> wire.Audit:
        """Which positions went to whom, newest first. Raises SenderNotFoundError, StoreError."""
        self.registry.peek(tenant.name, sender_id)
        records = await self._database.run(self._audit.newest, tenant.name, sender=sender_id)
        return wire.Audit(sender=sender_id, data=[_entry(record) for record in records])

    # --- what making messages needs

    def context(self, sender: RegisteredSender) -> Context:
        """A sender as the engine takes it: in its tenant's radix namespace, or in its own where ids do not tell all."""
        namespace = self.namespace(sender.tenant)
        if sender.rows is not None or sender.latent:
            namespace = f"{namespace or 'rows'}:{sender.id}"
        ranks = self.engine.ranks
        rank = int(sender.fingerprint[:8], 16) % ranks if ranks > 1 else None
        return Context(list(sender.input_ids), sender.rows, namespace, rank)

    def pins_to_come(self, used: int) -> int:
        """Pinned positions that are not among the ``used`` ones of the engine: it was restarted, or flushed."""
        return max(0, self.registry.usage().pinned_positions - min(self.pins.held_positions, used))

    async def warm(self, sender: RegisteredSender) -> wire.CacheMiss | None:
        """See that a sender is in the cache, prefilled once for all who ask at once; why it was not, if so.

        One that was there a moment ago is not looked for.
        """
        seen = self._seen_cached.get(sender.id)
        if seen is not None and time.monotonic() - seen < _TRUSTED_SECONDS:
            return None
        ready = await self._prefilled(sender)
        if self.engine.found_all(ready.cached, len(sender)):
            return None
        return "restarted" if seen is None else "evicted"

    def missed(self, sender: RegisteredSender, cached: int) -> wire.CacheMiss | None:
        """Why a query found only ``cached`` positions of a sender that was in the cache a moment before."""
        if self.engine.found_all(cached, len(sender)):
            return None
        if sender.id in self._seen_cached:
            # The next one looks again, and renews its pin.
            self._seen_cached[sender.id] = -math.inf
        return "evicted"

    def namespace(self, tenant: str) -> str | None:
        """The tenant's radix namespace (cb_sglang/tenants.py)."""
        return namespace(self._secret, tenant)

    async def record(
        self, sender: RegisteredSender, message: wire.Message, receiver: str | None, excluded: Runs, now: float
    ) -> None:
        """Write down that a message leaves; before it does. Raises StoreError."""
        await self._writer.record(
            AuditRecord(
                message=message.id,
                tenant=sender.tenant,
                sender=sender.id,
                receiver=receiver,
                sent=now,
                encoding=message.encoding,
                spans=tuple(message.spans),
                excluded=excluded,
            )
        )

    async def sent_before(self, sender: RegisteredSender, options: wire.Query, one_of: Collection[str] = ()) -> Runs:
        """The positions that the messages named by ``exclude`` and ``since`` brought, of this sender or its lineage.

        Raises InvalidRequestError for a message that is not known, or is that of a sender neither of the lineage nor
        in ``one_of``.
        """
        wanted = {name: "exclude" for name in options.exclude or []}
        if options.since is not None:
            wanted[options.since] = "since"
        if not wanted:
            return ()
        found = await self._database.run(self._audit.sent, sender.tenant, list(wanted))
        lineage = self._lineage(sender)
        runs: list[tuple[int, int]] = []
        for name, field in wanted.items():
            record = found.get(name)
            if record is not None and record.sender in one_of and record.sender not in lineage:
                continue
            if record is None or record.sender not in lineage:
                raise InvalidRequestError(f"{name} is no message of this sender that is still on record", param=field)
            runs += record.spans
            if name == options.since:
                runs += record.excluded
        return union(runs)

    async def received(self, tenant: Tenant, messages: Sequence[str | wire.ReceivedMessage], where: str) -> list[Part]:
        """Messages as pieces of a sequence, in order. Raises InvalidRequestError."""
        return [await self.received_one(tenant, each, f"{where}[{n}]") for n, each in enumerate(messages)]

    async def received_one(self, tenant: Tenant, message: str | wire.ReceivedMessage, where: str) -> Part:
        """One message as a piece of a sequence. Raises InvalidRequestError."""
        if isinstance(message, wire.ReceivedMessage):
            return await received_part(self.engine, message, where)
        sender, positions, _ = await self.recall(tenant, message, where)
        return part_of(sender, positions)

    async def recall(self, tenant: Tenant, message_id: str, where: str) -> tuple[RegisteredSender, list[int], str]:
        """A message by its id: its sender, its positions and its encoding. Raises InvalidRequestError."""
        record = (await self._database.run(self._audit.sent, tenant.name, [message_id])).get(message_id)
        try:
            if record is not None:
                sender = self.registry.peek(tenant.name, record.sender)
                return sender, [p for run in record.spans for p in range(*run)], record.encoding
        except CacheBackError:
            pass
        raise InvalidRequestError(
            f"{message_id} is not on record, or its sender is gone; send the message object itself", param=where
        )

    def report(self, sender: RegisteredSender, cached: int | None = None) -> wire.Sender:
        """A sender as the API shows it; ``cached`` positions are known only where it was just prefilled."""
        lease = self.registry.lease(sender.tenant, sender.id)
        return wire.Sender(
            id=sender.id,
            positions=len(sender),
            cached_positions=cached,
            inherited=sender.inherited,
            latent=sender.latent,
            private_positions=size(sender.private),
            parent=sender.parent,
            fingerprint=sender.fingerprint,
            created=sender.created,
            expires=lease.expires,
            pinned_positions=self.registry.pinned_positions(sender.tenant, sender.id),
        )

    async def close(self) -> None:
        """Write what is to be written, and let go of the store."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self._database.run(self._store.renew, self.registry.take_renewed())
        self._database.close()

    # --- inside

    async def _admit(
        self, tenant: Tenant, content: SenderContent, request: wire.SenderRequest | wire.ExtendRequest
    ) -> wire.Sender:
        total, most = len(content.input_ids) + content.latent, self.engine.max_input - 1
        # One query token and one output position must still fit behind it.
        if total > most:
            raise ContextLengthError(
                f"the sender has {total} positions; this server takes at most {most}, so that a query fits behind it",
                param=request.given[0],
            )
        self.registry.check_ttl(request.ttl)
        await self._expire()
        sender = await asyncio.to_thread(self.registry.make, tenant.name, self.engine.fingerprint, content)
        self.registry.check_room(sender)
        ready = await self._registrations.run(sender.id, lambda: self._enter(sender, request.ttl))
        # Of several callers at once one has entered it; each gets the lease it asked for, where that is longer.
        self.registry.add(ready.sender, request.ttl)
        if isinstance(request, wire.SenderRequest) and request.pin:
            await self._pin(ready.sender)
        return self.report(ready.sender, ready.cached)

    async def _enter(self, sender: RegisteredSender, ttl: float | None) -> _Ready:
        """Prefill, admit and write down. Where writing fails, nothing is left of a sender that was not there before."""
        ready = await self._prefilled(sender)
        known = self.registry.holds(sender.tenant, sender.id)
        lease = self.registry.add(ready.sender, ttl)
        try:
            await self._database.run(self._store.save, ready.sender, lease)
        except BaseException:
            if not known and self.registry.discard(sender.tenant, sender.id):
                # A save that was under way when the last caller left has come to its end.
                _unattended(self._database.run(self._store.remove, [sender.id]))
            raise
        return ready

    async def _expire(self) -> None:
        """Drop the senders whose lease is over."""
        gone = self.registry.expire()
        if not gone:
            return
        # Submitted before anything else can run: one of them may be registered anew meanwhile.
        removal = self._database.run(self._store.remove, [sender.id for sender in gone])
        for sender in gone:
            self._seen_cached.pop(sender.id, None)
        self.pins.retry()
        await removal

    async def _pin(self, sender: RegisteredSender) -> None:
        before = self.pins.wanted(sender)
        pin = self.registry.pin(sender.tenant, sender.id)
        stored = self._database.run(self._store.pin, sender.id, pin.pinned_positions > 0)
        try:
            await self.pins.settle(sender, again=True)
            await stored
        except BaseException:
            # As it was, unless somebody has changed it since: whoever pinned it before was told so.
            if self.registry.undo_pin(sender.tenant, sender.id, pin, before):
                _unattended(self._database.run(self._store.pin, sender.id, before > 0))
            self.pins.settle_later(sender)
            raise

    async def _prefilled(self, sender: RegisteredSender) -> _Ready:
        """Its KV in the cache; computed once for all who ask at once."""
        return await self._prefills.run(sender.id, lambda: self._prefill(sender))

    async def _prefill(self, sender: RegisteredSender) -> _Ready:
        seen = self._seen_cached.get(sender.id, -math.inf)
        presumed = time.monotonic() - seen < _PRESUMED_SECONDS
        async with nullcontext() if presumed else self._room.taken(len(sender)):
            if not sender.complete:
                whole = self.context(sender)
                before = replace(whole, input_ids=whole.input_ids[: len(sender) - sender.latent])
                sender = sender.with_latent_rows(await self.engine.latent_rows(before, sender.latent))
            cached = await self.engine.prefill(self.context(sender))
        if self.pins.wanted(sender):
            # A flush of the cache or a restart has taken the pin with the KV, and nothing tells so.
            await self.pins.settle(sender, again=True)
        self._seen_cached[sender.id] = time.monotonic()
        if len(self._seen_cached) > 2 * self.settings.senders.total.senders:
            del self._seen_cached[next(iter(self._seen_cached))]
        return _Ready(sender, cached)

    def _lineage(self, sender: RegisteredSender) -> set[str]:
        """This sender and those it extends: their positions are its own, too."""
        lineage, current = {sender.id}, sender
        while current.parent is not None and len(lineage) < _MAX_LINEAGE:
            lineage.add(current.parent)
            try:
                current = self.registry.peek(sender.tenant, current.parent)
            except CacheBackError:
                break
        return lineage

    async def _load(self) -> None:
        for stored in await self._database.run(self._store.load, time.time()):
            try:
                self.registry.restore(stored.sender, stored.lease)
                if stored.pinned:
                    self.registry.pin(stored.sender.tenant, stored.sender.id)
            except CacheBackError as error:
                logger.error("sender %s of the store is not served: %s", stored.sender.id, error)

    async def _keep_up(self) -> None:
        """Drop what has expired, and write the leases that queries have renewed."""
        while True:
            await asyncio.sleep(_UPKEEP_SECONDS)
            try:
                await self._expire()
                self.pins.retry()
                renewed = self.registry.take_renewed()
                if renewed:
                    await self._database.run(self._store.renew, renewed)
                self.on_upkeep()
            except Exception:
                logger.exception("the upkeep of senders failed; it is tried again")


def _unattended(written: asyncio.Future[Any]) -> None:
    """Let a write go on that nobody waits for; what it raises is logged."""

    def log(done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("the store of senders is behind: %s", error)

    written.add_done_callback(log)


def part_of(sender: RegisteredSender, positions: Sequence[int]) -> Part:
    """Positions of a sender as a piece of a sequence."""
    own = frozenset(sender.rows.positions) if sender.rows is not None else frozenset()
    at = [n for n, p in enumerate(positions) if p in own]
    rows = None
    if sender.rows is not None and at:
        rows = sender.rows.take([positions[n] for n in at]).at(at)
    return Part([sender.input_ids[p] for p in positions], rows)


def _entry(record: AuditRecord) -> wire.AuditEntry:
    fields: dict[str, Any] = {"encoding": record.encoding}
    return wire.AuditEntry(
        message=record.message, receiver=record.receiver, created=record.sent, spans=list(record.spans), **fields
    )
