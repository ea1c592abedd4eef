"""The drops and restores under way, and workers that leave for sleep: begun, advanced, followed up, and taken out when
a member dies.

The ladder (``core.ladder``) decides whether to begin one, except after a move that ended half-way: a restore called off
after its split is merged again, and where that merge fails it goes on. The phases of a move are in
``core.moving.merging`` and ``core.moving.restoring``. Recoveries only count here as users of workers.

An event concerns few moves, so each is found by its workers: a worker is in one move at a time. A move is advanced when
a group on its workers was touched, when a call or transfer of it was answered or it got an order, when its last advance
did something, and on every event while it waits for the clock or for prices (``waits_for_time``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set

from jettison.core.changes import WaitsFor
from jettison.core.load.views import Loads
from jettison.core.moving.firstserved import FirstServed
from jettison.core.moving.leaving import Leaving
from jettison.core.moving.merging import MergePhase, Merging
from jettison.core.moving.recovering import Recoveries
from jettison.core.moving.restoring import RestorePhase, Restoring
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import RESTORE
from jettison.core.state import ClusterState
from jettison.memory.stages import Pull, SplitPlan, StagePlan
from jettison.types import WorkerId

Move = Merging | Restoring | Leaving


class Moves:
    """All merges, restores and leavings under way, at most one a worker. A caller that begins one has looked at
    ``moving_workers``."""

    def __init__(
        self, state: ClusterState, loads: Loads, recoveries: Recoveries,
        clear: Callable[[Collection[WorkerId]], list[Action]],
    ) -> None:
        """``clear`` breaks off KV on its way to or from arenas of these workers: their layouts change next."""
        self.merges: list[Merging] = []
        self.restores: list[Restoring] = []
        self.leavings: list[Leaving] = []
        self.first_served = FirstServed()
        self._state = state
        self._loads = loads
        self._recoveries = recoveries
        self._clear = clear
        self._of_worker: dict[WorkerId, Move] = {}
        """The move under way of each member."""
        self._number_of: dict[Move, int] = {}
        """Rank of each move in the order in which they were begun."""
        self._num_begun = 0
        self._due: set[Move] = set()
        """Moves to be advanced in any case."""
        self.waits_for: WaitsFor = (self._of_worker, state.book.told)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[Move]:
        """All moves under way: merges, then restores, then leavings."""
        return [*self.merges, *self.restores, *self.leavings]

    @property
    def is_idle(self) -> bool:
        """Whether no move is under way. Recoveries do not count."""
        return not self._of_worker

    def moving_workers(self) -> Set[WorkerId]:
        """The workers in a move or a recovery."""
        if self._recoveries.is_idle:
            return self._of_worker.keys()
        return self._of_worker.keys() | self._recoveries.busy_workers()

    def changing_workers(self) -> Set[WorkerId]:
        """The workers in a merge, a restore or a recovery. Workers that leave for sleep are not among them: they keep
        all of their layers until they are empty, and requests in host pools come back there where no other group can
        take them."""
        if not self.leavings:
            return self.moving_workers()
        moving = {w for w, move in self._of_worker.items() if not isinstance(move, Leaving)}
        return moving | self._recoveries.busy_workers()

    def is_moving(self, group: Group) -> bool:
        """Whether some worker of the group is in a move or a recovery, so that no move of it may begin."""
        if any(w in self._of_worker for w in group.worker_ids):
            return True
        return not self._recoveries.is_idle and not self._recoveries.busy_workers().isdisjoint(group.worker_ids)

    def restore_of(self, group: Group) -> Restoring | None:
        """The restore that some worker of the group is in; None: none is."""
        moves = (self._of_worker.get(w) for w in group.worker_ids)
        return next((move for move in moves if isinstance(move, Restoring)), None)

    def is_emptying(self, group: Group) -> bool:
        """Whether the group takes nothing new: a pipeline whose members already serve on their own, or a worker about
        to sleep."""
        if self.leavings and isinstance(self._of_worker.get(group.worker_ids[0]), Leaving):
            return True
        restore = self.restore_of(group) if self._of_worker else None
        return restore is not None and restore.group is group and restore.has_split

    def serving_groups(self) -> list[Group]:
        """The groups that take something new."""
        return [g for g in self._state.groups.values() if not self.is_emptying(g)]

    # --- beginning --------------------------------------------------------------------------------------------

    def merge(
        self, sources: list[Group], stages: tuple[StagePlan, ...], now_ns: int,
        pulls: tuple[Pull, ...] = (),
    ) -> list[Action]:
        """Begin to merge these groups into one with the given stages; return the actions. ``pulls``: shards that
        members lack, and their sources."""
        actions = self._clear([s.worker_id for s in stages])
        merge = Merging(self._state, sources, stages, now_ns, pulls)
        self.first_served.begun(merge, now_ns)
        self.merges.append(merge)
        self._begun(merge)
        return actions + merge.advance(now_ns)

    def restore(
        self, group: Group, split: SplitPlan, now_ns: int, reason: str, homes: list[Group] | None = None, *,
        max_overflow_blocks: int = 0,
    ) -> list[Action]:
        """Begin to split a merged group; return the actions. ``max_overflow_blocks``: most blocks of requests that do
        not fit and are computed again.

        With ``homes`` the group has been split already, and its requests go on returning to them.
        """
        yields = RESTORE in group.blocks.caps
        actions = self._clear(group.worker_ids)
        restore = Restoring(
            self._state, group, split, now_ns, homes, with_queue=yields, max_overflow_blocks=max_overflow_blocks,
            reason=reason,
        )
        self.restores.append(restore)
        self._begun(restore)
        return actions + restore.advance(now_ns)

    def leave(self, leaving: Leaving) -> list[Action]:
        """Begin to put a worker to sleep; return the actions of clearing it. The leaving is advanced at the end of the
        event, or at the next."""
        actions = self._clear(leaving.worker_ids)
        self.leavings.append(leaving)
        self._begun(leaving)
        leaving.group.touch()  # closed to newcomers
        return actions

    def end_leaving(self, leaving: Leaving, now_ns: int) -> list[Action]:
        """Take out a leaving that is over, and return the actions that follow: the worker's group goes, or is open
        again."""
        self.leavings.remove(leaving)
        self._forget(leaving)
        return leaving.on_over(leaving, now_ns)

    def turn_round(self, restore: Restoring, now_ns: int, reason: str) -> list[Action]:
        """Call a restore off, as the pipeline is needed after all; return the actions, none if it was called off
        before."""
        self._due.add(restore)
        return restore.turn_round(now_ns, reason)

    def take_queue_along(self, restore: Restoring, now_ns: int) -> list[Action]:
        """Let a restore split although requests wait, as they wait for compute; return the actions."""
        self._due.add(restore)
        restore.take_queue_along()
        return restore.advance(now_ns)

    def _return_again(self, merge: Merging, now_ns: int) -> list[Action]:
        """After a failed merge: if it was to merge a called-off restore again, begin a restore in which requests go on
        returning home. Returns the actions; none otherwise."""
        for group in merge.sources:
            homes = [g for g in merge.sources if g is not group]
            if homes and all(set(g.worker_ids) <= set(group.worker_ids) for g in homes):
                split = SplitPlan(tuple(g.stages for g in homes))
                return self.restore(group, split, now_ns, "it could not be put together again", homes)
        return []

    def _begun(self, move: Move) -> None:
        """Enter a move that has just begun into the books."""
        self._of_worker |= dict.fromkeys(move.worker_ids, move)
        self._number_of[move] = self._num_begun
        self._num_begun += 1
        self._due.add(move)

    def _forget(self, move: Move) -> None:
        """Take a move that is over out of the books."""
        for worker_id in move.worker_ids:
            if self._of_worker.get(worker_id) is move:
                del self._of_worker[worker_id]
        del self._number_of[move]
        self._due.discard(move)

    # --- events -----------------------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> list[Action]:
        """Stop the transfers of a request that is ending, in the move of its group; return the actions, none without
        one."""
        group = self._state.groups.get(state.group_id) if self._of_worker else None
        if group is None:
            return []
        move = self._of_worker.get(group.worker_ids[0])  # of all its workers, or of none
        if move is None:
            return []
        self._due.add(move)
        return move.cancel(state)

    def take_out(self, dead: WorkerId) -> list[Move]:
        """Take out the moves that a dead worker was part of, and return them; ``core.moving.recovering`` abandons
        them."""
        involved = [m for m in self.under_way if dead in m.worker_ids]
        self.merges = [m for m in self.merges if m not in involved]
        self.restores = [r for r in self.restores if r not in involved]
        self.leavings = [m for m in self.leavings if m not in involved]
        for move in involved:
            self._forget(move)
        self.first_served.abandoned((dead,))
        return involved

    # --- progress ---------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Action]:
        """Advance each move that is due as far as it can go, take out those that are over, and begin what follows from
        them. Returns the actions."""
        told = self._state.book.take_told()
        if not self._of_worker:
            return []
        due, self._due = self._due, set()
        due |= self._number_of.keys() & told
        due |= self._on_workers(w for g in self._state.changed_groups() for w in g.worker_ids)
        actions: list[Action] = []
        for merge in sorted((m for m in due if isinstance(m, Merging)), key=self._number_of.__getitem__):
            actions += self._advance(merge, now_ns)
            if merge.is_over:
                self.merges.remove(merge)
                self._forget(merge)
                self._loads.note_settled(merge.worker_ids, now_ns, failed=merge.phase is MergePhase.FAILED)
                if merge.phase is MergePhase.FAILED:
                    actions += self._return_again(merge, now_ns)
        due |= self._due  # restores that have just begun again
        for restore in sorted((r for r in due if isinstance(r, Restoring)), key=self._number_of.__getitem__):
            actions += self._advance(restore, now_ns)
            if restore.is_over:
                self.restores.remove(restore)
                self._forget(restore)
                restore.group.touch()  # open again to newcomers
                self._loads.note_settled(restore.worker_ids, now_ns, failed=restore.has_failed)
                if restore.phase is RestorePhase.DONE:
                    for worker_id in restore.left_over:
                        self._recoveries.come_home(worker_id, now_ns)
                if restore.phase is RestorePhase.TURNED and restore.has_split:
                    sources = [*restore.homes, restore.group]
                    actions += self.merge(sources, restore.group.stages, now_ns)
        for leaving in [m for m in self.leavings if m in due]:
            actions += self._advance(leaving, now_ns)
            if leaving.is_over:
                actions += self.end_leaving(leaving, now_ns)
        return actions

    def _on_workers(self, worker_ids: Iterable[WorkerId]) -> set[Move]:
        """The moves that these workers are in."""
        return {move for w in worker_ids if (move := self._of_worker.get(w)) is not None}

    def _advance(self, move: Move, now_ns: int) -> list[Action]:
        """Advance one move, and note whether it is due again at the next event; return the actions."""
        phase = move.phase
        actions = move.advance(now_ns)
        if actions or move.phase is not phase or move.waits_for_time:
            self._due.add(move)
        return actions
