"""Any order of copying, freeing, coming back, cancels, deaths and moves: every token right, nothing left at the host.

``JETTISON_EXAMPLES=300`` looks further than the default.
"""

from __future__ import annotations

import os
import random

import pytest
from fakes import MS, FakeCluster, Faults
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jettison.core.ladder.free import is_preemptible
from jettison.core.ladder.rung import Moment
from jettison.core.ports import Action
from jettison.core.preemption import Preemption
from jettison.types import ServiceClass

N_EXAMPLES = int(os.environ.get("JETTISON_EXAMPLES", "12"))


class Schedule(RuleBasedStateMachine):
    """A cluster that harvests; the rules are what happens to it."""

    @initialize(
        seed=st.integers(0, 1000), policy=st.sampled_from(["drop", "recompute", "swap+drop", "pipeline"]),
        num_workers=st.sampled_from([2, 2, 3]), full_blocks=st.integers(30, 60),
        host_slots=st.sampled_from([8, 40, 500]),
        offline=st.sampled_from(["harvest", "harvest", "scheduler+checkpoint", "scheduler"]),
        free=st.sampled_from([0.5, 0.9, 1.0]), caches=st.booleans(), fails=st.sampled_from([0.0, 0.1]),
    )
    def begin(
        self, seed: int, policy: str, num_workers: int, full_blocks: int, host_slots: int, offline: str, free: float,
        caches: bool, fails: float,
    ) -> None:
        self.rng = random.Random(seed)
        self.cluster = FakeCluster(
            seed=seed, policy=policy, num_workers=num_workers, full_blocks=full_blocks, host_slots=host_slots,
            offline=offline, checkpoint_free=free, prefix_caching=caches, eager=seed % 2 == 0,
            faults=Faults(swap=fails, move=fails, remote=fails, budget=6),
        )
        self.evictions = 0
        """Requests that are to be preempted as soon as they can be."""
        ladder, climb = self.cluster.core.ladder, self.cluster.core.ladder.climb

        def climb_and_preempt(moment: Moment, now_ns: int) -> list[Action]:
            actions = climb(moment, now_ns)
            if moment is Moment.BEFORE_STEPS and self.evictions:
                self._evict_one()
            return actions

        ladder.climb = climb_and_preempt  # type: ignore[method-assign]
        self.shared = [self.rng.randrange(1, 60) for _ in range(12)]

    def _evict_one(self) -> None:
        core = self.cluster.core
        busy = core.moves.moving_workers()
        for group in core.groups.values():
            if not busy.isdisjoint(group.worker_ids):
                continue
            found = [s for s in group.queues.running.values() if is_preemptible(s) and s.num_computed]
            if found:
                group.preempt(self.rng.choice(found), Preemption.STEP)
                self.evictions -= 1
                return

    @rule(num=st.integers(1, 4), prompt=st.integers(1, 40), output=st.integers(1, 60), shares=st.booleans())
    def batch(self, num: int, prompt: int, output: int, shares: bool) -> None:
        self._submit(num, prompt, output, shares, ServiceClass.OFFLINE)

    @rule(num=st.integers(1, 3), prompt=st.integers(1, 30), output=st.integers(1, 30))
    def chats(self, num: int, prompt: int, output: int) -> None:
        self._submit(num, prompt, output, False, ServiceClass.ONLINE)

    def _submit(self, num: int, prompt: int, output: int, shares: bool, service_class: ServiceClass) -> None:
        for _ in range(num):
            tokens = self.shared * shares + [self.rng.randrange(1, 60) for _ in range(prompt)]
            name = f"{service_class}-{len(self.cluster.requests)}"
            at_ms = self.cluster.now / MS + self.rng.uniform(0, 5)
            self.cluster.submit(name, tokens, output, at_ms, service_class=service_class)

    @rule(ms=st.integers(1, 60))
    def pass_time(self, ms: int) -> None:
        self.cluster.run(until_ms=self.cluster.now / MS + ms)

    @rule(num=st.integers(1, 3))
    def evict(self, num: int) -> None:
        self.evictions += num

    @rule()
    def cancel(self) -> None:
        live = sorted(self.cluster.core.state.requests)
        if live:
            self.cluster.cancel(self.rng.choice(live), self.cluster.now / MS + self.rng.uniform(0, 10))

    @rule(what=st.sampled_from(["drop", "restore"]))
    def order(self, what: str) -> None:
        self.cluster.order(what)

    @rule()
    def die(self) -> None:
        worker_id = self.rng.randrange(len(self.cluster.workers))
        if self.cluster.num_deaths < 2:
            self.cluster.kill(worker_id)
            self.cluster.restart_at(worker_id, self.cluster.now / MS + self.rng.uniform(40, 200))

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.evictions = 0
        for worker_id in self.cluster.workers:
            self.cluster.restart_at(worker_id, self.cluster.now / MS + 400)
        self.cluster.run()
        self.cluster.expect_outputs()
        self.cluster.expect_nothing_left()
        assert self.cluster.core.hosted.is_idle
        for pool in self.cluster.core.hosted.store.pools.values():
            assert pool.num_free == pool.num_slots


TestSchedule = pytest.mark.slow(Schedule.TestCase)
TestSchedule.settings = settings(
    max_examples=N_EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
