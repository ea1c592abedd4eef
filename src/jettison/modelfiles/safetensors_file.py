"""Writes a safetensors file tensor by tensor: the ``safetensors`` library takes all of a file's tensors at once, and a
model need not fit in memory.

The format: eight bytes of the header's length, a JSON header that gives each tensor's type, shape and place, the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
"""Name of a folder's weights in one file."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""Bytes of a number, by the name of its type."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file."""

    name: str
    dtype: str
    """A key of ``ITEM_BYTES``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, headers: Sequence[TensorHeader], contents: Iterable[Iterator[Any]]) -> None:
    """Write the tensors. ``contents``: of each, the pieces of its bytes, in order (arrays or bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in headers:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, pieces in zip(headers, contents, strict=True):
            written = sum(file.write(piece) for piece in pieces)
            if written != tensor.num_bytes:
                raise ValueError(f"tensor {tensor.name} has {written} bytes in place of {tensor.num_bytes}")
