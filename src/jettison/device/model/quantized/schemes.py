"""How a folder's weights are quantized: a frozen record for each format that can be widened. No torch, and no files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fp8:
    """8-bit floats with a scale for each block of rows and columns, each row, or the whole."""

    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Awq:
    """Four bits, packed along the outputs in an order of their own (AutoAWQ's GEMM)."""

    group_size: int | None
    """Columns; None = all."""
    is_symmetric: bool = False
    """Whether all zeros are the center of the integers; else they may be."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Two to eight bits, packed along the inputs."""

    bits: int
    group_size: int | None
    is_v2: bool
    """Whether zeros are stored as they are; else less one."""
    is_ordered: bool
    """Whether the groups of columns are given one by one (``desc_act``); else they may be."""
    is_symmetric: bool = False
    """See ``Awq``."""


@dataclass(frozen=True, slots=True)
class CompressedGroup:
    """One way of quantizing of a compressed-tensors folder."""

    is_packed: bool
    is_float: bool
    bits: int
    is_symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int]
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed-tensors folder. What lies in the files says which module is of which group."""

    groups: tuple[CompressedGroup, ...]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """4-bit floats, 32 of which share an exponent."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Blocks of a GGUF file as they are; what lies in the files says of which kind."""


Scheme = Fp8 | Awq | Gptq | Compressed | Mxfp4 | GgufBlocks
