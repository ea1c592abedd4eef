"""Drop, merge and exchange as one phase table (KunServe v3 sections 4.1 and 4.2; design 5.1).

    DRAIN     only where members lack shards of their stages: old groups finish the step in flight ...
    MAP       ... members map the shards they lack beside their KV ...
    PULL      ... and fetch them (``core.moving.pulling``) while the old groups serve on
    QUIESCE   old groups finish the step in flight               (at most one step)
    REMAP     every member drops shards outside its range, at once; their pages become KV capacity
    EXCHANGE  the merged group serves; running requests of the old groups are stalled until the KV of the layers
              that changed hands has arrived; queued requests run meanwhile
    SETTLED   every request is in place, the KV of foreign layers is freed
    GIVE_BACK a shard could not be fetched: members unmap what they mapped for it, and the merge has FAILED
    REVERTING a member could not remap: the others map everything again (tried again until it works)
    REFILLING ... and fetch shards overwritten meanwhile (``core.moving.gather``; a shard that could not be fetched is
              asked for anew)
    FAILED    ... and the old groups serve on as if nothing had happened

Transfers, landing space and pages under foreign KV: ``core.moving.exchanging``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from jettison.core.moving.exchanging import Exchange
from jettison.core.moving.gather import Gather
from jettison.core.moving.pulling import Pulling
from jettison.core.moving.relayout import RETRY_NS, Relayout, RelayoutPhase
from jettison.core.ports import Action, Record
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import DROP, GroupHold
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import Pull, StagePlan
from jettison.types import WorkerId


class MergePhase(StrEnum):
    """The phases of one merge, in the order of the module's table."""

    DRAIN = "drain"
    MAP = "map"
    PULL = "pull"
    QUIESCE = "quiesce"
    REMAP = "remap"
    EXCHANGE = "exchange"
    SETTLED = "settled"
    GIVE_BACK = "give_back"
    REVERTING = "reverting"
    REFILLING = "refilling"
    FAILED = "failed"


