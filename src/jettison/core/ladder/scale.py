"""Scale: instances that are not needed give their processes back, and more are asked for from outside when no rung
below can get the memory that is needed.

An instance without a process is a sleeper that takes longer to wake: the rung ``wake`` decides when it is worth it, by
the same forecast and prices, and hears first of memory that a drop could not get (``core.moving.provisioning`` asks for
the process). Here is decided when a sleeper's process ends, so that ``--min-instances`` are left, and when a start
that nothing needs any more is given up.

Where all instances that there may be are in use, more are asked for from outside: once, however many groups are short
of memory, until none has been short for a while; serving goes on meanwhile. A merged group whose demand goes on rising
towards its capacity asks as well, where the forecast says that ample memory would be worth a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jettison.core.ladder.dropplans import block_bytes
from jettison.core.ladder.forecasts import Question
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.overload import Trigger
from jettison.policy.provisioning import IdleProcess, choose_released, is_given_up
from jettison.types import NANOSECONDS, GroupId


@dataclass(frozen=True, slots=True)
class ScaleOutParams:
    """When a merged group's rising demand asks for more instances, and when the request for them is over."""

    clear_s: float = 5.0
    """An episode ends when nothing has been missing for this long."""
    rise_s: float = 2.0
    """Demand of a merged group has to rise this long without a break ..."""
    horizon_s: float = 5.0
    """... and be on its way to exceed the capacity within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOutOffer(Offer):
    """A merged group's demand rises towards more memory than it has; ``missing_bytes``: what it will lack."""

    missing_bytes: int


@dataclass(slots=True)
class _Rise:
    """How a merged group's demand, in blocks, has gone on since it last fell."""

    since_ns: int
    at_first: int
    last: int


