"""Scale out: more instances are asked for when no rung below can get the memory that is needed.

Asked once, however many groups are short of memory, until none has been for a while; serving goes on meanwhile. A
merged group whose demand goes on rising towards its capacity asks as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jettison.core.ladder.dropplans import block_bytes
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.soonest import Way
from jettison.types import NANOSECONDS, GroupId


@dataclass(frozen=True, slots=True)
class ScaleOutParams:
    """When more instances are asked for, and when the request is over."""

    clear_s: float = 5.0
    """An episode ends when nothing has been missing for this long."""
    rise_s: float = 2.0
    """Demand of a merged group has to rise this long without a break ..."""
    horizon_s: float = 5.0
    """... and be on its way to exceed the capacity within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOutOffer(Offer):
    """More memory than there is would be needed."""

    missing_bytes: int


@dataclass(slots=True)
class _Rise:
    """Demand of a merged group since it last fell, in blocks."""

    since_ns: int
    at_first: int
    last: int


@register
class ScaleRung(Rung):
    """At most one open request for more instances."""

    name = "scale"
    is_word = False
    rank = 90
    moments = frozenset({Moment.TICK})

    def __init__(self, means: Means, params: ScaleOutParams = ScaleOutParams()) -> None:
        super().__init__(means)
        self.params = params
        self._num_scale_outs = 0
        self._needed_ns: int | None = None
        """When something was last missing; None while no episode is open."""
        self._missing_bytes = 0
        """The most since then."""
        self._rises: dict[GroupId, _Rise] = {}

    @property
    def is_open(self) -> bool:
        """More instances are asked for now."""
        return self._needed_ns is not None

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """While nothing is asked for: on a tick the request may be over."""
        return Calm(0 if moment is Moment.TICK and self.is_open else None)

    def num_scale_outs(self) -> int:
        """Episodes so far."""
        return self._num_scale_outs

    def missing_bytes(self) -> int:
        """The most that was missing in the open episode."""
        return self._missing_bytes

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """A record, unless the request has been made already. A sleeper is woken before more instances are asked
        for."""
        if Way.WAKE in self.means.ways() and (self.means.sleepers.out or self.means.sleepers.waking):
            return []
        self._missing_bytes = max(self._missing_bytes, missing_bytes)
        was_open = self.is_open
        self._needed_ns = now_ns
        if was_open:
            return []
        self._num_scale_outs += 1
        return [Record("scale_out", now_ns, {"group": group_id, "missing_bytes": missing_bytes, "reason": why})]

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """On every tick: has a merged group's demand been rising towards its capacity ever since the drop?"""
        state = self.means.state
        self._rises = {group_id: rise for group_id, rise in self._rises.items() if group_id in state.pipelines}
        for group_id, group in list(state.pipelines.items()):
            missing = self._missing_blocks(group, now_ns)
            if missing > 0:
                yield ScaleOutOffer(
                    groups=(group_id,), why="demand goes on rising after a drop",
                    missing_bytes=missing * block_bytes(state),
                )

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Ask for more."""
        assert isinstance(offer, ScaleOutOffer), offer
        return self.means.tell_unmet(offer.groups[0], offer.missing_bytes, offer.why, now_ns)

    def leave(self, now_ns: int) -> list[Action]:
        """Nothing has been missing for a while."""
        if self._needed_ns is None or now_ns - self._needed_ns < self.params.clear_s * NANOSECONDS:
            return []
        self._needed_ns, self._missing_bytes = None, 0
        return [Record("scale_out_over", now_ns, {})]

    def _missing_blocks(self, group: Group, now_ns: int) -> int:
        """What demand will lack at the horizon; 0 while it is not known to rise."""
        demand = group.blocks.num_used + group.queues.queued_blocks()
        rise = self._rises.get(group.group_id)
        if rise is None or demand < rise.last:
            self._rises[group.group_id] = _Rise(now_ns, demand, demand)
            return 0
        rise.last = demand
        seconds = (now_ns - rise.since_ns) / NANOSECONDS
        if demand == rise.at_first or seconds < self.params.rise_s:
            return 0
        ahead = demand + (demand - rise.at_first) / seconds * self.params.horizon_s
        return max(0, int(ahead) - group.blocks.capacity)
