"""Small clusters and small loads for the simulator's tests, all from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jettison.core import ports
from jettison.core.ladder.lists import parse_overload
from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.memory.kvtransfers import ExchangeMode
from jettison.policy.lookahead import LookaheadParams
from jettison.policy.migration import MigrationParams
from jettison.policy.overload import OverloadParams, Trigger
from jettison.policy.restore import RestoreParams
from jettison.policy.swapping import SwapParams
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.fastforward import Times
from jettison.sim.setup import ClusterSetup, MemorySetup, setup_from_profile
from jettison.types import (
    EMBED_SHARD,
    HEAD_SHARD,
    FinishReason,
    ModelShape,
    Request,
    SamplingParams,
    ServiceClass,
    WorkerId,
    layer_shard,
)
from longrun import LONG

BLOCK_SIZE = 16
PAGE_BYTES = 4096
MANY_REQUESTS = 32 if LONG else 4


def make_shape(num_layers: int = 4, shard_bytes: int = 40 * PAGE_BYTES) -> ModelShape:
    """Small enough to read: 64 bytes of KV a token and layer, so 4 blocks a page."""
    shards = {layer_shard(i): shard_bytes for i in range(num_layers)}
    shards |= {EMBED_SHARD: shard_bytes // 2, HEAD_SHARD: shard_bytes // 2}
    return ModelShape(num_layers, 64, 4, 2, 8, 128, 256, 2, False, shards)


COST = CostModel(
    num_layers=4, pair_layer_s=2e-8, kv_token_layer_s=5e-8, token_layer_s=2e-5, layer_s=1e-4, step_s=2e-4,
    entry_s=1e-5, entry_token_s=1e-7, head_s=1e-4, sample_s=1e-6, weight_tokens=16,
)  # fmt: skip
"""A decode step takes about 2 ms, 128 tokens of prefill 11 ms."""

PROFILE = HardwareProfile(COST, 2e8, 2e-5, 1e-3, 1e-10, 1e9, 1e9)


def make_setup(policy: str = "drop", *, num_workers: int = 2, num_blocks: int = 36, eager: bool = True,
               exchange: str = "auto", steps_ahead: int = 0, **changes: Any) -> ClusterSetup:
    """``eager``: moves follow each other closely, so that a short run has several."""
    lookahead = LookaheadParams(enabled=policy == "drop")
    limits = SchedulerLimits(
        BLOCK_SIZE, 128, 64, 4096, enable_prefix_caching=False, lookahead=lookahead, steps_ahead=steps_ahead
    )
    params = ClusterParams(
        **parse_overload(policy)._asdict(), swap=SwapParams(num_host_slots=512),  # type: ignore[arg-type]
        migration=MigrationParams(threshold_blocks=3.0, period_s=0.02),
        exchange=ExchangeMode(exchange), profile=PROFILE,
    )
    if eager:
        params = replace(
            params, drop_dwell_s=0.05, restore=RestoreParams(usage_threshold=0.5, min_settled_s=0.1),
            overload=OverloadParams(trigger=Trigger.PRESSURE, min_blocked_s=0.005),
        )
    shape = changes.pop("shape", make_shape())
    memory = MemorySetup.for_blocks(shape, BLOCK_SIZE, num_blocks, page_bytes=PAGE_BYTES)
    setup = setup_from_profile(shape, limits, params, num_workers, memory, PROFILE)
    return replace(setup, **changes)


class Watched:
    """A simulated cluster with all that its clients and its operator see; the core's books are checked on the way."""

    def __init__(self, setup: ClusterSetup, *, checks: bool = True, check_every: int = 7) -> None:
        self.ends: dict[str, list[FinishReason]] = {}
        self.errors: dict[str, str | None] = {}
        """What clients of requests that ended with an error are told."""
        self.times: dict[str, list[int]] = {}
        """Of each token."""
        self.records: list[ports.Record] = []
        self.requests: dict[str, Request] = {}
        self.cluster = SimulatedCluster(
            setup, on_emit=self._on_emit, on_tokens=self._on_tokens, on_record=self.records.append,
            on_event=self._on_event if checks else None,
        )
        self.broken_off: set[str] = set()
        """What of offline work a worker's death came upon."""
        self._check_every = check_every
        self._num_unchecked = 0

    def _on_event(self, event: ports.Event, now_ns: int) -> None:
        if isinstance(event, ports.WorkerLost):
            self.broken_off |= self.under_way(event.worker_id)
        self._num_unchecked += 1
        core = self.cluster.core
        # A look at a crowd takes longer, and is taken more rarely.
        if self._num_unchecked >= self._check_every + len(core.state.requests) // MANY_REQUESTS:
            self._num_unchecked = 0
            core.check()

    def under_way(self, worker_id: WorkerId) -> set[str]:
        """What a worker does for offline requests, or has been asked to."""
        core = self.cluster.core
        groups = [group for group in core.groups.values() if worker_id in group.worker_ids]
        is_moving = any(worker_id in merge.worker_ids for merge in core.merges)
        found = {
            "checkpoint": bool(core.state.workers[worker_id].copying),
            "prefetch": any(core.hosted.store.of(g, HostedPhase.IN) for g in groups),
            "stored": any(core.hosted.store.of(g, HostedPhase.STORED) for g in groups),
            "abandoned step": any(g.abandoning in g.in_flight for g in groups),
            "pause": any(g.queues.offline_holders for g in groups),
            "pause in a drop": is_moving and any(g.queues.offline_holders for g in groups),
        }
        return {what for what, is_so in found.items() if is_so}

    def _on_emit(self, emit: ports.Emit, now_ns: int) -> None:
        self.times.setdefault(emit.request_id, []).extend(now_ns for _ in emit.tokens)
        if emit.finish_reason is not None:
            self.ends.setdefault(emit.request_id, []).append(emit.finish_reason)
        if emit.finish_reason is FinishReason.ERROR:
            self.errors[emit.request_id] = emit.error

    def _on_tokens(self, request_ids: Sequence[str], ends_ns: Times) -> None:
        for name in request_ids:
            self.times.setdefault(name, []).extend(ends_ns.tolist())

    def submit(
        self, name: str, num_prompt: int, num_output: int, at_s: float,
        service_class: ServiceClass = ServiceClass.ONLINE, tenant: str = "",
    ) -> None:
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        at_ns = round(at_s * 1e9)
        request = Request(name, (0,) * num_prompt, params, at_ns, service_class=service_class, tenant=tenant)
        self.requests[name] = request
        self.cluster.submit(request, at_ns)

    def load(self, seed: int, num_requests: int = 40, span_s: float = 0.5, mean_prompt: int = 60,
             mean_output: int = 40, offline_share: float = 0.0, num_tenants: int = 1) -> None:
        """A burst: most arrive in the first part of the span."""
        rng, classes = random.Random(seed), random.Random(seed + 1)
        room = min(w.full_blocks for w in self.cluster.core.state.workers.values()) * BLOCK_SIZE
        for i in range(num_requests):
            at_s = span_s * rng.random() ** 2
            prompt = 1 + min(600, room // 2, int(rng.expovariate(1 / mean_prompt)))
            output = 1 + min(300, room // 2 - 2, int(rng.expovariate(1 / mean_output)))
            is_offline = classes.random() < offline_share
            service_class = ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE
            self.submit(f"r{i}", prompt, output, at_s, service_class, f"t{i % num_tenants}")

    def kinds(self) -> list[str]:
        return [record.kind for record in self.records]

    def expect_all_served(self) -> None:
        """Every request has one end and all of its tokens, and nothing is left behind."""
        for name, request in self.requests.items():
            assert self.ends.get(name) == [FinishReason.LENGTH], (name, self.ends.get(name))
            assert len(self.times[name]) == request.params.max_tokens, name
            assert self.times[name] == sorted(self.times[name])
        self.expect_nothing_left()

    def expect_one_end_each(self) -> None:
        """What holds whatever dies: one end each, all tokens or an error that the deaths explain, never too many."""
        reasons = self._reasons_to_fail()
        for name, request in self.requests.items():
            ends, num_tokens = self.ends.get(name, []), len(self.times.get(name, []))
            assert ends in ([FinishReason.LENGTH], [FinishReason.ERROR]), (name, ends)
            assert num_tokens <= request.params.max_tokens
            if ends == [FinishReason.LENGTH]:
                assert num_tokens == request.params.max_tokens, name
            else:
                assert (self.errors[name] or "").startswith(reasons), (name, self.errors[name])
        self.expect_nothing_left()

    def _reasons_to_fail(self) -> tuple[str, ...]:
        """Beginnings of the errors that clients may get after these deaths.

        Never among them: "the model step failed", which is what follows when the core has a worker run layers that are
        not there or a step of a past epoch.
        """
        kinds, max_deaths = self.kinds(), self.cluster.core.params.faults.max_deaths_per_request
        reasons: tuple[str, ...] = ()
        if kinds.count("worker_lost") >= max_deaths:
            reasons += (f"{max_deaths} workers died while they computed this request",)
        if "worker_gone" in kinds:
            reasons += ("This model's maximum context length is ", "no worker could take the request")
        return reasons

    def expect_nothing_left(self) -> None:
        core = self.cluster.core
        core.check()
        assert core.state.is_idle() and not core.in_transition and core.hosted.is_idle
        for worker in core.state.workers.values():
            assert worker.ledger.num_held == 0 and not worker.ghosts and not worker.ledger_locked
            assert not worker.copying and worker.pool.num_free == worker.pool.num_slots
            model = self.cluster.workers[worker.worker_id]
            assert worker.alive == model.alive
            if worker.alive:
                assert worker.ledger.capacity == model.memory.capacity_blocks
                assert worker.layout.shards == model.memory.shards
                assert model.memory.shards <= model.filled | worker.unfilled
