"""Keys of the model: where it is, what it is called, its precision, and what computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jettison.config.sections import config_key
from jettison.config.values import Choice, int_from, json_object, length_or_none, name_list, nonempty

DType = Literal["auto", "float64", "float32", "bfloat16"]
Kernels = Literal["auto", "native", "native+torch-linear", "torch", "cuda", "cuda-invariant"]
LoadFormat = Literal["auto", "random"]
QuantizedWeights = Literal["auto", "kept", "widened"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model: its weights, their precision, and the kernels."""

    model: str = config_key("", nonempty, "Model folder (Hugging Face layout), or ORG/NAME in the hub's cache.",
        metavar="DIR")
    revision: str | None = config_key(
        None, nonempty, "Revision of a model in the hub's cache: a branch, a tag or a commit (none: main).",
        metavar="NAME", unset="none")
    download_dir: str | None = config_key(
        None, nonempty, "The hub's cache to look for ORG/NAME in (none: the user's own; HF_HUB_CACHE or HF_HOME name "
        "it). Nothing is downloaded.", metavar="DIR", unset="none")
    served_model_names: tuple[str, ...] = config_key(
        (), name_list, "Name clients use for the model (auto: the folder's name; ORG/NAME of a model in the hub's "
        "cache). May be given more than once: all are taken, and answers carry the first.",
        name="served_model_name", metavar="NAME", unset="auto")
    load_format: LoadFormat = config_key(
        "auto", Choice(LoadFormat), "Where the weights come from: the folder's safetensors (auto), or a fixed seed, "
        "for trials of a shape (random): the folder needs its config.json only, and without a tokenizer tokens are "
        "bytes.")
    dtype: DType = config_key(
        "auto", Choice(DType), "Precision of weights, activations and KV (auto: the checkpoint's).")
    quantized_weights: QuantizedWeights = config_key(
        "auto", Choice(QuantizedWeights), "A quantized folder's matrices of 4 and 8 bits in memory: as the integers "
        "that the folder stores (kept), or as numbers of --dtype (widened); auto: kept where the kernels can, which is "
        "on the CPU but not in float64.")
    kernels: Kernels = config_key(
        "auto", Choice(Kernels), "What computes. On the CPU: the compiled kernels, the same with torch's products in "
        "bfloat16, or torch alone (auto: compiled where they were built, with torch's products where the processor has "
        "AMX). With torch's products rows depend on their batch in the last bits. On cards: cuda-invariant (auto), or "
        "cuda, whose rows depend on their batch.")
    max_model_len: int | None = config_key(
        None, length_or_none, "Most tokens (prompt and output) of one request, also as 4k or 32K (auto: the model's "
        "context).", metavar="N", unset="auto")
    tokenizer: str | None = config_key(
        None, nonempty, "Folder with the tokenizer and chat templates, or its ORG/NAME in the hub's cache (auto: the "
        "model's).", metavar="DIR", unset="auto")
    tokenizer_revision: str | None = config_key(
        None, nonempty, "Revision of a tokenizer in the hub's cache (auto: --revision for the model's own, else main).",
        metavar="NAME", unset="auto")
    generation_config: str = config_key(
        "auto", nonempty, "Sampling that requests leave open: as the model's generation_config.json has it (auto), "
        "OpenAI's defaults (vllm), or as another folder's file has it, whose max_new_tokens bounds every answer.",
        metavar="auto|vllm|DIR")
    override_generation_config: str | None = config_key(
        None, json_object, 'Sampling put over that, as a JSON object: \'{"temperature": 0.5}\'; max_new_tokens in it '
        "bounds every answer.", metavar="JSON", unset="none")
    seed: int | None = config_key(
        0, int_from(0, 2**63 - 1), "Seed for requests that send none (none: other draws at every start).",
        metavar="N", unset="none")

    @property
    def tokenizer_dir(self) -> str:
        """The folder of the tokenizer and the chat templates; the model's, unless another is named."""
        return self.tokenizer or self.model

    @property
    def served_model_name(self) -> str:
        """The first of the names, which answers carry; empty where no model is named."""
        return self.served_model_names[0] if self.served_model_names else ""
