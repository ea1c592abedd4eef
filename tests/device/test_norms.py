"""Norms in bfloat16 round where each architecture's own do."""

from __future__ import annotations

import importlib

import pytest
import torch

from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.norms import rms_normalized
from jettison.device.model.families import FAMILIES
from jettison.device.model.norms import Norms

EPS = 1e-6
THEIRS = {
    "LlamaForCausalLM": "llama.modeling_llama.LlamaRMSNorm",
    "Olmo2ForCausalLM": "olmo2.modeling_olmo2.Olmo2RMSNorm",
    "Olmo3ForCausalLM": "olmo3.modeling_olmo3.Olmo3RMSNorm",
    "OlmoeForCausalLM": "olmoe.modeling_olmoe.OlmoeRMSNorm",
    "Glm4ForCausalLM": "glm4.modeling_glm4.Glm4RMSNorm",
    "Glm4MoeForCausalLM": "glm4_moe.modeling_glm4_moe.Glm4MoeRMSNorm",
    "GraniteForCausalLM": "granite.modeling_granite.GraniteRMSNorm",
    "Exaone4ForCausalLM": "exaone4.modeling_exaone4.Exaone4RMSNorm",
    "GptOssForCausalLM": "gpt_oss.modeling_gpt_oss.GptOssRMSNorm",
    "Gemma2ForCausalLM": "gemma2.modeling_gemma2.Gemma2RMSNorm",
    "Gemma3ForCausalLM": "gemma3.modeling_gemma3.Gemma3RMSNorm",
    "Cohere2ForCausalLM": "cohere2.modeling_cohere2.Cohere2LayerNorm",
}
"""Architecture -> the norm in transformers."""


def module_of(name: str, width: int, weight: torch.Tensor) -> torch.nn.Module:
    pytest.importorskip("transformers")
    module, _, kind = THEIRS[name].rpartition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(width, eps=EPS).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def share_of_equal(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Sums in another order change a last bit now and then; a rounding in another place many."""
    return (ours == theirs).double().mean().item()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", THEIRS)
def test_rows_round_as_transformers(name, kernels):
    x, weight = numbers(40, 96), numbers(96)
    norms, out = Norms(FAMILIES[name].arithmetic.norm, EPS, load_kernels(kernels)), torch.empty_like(x)
    norms.rows(x, weight, None, out)
    assert share_of_equal(out, module_of(name, 96, weight)(x)) > 0.998
    norms.rows(x, weight, None, x)  # in place
    assert torch.equal(x, out)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", ["Exaone4ForCausalLM", "Gemma3ForCausalLM"])
def test_heads_round_as_transformers_in_a_view_of_a_wider_row(name, kernels):
    fused, weight = numbers(20, 6 * 32), numbers(32)
    before, heads = fused.clone(), fused[:, 64:160].view(20, 3, 32)
    expected = module_of(name, 32, weight)(heads)
    Norms(FAMILIES[name].arithmetic.norm, EPS, load_kernels(kernels)).heads(heads, weight)
    assert share_of_equal(heads, expected) > 0.998
    assert torch.equal(fused[:, :64], before[:, :64]) and torch.equal(fused[:, 160:], before[:, 160:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["rms_once", "rms_plus_one"])
def test_kernels_make_what_single_operations_make(kind, dtype):
    x, weight = numbers(9, 96).to(dtype), numbers(96).to(dtype)
    expected = rms_normalized(x, weight, EPS, kind)
    Norms(kind, EPS, load_kernels("auto")).rows(x, weight, None, x)
    torch.testing.assert_close(x, expected)
