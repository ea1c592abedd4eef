"""How a merged group is split: the ways are ``policy.restore``'s, which one fits is seen from the present state."""

from __future__ import annotations

from jettison.core.moving.restoring import fits, will_hold
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.stages import SplitPlan
from jettison.policy.restore import plan_splits


def choose_split(
    state: ClusterState, group: Group, usual_output: float, max_overflow_blocks: int = 0
) -> SplitPlan:
    """The first way of splitting that fits, the furthest one if none does.

    A way in which every request will still fit when it is as long as it is foreseen to become goes before one that only
    has room now.
    """
    ways = plan_splits(group.stages, state.shape.num_layers)
    fitting = [way for way in ways if fits(state, group, way, max_overflow_blocks)]
    lasting = [way for way in fitting if will_hold(state, group, way, usual_output)]
    return (lasting or fitting or list(ways))[0]
