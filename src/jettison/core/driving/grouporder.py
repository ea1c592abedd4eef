"""The first group without looking at every group: open groups in an order of ``policy.dispatch``, as a heap.

Nothing is decided here: the order is the policy's, and the group that comes out is the one that asking every group
would have found, ties included (a test compares).

Invariant: an open group is in the heap under a key that is not behind its present one. A group that has got fuller
since is detected when it comes to the top, and put where it belongs. A group that may have got freer has to be
refreshed before the next choice; only groups that an event has touched may have. Another order needs all keys anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from jettison.policy.dispatch import DispatchKey, DispatchOrder, GroupFreeness, by_freeness, choose_group
from jettison.types import GroupId


class GroupOrder:
    """The open groups in one order of dispatch. ``view_of`` a group is None while the group takes nothing new, or is no
    more. It may show the group some steps ago, freer than it is; after ``catch_up`` of the group it shows the present
    state."""

    def __init__(
        self, view_of: Callable[[GroupId], GroupFreeness | None], catch_up: Callable[[GroupId], None] = lambda _: None
    ) -> None:
        self._view_of = view_of
        self._catch_up = catch_up
        self._order: DispatchOrder = by_freeness
        self._heap: list[DispatchKey] = []
        self._key_of: dict[GroupId, DispatchKey] = {}
        """The best entry of each listed group: its other entries in the heap are dead."""

    def reorder(self, order: DispatchOrder, group_ids: Iterable[GroupId]) -> None:
        """Forget all keys, and rank these groups by another order. Groups that take nothing new are left out."""
        self._order = order
        self._heap.clear()
        self._key_of.clear()
        for group_id in group_ids:
            self.refresh(group_id)

    def refresh(self, group_id: GroupId) -> None:
        """Rank a group that may be freer than it was, or new, or open again. Nothing changes where it takes nothing
        new, or is listed with a key as good as its present one."""
        view = self._view_of(group_id)
        if view is None:
            return
        key, listed = self._order(view), self._key_of.get(group_id)
        if listed is None or key < listed:
            self._key_of[group_id] = key
            heapq.heappush(self._heap, key)

    def choose(self, needed_blocks: int) -> GroupId | None:
        """The first open group that could hold ``needed_blocks``; where none could, the largest; None without an open
        group. It is what ``choose_group`` over all open groups returns, and all of them stay ranked.

        O(log groups), and as much for each group that comes up first but has got fuller or is too small; O(groups)
        where none could hold ``needed_blocks``.
        """
        too_small: list[GroupFreeness] = []
        try:
            chosen = self._first_of(needed_blocks, too_small)
        finally:  # also when a view could not be made: no group is lost by that
            for view in too_small:
                heapq.heappush(self._heap, self._order(view))
        return choose_group(too_small, needed_blocks, self._order) if chosen is None else chosen

    def _first_of(self, needed_blocks: int, too_small: list[GroupFreeness]) -> GroupId | None:
        """The first open group that could hold ``needed_blocks``, caught up; None where none could. Groups before it
        that are too small are moved from the heap into ``too_small``. Dead entries and closed groups are dropped, and
        groups that have got fuller are ranked again."""
        heap = self._heap
        while heap:
            key = heap[0]
            group_id = key[-1]
            if self._key_of.get(group_id) != key:
                heapq.heappop(heap)
                continue
            self._catch_up(group_id)
            view = self._view_of(group_id)
            if view is None:
                heapq.heappop(heap)
                del self._key_of[group_id]
                continue
            present = self._order(view)
            if present != key:
                self._key_of[group_id] = present
                heapq.heapreplace(heap, present)
            elif view.capacity_blocks >= needed_blocks:
                return group_id
            else:
                too_small.append(view)
                heapq.heappop(heap)
        return None
