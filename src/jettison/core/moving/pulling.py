"""Shards that members need before they can drop: mapped beside their KV, fetched from peers, given back on failure.

Needed only where no order of a merged group's stages lies inside what its members hold (``policy.ranges``). The old
groups serve on while shards travel behind their activations; ``core.moving.merging`` pauses them around the mapping.

    map() --all mapped--> send() --all here--> is_idle
      '--a member has no room--'--a shard can be had nowhere--> give_back() -> is_given_back, layouts as before
"""

from __future__ import annotations

from jettison.core.moving.gather import Gather
from jettison.core.moving.relayout import Relayout
from jettison.core.pending import Owner
from jettison.core.ports import Action
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import Pull
from jettison.types import WorkerId


class Pulling:
    """The shards that members of one merge need before they can drop: mapped, fetched, and given back on failure."""

    def __init__(self, cluster: ClusterState, owner: Owner, pulls: tuple[Pull, ...]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._pulls = pulls
        self._relayouts: list[Relayout] = []
        self._fetching = Gather(cluster, owner, tuple(sorted({w for p in pulls for w in (p.src, p.dst)})))
        self.before: dict[WorkerId, LayoutSpec] = {}
        """Layouts of the members that receive shards, before anything was mapped."""
        self.failure: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being mapped and no shard is on its way."""
        return self._fetching.is_idle and all(r.is_over for r in self._relayouts)

    def map(self) -> list[Action]:
        """Begin to map the shards at the members that need them, where KV shrinks for that; return the actions. The
        members' groups must stand still."""
        actions: list[Action] = []
        for worker_id in sorted({p.dst for p in self._pulls}):
            layout = self._cluster.workers[worker_id].layout
            self.before[worker_id] = layout
            wanted = layout.shards | {p.shard for p in self._pulls if p.dst == worker_id}
            actions += self._change(worker_id, LayoutSpec(wanted, layout.kv_layers, layout.retained), shrinks=True)
        return actions

    def send(self) -> list[Action]:
        """Begin to fetch the shards that are mapped and not intact; return the actions. No action where some member had
        no room, which ``failure`` then says."""
        self.failure = self.failure or next((r.failure for r in self._relayouts if r.failure is not None), None)
        if self.failure is not None:
            return []
        missing = (p for p in self._pulls if p.shard in self._cluster.workers[p.dst].unfilled)
        return [action for p in missing for action in self._fetching.fetch(p.dst, p.shard, p.src)]

    def give_back(self) -> list[Action]:
        """Begin to unmap what was mapped in vain; return the actions, none where every layout is as before. May be
        called again for members that failed to."""
        self._relayouts = []
        actions: list[Action] = []
        for worker_id, layout in self.before.items():
            if self._cluster.workers[worker_id].layout != layout:
                actions += self._change(worker_id, layout, shrinks=False)
        return actions

    @property
    def is_given_back(self) -> bool:
        """Whether every member's layout is as it was before anything was mapped."""
        return all(self._cluster.workers[w].layout == layout for w, layout in self.before.items())

    def _change(self, worker_id: WorkerId, spec: LayoutSpec, *, shrinks: bool) -> list[Action]:
        """Begin to change one worker's layout; return the actions. ``shrinks``: its blocks may have to move."""
        relayout = Relayout(self._cluster, self._owner, self._cluster.workers[worker_id], spec, shrinks=shrinks)
        self._relayouts.append(relayout)
        return relayout.start()

    def note_answers(self) -> list[Action]:
        """Take note of answers to calls and transfers. Where a shard could not be fetched from anywhere, call the
        others off and return the actions."""
        why = self._fetching.take_failure()
        if why is None:
            return []
        self.failure = why
        return self._fetching.call_off()
