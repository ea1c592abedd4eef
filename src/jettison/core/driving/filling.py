"""Whether steps of online requests are filled with offline work: decided on ticks, remembered in each group, and told
to the event log where it changes.

They are filled as long as online requests are foreseen to find all blocks that they need: within the objective for
first tokens in the longest steps, and for as long as one of them stays in usual ones, with nearly all arrivals that
chance may bring. Where filling stops, what they hold falls as they end, no sooner. Packed instances get no more than
finds room in them: there the first alone counts. Blocks of offline requests do not count, as they are taken back at
once. ``policy.onlineneed`` foresees, ``policy.filling`` fills.
"""

from __future__ import annotations

from jettison.core.load.outlook import Outlook
from jettison.core.ports import Record
from jettison.core.serving.group import Group
from jettison.core.serving.sharedsteps import filled_decode_s, held_by_online
from jettison.core.state import ClusterState
from jettison.policy.onlineneed import NEARLY_ALWAYS, most_growth_tokens, stay_s
from jettison.policy.slo import Pace, filler_s
from jettison.types import NANOSECONDS, GroupId

LOOKS_AHEAD = 10
"""Looks within the objective for first tokens: what comes between two of them is at most a tenth of what was reckoned
with."""


class FillWatch:
    """Says of each group with requests of both classes whether its steps are filled (``Group.foreseen``)."""

    def __init__(self, state: ClusterState, outlook: Outlook) -> None:
        self._state = state
        self._outlook = outlook
        self._due_ns: dict[GroupId, int] = {}
        """By group: when it is looked at again."""

    @property
    def awaits_tick(self) -> bool:
        """Whether the next tick may look at a group. (Where offline work waits, a tick is awaited anyway.)"""
        groups = self._state.groups
        return any(g in groups and groups[g].shares_steps for g in self._state.changes.harvesting)

    def look(self, now_ns: int) -> list[Record]:
        """Decide for the groups that are due; the records of those where the decision is another one."""
        changes, groups = self._state.changes, self._state.groups
        if not changes.harvesting and not changes.queued:
            return []
        if len(self._due_ns) > len(groups):
            self._due_ns = {g: due_ns for g, due_ns in self._due_ns.items() if g in groups}
        records: list[Record] = []
        for group_id in sorted(changes.harvesting | changes.queued):
            group = groups.get(group_id)
            if group is None or now_ns < self._due_ns.get(group_id, 0) or not group.shares_steps:
                continue
            pace = group.pace()
            assert pace is not None
            filled_before = group.foreseen is None or group.foreseen.fits
            ahead_s = self._decide(group, pace)
            self._due_ns[group_id] = now_ns + round((pace.objectives().ttft_s or 0.0) / LOOKS_AHEAD * NANOSECONDS)
            if group.foreseen is not None and group.foreseen.fits is not filled_before:
                kind = "filling_stops" if filled_before else "filling_goes_on"
                fields = {"group": group_id, "ahead_s": ahead_s} | group.foreseen.as_fields()
                records.append(Record(kind, now_ns, fields))
        return records

    def _decide(self, group: Group, pace: Pace) -> float:
        """Note what is foreseen of a group; the seconds that it was foreseen for. 0.0 where objectives are not known:
        then nothing is filled, and nothing foreseen."""
        goals = pace.objectives()
        turn_s = filler_s(goals, lambda: None)  # as long as a filled step may ever take: requests stay for longest
        if goals.ttft_s is None or not turn_s:
            group.foreseen = None
            return 0.0
        load, ahead_s = self._outlook.load([group]), goals.ttft_s
        growth = most_growth_tokens(load, turn_s, ahead_s)
        if self._state.params.packing is None:
            pace_s = filled_decode_s(group, pace, goals)
            lasting_s = stay_s(load.arrivals, pace_s)
            lasting = most_growth_tokens(load, pace_s, lasting_s, NEARLY_ALWAYS)
            growth, ahead_s = max((growth, ahead_s), (lasting, lasting_s))
        growth_blocks = int(growth / group.limits.block_size) + group.blocks.watermark
        group.foreseen = held_by_online(group, growth_blocks)
        return ahead_s
