"""Allowances: how many blocks each group may still copy to and from host pools with its newest step.

How much a step may carry is decided elsewhere; here it is only counted, so that no step carries more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import GroupId


@dataclass(slots=True)
class Allowance:
    """How many blocks one group may still copy to and from host pools with its newest step."""

    num_steps: int = -1
    """The group's step count when the allowance was renewed."""
    left: int = 0


class Allowances:
    """The allowances of all groups. One is renewed with every step of its group, and while no step is in flight that
    copies could be hidden behind."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._by_group: dict[GroupId, Allowance] = {}
        self._num_dissolved = 0
        """The cluster's count of dissolved groups when these were last dropped here."""

    def __len__(self) -> int:
        """How many groups have an allowance."""
        return len(self._by_group)

    def of(self, group: Group, budget_blocks: Callable[[Group], int], *, is_copying: bool) -> Allowance:
        """The group's allowance, for the caller to take from; renewed by ``budget_blocks`` if due. ``is_copying``: a
        copy that was sent before has not ended."""
        self._forget_dissolved()
        allowance = self._by_group.setdefault(group.group_id, Allowance())
        nothing_to_hide_behind = not group.in_flight and not is_copying
        if allowance.num_steps != group.counters.num_steps or nothing_to_hide_behind:
            allowance.num_steps = group.counters.num_steps
            allowance.left = budget_blocks(group)
        return allowance

    def _forget_dissolved(self) -> None:
        """Drop the allowances of groups that have been dissolved."""
        groups, num_dissolved = self._cluster.groups, self._cluster.num_dissolved
        if self._num_dissolved != num_dissolved:
            self._num_dissolved = num_dissolved
            self._by_group = {g: allowance for g, allowance in self._by_group.items() if g in groups}
