"""When workers fall asleep by themselves: views for ``policy.dozing``, and orders to sleep. The rung ``wake`` asks on
ticks."""

from __future__ import annotations

from collections.abc import Callable

from jettison.core.ladder.prompts import num_for_arrivals
from jettison.core.ladder.rung import Means
from jettison.core.ladder.waking.backlog import PricedWork, as_fields
from jettison.core.ladder.waking.duework import DueWork
from jettison.core.ladder.waking.opening import Need, Opening
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.batchworth import num_worth
from jettison.policy.deadlines import SLEEP_MARGIN, WAKE_MARGIN, may_go
from jettison.policy.dozing import IdleGroup, choose_sleepers, next_patience
from jettison.types import NANOSECONDS, GroupId, WorkerId

LEVEL = 2
"""Level of sleep that is ordered here: the workers that stay awake have all parameters, or none falls asleep."""


class Dozing:
    """Puts workers to sleep that no request needs. It remembers since when each group has had no online request."""

    def __init__(
        self, means: Means, due_work: DueWork, priced: PricedWork, opening: Opening, opening_s: Callable[[], float]
    ) -> None:
        """``opening_s``: seconds until a sleeper would serve again."""
        self._means = means
        self._due_work = due_work
        self._priced = priced
        self._opening, self._opening_s = opening, opening_s
        self._num_kept = 0
        """How many are kept awake for what offline work is worth, as told last."""
        self._state = means.state
        self._empty_since_ns: dict[GroupId, int] = {}
        self._calm_since_ns = 0
        """Since when there has been no pressure."""
        most = means.state.params.awake.max_awake
        self._at_start: set[WorkerId] = set(means.state.workers) if most is not None else set()
        """Workers that count for ``--max-awake`` at the start; empty once no more than that serve and none of them is
        still to come."""
        self._patience = 1
        """How many times ``--sleep-after-s`` the need must have been gone."""
        self._slept_since_ns: dict[WorkerId, int] = {}
        """By worker that was put to sleep here: when."""

    @property
    def _after_s(self) -> float:
        """Seconds for which a worker must have been without need before it sleeps now: ``--sleep-after-s`` times the
        patience."""
        return self._patience * self._state.params.awake.after_s

    def note_woken(self, worker_id: WorkerId, now_ns: int, *, is_news: bool = True) -> None:
        """Note that a worker was woken. Where it had been put to sleep here for a moment only, the next one has to wait
        longer before it sleeps. ``is_news``: no other worker was woken for the same need."""
        if (since_ns := self._slept_since_ns.pop(worker_id, None)) is not None and is_news:
            slept_s = (now_ns - since_ns) / NANOSECONDS
            self._patience = next_patience(self._patience, slept_s, self._state.params.awake.after_s)

    @property
    def awaits_tick(self) -> bool:
        """Whether a worker may fall asleep although nothing but time passes."""
        awake = self._state.params.awake
        if self._at_start:
            return True
        return awake.falls_asleep and bool(self._empty_since_ns) and len(self._serving()) > awake.min_awake

    def note_changed(self, now_ns: int) -> None:
        """Note, at the end of an event, which of the groups that it has changed have no online request now, and since
        when."""
        for group in self._state.changed_groups():
            if group.queues.waiting or group.queues.serves_online:
                self._empty_since_ns.pop(group.group_id, None)
            else:
                self._empty_since_ns.setdefault(group.group_id, now_ns)

    def _serving(self) -> list[WorkerId]:
        """The workers that are in a group and not on their way to sleep."""
        leaving = set(self._means.sleepers.leaving)
        return [w for w, groups in self._state.groups_of.items() if groups and w not in leaving]

    # --- orders -----------------------------------------------------------------------------------------------

    def advance(self, why_pressed: Callable[[], str | None], now_ns: int) -> list[Action]:
        """Put workers to sleep, one after the other, on a tick; return the actions. ``why_pressed`` says why none may
        sleep now; None: some may. At the start, those beyond ``--max-awake`` sleep in any case."""
        actions = self._bound_start(now_ns) if self._at_start else []
        if not self._state.params.awake.falls_asleep:
            return actions
        if why_pressed() is not None:
            self._calm_since_ns = now_ns
            return actions
        chosen, need = self._choose(now_ns)
        if chosen and self._priced.is_there:
            chosen, records = self._keep(chosen, now_ns)
            actions += records
        for group_id in chosen:
            (worker_id,) = self._state.groups[group_id].worker_ids
            if order := self._sleep(worker_id, f"no online request for {self._after_s:g} s", now_ns, need):
                self._slept_since_ns[worker_id] = now_ns
                actions += order
        return actions

    def _bound_start(self, now_ns: int) -> list[Action]:
        """Put the last of the workers beyond ``--max-awake`` to sleep that have served since the start; return the
        actions. Tried on every tick until all have come up: peers may have to fill some first, and one that is needed
        cannot sleep yet. A worker that is woken by then is none of them, as an order by hand holds."""
        workers = self._state.workers
        self._at_start -= {w for w in self._at_start if workers[w].is_asleep or workers[w].is_gone}
        serving = [w for w in self._serving() if w in self._at_start]
        num_surplus = len(serving) - (self._state.params.awake.max_awake or 0)
        if num_surplus <= 0 and all(self._state.groups_of[w] for w in self._at_start):
            self._at_start.clear()
        actions: list[Action] = []
        while num_surplus > 0 and (order := self._sleep(serving.pop(), "--max-awake", now_ns)):
            actions += order
            num_surplus -= 1
        return actions

    def _choose(self, now_ns: int) -> tuple[list[GroupId], Need | None]:
        """The groups whose workers may fall asleep now (without online requests for long enough, not needed by packing,
        arrivals or deadlines), and what is foreseen that online requests will need of the others, where they are
        packed."""
        state, awake, serving = self._state, self._state.params.awake, self._serving()
        if len(serving) <= awake.min_awake:
            return [], None
        self._empty_since_ns = {g: ns for g, ns in self._empty_since_ns.items() if g in state.groups}
        idle: list[IdleGroup] = []
        for group in state.groups.values():
            if not self._may_leave(group):
                continue
            since_ns = max(self._empty_since_ns.setdefault(group.group_id, now_ns), self._calm_since_ns)
            idle.append(IdleGroup(group.group_id, (now_ns - since_ns) / NANOSECONDS))
        chosen = choose_sleepers(idle, len(serving), awake.min_awake, self._after_s, self._means.ask_closed())
        if chosen:
            staying = [g for g in state.groups.values() if g.group_id not in chosen]
            num_least = num_for_arrivals(state, self._means.loads, staying)
            chosen = chosen[: max(0, len(serving) - num_least)]
        if not chosen:
            return [], None
        num, need = self._opening.spared([state.groups[g] for g in chosen], self._opening_s())
        chosen = chosen[:num]
        return chosen[: self._num_spared(len(chosen), now_ns)] if chosen else [], need

    def _num_spared(self, num_wanted: int, now_ns: int) -> int:
        """How many of ``num_wanted`` instances deadlines can spare; all where nothing is due, 0 while something is due
        and nothing is known of steps."""
        if not self._due_work.is_there:
            return num_wanted
        if (views := self._due_work.views((), now_ns)) is None:
            return 0
        return next((num for num in range(num_wanted, 0, -1) if may_go(*views, num)), 0)

    def _keep(self, chosen: list[GroupId], now_ns: int) -> tuple[list[GroupId], list[Record]]:
        """Those of the groups that fall asleep although there is offline work with a price or a floor, and the record
        that others stay awake for it, where that is news. None falls asleep while too little is known."""
        backlog, prices, num_idle = self._priced.view(now_ns), self._priced.prices, len(self._priced.idle())
        if backlog is None:
            return [], []
        num = num_worth(backlog, prices, num_idle, SLEEP_MARGIN / WAKE_MARGIN)
        asleep = chosen[: max(0, num_idle - num)]
        is_news, self._num_kept = len(asleep) < len(chosen) and num != self._num_kept, num
        fields = {"kept": num, "idle": num_idle} | as_fields(backlog, prices, num)
        return asleep, [Record("sleep_put_off", now_ns, fields)] if is_news else []

    def _may_leave(self, group: Group) -> bool:
        """Whether the group's worker could sleep: it is an instance by itself, has no online request, and no move or
        migration touches it."""
        queues = group.queues
        if len(group.stages) > 1 or queues.waiting or queues.serves_online or self._means.moves.is_moving(group):
            return False
        return not set(self._means.migrations.worker_ids) & set(group.worker_ids)

    def _sleep(self, worker_id: WorkerId, reason: str, now_ns: int, need: Need | None = None) -> list[Action]:
        """Order a worker to sleep, and return the actions of that; empty where it cannot sleep now. The log has
        ``reason``, and what is needed of the others."""
        if self._means.sleepers.why_not([worker_id], LEVEL) is not None:
            return []
        self._state.catch_up_all()  # what it hands on is dealt out by what others hold
        told = {} if need is None else need.as_fields()
        return self._means.sleepers.sleep([worker_id], LEVEL, now_ns, reason, told)
