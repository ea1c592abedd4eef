"""Reads what ``config.json`` says of quantized weights.

Only the formats of ``schemes`` are known. All else is refused, with the key's name: another method, and keys that
change the arithmetic in a way that is not known. Lists of modules that are not quantized are not read, since a tensor
that is stored plainly is read plainly. What is said of activations is not read either: they are not quantized here.

Not here: tensors. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.device.model.quantized.schemes import (
    Awq,
    Compressed,
    CompressedGroup,
    Fp8,
    GgufBlocks,
    Gptq,
    Mxfp4,
    Scheme,
)
from jettison.device.model.quantized.signs import REFUSAL, sign_in_config

CONFIG_FILE = "config.json"
KEY = "quantization_config"
_BLOCK = (128, 128)


def read_scheme(keys: JsonObject) -> Scheme | None:
    """The scheme of a ``config.json``; None: it speaks of no quantized weights. Raises ModelError, one line, for one
    that is not supported."""
    quantization = keys.object(KEY) if isinstance(keys.values.get(KEY), dict) else None
    method = quantization.values.get("quant_method") if quantization is not None else None
    if quantization is not None and isinstance(method, str) and method in _READERS:
        return _READERS[method](quantization)
    if (sign := sign_in_config(keys.values)) is not None:
        raise keys.fail(f"{sign}: {REFUSAL}")
    return None


def scheme_of_folder(model_dir: Path) -> Scheme | None:
    """``read_scheme`` of a folder. Without a ``config.json`` (a worker has the controller's) its weights are taken
    to be plain."""
    path = model_dir / CONFIG_FILE
    return read_scheme(JsonObject.read(path)) if path.is_file() else None


def _fp8(keys: JsonObject) -> Fp8:
    _refuse_other(keys, "fmt", None, "e4m3")
    _refuse_other(keys, "kv_cache_scheme", None)
    _refuse_other(keys, "expert_dtype", None, "fp8")
    return Fp8(_block(keys, "weight_block_size"))


def _awq(keys: JsonObject) -> Awq:
    _refuse_other(keys, "bits", None, 4)
    for key in ("version", "format", "checkpoint_format"):
        _refuse_other(keys, key, None, "gemm", "GEMM")
    return Awq(_group_size(keys), not keys.flag("zero_point", True))


def _gptq(keys: JsonObject) -> Gptq:
    _refuse_other(keys, "is_marlin_format", None, False)
    _refuse_other(keys, "bits", 2, 3, 4, 8)
    dynamic = keys.object("dynamic")
    if dynamic is not None and not all(pattern.startswith("-:") for pattern in dynamic.values):
        raise _refused(keys, "dynamic")  # bits of their own for some modules; "-:" leaves modules as they are
    key = "checkpoint_format" if keys.values.get("checkpoint_format") is not None else "format"
    _refuse_other(keys, key, None, "gptq", "gptq_v2")
    is_v2 = keys.values.get(key) == "gptq_v2"
    return Gptq(keys.positive_int("bits"), _group_size(keys), is_v2, keys.flag("desc_act"), keys.flag("sym"))


def _compressed(keys: JsonObject) -> Compressed:
    sparsity = keys.object("sparsity_config")
    if sparsity is not None and sparsity.values.get("format") not in (None, "dense"):
        raise _refused(keys, "sparsity_config")
    transforms = keys.object("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise _refused(keys, "transform_config")
    for key in ("kv_cache_scheme", "moe_sparsity_config"):
        _refuse_other(keys, key, None)
    groups = keys.object("config_groups") or JsonObject(keys.path, {})
    found = []
    for name in groups.values:
        group = groups.object(name)
        weights = None if group is None else group.object("weights")
        if group is not None and weights is not None:
            has_own = group.values.get("format") is not None
            found.append(_compressed_group(weights, group if has_own else keys))
    return Compressed(tuple(found))


def _compressed_group(keys: JsonObject, formats: JsonObject) -> CompressedGroup:
    """``formats``: where the group's ``format`` stands."""
    _refuse_other(formats, "format", *_PACKED, *_UNPACKED)
    kind = keys.values.get("type", "int")
    is_packed, is_float = formats.values["format"] in _PACKED, kind == "float"
    _refuse_other(keys, "type", None, "int", *(() if is_packed else ("float",)))
    bits, is_symmetric = keys.positive_int("num_bits", 8, most=8), keys.flag("symmetric", True)
    if is_float:
        _refuse_other(keys, "num_bits", None, 8)
        _refuse_other(keys, "symmetric", None, True)
    group_size = _group_size(keys) if keys.values.get("group_size") is not None else None
    strategy = keys.optional_text("strategy")
    if strategy is None:  # as the library infers it
        strategy = {None: "tensor", -1: "channel"}.get(keys.values.get("group_size"), "group")
    if strategy not in ("tensor", "channel", "group", "block") or (strategy == "group" and group_size is None):
        raise _refused(keys, "strategy")
    is_ordered = keys.values.get("actorder") in ("group", "dynamic", True)
    block = _block(keys, "block_structure")
    return CompressedGroup(is_packed, is_float, bits, is_symmetric, strategy, group_size, block, is_ordered)


def _mxfp4(keys: JsonObject) -> Mxfp4:
    return Mxfp4()


def _gguf(keys: JsonObject) -> GgufBlocks:
    return GgufBlocks()


_PACKED = frozenset({"pack-quantized"})
_UNPACKED = frozenset({"int-quantized", "float-quantized", "naive-quantized"})

_READERS: dict[str, Callable[[JsonObject], Scheme]] = {
    "fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "mxfp4": _mxfp4,
    "gguf": _gguf,
}  # fmt: skip


def _refuse_other(keys: JsonObject, key: str, *known: object) -> None:
    """Raise ModelError for a value that is not among ``known``, where None stands for an absent key."""
    if not any(type(keys.values.get(key)) is type(value) and keys.values.get(key) == value for value in known):
        raise _refused(keys, key)


def _refused(keys: JsonObject, key: str) -> Exception:
    what = f"{key} {short_repr(keys.values.get(key))}" if key in keys.values else f"no {key}"
    return keys.fail(f"{KEY}: {what} is not supported; use the unquantized model")


def _group_size(keys: JsonObject) -> int | None:
    return None if keys.values.get("group_size") == -1 else keys.positive_int("group_size", 128)


def _block(keys: JsonObject, key: str) -> tuple[int, int]:
    sizes = keys.values.get(key)
    if sizes is None:
        return _BLOCK
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise keys.wrong(key, "two numbers of rows and columns")
