"""Which rows read which pool slots, decided on the host once a batch and reused by every layer.

A request's rows attend to keys of three kinds, and each kind becomes calls without waste:

* keys that every one of its rows sees (the cached prefix, less what a window hides): a call without a mask,
  read once for all requests that share these slots, straight from the pool where the slots are consecutive;
* the rest of a short request (own rows, the window's edge, odd remainders): a padded, masked call for many
  requests;
* the own rows of a long request: one causal call, or row blocks of a band when a window hides something.

Results over different keys are merged by their LSE. Source: shared design section 3, kernels page ("CPU").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

Index = slice | Tensor

SHARE_MIN_SLOTS = 64
SHORT_ROWS = 128
_SHARE_ROUNDS = 8
_MAIN_MIN_KEYS = 768  # below, the padded masked call over all keys is faster (measured, 2 threads)
_RUN_MIN_SLOTS = 256
_RUNS_MAX = 8
_ALIGN = 64  # whole-visible calls take multiples of this many keys, so that they can be split over threads
_PIECE_MAX_SLOTS = 16_384
_BAND_ROWS = 256
_TAIL_MAX_SLOTS = 16_384
_PLANS_MAX = 8
_FAR = 1 << 62


@dataclass(frozen=True, slots=True)
class ExtendRequest:
    """Rows row_start .. row_start + row_count - 1 of the flat q are the last `row_count` positions of
    `slots`.

    slots: int64 (or int32) [kv_len], CPU: pool slot of positions 0 .. kv_len - 1 (cached prefix, then own
    rows).
    """

    row_start: int
    row_count: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """One attention call: `batch` entries of `rows_each` rows over `keys_each` keys.

    rows: q rows, batch * rows_each of them; keys: pool slots, batch * keys_each; mask: additive float32,
    [rows_each, T], or [batch, 1, rows_each * group, T] when folded; kept: which result rows are real (None:
    all); targets: where those go; fresh: nothing was written to the targets before; folded: a kv head's
    query heads are laid out as further rows.
    """

    rows: Index
    keys: Index
    targets: Index
    fresh: bool
    batch: int
    rows_each: int
    keys_each: int
    folded: bool = True
    causal: bool = False
    mask: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests (by index) whose first `length` slots are the same."""

    members: tuple[int, ...]
    length: int


@dataclass(slots=True)
class ExtendPlan:
    """A batch's requests and shared prefixes; the calls for a (window, group size) are built on first use
    and kept.
    """

    requests: tuple[ExtendRequest, ...]
    shared: tuple[SharedPrefix, ...]
    row_end: int
    row_total: int
    slot_end: int
    _passes: dict[tuple[int, int], list[Pass]] = field(default_factory=dict, repr=False)

    def passes(self, window: int | None, group: int) -> list[Pass]:
        """The calls for rows that see `window` positions before their own (None or negative: all)."""
        longest = max(len(r.slots) for r in self.requests)
        key = (longest if window is None or window < 0 else min(window, longest), group)
        if key not in self._passes:
            while len(self._passes) >= _PLANS_MAX:
                del self._passes[next(iter(self._passes))]
            self._passes[key] = _PassBuilder(self, *key).build()
        return self._passes[key]


