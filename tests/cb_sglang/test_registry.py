"""The registry: bounds in total and per tenant, leases, pins, and one tenant never seeing another's senders."""

from __future__ import annotations

from typing import Any

import pytest

from cb_sglang.errors import CapacityError, InvalidRequestError, RateLimitError, SenderNotFoundError
from cb_sglang.registry import Amounts, Lease, Pin, SenderLimits, SenderRegistry
from cb_sglang.rows import Rows
from cb_sglang.senders import RegisteredSender, SenderContent


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def registry(
    clock: Clock, *, senders: int = 100, positions: int = 1_000, row_bytes: int = 0, pinned: int = 0, **limits: Any
) -> SenderRegistry:
    total = Amounts(senders, positions, row_bytes, pinned)
    return SenderRegistry(SenderLimits(total=total, **limits), id_key=b"key", clock=clock)


def register(
    senders: SenderRegistry, *input_ids: int, tenant: str = "a", ttl: float | None = None, **content: Any
) -> RegisteredSender:
    sender = senders.make(tenant, "model", SenderContent(input_ids=input_ids, **content))
    senders.add(sender, ttl)
    return sender


def test_same_content_is_the_registered_sender(clock: Clock) -> None:
    senders = registry(clock)
    first = register(senders, 1, 2, 3)
    clock.now += 5
    assert senders.make("a", "model", SenderContent(input_ids=[1, 2, 3])) is first
    assert senders.get("a", first.id) is first
    assert first.created == 1_000.0
    register(senders, 1, 2, 3)
    assert senders.usage() == Amounts(1, 3)


def test_made_is_not_yet_registered(clock: Clock) -> None:
    senders = registry(clock)
    sender = senders.make("a", "model", SenderContent(input_ids=[1]))
    senders.check_room(sender)
    assert senders.list("a") == []
    with pytest.raises(SenderNotFoundError):
        senders.get("a", sender.id)


def test_list_is_the_tenants_own_oldest_first(clock: Clock) -> None:
    senders = registry(clock)
    made = [register(senders, n) for n in (3, 1, 2)]
    register(senders, 3)
    theirs = register(senders, 3, tenant="b")
    assert senders.list("a") == made
    assert senders.list("b") == [theirs]
    assert senders.list("c") == []


def test_foreign_expired_and_absent_are_the_same_error(clock: Clock) -> None:
    senders = registry(clock)
    mine, over = register(senders, 1), register(senders, 2, tenant="b", ttl=1)
    clock.now += 1
    calls = (senders.get, senders.peek, senders.lease, senders.remove, senders.pin, senders.unpin)
    told = set()
    for call in (*calls, senders.pinned_positions):
        for sender_id in (mine.id, over.id, "snd_none", ""):
            with pytest.raises(SenderNotFoundError, match="register it with POST /v1/senders") as caught:
                call("b", sender_id)
            told.add((caught.value.message, caught.value.status, caught.value.code, caught.value.param))
    assert len(told) == 1
    assert senders.list("b") == []
    assert senders.get("a", mine.id) is mine


def test_remove_frees_the_room(clock: Clock) -> None:
    senders = registry(clock, senders=1, positions=3, row_bytes=4, pinned=3)
    first = register(senders, 1, 0, rows=Rows((1,), "float32", 1, bytes(4)))
    senders.pin("a", first.id)
    assert senders.usage("a") == senders.usage() == Amounts(1, 2, 4, 2)
    senders.remove("a", first.id)
    assert senders.usage("a") == senders.usage() == Amounts()
    register(senders, 1, 2, 3)


@pytest.mark.parametrize(
    ("bounds", "named"),
    [({"senders": 2}, "2 senders"), ({"positions": 9}, "9 positions"), ({"row_bytes": 20}, "20 row bytes")],
)
def test_bounds_of_the_server(clock: Clock, bounds: dict[str, int], named: str) -> None:
    senders = registry(clock, **{"row_bytes": 1_000, **bounds})
    rows = Rows((1, 2), "float32", 1, bytes(8))
    first = register(senders, 1, 0, 0, 2, rows=rows)
    register(senders, 2, 0, 0, 2, rows=rows, tenant="b")
    third = senders.make("a", "model", SenderContent(input_ids=[3, 0, 0, 2], rows=rows))
    for refused in (senders.check_room, senders.add):
        with pytest.raises(CapacityError, match=f"{named} that this server") as caught:
            refused(third)
        assert caught.value.status == 503
    assert senders.usage().senders == 2
    register(senders, 1, 0, 0, 2, rows=rows)  # is there already: needs no room
    senders.remove("a", first.id)
    senders.add(third)


def test_bounds_of_a_tenant(clock: Clock) -> None:
    senders = registry(clock, senders=4, positions=20, tenant_share=0.5)
    register(senders, 1), register(senders, 2)
    with pytest.raises(RateLimitError, match="2 senders that one tenant") as caught:
        register(senders, 3)
    assert (caught.value.status, caught.value.code) == (429, "tenant_over_share")
    register(senders, 1, tenant="b")
    with pytest.raises(RateLimitError, match="10 positions that one tenant"):
        register(senders, *range(10), tenant="b")
    register(senders, *range(9), tenant="b")
    assert senders.usage("b") == Amounts(2, 10)


