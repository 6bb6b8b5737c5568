"""The registry of senders: which token sequences can be addressed by id."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_sglang.errors import CapacityError, SenderNotFoundError


@dataclass(frozen=True, slots=True)
class RegisteredSender:
    """One sender. ``input_ids`` are its positions; the KV lives in SGLang's radix cache, or is rebuilt from these."""

    id: str
    fingerprint: str
    input_ids: array[int]
    created: float = field(default_factory=time.time)

    def __len__(self) -> int:
        return len(self.input_ids)


class SenderRegistry:
    """Senders in memory, bounded in number and in positions. Same content, same id."""

    def __init__(self, *, max_senders: int, max_positions: int) -> None:
        self._senders: dict[str, RegisteredSender] = {}
        self._positions = 0
        self.max_senders = max_senders
        self.max_positions = max_positions

    def make(self, model_fingerprint: str, input_ids: Sequence[int]) -> RegisteredSender:
        """The sender of this content: the registered one, or a new one that ``add`` has yet to admit."""
        ids = array("i", input_ids)
        fingerprint = hashlib.sha256(model_fingerprint.encode() + ids.tobytes()).hexdigest()
        sender_id = f"snd_{fingerprint[:32]}"
        return self._senders.get(sender_id) or RegisteredSender(sender_id, fingerprint, ids)

    def check_room(self, sender: RegisteredSender) -> None:
        """Raises CapacityError when the registry could not take this sender."""
        if sender.id in self._senders:
            return
        if len(self._senders) >= self.max_senders:
            raise CapacityError(f"{self.max_senders} senders are registered, the most this server holds; delete one")
        if self._positions + len(sender) > self.max_positions:
            raise CapacityError(
                f"the registered senders would exceed {self.max_positions} positions together; delete one"
            )

    def add(self, sender: RegisteredSender) -> None:
        """Admit a sender; one that is there already stays. Raises CapacityError when the registry is full."""
        self.check_room(sender)
        if sender.id not in self._senders:
            self._senders[sender.id] = sender
            self._positions += len(sender)

    def get(self, sender_id: str) -> RegisteredSender:
        """Raises SenderNotFoundError."""
        sender = self._senders.get(sender_id)
        if sender is None:
            raise SenderNotFoundError("no such sender; register it with POST /v1/senders", param="sender_id")
        return sender

    def list(self) -> list[RegisteredSender]:
        """All senders, oldest first."""
        return list(self._senders.values())

    def remove(self, sender_id: str) -> None:
        """Forget a sender. Raises SenderNotFoundError."""
        self._positions -= len(self.get(sender_id))
        del self._senders[sender_id]
