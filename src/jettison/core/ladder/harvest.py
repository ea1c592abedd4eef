"""Harvest: offline work beside online requests, with its KV kept in a second place as long as memory may run out
(ConServe).

Which offline tokens fill a step is planned with the step (``policy.filling``). This rung acts around each step of a
group that has offline work:

    it has ended     candidates are marked                                    policy.checkpointing
    the next begins  what to copy is decided; freed requests come back, where online requests leave room
    it is issued     pieces of both beside it, within what the link and the objectives allow

Online requests are copied, too, behind the offline ones. A stored request whose copy would cost its group more than
computing it again is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.moving.checkpoints import is_copyable
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.policy.checkpointing import (
    USUAL_BLOCKS,
    Checkpointing,
    CheckpointRow,
    CopyBack,
    copy_bound_s,
    is_cheaper_recomputed,
)
from jettison.policy.exchange import ExchangeCosts
from jettison.policy.order import in_service_order
from jettison.policy.slo import objectives
from jettison.policy.swapping import StoredRow, choose_swap_ins
from jettison.types import GroupId, RequestId

AHEAD_STEPS = 16
"""Steps of growth of running requests for which room is left beside an offline request that comes back: it would be the
next to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestOffer(Offer):
    """Freed requests of one group that come back from host pools, or are computed again because that is faster."""

    come_back: tuple[RequestId, ...] = ()
    compute_again: tuple[RequestId, ...] = ()


