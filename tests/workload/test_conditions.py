"""What a server tells of its memory, to the block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.core.founding import initial_groups
from jettison.cost.deployment import Deployment, deployment_to_document
from jettison.errors import ConfigError
from jettison.memory.layout import LayoutSpec
from jettison.report.results import RunResult
from jettison.sim.memory import ModelledMemory
from jettison.types import ModelShape
from jettison.workload.conditions import Conditions, conditions_of

BARE = ModelShape(5, 16, 2, 1, 8, 32, 64, 4)
SHAPE = replace(BARE, shard_bytes=dict.fromkeys(BARE.all_shards, 10_000))
"""Seven shards of three pages; 64 bytes of KV a token and layer."""
BUDGET_BYTES, WORKSPACE_BYTES = 301_000, 4_400


def deployment(policy: str | None, **changes: Any) -> Deployment:
    settings = {"block_size": 24} | ({} if policy is None else {"overload": policy})
    made = Deployment("tiny", SHAPE, 2, BUDGET_BYTES, WORKSPACE_BYTES, 4096, 1024, None, settings=settings)
    return replace(made, **changes)


def told(described: Deployment) -> Conditions:
    return conditions_of(RunResult("r", config={"deployment": deployment_to_document(described)}))


def device_tokens(policy: str, num_instances: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """What modelled devices say that they hold."""
    total = 0
    for group in initial_groups(range(num_instances), SHAPE, static_pipeline=policy == "pipeline"):
        layouts = [LayoutSpec(SHAPE.shards_for(stage.layers), stage.layers) for stage in group]
        devices = [
            ModelledMemory(
                SHAPE, block_size=24, page_bytes=4096, budget_bytes=budget_bytes, workspace_bytes=WORKSPACE_BYTES,
                spec=layout,
            )
            for layout in layouts
        ]
        total += 24 * min(device.capacity_blocks for device in devices)
    return total


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_capacities_are_those_of_the_devices(num_instances: int) -> None:
    separate, static = (device_tokens(policy, num_instances) for policy in ("drop", "pipeline"))
    rough = num_instances * (BUDGET_BYTES - WORKSPACE_BYTES - SHAPE.parameter_bytes) // (5 * 64)
    assert separate % 24 == 0 and separate < rough, "pages and blocks are rounded"
    for policy in (None, "drop", "recompute"):
        assert told(deployment(policy, num_instances=num_instances)).kv_capacity_tokens == separate
    pipeline = told(deployment("pipeline", num_instances=num_instances))
    assert pipeline.kv_capacity_tokens == pipeline.merged_capacity_tokens == static
    if num_instances == 2:
        assert told(deployment("drop")).merged_capacity_tokens == static


def test_a_pipeline_of_a_model_larger_than_an_instance() -> None:
    found = told(deployment("pipeline", budget_bytes=69_900))
    assert found == Conditions(None, device_tokens("pipeline", 2, 69_900), found.kv_capacity_tokens, 2)
    assert found.completed() == found


@pytest.mark.parametrize(
    "changes",
    [{"budget_bytes": 0}, {"budget_bytes": -5}, {"settings": {"block_size": "x"}}, {"settings": {"block_size": 0}},
     {"shape": replace(SHAPE, num_kv_heads=0)}, {"workspace_bytes": 10**9}],
)  # fmt: skip
def test_nonsense_is_not_stated(changes: dict[str, Any]) -> None:
    found = told(deployment("drop", **changes)).completed()
    assert found.kv_capacity_tokens is None and found.merged_capacity_tokens is None


def test_what_a_server_tells_fills_the_gaps_only() -> None:
    described = deployment("drop", num_instances=3)
    known = told(described)
    assert Conditions(num_instances=2).or_else(known).completed().kv_capacity_tokens == known.kv_capacity_tokens
    half = Conditions(parameter_share=0.5).or_else(known).completed()
    assert known.kv_capacity_tokens is not None
    assert half.merged_capacity_tokens == pytest.approx(known.kv_capacity_tokens * (1 - 0.5 / 3) / 0.5)
    assert conditions_of(RunResult("r")) == Conditions()
    assert conditions_of(RunResult("r", config={"deployment": {"format": "of tomorrow"}})) == Conditions()


@pytest.mark.parametrize("said", [Conditions(1.0), Conditions(-0.1), Conditions(num_instances=0)])
def test_what_was_said_is_checked_before_a_run(said: Conditions) -> None:
    with pytest.raises(ConfigError):
        said.check()
    Conditions(0.5, 100.0, None, 2).check()
