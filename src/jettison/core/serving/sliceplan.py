"""In how many layers a group's slice joins the next step of online requests, from what the group is like now
(``policy.slices`` decides). Reads a group, changes nothing in it."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.core.ports import StepRow
from jettison.core.serving.flights import work_of
from jettison.core.serving.groupview import GroupView
from jettison.core.serving.sharedsteps import filling_s, online_states
from jettison.core.serving.slices import Slice
from jettison.cost.stepwork import StepWork
from jettison.policy.filling import added
from jettison.policy.slices import JoinView, plan_joining
from jettison.policy.slo import step_budget


def is_alone(group: GroupView) -> bool:
    """Whether no online request runs, waits or moves here: then the slice goes on at once."""
    return not (group.queues.waiting or group.queues.serves_online)


def fits(group: GroupView, kept: Slice, rows: Sequence[StepRow]) -> bool:
    """Whether a step with these rows has places for the slice's, too."""
    limits = group.planner.limits()
    num_tokens = sum(row.num_tokens for row in rows) + kept.num_tokens
    return num_tokens <= limits.max_num_tokens and len(rows) + len(kept.rows) <= limits.max_rows


def layers_to_join(group: GroupView, kept: Slice, rows: Sequence[StepRow], now_ns: int) -> int:
    """Layers in which the slice joins a step with these rows."""
    return _layers(group, kept, work_of(rows), now_ns, joins=True)


def layers_by_itself(group: GroupView, kept: Slice, now_ns: int) -> int:
    """Layers that the slice computes between two steps of the online requests that run, where it fits into none."""
    online = online_states(group)
    decodes = StepWork.decodes(len(online), sum(s.num_computed for s in online))
    return _layers(group, kept, decodes, now_ns, joins=False)


def _layers(group: GroupView, kept: Slice, work: StepWork, now_ns: int, *, joins: bool) -> int:
    """As many as a step with this work, or one before it, has time for; ``joins``: they are in the same step."""
    pace = group.pace()
    if pace is None:
        return 0
    num_layers = len(group.stages[0].layers) - kept.num_layers
    seconds = filling_s(group, pace, pace.objectives(), work, now_ns)
    budget = step_budget(pace.predictor, seconds, len(group.stages))
    own_s = pace.predictor.predict_s(work, budget.part)
    more_s = pace.predictor.predict_s(added(work, kept.work) if joins else kept.work, budget.part)
    if own_s is None or more_s is None or budget.seconds is None:
        return 0
    layer_s = (more_s - own_s if joins else more_s) / sum(len(stage.layers) for stage in group.stages)
    awaits_first = bool(group.queues.waiting) or any(s.first_token_ns is None for s in online_states(group))
    return plan_joining(JoinView(awaits_first, num_layers, layer_s, budget.seconds - own_s))
