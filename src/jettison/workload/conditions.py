"""The memory side of a fairness header: what the user said of the cluster, and what a server told of itself.

What a server tells fills gaps in a report of a run that is over: nothing that it could tell raises here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.config import KEYS
from jettison.config.rungs import overload_words
from jettison.core.cluster import initial_groups
from jettison.cost.deployment import Deployment, deployment_from_document
from jettison.errors import ConfigError
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagemap import PageSizes, first_capacity_blocks
from jettison.memory.stages import StagePlan
from jettison.policy.pipeline import plan_static_groups
from jettison.report.fairness import merged_capacity_factor
from jettison.report.results import RunResult
from jettison.types import ModelShape


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the fairness header says of the cluster; None where it is not known. Tokens are of the whole cluster."""

    parameter_share: float | None = None
    kv_capacity_tokens: float | None = None
    """Undropped."""
    merged_capacity_tokens: float | None = None
    num_instances: int | None = None

    def check(self) -> None:
        """Raises ConfigError for a share or a number of instances from which no merged capacity could follow."""
        merged_capacity_factor(self.parameter_share or 0.0, 2 if self.num_instances is None else self.num_instances)

    def or_else(self, told: Conditions) -> Conditions:
        """This, and from ``told`` what is missing; its merged capacity only where nothing was said that decides it."""
        said_nothing = self == Conditions()
        return Conditions(
            self.parameter_share if self.parameter_share is not None else told.parameter_share,
            self.kv_capacity_tokens if self.kv_capacity_tokens is not None else told.kv_capacity_tokens,
            told.merged_capacity_tokens if said_nothing else self.merged_capacity_tokens,
            self.num_instances if self.num_instances is not None else told.num_instances,
        )

    def completed(self) -> Conditions:
        """With the merged capacity that follows from the rest. Raises ConfigError as ``check`` does."""
        merged = merged_capacity(
            self.kv_capacity_tokens, self.merged_capacity_tokens, self.parameter_share, self.num_instances or 2
        )
        return replace(self, merged_capacity_tokens=merged)


def merged_capacity(
    capacity_tokens: float | None, merged_tokens: float | None, parameter_share: float | None, num_instances: int
) -> float | None:
    """As it was given, or as it follows from the parameters' share; None where neither says it.

    Raises ConfigError for a share that is none, where it decides.
    """
    if merged_tokens is not None or capacity_tokens is None or parameter_share is None:
        return merged_tokens
    return capacity_tokens * merged_capacity_factor(parameter_share, num_instances)


def conditions_of(run: RunResult) -> Conditions:
    """What the server of a run told of itself (``config.deployment``); nothing where it is another's server.

    Capacities are those that its instances begin with, to the block. No share where a copy of the parameters is larger
    than an instance, as a static pipeline may have it; merged, such a pipeline holds what it holds anyway.
    """
    document = run.config.get("deployment")
    if document is None:
        return Conditions()
    try:
        deployment = deployment_from_document(document, "config.deployment")
    except ConfigError:  # of another version
        return Conditions()
    num, shape = deployment.num_instances, deployment.shape
    overload = str(deployment.settings.get("overload", KEYS["overload"].default))
    groups, merged = separate_and_merged(num, shape)
    if "pipeline" in overload_words(overload):
        groups = merged = initial_groups(range(num), shape, static_pipeline=True)
    fits = 0 < shape.parameter_bytes < deployment.budget_bytes
    return Conditions(
        shape.parameter_bytes / deployment.budget_bytes if fits else None,
        _capacity_tokens(deployment, groups), _capacity_tokens(deployment, merged), num,
    )


def capacities(deployment: Deployment) -> tuple[int, int]:
    """KV tokens of all instances, each alone, and of one group of them all, which the spare copies' bytes join."""
    groups = separate_and_merged(deployment.num_instances, deployment.shape)
    separate, merged = (round(_capacity_tokens(deployment, each) or 0) for each in groups)
    return separate, merged


def _capacity_tokens(deployment: Deployment, groups: Sequence[Sequence[StagePlan]]) -> float | None:
    """KV tokens of all groups; None: nothing that can be."""
    block_size = deployment.settings.get("block_size", KEYS["block_size"].default)
    if not isinstance(block_size, int) or block_size < 1 or deployment.shape.kv_bytes_per_token_layer < 1:
        return None
    tokens = capacity_tokens(
        deployment.shape, groups, budget_bytes=deployment.budget_bytes, workspace_bytes=deployment.workspace_bytes,
        page_bytes=deployment.page_bytes, block_size=block_size,
    )
    return float(tokens) if tokens else None


def capacity_tokens(
    shape: ModelShape, groups: Sequence[Sequence[StagePlan]], *, budget_bytes: int, workspace_bytes: int,
    page_bytes: int, block_size: int,
) -> int:
    """KV tokens of instances in these groups, whole pages and blocks: a group has as many as its poorest stage."""
    sizes = PageSizes.of(shape, block_size, page_bytes)

    def blocks(stage: StagePlan) -> int:
        layout = LayoutSpec(shape.shards_for(stage.layers), stage.layers)
        return first_capacity_blocks(budget_bytes, workspace_bytes, layout, sizes)

    return block_size * sum(min(blocks(stage) for stage in group) for group in groups)


def separate_and_merged(
    num_instances: int, shape: ModelShape
) -> tuple[tuple[tuple[StagePlan, ...], ...], tuple[tuple[StagePlan, ...], ...]]:
    """The groups of instances that hold all layers each, and of the same when all have been merged."""
    ids = range(num_instances)
    separate = initial_groups(ids, shape, static_pipeline=False)
    return separate, plan_static_groups(ids, shape, min(num_instances, shape.num_layers))
