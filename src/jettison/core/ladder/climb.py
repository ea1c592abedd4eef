"""The ladder: it asks its rungs from the cheapest up, lets them leave from the dearest down, and passes questions on.

It answers what the rest of the core wants to know of all rungs at once: when a rung may decide something next, which
workers rungs use, what metrics show. It decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

import jettison.core.ladder.lists  # noqa: F401  # its rungs are known by name from then on
from jettison.core.ladder import hooks
from jettison.core.ladder.outcomes import Outcomes
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, rung_classes
from jettison.core.ladder.turns import Turns
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
from jettison.types import GroupId, RequestId, WorkerId


class Ladder:
    """The rungs of one cluster, from the cheapest to the dearest, and the loop that asks them."""

    def __init__(
        self, names: Iterable[str], state: ClusterState, loads: Loads, moves: Moves, hosted: Hosted,
        checkpoints: Checkpoints, migrations: Migrations, sleepers: Sleepers,
    ) -> None:
        """Make the rungs with these names. Raises ConfigError for a name that no rung has, a rung that merges groups
        beside static pipelines, and a rung with only part of a hook."""
        self._means = Means(
            state, loads, moves, hosted, checkpoints, migrations, sleepers, lambda: bool(self._waking), Turns(),
            Outcomes(state), self.ask_way, self._ask_room, self._tell_unmet, self._closed, self._lacking_blocks,
        )
        kinds = _kinds(names, state)
        self._set_rungs(kind(self._means) for kind in kinds)

    def _set_rungs(self, rungs: Iterable[Rung]) -> None:
        """Make these the ladder's rungs, sorted once by their verbs and hooks, so that an event asks only the rungs
        concerned."""
        self.rungs: tuple[Rung, ...] = tuple(rungs)
        looking = [rung for rung in self.rungs if _does(rung, "look")]
        self.looking = {moment: tuple(rung for rung in looking if moment in rung.moments) for moment in Moment}
        """By moment: the rungs that look then."""
        self.acts_between_steps = any(rung.acts_between_steps for rung in self.rungs)
        """Some rung has to find requests in no step: no group plans a step ahead."""
        self._leaving = tuple(rung for rung in reversed(self.rungs) if _does(rung, "leave"))
        self._admitting = [rung for rung in self.rungs if isinstance(rung, hooks.Admits)]
        self._placing = [rung for rung in self.rungs if isinstance(rung, hooks.Places)]
        self._hearing = [rung for rung in self.rungs if isinstance(rung, hooks.HearsUnmet)]
        self._scaling = [rung for rung in self.rungs if isinstance(rung, hooks.Scales)]
        self.copying = [rung for rung in self.rungs if isinstance(rung, hooks.SendsCopies)]
        """Rungs that may send something behind the steps just issued."""
        self._opening = [rung for rung in self.rungs if isinstance(rung, hooks.Opens)]
        self._lagging = [rung for rung in self.rungs if isinstance(rung, hooks.Lags)]
        self._waking = [rung for rung in self.rungs if isinstance(rung, hooks.Sleeps)]
        self._gauged = [rung for rung in self.rungs if isinstance(rung, hooks.Gauges)]
        self._occupying = [rung for rung in self.rungs if isinstance(rung, hooks.Occupies)]
        self._noting = [rung for rung in self.rungs if isinstance(rung, hooks.Notes)]
        self._checking = [rung for rung in self.rungs if isinstance(rung, hooks.Checks)]
        self._ticking = [rung for rung in self.rungs if isinstance(rung, hooks.Ticks)]

    def change(self, names: Iterable[str]) -> None:
        """Replace the rungs by those with these names. A rung that stays keeps its state; one that goes undoes what it
        has set.

        Raises ConfigError, and changes nothing: for names that ``rung_classes`` or ``check_hooks`` rejects; where a
        rung that would go uses workers; and where no rung would merge groups any more while groups are merged, or while
        a request needs the memory of several instances.
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
        """Ask every rung that looks at this moment, and begin each offer without a worth at once. Of the others begin
        the best: what brings most comes first. No rung relieves a group that was relieved at this moment. On a tick,
        then let rungs leave. Returns the actions and records of all of them."""
        actions: list[Action] = []
        weighed: list[tuple[Rung, Offer]] = []
        relieved: set[GroupId] = set()
        for rung in self.looking[moment]:
            for offer in rung.look(moment, now_ns):
                if isinstance(offer, Record):
                    actions.append(offer)
                elif offer.worth is not None:
                    weighed.append((rung, offer))
                elif not rung.relieves or relieved.isdisjoint(offer.groups):
                    relieved.update(offer.groups if rung.relieves else ())
                    actions += rung.begin(offer, now_ns)
        for rung, offer in sorted(weighed, key=_brings, reverse=True):
            if relieved.isdisjoint(offer.groups):
                relieved.update(offer.groups)
                actions += rung.begin(offer, now_ns)
        if moment is Moment.TICK:
            for rung in self._leaving:
                actions += rung.leave(now_ns)
        return actions

    def after_steps(self, now_ns: int) -> list[Action]:
        """The copies that rungs send behind the steps just issued, in the workers' streams."""
        return [action for rung in self.copying for action in rung.after_steps(now_ns)]

    def ask_way(self, by: Rung | None, worker_ids: Collection[WorkerId], why: str, now_ns: int) -> list[Action]:
        """Have every rung below ``by`` give way at these workers, from the dearest down; return the actions. ``by``
        None: every rung gives way, as an administrator asks."""
        below = self.rungs if by is None else self.rungs[: self.rungs.index(by)]
        return [action for rung in reversed(below) for action in rung.give_way(worker_ids, by, why, now_ns)]

    def _ask_room(self, by: Rung, group: Group, why: str, now_ns: int) -> list[Action]:
        """Have every rung below ``by`` with ``GivesRoom`` take offline KV out of a group, from the dearest down; return
        the actions."""
        below = self.rungs[: self.rungs.index(by)]
        giving = [rung for rung in reversed(below) if isinstance(rung, hooks.GivesRoom)]
        return [action for rung in giving for action in rung.give_room(group, why, now_ns)]

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> hooks.Refusal | None:
        """Why the first rung that refuses this tenant's next online request does so; None: every rung takes it.
        Arguments as in ``hooks.Admits.why_refuse``."""
        refusals = (rung.why_refuse(tenant, limit, num_coming, now_ns) for rung in self._admitting)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _tell_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """Tell every rung with ``HearsUnmet`` that a group lacks ``missing_bytes``; return the actions."""
        return [action for rung in self._hearing for action in rung.on_unmet(group_id, missing_bytes, why, now_ns)]

    def _closed(self) -> Set[GroupId] | None:
        """The groups that the first rung with ``Places`` keeps free of online requests; None without such a rung."""
        return self._placing[0].closed() if self._placing else None

    def _lacking_blocks(self, opening_s: float) -> int:
        """What the first rung with ``Places`` says that requests will lack; 0 without one."""
        return self._placing[0].lacking_blocks(opening_s) if self._placing else 0

    def place(self, state: RequestState) -> GroupId | None:
        """The group that the first rung with an opinion chooses for a new request; None: no rung has one, and dispatch
        chooses."""
        places = (rung.place(state) for rung in self._placing)
        return next((group_id for group_id in places if group_id is not None), None)

    def shut(self) -> Set[GroupId]:
        """The groups that rungs with ``Opens`` keep shut to waiting requests; empty without such rungs."""
        return frozenset[GroupId]().union(*(rung.shut() for rung in self._opening))

    def gauges(self) -> dict[str, float]:
        """The figures that rungs give to metrics, by name; empty without any."""
        return {name: value for rung in self._gauged for name, value in rung.gauges().items()}

    def rung(self, name: str) -> Rung:
        """The rung with this name. Raises KeyError where the ladder has none."""
        return {rung.name: rung for rung in self.rungs}[name]

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        """Bytes that rungs ask for from outside now, by the rung that asks for most; 0: none."""
        return max((rung.missing_bytes() for rung in self._scaling), default=0)

    @property
    def wakes_s(self) -> tuple[float, ...]:
        """Seconds that waking takes, one number for each sleeper that may be woken, as the rung orders them; empty
        where no worker may be woken."""
        return next((wakes_s for rung in self._waking if (wakes_s := rung.wakes_s())), ())

    def expect_wake(self, worker_id: WorkerId) -> Expected | None:
        """The prediction for a wake of this worker that is not a rung's own; None where no rung wakes sleepers."""
        return self._waking[0].expect(worker_id) if self._waking else None

    @property
    def forms_pipelines(self) -> bool:
        """Whether some rung may merge groups."""
        return any(rung.forms_pipelines for rung in self.rungs)

    @property
    def awaits_tick(self) -> bool:
        """Whether the next tick may let some rung decide something although nothing else happens before it."""
        return any(rung.decides_nothing_before(Moment.TICK).until_ns is not None for rung in self._ticking)

    def decides_nothing_before(self) -> hooks.Calm:
        """For how long no rung decides anything around decode steps (not ticks): the earliest time of all rungs, and
        the most steps of room that any of them wants."""
        calms = [rung.decides_nothing_before(Moment.STEP_ENDED) for rung in self._ticking]
        until_ns = [calm.until_ns for calm in calms if calm.until_ns is not None]
        return hooks.Calm(min(until_ns, default=None), max((calm.num_steps for calm in calms), default=0))

    @property
    def num_scale_outs(self) -> int:
        """How many times rungs have asked for more instances, summed."""
        return sum(rung.num_scale_outs() for rung in self._scaling)

    @property
    def lag_blocks(self) -> int:
        """Sealed blocks of the requests to be checkpointed that have no copy yet, summed over rungs; 0: none."""
        return sum(rung.lag_blocks() for rung in self._lagging)

    def worker_ids(self) -> set[WorkerId]:
        """The workers that rungs use now, and where they would have to give way; empty: none."""
        return {worker_id for rung in self._occupying for worker_id in rung.worker_ids()}

    # --- telling ----------------------------------------------------------------------------------------------

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """Tell the rungs with ``Notes`` that these groups have changed: at an event's end, or by several steps told of
        together."""
        for rung in self._noting:
            rung.note_touched(group_ids)

    def check(self) -> None:
        """Have every rung with ``Checks`` verify its books; other rungs are not checked. Raises AssertionError from the
        first rung that finds a broken invariant."""
        for rung in self._checking:
            rung.check()


def _brings(each: tuple[Rung, Offer]) -> float:
    """What the offer of a rung brings, in request-seconds."""
    worth = each[1].worth
    assert worth is not None, each
    return worth.net_request_s


def _kinds(names: Iterable[str], state: ClusterState) -> list[type[Rung]]:
    """The classes of the rungs with these names, from free to dear. Raises ConfigError as ``rung_classes`` and
    ``check_hooks`` do."""
    kinds = rung_classes(names, static_pipeline=state.params.static_pipeline)
    for kind in kinds:
        hooks.check_hooks(kind)
    return kinds


def _does(rung: Rung, hook: str) -> bool:
    """Whether the rung's class overrides this method of ``Rung``, which does nothing there."""
    return getattr(type(rung), hook) is not getattr(Rung, hook)


def _too_large_apart(state: ClusterState) -> RequestId | None:
    """The first request found that needs more KV memory than any single instance has; None: there is none."""
    most = max((w.full_blocks for w in state.workers.values() if not w.is_gone), default=0) * state.limits.block_size
    return next((s.request_id for s in state.requests.values() if s.num_tokens_to_hold > most), None)
