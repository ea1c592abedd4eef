"""Rotary position embedding: inverse frequencies and the cosine and sine tables.

The tables are computed in double and rounded once, so an entry does not depend on the number of served positions. The
rotation itself is a kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jettison.device.model.hf_config import DecoderConfig, RopeScaling

_POSITIONS_AT_ONCE = 4096


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position of each pair of dimensions: float64 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, and the ones between interpolated.

    The number of turns of a pair within the pretraining context decides: at most ``low_freq_factor`` turns is long, at
    least ``high_freq_factor`` is short.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def fill_rotary_tables(config: DecoderConfig, cos: Tensor, sin: Tensor) -> None:
    """Fill ``cos`` and ``sin``, [max_model_len, head_dim] each: row p is position p, both halves alike."""
    frequencies = inverse_frequencies(config)
    for start in range(0, cos.shape[0], _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, cos.shape[0])
        angles = torch.outer(torch.arange(start, end, dtype=torch.float64), frequencies).repeat(1, 2)
        cos[start:end] = angles.cos()
        sin[start:end] = angles.sin()
