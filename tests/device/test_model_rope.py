"""Rotary tables against transformers' frequencies and the definition."""

from __future__ import annotations

import json

import pytest
import torch

from jettison.device.model.hf_config import read_config
from jettison.device.model.rope import fill_rotary_tables, inverse_frequencies

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.fixture(params=SCALINGS.values(), ids=SCALINGS)
def values(request):
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 8,
        "max_position_embeddings": 10_000,
        "rope_theta": 500_000.0,
        "rope_scaling": request.param,
    }


@pytest.fixture
def config(values, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def test_frequencies_are_those_of_transformers(values, config):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = {key: value for key, value in values.items() if key != "architectures"}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**known)).inv_freq
    torch.testing.assert_close(inverse_frequencies(config.ropes[0]).float(), theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_follow_the_definition(config, dtype):
    cos, sin = (torch.full((1, config.max_model_len, config.head_dim), torch.nan, dtype=dtype) for _ in range(2))
    fill_rotary_tables(config.ropes, cos, sin)
    frequencies = inverse_frequencies(config.ropes[0])
    for position in (0, 1, 4095, 4096, 9999):
        expected = torch.cat([position * frequencies] * 2)
        assert torch.equal(cos[0, position], expected.cos().to(dtype))
        assert torch.equal(sin[0, position], expected.sin().to(dtype))
