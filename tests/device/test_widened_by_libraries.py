"""Folders that other libraries have quantized (``quantized_goldens``) are widened to the bit as those libraries do."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_goldens import DIGESTS, FOLDERS
from safetensors.torch import load_file

from jettison.device.dtypes import name_of
from jettison.device.model import weights
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import digest_of
from jettison.device.model.quantized import mxfp4
from jettison.device.model.quantized.parts import Header
from jettison.device.model.quantized.schemes import Mxfp4
from jettison.device.model.shards import TensorSource
from jettison.device.model.weights import WeightFolder

WIDENED = json.loads(DIGESTS.read_text())
DTYPES = (torch.float32, torch.bfloat16)


def loaded(folder, dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, as the slabs hold it."""
    found = {}
    source = WeightFolder(folder, read_config(folder), name_of(dtype))
    for shard, layout in source.layouts.items():
        slab = torch.empty(layout.num_bytes, dtype=torch.uint8)
        source.load_shard(shard, slab)
        views = layout.views(slab)
        for slot in layout.slots:
            parts = views[slot.name].split([each.shape[0] for each in slot.sources])
            found |= {each.name: part for each, part in zip(slot.sources, parts, strict=True)}
    return found


@pytest.mark.parametrize("name", sorted(WIDENED.keys() - {"mxfp4"}))
@pytest.mark.parametrize("piece_bytes", [4 << 20, 8 * 32 * 3, 1], ids=["whole", "three rows", "a row"])
def test_a_folder(name, piece_bytes, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    for i, dtype in enumerate(DTYPES):
        found = loaded(FOLDERS / name, dtype)
        assert len(WIDENED[name]) == 7
        for tensor, digests in WIDENED[name].items():
            assert digest_of(found[tensor].contiguous()) == digests[i], tensor


def test_a_matrix_of_experts():
    stored = load_file(FOLDERS / "mxfp4" / "model.safetensors")
    headers = {name: Header("U8", tuple(tensor.shape)) for name, tensor in stored.items()}
    ((name, digests),) = WIDENED["mxfp4"].items()
    recipe = mxfp4.recipe(Mxfp4(), TensorSource(name, (2, 8, 96)), headers)
    assert recipe.fits(headers)
    parts = {key: stored[part.name] for key, part in recipe.parts.items()}
    widened = torch.cat([recipe.widen(parts, i, i + 1) for i in range(2)])
    assert [digest_of(widened.to(dtype)) for dtype in DTYPES] == digests
