"""Reference tokens for ``jettison verify``: the tokens that another implementation computes from the same history."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from jettison.device.model.dtypes import DTYPES
from jettison.device.model.hf_config import read_config
from jettison.device.model.rope import inverse_frequencies

TIE_ULPS = 4
"""Below float64, two logits this close (in units of the last place of the largest logit) are a tie."""


class Verdict(NamedTuple):
    """One request against the reference, up to its first difference."""

    num_compared: int
    is_mismatch: bool
    is_tie: bool


class Reference(Protocol):
    """A source of the right greedy tokens."""

    def check(self, prompt: list[int], output: list[int]) -> Verdict:
        """Compare a greedy output with the reference's choice at each position."""
        ...


def transformers_available() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec("transformers") is not None


def _compute_in_double(model: torch.nn.Module, frequencies: torch.Tensor) -> None:
    """Make the library compute norms and rotary angles in double; it uses float32 whatever the model's precision.

    ``frequencies`` [head_dim / 2] in double must agree with the library's own to single precision.
    Raises ValueError if they do not.
    """

    def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
        return module.weight * (x * scale)

    def rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
        elif name.endswith("RotaryEmbedding"):
            if not torch.allclose(module.inv_freq.double(), frequencies, rtol=1e-5, atol=0.0):
                raise ValueError("rotary frequencies differ from those of transformers")
            module.forward = MethodType(rotary, module)


class TransformersReference:
    """Hugging Face ``transformers``, one forward pass over prompt and output.

    At each position its argmax, given the same history, must be the produced token. Up to the first difference this
    equals a comparison of two greedy generations.
    """

    def __init__(self, model_dir: Path, dtype: str, max_model_len: int | None = None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=DTYPES[dtype], attn_implementation="eager", use_safetensors=True, local_files_only=True
        ).eval()
        if DTYPES[dtype] is torch.float64:
            _compute_in_double(self._model, inverse_frequencies(read_config(Path(model_dir), max_model_len)))
        self._ulp = torch.finfo(DTYPES[dtype]).eps
        self._is_exact = DTYPES[dtype] is torch.float64

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the next token behind each token: [tokens, vocabulary]."""
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    def check(self, prompt: list[int], output: list[int]) -> Verdict:
        """See ``Reference.check``."""
        logits = self.logits(prompt + output[:-1])[len(prompt) - 1 :]
        choices = logits.argmax(dim=-1).tolist()
        for index, (ours, theirs) in enumerate(zip(output, choices, strict=True)):
            if ours != theirs:
                row = logits[index].double()
                gap = float(row[theirs] - row[ours])
                is_tie = not self._is_exact and gap <= TIE_ULPS * self._ulp * float(row.abs().max())
                return Verdict(index + 1, not is_tie, is_tie)
        return Verdict(len(output), False, False)
