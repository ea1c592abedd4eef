"""Rotary scaling: from a GGUF file's fields and tensors of factors to ``rope_scaling`` of ``config.json``.

Not here: the frequencies that follow (``device.model.rope``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from jettison.modelfiles.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of what each rotary frequency is divided by: Llama 3's scaling."""

LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""LongRoPE's key of ``rope_scaling`` -> tensor of what each frequency is divided by."""

_KINDS = ("none", "linear", "yarn", "longrope")
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_PRETRAINING_CONTEXTS = tuple(1 << bits for bits in range(6, 20))
"""Contexts that Llama 3's scaling may begin from, in tokens. Its two other numbers are the same in all its models."""


def rope_scaling(file: GgufFile, arch: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The value of ``rope_scaling``; None: frequencies are as they are. ``values``: of ``config.json`` so far.

    Raises ModelError, one line that names the field, for what is missing or not known.
    """
    begin = f"{arch}.rope.scaling."
    kind = file.text(f"{begin}type", "linear")
    if kind not in _KINDS:
        raise file.fail(f"{begin}type {kind[:40]} is not supported; supported: {', '.join(_KINDS)}")
    older = file.number(f"{arch}.rope.scale_linear", 1.0, or_zero=True)
    factor = file.number(f"{begin}factor", older, or_zero=True) or 1.0  # 0 is written for none, too
    context = file.integer(f"{begin}original_context_length", 0)
    file.has(f"{begin}finetuned")  # a note on how the model was trained
    if kind in ("yarn", "longrope"):
        if ROPE_FACTORS in file.tensors:
            raise file.fail(f"{begin}type {kind} beside {ROPE_FACTORS} is not supported")
        if not context:
            raise file.fail(f"{begin}original_context_length is missing, which {begin}type {kind} needs")
        made = _yarn(file, begin, factor) if kind == "yarn" else _longrope(file, begin, values, context)
        return made | {"original_max_position_embeddings": context}
    is_linear = kind == "linear" and factor != 1.0
    if ROPE_FACTORS in file.tensors and (scaling := _llama3(file, values, context)) is not None:
        if is_linear:
            raise file.fail(f"{begin}factor {factor} beside {ROPE_FACTORS} is not supported")
        return scaling
    return {"rope_type": "linear", "factor": factor} if is_linear else None


def factor_tensors(scaling: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Tensors that are read with the configuration, and are none of the weights."""
    is_long = scaling is not None and scaling["rope_type"] == "longrope"
    return (ROPE_FACTORS, *(LONG_FACTORS.values() if is_long else ()))


def _yarn(file: GgufFile, begin: str, factor: float) -> dict[str, Any]:
    """YaRN. ``yarn_attn_factor`` is what a folder calls ``attention_factor``, the magnitude of cosine and sine; without
    it that follows from the factor, times ``attn_factor``."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key in ("beta_fast", "beta_slow"):
        if file.has(f"{begin}yarn_{key}"):
            scaling[key] = file.number(f"{begin}yarn_{key}")
    file.expect(f"{begin}yarn_ext_factor", 1.0)
    file.expect(f"{begin}yarn_log_multiplier", 0.0)
    times = file.number(f"{begin}attn_factor", 1.0)
    if file.has(f"{begin}yarn_attn_factor"):
        scaling["attention_factor"] = file.number(f"{begin}yarn_attn_factor") * times
    elif times != 1.0:
        scaling["attention_factor"] = (0.1 * math.log(max(factor, 1.0)) + 1.0) * times
    return scaling


def _longrope(file: GgufFile, begin: str, values: Mapping[str, Any], context: int) -> dict[str, Any]:
    """LongRoPE, whose factors are in two tensors. The magnitude is ``attn_factor``, 1 where it is not told."""
    for key in LONG_FACTORS.values():
        if key not in file.tensors:
            raise file.fail(f"tensor {key} is missing, which {begin}type longrope needs")
    return {
        "rope_type": "longrope", "factor": values["max_position_embeddings"] / context,
        "attention_factor": file.number(f"{begin}attn_factor", 1.0),
        **{key: [float(str(np.float32(each))) for each in _factors(file, name, values)]
           for key, name in LONG_FACTORS.items()},
    }  # fmt: skip


def _factors(file: GgufFile, name: str, values: Mapping[str, Any]) -> NDArray[np.float64]:
    """Of a tensor, one for each pair of rotated dimensions."""
    tensor, number = file.tensors[name], values["head_dim"] // 2
    if tensor.tensor_type != GGMLQuantizationType.F32 or tensor.data.shape != (number,):
        raise file.fail(f"tensor {name} must hold {number} factors in float32")
    factors = np.asarray(tensor.data, dtype=np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise file.fail(f"tensor {name} holds factors that are no positive numbers")
    return factors


def _llama3(file: GgufFile, values: Mapping[str, Any], context: int) -> dict[str, Any] | None:
    """Llama 3's scaling whose factors the file holds; None where they are all 1.

    GGUF keeps what follows from its four numbers, not the numbers; they are found by trying contexts. ``context``: the
    pretraining context, where the file says it; 0: it does not.
    """
    factors, head_dim = _factors(file, ROPE_FACTORS, values), values["head_dim"]
    if (factors == 1.0).all():
        return None
    largest = float(factors.max())
    frequencies = values["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    for tried in (context,) if context else _PRETRAINING_CONTEXTS:
        turns = tried * frequencies / (2 * math.pi)
        kept = ((turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)).clip(0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - kept) / largest + kept), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3", "factor": float(str(np.float32(largest))),
                "low_freq_factor": _LOW_FREQ_FACTOR, "high_freq_factor": _HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": tried,
            }  # fmt: skip
    raise file.fail(f"tensor {ROPE_FACTORS} holds factors of no known scaling of the context")
