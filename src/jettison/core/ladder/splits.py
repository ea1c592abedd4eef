"""Choice of the way in which a merged group is split: ``policy.restore`` names the ways, and the present state says
which of them fits."""

from __future__ import annotations

from jettison.core.moving.restoring import fits, will_hold
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.stages import SplitPlan
from jettison.policy.restore import plan_splits


def choose_split(
    state: ClusterState, group: Group, usual_output: float, max_overflow_blocks: int = 0
) -> SplitPlan:
    """The way in which a merged group is to be split: the first in which every request fits now and at its foreseen
    length; else the first in which all fit now; else the first way of all.

    ``usual_output``: tokens of a usual answer. ``max_overflow_blocks``: most blocks of requests that need not fit.
    """
    ways = plan_splits(group.stages, state.shape.num_layers)
    fitting = [way for way in ways if fits(state, group, way, max_overflow_blocks)]
    lasting = [way for way in fitting if will_hold(state, group, way, usual_output)]
    return (lasting or fitting or list(ways))[0]
