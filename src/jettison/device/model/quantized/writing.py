"""Quantizes the matrices of a new random model as compressed-tensors stores them (``pack-quantized``), for trials.

To the nearest, symmetric, in groups of columns. Not here: anything good for a trained model, whose quantizers look at
activations too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jettison.device.model.quantized.bits import WORD_BITS
from jettison.errors import ConfigError


class Quantization(NamedTuple):
    """How a new model's projections are quantized."""

    bits: int
    group_size: int

    @classmethod
    def parse(cls, name: str) -> Quantization:
        """``int4``, ``int8``, or with columns of a group, as ``int4-g128``. Raises ConfigError."""
        kind, _, group = name.partition("-g")
        if kind not in ("int4", "int8") or (group and not group.isdecimal()) or name.endswith("-g") or group == "0":
            raise ConfigError(f"quantized must be int4 or int8, or with a group as int4-g128, not {name!r}")
        return cls(int(kind[3:]), int(group or 32))

    def keys(self) -> dict[str, Any]:
        """``quantization_config`` of ``config.json``."""
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "strategy": "group",
                   "group_size": self.group_size}  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is a projection whose columns make whole groups, and whole words."""
        is_projection = name.endswith("_proj.weight") and len(shape) == 2
        return is_projection and shape[1] % self.group_size == 0 and shape[1] * self.bits % WORD_BITS == 0

    def parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a matrix."""
        integers, scales = self._quantized(weight)
        unsigned = (integers + (1 << self.bits - 1)).to(torch.uint8)
        if self.bits == 4:
            unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
        module = name.removesuffix(".weight")
        return {
            f"{module}.weight_packed": unsigned.contiguous().view(torch.int32), f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }

    def exact(self, weight: Tensor) -> Tensor:
        """The weights that those tensors stand for, in double."""
        integers, scales = self._quantized(weight)
        return integers.double() * scales.double().repeat_interleave(self.group_size, 1)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.double().unflatten(1, (-1, self.group_size))
        most = (1 << self.bits - 1) - 1
        scales = (groups.abs().amax(2) / most).to(torch.bfloat16)
        integers = (groups / scales.double().clamp(min=1e-30).unsqueeze(2)).round().clamp(-most - 1, most)
        return integers.flatten(1).to(torch.int32), scales
