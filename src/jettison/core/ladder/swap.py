"""Swap: KV of the newest requests goes to host pools when memory runs out, and comes back (after InferCept).

Leaving before blocks are missing, within a budget for each step that hides the copies behind it. While a request of a
group is on its way no request of it is recomputed: the blocks that are missing are about to be free, or the request
that returns is about to run, and may then leave again. Newcomers leave room for what is stored: requests that were
admitted first run first. A stored one that is larger than what a split has made of its group waits for a larger group,
and is computed again there.
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
    """Requests of one group that leave, or return, or wait for a larger group."""

    leave: tuple[RequestId, ...] = ()
    come_back: tuple[RequestId, ...] = ()
    give_up: tuple[RequestId, ...] = ()


@register
class SwapRung(Rung):
    """Which requests leave and which return is ``policy.swapping``'s decision."""

    name = "swap"
    rank = 40
    moments = frozenset({Moment.BEFORE_STEPS})
    uses_host_pool = True

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._swap = means.hosted.swap
        self._put_off: set[GroupId] = set()
        """Groups that were touched while their layouts were changing."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """While no request is swapped out; requests leave before the blocks are missing."""
        is_busy = not self.means.hosted.is_idle or (moment is Moment.TICK and bool(self._put_off))
        return Calm(0 if is_busy else None, self.means.state.params.swap.ahead_steps + 1)

    def worker_ids(self) -> Collection[WorkerId]:
        """Workers of groups with a swap."""
        return self._swap.worker_ids()

    # --- deciding ---------------------------------------------------------------------------------------------

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """For each touched group that may plan a step: which requests leave, which return."""
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
        """Pieces are sent behind the step that follows."""
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
        """Pieces within each group's allowance."""
        return self._swap.send(self._budget_blocks)

    def go(self) -> None:
        """Nothing is stored, or on its way: no group waits for that, or keeps room for it."""
        for group in self.means.state.groups.values():
            group.release(self.name, GroupHold.PREEMPTION)
            group.blocks.reserve(self.name, {})

    def _budget_blocks(self, group: Group) -> int:
        return swap_budget(
            self.means.state.params.swap, lambda time_share: self.means.loads.blocks_beside_step(group, time_share)
        )

    # --- views ------------------------------------------------------------------------------------------------

    def _growth(self, state: RequestState, group: Group) -> int:
        limits, ahead = self.means.state.limits, state.num_tokens + self.means.state.params.swap.ahead_steps
        most = min(ahead, state.num_prompt + state.request.params.max_tokens, limits.max_model_len)
        return max(0, group.limits.blocks_for(most) - group.blocks.ledgers[0].num_blocks_of(state.request_id))

    def _growth_of_running(self, group: Group) -> int:
        return sum(self._growth(s, group) for s in group.queues.running.values() if s.ending is None)

    def _leaving(self, group: Group) -> tuple[RequestId, ...]:
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
        stored = {entry.state.request_id: entry for entry in self._swap.of(group, HostedPhase.STORED)}
        if not stored:
            return ()
        in_order = in_service_order((entry.state for entry in stored.values()), group.limits.scheduling_policy)
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
        """Only what is on its way frees what is missing: where it has given way, nothing will."""
        if self._swap.of(group, HostedPhase.OUT, HostedPhase.IN):
            group.hold(self.name, GroupHold.PREEMPTION)
        else:
            group.release(self.name, GroupHold.PREEMPTION)

    def _keep_room(self, group: Group) -> None:
        self._hold_preemption(group)
        group.blocks.reserve_everywhere(self.name, self._swap.owed_blocks(group))


def _reclaimable(state: RequestState, group: Group) -> int:
    return min(ledger.num_exclusive_blocks(state.request_id) for ledger in group.blocks.ledgers)
