"""The memory side of a fairness header: from the user's options, and from the server's deployment document.

A deployment document fills gaps in the report of a finished run, so no content of it raises an error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.config import KEYS
from jettison.config.rungs import overload_words
from jettison.core.founding import initial_groups
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
    """The cluster's part of a fairness header; None where a value is not known. Tokens are of the whole cluster."""

    parameter_share: float | None = None
    kv_capacity_tokens: float | None = None
    """KV capacity with no parameters dropped."""
    merged_capacity_tokens: float | None = None
    num_instances: int | None = None

    def check(self) -> None:
        """Raises ConfigError for a share or a number of instances from which no merged capacity could follow."""
        merged_capacity_factor(self.parameter_share or 0.0, 2 if self.num_instances is None else self.num_instances)

    def or_else(self, told: Conditions) -> Conditions:
        """These conditions, with missing values from ``told``. Its merged capacity is taken only where these conditions
        are all unset, as any of them would decide it."""
        said_nothing = self == Conditions()
        return Conditions(
            self.parameter_share if self.parameter_share is not None else told.parameter_share,
            self.kv_capacity_tokens if self.kv_capacity_tokens is not None else told.kv_capacity_tokens,
            told.merged_capacity_tokens if said_nothing else self.merged_capacity_tokens,
            self.num_instances if self.num_instances is not None else told.num_instances,
        )

    def completed(self) -> Conditions:
        """These conditions with the merged capacity that follows from the rest. Raises ConfigError as ``check``
        does."""
        merged = merged_capacity(
            self.kv_capacity_tokens, self.merged_capacity_tokens, self.parameter_share, self.num_instances or 2
        )
        return replace(self, merged_capacity_tokens=merged)


def merged_capacity(
    capacity_tokens: float | None, merged_tokens: float | None, parameter_share: float | None, num_instances: int
) -> float | None:
    """The merged capacity as given, or computed from the parameters' share; None where neither is known.

    Raises ConfigError for an invalid share, where the capacity is computed from it.
    """
    if merged_tokens is not None or capacity_tokens is None or parameter_share is None:
        return merged_tokens
    return capacity_tokens * merged_capacity_factor(parameter_share, num_instances)


def conditions_of(run: RunResult) -> Conditions:
    """The conditions in the deployment document of a run's server (``config.deployment``); all unset for a server
    without one.

    Capacities are those at the instances' start, exact to the block. There is no share where a copy of the parameters
    is larger than an instance, as in a static pipeline; the merged capacity of such a pipeline is its capacity.
    """
    document = run.config.get("deployment")
    if document is None:
        return Conditions()
    try:
        deployment = deployment_from_document(document, "config.deployment")
    except ConfigError:  # a document of another version
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
    """KV tokens of all instances unmerged, and of one group of them all, in which the bytes of the spare copies become
    KV."""
    groups = separate_and_merged(deployment.num_instances, deployment.shape)
    separate, merged = (round(_capacity_tokens(deployment, each) or 0) for each in groups)
    return separate, merged


def _capacity_tokens(deployment: Deployment, groups: Sequence[Sequence[StagePlan]]) -> float | None:
    """KV tokens of all groups; None where the deployment's sizes make no sense."""
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
    """KV tokens of instances in these groups, in whole pages and blocks: a group has as many as its smallest stage."""
    sizes = PageSizes.of(shape, block_size, page_bytes)

    def blocks(stage: StagePlan) -> int:
        layout = LayoutSpec(shape.shards_for(stage.layers), stage.layers)
        return first_capacity_blocks(budget_bytes, workspace_bytes, layout, sizes)

    return block_size * sum(min(blocks(stage) for stage in group) for group in groups)


def separate_and_merged(
    num_instances: int, shape: ModelShape
) -> tuple[tuple[tuple[StagePlan, ...], ...], tuple[tuple[StagePlan, ...], ...]]:
    """The groups of instances that each hold all layers, and the groups of the same instances when all have been
    merged."""
    ids = range(num_instances)
    separate = initial_groups(ids, shape, static_pipeline=False)
    return separate, plan_static_groups(ids, shape, min(num_instances, shape.num_layers))
