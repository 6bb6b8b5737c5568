"""What a sender is: positions that an id stands for, and which of them may never leave."""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from cb_sglang.errors import InvalidRequestError
from cb_sglang.rows import PLACEHOLDER_ID, Rows
from cb_sglang.runs import Runs, union

MAX_LATENT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderContent:
    """What a caller registers.

    input_ids: token ids of the positions before the latent rows; ``PLACEHOLDER_ID`` where a row stands.
    rows:      continuous rows among them (received embeddings).
    inherited: how many leading positions came from other senders' messages.
    latent:    how many latent rows are to be rolled out behind them.
    private:   [start, stop) ranges that may never leave, in any order, overlapping or not.
    parent:    id of the sender that this one extends.
    """

    input_ids: Sequence[int]
    rows: Rows | None = None
    inherited: int = 0
    latent: int = 0
    private: Sequence[tuple[int, int]] = ()
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSender:
    """One sender. Its KV lives in SGLang's radix cache, or is rebuilt from what stands here.

    id:          "snd_" and 32 hex digits; depends on the tenant, so that it says nothing of other tenants' senders.
    fingerprint: SHA-256 in hex of the model and the content, for clients to compare; the same for every tenant.
    input_ids:   one a position (array type "i"), ``PLACEHOLDER_ID`` where a row stands.
    rows:        the continuous rows; those of the last ``latent`` positions are there once rolled out.
    private:     [start, stop) ranges, ascending and apart.
    created:     seconds since the epoch.

    Raises InvalidRequestError when the parts contradict each other.
    """

    id: str
    tenant: str
    fingerprint: str
    input_ids: array[int] = field(repr=False)
    rows: Rows | None = field(default=None, repr=False)
    inherited: int = 0
    latent: int = 0
    private: Runs = ()
    parent: str | None = None
    created: float

    def __post_init__(self) -> None:
        total = len(self)
        ids = np.frombuffer(self.input_ids, dtype=np.intc)
        if total == 0 or int(ids.min()) < 0:
            raise InvalidRequestError("a sender needs at least one position, and token ids of 0 or more")
        if not (0 <= self.latent < total and 0 <= self.inherited <= total - self.latent):
            raise InvalidRequestError(
                f"{self.inherited} inherited and {self.latent} latent positions do not fit a sender of {total}"
            )
        at = [*(self.rows.positions if self.rows else ()), *range(total - self.latent, total)]
        if max(at, default=0) >= total or bool((ids[at] != PLACEHOLDER_ID).any()):
            raise InvalidRequestError(
                f"a position with a row must lie in the sender and have token id {PLACEHOLDER_ID}"
            )
        edges = [edge for one in self.private for edge in one]
        if edges and (edges[0] < 0 or edges[-1] > total or any(a >= b for a, b in pairwise(edges))):
            raise InvalidRequestError(f"private ranges must lie apart and in order within the {total} positions")

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows together."""
        return len(self.rows.data) if self.rows else 0

    @property
    def complete(self) -> bool:
        """Whether every latent position has its row."""
        rolled_out = self.rows.positions[-self.latent :] if self.rows and self.latent else ()
        return rolled_out == tuple(range(len(self) - self.latent, len(self)))

    def with_latent_rows(self, rows: Rows) -> RegisteredSender:
        """This sender with its ``latent`` rolled-out rows, numbered 0, 1, ... in the order of the rollout.

        Raises InvalidRequestError when they are not as many, or of another size or dtype than the rows that are there.
        """
        if self.complete or rows.positions != tuple(range(self.latent)):
            raise InvalidRequestError(
                f"{len(rows)} latent rows, where {0 if self.complete else self.latent} are missing"
            )
        latent = rows.shifted(len(self) - self.latent)
        if self.rows is None:
            return replace(self, rows=latent)
        if (self.rows.dtype, self.rows.hidden) != (rows.dtype, rows.hidden):
            raise InvalidRequestError(
                f"latent rows of {rows.hidden} {rows.dtype} numbers, among rows of {self.rows.hidden} {self.rows.dtype}"
            )
        positions, data = self.rows.positions + latent.positions, self.rows.data + latent.data
        return replace(self, rows=Rows(positions, rows.dtype, rows.hidden, data))


def new_sender(
    tenant: str, model_fingerprint: str, content: SenderContent, *, id_key: bytes, created: float
) -> RegisteredSender:
    """The sender of this content, without its latent rows: those are rolled out later and change no id.

    ``id_key`` is the server's secret; without it nobody can compute the id that another tenant's content has.
    Raises InvalidRequestError.
    """
    if not 0 <= content.latent <= MAX_LATENT:
        raise InvalidRequestError(f"a sender has 0 to {MAX_LATENT} latent rows, not {content.latent}")
    try:
        input_ids = array("i", content.input_ids) + array("i", [PLACEHOLDER_ID]) * content.latent
    except OverflowError:
        raise InvalidRequestError(f"token ids must be below {1 << 31}") from None
    if any(start >= stop for start, stop in content.private):
        raise InvalidRequestError("a private range is empty; it stops after its start")
    rows, private = content.rows or None, union(content.private)
    if rows and rows.positions[-1] >= len(content.input_ids):
        raise InvalidRequestError(f"a row at position {rows.positions[-1]}, behind {len(content.input_ids)} positions")
    shape = [content.inherited, content.latent, private, rows and [rows.positions, rows.dtype, rows.hidden]]
    fingerprint = digest(
        model_fingerprint.encode(), json.dumps(shape).encode(), pack_int32(input_ids), rows.data if rows else b""
    )
    own = digest(tenant.encode(), fingerprint, (content.parent or "").encode())
    return RegisteredSender(
        id=f"snd_{hmac.digest(id_key, own, 'sha256').hex()[:32]}",
        tenant=tenant,
        fingerprint=fingerprint.hex(),
        input_ids=input_ids,
        rows=rows,
        inherited=content.inherited,
        latent=content.latent,
        private=private,
        parent=content.parent,
        created=created,
    )


def digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each behind its length: other parts never give the same bytes to hash."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def pack_int32(numbers: Sequence[int]) -> bytes:
    """As little-endian int32, on every machine."""
    return np.asarray(numbers, dtype="<i4").tobytes()


def unpack_int32(data: bytes) -> array[int]:
    """What ``pack_int32`` packed. Raises InvalidRequestError for a length that is not a multiple of 4."""
    if len(data) % 4:
        raise InvalidRequestError(f"{len(data)} bytes are not whole int32 numbers")
    return array("i", np.frombuffer(data, dtype="<i4").astype(np.intc).tobytes())