class Merging:
    """One merge of the groups ``sources`` into one group with ``stages``: it drops layers, then exchanges KV."""

    def __init__(
        self, cluster: ClusterState, sources: list[Group], stages: tuple[StagePlan, ...], now_ns: int,
        pulls: tuple[Pull, ...] = (),
    ) -> None:
        self._cluster = cluster
        self._sources = sources
        self._stages = {s.worker_id: s.layers for s in stages}
        self._stage_order = stages
        self.phase = MergePhase.DRAIN if pulls else MergePhase.QUIESCE
        self._pulling = Pulling(cluster, self, pulls)
        self.group: Group | None = None
        self.failure: str | None = None
        self._started_ns = self._formed_ns = now_ns
        self._relayouts: list[Relayout] = []
        self._before: dict[WorkerId, LayoutSpec] = {}
        self._exchange = Exchange(cluster, self, stages)
        self._refilling = Gather(cluster, self, self.worker_ids)
        """The present attempt at REFILLING, or none yet."""
        self._retry_ns = 0
        for group in sources:
            group.hold(DROP, GroupHold.STEPS)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The members of the merge, in pipeline order."""
        return tuple(self._stages)

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of the merged group, in pipeline order."""
        return self._stage_order

    @property
    def sources(self) -> tuple[Group, ...]:
        """The groups that are merged."""
        return tuple(self._sources)

    @property
    def broken_groups(self) -> Sequence[Group]:
        """The groups that cannot serve on if the merge is abandoned now, as their members' layouts are changing; empty:
        none."""
        if self.group is not None:
            return (self.group,)
        return () if self._is_untouched else self.sources

    @property
    def _is_untouched(self) -> bool:
        """Whether no layout has been changed for this merge yet."""
        return self.phase in (MergePhase.DRAIN, MergePhase.QUIESCE) and not self._pulling.before

    @property
    def is_over(self) -> bool:
        """Whether the merge has ended: settled or failed."""
        return self.phase in (MergePhase.SETTLED, MergePhase.FAILED)

    @property
    def waits_for_time(self) -> bool:
        """Whether its next step may come without an event of its members."""
        retries = self.phase in (MergePhase.GIVE_BACK, MergePhase.REVERTING, MergePhase.REFILLING)
        return retries or (self.phase is MergePhase.EXCHANGE and self._exchange.waits_for_time)

    # --- events -----------------------------------------------------------------------------------------------

    def go_on(self, now_ns: int) -> list[Action]:
        """Go on after a call or a transfer of this merge has been answered; return the actions."""
        if self._refilling.take_failure() is not None:
            self._retry_ns = now_ns + RETRY_NS
        return self._pulling.note_answers() + self._exchange.note_answers(now_ns) + self.advance(now_ns)

    def cancel(self, state: RequestState) -> list[Action]:
        """Stop the transfers of a request that is ending, unless another request needs the prefix that they carry;
        return the actions."""
        return self._exchange.cancel(state)

    def abandon(self) -> None:
        """Give the merge up, as a member is dead. Where no layout has changed yet, the old groups serve on."""
        if self._is_untouched:
            for group in self._sources:
                group.release(DROP, GroupHold.STEPS)

    def _is_still(self, *, moves_blocks: bool) -> bool:
        """Whether no step of the old groups is in flight and, with ``moves_blocks``, no KV of a move that gave way is
        on its way here."""
        if any(group.in_flight for group in self._sources):
            return False
        return not moves_blocks or not self._cluster.book.lands_at(self.worker_ids)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows; return the actions, none while the present phase lasts."""
        if self.phase in (MergePhase.DRAIN, MergePhase.MAP, MergePhase.PULL, MergePhase.GIVE_BACK):
            return self._advance_pulls(now_ns)
        if self.phase is MergePhase.QUIESCE and self._is_still(moves_blocks=bool(self._pulling.before)):
            return self._remap(now_ns)
        if self.phase is MergePhase.REMAP and all(r.is_over for r in self._relayouts):
            if any(r.phase is RelayoutPhase.FAILED for r in self._relayouts):
                return self._revert(now_ns)
            return self._form(now_ns) + self._go_on(now_ns)
        if self.phase is MergePhase.REVERTING and all(r.is_over for r in self._relayouts):
            return self._refill(now_ns)
        if self.phase is MergePhase.REFILLING and self._refilling.is_idle:
            return self._fetch(now_ns)
        if self.phase is MergePhase.EXCHANGE:
            return self._go_on(now_ns)
        return []

    # --- pull -------------------------------------------------------------------------------------------------

    def _advance_pulls(self, now_ns: int) -> list[Action]:
        """Go on with shards that members lack: map them, fetch them, or give them back. Returns the actions."""
        pulling = self._pulling
        if self.phase is MergePhase.DRAIN and self._is_still(moves_blocks=True):
            self.phase = MergePhase.MAP
            return pulling.map()
        if not pulling.is_idle:
            return []
        if self.phase is MergePhase.MAP:
            self.phase = MergePhase.PULL
            self._unpause()
            actions = pulling.send()
            return actions or self._advance_pulls(now_ns)
        if self.phase is MergePhase.PULL:
            if pulling.failure is not None:
                self.failure = pulling.failure
                self.phase = MergePhase.GIVE_BACK
                return pulling.give_back() or self._reverted(now_ns)
            self.phase = MergePhase.QUIESCE
            for group in self._sources:
                group.hold(DROP, GroupHold.STEPS)
            return self.advance(now_ns)
        if self.phase is MergePhase.GIVE_BACK and pulling.is_given_back:
            return self._reverted(now_ns)
        if self.phase is MergePhase.GIVE_BACK and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + RETRY_NS
            return pulling.give_back()
        return []

    def _unpause(self) -> None:
        """Let the old groups serve again; reap requests that ended while ledgers were locked."""
        for group in self._sources:
            group.release(DROP, GroupHold.STEPS)
            for state in group.queues.all_requests():
                self._cluster.reap(state)

    # --- remap ------------------------------------------------------------------------------------------------

    def _remap(self, now_ns: int) -> list[Action]:
        """Begin to change every member's layout to its stage; return the actions."""
        self.phase = MergePhase.REMAP
        actions: list[Action] = []
        self._exchange.plan(state for group in self._sources for state in group.queues.running.values())
        for worker_id in self._stages:
            worker = self._cluster.workers[worker_id]
            self._before[worker_id] = self._pulling.before.get(worker_id, worker.layout)
            # A member that runs new layers keeps the KV of its other layers, too: its blocks may get fewer.
            is_new_range = worker_id in self._pulling.before
            relayout = Relayout(self._cluster, self, worker, self._exchange.spec(worker_id), shrinks=is_new_range)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions

    def _revert(self, now_ns: int) -> list[Action]:
        """Give the merge up, as some member refused: members that have dropped map everything again. No request has
        used the new blocks; cached ones are forgotten. Returns the actions."""
        self.phase = MergePhase.REVERTING
        self.failure = next(r.failure for r in self._relayouts if r.failure is not None)
        self._exchange.call_off()
        # Also members that refused, if they had mapped shards for this merge.
        applied = [r.worker for r in self._relayouts if r.worker.layout != self._before[r.worker.worker_id]]
        self._relayouts = []
        for worker in applied:
            # Free and cached blocks of the dropped layers' arenas were unmapped: their content is gone.
            worker.ledger.forget_cached()
        actions: list[Action] = []
        for worker in applied:
            actions += self._take_back(worker)
        return actions or self._reverted(now_ns)

    def _take_back(self, worker: WorkerState) -> list[Action]:
        """Begin to give a worker its former layout; return the actions."""
        relayout = Relayout(self._cluster, self, worker, self._before[worker.worker_id], shrinks=True)
        self._relayouts.append(relayout)
        return relayout.start()

    def _refill(self, now_ns: int) -> list[Action]:
        """After a revert, try again at the members that failed, else fetch what was overwritten; return the actions."""
        failed = [r for r in self._relayouts if r.phase is RelayoutPhase.FAILED]
        if failed:
            if now_ns < self._retry_ns:
                return []
            self._retry_ns = now_ns + RETRY_NS
            self._relayouts = [r for r in self._relayouts if r not in failed]
            return [action for r in failed for action in self._take_back(r.worker)]
        self.phase = MergePhase.REFILLING
        self._relayouts = []
        self._retry_ns = 0
        return self._fetch(now_ns)

    def _fetch(self, now_ns: int) -> list[Action]:
        """Fetch missing shards; return the actions. When no fetch is under way and some shard is still missing, every
        holder is asked again. Where none is missing, the old groups serve on."""
        lacking = [w for w in self._stages if self._cluster.workers[w].unfilled]
        if not lacking:
            return self._reverted(now_ns)
        if now_ns < self._retry_ns:
            return []
        self._refilling = Gather(self._cluster, self, self.worker_ids)
        return [action for w in lacking for action in self._refilling.fetch_all(w)]

    def _reverted(self, now_ns: int) -> list[Action]:
        """End a failed merge: the old groups serve on, with empty caches. Returns the record."""
        self.phase = MergePhase.FAILED
        for group in self._sources:
            group.release(DROP, GroupHold.STEPS)
            for ledger in group.blocks.ledgers:
                ledger.forget_cached()
            for state in group.queues.all_requests():
                state.num_sealed = 0
                # Requests that ended while the ledgers were locked.
                self._cluster.reap(state)
        return [Record("drop_failed", now_ns, {"reason": self.failure, "workers": list(self._stages)})]

    # --- merge ------------------------------------------------------------------------------------------------

    def _form(self, now_ns: int) -> list[Action]:
        """Make the members one group, and dissolve the old ones; return the record. Requests with their KV in place go
        on; others stall; queues are joined."""
        self.phase, self._formed_ns = MergePhase.EXCHANGE, now_ns
        results = [r.result for r in self._relayouts if r.result is not None]
        self._relayouts = []
        for worker_id in self._pulling.before:
            # Its blocks lack KV of the layers that it has just taken on, until the exchange has brought it.
            self._cluster.workers[worker_id].ledger.forget_cached()
        group = self._cluster.form_group(self._stage_order)
        self.group = group
        self._cluster.changes.merged.add(group.group_id)
        states: list[RequestState] = []
        for source in self._sources:
            states += source.queues.take_all()
            self._cluster.dissolve(source)
        self._exchange.begin(group, states, now_ns)
        for state in group.queues.all_requests():
            self._cluster.reap(state)  # it ended while ledgers were locked
        counters = self._cluster.counters
        counters.num_drops += 1
        counters.drop_ns += now_ns - self._started_ns
        counters.remap_ns += max((r.duration_ns for r in results), default=0)
        return [
            Record(
                "drop",
                now_ns,
                {
                    "workers": list(self._stages),
                    "stages": [tuple(layers) for layers in self._stages.values()],
                    "group": group.group_id,
                    "bytes_to_kv": sum(r.bytes_to_kv for r in results),
                    "remap_ms": max((r.duration_ns for r in results), default=0) / 1e6,
                    "map_calls": sum(r.num_map_calls for r in results),
                    "decision_to_serving_ms": (now_ns - self._started_ns) / 1e6,
                    "capacity_blocks": group.blocks.capacity,
                    "stalled": self._exchange.num_stalled,
                    "waiting": len(group.queues.waiting),
                },
            )
        ]

    def _go_on(self, now_ns: int) -> list[Action]:
        """Go on with the exchange, and end the merge with it; return the actions, and the record of the end."""
        actions = self._exchange.advance(now_ns)
        if self._exchange.is_over:
            assert self.group is not None
            self.phase = MergePhase.SETTLED
            in_place_ns = self._exchange.in_place_ns
            assert in_place_ns is not None
            done = {
                "group": self.group.group_id,
                "bytes": self._exchange.num_moved_bytes,
                "requests": {str(k): n for k, n in sorted(self._exchange.num_by_choice.items())},
                "ms": (now_ns - self._started_ns) / 1e6,
                "in_place_ms": (in_place_ns - self._formed_ns) / 1e6,
                "capacity_blocks": self.group.blocks.capacity,
            }
            actions.append(Record("exchange_done", now_ns, done))
        return actions
