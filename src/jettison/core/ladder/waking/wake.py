"""Wake: sleepers serve again where memory, a death or prompts ahead press, and where a deadline of offline work would
be missed, or offline work is worth it (beyond the papers). Leaving means that workers fall asleep
(``core.ladder.waking.dozing``).

Why a worker sleeps makes no difference: memory that sleeps is memory, and what was promised by a time is owed. Where
memory keeps a queue out, the forecast says what a sleeper would save once it serves, and what it takes; the ladder
compares that with what a drop would save, and begins the better one. The next forecast knows of it: a drop begins
beside a wake where the queue cannot wait for it. ``scale`` asks outside when none sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jettison.core.ladder.dropplans import block_bytes, required_bytes
from jettison.core.ladder.forecasts import Question, Saving
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.outcomes import Decided
from jettison.core.ladder.prompts import num_for_arrivals, prompt_rate_of
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ladder.waking.backlog import PricedWork, woken_fields
from jettison.core.ladder.waking.dozing import Dozing
from jettison.core.ladder.waking.duework import LOOK_S, DueWork
from jettison.core.ladder.waking.lateprompts import LatePrompts
from jettison.core.ladder.waking.opening import Opening
from jettison.core.ladder.waking.spreading import Spreading, SpreadOffer
from jettison.core.ladder.waking.urgent import Urgent, UrgentOffer
from jettison.core.ladder.waking.waketimes import WakeTimes
from jettison.core.moving.sleeping import Expected
from jettison.core.ports import Action, Record, StoredWork
from jettison.core.serving.group import Group
from jettison.policy.batchworth import num_to_wake as num_worth_waking
from jettison.policy.deadlines import WAKE_MARGIN, needed_now, plan_wakes
from jettison.policy.dozing import WAKE_SHARE
from jettison.policy.lending import NO_LENDING, lend
from jettison.policy.overload import Trigger
from jettison.policy.slo import AHEAD_SHARE, objectives
from jettison.policy.waketimes import UNKNOWN_WAKE_S, WakeForecast, WakeSource, may_wake, num_to_wake
from jettison.types import NANOSECONDS, GroupId, WorkerId

NEWS_S = 5.0
"""Least seconds between two records that none is woken for the same group."""

ARRIVALS_S = 1.0
"""Seconds between two looks at what arrives, which is a mean over longer."""

QUICK_REQUESTS = 4096
"""Most requests with which deadlines are looked at on every tick while a worker sleeps or work is urgent: half a second
is much of a short window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeOffer(Offer):
    """Sleepers that are to be woken, the soonest first, and the reason with its figures."""

    worker_ids: tuple[WorkerId, ...]
    wake: WakeForecast
    """The forecast for the first of them."""
    told: dict[str, object] = field(default_factory=dict)
    saving: Saving | None = None
    """What it is forecast to save; None: none was weighed."""
    is_for_offline: bool = False


