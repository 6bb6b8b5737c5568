"""How large a message may be now: what was asked, the window law, and the receiver engine's KV capacity under load.

Pure arithmetic on a snapshot, so that clients and planners can import it; ``budget.py`` has the laws without a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from cb_sglang.budget import check_window
from cb_sglang.errors import BudgetError, CapacityError, ContextLengthError, InvalidRequestError

Policy: TypeAlias = Literal["fixed", "fit", "share"]
Limit: TypeAlias = Literal["asked", "window", "pool", "share"]


@dataclass(frozen=True, slots=True)
class CapacitySnapshot:
    """The engine that the receiver runs on, at one moment, in positions.

    pool_positions:      its whole KV pool.
    free_positions:      slots without content.
    evictable_positions: slots of cached prefixes that nothing has locked.
    pinned_positions:    of pinned senders that no lock holds at the moment; they must be able to stay or to come back.
    running_positions:   what running requests will still take, and what was granted to receivers that do not run yet.
    context_length:      the most positions one request may have.
    receivers:           in flight or queued without a grant, the one that asks included.

    A receiver counts once: in ``receivers`` until its grant, then in ``running_positions``. So granted, one after the
    other, receivers never come to more than ``usable_positions`` together.

    Raises InvalidRequestError for counts out of range.
    """

    pool_positions: int
    free_positions: int
    evictable_positions: int
    pinned_positions: int
    running_positions: int
    context_length: int
    receivers: int

    def __post_init__(self) -> None:
        _check_at_least(1, pool_positions=self.pool_positions, context_length=self.context_length)
        _check_at_least(1, receivers=self.receivers)
        _check_at_least(0, free_positions=self.free_positions, evictable_positions=self.evictable_positions)
        _check_at_least(0, pinned_positions=self.pinned_positions, running_positions=self.running_positions)
        if self.free_positions + self.evictable_positions > self.pool_positions:
            raise InvalidRequestError(
                f"free ({self.free_positions}) and evictable ({self.evictable_positions}) positions exceed the pool "
                f"({self.pool_positions}); take all three from the engine at one moment"
            )

    @classmethod
    def idle(cls, pool_positions: int, context_length: int) -> CapacitySnapshot:
        """An engine elsewhere of which only its size is known."""
        return cls(
            pool_positions=pool_positions,
            free_positions=pool_positions,
            evictable_positions=0,
            pinned_positions=0,
            running_positions=0,
            context_length=context_length,
            receivers=1,
        )

    @property
    def usable_positions(self) -> int:
        """What new receivers can take without evicting a pinned sender or starving a running request."""
        taken = self.pinned_positions + self.running_positions
        return max(0, self.free_positions + self.evictable_positions - taken)


@dataclass(frozen=True, slots=True)
class ReceiverNeed:
    """One receiver: its own prompt, the output it reserves, and how many senders' messages it reads, all in positions.

    context_length: its limit; an engine's own, where it is smaller, binds as well.
    concurrent:     receivers without a grant yet, it included, where the caller knows of more than the engine does (a
                    fan-out that has only begun, an engine elsewhere). Told again after a grant, it is one less.

    Raises InvalidRequestError for counts out of range.
    """

    context_length: int
    prompt_positions: int
    reserved_output: int
    senders: int = 1
    concurrent: int = 1

    def __post_init__(self) -> None:
        _check_at_least(1, context_length=self.context_length, senders=self.senders, concurrent=self.concurrent)
        _check_at_least(0, prompt_positions=self.prompt_positions, reserved_output=self.reserved_output)

    def positions(self, message: int) -> int:
        """What it takes in all with ``message`` positions from each sender."""
        return self.prompt_positions + self.senders * message + self.reserved_output

    def message_within(self, room: int) -> int:
        """The largest message from each sender with which it takes at most ``room`` positions; 0 if there is none."""
        return max(0, (room - self.positions(0)) // self.senders)


@dataclass(frozen=True, slots=True)
class Grant:
    """Positions of one sender's message: asked, granted, which ``limit`` bound, and ``reason``, one line with numbers.

    The bounds are what each limit alone would allow; None where the policy does not apply it or nothing is known.
    """

    asked: int
    granted: int
    limit: Limit
    reason: str
    window_positions: int
    pool_positions: int | None
    share_positions: int | None


def grant(
    asked: int, *, minimum: int, policy: Policy, snapshot: CapacitySnapshot | None, receiver: ReceiverNeed
) -> Grant:
    """How many of ``asked`` positions one message may have, at least ``minimum`` (min_budget, or what is protected).

    With c the receiver's prompt + reserved output, s its senders, U the usable positions and N the receivers::

        window = (context length - c) // s
        pool   = (U - c) // s                               it alone, with all that is usable
        share  = max(minimum, (U // N - c) // s)            it as one of N

    ``fixed``: all of ``asked``, or an error. ``fit``: min(asked, window, pool), first come, first served. ``share``:
    min(asked, window, pool, share), so that N receivers fit together. Where N do not fit together even with
    ``minimum``, more load cannot shrink the share further: each gets ``minimum`` until the pool bound refuses, and the
    rest wait for a receiver to finish. Without a snapshot (an engine elsewhere that nobody described) there is no pool
    and no share. Equal bounds are told apart in the order above.

    Raises InvalidRequestError for an unknown policy; BudgetError when ``asked`` is below ``minimum``;
    ContextLengthError when ``minimum`` (``asked``, if fixed) exceeds the window or an empty pool, so that waiting is in
    vain; CapacityError when it exceeds the pool now, so that the caller may queue.
    """
    if policy not in get_args(Policy):
        raise InvalidRequestError(f"policy must be one of {', '.join(get_args(Policy))}, not {policy}", param="policy")
    if not 1 <= minimum <= asked:
        raise BudgetError(
            f"the budget ({asked} positions) must be at least the minimum ({minimum}), and that at least 1; "
            "raise the budget or lower min_budget",
            param="budget",
        )
    context = receiver.context_length if snapshot is None else min(receiver.context_length, snapshot.context_length)
    least = asked if policy == "fixed" else minimum
    check_window(
        context_length=context,
        prompt=receiver.prompt_positions,
        messages=receiver.senders * least,
        reserved_output=receiver.reserved_output,
    )
    bounds: dict[Limit, int] = {"asked": asked, "window": receiver.message_within(context)}
    reasons: dict[Limit, str] = {
        "asked": f"all {asked} positions that were asked for fit",
        "window": _reason("window", f"{context} context", receiver, bounds["window"]),
    }
    if snapshot is not None:
        usable, receivers = snapshot.usable_positions, max(snapshot.receivers, receiver.concurrent)
        _check_pool(snapshot, receiver.positions(least))
        bounds["pool"] = receiver.message_within(usable)
        reasons["pool"] = _reason("pool", f"{usable} usable", receiver, bounds["pool"])
        if policy == "share":
            equal = receiver.message_within(usable // receivers)
            bounds["share"] = max(minimum, equal)
            reasons["share"] = (
                _reason("share", f"{usable} usable / {receivers} receivers", receiver, equal)
                if equal >= minimum
                else f"share: {usable} usable positions do not hold {receivers} such receivers at once; each gets the "
                f"minimum of {minimum} positions a message, and the rest wait"
            )
    limit = min(bounds, key=bounds.__getitem__)
    return Grant(
        asked=asked,
        granted=bounds[limit],
        limit=limit,
        reason=reasons[limit],
        window_positions=bounds["window"],
        pool_positions=bounds.get("pool"),
        share_positions=bounds.get("share"),
    )


def _check_pool(snapshot: CapacitySnapshot, needed: int) -> None:
    if needed > snapshot.pool_positions:
        raise ContextLengthError(
            f"the receiver needs {needed} positions; it may have {snapshot.pool_positions} of the KV pool at most; "
            "lower the budget or the reserved output"
        )
    if needed > snapshot.usable_positions:
        raise CapacityError(
            f"the receiver needs {needed} positions; {snapshot.usable_positions} of the {snapshot.pool_positions} that "
            "it may have of the KV pool are usable now; try again later, or lower the budget or the reserved output"
        )


def _reason(limit: str, room: str, receiver: ReceiverNeed, message: int) -> str:
    return (
        f"{limit}: ({room} - {receiver.prompt_positions} prompt - {receiver.reserved_output} reserved output) / "
        f"{receiver.senders} senders = {message} positions a message"
    )


def _check_at_least(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise InvalidRequestError(f"{name} must be at least {least}, not {count}", param=name)