def test_latent_rows_must_be_there(clock: Clock) -> None:
    senders = registry(clock, row_bytes=100)
    bare = senders.make("a", "model", SenderContent(input_ids=[1], latent=2))
    with pytest.raises(InvalidRequestError, match="2 latent rows have not been rolled out"):
        senders.add(bare)
    full = bare.with_latent_rows(Rows((0, 1), "float16", 2, bytes(8)))
    senders.add(full)
    assert senders.make("a", "model", SenderContent(input_ids=[1], latent=2)) is full
    assert senders.usage().row_bytes == 8


def test_a_query_renews_and_a_look_does_not(clock: Clock) -> None:
    senders = registry(clock, default_ttl=10.0)
    sender = register(senders, 1)
    assert senders.lease("a", sender.id) == Lease(10.0, 1_010.0)
    clock.now += 9
    senders.peek("a", sender.id)
    assert senders.take_renewed() == {}
    senders.get("a", sender.id)
    assert senders.take_renewed() == {sender.id: Lease(10.0, 1_019.0)}
    assert senders.take_renewed() == {}
    clock.now += 9
    assert senders.expire() == [] and senders.expire(clock.now + 1) == [sender]
    assert senders.usage() == Amounts()


def test_an_expired_sender_holds_its_room_until_it_is_dropped(clock: Clock) -> None:
    senders = registry(clock, senders=1, pinned=10)
    over = register(senders, 1, 2, ttl=5)
    senders.pin("a", over.id)
    clock.now += 5
    with pytest.raises(CapacityError):
        register(senders, 2)
    assert senders.expire() == [over]
    register(senders, 2)
    assert senders.usage() == Amounts(1, 1)


def test_leases_never_get_shorter(clock: Clock) -> None:
    senders = registry(clock, default_ttl=None)
    sender = register(senders, 1, ttl=100)
    register(senders, 1, ttl=5)
    assert senders.lease("a", sender.id) == Lease(100.0, 1_100.0)
    register(senders, 1, ttl=200)
    clock.now -= 50  # clocks are set back now and then
    senders.get("a", sender.id)
    assert senders.lease("a", sender.id) == Lease(200.0, 1_200.0)
    register(senders, 1)
    assert senders.lease("a", sender.id) == Lease(None, None)
    register(senders, 1, ttl=5)
    clock.now += 1e9
    assert senders.get("a", sender.id) is sender and senders.expire() == []


@pytest.mark.parametrize("ttl", [0.5, 101.0, float("nan"), float("inf"), -1.0])
def test_a_lease_out_of_bounds(clock: Clock, ttl: float) -> None:
    senders = registry(clock, min_ttl=1.0, max_ttl=100.0)
    sender = senders.make("a", "model", SenderContent(input_ids=[1]))
    for call in (lambda: senders.check_ttl(ttl), lambda: senders.add(sender, ttl)):
        with pytest.raises(InvalidRequestError, match="a lease lasts 1 to 100 seconds") as caught:
            call()
        assert caught.value.param == "ttl"
    assert senders.list("a") == []


def test_restored_as_it_stood(clock: Clock) -> None:
    before, after = registry(clock), registry(clock, senders=1)
    first, second = register(before, 1, ttl=50), register(before, 2)
    after.restore(first, before.lease("a", first.id))
    assert after.lease("a", first.id) == Lease(50.0, 1_050.0)
    with pytest.raises(CapacityError):
        after.restore(second, before.lease("a", second.id))


def test_pins_are_capped_and_say_so(clock: Clock) -> None:
    senders = registry(clock, pinned=10, tenant_share=0.6)
    first, second = register(senders, 1, 2, 3, 4), register(senders, 5, 6, 7, 8)
    theirs = register(senders, *range(9), tenant="b")
    assert senders.pin("a", first.id) == Pin(4, 4)
    assert senders.pin("a", second.id) == Pin(4, 2)  # 60 % of 10 for one tenant
    assert senders.pin("b", theirs.id) == Pin(9, 4)  # what is left of 10 for all
    assert senders.usage().pinned_positions == 10
    assert senders.pin("a", first.id) == Pin(4, 4)  # in place of the one that it has
    assert senders.pin("a", first.id, positions_cap=1) == Pin(4, 1)  # what the engine could lock
    assert senders.pin("a", second.id) == Pin(4, 4)
    assert senders.pin("a", first.id, positions_cap=0) == Pin(4, 0)
    senders.unpin("b", theirs.id)
    assert [senders.pinned_positions("a", one.id) for one in (first, second)] == [0, 4]
    senders.expire(), senders.remove("a", second.id)
    assert senders.usage().pinned_positions == 0


def test_no_pins_without_a_cap(clock: Clock) -> None:
    senders = registry(clock)
    sender = register(senders, 1, 2)
    assert senders.pin("a", sender.id) == Pin(2, 0)


def test_nothing_stays_of_a_tenant_without_senders(clock: Clock) -> None:
    senders = registry(clock)
    for n in range(50):
        sender = register(senders, 1, tenant=f"t{n}")
        senders.remove(f"t{n}", sender.id)
    assert not senders._tenants and not senders._usage


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant_share": 0.0},
        {"tenant_share": 1.1},
        {"tenant_share": 0.1, "total": Amounts(senders=5)},
        {"min_ttl": 0.0},
        {"min_ttl": 10.0, "max_ttl": 5.0},
        {"max_ttl": float("inf")},
        {"default_ttl": 0.5},
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        SenderLimits(**wrong)


@pytest.mark.parametrize("wrong", [(None, 5.0), (5.0, None), (0.0, 5.0), (float("nan"), 5.0)])
def test_leases_that_make_no_sense(wrong: tuple[float | None, float | None]) -> None:
    with pytest.raises(InvalidRequestError):
        Lease(*wrong)
