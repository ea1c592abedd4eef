"""Runs steps of given shapes on a device in this process, and says how long they took.

Not here: which shapes (``cost.shapes``), and what follows from the times (``cost.fit``).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from jettison.cost.model import ChunkShape, StepShape
from jettison.cost.shapes import ShapeLimits
from jettison.device.step import StepInput
from jettison.device.worker import DeviceWorker
from jettison.types import LayerRange

_FILL_BLOCKS = 64


class StepTimer:
    """Over a started device that holds the whole model. Writes its KV cache over."""

    def __init__(self, device: DeviceWorker, limits: ShapeLimits, seed: int = 0) -> None:
        self._device = device
        self._limits = limits
        self._rng = np.random.default_rng(seed)
        self._hidden: Any = None

    def prepare(self) -> None:
        """Put numbers into the KV cache (a page that was never written is not read like one that was), and make hidden
        states for stages that do not begin with the embedding."""
        device = self._device
        per_block = device.kv_block_bytes * len(device.shape.all_layers)
        numbers = self._numbers(min(_FILL_BLOCKS, device.capacity_blocks) * per_block)
        for first in range(0, device.capacity_blocks, _FILL_BLOCKS):
            ids = list(range(first, min(first + _FILL_BLOCKS, device.capacity_blocks)))
            device.kv_scatter(device.shape.all_layers, ids, numbers[: len(ids) * per_block])
        most = StepShape((ChunkShape(0, min(self._limits.max_num_tokens, self._limits.max_context)),), 1)
        hidden = device.run_step(self._step(most), None)
        self._hidden = hidden if device.shape.num_layers > 1 else None

    def time_s(self, shape: StepShape) -> float:
        """Seconds of one step of the shape: what ``run_step`` takes, sampling included."""
        step = self._step(shape)
        hidden = None if shape.is_first else self._hidden_of(shape.num_tokens)
        start_ns = time.perf_counter_ns()
        self._device.run_step(step, hidden)
        return (time.perf_counter_ns() - start_ns) / 1e9

    def _hidden_of(self, num_tokens: int) -> Any:
        assert self._hidden is not None, "prepare() first; a model of one layer has no later stage"
        repeats = -(-num_tokens // len(self._hidden))
        return self._hidden[:num_tokens] if repeats == 1 else self._hidden.repeat(repeats, 1)[:num_tokens]

    def _step(self, shape: StepShape) -> StepInput:
        layers = self._place(shape)
        query_lens = np.array([chunk.num_tokens for chunk in shape.chunks], dtype=np.int32)
        context_lens = np.array([chunk.num_context for chunk in shape.chunks], dtype=np.int32)
        num_blocks = -(-(query_lens + context_lens) // self._limits.block_size)
        tables = np.zeros((len(num_blocks), int(num_blocks.max())), dtype=np.int32)
        # Every request has blocks of its own, scattered as after some time of serving.
        order = self._rng.permutation(self._device.capacity_blocks).astype(np.int32)
        start = 0
        for row, count in enumerate(num_blocks.tolist()):
            tables[row, :count] = order[start : start + count]
            start += count
        num_ids = int(query_lens.sum()) if layers.lo == 0 else 0
        return StepInput(
            step_id=1,
            layer_lo=layers.lo,
            layer_hi=layers.hi,
            token_ids=self._rng.integers(0, self._device.config.vocab_size, num_ids, dtype=np.int32),
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            sample_rows=np.arange(shape.num_samples, dtype=np.int32),
        )

    def _place(self, shape: StepShape) -> LayerRange:
        """A range of so many layers: at the start, at the end where something is sampled, else in between."""
        num_layers = self._device.shape.num_layers
        if shape.is_first:
            return LayerRange(0, shape.num_layers)
        if shape.num_samples:
            return LayerRange(num_layers - shape.num_layers, num_layers)
        return LayerRange(1, 1 + shape.num_layers)

    def _numbers(self, num_bytes: int) -> np.ndarray:
        """Bytes of normally distributed numbers in the device's precision."""
        size = self._device.shape.dtype_bytes
        values = self._rng.standard_normal(num_bytes // size, dtype=np.float32)
        if size == 2:  # bfloat16 is the upper half of float32
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return (values if size == 4 else values.astype(np.float64)).view(np.uint8)