@register
class HarvestRung(Rung):
    """Copies running requests' KV to host pools while memory may run out (checkpoints), and brings freed requests back
    (prefetches)."""

    name = "harvest"
    rank = 10
    moments = frozenset({Moment.STEP_ENDED, Moment.BEFORE_STEPS})
    is_word = False

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._store, self._checkpoints = means.state, means.hosted.store, means.checkpoints
        self._policies: dict[GroupId, Checkpointing] = {}
        self._marked: set[GroupId] = set()
        """Groups with candidates from a step that has just ended."""
        self._decided: dict[GroupId, tuple[tuple[RequestId, int], ...]] = {}
        self._looked_at: list[Group] = []
        """Groups looked at in this event."""
        self._put_off: set[GroupId] = set()
        """Groups that were touched while their layouts were changing."""
        self._stalled: set[GroupId] = set()
        """Groups that have nothing to run but what is on its way back."""
        self._num_dissolved = 0
        """The cluster's count of dissolved groups when these were last dropped here."""

    @property
    def _has_nothing(self) -> bool:
        """Whether the rung has nothing to do: no group has offline work or KV in host pools, or settings leave neither
        to this rung."""
        if not self._state.changes.harvesting:
            return True
        return not self._state.params.offline.checkpoints and self.means.hosted.is_idle

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm for steps while the rung has something to do, and for ticks while a group with offline work was put
        off; else calm without end."""
        if moment is Moment.TICK:
            return Calm(None if self._put_off.isdisjoint(self._state.changes.harvesting) else 0)
        return Calm(None if self._has_nothing else 0)

    def lag_blocks(self) -> int:
        """Sealed blocks of the requests to be checkpointed that have no copy yet, over all groups that run offline
        requests."""
        groups = self._state.groups  # a group that was marked last may run no offline request any more
        return sum(
            policy.lag_blocks for group_id, policy in self._policies.items()
            if group_id in groups and groups[group_id].queues.num_running_offline
        )

    # --- deciding ---------------------------------------------------------------------------------------------

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """After a step: mark the requests of its group to be checkpointed, and yield nothing. Before the next: decide
        what to copy, and yield offers of requests that come back or are computed again, for each touched group whose
        layouts do not change."""
        harvesting = self._state.changes.harvesting
        if self._has_nothing:
            return
        if moment is Moment.STEP_ENDED:
            for group_id in harvesting & self._state.changes.touched:
                self._mark(group_id)
            return
        busy = self.means.moves.changing_workers()
        for group in self._touched():
            if not busy.isdisjoint(group.worker_ids):
                self._put_off.add(group.group_id)
                if self.means.moves.restore_of(group) is not None:
                    # Nothing that is stored returns before the restore is over, and that may wait for the queue.
                    group.blocks.reserve(self.name, {})
                continue
            self._looked_at.append(group)
            if group.group_id in self._marked:
                self._decide(group)
            if oversized := self._store.oversized(group):
                yield HarvestOffer(
                    groups=(group.group_id,), why=Preemption.TOO_LARGE, compute_again=oversized
                )
            if not group.paused:
                yield from self._returning(group)
            self._keep_room(group)
        self._marked.clear()

    def _touched(self) -> list[Group]:
        """The groups with offline work, or with KV in host pools, that have been touched or put off, in order of ids.
        Groups without any of that are forgotten."""
        self._state.resolve_ledgers()
        self._forget_dissolved()
        changes, groups = self._state.changes, self._state.groups
        asked = (changes.touched | changes.recent | changes.unnoted | self._put_off) & changes.harvesting
        self._put_off = set()
        for group_id in [g for g in asked if g not in groups or not self._has_work(groups[g])]:
            self._forget(group_id)
            asked.discard(group_id)
        return [groups[g] for g in sorted(asked)]

    def _has_work(self, group: Group) -> bool:
        """Whether the group runs offline requests, or has requests that are stored or moving."""
        queues = group.queues
        return bool(queues.num_running_offline or queues.stored or queues.moving)

    def _forget(self, group_id: GroupId) -> None:
        """Drop what is remembered of a group, and the room that its newcomers leave."""
        self._state.changes.harvesting.discard(group_id)
        self._policies.pop(group_id, None)
        self._stalled.discard(group_id)
        if group_id in self._state.groups:
            self._state.groups[group_id].blocks.reserve(self.name, {})

    def _forget_dissolved(self) -> None:
        """Drop what is remembered of groups that have been dissolved since the last time."""
        groups, num_dissolved = self._state.groups, self._state.num_dissolved
        if self._num_dissolved != num_dissolved:
            self._num_dissolved = num_dissolved
            for group_id in [g for g in self._policies.keys() | self._stalled if g not in groups]:
                self._forget(group_id)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _mark(self, group_id: GroupId) -> None:
        """Mark the group's running requests to be checkpointed, offline ones first; none while enough blocks are free.
        Does nothing for a group without running offline requests."""
        group, offline = self._state.groups.get(group_id), self._state.params.offline
        if group is None or not group.queues.num_running_offline or not offline.checkpoints:
            return
        self._marked.add(group_id)
        below_free, blocks = offline.checkpoint_below_free, group.blocks
        candidates: Iterator[RequestState] = iter(())
        if blocks.num_allocatable < below_free * blocks.capacity:
            online = (s for s in reversed(group.queues.running.values()) if not s.is_offline)
            candidates = chain(group.queues.running_offline(), online)
        size = group.limits.block_size
        policy = self._policies.setdefault(group_id, Checkpointing())
        policy.checkpoint(
            CheckpointRow(
                s.request_id, s.num_computed // size, self._checkpoints.num_copied_blocks(s, group),
                s.num_tokens // size,
            )
            for s in candidates if is_copyable(s)
        )

    def _decide(self, group: Group) -> None:
        """Decide how many blocks of each marked request of the group are copied beside its next step."""
        below_free = self._state.params.offline.checkpoint_below_free
        costs = cache(lambda: self.means.loads.exchange_costs(group))  # of this moment, where they are asked for at all
        self._decided[group.group_id] = self._policies[group.group_id].blocks_to_checkpoint(
            group.blocks.num_allocatable, group.blocks.capacity, below_free, lambda: self._budget_blocks(group),
            cache(lambda num_blocks: self._is_cheaper_recomputed(group, num_blocks, num_blocks, costs())),
        )

    def _budget_blocks(self, group: Group) -> int:
        """Blocks that may be copied beside a step like the group's last, or its next: at least one where that delays no
        online decode, or nothing would ever move. A group with nothing to run has no step to delay.

        Between two steps online decodes are in none, so there one block is granted whatever the objective. Its price is
        one block's copy beside the step that follows. Without it no freed request could come back, or be computed
        again, beside decodes that never pause: a batch stood still for good. A request on its way back, which holds
        its blocks already, gets that one beside each step.
        """
        last = next(reversed(group.in_flight.values()), None)
        rows = () if last is None else last.step.rows
        offline, tpot_s = self._state.params.offline, None
        if any(r.num_tokens == 1 and not r.state.is_offline for r in rows):
            tpot_s = objectives(offline.slo, self._state.predictor).tpot_s
        waits = not offline.prefetches and bool(group.queues.stored or group.queues.moving)
        num_blocks = self.means.loads.blocks_within(
            group, lambda step_s: copy_bound_s(step_s, tpot_s), beside_steps=not waits
        )
        if num_blocks is None:
            return USUAL_BLOCKS
        least = 1 if group.in_flight or group.queues.running else USUAL_BLOCKS
        if tpot_s is not None and not self._store.of(group, HostedPhase.IN):
            return num_blocks
        return max(num_blocks, least)

    # --- prefetches -------------------------------------------------------------------------------------------

    def _returning(self, group: Group) -> Iterator[Offer]:
        """Yield offers for the group's freed requests that come back now, and for those of them that are computed again
        sooner. Nothing without room; offline ones only with a budget for copies, and where no online request waits."""
        queues = group.queues
        # Where admission is capped the group is to fit into less memory soon.
        only_online = queues.offline_holders or queues.waiting or group.blocks.admission_cap is not None
        entries = {
            e.state.request_id: e for e in self._store.of(group, HostedPhase.STORED)
            if not (e.awaits_pieces or (e.state.is_offline and only_online))
        }
        budget = self._budget_blocks(group) if entries else 0
        if not budget:  # an online one comes at the price of a block beside each step, as newcomers leave it its room
            budget, entries = 1, {r: entry for r, entry in entries.items() if not entry.state.is_offline}
        chosen = self._chosen_to_return(group, entries) if entries else ()
        if not chosen:
            return
        costs = self.means.loads.exchange_costs(group)
        num_ahead = self._store.blocks_on_their_way(group)
        again: list[RequestId] = []
        for request_id in chosen:
            num_blocks = entries[request_id].num_blocks
            if self._is_cheaper_recomputed(group, num_blocks, budget, costs, num_ahead):
                again.append(request_id)
            else:
                num_ahead += num_blocks
        why = "there is room beside what online requests need"
        if again:
            yield HarvestOffer(groups=(group.group_id,), why=Preemption.SLOW_LINK, compute_again=tuple(again))
        if len(again) < len(chosen):
            yield HarvestOffer(
                groups=(group.group_id,), why=why, come_back=tuple(r for r in chosen if r not in again)
            )

    def _chosen_to_return(self, group: Group, entries: Mapping[RequestId, HostedKV]) -> tuple[RequestId, ...]:
        """The requests of ``entries`` that come back now, in the order of service, online ones first.

        An online request comes back as soon as a newcomer of its size would be let in: newcomers leave its blocks free,
        so no request has them until it is back. An offline one comes back only beside what running requests take in the
        next steps: it would be the next to go.
        """
        in_order = in_service_order((e.state for e in entries.values()), group.limits.scheduling_policy)
        online: list[StoredRow] = []
        offline: list[StoredRow] = []
        for state in in_order:
            row = StoredRow(state.request_id, self._store.blocks_to_return(entries[state.request_id]))
            (offline if state.is_offline else online).append(row)
        num_running = len(group.queues.running) + len(group.queues.moving)
        room = partial(choose_swap_ins, watermark_blocks=group.blocks.watermark, max_num_seqs=group.max_running)
        chosen = room(online, growth_blocks=0, num_free_blocks=group.blocks.num_allocatable, num_running=num_running)
        if len(chosen) < len(online) or not offline:
            return chosen
        num_free = group.blocks.num_allocatable - sum(row.num_blocks for row in online)
        return chosen + room(
            offline, growth_blocks=self._growth(group), num_free_blocks=num_free, num_running=num_running + len(chosen),
        )

    def _is_cheaper_recomputed(
        self, group: Group, num_blocks: int, budget_blocks: int, costs: ExchangeCosts, num_ahead: int = 0
    ) -> bool:
        """Whether it costs the group less to compute a request with this many blocks again than to copy them back,
        behind ``num_ahead`` blocks, at ``budget_blocks`` a step."""
        loads, queues = self.means.loads, group.queues
        num_tokens, num_in_all = num_blocks * group.limits.block_size, num_ahead + num_blocks
        beside = self._state.params.offline.prefetches
        copy = CopyBack(
            num_in_all, budget_blocks, costs.step_s, loads.copied_beside_s(group, num_in_all),
            loads.copies_stall_s(group, num_blocks, beside_steps=beside),
        )
        num_others = len(queues.running) + len(queues.waiting) + len(queues.moving)
        return is_cheaper_recomputed(copy, costs.recompute_s(num_tokens), num_others)

    def _growth(self, group: Group) -> int:
        """Blocks that the group's running requests take in the next ``AHEAD_STEPS`` steps."""
        return group.blocks.num_to_grow(group.queues.running.values(), AHEAD_STEPS)

    def _keep_room(self, group: Group) -> None:
        """Have newcomers to the group leave room for requests stored in host pools, as those were admitted before them;
        without any, leave none."""
        if group.queues.stored:
            group.blocks.reserve_everywhere(self.name, self._store.owed_blocks(group))
        else:
            group.blocks.reserve(self.name, {})

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Bring the offer's requests back, and give up the copies of those that are computed again. Returns the record
        of the latter, if there are any; copies are sent beside the step that follows."""
        assert isinstance(offer, HarvestOffer), offer
        requests = self._state.requests
        for request_id in offer.come_back:
            self._store.bring_back(requests[request_id])
        told = [self._told_again(offer, now_ns)] if offer.compute_again else []
        for request_id in offer.compute_again:
            self._state.counters.checkpoints_dropped += 1
            self._store.give_up(requests[request_id], Preemption(offer.why))
        return [*told]

    def _told_again(self, offer: HarvestOffer, now_ns: int) -> Record:
        """The log record of requests that are computed again, with the times of the link and of steps that decided
        it."""
        group = self._state.groups[offer.groups[0]]
        entries = [self._store.entry_named(request_id) for request_id in offer.compute_again]
        num_blocks = sum(entry.num_blocks for entry in entries if entry is not None)
        step_s = self.means.loads.exchange_costs(group).step_s
        return Record("offline_computed_again", now_ns, {
            "group": group.group_id, "requests": len(entries), "reason": str(offer.why), "blocks": num_blocks,
            "blocks_a_step": self._budget_blocks(group), "step_ms": None if step_s is None else 1e3 * step_s,
            "link_ms": 1e3 * self.means.loads.copied_beside_s(group, num_blocks),
        })

    def after_steps(self, now_ns: int) -> list[Action]:
        """The pieces of KV, to host pools and back, that are sent beside the steps just issued."""
        decided, self._decided = self._decided, {}
        looked_at, self._looked_at = self._looked_at, []
        actions: list[Action] = []
        for group in looked_at:
            actions += self._checkpoints.send(group, decided.get(group.group_id, ()), self._budget_blocks)
            self._note_stall(group)
        return actions

    def _note_stall(self, group: Group) -> None:
        """Count a stall once when the group comes to have nothing to run but requests on their way back."""
        is_stalled = not group.in_flight and not group.paused and bool(
            self._store.of(group, HostedPhase.IN)
        )
        if not is_stalled:
            self._stalled.discard(group.group_id)
        elif group.group_id not in self._stalled:
            self._stalled.add(group.group_id)
            self._state.counters.prefetch_stalls += 1

    def go(self) -> None:
        """Drop all copies in host pools, and the room that newcomers leave for them, as the rung is about to be
        removed."""
        for group in self._state.groups.values():
            group.blocks.reserve(self.name, {})
        self._store.empty()
