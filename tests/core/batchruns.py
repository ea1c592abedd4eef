"""Runs of the pretend cluster with a batch beside online requests, whose steps take what a profile says."""

from __future__ import annotations

from fakes import FakeCluster, tokens

from jettison.core import ports
from jettison.core.serving.group import Group
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.policy.offline import OfflineParams, SloParams
from jettison.types import ServiceClass

COST = CostModel(
    num_layers=4, pair_layer_s=0.0, kv_token_layer_s=0.0, token_layer_s=1.25e-5, layer_s=3.5e-4, step_s=1e-4,
    entry_s=0.0, entry_token_s=0.0, head_s=0.0, sample_s=0.0,
)  # fmt: skip
PROFILE = HardwareProfile(COST, 2e8, 2e-5, 1e-3, 1e-10, 1e9, 1e9)
"""What the pretend workers take: 1.5 ms a step, and 50 us a token."""


def make(ttft_ms: float | None = 10.0, **changes: object) -> FakeCluster:
    slo = SloParams(ttft_s=None if ttft_ms is None else ttft_ms / 1e3)
    settings: dict[str, object] = {
        "num_workers": 1, "full_blocks": 200, "policy": "recompute", "max_tokens": 400, "profile": PROFILE,
        "prefix_caching": False, "offline": OfflineParams(slo=slo),
    }
    return FakeCluster(**(settings | changes))  # type: ignore[arg-type]


def offline(cluster: FakeCluster, name: str, num_prompt: int, num_output: int, at_ms: float = 0.0) -> None:
    cluster.submit(
        name, tokens(len(name), num_prompt), num_output, at_ms, service_class=ServiceClass.OFFLINE, ignore_eos=True)


def group_of(cluster: FakeCluster) -> Group:
    (group,) = cluster.core.groups.values()
    return group


def steps(cluster: FakeCluster) -> list[ports.RunStep]:
    """All that are issued from now on."""
    issued: list[ports.RunStep] = []
    carry_out = cluster.carry_out

    def watch(actions: list[ports.Action]) -> None:
        issued.extend(a for a in actions if isinstance(a, ports.RunStep))
        carry_out(actions)

    cluster.carry_out = watch  # type: ignore[method-assign]
    return issued


def kinds(cluster: FakeCluster) -> list[str]:
    return [record.kind for record in cluster.records]


def names(step: ports.RunStep) -> list[str]:
    return [row.state.request_id for row in step.rows]
