"""Which matrices of a quantized folder are kept as integers: decided once, where a model is assembled, for all workers.

What decides is what the folder stores (``WeightFolder.integer_forms``), and what kernels can multiply by
(``Kernels.keeps``). All else is widened. Not here: the formats (``quantized``), and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jettison.device.dtypes import StoredDtype, torch_dtype
from jettison.device.model.folder import folder_by
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.integers import KeptSlot
from jettison.device.model.shards import TensorSlot, shard_layouts
from jettison.device.spec import FILES
from jettison.types import ShardId

if TYPE_CHECKING:
    from jettison.device.kernels.base import Kernels


def keep_integers(
    config: DecoderConfig, model_dir: Path, dtype: StoredDtype, kernels: Kernels, load_format: str = FILES
) -> DecoderConfig:
    """The configuration with every matrix kept that can be. Reads the headers of a folder's weights; raises ModelError
    where they are wrong."""
    folder = folder_by(load_format)(model_dir, config, dtype)
    forms = folder.integer_forms()
    kept = tuple(
        KeptSlot(layout.shard, slot.name, form)
        for layout in folder.layouts.values() for slot in layout.slots
        if (form := forms.get((layout.shard, slot.name))) is not None
        and kernels.keeps(form, (slot.shape[-2], slot.shape[-1]), torch_dtype(dtype))
    )  # fmt: skip
    return replace(config, kept=kept)


def told_of_kept(config: DecoderConfig, dtype: StoredDtype) -> str | None:
    """A line for people on what is kept and what is wide; None: all is wide."""
    if not config.kept:
        return None
    matrices = [
        (layout.shard, slot) for layout in shard_layouts(config, dtype).values() for slot in layout.slots
        if len(slot.shape) > 1 and not slot.name.endswith("_bias")
    ]  # fmt: skip
    bits = bits_a_weight(slot for _, slot in matrices)
    wide = [(shard, slot.name) for shard, slot in matrices if slot.form is None]
    kept = f"kept as integers but for {_told(wide)}" if wide else "all kept as integers"
    return f"{bits:.3g} bits a weight in memory; {kept}"


def bits_a_weight(slots: Iterable[TensorSlot]) -> float:
    """Of these matrices, scales included."""
    slots = list(slots)
    return 8 * sum(slot.num_bytes for slot in slots) / max(1, sum(math.prod(slot.shape) for slot in slots))


def _told(wide: list[tuple[ShardId, str]]) -> str:
    """Slots by name, with the number of layers."""
    names = list(dict.fromkeys(name for _, name in wide))
    counts = [sum(name == each for _, each in wide) for name in names]
    told = zip(names, counts, strict=True)
    return ", ".join(name if count == 1 else f"{name} of {count} layers" for name, count in told)