def plan_extend(requests: Sequence[ExtendRequest]) -> ExtendPlan:
    """Check the requests and find those that share a prefix of at least 64 identical slots.

    Work: a few compares of slot tensors a request. Raises ValueError for no requests, overlapping rows,
    negative slots, or a request with no rows or fewer slots than rows.
    """
    if not requests:
        raise ValueError("plan_extend needs at least one request")
    checked: list[ExtendRequest] = []
    for i, r in enumerate(requests):
        if r.slots.dim() != 1 or r.slots.is_cuda or r.slots.dtype not in (torch.int64, torch.int32):
            found = f"{r.slots.dtype} {tuple(r.slots.shape)} on {r.slots.device}"
            raise ValueError(f"request {i}: slots must be int64 [kv_len] on the CPU, got {found}")
        if r.row_count < 1 or r.row_start < 0 or r.row_count > len(r.slots):
            raise ValueError(
                f"request {i}: rows {r.row_start}+{r.row_count} do not fit {len(r.slots)} slots; "
                "give at least one row and one slot for each position, the own rows included"
            )
        checked.append(ExtendRequest(r.row_start, r.row_count, r.slots.to(torch.int64)))
    spans = sorted((r.row_start, r.row_start + r.row_count) for r in checked)
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        raise ValueError("two requests claim the same row of q; row ranges must not overlap")
    bounds = [torch.aminmax(r.slots) for r in checked]
    if any(int(low) < 0 for low, _ in bounds):
        raise ValueError("slots must not be negative")
    return ExtendPlan(
        requests=tuple(checked),
        shared=tuple(_find_shared(checked)),
        row_end=spans[-1][1],
        row_total=sum(r.row_count for r in checked),
        slot_end=1 + max(int(high) for _, high in bounds),
    )


def plan_decode(slots: Sequence[Tensor]) -> ExtendPlan:
    """The plan of one row a request: row b is the last position of slots[b] (int64 [kv_len], CPU)."""
    return plan_extend([ExtendRequest(b, 1, s) for b, s in enumerate(slots)])


