"""Any schedule of requests, cancels, orders and faults: every token right, one end each, nothing left behind.

``JETTISON_EXAMPLES=3000`` looks further than the default.
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass
from functools import partial

import pytest
from fakes import BLOCK_SIZE, MS, SHARD_BYTES, FakeCluster, Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.order import SchedulingPolicy
from jettison.policy.overload import Trigger
from jettison.policy.packing.params import PackParams
from jettison.types import ServiceClass

N_EXAMPLES = int(os.environ.get("JETTISON_EXAMPLES", "18"))


@dataclass(frozen=True)
class Asked:
    """One request of a schedule."""

    num_prompt: int
    num_output: int
    at_ms: float
    prefix: int
    """Tokens shared with others."""
    priority: int
    tenant: str
    cancel_after_ms: float | None
    stops: bool
    min_tokens: int
    prompt_logprobs: int | None
    is_offline: bool
    has_default_length: bool
    """Of an online one: its client asks for no length, so that it may outgrow what is awake."""
    is_large: bool
    """As large as an engine may accept: more than an instance holds, where layers are dropped."""


@dataclass(frozen=True)
class Cluster:
    """What a schedule runs on."""

    seed: int
    num_workers: int
    num_layers: int
    full_blocks: int
    shard_bytes: int
    max_seqs: int
    max_tokens: int
    policy: str
    auto_restore: bool
    eager: bool
    prefix_caching: bool
    exchange: str
    trigger: Trigger
    prefill_first: bool
    scheduling_policy: SchedulingPolicy
    ttft_s: float | None
    """So short that steps of offline requests are given up for online ones."""
    packer: str | None
    """How online requests are packed, where nothing spreads them."""
    steps_ahead: int
    is_plain: bool
    """With steps ahead: only online requests, and no packing, so that there are many such steps."""

    @property
    def packing(self) -> PackParams | None:
        """Epochs as short as a few steps."""
        if self.packer is None or self.policy == "migrate" or self.mostly_ahead:
            return None
        return PackParams(packer=self.packer, epoch_s=0.03, retry_s=0.01)

    @property
    def mostly_ahead(self) -> bool:
        """Nothing of what keeps a group from planning ahead for good."""
        return self.is_plain and self.steps_ahead > 0


ASKED = st.builds(
    Asked,
    num_prompt=st.integers(1, 40),
    num_output=st.integers(0, 60),
    at_ms=st.one_of(st.just(0.0), st.floats(0, 400)),
    prefix=st.sampled_from([0, 0, 8, 16]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    tenant=st.sampled_from(["", "", "", "a", "b"]),
    cancel_after_ms=st.one_of(st.none(), st.none(), st.floats(0, 250)),
    stops=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 5]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    is_offline=st.sampled_from([False, False, True]),
    has_default_length=st.sampled_from([False, False, False, True]),
    is_large=st.sampled_from([False, False, False, False, True]),
)
CLUSTER = st.builds(
    Cluster,
    seed=st.integers(0, 10_000),
    num_workers=st.sampled_from([2, 2, 2, 3, 4, 5, 6]),
    num_layers=st.sampled_from([4, 5, 8]),
    full_blocks=st.integers(6, 60),
    shard_bytes=st.sampled_from([SHARD_BYTES, 256, 1024, 4096]),
    max_seqs=st.sampled_from([4, 16]),
    max_tokens=st.sampled_from([16, 32]),
    policy=st.sampled_from(["drop", "drop", "drop", "recompute", "swap", "migrate", "pipeline"]),
    auto_restore=st.sampled_from([True, True, False]),
    eager=st.booleans(),
    prefix_caching=st.sampled_from([True, True, False]),
    exchange=st.sampled_from(["live", "live", "auto", "transfer", "recompute"]),
    trigger=st.sampled_from(Trigger),
    prefill_first=st.sampled_from([False, False, True]),
    scheduling_policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    ttft_s=st.sampled_from([None, 0.001, 0.005]),
    packer=st.sampled_from([None, None, "mell", "mell", "best-fit", "worst-fit", "load-balance"]),
    steps_ahead=st.sampled_from([0, 1]),
    is_plain=st.booleans(),
)
ORDERS = ["drop", "drop", "restore", "restore", "sleep 1", "sleep 2", "wake"]
RATE = st.sampled_from([0.0, 0.0, 0.1, 0.4])
FAULTS = st.one_of(
    st.builds(Faults),
    st.builds(
        Faults, apply=RATE, offer=RATE, load=RATE, move=RATE, swap=RATE, remote=RATE, abandon=RATE,
        step=st.sampled_from([0.0, 0.02]),
    ),
)


def build(cluster: Cluster, faults: Faults, requests: list[Asked], orders: list[tuple[str, float]]) -> FakeCluster:
    fake = FakeCluster(
        num_workers=cluster.num_workers, full_blocks=cluster.full_blocks, num_layers=cluster.num_layers,
        seed=cluster.seed, policy=cluster.policy, auto_restore=cluster.auto_restore, max_seqs=cluster.max_seqs,
        max_tokens=cluster.max_tokens, prefix_caching=cluster.prefix_caching, shard_bytes=cluster.shard_bytes,
        faults=faults, eager=cluster.eager, host_slots=(0, 8, 64, 500)[cluster.seed % 4],
        swap_budget=(1, 4, None)[cluster.seed % 3], migrate_threshold=(1.0, 3.0, 8.0)[cluster.seed % 3],
        migration_kind=("kv", "tokens")[cluster.seed // 3 % 2], migration_step_tokens=(None, 3)[cluster.seed // 6 % 2],
        exchange=cluster.exchange, trigger=cluster.trigger, prefill_first=cluster.prefill_first,
        scheduling_policy=cluster.scheduling_policy,
        offline=OfflineParams(slo=SloParams(ttft_s=cluster.ttft_s)), packing=cluster.packing,
        steps_ahead=cluster.steps_ahead,
    )
    rng = random.Random(cluster.seed)
    shared = [rng.randrange(1, 60) for _ in range(16)]
    for i, asked in enumerate(requests):
        is_offline = asked.is_offline and not cluster.mostly_ahead
        # Where instances are merged anew in mid-flight a request of any size has to fit in the end.
        most = fake.core.max_request_blocks(is_offline=True) if is_offline else fake.core.max_request_blocks()
        blocks = min(most, 4 * cluster.full_blocks) if asked.is_large else cluster.full_blocks
        room = blocks * BLOCK_SIZE
        prompt = (shared[: asked.prefix] + [rng.randrange(1, 60) for _ in range(asked.num_prompt)])[: room - 4]
        num_output = room - len(prompt) if asked.is_large else min(asked.num_output, room - len(prompt))
        fake.submit(
            f"r{i}", prompt, min(num_output, 160), asked.at_ms, priority=asked.priority,
            stop_token_ids=(7, 11, 13) if asked.stops else (), min_tokens=asked.min_tokens,
            prompt_logprobs=None if cluster.mostly_ahead else asked.prompt_logprobs, tenant=asked.tenant,
            service_class=ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE,
            has_default_length=asked.has_default_length and not is_offline,
        )
        if asked.cancel_after_ms is not None:
            fake.cancel(f"r{i}", asked.at_ms + asked.cancel_after_ms)
    for what, at_ms in orders:
        if what in ("drop", "restore"):
            fake.order_at(what, at_ms)
        else:
            fake.at(int(at_ms * MS), partial(sleep_or_wake, fake, what, rng.randrange(cluster.num_workers)))
    return fake


def sleep_or_wake(fake: FakeCluster, what: str, worker_id: int) -> None:
    """An administrator's order, which is refused where it cannot be followed."""
    core = fake.core
    with contextlib.suppress(ValueError):
        if what == "wake":
            fake.carry_out(core.request_wake(worker_id, fake.now))
        else:
            fake.carry_out(core.request_sleep([worker_id], int(what[-1]), fake.now))


@pytest.mark.slow
@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cluster=CLUSTER,
    faults=FAULTS,
    requests=st.lists(ASKED, min_size=1, max_size=25),
    orders=st.lists(st.tuples(st.sampled_from(ORDERS), st.floats(0, 500)), max_size=8),
)
def test_any_schedule_keeps_every_invariant(
    cluster: Cluster, faults: Faults, requests: list[Asked], orders: list[tuple[str, float]]
) -> None:
    fake = build(cluster, Faults(**vars(faults)), requests, orders)
    fake.run()
    fake.expect_outputs()
    fake.expect_nothing_left()
    assert fake.num_stale_layouts == 0
