"""Signs that a model folder holds quantized weights of a kind that is not read.

Quantizers leave many signs: keys of ``config.json``, files beside it, names and types of tensors. A key of the
configuration decides by itself, unless it is of a format that is widened (``config``). Names, types and files count
only where tensors differ from the configuration: a left-over file beside complete weights proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REFUSAL = (
    "quantized weights are read only with a quantization_config of awq, compressed-tensors, fp8, gguf, gptq or "
    "mxfp4 in config.json; use the unquantized model"
)

_CONFIG_KEYS = {
    "quantization_config": "", "compression_config": "compressed-tensors", "quantization": "MLX",
    "quantize_config": "GPTQ", "quant_config": "AWQ",
}  # fmt: skip
_LOW_DTYPES = re.compile(r"u?int\d+|q?u?int[48](x\d+)?|float[48]\w*|float6_\w+|fp[468]\w*|nf4|mxfp\d+")

_FILES = {
    "quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt",
    "quantization_config.json": "", "qmodel.pt": "HQQ", "quanto_qmap.json": "Quanto",
}  # fmt: skip

_LAST_WORDS: tuple[tuple[str, str], ...] = (
    ("qweight|qzeros|g_idx|qscales|scales_and_zeros|wf", "GPTQ, AWQ"),
    ("biases", "MLX"),
    ("absmax|nested_absmax|quant_map|nested_quant_map|SCB|weight_format|quant_state", "bitsandbytes"),
    ("weight_packed|weight_shape|weight_zero_point|weight_g_idx|weight_global_scale|input_global_scale|input_zero_point",
     "compressed-tensors"),
    ("weight_scale|weight_scale_inv|weight_scale_2|weight_scales|input_scale|input_scale_inv|activation_scale|act_scale|"
     "output_scale|scale_weight|scale_input|k_scale|v_scale|q_scale|kv_scale|prob_output_scale", "FP8, INT8 or FP4"),
    ("W_q", "HQQ"),
    ("Qidxs|codebooks|codes|trellis|suh|svh|q_invperm|q_weight|q_groups|q_scale_max|centroids|res_centroids|qidxs",
     "EXL, AQLM, QuIP or VPTQ"),
    ("_data|_weight_qdata|weight_qdata|_weight_scale|_weight_zero_point|int_data|layout_tensor", "torchao, Quanto"),
    ("blocks", "MXFP4"),
    ("scales", "MLX, GPTQ, AWQ or MXFP4"),
)  # fmt: skip
_SIGNS = tuple((re.compile(rf"(?:^|[._])(?:{words})$"), scheme) for words, scheme in _LAST_WORDS)
_BITSANDBYTES = re.compile(r"\.quant_state\.")

NUMBER_TYPES = frozenset({
    "I8", "U8", "I16", "U16", "I32", "U32", "I4", "U4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "F6_E2M3", "F6_E3M2", "F4",
})  # fmt: skip
"""Number types of safetensors for packed or scaled weights."""


def sign_in_config(values: Mapping[str, Any]) -> str | None:
    """The sign in ``config.json`` of quantized weights; None: there is none."""
    for key, scheme in _CONFIG_KEYS.items():
        value = values.get(key)
        if value:
            method = value.get("quant_method") if isinstance(value, dict) else None
            return _told(key, method if isinstance(method, str) else scheme)
    for key in ("dtype", "torch_dtype"):
        name = values.get(key)
        if isinstance(name, str) and _LOW_DTYPES.fullmatch(name.removeprefix("torch.").lower()):
            return f"{key} {name[:40]}"
    return None


def sign_of_tensor(name: str) -> str | None:
    """The sign in a tensor's name, if only quantized layers have such names; None: there is none."""
    if _BITSANDBYTES.search(name):
        return _told(f"tensor {name[:120]}", "bitsandbytes")
    for pattern, scheme in _SIGNS:
        if pattern.search(name):
            return _told(f"tensor {name[:120]}", scheme)
    return None


def sign_of_type(name: str, dtype: str) -> str | None:
    """The sign in a weight's type, if it is one of quantized weights; None: there is none."""
    return f"tensor {name[:120]} has type {dtype}" if dtype in NUMBER_TYPES else None


def sign_beside(folder: Path) -> str | None:
    """A file that a quantizer leaves beside the weights; None: there is none."""
    for name, scheme in _FILES.items():
        if (folder / name).is_file():
            return _told(name, scheme)
    return None


def other_weights(folder: Path) -> str | None:
    """For a folder without safetensors, its weights in another format, and the remedy; None: there are none."""
    for pattern, scheme in (("*.gguf", "GGUF"), ("*.ggml", "GGML"), ("*.npz", "MLX")):
        if found := sorted(folder.glob(pattern)):
            if scheme == "GGUF":
                return f"{found[0].name}: `jettison model import {found[0].name} DIR` makes a model folder of it"
            return f"{found[0].name} ({scheme}): only safetensors are read; use the model's Hugging Face folder"
    return None


def _told(what: str, scheme: str) -> str:
    return f"{what} ({scheme})" if scheme else what
