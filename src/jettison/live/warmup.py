"""A few steps on every worker before it serves: touches pages, warms caches, and gives the step-time fit its
first points."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import numpy as np

from jettison.core.cluster import ClusterCore
from jettison.device.step import StepInput
from jettison.errors import WorkerLostError
from jettison.live import codec
from jettison.live import messages as m
from jettison.live.assembly import Assembly
from jettison.types import WorkerId

_FIRST_STEP_ID = 1 << 60
"""Far above any id that the core gives."""

_ROUNDS = 3


class WarmUp:
    """Runs before the core sees any request; blocks it writes are free again afterwards."""

    def __init__(
        self, assembly: Assembly, capacity_blocks: Mapping[WorkerId, int], send: Callable[[WorkerId, m.Command], None]
    ) -> None:
        self._assembly = assembly
        self._capacity = capacity_blocks
        self._send = send
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_id = _FIRST_STEP_ID

    async def run(self, core: ClusterCore) -> None:
        """All workers at once, as they will serve. Raises WorkerLostError."""
        model = core.steptime(1)
        limits = self._assembly.limits
        blocks = min(self._capacity.values())
        most = min(limits.max_num_batched_tokens, blocks * limits.block_size, limits.max_model_len)
        rows = min(limits.max_num_seqs, 32, blocks)
        for round_index in range(_ROUNDS):
            for num_rows, num_tokens in ((1, most), (1, max(1, most // 2)), (rows, 1), (1, 1)):
                started = time.monotonic_ns()
                await asyncio.gather(*(self._step(w, num_rows, num_tokens) for w in self._capacity))
                if round_index > 0:
                    model.observe(num_rows * num_tokens, 0, (time.monotonic_ns() - started) / 1e9)

    async def _step(self, worker_id: WorkerId, num_rows: int, num_tokens: int) -> None:
        limits = self._assembly.limits
        per_row = -(-num_tokens // limits.block_size)
        tables = np.arange(num_rows * per_row, dtype=np.int32).reshape(num_rows, per_row)
        step = StepInput(
            step_id=self._next_id,
            layer_lo=0,
            layer_hi=self._assembly.shape.num_layers,
            token_ids=np.arange(num_rows * num_tokens, dtype=np.int32) % self._assembly.shape.vocab_size,
            query_lens=np.full(num_rows, num_tokens, dtype=np.int32),
            context_lens=np.zeros(num_rows, dtype=np.int32),
            block_tables=tables,
            sample_rows=np.arange(num_rows, dtype=np.int32),
        )
        self._next_id += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[step.step_id] = future
        self._send(worker_id, codec.step_command(step))
        await future

    def on_event(self, worker_id: WorkerId, event: m.Event) -> None:
        """A worker's answer."""
        if isinstance(event, m.StepDone) and event.step_id in self._waiting:
            self._waiting.pop(event.step_id).set_result(None)
        elif isinstance(event, m.StepFailed):
            self.fail(f"worker {worker_id} could not run a first step: {event.message}")

    def fail(self, reason: str) -> None:
        """A worker is gone or cannot compute."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerLostError(reason))
        self._waiting.clear()
