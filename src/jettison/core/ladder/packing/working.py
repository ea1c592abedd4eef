"""What requests of a packed group cost its steps: the second dimension of a packing, in the units of
``policy.packing.types.Work``."""

from __future__ import annotations

from jettison.core.state import ClusterState
from jettison.cost.stepwork import LONE_STEP
from jettison.policy.packing.types import Work
from jettison.policy.slo import AHEAD_SHARE, objectives
from jettison.types import NANOSECONDS

MOST_ROWS = 64
"""Requests of the batch by which the cost of one is told: larger batches would tell little of those that are packed."""


def work_of(cluster: ClusterState, full_blocks: int) -> Work | None:
    """What a decoding request, and a block of KV, add to a step of a group with so many blocks, and what they may add
    together: decodes take no more of the objective for a token than prompts leave them or, where a step of one request
    takes most of that already, as large a part of what it leaves of the rest. None while steps or the objective are not
    known, and where no step keeps to the objective: memory alone is packed then."""
    seconds_of = cluster.predictor.decoding(LONE_STEP)
    tpot_s = objectives(cluster.params.offline.slo, cluster.predictor).tpot_s
    if seconds_of is None or tpot_s is None:
        return None
    rows, num_tokens = max(2, min(MOST_ROWS, cluster.limits.max_num_seqs)), full_blocks * cluster.limits.block_size
    lone_s, deep_s, wide_s = seconds_of(1, 0), seconds_of(1, num_tokens), seconds_of(rows, num_tokens)
    row_s = max(0.0, wide_s - deep_s) / (rows - 1)
    block_s = max(0.0, deep_s - lone_s) / full_blocks
    if lone_s >= tpot_s:
        return None
    most_s = max(AHEAD_SHARE * tpot_s - lone_s, AHEAD_SHARE**2 * (tpot_s - lone_s)) + row_s
    return Work(*(round(seconds * NANOSECONDS) for seconds in (row_s, block_s, most_s)))
