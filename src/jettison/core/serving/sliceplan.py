"""The turn of a group's slice, from what the group is like now (``policy.slices`` decides). Reads a group, changes
nothing in it."""

from __future__ import annotations

from jettison.core.serving.groupview import GroupView
from jettison.core.serving.sharedsteps import filling_s, online_states
from jettison.core.serving.slices import Slice
from jettison.cost.stepwork import StepWork, step_of
from jettison.policy.slices import ALL_LAYERS, TurnView, plan_turn
from jettison.policy.slo import Pace, step_budget


def layers_of_turn(group: GroupView, kept: Slice, now_ns: int) -> int | None:
    """Layers that the slice may compute now: all (None), or as many as fit before the next online step; 0: it waits."""
    pace = group.pace()
    has_online = bool(group.queues.waiting) or group.queues.serves_online
    if not has_online or pace is None:
        return ALL_LAYERS
    online = online_states(group)
    num_layers = len(group.stages[0].layers) - kept.num_layers
    return plan_turn(TurnView(
        has_online, bool(group.queues.waiting) or any(s.first_token_ns is None for s in online), kept.had_turn,
        num_layers, _left_s(group, pace, kept, num_layers), _room_s(group, pace, now_ns),
    ))  # fmt: skip


def _left_s(group: GroupView, pace: Pace, kept: Slice, num_layers: int) -> float | None:
    """Seconds of so many layers with the slice's rows."""
    whole_s = pace.predictor.predict_s(kept.work, step_of(len(group.stages)))
    return None if whole_s is None else whole_s * num_layers / sum(len(stage.layers) for stage in group.stages)


def _room_s(group: GroupView, pace: Pace, now_ns: int) -> float:
    """Seconds that the first stage has between two steps of the online requests that run: what a step with both classes
    may take, less what theirs takes."""
    budget = step_budget(
        pace.predictor, filling_s(group, pace, pace.objectives(), now_ns), len(group.stages)
    )
    online = online_states(group)
    work = StepWork.decodes(len(online), sum(s.num_computed for s in online))
    own_s = pace.predictor.predict_s(work, budget.part)
    return 0.0 if own_s is None or budget.seconds is None else budget.seconds - own_s
