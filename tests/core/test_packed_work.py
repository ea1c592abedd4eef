"""How much of a step packed requests may take: less than leaves prompts their share, and never nothing while one step
still keeps to the objective."""

from __future__ import annotations

import pytest
from batchruns import COST, make

from jettison.core.ladder.packing.working import work_of
from jettison.cost.model import ChunkShape
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.packing.types import Work
from jettison.types import NANOSECONDS

LONE_S = COST.batch_cost_s([ChunkShape(0, 1)])


def work(tpot_s: float) -> Work | None:
    cluster = make(offline=OfflineParams(slo=SloParams(ttft_s=1.0, tpot_s=tpot_s)))
    return work_of(cluster.core.state, 200)


@pytest.mark.parametrize("times", [1.2, 1.6, 2.0, 3.0, 9.0])
def test_a_tight_objective_leaves_room_for_some_requests(times: float) -> None:
    found = work(times * LONE_S)
    assert found is not None
    others_s = (found.most - found.per_request) / NANOSECONDS
    assert 0.0 < others_s < (times - 1.0) * LONE_S, "prompts keep a part of what a step of one request leaves"
    assert found.room(0, 0, 200) >= 1


def test_the_looser_the_objective_the_more_fits() -> None:
    most = [w.most for times in (1.1, 1.5, 1.9, 2.1, 2.9, 3.1, 6.0, 9.0) if (w := work(times * LONE_S)) is not None]
    assert len(most) == 8 and most == sorted(most) and len(set(most)) == 8


def test_where_no_step_keeps_to_the_objective_memory_alone_is_packed() -> None:
    assert work(LONE_S) is None and work(0.5 * LONE_S) is None
