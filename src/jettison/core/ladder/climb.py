"""The control loop: rungs are asked from the cheapest up, and leave from the dearest down.

What the rest of the core wants to know of all rungs at once (is anything going on that a step of one group could decide
about another, when does a rung look next, ...) is answered here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

import jettison.core.ladder.lists  # noqa: F401  # its rungs are known by name from then on
from jettison.core.ladder import hooks
from jettison.core.ladder.rung import Means, Moment, Rung, rung_classes
from jettison.core.load.views import Loads
from jettison.core.moving.checkpoints import Checkpoints
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.sleeping import Expected, Sleepers
from jettison.core.ports import Action, Record
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.errors import ConfigError
from jettison.policy.soonest import Way
from jettison.types import GroupId, RequestId, WorkerId


class Ladder:
    """The rungs of one cluster, in order."""

    def __init__(
        self, names: Iterable[str], state: ClusterState, loads: Loads, moves: Moves, hosted: Hosted,
        checkpoints: Checkpoints, migrations: Migrations, sleepers: Sleepers,
    ) -> None:
        """Raises ConfigError as ``rung_classes`` and ``check_hooks`` do."""
        self._means = Means(
            state, loads, moves, hosted, checkpoints, migrations, sleepers, self._ways, self.ask_way, self._ask_room,
            self._tell_unmet, self._closed,
        )
        kinds = _kinds(names, state)
        self._set_rungs(kind(self._means) for kind in kinds)

    def _set_rungs(self, rungs: Iterable[Rung]) -> None:
        """Sort them once by what they do, so that an event asks only those that it concerns."""
        self.rungs: tuple[Rung, ...] = tuple(rungs)
        looking = [rung for rung in self.rungs if _does(rung, "look")]
        self.looking = {moment: tuple(rung for rung in looking if moment in rung.moments) for moment in Moment}
        """Rungs that look at such a moment."""
        self._leaving = tuple(rung for rung in reversed(self.rungs) if _does(rung, "leave"))
        self._admitting = [rung for rung in self.rungs if isinstance(rung, hooks.Admits)]
        self._placing = [rung for rung in self.rungs if isinstance(rung, hooks.Places)]
        self._hearing = [rung for rung in self.rungs if isinstance(rung, hooks.HearsUnmet)]
        self._scaling = [rung for rung in self.rungs if isinstance(rung, hooks.Scales)]
        self.copying = [rung for rung in self.rungs if isinstance(rung, hooks.SendsCopies)]
        """Rungs that may send something behind the steps just issued."""
        self._lagging = [rung for rung in self.rungs if isinstance(rung, hooks.Lags)]
        self._waking = [rung for rung in self.rungs if isinstance(rung, hooks.Sleeps)]
        self._gauged = [rung for rung in self.rungs if isinstance(rung, hooks.Gauges)]
        self._occupying = [rung for rung in self.rungs if isinstance(rung, hooks.Occupies)]
        self._noting = [rung for rung in self.rungs if isinstance(rung, hooks.Notes)]
        self._checking = [rung for rung in self.rungs if isinstance(rung, hooks.Checks)]
        self._ticking = [rung for rung in self.rungs if isinstance(rung, hooks.Ticks)]

    def change(self, names: Iterable[str]) -> None:
        """Other rungs; those that stay keep what they know.

        Raises ConfigError, and changes nothing, as ``rung_classes`` and ``check_hooks`` do, for a rung that would leave
        something under way that no rung goes on with, and where groups were to merge no more while some are merged, or
        while a request needs the memory of several.
        """
        state = self._means.state
        kinds = _kinds(names, state)
        if self.forms_pipelines and not any(kind.forms_pipelines for kind in kinds):
            if state.pipelines:
                raise ConfigError(f"groups {sorted(state.pipelines)} are merged: restore them first")
            if (large := _too_large_apart(state)) is not None:
                raise ConfigError(f"request {large} needs the memory of several instances: wait until it has ended")
        present = {type(rung): rung for rung in self.rungs}
        going = [rung for kind, rung in present.items() if kind not in kinds]
        for rung in going:
            if isinstance(rung, hooks.Occupies) and (worker_ids := set(rung.worker_ids())):
                raise ConfigError(f"{rung.name} cannot go while it uses workers {sorted(worker_ids)}")
        for rung in going:
            if isinstance(rung, hooks.Ends):
                rung.go()
        self._set_rungs(present.get(kind) or kind(self._means) for kind in kinds)

    # --- climbing ---------------------------------------------------------------------------------------------

    def climb(self, moment: Moment, now_ns: int) -> list[Action]:
        """Ask all rungs, and begin what they offer; on a tick, let them leave."""
        actions: list[Action] = []
        for rung in self.looking[moment]:
            for offer in rung.look(moment, now_ns):
                actions += [offer] if isinstance(offer, Record) else rung.begin(offer, now_ns)
        if moment is Moment.TICK:
            for rung in self._leaving:
                actions += rung.leave(now_ns)
        return actions

    def after_steps(self, now_ns: int) -> list[Action]:
        """What should follow the steps just issued in a worker's stream."""
        return [action for rung in self.copying for action in rung.after_steps(now_ns)]

    def ask_way(self, by: Rung | None, worker_ids: Collection[WorkerId], why: str, now_ns: int) -> list[Action]:
        """Have the rungs below one give way at these workers; None: all of them (an administrator asks)."""
        below = self.rungs if by is None else self.rungs[: self.rungs.index(by)]
        return [action for rung in reversed(below) for action in rung.give_way(worker_ids, by, why, now_ns)]

    def _ask_room(self, by: Rung, group: Group, why: str, now_ns: int) -> list[Action]:
        below = self.rungs[: self.rungs.index(by)]
        giving = [rung for rung in reversed(below) if isinstance(rung, hooks.GivesRoom)]
        return [action for rung in giving for action in rung.give_room(group, why, now_ns)]

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> hooks.Refusal | None:
        """Why the first rung that does not take another request of a tenant does not; see ``hooks.Admits``."""
        refusals = (rung.why_refuse(tenant, limit, num_coming, now_ns) for rung in self._admitting)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _tell_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        return [action for rung in self._hearing for action in rung.on_unmet(group_id, missing_bytes, why, now_ns)]

    def _ways(self) -> Collection[Way]:
        return {rung.way for rung in self.rungs if rung.way is not None}

    def _closed(self) -> Set[GroupId] | None:
        return self._placing[0].closed() if self._placing else None

    def place(self, state: RequestState) -> GroupId | None:
        """Which group a newcomer is queued in, where a rung says so; see ``hooks.Places``."""
        places = (rung.place(state) for rung in self._placing)
        return next((group_id for group_id in places if group_id is not None), None)

    def gauges(self) -> dict[str, float]:
        """What metrics show of all rungs."""
        return {name: value for rung in self._gauged for name, value in rung.gauges().items()}

    def rung(self, name: str) -> Rung:
        """Raises KeyError where the list has no such rung."""
        return {rung.name: rung for rung in self.rungs}[name]

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        """That are asked for from outside now."""
        return max((rung.missing_bytes() for rung in self._scaling), default=0)

    @property
    def wakes_s(self) -> tuple[float, ...]:
        """What waking each sleeper that may be woken would take, the soonest first."""
        return next((wakes_s for rung in self._waking if (wakes_s := rung.wakes_s())), ())

    def expect_wake(self, worker_id: WorkerId) -> Expected | None:
        """How long a wake will take; None where no rung says."""
        return self._waking[0].expect(worker_id) if self._waking else None

    @property
    def forms_pipelines(self) -> bool:
        """Groups may merge."""
        return any(rung.forms_pipelines for rung in self.rungs)

    @property
    def awaits_tick(self) -> bool:
        """The next tick may decide something although nothing else happens before it."""
        return any(rung.decides_nothing_before(Moment.TICK).until_ns is not None for rung in self._ticking)

    def decides_nothing_before(self) -> hooks.Calm:
        """How long no rung decides anything at the end of a step, or before one, that decides nothing itself."""
        calms = [rung.decides_nothing_before(Moment.STEP_ENDED) for rung in self._ticking]
        until_ns = [calm.until_ns for calm in calms if calm.until_ns is not None]
        return hooks.Calm(min(until_ns, default=None), max((calm.num_steps for calm in calms), default=0))

    @property
    def num_scale_outs(self) -> int:
        """Times that rungs have asked for more instances."""
        return sum(rung.num_scale_outs() for rung in self._scaling)

    @property
    def lag_blocks(self) -> int:
        """Sealed blocks of the candidates for checkpoints that have not been copied."""
        return sum(rung.lag_blocks() for rung in self._lagging)

    def worker_ids(self) -> set[WorkerId]:
        """Workers that rungs use, and would have to give way at."""
        return {worker_id for rung in self._occupying for worker_id in rung.worker_ids()}

    # --- telling ----------------------------------------------------------------------------------------------

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """These groups are different (at the end of an event, or by steps that are told of together)."""
        for rung in self._noting:
            rung.note_touched(group_ids)

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        for rung in self._checking:
            rung.check()


def _kinds(names: Iterable[str], state: ClusterState) -> list[type[Rung]]:
    """Classes of the rungs of these names, from free to dear, with their hooks checked. Raises ConfigError."""
    kinds = rung_classes(names, static_pipeline=state.params.static_pipeline)
    for kind in kinds:
        hooks.check_hooks(kind)
    return kinds


def _does(rung: Rung, hook: str) -> bool:
    """Its class has a hook of its own in place of ``Rung``'s, which does nothing."""
    return getattr(type(rung), hook) is not getattr(Rung, hook)


def _too_large_apart(state: ClusterState) -> RequestId | None:
    """A request that no instance by itself could hold."""
    most = max((w.full_blocks for w in state.workers.values() if not w.is_gone), default=0) * state.limits.block_size
    return next((s.request_id for s in state.requests.values() if s.num_tokens_to_hold > most), None)
