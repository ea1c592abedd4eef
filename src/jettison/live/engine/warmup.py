"""A few steps on every worker before it serves: touches pages, warms caches, and, where there is no profile, gives
the predictor of step times its first points. Between hosts also probes of their networks (``link_classes``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.cost.stepwork import StepWork, step_of
from jettison.device.step import StepInput
from jettison.errors import WorkerLostError
from jettison.live.engine.assembly import Assembly
from jettison.live.engine.link_classes import LinkMeter
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.memory.stages import StagePlan
from jettison.policy.links import Links
from jettison.types import WorkerId

_FIRST_STEP_ID = 1 << 60
"""Far above any id that the core gives."""

_ROUNDS = 3


class WarmUp:
    """Runs before the core sees any request; blocks it writes are free again afterwards."""

    def __init__(
        self, assembly: Assembly, ready: Sequence[m.WorkerReady], send: Callable[[WorkerId, m.Command], None]
    ) -> None:
        self._assembly = assembly
        self._capacity = {event.worker_id: event.capacity_blocks for event in ready}
        self._loaded = {event.worker_id for event in ready if event.weights is not None}
        self._send = send
        self._meter = LinkMeter(send)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_id = _FIRST_STEP_ID
        self.part_done = 0.0
        """Of all steps, counted in tokens."""
        self.links_lost: list[ports.LinkLost] = []
        """For the core: the other end may tell when this is over."""

    async def run(self, core: ClusterCore) -> None:
        """All workers at once, as they will serve, but for those that have loaded nothing; then the networks between
        their hosts. Raises WorkerLostError."""
        limits = self._assembly.limits
        blocks = min(self._capacity.values())
        most = min(limits.max_num_batched_tokens, blocks * limits.block_size, limits.max_model_len)
        rows = min(limits.max_num_seqs, 32, blocks)
        groups = [g.stages for g in core.groups.values() if self._loaded.issuperset(g.worker_ids)]
        shapes = ((1, most), (1, max(1, most // 2)), (rows, 1), (1, 1))
        num_all_tokens = _ROUNDS * sum(num_rows * num_tokens for num_rows, num_tokens in shapes)
        for round_index in range(_ROUNDS):
            for num_rows, num_tokens in shapes:
                started = time.monotonic_ns()
                await asyncio.gather(*(self._step(stages, num_rows, num_tokens) for stages in groups))
                self.part_done += num_rows * num_tokens / num_all_tokens
                if round_index == 0 or core.params.profile is not None:
                    # These steps attend to nothing. Eight of them would make a fit that knows no price of KV and speaks
                    # in the profile's stead; until serving has shown as many, the profile knows better.
                    continue
                work, times_ns = StepWork.of([(num_tokens, 0)] * num_rows), (started, time.monotonic_ns())
                for num_stages in {len(stages) for stages in groups}:
                    core.state.predictor.observe(work, times_ns, part=step_of(num_stages))
        await self._measure_networks(core)

    async def _measure_networks(self, core: ClusterCore) -> None:
        """Where workers are on several hosts: what is between them."""
        params, machine = core.params, Links(core.params.machine_of).machine
        if params.has_profiled_links:  # shared memory
            return
        stages = [stage for group in core.groups.values() for stage in group.stages]
        networks = await self._meter.measure({w: machine(w) for w in self._capacity}, stages, self._capacity)
        core.reconfigure(replace(params, networks=networks))

    async def _step(self, stages: Sequence[StagePlan], num_rows: int, num_tokens: int) -> None:
        limits = self._assembly.limits
        per_row = -(-num_tokens // limits.block_size)
        tables = np.arange(num_rows * per_row, dtype=np.int32).reshape(num_rows, per_row)
        token_ids = np.arange(num_rows * num_tokens, dtype=np.int32) % self._assembly.shape.vocab_size
        step_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[step_id] = future
        workers = [s.worker_id for s in stages]
        for index, stage in enumerate(stages):
            step = StepInput(
                step_id=step_id,
                layer_lo=stage.layers.lo,
                layer_hi=stage.layers.hi,
                token_ids=token_ids if index == 0 else token_ids[:0],
                query_lens=np.full(num_rows, num_tokens, dtype=np.int32),
                context_lens=np.zeros(num_rows, dtype=np.int32),
                block_tables=tables,
                sample_rows=np.arange(num_rows, dtype=np.int32),
                prev_worker=workers[index - 1] if index else None,
                next_worker=workers[index + 1] if index + 1 < len(workers) else None,
            )
            self._send(stage.worker_id, codec.step_command(step))
        await future

    def on_event(self, worker_id: WorkerId, event: m.Event) -> None:
        """A worker's answer."""
        if isinstance(event, m.StepDone) and event.step_id in self._waiting:
            self._waiting.pop(event.step_id).set_result(None)
        elif isinstance(event, ports.TransferEnded):
            self._meter.on_event(event)
        elif isinstance(event, ports.LinkLost):
            self.links_lost.append(event)
            self._meter.on_event(event)
        elif isinstance(event, ports.StepFailed):
            self.fail(f"worker {worker_id} could not run a first step: {event.message}")

    def fail(self, reason: str) -> None:
        """A worker is gone or cannot compute."""
        self._meter.fail(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerLostError(reason))
        self._waiting.clear()
