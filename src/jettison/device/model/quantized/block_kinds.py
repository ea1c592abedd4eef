"""The kinds of a GGUF file's blocks that a folder may have (``blocks``): plain values, no torch."""

from __future__ import annotations

from jettison.device.model.integers import IntegerForm

BLOCK_WEIGHTS = 32

KINDS = {
    "q4_0": IntegerForm(4, BLOCK_WEIGHTS, "float16", "none"),
    "q4_1": IntegerForm(4, BLOCK_WEIGHTS, "float16", "min"),
    "q8_0": IntegerForm(8, BLOCK_WEIGHTS, "float16", "none"),
}
"""By their names in tensors' names: the form that their weights are in."""


def block_bytes(kind: str) -> int:
    """Of a block."""
    return KINDS[kind].num_bytes(1, BLOCK_WEIGHTS)


def stored_name(name: str, kind: str) -> str:
    """Of the stored tensor of a matrix."""
    return f"{name.removesuffix('.weight')}.{kind}"
