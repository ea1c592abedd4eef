"""How soon each way would let the head of a queue in, as known now: views for ``policy.soonest``."""

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
from jettison.policy.overload import Assessment
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
    """Predictions; nothing is kept but how long wakes have taken."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self.taken = WakesTaken()
        self._planner = DropPlanner(means.state, means.loads)

    def times(
        self, group: Group, assessment: Assessment, wake: WakeForecast | None, now_ns: int
    ) -> dict[Way, float | None]:
        """Of all ways that there are for a group whose queue memory keeps out. ``wake``: of the sleeper that would be
        woken; None: there is none."""
        ways = self._means.ways()
        times: dict[Way, float | None] = {Way.WAIT: assessment.memory_wait_s}
        if Way.MIGRATE in ways and (migration := self.migration(group)) is not None:
            times[Way.MIGRATE] = migrate_s(migration)
        if wake is not None:
            times[Way.WAKE] = self.taken.seconds(wake)
        if Way.DROP in ways and not assessment.refuses and self._may_merge(group):
            times[Way.DROP] = self.drop_s(group, now_ns)
        return times

    # --- wake -------------------------------------------------------------------------------------------------

    def wake(self, worker_id: WorkerId, head: RequestState | None) -> WakeForecast:
        """What is known of waking a worker from the source that is through first. ``head``: the request that is to be
        let in; None: no request in particular."""
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
        """All of it: when a worker began is not known here. 0 without one, or while nothing is known of steps."""
        last = next(reversed(group.in_flight.values()), None)
        step_s = None if last is None else self._state.predictor.predict_s(last.work, step_of(len(group.stages)))
        return step_s or 0.0

    def _fill_rates(self, worker_id: WorkerId) -> dict[WakeSource, float | None]:
        """Bytes a second at which a worker gets all shards from each source that there is: peers first, then the
        machine's copy, then the model folder. None: not known."""
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
        """The rate of the best link from a holder of the shards. A measured rate was measured beside steps. A profiled
        one was not: of that a holder that serves gives a part."""
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
        """Some other group could take part in a drop, or a restore is turned round."""
        moves = self._means.moves
        if moves.restore_of(group) is not None:
            return True
        return not moves.is_moving(group) and any(
            g is not group and not moves.is_moving(g) for g in self._state.groups.values()
        )

    def drop_s(self, group: Group, now_ns: int) -> float:
        """Until the first step of the merged group that lets the head in, from when it may be dropped again: as drops
        have taken here; before the first one, as profiled."""
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
        """The group that a drop would merge it with."""
        moves = self._means.moves
        others = (g for g in self._state.groups.values() if g is not group and not moves.is_moving(g))
        return self._planner.partner(group, others)

    def _pull_s(self, group: Group, partner: Group | None) -> float:
        """Of shards that members lack in any order of stages; none where each has all layers."""
        if partner is None or len(group.stages) + len(partner.stages) == 2:
            return 0.0
        plan = self._planner.plan([group, partner], 1, group.group_id, math.inf)
        rates, queued = PullRates(self._state), Counter[LinkId]()
        for pull in (p for merge in plan.merges for p in merge.pulls):
            queued[pull.src, pull.dst] += self._state.shape.shard_bytes[pull.shard]
        return max((n / rate if (rate := rates.of(link)) else 0.0 for link, n in queued.items()), default=0.0)

    def _land_s(self, group: Group, partner: Group | None) -> float:
        """Of the exchange that has to be over before the head finds room; the most that lands at one member."""
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
        """The one running request whose going away would make room for the head; None: none could go, or none does."""
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
        return group.limits.blocks_for(head.num_tokens) + group.blocks.watermark - group.blocks.num_free

    def _first_step_s(self, head: RequestState | None, num_stages: int) -> float:
        """Of the request that is let in; 0 while nothing is known of steps."""
        if head is None:
            return 0.0
        num_tokens = min(head.num_tokens, self._state.limits.max_num_batched_tokens)
        return self._state.predictor.predict_s(NOTHING.with_prompt(num_tokens), step_of(num_stages)) or 0.0
