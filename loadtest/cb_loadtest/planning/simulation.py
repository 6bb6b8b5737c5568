"""Thousands of agents over many servers, as a discrete-event simulation.

Grants and admission are the server's own code (``cb_sglang.grants``, ``cb_sglang.admission``) on simulated time; what
a step costs comes from a plan or a fit. The same scenario gives the same numbers.
"""

from __future__ import annotations

import random
from itertools import accumulate

import simpy

from cb_loadtest.planning.engine import Engine
from cb_loadtest.planning.scenario import Outcome, Scenario
from cb_loadtest.planning.sim_engine import Steps
from cb_loadtest.planning.sim_server import Shared, SimulatedServer
from cb_sglang.capacity import Policy

WARM_UP = 0.1
"""Share of the simulated time before anything is counted."""


def simulate(scenario: Scenario, engine: Engine, policy: Policy) -> Outcome:
    """One run of ``scenario`` with ``engine`` on every server.

    Raises HardwareError when the model does not fit the engine's memory.
    """
    return _World(scenario, engine, policy).run()


class _World:
    """All agents and servers of one run, on one simulated clock."""

    def __init__(self, scenario: Scenario, engine: Engine, policy: Policy) -> None:
        self._scenario = scenario
        self._env = simpy.Environment()
        self._shared = Shared(
            env=self._env,
            scenario=scenario,
            engine=engine,
            policy=policy,
            lengths=_sender_lengths(scenario),
            outcome=Outcome(policy),
            counting_from=WARM_UP * scenario.seconds,
        )
        self._cumulative = list(accumulate((number + 1) ** -scenario.popularity for number in range(scenario.senders)))
        self._servers = [SimulatedServer(self._shared, number) for number in range(scenario.servers)]
        self._full = self._env.event()
        self._started = 0
        self._evictions_before = 0
        for number in range(scenario.agents):
            self._env.process(self._agent(number))

    def run(self) -> Outcome:
        env, outcome, start = self._env, self._shared.outcome, self._shared.counting_from
        env.process(self._end_of_warm_up())
        env.run(until=self._full | env.timeout(self._scenario.seconds))
        outcome.complete = not self._full.triggered
        outcome.counted_seconds = max(0.0, env.now - start)
        outcome.evictions = self._evictions() - self._evictions_before if env.now > start else 0
        return outcome

    def _end_of_warm_up(self) -> Steps:
        yield self._env.timeout(self._shared.counting_from)
        self._evictions_before = self._evictions()

    def _evictions(self) -> int:
        return sum(server.pool.evictions for server in self._servers)

    def _agent(self, number: int) -> Steps:
        scenario = self._scenario
        draw = random.Random(f"agent/{scenario.seed}/{number}")
        tenant = f"tenant-{number % scenario.tenants}"
        pause = draw.expovariate(1 / scenario.think)
        while True:
            yield self._env.timeout(pause)
            self._started += 1
            if self._started > scenario.max_requests:
                if not self._full.triggered:
                    self._full.succeed()
                return
            sender = draw.choices(range(scenario.senders), cum_weights=self._cumulative)[0]
            server = self._servers[sender % scenario.servers]
            wait = yield from server.serve(tenant, sender)
            pause = wait + draw.expovariate(1 / scenario.think)


def _sender_lengths(scenario: Scenario) -> list[int]:
    draw = random.Random(f"senders/{scenario.seed}")
    half = scenario.sender_length // 2
    return [half + draw.randint(0, scenario.sender_length) for _ in range(scenario.senders)]
