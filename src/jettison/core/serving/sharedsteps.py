"""Steps of a group that has online and offline requests: its classes as ``policy.filling`` sees them, and the time that
a step of both may take.

It reads a group, and changes nothing in it. It is used only where the group has requests of both classes, and
objectives are kept (``--offline harvest``); elsewhere ``core.serving.stepplan`` plans all requests together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from jettison.core.requests import RequestState
from jettison.core.serving.flights import work_of
from jettison.core.serving.groupview import GroupView
from jettison.core.serving.planviews import (
    EachTime,
    running_rows,
    victim_rows,
    waiting_row,
    waiting_row_beside_victims,
)
from jettison.cost.stepwork import StepWork, step_of
from jettison.policy.batching import BatchLimits, BatchPlan, BatchView
from jettison.policy.filling import OfflineView, plan_beside, plan_within
from jettison.policy.slo import LONE_DECODE, Objectives, Own, Pace, StepBudget, filler_s, papers_filler_s, step_budget
from jettison.policy.standing import Foreseen, StepRoom
from jettison.types import NANOSECONDS

Planned = Callable[[BatchView, BatchLimits], BatchPlan]


def plan_shared(group: GroupView, pace: Pace, limits: BatchLimits, planned: Planned, now_ns: int) -> BatchPlan:
    """The next microbatch of a group with requests of both classes (``policy.filling``): online ones as ``planned``
    would plan them alone, offline ones in the tokens, blocks and time that are left. Where a flag bounds online steps,
    too, prompts beside online decodes are cut to that bound first."""
    goals = pace.objectives()
    num_stages, copies = len(group.stages), group.pending_copies
    planned = partial(planned_within, group, pace, planned) if pace.bounds_online else planned
    online = online_view(group)

    def budget_of(online_work: StepWork) -> StepBudget:
        if group.slices.kept is not None:  # its turns take what steps leave
            return step_budget(pace.predictor, 0.0, num_stages, copies)
        return step_budget(pace.predictor, filling_s(group, pace, goals, online_work, now_ns), num_stages, copies)

    return plan_beside(
        online, offline_view(group), limits, lambda view: planned(view, limits), budget_of,
        fills_after_eviction=pace.offline.fills_after_eviction,
        is_busy=bool(group.in_flight) or group.slices.kept is not None,
    )


def planned_within(
    group: GroupView, pace: Pace, planned: Planned, view: BatchView, limits: BatchLimits
) -> BatchPlan:
    """The plan that ``planned`` makes, with no more prompt tokens beside decodes than the TPOT objective has room for.

    Where prompts come first, nothing is cut: decodes wait for prompts, however long these take.
    """
    if group.limits.prefill_first:
        return planned(view, limits)
    budget = step_budget(
        pace.predictor, pace.offline.slo.tpot_s, len(group.stages), group.pending_copies
    )
    return plan_within(view, planned, limits, budget)


def filling_s(
    group: GroupView, pace: Pace, goals: Objectives, online_work: StepWork, now_ns: int
) -> float | None:
    """Seconds that a step with offline tokens may take, by the objectives and by how long online requests have waited
    for their first token. 0.0 where online requests are foreseen to lack memory (``Group.foreseen``). None: no bound,
    as no online request here waits for it."""
    queues = group.queues
    if not queues.serves_online and all(group.blocks.is_oversized(s) for s in queues.waiting):
        return None
    if pace.offline.fill == "paper":
        return papers_filler_s(goals, has_decodes=any(s.first_token_ns is not None for s in online_states(group)))
    if group.foreseen is not None and not group.foreseen.fits:
        return 0.0
    return filler_s(goals, lambda: _longest_wait_s(group, now_ns), own_of(group, pace, online_work))


def filled_decode_s(group: GroupView, pace: Pace, goals: Objectives) -> float:
    """Seconds of a filled step that decodes all online requests that run in the group: the pace of their words. At most
    the TPOT objective, which has to be known."""
    states = online_states(group)
    num_tokens = sum(state.num_tokens for state in states)
    work = StepWork.decodes(-(-len(states) // len(group.stages)), num_tokens // len(group.stages))
    return filler_s(goals, lambda: None, own_of(group, pace, work))


def own_of(group: GroupView, pace: Pace, online_work: StepWork) -> Own | None:
    """What a step's online part takes, where steps are filled to the knee and their times are known; else None."""
    taking = pace.predictor.taking(step_of(len(group.stages))) if pace.offline.fill == "knee" else None
    return None if taking is None else Own(taking(LONE_DECODE), taking(online_work))


