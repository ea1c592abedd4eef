"""The drops and restores under way: begun, advanced, followed up, and taken out when a member dies.

Whether to begin one is ``core.watching``'s decision; what happens inside one is ``core.merging``'s and
``core.restoring``'s. Recoveries and what a baseline does (``core.relief``) only count here as users of workers.
"""

from __future__ import annotations

from jettison.core.group import GroupCore
from jettison.core.loads import Loads
from jettison.core.merging import MergePhase, Merging
from jettison.core.ports import Action, CallFailed, LayoutApplied, LayoutOffered, MoveEnded, ShardLoaded
from jettison.core.recovering import Recoveries
from jettison.core.relief import Relief
from jettison.core.request import RequestState
from jettison.core.restoring import RestorePhase, Restoring, fits
from jettison.core.state import ClusterState
from jettison.policy.merge import StagePlan
from jettison.policy.ranges import Pull
from jettison.policy.restore import SplitPlan, plan_splits
from jettison.types import WorkerId


class Moves:
    """One move a worker at a time: whoever begins one has looked at ``busy_workers``."""

    def __init__(self, state: ClusterState, loads: Loads, recoveries: Recoveries, relief: Relief) -> None:
        self.merges: list[Merging] = []
        self.restores: list[Restoring] = []
        self.relief = relief
        self._state = state
        self._loads = loads
        self._recoveries = recoveries

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[Merging | Restoring]:
        """All of them, merges first."""
        return [*self.merges, *self.restores]

    def moving_workers(self) -> set[WorkerId]:
        """Workers whose layout is being changed, or recovered."""
        return {w for move in self.under_way for w in move.worker_ids} | self._recoveries.busy_workers()

    def busy_workers(self) -> set[WorkerId]:
        """Workers where no move may begin."""
        return self.moving_workers() | set(self.relief.worker_ids)

    def restore_of(self, group: GroupCore) -> Restoring | None:
        """The restore that touches a member of the group."""
        return next((r for r in self.restores if set(r.worker_ids) & set(group.worker_ids)), None)

    def is_emptying(self, group: GroupCore) -> bool:
        """A pipeline whose members already serve on their own takes nothing new."""
        return any(r.group is group and r.has_split for r in self.restores)

    # --- beginning --------------------------------------------------------------------------------------------

    def merge(
        self, sources: list[GroupCore], stages: tuple[StagePlan, ...], now_ns: int,
        pulls: tuple[Pull, ...] = (),
    ) -> list[Action]:
        """Begin to make these groups one."""
        merge = Merging(self._state, sources, stages, now_ns, pulls)
        self.merges.append(merge)
        return merge.advance(now_ns)

    def restore(
        self, group: GroupCore, now_ns: int, homes: list[GroupCore] | None = None, *, max_overflow_blocks: int = 0
    ) -> list[Action]:
        """Begin a restore with the first way of splitting that fits, the furthest one if none does.

        ``max_overflow_blocks``: of what does not fit, so much is computed again.
        """
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        split = next((way for way in ways if fits(self._state, group, way, max_overflow_blocks)), ways[0])
        if homes:
            split = SplitPlan(tuple(g.stages for g in homes))
        yields = group.admission_cap_blocks is not None
        restore = Restoring(
            self._state, group, split, now_ns, homes, with_queue=yields, max_overflow_blocks=max_overflow_blocks
        )
        self.restores.append(restore)
        return restore.advance(now_ns)

    def _return_again(self, merge: Merging, now_ns: int) -> list[Action]:
        """A merge failed. If it was to put a turned restore together again, its requests go on returning home."""
        for group in merge.sources:
            homes = [g for g in merge.sources if g is not group]
            if homes and sorted(w for g in homes for w in g.worker_ids) == sorted(group.worker_ids):
                return self.restore(group, now_ns, homes)
        return []

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to a call; None if no move here has made it."""
        answers = (move.on_layout(event, now_ns) for move in self.under_way)
        return next((a for a in answers if a is not None), None)

    def on_shard_loaded(self, event: ShardLoaded, now_ns: int) -> list[Action] | None:
        """Take the end of a load; None if no move here has asked for it."""
        answers = (move.on_shard_loaded(event, now_ns) for move in self.under_way)
        return next((a for a in answers if a is not None), None)

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of a transfer; None if it is none of these."""
        answers = (move.on_move(event, now_ns) for move in self.under_way)
        return next((a for a in answers if a is not None), None)

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop what these moves do with it."""
        return [action for move in self.under_way for action in move.cancel(state)]

    def take_out(self, dead: WorkerId) -> list[Merging | Restoring]:
        """Moves that this worker was part of: they end here, and ``core.recovering`` abandons them."""
        involved = [m for m in self.under_way if dead in m.worker_ids]
        self.merges = [m for m in self.merges if m not in involved]
        self.restores = [r for r in self.restores if r not in involved]
        return involved

    def advance(self, now_ns: int) -> list[Action]:
        """Let each go as far as it can, and do what follows from those that are over."""
        actions: list[Action] = []
        for merge in list(self.merges):
            actions += merge.advance(now_ns)
            if merge.is_over:
                self.merges.remove(merge)
                self._loads.note_settled(merge.worker_ids, now_ns, failed=merge.phase is MergePhase.FAILED)
                if merge.phase is MergePhase.FAILED:
                    actions += self._return_again(merge, now_ns)
        for restore in list(self.restores):
            actions += restore.advance(now_ns)
            if restore.is_over:
                self.restores.remove(restore)
                self._loads.note_settled(restore.worker_ids, now_ns, failed=restore.has_failed)
                if restore.phase is RestorePhase.TURNED and restore.has_split:
                    sources = [*restore.homes, restore.group]
                    actions += self.merge(sources, restore.group.stages, now_ns)
        return actions
