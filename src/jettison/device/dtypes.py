"""Precisions by name: what a controller, a plan of memory and a choice of kernels need of them. No torch: it has a
number type of its own for each (``torch_dtype``), which is asked for where there are tensors.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, cast, get_args

from jettison.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from jettison.device.model.hf_config import DecoderConfig

Dtype = Literal["float64", "float32", "bfloat16"]
"""What a model is computed in."""
StoredDtype = Literal[Dtype, "float16", "uint8"]
"""Of tensors in memory: integers and their scales lie in bytes."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ITEM_BYTES: dict[StoredDtype, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def resolve_dtype(name: str, config: DecoderConfig) -> Dtype:
    """The serving dtype called ``name``; ``"auto"`` is the dtype that the checkpoint names.

    Where the checkpoint names none, or an unsupported one (float16), ``auto`` is float32, which holds such weights
    without loss. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        return config.stored_dtype if config.stored_dtype in DTYPES else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return name


def dtype_of_sums(dtype: StoredDtype) -> Dtype:
    """The type of sums over ``dtype``, and of log-sum-exps; of tensors' own types see ``kernels.base.sum_dtype``."""
    return "float64" if dtype == "float64" else "float32"


@cache
def torch_dtype(name: StoredDtype) -> torch.dtype:
    """Torch's own. The only place that imports torch by itself: for a caller with tensors it is there already."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype) -> StoredDtype:
    """The inverse."""
    return cast(StoredDtype, str(dtype).removeprefix("torch."))
