"""What goes on in a round of deaths until its victim has met its place: drops, restores, migrations, sleep, waking.

Orders come one after the other, from the round's seed; what cannot be done now is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import cycle, pairwise

from jettison.core.advice import Going
from jettison.core.cluster import ClusterCore
from jettison.core.moving.migrations import may_go
from jettison.core.moving.relocate import MAX_FINAL_BLOCKS
from jettison.core.moving.sleeping import LEVELS
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.live.engine.engine import Engine
from jettison.live.verify.fault_places import Role
from jettison.live.verify.fault_schedules import Schedule, Source
from jettison.memory.kvtransfers import MigrationKind
from jettison.memory.stages import Pull, StagePlan
from jettison.types import GroupId, LayerRange, WorkerId

FILL_S = 3.0
"""Before a drop with pulls."""
STEP_TOKENS = 8
"""Computed in a step for those that go as tokens: so few that they are on their way for a while."""
FEW_STEP_TOKENS, FEW_FINAL_BLOCKS = 3, 1
"""By lot, where the victim is an end of a migration: so few that it takes more than a round."""

Until = Callable[[Callable[[], bool], str], Awaitable[None]]
"""Wait for a condition; the text says what is waited for."""


class FaultOrders:
    """Of one round."""

    def __init__(
        self, engine: Engine, schedule: Schedule, pauses_s: tuple[float, float], over: asyncio.Event, until: Until
    ) -> None:
        """``pauses_s``: between two orders, by lot. ``over``: the victim has met its fate."""
        self._engine = engine
        self._schedule = schedule
        self._pauses_s = pauses_s
        self._over = over
        self._until = until
        self.may_ask = asyncio.Event()
        """Clients may send a request: not while all instances are to fall asleep."""
        self.may_ask.set()

    async def change_layouts(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """Drop and restore, or sleep and wake, under load until the round is over; by lot also while it recovers."""
        if self._schedule.is_of_requests:
            return
        try:
            await self._change_layouts(clients)
        finally:
            self.may_ask.set()

    async def _change_layouts(self, clients: Sequence[asyncio.Task[None]]) -> None:
        rng = random.Random(self._schedule.seed)
        goes_on = rng.random() < 0.3
        for order in self._layout_orders():
            # A shard is pulled only where KV has been written over it: the pipeline must have filled its new blocks.
            if order == self._drop_with_pulls and not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), FILL_S)
            await asyncio.sleep(rng.uniform(*self._pauses_s))
            if self._over.is_set() and not (goes_on and any(not c.done() for c in clients)):
                return
            order()
            await self._until(self._has_come_to_rest, "the end of a drop or restore, of going to sleep or waking")

    def _has_come_to_rest(self) -> bool:
        return not self._engine.core.in_transition

    async def migrate(self) -> None:
        """Where groups share no worker, requests go from one to another, in either way, until the round is over."""
        schedule, core = self._schedule, self._engine.core
        rng = random.Random(f"migrations {schedule.seed}")
        kinds = list(MigrationKind)
        if schedule.is_of_requests:
            kinds = [MigrationKind.TOKENS if schedule.point.startswith("tokens") else MigrationKind.KV]
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), rng.uniform(*self._pauses_s) / 4)
            states = [s for g in core.groups.values() for s in g.queues.running.values() if may_go(s)]
            if states and len(core.groups) > 1:
                state, group_id = rng.choice(states), rng.choice(list(core.groups))
                self._migrate(state, group_id, rng.choice(kinds), rng)

    def _migrate(self, state: RequestState, group_id: GroupId, kind: MigrationKind, rng: random.Random) -> None:
        """Have a request go, if it can now; for a death on its way back it is called off at once."""
        step_tokens, final_blocks = STEP_TOKENS, MAX_FINAL_BLOCKS
        if self._schedule.is_of_requests:
            step_tokens = rng.choice((FEW_STEP_TOKENS, STEP_TOKENS))
            final_blocks = rng.choice((FEW_FINAL_BLOCKS, MAX_FINAL_BLOCKS))

        def order(core: ClusterCore, now_ns: int) -> list[Action]:
            ends = source, destination = core.groups[state.group_id], core.groups[group_id]
            is_busy = any(g.paused or core.moves.is_moving(g) for g in ends) or core.migrations.is_moving(state)
            if is_busy or set(source.worker_ids) & set(destination.worker_ids):
                return []
            actions = core.migrations.start(
                state, source, destination, now_ns, going=Going(kind, step_tokens, final_blocks)
            )
            return actions + core.stepping.plan(now_ns) + core.migrations.after_steps(now_ns)

        self._engine.orders.order(order)
        if self._schedule.point == "kv_back":
            self._engine.orders.order(lambda core, now_ns: core.migrations.cancel(state))

    # --- layouts

    def _layout_orders(self) -> Iterator[Callable[[], None]]:
        schedule = self._schedule
        if schedule.role is not None:
            return cycle(self._sleep_orders())
        drops = [self._engine.orders.request_drop] * (len(self._engine.core.state.workers) - 1)
        if schedule.pulls:
            drops[1] = self._drop_with_pulls
        return cycle([*drops, self._engine.orders.request_restore])

    def _sleep_orders(self) -> list[Callable[[], None]]:
        schedule, workers = self._schedule, list(self._engine.core.state.workers)
        level = random.Random(schedule.seed).choice(LEVELS)
        if schedule.point.endswith("_keep"):
            return [self._engine.orders.lose_host_copies, lambda: self.sleep([schedule.victim], 1), self.wake_all]
        if schedule.source is not Source.PEERS:
            lost = [self._engine.orders.lose_host_copies] if schedule.source is Source.DISK else []
            return [self._all_sleep, *lost, lambda: self._wake(schedule.victim), self.wake_all]
        sleepers = [w for w in workers if w != schedule.victim] if schedule.role is Role.SENDER else [schedule.victim]
        return [lambda: self.sleep(sleepers[:1], level), self.wake_all]

    def _all_sleep(self) -> None:
        """Put all workers to sleep. No request is sent until they do: the first one would wake a worker."""
        self.may_ask.clear()
        self.sleep(list(self._engine.core.state.workers), 1)

    def sleep(self, worker_ids: Sequence[WorkerId], level: int) -> None:
        """Where they may: others may have died, or they sleep already."""
        with contextlib.suppress(ValueError):
            self._engine.orders.order(lambda core, now_ns: core.request_sleep(worker_ids, level, now_ns))

    def _wake(self, worker_id: WorkerId) -> None:
        self.may_ask.set()
        with contextlib.suppress(ValueError):
            self._engine.orders.order(lambda core, now_ns: core.request_wake(worker_id, now_ns))

    def wake_all(self) -> None:
        """Wake every worker that sleeps or is about to."""
        self.may_ask.set()
        for worker_id in self._engine.core.sleepers.out:
            self._wake(worker_id)

    def _drop_with_pulls(self) -> None:
        """Merge a pipeline of two and an instance so that the pipeline's stages change places."""
        core = self._engine.core
        moving = core.moves.moving_workers()
        idle = sorted((g for g in core.groups.values() if moving.isdisjoint(g.worker_ids)), key=lambda g: len(g.stages))
        if [len(g.stages) for g in idle[:2]] != [1, 2]:
            self._engine.orders.request_drop()
            return
        (middle,), (last, first) = idle[0].worker_ids, idle[1].worker_ids
        num_layers = core.state.shape.num_layers
        cuts = (0, 1, num_layers - 1, num_layers)
        layers = [LayerRange(lo, hi) for lo, hi in pairwise(cuts)]
        stages = tuple(StagePlan(w, part) for w, part in zip((first, middle, last), layers, strict=True))
        held = {s.worker_id: core.state.workers[s.worker_id].layout.shards for s in stages}
        pulls = []
        for stage in stages:
            for index, shard in enumerate(sorted(core.state.shape.shards_for(stage.layers) - held[stage.worker_id])):
                holders = [w for w, shards in held.items() if shard in shards]
                pulls.append(Pull(shard, holders[index % len(holders)], stage.worker_id))  # so that every holder sends
        self._engine.orders.request_merge([g.group_id for g in idle[:2]], stages, tuple(pulls))
