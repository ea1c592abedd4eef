"""When forecasts are asked for, and about which group: each takes milliseconds, and the next steps change little."""

from __future__ import annotations

from collections.abc import Collection, Container

from jettison.types import NANOSECONDS, GroupId

ASK_EVERY_NS = NANOSECONDS // 10
"""Least time between the forecasts of two moments."""


class Turns:
    """Gives pressed groups turns at being asked about. At one moment all rungs ask about the same group, so that the
    ladder can compare what they offer."""

    def __init__(self) -> None:
        self._now: tuple[int, GroupId] | None = None
        """When forecasts were asked for last, and about which group."""
        self._asked_ns: dict[GroupId, int] = {}
        """When each group was asked about last."""

    def in_turn(self, group_ids: Collection[GroupId]) -> list[GroupId]:
        """These groups, the one that was asked about longest ago first."""
        return sorted(group_ids, key=lambda g: (self._asked_ns.get(g, -1), g))

    def may_ask(self, group_id: GroupId, now_ns: int, present: Container[GroupId]) -> bool:
        """Whether forecasts may be asked for about this group now; if so, it counts as asked about. ``present``: all
        groups; others are forgotten."""
        if self._now is not None:
            asked_ns, asked = self._now
            if now_ns == asked_ns:
                return group_id == asked
            if now_ns - asked_ns < ASK_EVERY_NS:
                return False
        self._now = now_ns, group_id
        self._asked_ns = {g: at_ns for g, at_ns in self._asked_ns.items() if g in present}
        self._asked_ns[group_id] = now_ns
        return True
