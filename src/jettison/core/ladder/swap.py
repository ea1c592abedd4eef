"""Swap: KV of the newest requests goes to host pools when memory runs out, and comes back (after InferCept).

Requests leave before blocks are missing, within a budget for each step that hides the copies behind it. While a request
of a group is on its way no request of it is recomputed: the blocks that are missing are about to be free, or the
request that returns is about to run, and may then leave again. Newcomers leave room for what is stored, as requests
that were admitted first run first: for online requests alone where offline work makes way for them. A stored request
that is larger than what a split has made of its group waits for a larger group, and is computed again there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.ports import Action
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import GroupHold
from jettison.policy.order import in_service_order
from jettison.policy.swapping import StoredRow, SwapRow, choose_swap_ins, choose_swap_outs, swap_budget
from jettison.types import GroupId, RequestId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOffer(Offer):
    """Requests of one group that leave for host pools, come back, or are given up there because their group has become
    too small."""

    leave: tuple[RequestId, ...] = ()
    come_back: tuple[RequestId, ...] = ()
    give_up: tuple[RequestId, ...] = ()


@register
class SwapRung(Rung):
    """Sends running requests' KV to host pools where memory runs out, and back where there is room. ``policy.swapping``
    decides which."""

    name = "swap"
    acts_between_steps = True
    rank = 40
    moments = frozenset({Moment.BEFORE_STEPS})
    uses_host_pool = True

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._swap = means.hosted.swap
        self._put_off: set[GroupId] = set()
        """Groups that were touched while their layouts were changing."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm while host pools have KV of any request (on a tick also while a group was put off). Else calm without
        end while each group has room for the steps that swaps look ahead, and one more."""
        is_busy = not self.means.hosted.is_idle or (moment is Moment.TICK and bool(self._put_off))
        return Calm(0 if is_busy else None, self.means.state.params.swap.ahead_steps + 1)

    def worker_ids(self) -> Collection[WorkerId]:
        """The workers of groups that have a request swapped out or on its way."""
        return self._swap.worker_ids()

    # --- deciding ---------------------------------------------------------------------------------------------

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield offers for each changed group: stored requests that are too large for it now, requests that leave, and
        requests that come back. Requests leave and come back only before a step that the group can plan, and nothing
        happens while its layouts change."""
        state, busy = self.means.state, self.means.moves.changing_workers()
        asked = {g.group_id for g in state.changed_groups()} | self._put_off
        self._put_off = set()
        for group in [state.groups[g] for g in sorted(asked) if g in state.groups]:
            self._hold_preemption(group)
            if not busy.isdisjoint(group.worker_ids):
                self._put_off.add(group.group_id)
                if self.means.moves.restore_of(group) is not None:
                    # Nothing that is stored returns before the restore is over, and that may wait for the queue.
                    group.blocks.reserve(self.name, {})
                continue
            if oversized := self._swap.oversized(group):
                yield SwapOffer(groups=(group.group_id,), why=Preemption.TOO_LARGE, give_up=oversized)
            if not group.paused and len(group.in_flight) < len(group.stages):
                if leave := self._leaving(group):
                    yield SwapOffer(groups=(group.group_id,), why="memory runs out", leave=leave)
                if not self._swap.of(group, HostedPhase.OUT) and (come_back := self._returning(group)):
                    yield SwapOffer(groups=(group.group_id,), why="there is room again", come_back=come_back)
            self._keep_room(group)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Begin what an offer says: requests leave, come back, or are given up and computed again. Returns no actions:
        pieces are sent behind the step that follows."""
        assert isinstance(offer, SwapOffer), offer
        requests, swap = self.means.state.requests, self._swap
        for request_id in offer.leave:
            swap.send_out(requests[request_id])
        for request_id in offer.come_back:
            swap.bring_back(requests[request_id])
        for request_id in offer.give_up:
            swap.give_up(requests[request_id], Preemption.TOO_LARGE)
        return []

    def after_steps(self, now_ns: int) -> list[Action]:
        """Issue pieces of KV on their way to or from host pools, within its allowance: behind the steps just issued, or
        at once where a group has none in flight. Returns the actions."""
        return self._swap.send(self._budget_blocks)

    def go(self) -> None:
        """Remove from every group the hold on preemption and the room kept for swapped requests, as the rung is about
        to be removed."""
        for group in self.means.state.groups.values():
            group.release(self.name, GroupHold.PREEMPTION)
            group.blocks.reserve(self.name, {})

    def _budget_blocks(self, group: Group) -> int:
        """Blocks that may be copied beside a group's step, by the swap settings."""
        return swap_budget(
            self.means.state.params.swap, lambda time_share: self.means.loads.blocks_beside_step(group, time_share)
        )

    # --- views ------------------------------------------------------------------------------------------------

    def _growth(self, state: RequestState, group: Group) -> int:
        """Blocks that a running request takes in the steps that swaps look ahead, within its own limits; 0: none."""
        limits, ahead = self.means.state.limits, state.num_tokens + self.means.state.params.swap.ahead_steps
        most = min(ahead, state.num_prompt + state.request.params.max_tokens, limits.max_model_len)
        return max(0, group.limits.blocks_for(most) - group.blocks.ledgers[0].num_blocks_of(state.request_id))

    def _growth_of_running(self, group: Group) -> int:
        """Blocks that all running requests of a group take in the steps that swaps look ahead, without requests that
        are ending."""
        return sum(self._growth(s, group) for s in group.queues.running.values() if s.ending is None)

    def _leaving(self, group: Group) -> tuple[RequestId, ...]:
        """The requests of a group that leave for host pools now, as growth needs more blocks than are free or about to
        be; else empty."""
        growth, free = self._growth_of_running(group), group.blocks.num_allocatable
        out = self._swap.of(group, HostedPhase.OUT)
        leaving = sum(_reclaimable(entry.state, group) for entry in out)
        if growth <= free + leaving:
            return ()
        rows = [
            SwapRow(
                s.request_id, _reclaimable(s, group), group.limits.blocks_for(s.num_computed), self._growth(s, group)
            )
            for s in reversed(group.queues.running.values())
            if s.num_pending == 0 and s.is_settled
        ]
        slots = self._swap.num_free_slots(group.worker_ids)
        return tuple(choose_swap_outs(
            rows, growth_blocks=growth, num_free_blocks=free, num_leaving_blocks=leaving, num_free_slots=slots
        ))

    def _returning(self, group: Group) -> tuple[RequestId, ...]:
        """The stored requests of a group that come back now, in the order of service; empty: none is stored, or none
        has room. Where offline work makes way for online requests, online ones come first, and offline ones where they
        are let in, and no online request waits."""
        stored = {entry.state.request_id: entry for entry in self._swap.of(group, HostedPhase.STORED)}
        if not stored:
            return ()
        in_order = in_service_order((entry.state for entry in stored.values()), group.limits.scheduling_policy)
        queues = group.queues
        if self.means.state.params.offline.slo_aware:
            only_online = queues.offline_holders or queues.waiting or group.blocks.admission_cap is not None
            in_order = [s for s in in_order if not s.is_offline] + [
                s for s in in_order if s.is_offline and not only_online]
        rows = [StoredRow(s.request_id, self._swap.blocks_to_return(stored[s.request_id])) for s in in_order]
        return tuple(choose_swap_ins(
            rows,
            growth_blocks=self._growth_of_running(group),
            num_free_blocks=group.blocks.num_allocatable,
            watermark_blocks=group.blocks.watermark,
            num_running=len(group.queues.running) + len(group.queues.moving),
            max_num_seqs=group.max_running,
        ))

    def _hold_preemption(self, group: Group) -> None:
        """Keep the group from preempting requests while one of them is on its way to or from a host pool, as that frees
        what is missing; else let it."""
        if self._swap.of(group, HostedPhase.OUT, HostedPhase.IN):
            group.hold(self.name, GroupHold.PREEMPTION)
        else:
            group.release(self.name, GroupHold.PREEMPTION)

    def _keep_room(self, group: Group) -> None:
        """Have newcomers to the group leave the room that its stored requests are owed, and hold or release its
        preemption."""
        self._hold_preemption(group)
        group.blocks.reserve_everywhere(self.name, self._swap.owed_blocks(group))


def _reclaimable(state: RequestState, group: Group) -> int:
    """Blocks that the group gains if the request leaves: those that it shares with no other, in the stage with the
    fewest."""
    return min(ledger.num_exclusive_blocks(state.request_id) for ledger in group.blocks.ledgers)
