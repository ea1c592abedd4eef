"""Swap: a running request stops, its blocks go to host pools piece by piece, and come back.

    OUT      not scheduled; its blocks, which stay its own, are copied to the host pools of its stages, piece by piece
    LEAVING  it runs on; its slots are free when the pieces under way have ended

    OUT --> STORED --> IN --> runs on                        (the phases of ``core.moving.hostbook``)
    OUT --give_way--> LEAVING --> forgotten

Rule 1. The allowance of a group is renewed with every step issued, and where no step is in flight. Leavers go before
        returners.
Rule 2. A leaver has no step in flight, so nothing writes what is being read; sealed blocks that it shares may be read
        meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jettison.core.moving.allowances import Allowances
from jettison.core.moving.hostbook import HostBook
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.moving.store import CheckpointStore
from jettison.core.ports import Action, SendKV
from jettison.core.preemption import Preempted, Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import changed, hosted_only
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import GroupId, WorkerId


class Swap(HostBook):
    """The KV in host pools of a cluster's swapped-out requests."""

    def __init__(self, cluster: ClusterState, store: CheckpointStore) -> None:
        super().__init__(cluster)
        self._store = store
        self._allowances = Allowances(cluster)

    def groups(self) -> list[Group]:
        """The groups of swapped-out requests, in order of formation; without requests that run on again."""
        ids = {e.state.group_id for e in self.entries.values() if e.phase is not HostedPhase.LEAVING}
        return [self._cluster.groups[g] for g in sorted(ids)]

    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The workers of the groups of swapped-out requests, in order; empty: none."""
        return tuple(sorted({w for group in self.groups() for w in group.worker_ids}))

    def num_free_slots(self, worker_ids: Iterable[WorkerId]) -> int:
        """Free slots of the fullest of these workers' pools."""
        return min(self.pools[w].num_free for w in worker_ids)

    def owed(self, group: Group) -> list[HostedKV]:
        """As in ``HostBook``; where offline work makes way for online requests, no newcomer waits for offline ones."""
        makes_way = self._cluster.params.offline.slo_aware
        return [e for e in super().owed(group) if not (makes_way and e.state.is_offline)]

    def send_out(self, state: RequestState) -> None:
        """Begin to swap a running request out: it stops, and its blocks will be copied. This counts as a preemption,
        and a checkpoint of it is dropped. The caller has made sure of free slots for all of its blocks, which are taken
        here."""
        group = self._cluster.groups[state.group_id]
        if (checkpoint := self._store.entry(state)) is not None:
            self._store.forget(checkpoint)
        entry = self.open(state, HostedPhase.OUT, group.limits.blocks_for(state.num_computed))
        self._travelling[state.request_id] = entry
        for worker_id in entry.pools.worker_ids:
            self.pools[worker_id].hold(state.request_id, entry.num_blocks)
        group.queues.take_out(state)
        state.phase = Phase.MOVING
        state.residences = (group.residence.at(state.num_computed), entry.pools)
        group.queues.moving[state.request_id] = state
        group.counters.num_preemptions += 1
        state.num_preemptions += 1
        told = Preempted(group.group_id, Preemption.SWAP, state.request_id, 0)
        self._cluster.changes.preempted.append(told)

    def send(self, budget_blocks: Callable[[Group], int]) -> list[Action]:
        """Issue pieces behind the steps just issued, within each group's allowance (rule 1); return the actions."""
        by_group: dict[GroupId, list[HostedKV]] = {}
        for entry in self._travelling.values():
            by_group.setdefault(entry.state.group_id, []).append(entry)
        actions: list[Action] = []
        for group_id, travelling in sorted(by_group.items()):
            is_copying = any(e.state.transfers for e in travelling)
            allowance = self._allowances.of(self._cluster.groups[group_id], budget_blocks, is_copying=is_copying)
            for entry in sorted(travelling, key=lambda e: (e.phase is HostedPhase.IN, e.number)):
                num_blocks, pieces = self.send_some(entry, allowance.left)
                allowance.left -= num_blocks
                actions += pieces
        return actions

    def _send(self, entry: HostedKV, num_blocks: int) -> list[Action]:
        """Issue a piece of ``num_blocks``, to host pools or back; return the actions."""
        if entry.phase is not HostedPhase.OUT:
            return super()._send(entry, num_blocks)
        state, workers = entry.state, self._cluster.workers
        piece = slice(entry.num_sent, entry.num_sent + num_blocks)
        entry.num_sent += num_blocks
        actions: list[Action] = []
        for (worker_id, _), layers in entry.pools.places.items():
            blocks = workers[worker_id].ledger.table(state.request_id).ids[piece]
            slots = self.pools[worker_id].slots(state.request_id)[piece]
            sent = SendKV(
                self._cluster.book.next_transfer_id, worker_id, worker_id, layers, tuple(blocks), tuple(slots),
                to_host=True,
            )
            actions.append(self._issue(entry, sent))
        return actions

    def _note_arrived(self, entry: HostedKV) -> None:
        """Note how much of a request's KV has arrived, in host pools or back in arenas: all blocks sent have."""
        super()._note_arrived(entry)
        if entry.phase is HostedPhase.OUT:
            before, entry.pools = entry.pools, entry.pools.at(self._sent_tokens(entry))
            entry.state.residences = changed(entry.state.residences, before, entry.pools)

    def _has_arrived(self, entry: HostedKV) -> None:
        """Store a request with all of its KV in host pools, and free its blocks; or let one that is back run on."""
        if entry.phase is not HostedPhase.OUT:
            super()._has_arrived(entry)
            self._cluster.counters.swapped_in_blocks += entry.num_blocks
            return
        state, group = entry.state, self._group(entry)
        for ledger in group.blocks.ledgers:
            ledger.release(state.request_id)
        del self._travelling[state.request_id]
        entry.phase, entry.num_sent = HostedPhase.STORED, 0
        state.residences = hosted_only(state.residences)
        group.queues.keep_stored(state)
        self._cluster.counters.swapped_out_blocks += entry.num_blocks

    def break_off(self, entry: HostedKV) -> None:
        """Stop a request on its way. On the way back it is stored again. On the way out all of its blocks are still its
        own, and nothing has been written since: it runs on."""
        if entry.phase is not HostedPhase.OUT:
            super().break_off(entry)
            return
        del self._travelling[entry.state.request_id]
        entry.phase = HostedPhase.LEAVING
        self._group(entry).queues.resume(entry.state)
        if not entry.state.transfers:
            self.forget(entry)

    def _check(self, entry: HostedKV) -> None:
        """A request that runs on still has pieces under way; ``HostBook`` checks any other. Raises AssertionError
        otherwise."""
        if entry.phase is HostedPhase.LEAVING:
            assert self._pieces(entry.state), f"{entry.state} leaves no slots behind"
        else:
            super()._check(entry)
