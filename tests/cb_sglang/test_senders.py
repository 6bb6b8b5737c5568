"""The registry of senders: same content, same id, and never more than its bounds."""

from __future__ import annotations

import pytest

from cb_sglang.errors import CapacityError, SenderNotFoundError
from cb_sglang.senders import RegisteredSender, SenderRegistry


def registry(max_senders: int = 4, max_positions: int = 100) -> SenderRegistry:
    return SenderRegistry(max_senders=max_senders, max_positions=max_positions)


def register(senders: SenderRegistry, *input_ids: int) -> RegisteredSender:
    sender = senders.make("model", input_ids)
    senders.add(sender)
    return sender


def test_same_content_is_the_same_sender() -> None:
    senders = registry()
    first = register(senders, 1, 2, 3)
    assert senders.make("model", [1, 2, 3]) is first
    assert senders.get(first.id) is first
    assert (len(first), list(first.input_ids)) == (3, [1, 2, 3])
    assert first.id == f"snd_{first.fingerprint[:32]}"


def test_an_id_is_content_and_model() -> None:
    senders = registry()
    made = [senders.make("model", ids) for ids in ([1, 2, 3], [1, 2], [3, 2, 1], [1, 2, 3, 0], [258], [1, 1])]
    made.append(senders.make("another model", [1, 2, 3]))
    assert len({sender.id for sender in made}) == len(made)
    # It does not depend on the registry, the process or the time.
    assert registry().make("model", [1, 2, 3]).id == made[0].id


def test_made_is_not_yet_registered() -> None:
    senders = registry()
    sender = senders.make("model", [1, 2, 3])
    assert senders.list() == []
    with pytest.raises(SenderNotFoundError):
        senders.get(sender.id)


def test_list_is_oldest_first() -> None:
    senders = registry()
    made = [register(senders, n) for n in (3, 1, 2)]
    register(senders, 3)
    assert senders.list() == made


def test_remove() -> None:
    senders = registry()
    sender = register(senders, 1, 2, 3)
    senders.remove(sender.id)
    assert senders.list() == []
    for call in (senders.get, senders.remove):
        with pytest.raises(SenderNotFoundError, match="register it with POST /v1/senders") as caught:
            call(sender.id)
        assert (caught.value.status, caught.value.param) == (404, "sender_id")


def test_bound_on_senders() -> None:
    senders = registry(max_senders=2)
    first, _ = register(senders, 1), register(senders, 2)
    with pytest.raises(CapacityError, match="2 senders are registered") as caught:
        register(senders, 3)
    assert caught.value.status == 503
    assert len(senders.list()) == 2
    register(senders, 1)  # is there already
    senders.remove(first.id)
    register(senders, 3)


def test_bound_on_positions() -> None:
    senders = registry(max_positions=10)
    first = register(senders, *range(6))
    with pytest.raises(CapacityError, match="10 positions together"):
        register(senders, *range(5))
    register(senders, *range(6))  # is there already: counted once
    register(senders, *range(4))
    senders.remove(first.id)
    register(senders, *range(10, 16))
    with pytest.raises(CapacityError):
        register(senders, 99)


def test_check_room_admits_nothing() -> None:
    senders = registry(max_senders=1)
    sender = senders.make("model", [1])
    senders.check_room(sender)
    assert senders.list() == []
    register(senders, 2)
    with pytest.raises(CapacityError):
        senders.check_room(sender)
