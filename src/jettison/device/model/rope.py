"""Rotary position embedding: inverse frequencies and the cosine and sine tables.

The tables are computed in double and rounded once, so an entry does not depend on the number of served positions. The
rotation itself is a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jettison.device.model.arithmetic import Rope, RopeScaling

_POSITIONS_AT_ONCE = 4096


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians per position of each pair of dimensions: float64 [rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "yarn":
            return _yarn(frequencies, scaling, rope)
        case "longrope":
            return frequencies / torch.tensor(scaling.divisors, dtype=torch.float64)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, and the ones between interpolated.

    The number of turns of a pair within the pretraining context decides: at most ``low_freq_factor`` turns is long, at
    least ``high_freq_factor`` is short.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023). Pairs that turn more than ``beta_fast`` times within the original context are kept.
    Those that turn less than ``beta_slow`` times are stretched by ``factor``, and those between in proportion to
    their index.
    """
    dim, original = rope.rotary_dim, scaling.original_max_position_embeddings

    def pair_with(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched) + frequencies / scaling.factor * stretched


def fill_rotary_tables(ropes: Sequence[Rope], cos: Tensor, sin: Tensor) -> None:
    """Fill ``cos`` and ``sin``, [ropes, max_model_len, rotary_dim] each: row p is position p, both halves alike."""
    for rope, cosines, sines in zip(ropes, cos, sin, strict=True):
        _fill(rope, cosines, sines)


def _fill(rope: Rope, cos: Tensor, sin: Tensor) -> None:
    frequencies = inverse_frequencies(rope)
    for start in range(0, cos.shape[0], _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, cos.shape[0])
        angles = torch.outer(torch.arange(start, end, dtype=torch.float64), frequencies).repeat(1, 2)
        cos[start:end] = angles.cos() * rope.magnitude
        sin[start:end] = angles.sin() * rope.magnitude
