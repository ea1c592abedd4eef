"""Reference tokens for ``jettison verify``: what another implementation computes from the same history."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from jettison.device.model.dtypes import DTYPES

TIE_ULPS = 4
"""Below float64, two logits this close (in units of the last place of the largest logit) are a tie."""


class Verdict(NamedTuple):
    """One request against the reference, up to its first difference."""

    num_compared: int
    is_mismatch: bool
    is_tie: bool


class Reference(Protocol):
    """Something that knows the right greedy tokens."""

    def check(self, prompt: list[int], output: list[int]) -> Verdict:
        """Compare a greedy output with the reference's choice at each position."""
        ...


def transformers_available() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec("transformers") is not None


class TransformersReference:
    """Hugging Face ``transformers``, one forward pass over prompt and output.

    At each position its argmax, given the same history, must be the token that was produced: up to the first
    difference this is the same as comparing two greedy generations.
    """

    def __init__(self, model_dir: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=DTYPES[dtype], attn_implementation="eager", use_safetensors=True, local_files_only=True
        ).eval()
        self._ulp = torch.finfo(DTYPES[dtype]).eps
        self._is_exact = DTYPES[dtype] is torch.float64

    @torch.inference_mode()
    def check(self, prompt: list[int], output: list[int]) -> Verdict:
        """See ``Reference.check``."""
        ids = torch.tensor([prompt + output[:-1]])
        logits = self._model(ids).logits[0, len(prompt) - 1 :]
        choices = logits.argmax(dim=-1).tolist()
        for index, (ours, theirs) in enumerate(zip(output, choices, strict=True)):
            if ours != theirs:
                row = logits[index].double()
                gap = float(row[theirs] - row[ours])
                is_tie = not self._is_exact and gap <= TIE_ULPS * self._ulp * float(row.abs().max())
                return Verdict(index + 1, not is_tie, is_tie)
        return Verdict(len(output), False, False)
