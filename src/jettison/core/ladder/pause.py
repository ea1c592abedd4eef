"""Pause: a group stops its offline work while memory keeps online requests out, before anything is dropped for them,
and where a restore needs the memory.

Steps evict offline requests by themselves for what fits then (``policy.filling``); here online requests lack room
beyond that. Checkpointed requests are stored, others are computed again later; a request that is in a step leaves when
that has ended. No offline request is let in or comes back until memory has kept no online one out for a second (one
that only waits for a step to end needs none of it), there is room again, and no move of its members is under way.
Groups that its members make in a merge or a split take the pause over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from jettison.core.ladder.free import is_preemptible
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.serving.group import Group
from jettison.core.serving.holds import GroupHold
from jettison.policy.batching import BlockedBy
from jettison.types import NANOSECONDS, GroupId, WorkerId

LEAST_PAUSE_S = 1.0
"""Least seconds of a pause since memory has kept an online request out last: a burst has more of them."""

FREE_AGAIN = 0.1
"""Part of the blocks of an instance that is free when offline work begins again."""

MERGED_FREE_AGAIN = 0.5
"""Part of the blocks of a merged group that is free when offline work begins again: there is nothing more to drop, and
beside offline work online requests take longer for a token, stay longer, and hold more."""


@register
class PauseRung(Rung):
    """Pauses a group's offline work: its offline requests give their blocks up, and none is admitted or comes back."""

    name = "pause"
    rank = 20
    is_word = False

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._pressed_ns: dict[GroupId, int] = {}
        """Of paused groups, when memory was last seen keeping an online request out."""
        self._workers: dict[GroupId, tuple[WorkerId, ...]] = {}
        """The workers of paused groups: the groups that they come to be in pause as well."""
        self._began_ns: dict[GroupId, int] = {}
        """When the pauses of paused groups began."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """Calm without end while no group is paused; none while one is, as a pause ends when time has passed."""
        return Calm(0 if self._pressed_ns else None)

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield one offer for each group to be paused, and for each paused one that still has offline work to give up.
        A group is to be paused where memory keeps its first online request out while it has offline requests; also
        where steps have evicted all of them, as they would be let in again as soon as no online request waits."""
        changes, groups = self.means.state.changes, self.means.state.groups
        asked = self._pressed_ns.keys() | (set() if moment is Moment.BEFORE_STEPS else changes.queued_online)
        if not asked:
            return
        busy = self.means.moves.changing_workers()
        for group_id in sorted(asked):
            group, is_paused = groups.get(group_id), group_id in self._pressed_ns
            if group is None:  # ``leave`` tells of its end
                continue
            if not busy.isdisjoint(group.worker_ids) and not (is_paused and self._serves_on(group)):
                continue
            if self._has_offline_work(group) if is_paused else _is_pressed(group) and _has_offline(group):
                yield Offer(groups=(group_id,), why="memory keeps an online request out")

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Pause the group, if it is not paused yet, and take from it every offline request that can give its blocks up
        now. If blocks have come free by that, the head of its queue counts as blocked by nothing until the next plan.
        Returns the record of a new pause, else no action."""
        group = self.means.state.groups[offer.groups[0]]
        actions: list[Action] = []
        if group.group_id not in self._pressed_ns:
            actions.append(self._pause(group, now_ns, now_ns, offer.why))
        num_free = group.blocks.num_allocatable
        for state in group.queues.running_offline():
            if is_preemptible(state):
                group.preempt(state, Preemption.PAUSE)
        for book, entry in self.means.hosted.offline_coming(group):
            book.break_off(entry)
        if group.blocks.num_allocatable > num_free:
            group.head_blocked_by = None  # as far as is known before the next plan: what is dearer waits for that
        return actions

    def give_room(self, group: Group, why: str, now_ns: int) -> list[Action]:
        """Pause the group for a dearer rung, also where no online request waits; return the record of a new pause, else
        no action. The pause lasts at least a second from now on."""
        actions = self.begin(Offer(groups=(group.group_id,), why=why), now_ns)
        self._pressed_ns[group.group_id] = now_ns
        return actions

    def _serves_on(self, group: Group) -> bool:
        """Whether the group is about to be restored and still serves, with no layout changing yet: its blocks may be
        given up."""
        restore = self.means.moves.restore_of(group)
        return restore is not None and restore.group is group and restore.may_still_wait and not group.paused

    def _pause(self, group: Group, pressed_ns: int, now_ns: int, why: str) -> Record:
        """Hold the group's offline work, and return the record of that. ``pressed_ns``: when memory last kept an online
        request out."""
        group_id = group.group_id
        self._pressed_ns[group_id], self._workers[group_id] = pressed_ns, group.worker_ids
        self._began_ns[group_id] = now_ns
        self.means.state.counters.offline_pauses += 1
        group.hold(self.name, GroupHold.OFFLINE)
        return Record("offline_paused", now_ns, {
            "group": group_id, "running": group.queues.num_running_offline, "reason": why,
            "online_waiting": len(group.queues.waiting), "free_blocks": group.blocks.num_allocatable,
        })

    def _has_offline_work(self, group: Group) -> bool:
        """Whether the group has an offline request that can give its blocks up now; where none runs, one on its way
        back."""
        if group.queues.num_running_offline:
            return any(is_preemptible(s) for s in group.queues.running_offline())
        return bool(self.means.hosted.offline_coming(group))

    def leave(self, now_ns: int) -> list[Action]:
        """End the pauses of groups that are gone, and of those without pressure for a second, with room again and in no
        move; pause the groups that members of a paused group have made. Returns the records."""
        actions: list[Action] = []
        busy = self.means.moves.changing_workers() if self._pressed_ns else ()
        for group_id, pressed_ns in list(self._pressed_ns.items()):
            group = self.means.state.groups.get(group_id)
            is_moving = any(w in busy for w in self._workers[group_id])
            heirs = self._heirs(group_id) if group is None or is_moving else ()
            if group is not None and _is_pressed(group):
                self._pressed_ns[group_id] = now_ns
            is_over = not is_moving and now_ns - self._pressed_ns[group_id] >= LEAST_PAUSE_S * NANOSECONDS
            if group is None or (is_over and _has_room_again(group)):
                paused_ms = (now_ns - self._resume(group_id)) / 1e6
                actions.append(Record("offline_resumed", now_ns, {"group": group_id, "ms": paused_ms}))
            why = "its members were paused"
            actions += [self._pause(heir, pressed_ns, now_ns, why) for heir in heirs]
        return actions

    def _heirs(self, group_id: GroupId) -> list[Group]:
        """Groups, not paused yet, that the workers of a paused group are in now: they are under the pressure that it
        was under."""
        groups_of = self.means.state.groups_of
        heirs = {g.group_id: g for w in self._workers[group_id] for g in groups_of.get(w, ())}
        return [heir for heir_id, heir in heirs.items() if heir_id not in self._pressed_ns]

    def _resume(self, group_id: GroupId) -> int:
        """End a group's pause, and let its offline work go on if the group still exists. Returns when the pause began,
        in ns."""
        del self._pressed_ns[group_id], self._workers[group_id]
        if (group := self.means.state.groups.get(group_id)) is not None:
            group.release(self.name, GroupHold.OFFLINE)
        return self._began_ns.pop(group_id)

    def go(self) -> None:
        """End the pauses of all groups, as the rung is about to be removed."""
        for group_id in list(self._pressed_ns):
            self._resume(group_id)

    def check(self) -> None:
        """Exactly the groups that the rung remembers as paused are held by it. Raises AssertionError otherwise."""
        paused = {i for i, group in self.means.state.groups.items() if self.name in group.queues.offline_holders}
        assert paused == self._pressed_ns.keys() & self.means.state.groups.keys()


def _has_offline(group: Group) -> bool:
    """Whether some offline request of the group runs, waits, moves or is stored."""
    queues = group.queues
    return queues.has_offline or any(s.is_offline for s in chain(queues.stored.values(), queues.moving.values()))


def _has_room_again(group: Group) -> bool:
    """Whether enough of the group's blocks are free for offline work to begin again: a tenth, half of a merged
    group's."""
    part = FREE_AGAIN if len(group.stages) == 1 else MERGED_FREE_AGAIN
    return group.blocks.num_free >= part * group.blocks.capacity


def _is_pressed(group: Group) -> bool:
    """Whether online requests wait in the group, and memory keeps the first one out."""
    return bool(group.queues.waiting) and group.head_blocked_by is BlockedBy.MEMORY
