"""Rotary scaling of GGUF files: written with the ``gguf`` library, imported, and read as ``transformers`` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_written import write_gguf

from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.device.model.rope import inverse_frequencies
from jettison.modelfiles.importing import import_gguf

HEAD_DIM, ORIGINAL, CONTEXT = 16, 64, 256
KEYS = gguf.Keys.Rope
LONG = {
    "rope_factors_long.weight": (np.linspace(1.0, 12.0, HEAD_DIM // 2, dtype=np.float32), Kind.F32),
    "rope_factors_short.weight": (np.linspace(1.0, 1.3, HEAD_DIM // 2, dtype=np.float32), Kind.F32),
}
YARN = {KEYS.SCALING_TYPE: "yarn", KEYS.SCALING_FACTOR: 4.0, KEYS.SCALING_ORIG_CTX_LEN: ORIGINAL}
LONGROPE = {KEYS.SCALING_TYPE: "longrope", KEYS.SCALING_ORIG_CTX_LEN: ORIGINAL}
GROWTH = 0.1 * float(np.log(4.0)) + 1.0
"""YaRN's magnitude for a factor of 4."""

WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "linear": ({KEYS.SCALING_TYPE: "linear", KEYS.SCALING_FACTOR: 4.0}, {}, 1.0),
    "yarn": (YARN, {}, GROWTH),
    "yarn, slower and faster turns": (
        {**YARN, KEYS.SCALING_YARN_BETA_FAST: 16.0, KEYS.SCALING_YARN_BETA_SLOW: 2.0}, {}, GROWTH),
    "yarn, the folder's magnitude": (
        {**YARN, KEYS.SCALING_YARN_ATTN_FACTOR: 1.25, KEYS.SCALING_YARN_EXT_FACTOR: 1.0}, {}, 1.25),
    "yarn, magnitude times": ({**YARN, KEYS.SCALING_ATTN_FACTOR: 0.5}, {}, GROWTH * 0.5),
    "yarn that stretches nothing": ({**YARN, KEYS.SCALING_FACTOR: 1.0}, {}, 1.0),
    "longrope": ({**LONGROPE, KEYS.SCALING_ATTN_FACTOR: 1.5}, LONG, 1.5),
    "longrope without a magnitude": (LONGROPE, LONG, 1.0),
}  # fmt: skip
"""Fields, tensors, and the magnitude of cosine and sine."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rope") / "llama"
    create_model(
        folder, arch="llama", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=HEAD_DIM, dtype="float32",
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("served", [ORIGINAL, CONTEXT])
def test_the_folder_is_read_as_transformers_reads_it(name: str, served: int, llama: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields, tensors, magnitude = WRITTEN[name]
    write_gguf(
        llama, tmp_path / "model.gguf", tensors=tensors,
        fields={key.format(arch="llama"): value for key, value in fields.items()},
    )
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    rope = read_config(tmp_path / "imported", served).ropes[0]
    config = AutoConfig.from_pretrained(tmp_path / "imported")
    kind = config.rope_parameters["rope_type"]
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=served)
    assert rope.scaling is not None and rope.scaling.kind == kind
    torch.testing.assert_close(inverse_frequencies(rope).float(), expected, rtol=1e-5, atol=0)
    assert rope.magnitude == pytest.approx(attention_factor) == pytest.approx(magnitude)