def held_by_online(group: GroupView, growth_blocks: int) -> Foreseen:
    """The group's blocks, and those that its online requests hold, with ``growth_blocks`` that they are foreseen to
    take. Where all of it fits, shared blocks may be counted once for each holder; else the sum is exact."""
    states = [*online_states(group), *(s for s in group.queues.moving.values() if not s.is_offline)]
    ids, capacity = [s.request_id for s in states], group.blocks.capacity
    foreseen = Foreseen(group.blocks.num_used_by(ids), growth_blocks, capacity, len(ids))
    return foreseen if foreseen.fits else foreseen._replace(held_blocks=group.blocks.num_distinct(ids))


def _longest_wait_s(group: GroupView, now_ns: int) -> float | None:
    """The longest time, in seconds, that an online request here has waited for its first token; None where none does.
    Requests that are too large for the group do not count. O(running and waiting online requests)."""
    queues, blocks = group.queues, group.blocks
    arrivals = [s.request.arrival_ns for s in online_states(group) if s.first_token_ns is None]
    arrivals += [
        s.request.arrival_ns for s in queues.waiting if s.first_token_ns is None and not blocks.is_oversized(s)
    ]
    return (now_ns - min(arrivals)) / NANOSECONDS if arrivals else None


def room_of_last_step(
    group: GroupView, limits: BatchLimits, state: RequestState | None, now_ns: int
) -> StepRoom | None:
    """The size of the newest step under way beside its limits; where objectives bound it, also its predicted time with
    one token more of ``state``, an offline request, the time that it may take, and the online share of blocks. None
    without a step or a request."""
    flight = next(reversed(group.in_flight.values()), None)
    if flight is None or state is None:
        return None
    rows = flight.step.rows
    room = StepRoom(sum(row.num_tokens for row in rows), limits.max_num_tokens, len(rows), limits.max_rows)
    pace = group.pace()
    if pace is None or not pace.offline.slo_aware or not group.queues.has_both_classes:
        return room
    online_work = work_of([row for row in rows if not row.state.is_offline])
    seconds = filling_s(group, pace, pace.objectives(), online_work, now_ns)
    budget = step_budget(pace.predictor, seconds, len(group.stages))
    one_more_s = pace.predictor.predict_s(flight.work.with_prompt(1, state.num_computed), budget.part)
    return room._replace(
        is_timed=True, one_more_s=one_more_s, may_take_s=budget.seconds, foreseen=group.foreseen
    )


# --- views


def online_states(group: GroupView) -> list[RequestState]:
    """Running online requests, in the order of service; a new list."""
    queues = group.queues
    return list(islice(queues.running.values(), len(queues.running) - queues.num_running_offline))


def online_view(group: GroupView) -> BatchView:
    """The group as ``policy.batching`` sees it, with online requests alone and all blocks that are free now. Online
    requests are victims of each other, but for while preemption is held. Its waiting rows may be iterated over again;
    they are made anew each time."""
    blocks, states = group.blocks, online_states(group)
    num_allocatable = blocks.num_allocatable
    make = waiting_row_beside_victims if blocks.seals else waiting_row
    return BatchView(
        group.version, running_rows(group, states), len(states),
        EachTime(lambda: map(partial(make, group), group.queues.waiting)),
        lambda: [] if group.holds_preemption else victim_rows(group, reversed(states)),
        num_allocatable, num_allocatable - blocks.num_free,
    )


def offline_view(group: GroupView) -> OfflineView:
    """The group's offline requests as ``policy.filling`` sees them. None of them may be admitted while offline work is
    paused, a stored one waits to come back, or running ones sit out. They give way even while preemption is held:
    online requests do not wait for swaps while offline ones have blocks."""
    queues = group.queues
    newest_first = queues.running_offline()
    waiting = queues.waiting_offline if queues.admits_offline and not group.sitting_out else ()
    in_flight = False
    for state in newest_first:  # a generator would be called for each
        in_flight = in_flight or state.num_pending > 0
    return OfflineView(
        running_rows(group, reversed(newest_first)), len(newest_first),
        EachTime(lambda: map(partial(waiting_row, group), waiting)),
        lambda: victim_rows(group, newest_first),
        in_flight,
    )
