"""Names of precisions as users write them, and their torch dtypes."""

from __future__ import annotations

import torch

from jettison.device.model.hf_config import DecoderConfig
from jettison.errors import ConfigError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(name: str, config: DecoderConfig) -> torch.dtype:
    """The serving dtype called ``name``; ``"auto"`` is the dtype that the checkpoint names.

    Where the checkpoint names none, or an unsupported one (float16), ``auto`` is float32, which holds such weights
    without loss. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        return DTYPES.get(config.stored_dtype or "", torch.float32)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
