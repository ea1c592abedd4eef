"""Steps that may be given up, or may shed their offline rows (safepoints): which steps are armed, and what an online
arrival does to the step under way.

``policy.slices`` decides whether a step sheds rows; where workers cannot, ``policy.safepoints`` decides whether a step
of offline requests alone is given up, and which requests make way in the next batch. Here are their views.
``core.driving.stepping`` handles what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from jettison.core.ports import AbandonStep, Action, Record, RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.flights import InFlight, work_of
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.stepwork import NOTHING, StepWork, step_of
from jettison.policy.batching import BlockedBy
from jettison.policy.safepoints import (
    Ahead,
    ArrivalView,
    choose_safepoint_layers,
    next_safepoint_s,
    plan_making_way,
)
from jettison.policy.slices import ShedView, sheds
from jettison.policy.slo import Objectives, objectives
from jettison.types import NANOSECONDS, GroupId


class Safepoints:
    """Gives steps with offline requests safepoints. Has such a step shed these as an online request comes or, where
    workers cannot, has a step of offline requests alone given up where an online one would miss its deadline."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def arm(self, group: Group, step: RunStep) -> RunStep:
        """Give a step that was just planned, whose last row is offline, safepoints, if objectives are kept
        (``slo_aware``) and it may shed its offline rows or has no others. Returns the step to be issued, unchanged
        otherwise. ``safepoint_layers`` of the parameters says after how many layers each comes; where it is None, after
        each where rows are shed, else ``policy.safepoints`` chooses by the predicted time of the first stage."""
        params = self._state.params.offline
        if not params.slo_aware:
            return step
        num_online, has_remote = len(step.rows), False
        while num_online and step.rows[num_online - 1].state.is_offline:
            num_online -= 1
            has_remote = has_remote or bool(step.rows[num_online].remote)
        # Rows can be kept if workers can do it and keep no others; neither a guest's, nor any with KV elsewhere.
        may_shed = self._state.limits.sheds_rows and group.slices.kept is None and not has_remote
        sheds_from = num_online if may_shed and not group.in_flight[step.step_id].guests else None
        if num_online and sheds_from is None:
            return step
        every = params.safepoint_layers
        if every is None and sheds_from is not None:
            every = 1  # a look takes a ten-thousandth of a layer, and what stops at it loses nothing
        elif every is None:
            step_s = self._predict_s(group, group.in_flight[step.step_id].work)
            stage_s = None if step_s is None else step_s * self._first_share(group)
            every = choose_safepoint_layers(len(group.stages[0].layers), stage_s, self._objectives().ttft_s)
        return group.arm(step.step_id, every, sheds_from)

    def make_way(self, now_ns: int) -> list[Action]:
        """Have steps under way make way for the online requests that have come to their groups, be it from outside or
        from another group, and forget that they came; return the records and orders of that."""
        came, actions, made = self._state.changes.came, list[Action](), set[GroupId]()
        for request_id in came:
            state = self._state.requests.get(request_id)
            if state is None or state.group_id in made:
                continue
            group = self._state.groups.get(state.group_id)
            flight = None if group is None else next(reversed(group.in_flight.values()), None)
            if group is not None and flight is not None and flight.step.safepoint_layers:
                if flight.step.sheds_from is None:
                    made.add(group.group_id)  # way is made for all that wait there
                actions += self._make_way(state, group, flight, now_ns)
        came.clear()
        return actions

    def _make_way(self, state: RequestState, group: Group, flight: InFlight, now_ns: int) -> list[Action]:
        """Keep the deadline of an online request that has just been queued, if that is possible, where the group's
        newest step (``flight``, which has safepoints) has offline requests alone (ConServe Algorithm 2). The newest
        offline requests sit the next batch out and, if that is not enough, the step is asked to give up; then a record
        and the order to the first stage's worker are returned.

        A step that may shed its offline rows is asked for that instead (``_ask_to_shed``). Nothing happens without an
        online request that waits for its first token, or while objectives or step times are not known.
        """
        if flight.step.sheds_from is not None:
            return self._ask_to_shed(group, flight, state, now_ns)
        view = self._view(group, flight, now_ns)
        if view is None:
            return []
        offline = [s for s in group.queues.running_offline() if s.ending is None][::-1]
        works = {given_up: self._works(group, offline, given_up=given_up) for given_up in (False, True)}

        def num_fitting(given_up: bool, room_s: float) -> int | None:
            return self._num_fitting(group, works[given_up], room_s, len(offline))

        way = plan_making_way(view, num_fitting)
        group.have_sit_out(s.request_id for s in offline[way.num_kept :])
        if not way.abandons:
            return []
        group.abandoning = flight.step.step_id
        asked = Record("step_abandon_asked", now_ns, {
            "group": group.group_id, "request": state.request_id,
            "deadline_ms": _ms(view.left_s), "runs_on": _waits_ms(view.runs_on), "given_up": _waits_ms(view.given_up),
            "next_batch_ms": _ms(self._predict_s(group, works[True](way.num_kept))),
            "offline": len(offline), "kept": way.num_kept,
        })  # fmt: skip
        return [asked, AbandonStep(group.worker_ids[0], flight.step.step_id)]

    def _ask_to_shed(self, group: Group, flight: InFlight, state: RequestState, now_ns: int) -> list[Action]:
        """Have a step shed its offline rows for an online request that has just been queued, where ``policy.slices``
        finds that it gains enough: a record, and the order to the first stage's worker. Nothing where memory keeps the
        requests before this one out anyway, or where the worker's one place for rows may be taken."""
        step = flight.step
        is_kept_out = group.head_blocked_by is BlockedBy.MEMORY and len(group.queues.waiting) > 1
        if is_kept_out or not has_place(group, step) or state not in group.queues.waiting:
            return []
        view = self._shed_view(group, flight, now_ns)
        if view is None or not sheds(view):
            return []
        group.abandoning = step.step_id
        asked = Record("step_shed_asked", now_ns, {
            "group": group.group_id, "request": state.request_id, "saved_ms": _ms(view.saved_s),
            "price_ms": _ms(view.price_s), "left_ms": _ms(view.whole_left_s), "online": step.sheds_from,
            "offline": len(step.rows) - (step.sheds_from or 0),
        })  # fmt: skip
        return [asked, AbandonStep(group.worker_ids[0], step.step_id)]

    # --- views ------------------------------------------------------------------------------------------------

    def _view(self, group: Group, newest: InFlight, now_ns: int) -> ArrivalView | None:
        """The group as ``policy.safepoints`` sees it: the time left to the deadline, and how long the next batch has to
        wait if the step ``newest`` runs on (None once it was asked to give up) and if it is given up. None where no
        online request waits for its first token, or objectives or step times are not known."""
        goals = self._objectives()
        left_s = self._left_s(group, goals, now_ns)
        if left_s is None or goals.tpot_s is None:
            return None
        remaining: list[float] = []
        newest_s = elapsed_s = 0.0
        for flight in group.in_flight.values():
            predicted_s = self._predict_s(group, flight.work)
            if predicted_s is None:
                return None
            newest_s, elapsed_s = predicted_s, (now_ns - flight.issued_ns) / NANOSECONDS
            remaining.append(max(0.0, newest_s - elapsed_s))
        *before, own_s = remaining
        # A pipeline whose stages are all busy has to end one of its steps before it begins another.
        place_s = min(before) if len(remaining) == len(group.stages) > 1 else 0.0
        stage_s, num_layers = newest_s * self._first_share(group), len(group.stages[0].layers)
        stage_left_s = max(0.0, stage_s - elapsed_s)
        stop_s = next_safepoint_s(num_layers, newest.step.safepoint_layers, stage_s, elapsed_s)
        runs_on = Ahead(max(stage_left_s, place_s), max(own_s, *before) if before else own_s)
        given_up = Ahead(max(stop_s, place_s), max(stop_s, *before) if before else stop_s)
        is_asked = group.abandoning == newest.step.step_id
        return ArrivalView(left_s, len(group.stages), None if is_asked else runs_on, given_up, goals.tpot_s)

    def _shed_view(self, group: Group, flight: InFlight, now_ns: int) -> ShedView | None:
        """A step that may shed rows, as ``policy.slices`` sees it; None while step times are not known."""
        step, share = flight.step, self._first_share(group)
        whole_s = self._predict_s(group, flight.work)
        online_s = self._predict_s(group, work_of(step.rows[: step.sheds_from])) if step.sheds_from else 0.0
        offline_s = self._predict_s(group, work_of(step.rows[step.sheds_from :]))
        if whole_s is None or online_s is None or offline_s is None:
            return None
        num_layers = len(group.stages[0].layers)
        first = step.resumes.num_layers if step.resumes is not None else 0
        elapsed_s = (now_ns - flight.issued_ns) / NANOSECONDS
        # Rows that were shed join the others at their layer: there is nothing to be shed before that.
        alone_s, stage_s = online_s * share * first / num_layers, whole_s * share * (num_layers - first) / num_layers
        since_s = max(0.0, elapsed_s - alone_s)
        stop_s = alone_s + since_s - elapsed_s
        stop_s += next_safepoint_s(num_layers - first, step.safepoint_layers, stage_s, since_s)
        left = max(0.0, alone_s + stage_s - elapsed_s - stop_s) / whole_s if whole_s else 0.0
        return ShedView(alone_s + stage_s - elapsed_s, stop_s, online_s * left, offline_s * left)

    def _left_s(self, group: Group, goals: Objectives, now_ns: int) -> float | None:
        """Seconds until the earliest deadline of the waiting online requests without a first token; negative once it
        has passed. None without such a request, or while the TTFT objective is not known."""
        arrivals = [s.request.arrival_ns for s in group.queues.waiting if s.first_token_ns is None]
        if goals.ttft_s is None or not arrivals:
            return None
        return goals.ttft_s - (now_ns - min(arrivals)) / NANOSECONDS

    def _works(self, group: Group, offline: list[RequestState], *, given_up: bool) -> Callable[[int], StepWork]:
        """A function of a number: the next batch's work with so many of these offline requests in it, the first ones.
        Online requests, running ones before waiting ones, go in before them; all together take at most one step's
        tokens. ``given_up``: tokens of the steps under way count as not computed."""
        queues, room = group.queues, group.limits.max_num_batched_tokens
        online = (s for s in queues.running.values() if not s.is_offline)
        work = NOTHING
        for state in (*online, *queues.waiting):
            if work.num_tokens >= room:
                break
            work = _with(work, state, room, given_up=given_up)
        works = list(accumulate(offline, lambda so_far, s: _with(so_far, s, room, given_up=given_up), initial=work))
        return works.__getitem__

    def _num_fitting(self, group: Group, work_of: Callable[[int], StepWork], room_s: float, num: int) -> int | None:
        part = step_of(len(group.stages))
        least_s = self._state.predictor.predict_s(work_of(0), part)
        if least_s is None or least_s > room_s:
            return None
        return self._state.predictor.largest_batch(room_s, num, work_of, part)

    def _predict_s(self, group: Group, work: StepWork) -> float | None:
        return self._state.predictor.predict_s(work, step_of(len(group.stages)))

    def _first_share(self, group: Group) -> float:
        return len(group.stages[0].layers) / self._state.shape.num_layers

    def _objectives(self) -> Objectives:
        return objectives(self._state.params.offline.slo, self._state.predictor)


def has_place(group: Group, step: RunStep) -> bool:
    """Whether nothing is kept for the group, and none of its steps under way may have rows kept before this one does:
    no step was asked to shed, and none computes a part of a slice."""
    if group.slices.kept is not None or group.abandoning in group.in_flight:
        return False
    return all(f.step is step or f.step.resumes is None for f in group.in_flight.values())


def _with(work: StepWork, state: RequestState, room: int, *, given_up: bool) -> StepWork:
    """A batch's work with one more request: its tokens that are left to compute, at least one, as far as ``room``
    tokens in all allow; unchanged where the batch is full. Tokens under way count as computed, unless their step is
    ``given_up``."""
    context = state.num_computed + (0 if given_up else state.num_pending)
    return work.with_prompt(min(max(1, state.num_tokens - context), room - work.num_tokens), context)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _waits_ms(ahead: Ahead | None) -> tuple[float, ...] | None:
    return None if ahead is None else (round(1e3 * ahead.first_s, 3), round(1e3 * ahead.last_s, 3))
