"""Shards that members need before they can drop: mapped beside their KV, fetched from peers, given back on failure.

Needed only where no order of a merged group's stages lies inside what its members hold (``policy.ranges``). The old
groups serve on while shards travel behind their activations; ``core.merging`` pauses them around the mapping.

    map() --all mapped--> send() --all here--> is_complete
      '--a member has no room--'--a shard can be had nowhere--> give_back() -> is_given_back, layouts as before
"""

from __future__ import annotations

from jettison.core.ports import (
    Action,
    CallFailed,
    LayoutApplied,
    LayoutOffered,
    LoadShard,
    MoveEnded,
    SendShard,
    ShardLoaded,
)
from jettison.core.relayout import Leftovers, Relayout
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec
from jettison.policy.ranges import Pull
from jettison.types import MoveId, WorkerId


class Pulling:
    """The pulls of one merge."""

    def __init__(self, cluster: ClusterState, pulls: tuple[Pull, ...]) -> None:
        self._cluster = cluster
        self._pulls = pulls
        self._relayouts: list[Relayout] = []
        self._moves: dict[MoveId, SendShard] = {}
        self._loads: dict[int, LoadShard] = {}
        self.before: dict[WorkerId, LayoutSpec] = {}
        """Layouts of the members that receive something, before anything was mapped."""
        self.failure: str | None = None
        self.num_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is being mapped or is on its way."""
        return not self._moves and not self._loads and all(r.is_over for r in self._relayouts)

    def map(self) -> list[Action]:
        """Make room for the shards: KV shrinks. The members' groups must stand still."""
        actions: list[Action] = []
        for worker_id in sorted({p.dst for p in self._pulls}):
            layout = self._cluster.workers[worker_id].layout
            self.before[worker_id] = layout
            wanted = layout.shards | {p.shard for p in self._pulls if p.dst == worker_id}
            actions += self._change(worker_id, LayoutSpec(wanted, layout.kv_layers, layout.retained), shrinks=True)
        return actions

    def send(self) -> list[Action]:
        """Fetch what is mapped and not intact; nothing where some member had no room."""
        self.failure = self.failure or next((r.failure for r in self._relayouts if r.failure is not None), None)
        if self.failure is not None:
            return []
        actions: list[Action] = []
        for pull in self._pulls:
            if pull.shard in self._cluster.workers[pull.dst].unfilled:
                move = self._cluster.send_shard(pull.src, pull.dst, pull.shard)
                self._moves[move.move_id] = move
                actions.append(move)
        return actions

    def give_back(self) -> list[Action]:
        """Unmap what was mapped in vain. May be called again for those that could not."""
        self._relayouts = []
        actions: list[Action] = []
        for worker_id, layout in self.before.items():
            if self._cluster.workers[worker_id].layout != layout:
                actions += self._change(worker_id, layout, shrinks=False)
        return actions

    @property
    def is_given_back(self) -> bool:
        """Whether every layout is as it was."""
        return all(self._cluster.workers[w].layout == layout for w, layout in self.before.items())

    def _change(self, worker_id: WorkerId, spec: LayoutSpec, *, shrinks: bool) -> list[Action]:
        relayout = Relayout(self._cluster, self._cluster.workers[worker_id], spec, shrinks=shrinks)
        self._relayouts.append(relayout)
        return relayout.start()

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed) -> list[Action] | None:
        """Take the answer to a call of these pulls; None if it is not one."""
        if isinstance(event, CallFailed) and event.call_id in self._loads:
            load = self._loads.pop(event.call_id)
            self.failure = f"worker {load.worker_id} could not get {load.shard}: {event.message}"
            return []
        for relayout in self._relayouts:
            actions = relayout.on(event)
            if actions is not None:
                return actions
        return None

    def on_shard_loaded(self, event: ShardLoaded) -> bool:
        """Take the end of a load from the model folder; whether it was one of these."""
        load = self._loads.pop(event.call_id, None)
        if load is None:
            return False
        self._cluster.workers[load.worker_id].unfilled.discard(load.shard)
        return True

    def on_move(self, event: MoveEnded) -> list[Action] | None:
        """Take the end of a transfer; what did not arrive is read from the model folder. None if it is not ours."""
        move = self._moves.pop(event.move_id, None)
        if move is None:
            return None
        self.num_bytes += event.num_bytes
        self._cluster.counters.pulled_bytes += event.num_bytes
        if event.complete:
            self._cluster.workers[move.dst].unfilled.discard(move.shard)
            return []
        load = LoadShard(move.dst, self._cluster.new_call(), move.shard)
        self._loads[load.call_id] = load
        return [load]

    def abandon(self) -> Leftovers:
        """A member is dead: what is still under way."""
        return Leftovers([r for r in self._relayouts if not r.is_over], dict(self._loads), set(self._moves))
