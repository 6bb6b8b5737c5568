"""The simulated pool keeps its sums, and the simulated engine takes exactly the steps that its costs say."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cb_loadtest.planning.pool import Pool
from cb_loadtest.planning.sim_engine import CHUNK_ROWS, SimulatedEngine

POOL = 100
LENGTHS = {sender: 10 + 7 * sender for sender in range(6)}
PINNED = {0, 3}


class PoolMachine(RuleBasedStateMachine):
    """Every order of calls: no position is lost or made, and senders in use or pinned stay."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(POOL, PINNED)
        self.users = dict.fromkeys(LENGTHS, 0)
        self.reserved: list[int] = []

    @rule(sender=st.sampled_from(sorted(LENGTHS)))
    def place(self, sender: int) -> None:
        if sender in self.pool:
            return
        room = self.pool.free + self.pool.evictable
        assert self.pool.place(sender, LENGTHS[sender]) == (LENGTHS[sender] <= room)

    @rule(sender=st.sampled_from(sorted(LENGTHS)))
    def lock(self, sender: int) -> None:
        if sender in self.pool:
            self.pool.lock(sender)
            self.users[sender] += 1

    @rule(sender=st.sampled_from(sorted(LENGTHS)))
    def unlock(self, sender: int) -> None:
        if self.users[sender]:
            self.pool.unlock(sender)
            self.users[sender] -= 1

    @rule(positions=st.integers(1, POOL + 10))
    def reserve(self, positions: int) -> None:
        before = [sender for sender in LENGTHS if sender in self.pool]
        room = self.pool.free + self.pool.evictable
        taken = self.pool.reserve(positions)
        assert taken == (positions <= room)
        if taken:
            self.reserved.append(positions)
        else:
            assert before == [sender for sender in LENGTHS if sender in self.pool]
        assert all(sender in self.pool for sender in before if sender in PINNED)

    @rule()
    def release(self) -> None:
        if self.reserved:
            self.pool.release(self.reserved.pop())

    @invariant()
    def sums(self) -> None:
        inside = [sender for sender in LENGTHS if sender in self.pool]
        assert all(sender in inside for sender, users in self.users.items() if users)
        assert self.pool.free >= 0
        assert self.pool.free + sum(self.reserved) + sum(LENGTHS[sender] for sender in inside) == POOL
        resting = [sender for sender in inside if not self.users[sender]]
        assert self.pool.evictable == sum(LENGTHS[sender] for sender in resting if sender not in PINNED)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_least_recently_used_is_evicted_first() -> None:
    pool = Pool(30)
    for sender in (1, 2, 3):
        assert pool.place(sender, 10)
    pool.lock(1)
    pool.unlock(1)
    assert pool.reserve(10)
    assert [sender for sender in (1, 2, 3) if sender in pool] == [1, 3] and pool.evictions == 1


class Costs:
    """An engine with easy numbers: 1 s a batch and 0.1 s a query; 0.001 s a prefilled row; 0.5 s a token.

    ``calls`` are the work of every step, in order.
    """

    name = "easy"
    pool_positions = 10_000
    context_length = 10_000

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def scoring_seconds(self, *, queries: int, rows: int, positions: int) -> float:
        self.calls.append(("score", queries))
        return 1.0 + 0.1 * queries

    def prefill_seconds(self, *, rows: int, past: int = 0) -> float:
        self.calls.append(("prefill", rows))
        return rows * 0.001

    def decode_seconds(self, *, sequences: int, positions: int, tokens: int) -> float:
        self.calls.append(("decode", sequences))
        return tokens * 0.5


class Bench:
    """A simulated engine on a clock, and when its work ended."""

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.costs = Costs()
        self.engine = SimulatedEngine(self.env, self.costs)
        self.ended: dict[str, float] = {}

    def note(self, name: str, done: simpy.Event) -> None:
        done.callbacks.append(lambda _: self.ended.setdefault(name, self.env.now))

    def at(self, time: float) -> None:
        self.env.run(until=time)


def test_queries_of_one_sender_are_one_batch() -> None:
    bench = Bench()
    bench.at(1.0)
    for number, sender in enumerate((7, 7, 8, 7)):
        bench.note(f"query {number}", bench.engine.score(sender, rows=4, positions=100))
    bench.env.run(until=100.0)
    assert bench.costs.calls == [("score", 3), ("score", 1)]
    assert list(bench.ended.values()) == [pytest.approx(1.0 + 1.3 + 1.1)] * 4


def test_work_that_arrives_during_a_step_is_in_the_next() -> None:
    bench = Bench()
    bench.note("first", bench.engine.score(1, rows=4, positions=100))
    bench.at(0.5)
    bench.note("second", bench.engine.score(1, rows=4, positions=100))
    bench.env.run(until=100.0)
    assert bench.ended == {"first": 1.1, "second": 2.2}


def test_long_prefills_go_in_chunks_and_short_ones_share_a_step() -> None:
    bench = Bench()
    bench.note("long", bench.engine.prefill(rows=CHUNK_ROWS + 100))
    bench.note("short", bench.engine.prefill(rows=50))
    bench.env.run(until=100.0)
    assert bench.costs.calls == [("prefill", CHUNK_ROWS), ("prefill", 100), ("prefill", 50)]
    assert bench.ended["long"] == bench.ended["short"] == (CHUNK_ROWS + 150) * 0.001


def test_decoding_runs_until_the_first_answer_ends() -> None:
    bench = Bench()
    bench.note("long", bench.engine.decode(tokens=10, positions=100))
    bench.note("short", bench.engine.decode(tokens=4, positions=100))
    bench.env.run(until=100.0)
    assert bench.ended == {"short": 2.0, "long": 5.0}
    assert bench.costs.calls == [("decode", 2), ("decode", 1)]


def test_answers_that_join_get_every_token_of_their_own() -> None:
    bench = Bench()
    bench.note("long", bench.engine.decode(tokens=10, positions=100))
    bench.at(1.2)  # in the third step, which ends at 1.5
    bench.note("late", bench.engine.decode(tokens=3, positions=100))
    bench.env.run(until=100.0)
    assert bench.ended == {"late": 3.0, "long": 5.0}


def test_decoding_goes_on_while_others_are_scored() -> None:
    bench = Bench()
    bench.note("answer", bench.engine.decode(tokens=4, positions=100))
    bench.at(0.7)  # in the second step, which ends at 1.0
    bench.note("query", bench.engine.score(1, rows=4, positions=100))
    bench.env.run(until=100.0)
    # The step from 1.0 has the query (1.1 s) and the third token (0.5 s); the fourth follows alone.
    assert bench.ended == pytest.approx({"query": 2.6, "answer": 3.1})
