"""Whether a step fits a model and its runner's limits: what every back end's runner checks before it computes.

Not here: shards and blocks that a step names (``device.worker``), and rows against their tables (``kernels``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.devicebytes import DeviceBytes
from jettison.device.kernels.base import Kernels
from jettison.device.model.decoder import ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.remote import AttentionPort, RemoteParts
from jettison.device.step import StepInput
from jettison.types import LayerRange


def check_limits(step: StepInput, config: DecoderConfig, max_num_tokens: int, max_num_seqs: int) -> LayerRange:
    """The step's layers. Raises ValueError for layers, tokens or samples that do not fit."""
    layers = LayerRange(step.layer_lo, step.layer_hi)
    if not 0 <= layers.lo < layers.hi <= config.num_layers:
        raise ValueError(f"step {step.step_id}: layers {layers.lo} to {layers.hi} of {config.num_layers}")
    num_tokens, num_samples = step.num_tokens, len(step.sample_rows)
    if not 0 < num_tokens <= max_num_tokens:
        raise ValueError(f"step {step.step_id}: {num_tokens} tokens, the workspace holds {max_num_tokens}")
    if num_samples > max_num_seqs:
        raise ValueError(f"step {step.step_id}: samples {num_samples} of at most {max_num_seqs} rows")
    for asked in step.prompt_logprobs:
        if len(asked.target_token_ids) > step.query_lens[asked.row]:
            raise ValueError(f"step {step.step_id}: more prompt logprobs asked than row {asked.row} has tokens")
    return layers


def check_input(step: StepInput, hidden: Tensor | None, hidden_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless a first stage has its token ids and no hidden states, and a later one the reverse."""
    expected = (step.num_tokens, hidden_size)
    if step.layer_lo == 0:
        if hidden is not None or len(step.token_ids) != expected[0]:
            raise ValueError(f"step {step.step_id}: stage one takes {expected[0]} token ids, no hidden states")
    elif hidden is None or hidden.shape != expected or hidden.dtype != dtype:
        got = "none" if hidden is None else f"{hidden.dtype} {tuple(hidden.shape)}"
        raise ValueError(f"step {step.step_id}: expected {dtype} {expected} hidden states, got {got}")


def remote_parts(
    step: StepInput, port: AttentionPort | None, kernels: Kernels, device_bytes: DeviceBytes, config: DecoderConfig,
    memory: ModelMemory,
) -> RemoteParts | None:
    """The parts of a step's attention that peers compute, and the peers are told that it begins; None where there are
    none. Raises ValueError where there is no peer to ask."""
    if not step.remote:
        return None
    if port is None:
        raise ValueError(f"step {step.step_id}: some KV lies elsewhere, and there is no peer to ask")
    block_size, scale = memory.kv_arena(step.layer_lo).shape[3], config.attention_scale
    parts = RemoteParts(step, port, kernels, device_bytes, config.num_heads, block_size, scale)
    port.begin(step)
    return parts
