"""Steps that make a card ready for all others: kernels are compiled for what a step may bring, and loaded.

A compiled kernel is kept on disk by Triton, so the first start on a machine takes the longest.

Not here: running them (``runner``).
"""

from __future__ import annotations

import numpy as np

from jettison.device.model.hf_config import DecoderConfig
from jettison.device.step import SamplingRow, StepInput, pack_ints
from jettison.types import LayerRange

_TILE_ROWS = (1, 64, 256)
"""Query heads of a KV head times tokens, of chunks that take tiles of different sizes (``tiles``)."""

PLAIN_DRAW = SamplingRow(0, 0, 0, 0.8, 0.9, 5, 0.01, logprobs=1)
ADJUSTED = SamplingRow(
    0, 0, 0, 0.8, 0.9, 5, 0.01, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=1,
    banned_token_ids=(0,), logit_bias=((0, 1.0),), prompt_ids=pack_ints([0]), output_ids=pack_ints([0]),
    output_counts=pack_ints([1]), logprob_token_ids=(0,),
)  # fmt: skip
"""What changes logits has kernels of its own."""


def warm_steps(config: DecoderConfig, layers: LayerRange, most_tokens: int, block_size: int) -> list[StepInput]:
    """One row each: a decode, and chunks of at most ``most_tokens``, over the first blocks. The last stage samples, and
    has one more decode."""
    group = config.num_heads // config.num_kv_heads
    lens = sorted({max(1, min(rows // group, most_tokens)) for rows in _TILE_ROWS})
    if layers.hi < config.num_layers:
        return [_step(layers, num_tokens, block_size, None) for num_tokens in lens]
    steps = [_step(layers, num_tokens, block_size, PLAIN_DRAW) for num_tokens in lens]
    return [*steps, _step(layers, 1, block_size, ADJUSTED)]


def num_warm_blocks(steps: list[StepInput]) -> int:
    """Blocks that they write."""
    return max(step.block_tables.shape[1] for step in steps)


def _step(layers: LayerRange, num_tokens: int, block_size: int, asks: SamplingRow | None) -> StepInput:
    return StepInput(
        step_id=0, layer_lo=layers.lo, layer_hi=layers.hi,
        token_ids=np.zeros(0 if layers.lo else num_tokens, dtype=np.int32),
        query_lens=np.array([num_tokens], dtype=np.int32), context_lens=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
        sample_rows=np.zeros(0 if asks is None else 1, dtype=np.int32), sampling=[] if asks is None else [asks],
    )  # fmt: skip