@register
class ScaleRung(Rung):
    """Gives processes of sleepers back, and asks for more instances from outside, with at most one open request (an
    episode): a record tells of it, and starts nothing."""

    name = "scale"
    is_word = False
    rank = 90
    moments = frozenset({Moment.TICK})

    def __init__(self, means: Means, params: ScaleOutParams = ScaleOutParams()) -> None:
        super().__init__(means)
        self.params = params
        self._num_scale_outs = 0
        self._needed_ns: int | None = None
        """When memory was last missing; None while no episode is open."""
        self._missing_bytes = 0
        """Most bytes missing at once in the open episode; 0 without one."""
        self._rises: dict[GroupId, _Rise] = {}
        self._busy_ns = 0
        """When a tick last found no instance without any request, or a request that memory kept out."""

    @property
    def is_open(self) -> bool:
        """Whether more instances are asked for now."""
        return self._needed_ns is not None

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm on ticks while instances are asked for, as a tick may end that, nor while a process may be given
        back; else calm without end."""
        may_decide = self.is_open or self.means.sleepers.provisioning.starting or self._may_release
        return Calm(0 if moment is Moment.TICK and may_decide else None)

    def gauges(self) -> Mapping[str, float]:
        """How many instances have a process, and how many are to have one; empty where all have one for good."""
        provisioning = self.means.sleepers.provisioning
        if provisioning.least == len(self.means.state.workers):
            return {}
        return {
            "instances_provisioned": provisioning.num_provisioned, "instances_wanted": provisioning.num_wanted
        }

    def num_scale_outs(self) -> int:
        """How many times more instances have been asked for."""
        return self._num_scale_outs

    def missing_bytes(self) -> int:
        """Most bytes that were missing at once in the open episode; 0 without one."""
        return self._missing_bytes

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """Ask for more instances, or go on asking, as a group lacks ``missing_bytes``. Returns a record where an
        episode begins, else nothing. Does nothing while a rung wakes sleepers and a worker sleeps, is about to, or is
        being woken and not overdue: that comes first."""
        if self.means.wakes_sleepers() and (self.means.sleepers.out or self.means.sleepers.coming_s(now_ns)):
            return []
        self._missing_bytes = max(self._missing_bytes, missing_bytes)
        was_open = self.is_open
        self._needed_ns = now_ns
        if was_open:
            return []
        self._num_scale_outs += 1
        return [Record("scale_out", now_ns, {"group": group_id, "missing_bytes": missing_bytes, "reason": why})]

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield one offer for each merged group whose demand has risen towards its capacity since it last fell, where
        memory from outside is worth a device; asked on every tick, of one group at a time where a forecast decides."""
        state = self.means.state
        self._rises = {group_id: rise for group_id, rise in self._rises.items() if group_id in state.pipelines}
        for group_id, group in list(state.pipelines.items()):
            missing = self._missing_blocks(group, now_ns)
            if missing > 0 and self._is_worth_a_device(group_id, now_ns):
                yield ScaleOutOffer(
                    groups=(group_id,), why="demand goes on rising after a drop",
                    missing_bytes=missing * block_bytes(state),
                )

    def _is_worth_a_device(self, group_id: GroupId, now_ns: int) -> bool:
        """Whether the forecast says so, at the group's turn; True where settings have none made, or nothing is known of
        steps."""
        state, turns = self.means.state, self.means.turns
        if state.params.overload.trigger is not Trigger.FORECAST:
            return True
        if not turns.may_ask(group_id, now_ns, state.groups):
            return False
        question = Question.of(self.means, now_ns)
        return question is None or question.is_worth_a_device

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Tell every rung that hears of missing memory, this one included, what the group will lack; return the
        actions."""
        assert isinstance(offer, ScaleOutOffer), offer
        return self.means.tell_unmet(offer.groups[0], offer.missing_bytes, offer.why, now_ns)

    def leave(self, now_ns: int) -> list[Action]:
        """End the episode once no memory has been missing for a while, and give back processes that are not needed;
        return the records and actions."""
        if self._needed_ns is None:
            return self._give_back(now_ns)
        self._busy_ns = now_ns
        if now_ns - self._needed_ns < self.params.clear_s * NANOSECONDS:
            return []
        self._needed_ns, self._missing_bytes = None, 0
        return [Record("scale_out_over", now_ns, {})]

    @property
    def _may_release(self) -> bool:
        """Whether the process of a sleeper could be given back, as far as ``--min-instances`` allows any."""
        sleepers = self.means.sleepers
        return bool(sleepers.slept_ns) and sleepers.provisioning.num_provisioned > sleepers.provisioning.least

    def _idle(self, now_ns: int) -> list[IdleProcess]:
        """The sleepers whose process could be given back."""
        sleepers = self.means.sleepers
        if not self._may_release:
            return []
        return [
            IdleProcess(worker_id, (now_ns - since_ns) / NANOSECONDS)
            for worker_id, since_ns in sleepers.slept_ns.items()
        ]

    def _has_idle(self) -> bool:
        """Whether an instance serves no request at all, and memory keeps none out elsewhere."""
        state = self.means.state
        if self.means.loads.kept_out or state.unplaced:
            return False
        return any(not group.queues.all_requests() for group in state.groups.values())

    def _give_back(self, now_ns: int) -> list[Action]:
        """End processes of workers that have slept for long, and give up starts that take long and that nothing needs;
        return the records and actions."""
        sleepers, actions = self.means.sleepers, list[Action]()
        provisioning = sleepers.provisioning
        if not provisioning.starting or not self._has_idle():
            self._busy_ns = now_ns
        calm_s = (now_ns - self._busy_ns) / NANOSECONDS
        for worker_id, since_ns in list(provisioning.starting.items()):
            if is_given_up((now_ns - since_ns) / NANOSECONDS, calm_s, provisioning.start_s):
                actions += sleepers.release(worker_id, now_ns, f"an instance has had nothing to do for {calm_s:.3g} s")
        workers = self.means.state.workers
        may = [each for each in self._idle(now_ns) if provisioning.why_held(workers[each.worker_id]) is None]
        for worker_id in choose_released(may, provisioning.num_provisioned, provisioning.least, provisioning.start_s):
            if sleepers.why_not_release(worker_id) is None:  # else a request needs it
                slept_s = (now_ns - sleepers.slept_ns[worker_id]) / NANOSECONDS
                actions += sleepers.release(worker_id, now_ns, f"it has slept for {slept_s:.3g} s")
        return actions

    def _missing_blocks(self, group: Group, now_ns: int) -> int:
        """Blocks that a merged group's demand will lack at the horizon; 0: none, or its demand has not risen for long
        enough."""
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