def _find_shared(requests: list[ExtendRequest]) -> list[SharedPrefix]:
    """Greedy: among those with an equal first and 64th slot, take the group that saves the most slot
    reads."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for i, r in enumerate(requests):
        if len(r.slots) - r.row_count >= SHARE_MIN_SLOTS and r.row_count <= SHORT_ROWS:
            buckets.setdefault((int(r.slots[0]), int(r.slots[SHARE_MIN_SLOTS - 1])), []).append(i)
    found: list[SharedPrefix] = []
    for bucket in buckets.values():
        left = sorted(bucket, key=lambda i: requests[i].row_count - len(requests[i].slots))
        for _ in range(_SHARE_ROUNDS):
            if len(left) < 2:
                break
            leader = requests[left[0]]
            common = sorted(((_common_prefix(leader, requests[i]), i) for i in left[1:]), key=lambda c: -c[0])
            count = max(range(1, len(common) + 1), key=lambda n: n * common[n - 1][0])
            length = common[count - 1][0]
            if length < SHARE_MIN_SLOTS:
                left = left[1:]
                continue
            members = [left[0], *(i for _, i in common[:count])]
            found.append(SharedPrefix(tuple(sorted(members)), length))
            left = [i for i in left if i not in members]
    return found


def _common_prefix(a: ExtendRequest, b: ExtendRequest) -> int:
    n = min(len(a.slots) - a.row_count, len(b.slots) - b.row_count)
    if torch.equal(a.slots[:n], b.slots[:n]):
        return n
    return int((a.slots[:n] != b.slots[:n]).to(torch.uint8).argmax())


def _as_index(values: Tensor) -> Index:
    """A slice where the values are consecutive (then nothing is copied), else the values."""
    first, n = int(values[0]), len(values)
    if int(values[-1]) - first == n - 1 and bool((values.diff() == 1).all()):
        return slice(first, first + n)
    return values


def _span(lo: int, hi: int) -> Tensor:
    return torch.arange(lo, max(lo, hi))


@dataclass(slots=True)
class _Tail:
    """What is left of a short request: its rows over these positions, masked."""

    request: ExtendRequest
    positions: Tensor
    fresh: bool


class _PassBuilder:
    def __init__(self, plan: ExtendPlan, window: int, group: int) -> None:
        self.plan, self.window, self.group = plan, window, group
        self.passes: list[Pass] = []
        self.tails: list[_Tail] = []
        self.band: Tensor | None = None

    def build(self) -> list[Pass]:
        alone = set(range(len(self.plan.requests)))
        for shared in self.plan.shared:
            if self.add_shared(shared):
                alone.difference_update(shared.members)
        for i in sorted(alone):
            r = self.plan.requests[i]
            if r.row_count <= SHORT_ROWS:
                self.add_short(r, 0, [], fresh=True)
            elif len(r.slots) - 1 > self.window:
                self.add_band(r)
            else:
                self.add_long(r)
        self.add_tails()
        return self.passes

    def hidden(self, r: ExtendRequest) -> int:
        """First position that the request's last row still sees: every row sees it, if it is in the
        prefix."""
        return max(0, len(r.slots) - 1 - self.window)

    def add_shared(self, shared: SharedPrefix) -> bool:
        members = [self.plan.requests[i] for i in shared.members]
        lo = max(self.hidden(r) for r in members)
        if shared.length - lo < SHARE_MIN_SLOTS:
            return False
        rows = _as_index(torch.cat([_span(r.row_start, r.row_start + r.row_count) for r in members]))
        count = sum(r.row_count for r in members)
        left = self.add_mains(rows, count, members[0].slots, _span(lo, shared.length), fresh=True)
        read = len(left) < shared.length - lo
        for r in members:
            first = max(0, len(r.slots) - r.row_count - self.window)
            self.add_short(r, shared.length, [_span(first, lo), left], fresh=not read)
        return True

    def add_short(self, r: ExtendRequest, done: int, loose: list[Tensor], *, fresh: bool) -> None:
        """Keys from position `done` on, and the `loose` positions before it that no call covers yet."""
        prefix = len(r.slots) - r.row_count
        lo = min(max(done, self.hidden(r)), prefix)
        loose = [*loose, _span(max(done, prefix - self.window), lo)]
        if prefix - lo >= _MAIN_MIN_KEYS:
            rows = slice(r.row_start, r.row_start + r.row_count)
            left = self.add_mains(rows, r.row_count, r.slots, _span(lo, prefix), fresh=fresh)
            fresh = fresh and len(left) == prefix - lo
            loose.append(left)
        else:
            loose.append(_span(lo, prefix))
        self.tails.append(_Tail(r, torch.cat([*loose, _span(prefix, len(r.slots))]), fresh))

    def add_long(self, r: ExtendRequest) -> None:
        prefix = len(r.slots) - r.row_count
        rows = slice(r.row_start, r.row_start + r.row_count)
        if prefix:
            left = self.add_mains(rows, r.row_count, r.slots, _span(0, prefix), fresh=True)
            if len(left):
                self.add_gathered(rows, r.row_count, r.slots[left], fresh=len(left) == prefix)
        own = _as_index(r.slots[prefix:])
        self.passes.append(Pass(rows, own, rows, not prefix, 1, r.row_count, r.row_count, folded=False, causal=True))

    def add_band(self, r: ExtendRequest) -> None:
        """Row blocks over the keys that a block's window touches, under one mask for all blocks."""
        prefix, window = len(r.slots) - r.row_count, self.window
        if self.band is None:
            ahead = _span(0, window + _BAND_ROWS) - _span(0, _BAND_ROWS).unsqueeze(1)
            hidden = (ahead < 0) | (ahead > window)
            self.band = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        for a in range(0, r.row_count, _BAND_ROWS):
            b = min(r.row_count, a + _BAND_ROWS)
            lo, hi = max(0, prefix + a - window), prefix + b
            skip = lo - (prefix + a - window)
            rows = slice(r.row_start + a, r.row_start + b)
            mask = self.band[: b - a, skip : skip + hi - lo]
            keys = _as_index(r.slots[lo:hi])
            self.passes.append(Pass(rows, keys, rows, True, 1, b - a, hi - lo, folded=False, mask=mask))

    def add_mains(self, rows: Index, count: int, slots: Tensor, positions: Tensor, *, fresh: bool) -> Tensor:
        """Calls of all `rows` over most of the ascending `positions`; returns the positions left out."""
        taken = slots[positions]
        jumps = (taken.diff() != 1).nonzero().flatten() + 1
        edges = torch.cat([jumps.new_zeros(1), jumps, jumps.new_tensor([len(taken)])])
        lengths = edges.diff()
        loose = torch.ones(len(taken), dtype=torch.bool)
        for j in (lengths >= _RUN_MIN_SLOTS).nonzero().flatten()[:_RUNS_MAX].tolist():
            a = int(edges[j])
            b = a + int(lengths[j]) // _ALIGN * _ALIGN
            loose[a:b] = False
            first = int(taken[a])
            for c in range(first, first + b - a, _PIECE_MAX_SLOTS):
                d = min(first + b - a, c + _PIECE_MAX_SLOTS)
                self.passes.append(Pass(rows, slice(c, d), rows, fresh, 1, count, d - c))
                fresh = False
        left = positions[loose]
        whole = len(left) // _ALIGN * _ALIGN
        if whole >= 2 * _ALIGN:
            self.add_gathered(rows, count, slots[left[:whole]], fresh=fresh)
            left = left[whole:]
        return left

    def add_gathered(self, rows: Index, count: int, slots: Tensor, *, fresh: bool) -> None:
        for piece in torch.split(slots, _PIECE_MAX_SLOTS):
            self.passes.append(Pass(rows, piece, rows, fresh, 1, count, len(piece)))
            fresh = False

    def add_tails(self) -> None:
        """Padded batches of tails, each at most about twice the work of its real rows and keys."""
        self.tails.sort(key=lambda t: (t.fresh, t.request.row_count, len(t.positions)))
        batch: list[_Tail] = []
        rows = keys = work = 0
        for tail in self.tails:
            n, t = tail.request.row_count, len(tail.positions)
            size = len(batch) + 1
            padded = size * max(rows, n) * max(keys, t)
            fits = padded <= 2 * (work + n * t) and size * max(keys, t) <= _TAIL_MAX_SLOTS
            if batch and not (fits and batch[0].fresh == tail.fresh):
                self.passes.append(self.tail_pass(batch, rows, keys))
                batch, rows, keys, work = [], 0, 0, 0
            batch.append(tail)
            rows, keys, work = max(rows, n), max(keys, t), work + n * t
        if batch:
            self.passes.append(self.tail_pass(batch, rows, keys))

    def tail_pass(self, batch: list[_Tail], rows: int, keys: int) -> Pass:
        size = len(batch)
        starts = torch.tensor([t.request.row_start for t in batch]).unsqueeze(1)
        counts = torch.tensor([t.request.row_count for t in batch]).unsqueeze(1)
        prefixes = torch.tensor([len(t.request.slots) for t in batch]).unsqueeze(1) - counts
        step = _span(0, rows).unsqueeze(0)
        row_index = starts + torch.minimum(step, counts - 1)
        row_position = prefixes + torch.minimum(step, counts - 1)
        # Padding repeats an own slot: it is masked, but an unused slot could hold NaN, and 0 * NaN is NaN.
        key_slots = torch.stack([t.request.slots[-1].expand(keys) for t in batch])
        key_position = torch.full((size, keys), _FAR)
        for b, t in enumerate(batch):
            key_slots[b, : len(t.positions)] = t.request.slots[t.positions]
            key_position[b, : len(t.positions)] = t.positions
        ahead = row_position.unsqueeze(2) - key_position.unsqueeze(1)
        hidden = (ahead < 0) | (ahead > self.window)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        mask = mask.repeat_interleave(self.group, 1).unsqueeze(1)
        kept = (step < counts).flatten()
        targets = row_index.flatten()[kept]
        return Pass(
            rows=_as_index(row_index.flatten()),
            keys=_as_index(key_slots.flatten()),
            targets=_as_index(targets),
            fresh=batch[0].fresh,
            batch=size,
            rows_each=rows,
            keys_each=keys,
            mask=mask,
            kept=None if bool(kept.all()) else kept.nonzero().flatten(),
        )