@register
class WakeRung(Rung):
    """Decides which workers are woken, and which fall asleep by themselves. An administrator may order otherwise."""

    name = "wake"
    rank = 65
    relieves = True
    is_word = False

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._sleepers = means.state, means.sleepers
        self._times = WakeTimes(means)
        self._wakes: dict[WorkerId, WakeForecast] = {}
        """By worker that is being woken: the forecast."""
        self._due_work = DueWork(means)
        self._priced = PricedWork(means, self._due_work)
        self._opening, self._late = Opening(means), LatePrompts(means)
        self._dozing = Dozing(
            means, self._due_work, self._priced, self._opening, lambda: min(self.wakes_s(), default=UNKNOWN_WAKE_S)
        )
        self._spreading = Spreading(means)
        self._urgent = Urgent(means, self._spreading.loses_little)
        self._num_losses = means.state.counters.num_worker_losses
        self._weighed: tuple[int, GroupId] | None = None
        """When the forecast was asked last whether to wake for a group."""
        self._declined_ns: dict[GroupId, int] = {}
        """When the log was told last that none is woken for a group."""
        self._arrivals_due_ns = 0
        """The time from which on arrivals are looked at again."""
        self._deadlines_due_ns = 0
        """The time from which on deadlines are looked at again ..."""
        self._stored: tuple[StoredWork, ...] = ()
        """... unless other work is stored than this."""
        self._num_for_deadlines: float | None = None
        """Instances that deadlines took when they were last looked at; None: there were none."""
        self._needed_ns: int | None = None
        """When a rung last lacked memory that it could not get."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm on ticks while a worker may fall asleep or be woken for a deadline, and none for steps while offline
        work is urgent, as a step of another group may make a place for it. Else calm without end."""
        if moment is Moment.TICK:
            may_decide = self.means.outcomes.is_watching or self._dozing.awaits_tick or bool(
                self._sleepers.out and (self._due_work.is_there or self._priced.is_there)
            )
        else:
            may_decide = self._urgent.is_there
        return Calm(0 if may_decide else None)

    def gauges(self) -> Mapping[str, float]:
        """The number of instances that all deadlines needed at the last look, by its name in metrics; empty while none
        is ahead."""
        num = self._num_for_deadlines
        return {} if num is None else {"devices_needed_for_deadlines": num}

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        """Yield offers of wakes, and of offline requests that change places, and records of why no worker is woken.
        Deaths are answered before steps; deadlines, prompts and arrivals on ticks; memory on ticks and after steps."""
        self._learn()
        if moment is Moment.TICK:
            yield from self.means.outcomes.on_tick(now_ns)
        if moment is Moment.BEFORE_STEPS:
            if self._state.params.awake.falls_asleep:
                self._dozing.note_changed(now_ns)
            if self._num_losses != self._state.counters.num_worker_losses:
                yield from self._answer_losses(now_ns)
            return
        if moment is Moment.TICK:
            yield from self._answer_deadlines(now_ns)
            yield from self._answer_backlog(now_ns)
        else:
            yield from self._spreading.look(now_ns)
            yield from self._urgent.look()
        if not self._sleepers.asleep and not self._sleepers.leaving:
            return
        yield from self._answer_memory(now_ns)
        if moment is Moment.TICK:
            yield from self._answer_growth(now_ns)
            yield from self._answer_compute(now_ns)
            yield from self._answer_late(now_ns)
            yield from self._answer_arrivals(now_ns)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Wake the offer's workers, or have its offline requests begin anew or wait elsewhere. Returns the record and
        the actions."""
        if isinstance(offer, SpreadOffer):
            return self._spreading.begin(offer, now_ns)
        if isinstance(offer, UrgentOffer):
            return self._urgent.begin(offer, now_ns)
        assert isinstance(offer, WakeOffer), offer
        # Another offer of this moment may have woken some.
        worker_ids = [w for w in offer.worker_ids if w in self._sleepers.can_wake]
        if not worker_ids:
            return []
        seconds = self._times.taken.seconds(offer.wake)
        fields: dict[str, object] = {"reason": offer.why, "workers": worker_ids}
        if offer.groups:
            fields["group"] = offer.groups[0]
        fields |= {"parameter_bytes": offer.wake.num_bytes, "source": str(offer.wake.source)}
        if (rate := offer.wake.bytes_per_s) is not None:
            fields["mib_per_second"] = rate / 2**20
        fields |= offer.told
        if "wake_s" not in fields and seconds is not None:
            fields["wake_s"] = seconds
        if offer.is_for_offline:
            self._spreading.note_woken(worker_ids)
        actions: list[Action] = [Record("wake_decided", now_ns, fields)]
        if offer.saving is not None:
            decided = Decided("wake_decided", next(iter(offer.groups), None), offer.saving.taking)
            actions += self.means.outcomes.begin(decided, now_ns)
        for number, worker_id in enumerate(worker_ids):
            self._dozing.note_woken(worker_id, now_ns, is_news=not number or not offer.is_for_offline)
            has_process = self._state.workers[worker_id].is_provisioned
            wake = offer.wake if has_process else self._times.wake(worker_id)
            actions += self._sleepers.wake(worker_id, now_ns, self._expect(worker_id, wake))
        return actions

    def expect(self, worker_id: WorkerId) -> Expected:
        """The prediction for a wake of this worker that an administrator or a request orders, which is remembered to
        learn from."""
        return self._expect(worker_id, self._times.wake(worker_id))

    def _expect(self, worker_id: WorkerId, wake: WakeForecast) -> Expected:
        """What ``wake`` makes a worker's wake take, in seconds, and its source. The forecast is remembered to learn
        from."""
        self._wakes[worker_id] = wake
        return Expected(self._times.taken.seconds(wake), str(wake.source), wake.source is not WakeSource.PEERS)

    def _learn(self) -> None:
        """Note how long each wake took that has ended since the last time, for later predictions. The first step is no
        part of it."""
        while self._sleepers.woken:
            woken = self._sleepers.woken.popleft()
            if (wake := self._wakes.pop(woken.worker_id, None)) is not None:
                self._times.taken.note(wake, (woken.took_ns - woken.start_ns) / NANOSECONDS)

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """Wake sleepers that have the ``missing_bytes`` which a rung could not get; return the actions, none where no
        worker can be woken, or the forecast has said at this moment what that is worth."""
        self._needed_ns = now_ns
        if self._weighed == (now_ns, group_id):
            return []
        group = self._state.groups.get(group_id)
        offer = self._offer(group, why, missing_bytes, now_ns)
        return [] if offer is None else self.begin(offer, now_ns)

    def leave(self, now_ns: int) -> list[Action]:
        """Put workers to sleep that no request needs; return the actions."""
        return self._dozing.advance(lambda: self._why_pressed(now_ns), now_ns)

    def go(self) -> None:
        """Have no offline work give way to urgent work any more, as the rung is about to be removed."""
        self._urgent.note()

    # --- which -------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[tuple[WorkerId, WakeForecast]]:
        """The workers that can be woken and are alive, with the forecasts of their wakes, the soonest first, unknown
        ones last."""
        workers = self._state.workers
        may = [w for w in self._sleepers.can_wake if workers[w].alive or not workers[w].is_provisioned]
        found = list(zip(may, self._times.wakes(may), strict=True)) if may else []
        times = {w: self._times.taken.seconds(wake) for w, wake in found}
        return sorted(found, key=lambda each: (math.inf if (s := times[each[0]]) is None else s, each[0]))

    def _num_up(self) -> int:
        """How many workers serve or are being woken: those that ``--max-awake`` bounds."""
        out = self._sleepers.out
        num_alive = sum(w.alive and w.worker_id not in out for w in self._state.workers.values())
        return num_alive + len(self._sleepers.provisioning.starting)

    def _offer(
        self, group: Group | None, why: str, missing_bytes: int, now_ns: int, told: dict[str, object] | None = None
    ) -> WakeOffer | None:
        """An offer to wake as many sleepers as have ``missing_bytes``, with those being woken counted that are
        not overdue, within ``--max-awake``; None where none is to be woken."""
        candidates = self._candidates()
        if not candidates:
            return None
        blocks_each = self._state.workers[candidates[0][0]].full_blocks
        missing_blocks = -(-missing_bytes // block_bytes(self._state))
        num = num_to_wake(missing_blocks, blocks_each, len(candidates), len(self._sleepers.coming_s(now_ns)))
        most = may_wake(self._num_up(), self._state.params.awake.max_awake)
        chosen = [w for w, _ in candidates[: num if most is None else min(num, most)]]
        if not chosen:
            return None
        groups = () if group is None else (group.group_id,)
        return WakeOffer(
            groups=groups, why=why, worker_ids=tuple(chosen), wake=candidates[0][1], told=told or {}
        )

    # --- deaths -----------------------------------------------------------------------------------------------

    def _answer_losses(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake one sleeper for each worker that has died awake since the last look, those woken in
        the same event counted; nothing without a sleeper that has a process: another's would be there no sooner than
        the dead one's next."""
        counters = self._state.counters
        num_lost, self._num_losses = counters.num_worker_losses - self._num_losses, counters.num_worker_losses
        dead = [w for w in self._state.workers.values() if not w.alive and not w.is_asleep and w.is_provisioned]
        num_wanted = min(num_lost, len(dead)) - self._sleepers.num_ordered(now_ns)
        num_wanted += len(self._sleepers.coming_s(now_ns))
        wanted_bytes = num_wanted * block_bytes(self._state) * max((w.full_blocks for w in dead), default=0)
        if not dead or (offer := self._offer(None, "a worker has died", wanted_bytes, now_ns)) is None:
            return
        if there := tuple(w for w in offer.worker_ids if self._state.workers[w].is_provisioned):
            yield replace(offer, worker_ids=there)

    # --- memory -----------------------------------------------------------------------------------------------

    def _pressed(self, now_ns: int) -> list[Group]:
        """The groups whose queue memory keeps out, or is foreseen to, and that no move but a restore touches."""
        loads, moves = self.means.loads, self.means.moves
        asked = [self._state.groups.get(g) for g in loads.pressed()]
        return [
            g for g in asked
            if g is not None and (not moves.is_moving(g) or moves.restore_of(g) is not None)
            and loads.memory_binds(g, now_ns)
        ]

    def _answer_memory(self, now_ns: int) -> Iterator[Offer | Record]:
        """Yield offers of wakes, and records of why no worker is woken, for groups that lack memory."""
        groups = {g.group_id: g for g in self._pressed(now_ns)}
        required = required_bytes(self._state, list(groups.values()), self._state.params.growth_factor)
        for group_id in self.means.turns.in_turn(groups):
            yield from self._answer(groups[group_id], required, now_ns)

    def _answer(self, group: Group, required: int, now_ns: int) -> Iterator[Offer | Record]:
        """Yield an offer to wake sleepers for one group that lacks memory, with what it is worth; where that is
        nothing, the record that none is woken, if that is news. Nothing without a sleeper, and while it is another
        group's turn to be asked about. Where nothing is known of steps, and where settings have no offer weighed,
        sleepers are woken."""
        weighs = self._state.params.overload.trigger is Trigger.FORECAST
        if weighs and not self.means.turns.may_ask(group.group_id, now_ns, self._state.groups):
            return
        offer = self._offer(group, "memory keeps the queue out", required, now_ns)
        if offer is None:
            return
        question = Question.of(self.means, now_ns) if weighs else None
        if question is None:
            yield offer
            return
        self._weighed = now_ns, group.group_id
        seconds = self._times.taken.seconds(offer.wake)
        takes_s = UNKNOWN_WAKE_S if seconds is None else seconds
        saving = question.waking(offer.worker_ids, takes_s)
        told = {"wake_s": takes_s} | saving.as_fields()
        if saving.worth.net_request_s > 0.0:
            yield replace(offer, worth=saving.rank, saving=saving, told=told)
        elif (told_ns := self._declined_ns.get(group.group_id)) is None or now_ns - told_ns >= NEWS_S * NANOSECONDS:
            self._declined_ns = {g: at_ns for g, at_ns in self._declined_ns.items() if g in self._state.groups}
            self._declined_ns[group.group_id] = now_ns
            asleep = {"group": group.group_id, "asleep": len(self._sleepers.asleep)}
            yield Record("wake_declined", now_ns, asleep | told)

    def _answer_growth(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake sleepers where what packed instances have open will be full before one could serve, or
        has room for all requests together, but not for each of them; nothing while workers are being woken, which is in
        time for it."""
        if not self._opening.is_asked or self._sleepers.coming_s(now_ns) or not (wakes_s := self.wakes_s()):
            return
        if (need := self._opening.lacks(wakes_s[0], now_ns)) is not None:
            why, missing = "what is open will be full before a sleeper could serve", need.missing_blocks
            told = need.as_fields()
        else:
            why, missing = "requests will outgrow the devices that are open", self.means.ask_lacking(wakes_s[0])
            told = {"lacking_blocks": missing}
        if not missing:
            return
        if (offer := self._offer(None, why, missing * block_bytes(self._state), now_ns, told)) is not None:
            yield offer

    # --- compute ----------------------------------------------------------------------------------------------

    def _answer_compute(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake sleepers where the prompts ahead of a newcomer would break the objective for its first
        token in every group; nothing if they are through before a sleeper could serve."""
        state = self._state
        ttft_s = objectives(state.params.offline.slo, state.predictor).ttft_s
        groups = self.means.moves.serving_groups()
        waits = [self._compute_wait_s(g, 2.0 * ttft_s) for g in groups] if ttft_s is not None else []
        if ttft_s is None or not waits or min(waits) <= AHEAD_SHARE * ttft_s or not (
            candidates := self._candidates()
        ):
            return
        seconds = self._times.taken.seconds(candidates[0][1])
        if seconds is not None and seconds >= min(waits):
            return
        wanted = max(1, math.ceil(sum(waits) / (AHEAD_SHARE * ttft_s)) - len(waits))
        wanted_bytes = wanted * state.workers[candidates[0][0]].full_blocks * block_bytes(state)
        told: dict[str, object] = {"compute_wait_s": min(waits), "slo_ttft_s": ttft_s}
        offer = self._offer(None, "prompts ahead break the objective for first tokens", wanted_bytes, now_ns, told)
        if offer is not None:
            yield offer

    def _answer_late(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake the soonest sleeper for a packed request whose prompt costs less there; asked once a
        second, with what arrives."""
        if now_ns < self._arrivals_due_ns:
            return
        if self._late.is_asked(now_ns) and (candidates := self._may_be_woken()):
            if (told := self._late.why(self._takes_s(candidates)[0])) is not None:
                num_bytes = self._state.workers[candidates[0][0]].full_blocks * block_bytes(self._state)
                offer = self._offer(None, "its prompt costs less on a sleeper", num_bytes, now_ns, told)
                if offer is not None:
                    yield offer

    def _answer_arrivals(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake sleepers where more prompts arrive than the instances that are awake can compute for
        long; asked once a second. Nothing where enough are being woken."""
        state, candidates = self._state, self._sleepers.can_wake
        if now_ns < self._arrivals_due_ns or not candidates:
            return
        self._arrivals_due_ns = now_ns + round(ARRIVALS_S * NANOSECONDS)
        groups = self.means.moves.serving_groups()
        num_missing = num_for_arrivals(state, self.means.loads, groups, WAKE_SHARE) - len(groups)
        if num_missing <= len(self._sleepers.coming_s(now_ns)):
            return
        missing_bytes = num_missing * max(state.workers[w].full_blocks for w in candidates) * block_bytes(state)
        offer = self._offer(None, "more prompts arrive than those who are awake compute", missing_bytes, now_ns)
        if offer is not None:
            yield offer

    def _compute_wait_s(self, group: Group, without_rate_s: float) -> float:
        """Seconds that the prompts ahead of a newcomer take in this group; 0 while nothing is known of steps;
        ``without_rate_s`` where decodes leave prompts no time."""
        num_tokens = group.queues.queued_tokens() + group.queues.unfinished_tokens()
        if not num_tokens:
            return 0.0
        rate = prompt_rate_of(self._state, group)
        if rate is None:
            return 0.0
        return num_tokens / rate if rate else without_rate_s

    # --- deadlines --------------------------------------------------------------------------------------------

    def _answer_deadlines(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake sleepers where offline work would be late with what is awake and being woken; nothing
        where they mend nothing. Also settles which work is urgent, and which gives way."""
        if not self._due_work.is_there:
            self._num_for_deadlines = None
            self._urgent.note()
            return
        self._due_work.look(now_ns)
        stored, self._stored = self._stored, self._state.stored_offline
        is_news = bool(self._sleepers.out) or self._urgent.is_there
        is_quick = is_news and len(self._state.requests) <= QUICK_REQUESTS
        if now_ns < self._deadlines_due_ns and stored == self._stored and not is_quick:
            return
        self._deadlines_due_ns = now_ns + round(LOOK_S * NANOSECONDS)
        views = self._due_work.views([*self._sleepers.coming_s(now_ns).values()], now_ns)
        if views is None:
            return
        demands, supply = views
        self._num_for_deadlines = needed_now(demands, supply)
        candidates = self._may_be_woken()
        takes_s = self._takes_s(candidates)
        plan = plan_wakes(demands, supply, takes_s)
        lending, keys = NO_LENDING, self._due_work.keys
        if self._state.params.awake.falls_asleep:
            woken = supply if plan is None else supply.and_woken(takes_s[: plan.num])
            lending = lend(demands, woken, self._due_work.waits)
        self._urgent.note((keys[i] for i in lending.urgent), (keys[i] for i in lending.giving_way))
        if plan is None:
            return
        told: dict[str, object] = {
            "deadline": plan.demand.name, "due_s": plan.demand.due_s, "late_s": plan.late_s,
            "late_with_s": plan.late_with_s, "needed_per_s": plan.needed, "available_per_s": supply.rate,
            "share": supply.share, "margin": WAKE_MARGIN,
        }
        yield WakeOffer(
            groups=(), why="offline work would be late for its deadline", told=told,
            worker_ids=tuple(w for w, _ in candidates[: plan.num]), wake=candidates[0][1],
            is_for_offline=True,
        )

    def _answer_backlog(self, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to wake sleepers for offline work that is worth it, by its price or for its floor; nothing
        while workers are being woken, as what they change is not seen yet."""
        if not self._priced.is_there or not self._sleepers.can_wake or self._sleepers.coming_s(now_ns):
            return
        backlog, prices, num_idle = self._priced.view(now_ns), self._priced.prices, len(self._priced.idle())
        candidates = self._may_be_woken()
        if backlog is None or not candidates:
            return
        takes_s = self._takes_s(candidates)
        num = num_worth_waking(backlog, prices, num_idle, takes_s)
        if num:
            yield WakeOffer(
                groups=(), why="offline work is worth it", told=woken_fields(backlog, prices, num_idle, takes_s[:num]),
                worker_ids=tuple(w for w, _ in candidates[:num]), wake=candidates[0][1], is_for_offline=True,
            )

    def _may_be_woken(self) -> list[tuple[WorkerId, WakeForecast]]:
        """The workers that can be woken within ``--max-awake``, with forecasts, the soonest first."""
        return self._candidates()[: may_wake(self._num_up(), self._state.params.awake.max_awake)]

    def _takes_s(self, candidates: Sequence[tuple[WorkerId, WakeForecast]]) -> list[float]:
        """Seconds of each of these wakes; ``UNKNOWN_WAKE_S`` where nothing is known of one."""
        return [UNKNOWN_WAKE_S if (s := self._times.taken.seconds(wake)) is None else s for _, wake in candidates]

    def wakes_s(self) -> tuple[float, ...]:
        """Seconds of each wake that ``--max-awake`` allows, the soonest first and unknown ones last; empty where no
        worker sleeps."""
        return tuple(self._takes_s(self._may_be_woken())) if self._sleepers.out else ()

    # --- falling asleep ---------------------------------------------------------------------------------------

    def _why_pressed(self, now_ns: int) -> str | None:
        """Why no worker may fall asleep now, in words; None: some may. That a request waits for a step is no reason: in
        a large cluster one always does, and an instance that no request used meanwhile would not have helped it."""
        state, moves = self._state, self.means.moves
        if self.means.loads.kept_out or state.unplaced_online():
            return "memory keeps online requests waiting"
        if moves.merges or moves.restores or (state.pipelines and not state.params.static_pipeline):
            return "instances are merged"
        if any(w.is_missed for w in state.workers.values()):
            return "a worker is dead"
        if any(w not in self._sleepers.provisioning.starting for w in self._sleepers.waking):
            return "a worker is being woken"
        since_ns = self._needed_ns
        lasts_ns = state.params.awake.after_s * NANOSECONDS
        return "memory was missing" if since_ns is not None and now_ns - since_ns < lasts_ns else None
