"""Quantizes the matrices of a model folder as published layouts say, with Python's own integers, and widens them by
hand: what folders that are read must come to. ``quantized_goldens`` has those of other libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of unsigned integers as one stream of bits each, in int32 words."""
    num_words = -(-values.shape[1] * bits // 32)
    rows = []
    for row in values.tolist():
        stream = sum(value << i * bits for i, value in enumerate(row)).to_bytes(4 * num_words, "little")
        rows.append([int.from_bytes(stream[i : i + 4], "little", signed=True) for i in range(0, len(stream), 4)])
    return torch.tensor(rows, dtype=torch.int32)


def awq_packed(values: torch.Tensor) -> torch.Tensor:
    """Rows of four-bit integers, eight to a word, in AWQ's order."""
    return packed(values.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)


class Integers:
    """A matrix as integers of some bits, with a zero and a scale for each row and group of columns."""

    def __init__(self, weight: torch.Tensor, bits: int, group: torch.Tensor, dtype: torch.dtype) -> None:
        most, groups = (1 << bits) - 1, range(int(group.max()) + 1)
        low = torch.stack([weight[:, group == i].amin(1) for i in groups], 1).clamp(max=0)
        high = torch.stack([weight[:, group == i].amax(1) for i in groups], 1).clamp(min=0)
        self.bits, self.group = bits, group
        self.scales = ((high - low) / most).to(dtype)
        self.zeros = (-low / self.scales.double()).round().clamp(1, most).int()
        self.values = (weight / self.scales.double()[:, group] + self.zeros[:, group]).round().clamp(0, most).int()

    @property
    def exact(self) -> torch.Tensor:
        """Products of so few bits are exact in double, and in float32."""
        return (self.values - self.zeros[:, self.group]).double() * self.scales.double()[:, self.group]


def _groups(columns: int, size: int, shuffled: bool = False) -> torch.Tensor:
    group = torch.arange(columns) // size
    return group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))] if shuffled else group


def awq(weight, size=GROUP):
    """By AutoAWQ's layout: packed along the outputs."""
    q = Integers(weight, 4, _groups(weight.shape[1], size), torch.float16)
    parts = {"qweight": awq_packed(q.values.t()), "qzeros": awq_packed(q.zeros.t()), "scales": q.scales.t()}
    return parts, q.exact, torch.float16


def gptq(weight, size=GROUP, bits=4, shuffled=True, offset=1):
    """By AutoGPTQ's layout: packed along the inputs, zeros along the outputs, less ``offset``."""
    q = Integers(weight, bits, _groups(weight.shape[1], size, shuffled), torch.float16)
    parts = {"qweight": packed(q.values, bits).t(), "qzeros": packed(q.zeros.t() - offset, bits),
             "scales": q.scales.t(), "g_idx": q.group.int()}  # fmt: skip
    return parts, q.exact, torch.float16


def compressed(weight, size=GROUP, bits=4, shuffled=False):
    """By compressed-tensors' layout, with zeros; integers are unsigned once they are packed."""
    q = Integers(weight, bits, _groups(weight.shape[1], size, shuffled), torch.bfloat16)
    zeros, shape = packed(q.zeros.t(), bits).t(), torch.tensor(weight.shape)
    parts = {"weight_packed": packed(q.values, bits), "weight_scale": q.scales, "weight_zero_point": zeros,
             "weight_shape": shape}  # fmt: skip
    return parts | ({"weight_g_idx": q.group.int()} if shuffled else {}), q.exact, None


def fp8(weight, size=GROUP, block=(32, 32)):
    """By DeepSeek's layout; the last block of a row or column may be smaller."""
    scales = torch.stack([
        torch.stack([part.abs().max() / 448 for part in rows.split(block[1], 1)]) for rows in weight.split(block[0], 0)
    ]).float()  # fmt: skip
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
    small = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, small.float() * spread, None


def fp8_tensor(weight, size=GROUP):
    """By AutoFP8's layout: one scale, and a static one of activations."""
    scale = (weight.abs().max() / 448).float()
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, small.float() * scale, None


def _group_config(size: int = GROUP, **weights) -> dict:
    return {"group_0": {"targets": ["Linear"], "weights": {"strategy": "group", "group_size": size, **weights}}}


WAYS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "GEMM"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq, plain order": (
        lambda weight, size: gptq(weight, size, 2, shuffled=False, offset=0),
        {"quant_method": "gptq", "bits": 2, "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "compressed": (compressed, {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                "config_groups": _group_config(num_bits=4, symmetric=False)}),
    "compressed, ordered": (
        lambda weight, size: compressed(weight, size, 8, shuffled=True),
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": _group_config(num_bits=8, symmetric=False, actorder="group")}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8, one scale": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
}  # fmt: skip
"""How a matrix becomes stored tensors and its widened self, and the folder's ``quantization_config``."""


KEPT = {
    "awq": WAYS["awq"], "compressed": WAYS["compressed"], "gptq, plain order": WAYS["gptq, plain order"],
    "gptq, 4 bits": (lambda weight, size: gptq(weight, size, shuffled=False),
                     {"quant_method": "gptq", "bits": 4, "desc_act": False}),
    "gptq, 8 bits": (lambda weight, size: gptq(weight, size, 8, shuffled=False),
                     {"quant_method": "gptq", "bits": 8, "desc_act": False}),
    "compressed, 8 bits": (
        lambda weight, size: compressed(weight, size, 8),
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": _group_config(num_bits=8, symmetric=False)}),
}  # fmt: skip
"""Ways whose integers can be kept in memory, in groups of 32 columns or a multiple."""


def quantize(
    folder: Path, way: str, quantized: Path, widened: Path, size: int = GROUP, *, is_exact: bool = False
) -> None:
    """Write two copies of a plain folder of one file: one quantized, and one with the same matrices widened by hand
    (``is_exact``: as products of numbers, where a format's own library rounds them first). Embedding and head stay
    plain, as quantizers leave them. ``size``: of groups of columns."""
    shutil.copytree(folder, quantized)
    shutil.copytree(folder, widened)
    quantizer, config = (WAYS | KEPT)[way]
    config = {**config, "group_size": size}
    if "config_groups" in config:
        weights = config["config_groups"]["group_0"]["weights"]
        config["config_groups"] = _group_config(**weights | {"size": size, "group_size": size})
    plain, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if name.endswith("_proj.weight"):
            parts, exact, narrow = quantizer(tensor, size)
            plain[name] = exact if narrow is None or is_exact else exact.to(narrow)
            stored |= {f"{name.removesuffix('.weight')}.{key}": part.contiguous() for key, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(plain, widened / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
