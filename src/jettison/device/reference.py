"""Reference tokens for ``jettison verify``: the tokens that another implementation computes from the same history."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.overrides import TorchFunctionMode

from jettison.device.dtypes import Dtype, torch_dtype
from jettison.device.grammars import output_masks
from jettison.device.model.quantized.config import scheme_of_folder
from jettison.errors import ModelError
from jettison.types import Grammar

TIE_ULPS = 4
"""Below float64, two logits this close (in units of the last place of the largest logit) are a tie."""


class Verdict(NamedTuple):
    """One request against the reference, up to its first difference."""

    num_compared: int
    is_mismatch: bool
    is_tie: bool


class Reference(Protocol):
    """A source of the right greedy tokens."""

    def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
        """Compare a greedy output with the reference's choice at each position, of the tokens that the grammar allows
        there."""
        ...


def transformers_available() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec("transformers") is not None


class InDouble(TorchFunctionMode):
    """Inside, what the library does in float32 whatever the model's precision (norms, angles, softmax, routing) is done
    in double. It stands for the library where its float64 is to be exact; in float32 it changes nothing but these
    islands' precision."""

    def __enter__(self) -> Any:
        """Numbers that are made of nothing are doubles, too."""
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """As before."""
        super().__exit__(*raised)
        torch.set_default_dtype(self._before)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any call of torch."""
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = tuple(self._wider(arg) for arg in args)
        return func(*widened, **{name: self._wider(value) for name, value in kwargs.items()})

    def _wider(self, value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


class TransformersReference:
    """Hugging Face ``transformers``, one forward pass over prompt and output.

    At each position its argmax, given the same history, must be the produced token. Up to the first difference this
    equals a comparison of two greedy generations.
    """

    def __init__(self, model_dir: Path, dtype: str) -> None:
        if scheme_of_folder(Path(model_dir)) is not None:
            raise ModelError(
                f"{model_dir}: transformers reads quantized weights only with other libraries, and computes in other "
                "ways with them; compare with our own kernels (--alone)"
            )
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model_dir = Path(model_dir)
        numbers = torch_dtype(cast(Dtype, dtype))
        self._mode: type[Any] = InDouble if dtype == "float64" else nullcontext
        with self._mode():
            self._model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=numbers, attn_implementation="eager", experts_implementation="eager",
                use_safetensors=True, local_files_only=True,
            ).eval()
        self._ulp = torch.finfo(numbers).eps
        self._is_exact = dtype == "float64"

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the next token behind each token: [tokens, vocabulary]."""
        with self._mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    @torch.inference_mode()
    def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
        """See ``Reference.check``."""
        logits = self.logits(prompt + output[:-1])[len(prompt) - 1 :]
        if grammar is not None:
            allowed = output_masks(self._model_dir, logits.shape[1], grammar, output)
            logits = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
        choices = logits.argmax(dim=-1).tolist()
        for index, (ours, theirs) in enumerate(zip(output, choices, strict=True)):
            if ours != theirs:
                row = logits[index].double()
                gap = float(row[theirs] - row[ours])
                largest = float(row[row.isfinite()].abs().max())
                is_tie = not self._is_exact and gap <= TIE_ULPS * self._ulp * largest
                return Verdict(index + 1, not is_tie, is_tie)
        return Verdict(len(output), False, False)
