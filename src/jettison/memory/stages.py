"""Which layers lie where: the stages of a pipeline, the shards that a member lacks for its stage, the groups of a
split.

Values for plans, and their sizes. Policies make the plans (``policy.ranges``, ``policy.restore``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jettison.types import LayerRange, ModelShape, ShardId, WorkerId


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One member's part of a group."""

    worker_id: WorkerId
    layers: LayerRange


class Pull(NamedTuple):
    """A shard that a member needs for its stage and does not hold."""

    shard: ShardId
    src: WorkerId
    dst: WorkerId


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The groups that a merged group becomes, each with a full copy of the layers.

    A member that is in no part is left over: it keeps its stage until the merged group is empty, and comes home then.
    """

    parts: tuple[tuple[StagePlan, ...], ...]


def stage_bytes(layers: LayerRange, shape: ModelShape) -> int:
    """Parameter bytes that a stage of ``layers`` holds."""
    return sum(shape.shard_bytes[shard] for shard in shape.shards_for(layers))
