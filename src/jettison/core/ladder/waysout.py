"""How soon each way would let the head of a queue in, as is known now: predictions for ``policy.soonest``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from jettison.core.ladder.dropplans import DropPlanner, block_bytes
from jettison.core.ladder.rung import Means
from jettison.core.load.pullrates import PullRates
from jettison.core.moving.migrations import may_go
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.cost.stepwork import NOTHING, step_of
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.exchange import LinkId
from jettison.policy.overload import Pressure
from jettison.policy.soonest import (
    BUSY_SHARE,
    Migration,
    WakeForecast,
    WakeSource,
    WakesTaken,
    Way,
    blocks_to_land,
    drop_s,
    migrate_s,
)
from jettison.types import NANOSECONDS, WorkerId


class WaysOut:
    """Predicts how soon each way would let in the head of a queue. It keeps nothing but how long wakes have taken, and
    begins nothing."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self.taken = WakesTaken()
        self._planner = DropPlanner(means.state, means.loads)

    def times(
        self, group: Group, pressure: Pressure, wake: WakeForecast | None, now_ns: int
    ) -> dict[Way, float | None]:
        """Seconds until the head is let in, by each way that is open to a group whose queue memory keeps out; None: not
        known. ``wake``: what is known of the sleeper that would be woken; None: there is none."""
        ways = self._means.ways()
        times: dict[Way, float | None] = {Way.WAIT: pressure.memory_wait_s}
        if Way.MIGRATE in ways and (migration := self.migration(group)) is not None:
            times[Way.MIGRATE] = migrate_s(migration)
        if wake is not None:
            times[Way.WAKE] = self.taken.seconds(wake)
        if Way.DROP in ways and pressure.refuses is None and self._may_merge(group):
            times[Way.DROP] = self.drop_s(group, now_ns)
        return times

    # --- wake -------------------------------------------------------------------------------------------------

    def wake(self, worker_id: WorkerId, head: RequestState | None) -> WakeForecast:
        """What waking a worker takes, from the source of parameters that is predicted to end first; no bytes where it
        has not given them up yet. ``head``: the request that is to be let in; None: no request in particular."""
        state, profile = self._state, self._state.params.profile
        first_step_s = self._first_step_s(head, 1)
        if worker_id in self._means.sleepers.leaving:
            return WakeForecast(0, None, 0.0, first_step_s)
        budget_bytes = state.member_budget_bytes(state.workers[worker_id])
        map_s = 0.0 if profile is None else profile.remap_cost_s(budget_bytes)
        num_bytes, is_busy = state.shape.parameter_bytes, any(g.in_flight for g in state.groups.values())
        wait_s = max((self._step_in_flight_s(g) for g in state.groups.values()), default=0.0)
        return self.taken.soonest([
            WakeForecast(
                num_bytes, rate, map_s, first_step_s, source, is_busy, wait_s if source is WakeSource.PEERS else 0.0
            )
            for source, rate in self._fill_rates(worker_id).items()
        ])  # fmt: skip

    def _step_in_flight_s(self, group: Group) -> float:
        """Predicted seconds of the group's newest step in flight, all of it, as it is not known when a worker began; 0
        without one, or while nothing is known of steps."""
        last = next(reversed(group.in_flight.values()), None)
        step_s = None if last is None else self._state.predictor.predict_s(last.work, step_of(len(group.stages)))
        return step_s or 0.0

    def _fill_rates(self, worker_id: WorkerId) -> dict[WakeSource, float | None]:
        """Bytes a second at which a worker gets all shards from each source that it has, in the order peers, then its
        machine's copy or the model folder; None: not known."""
        state, params = self._state, self._state.params
        profile, everything = params.profile, state.shape.all_shards
        awake = [w for w in state.workers.values() if w.can_serve and w.worker_id not in self._means.sleepers.leaving]
        rates: dict[WakeSource, float | None] = {}
        if everything <= {shard for w in awake for shard in w.layout.shards - w.unfilled}:
            holders = [w.worker_id for w in awake if w.layout.shards - w.unfilled]
            rates[WakeSource.PEERS] = self._peers_rate(worker_id, holders)
        if self._means.sleepers.host_copy(worker_id) >= everything:
            rates[WakeSource.HOST] = (
                params.loading_bytes_per_s if profile is None else profile.host_copy_bytes_per_s
            )
        else:  # a load takes the copy where there is one
            profiled = None if profile is None else profile.disk_bytes_per_s
            rates[WakeSource.DISK] = params.loading_bytes_per_s or profiled
        return rates

    def _peers_rate(self, worker_id: WorkerId, holders: Sequence[WorkerId]) -> float | None:
        """Bytes a second of the best link from a holder of shards to a worker; None: none is known. A rate that was
        measured, was so beside steps; of a profiled one, a holder that serves gives only a part."""
        state, known = self._state, PullRates(self._state)
        rates: list[float] = []
        for holder in holders:
            link = holder, worker_id
            if (rate := known.of(link)) is None:
                continue
            measured = state.link_rates.get(link)
            is_busy = any(g.in_flight for g in state.groups_of[holder])
            if is_busy and (measured is None or measured.bytes_per_s is None):
                rate *= min(1.0, BUSY_SHARE * len(holders))
            rates.append(rate)
        return max(rates, default=None)

    # --- drop -------------------------------------------------------------------------------------------------

    def _may_merge(self, group: Group) -> bool:
        """Whether a drop could relieve the group: some other group could take part, or the group's restore could be
        called off."""
        moves = self._means.moves
        if moves.restore_of(group) is not None:
            return True
        return not moves.is_moving(group) and any(
            g is not group and not moves.is_moving(g) for g in self._state.groups.values()
        )

    def drop_s(self, group: Group, now_ns: int) -> float:
        """Predicted seconds until a dropped group's first step with the head of its queue, its dwell time included: as
        long as drops have taken here; before the first drop, as profiled."""
        state, counters = self._state, self._state.counters
        wait_s = self._means.loads.dwell_left_s(group, now_ns)
        num_stages = len(group.stages)
        first_step_s = self._first_step_s(group.queues.waiting.head, num_stages + 1)
        partner = self._partner(group)
        land_s = self._land_s(group, partner)
        if counters.num_drops:
            took_s = counters.drop_ns / counters.num_drops / NANOSECONDS
            return wait_s + drop_s(0.0, 0.0, took_s, first_step_s, land_s=land_s)
        profile = state.params.profile
        given = state.shape.parameter_bytes // (num_stages + 1)
        unmap_s = 0.0 if profile is None else profile.remap_cost_s(given)
        return wait_s + drop_s(
            self._step_in_flight_s(group), unmap_s, 0.0, first_step_s, self._pull_s(group, partner), land_s
        )

    def _partner(self, group: Group) -> Group | None:
        """The group that a drop would merge this one with; None: there is none that no move touches and that fits."""
        moves = self._means.moves
        others = (g for g in self._state.groups.values() if g is not group and not moves.is_moving(g))
        return self._planner.partner(group, others)

    def _pull_s(self, group: Group, partner: Group | None) -> float:
        """Predicted seconds in which a merge's members pull the shards that they lack; 0 without a partner, between two
        instances, and over links of unknown rate."""
        if partner is None or len(group.stages) + len(partner.stages) == 2:
            return 0.0
        plan = self._planner.plan([group, partner], 1, group.group_id, math.inf)
        rates, queued = PullRates(self._state), Counter[LinkId]()
        for pull in (p for merge in plan.merges for p in merge.pulls):
            queued[pull.src, pull.dst] += self._state.shape.shard_bytes[pull.shard]
        return max((n / rate if (rate := rates.of(link)) else 0.0 for link, n in queued.items()), default=0.0)

    def _land_s(self, group: Group, partner: Group | None) -> float:
        """Predicted seconds until enough KV of the merge's exchange has landed for the head to find room; 0 without a
        head or a partner."""
        state, head = self._state, group.queues.waiting.head
        if head is None or partner is None:
            return 0.0
        num_members = len(group.stages) + len(partner.stages)
        stage_block_bytes = block_bytes(state) / num_members
        freed = int(state.shape.parameter_bytes * (num_members - 1) / num_members / stage_block_bytes)
        landing = max(group.blocks.num_used, partner.blocks.num_used)
        free = min(group.blocks.num_free, partner.blocks.num_free)
        needed = group.limits.blocks_for(head.num_tokens) + group.blocks.watermark
        num_blocks = blocks_to_land(needed, freed + free, landing)
        rate = PullRates(state).slowest((*group.worker_ids, *partner.worker_ids))
        return num_blocks * stage_block_bytes / rate

    # --- migrate ----------------------------------------------------------------------------------------------

    def migration(self, group: Group) -> Migration | None:
        """What it takes to move away the smallest running request that makes room for the group's first waiting one;
        None: no request waits, no such request may go, or no other group has room for it."""
        state = self._state
        head = group.queues.waiting.head
        others = [
            g for g in state.groups.values()
            if g is not group and not g.paused and not self._means.moves.is_moving(g) and not g.queues.waiting
        ]
        if head is None or not others:
            return None
        to = max(others, key=lambda g: (g.blocks.num_free - g.blocks.watermark, -g.group_id))
        room, missing = to.blocks.num_free - to.blocks.watermark, self._missing_blocks(group, head)
        sizes = sorted(
            (group.blocks.ledgers[0].num_blocks_of(s.request_id), s.num_computed)
            for s in group.queues.running.values() if may_go(s)
        )
        fitting = next(((blocks, tokens) for blocks, tokens in sizes if missing <= blocks <= room), None)
        if fitting is None:
            return None
        params, (num_blocks, num_tokens) = state.params.migration, fitting
        rate = PullRates(state).of_kv((group.worker_ids[0], to.worker_ids[0]))
        may_kv, may_tokens = params.kind is not MigrationKind.TOKENS, params.kind is not MigrationKind.KV
        prefill = state.predictor.prefill_tokens_per_s(state.limits.max_num_batched_tokens) if may_tokens else None
        return Migration(
            num_blocks * block_bytes(state), rate * params.period_s if may_kv and rate else None,
            num_tokens, prefill * params.period_s if prefill else None, params.period_s,
        )

    def _missing_blocks(self, group: Group, head: RequestState) -> int:
        """Blocks that the group lacks for the head above the watermark; 0 or less: none."""
        return group.limits.blocks_for(head.num_tokens) + group.blocks.watermark - group.blocks.num_free

    def _first_step_s(self, head: RequestState | None, num_stages: int) -> float:
        """Predicted seconds of the step that computes the head's prompt, or as much of it as a step takes; 0 without a
        head, and while nothing is known of steps."""
        if head is None:
            return 0.0
        num_tokens = min(head.num_tokens, self._state.limits.max_num_batched_tokens)
        return self._state.predictor.predict_s(NOTHING.with_prompt(num_tokens), step_of(num_stages)) or 0.0
