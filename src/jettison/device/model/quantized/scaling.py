"""Integers or small floats times scales that several columns share: the arithmetic that all formats end in, and the
forms of those that may be kept without it.

``(value - zero)`` becomes the dtype of the scales, in which it is exact, and is multiplied there. In which dtype scales
come is the format's, as its reference does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.model.integers import IntegerForm, Offset, ScaleType
from jettison.device.model.quantized.parts import DamagedPart, Headers, Part, Stored

WIDEN = "serve it with --quantized-weights widened"
_SCALE_TYPES: dict[str, ScaleType] = {"F16": "float16", "BF16": "bfloat16"}


def scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, columns: int | Tensor) -> Tensor:
    """``(values - zeros) * scales`` [n, columns]. ``scales``, ``zeros``: [n, groups]. ``columns``: of a group, where
    they lie side by side (the last group may have fewer), or the group of each."""
    if isinstance(columns, int) and values.shape[1] == scales.shape[1] * columns:
        values, scales = values.unflatten(1, (scales.shape[1], columns)), scales.unsqueeze(2)
        zeros = None if zeros is None else zeros.unsqueeze(2)
    else:
        group = torch.arange(values.shape[1]) // columns if isinstance(columns, int) else columns
        scales, zeros = scales.index_select(1, group), None if zeros is None else zeros.index_select(1, group)
    if zeros is not None:
        values = values - zeros
    return (values.to(scales.dtype) * scales).flatten(1)


def finite(stored: Stored, part: str, rows: Tensor) -> Tensor:
    """``rows``, which are of that part. Raises DamagedPart unless all are finite."""
    if not bool(rows.isfinite().all()):
        raise DamagedPart(part, "has values that are not finite")
    return rows


def groups_of_columns(stored: Stored, part: str, group_size: int, num_groups: int) -> int | Tensor:
    """As ``scaled`` takes them: ``group_size`` where that part says that groups lie side by side, which is faster, else
    the group of each column. Raises DamagedPart for a group that is not there."""
    group = stored[part][...]
    if torch.equal(group, torch.arange(len(group), dtype=group.dtype) // group_size):
        return group_size
    if group.numel() and not 0 <= int(group.min()) <= int(group.max()) < num_groups:
        raise DamagedPart(part, f"names groups beyond the {num_groups} that have scales")
    return group


def form_of(headers: Headers, scales: Part, bits: int, group_size: int, offset: Offset) -> IntegerForm | None:
    """Of integers of so many bits at most; None: scales of this type cannot be kept as they are. Without files (weights
    from a seed) scales are float16."""
    stored = headers[scales.name].dtype if scales.name in headers else "F16"
    if stored not in _SCALE_TYPES:
        return None
    return IntegerForm(4 if bits <= 4 else 8, group_size, _SCALE_TYPES[stored], offset)


def offsets_of(
    form: IntegerForm, stored_zeros: str, zeros: Tensor | None, center: int, scales: Tensor
) -> Tensor | None:
    """What is added to integers less ``center``, in the type of scales, in which it is exact. ``zeros``: [n, groups].

    Where the form has none (``config.json`` calls the folder symmetric) all zeros must be the center: DamagedPart
    else, which names the part ``stored_zeros``.
    """
    if form.offset == "none":
        if zeros is not None and bool((zeros != center).any()):
            raise DamagedPart(stored_zeros, "has zeros of its own, though config.json says symmetric", WIDEN)
        return None
    assert zeros is not None
    return (center - zeros).to(scales.dtype)


def in_order(stored: Stored, part: str, group_size: int, num_groups: int) -> None:
    """Raise DamagedPart unless groups of columns lie side by side."""
    if part in stored and not isinstance(groups_of_columns(stored, part, group_size, num_groups), int):
        raise DamagedPart(part, "puts columns out of order, though config.json does not say so", WIDEN)
