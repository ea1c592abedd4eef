"""From a GGUF file's tensors to a folder's: names, order of rows, and numbers, by the ``gguf`` library's dequantizers.

Unquantized numbers stay as they are, to the bit, and so do matrices in blocks that can be served as they are
(``device.model.quantized.blocks``). Other quantized ones become float32, in which the library computes them; a user may
ask for one precision throughout. Tensors are read, widened and given on in pieces of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize, quantize

from jettison.device.model.quantized.block_kinds import stored_name
from jettison.modelfiles.architectures import Architecture
from jettison.modelfiles.gguf_file import GgufFile
from jettison.modelfiles.gguf_rope import factor_tensors
from jettison.modelfiles.safetensors_file import TensorHeader

Kind = GGMLQuantizationType

AUTO = "auto"
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Name of a precision -> its name in safetensors, the widest first."""

BLOCKS = "U8"
"""In safetensors: rows of blocks as they are."""
_STORED = {Kind.F64: "F64", Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}
_KEPT = {Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1", Kind.Q8_0: "q8_0"}
_PIECE_NUMBERS = 1 << 22


@dataclass(frozen=True, slots=True)
class ImportedTensor:
    """One tensor of a folder, and where it comes from."""

    header: TensorHeader
    source: ReaderTensor
    row_order: np.ndarray[Any, np.dtype[np.intp]] | None
    """Row of the source for each row; None: the same."""

    def pieces(self) -> Iterator[np.ndarray[Any, Any]]:
        """Its values, piece by piece, as bytes of their dtype. Raises OverflowError where one is too large for it."""
        num_rows = self.header.shape[0]
        step = max(1, _PIECE_NUMBERS * num_rows // max(1, int(self.source.n_elements)))
        for start in range(0, num_rows, step):
            rows: Any = slice(start, min(start + step, num_rows))
            data = self.source.data[rows if self.row_order is None else self.row_order[rows]]
            yield _converted(np.ascontiguousarray(data), self.source.tensor_type, self.header.dtype).view(np.uint8)


def imported_tensors(
    file: GgufFile, row: Architecture, config: Mapping[str, Any], dtype: str
) -> list[ImportedTensor]:
    """The folder's tensors, in the file's order. ``dtype``: a key of ``DTYPES``, or ``auto``: as stored, and float32
    for those in blocks that cannot be served.

    Raises ModelError, naming the tensor, for one that is missing or unknown, or whose type or shape is.
    """
    names = _names(row, config)
    tensors: list[ImportedTensor] = []
    found: set[str] = set()
    read_already = factor_tensors(config["rope_scaling"])
    for name, tensor in file.tensors.items():
        if name in read_already:
            continue
        if name not in names:
            raise file.fail(f"tensor {name[:80]} is not known for {row.name}")
        shape = tuple(int(length) for length in reversed(tensor.shape))
        _check_kind(file, tensor)
        if shape != (wanted := _shape_of(names[name], config)):
            raise file.fail(f"tensor {name} has shape {shape}, expected {wanted}")
        order = _row_order(row, config, name)
        found.add(names[name])
        if dtype == AUTO and len(shape) == 2 and tensor.tensor_type in _KEPT:
            target = stored_name(names[name], _KEPT[tensor.tensor_type])
            tensors.append(ImportedTensor(TensorHeader(target, BLOCKS, tensor.data.shape), tensor, order))
            continue
        stored = DTYPES[dtype] if dtype != AUTO else _STORED.get(tensor.tensor_type, "F32")
        tensors.append(ImportedTensor(TensorHeader(names[name], stored, shape), tensor, order))
    for name, target in names.items():
        if target not in found and not (target == "lm_head.weight" and config["tie_word_embeddings"]):
            raise file.fail(f"tensor {name} is missing")
    return tensors


def dtype_of_matrices(file: GgufFile, dtype: str) -> str:
    """The precision that holds every matrix as it will be stored, for ``config.json``; beside blocks bfloat16, for
    activations and KV: the other matrices are rounded to it as they are served."""
    if dtype != AUTO:
        return dtype
    if has_blocks(file, dtype):
        return "bfloat16"
    stored = {_STORED.get(tensor.tensor_type, "F32") for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if stored == {"F16", "BF16"}:  # neither holds the other
        return "float32"
    return next((name for name, short in DTYPES.items() if short in stored), "float32")


def has_blocks(file: GgufFile, dtype: str) -> bool:
    """Whether matrices stay in blocks."""
    kinds = {tensor.tensor_type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return dtype == AUTO and not kinds.isdisjoint(_KEPT)


def unpermuted_rows(num_heads: int, head_dim: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """For each row of a folder's query or key projection the row in the file, where that turns neighbours: dimension d
    of a head's first half is there at 2 d, that of its second half at 2 d + 1."""
    within = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return (np.arange(num_heads)[:, None] * head_dim + within).reshape(-1)


def _names(row: Architecture, config: Mapping[str, Any]) -> dict[str, str]:
    layer = dict(row.layer)
    for switch, names in row.switches.items():
        if config[switch]:
            layer |= names
    numbered = {
        f"blk.{i}.{name}": f"model.layers.{i}.{target}"
        for i, (name, target) in itertools.product(range(config["num_hidden_layers"]), layer.items())
    }
    return dict(row.whole) | numbered


def _shape_of(target: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a folder's tensor, as the configuration implies it."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = (head_dim * config[f"num_{part}_heads"] for part in ("attention", "key_value"))
    matrices = {
        "embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (config["intermediate_size"], hidden), "up_proj": (config["intermediate_size"], hidden),
        "down_proj": (hidden, config["intermediate_size"]),
    }  # fmt: skip
    module, _, part = target.rpartition(".")
    name = module.rpartition(".")[2]
    if name in matrices:
        return matrices[name] if part == "weight" else matrices[name][:1]
    return (head_dim if name in ("q_norm", "k_norm") else hidden,)


def _row_order(
    row: Architecture, config: Mapping[str, Any], name: str
) -> np.ndarray[Any, np.dtype[np.intp]] | None:
    part = name.rpartition(".")[0].rpartition(".")[2]
    if not row.turns_neighbours or part not in ("attn_q", "attn_k"):
        return None
    num_heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    return unpermuted_rows(num_heads, config["head_dim"])


def _check_kind(file: GgufFile, tensor: ReaderTensor) -> None:
    if tensor.tensor_type in _STORED:
        return
    try:
        dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        raise file.fail(f"tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be read") from None


def _converted(data: np.ndarray[Any, Any], kind: Kind, dtype: str) -> np.ndarray[Any, Any]:
    if dtype in (_STORED.get(kind), BLOCKS):
        return data
    numbers = data if kind is Kind.F64 else dequantize(data, kind)
    if dtype == "BF16":
        return quantize(numbers.astype(np.float32), Kind.BF16)
    with np.errstate(over="ignore"):
        narrow = numbers.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
    if not np.isfinite(narrow).all() and np.isfinite(numbers).all():
        raise OverflowError
    return narrow
