"""A Hugging Face ``config.json`` as one frozen record, for the architectures that the decoder can run.

An allow-list: the architecture must be known (``families``), only the keys named here are read, and a key that would
change the arithmetic in a way the decoder does not know is refused. Nothing a folder brings along (``auto_map``) is
ever imported.

Not here: rotary frequencies and layers' kinds (``layer_kinds``), the weights, and anything that needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from jettison.config.hubcache import download_hint
from jettison.cost.models import SmallWeights
from jettison.cost.profile_document import PLAIN_WEIGHTS
from jettison.device.model.arithmetic import PLAIN, Activation, Arithmetic, LayerKind, Rope
from jettison.device.model.expert_keys import read_experts
from jettison.device.model.families import FAMILIES, TEXTS_ALIKE, Family
from jettison.device.model.integers import KeptSlot
from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.device.model.layer_kinds import read_context, read_layers, read_query_growth
from jettison.device.model.quantized.config import read_scheme
from jettison.device.model.quantized.signs import other_weights
from jettison.device.model.standins import why_not_itself
from jettison.device.model.tensor_names import TensorNames
from jettison.device.model.unserved import why_not_served
from jettison.errors import ConfigError, ModelError

MAX_LAYERS = 1 << 12

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
}  # fmt: skip

_GENERATES_NO_TEXT = (
    "Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering",
    "ForMultipleChoice", "ForRewardModel", "ForEmbedding", "ForRetrieval",
)  # fmt: skip
"""Ends of architectures' names."""
_OF_THE_WHOLE = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
"""Keys beside ``text_config`` that concern the text model, where it does not say otherwise."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that the decoder's arithmetic depends on, and the model's values for the front end."""

    architecture: str
    """As in ``config.json``, e.g. ``"Qwen2ForCausalLM"``."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    """The ways of rotating that layers choose from."""
    layers: tuple[LayerKind, ...]
    arithmetic: Arithmetic
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    max_position_embeddings: int
    """The model's context, in tokens."""
    max_model_len: int
    """The served context, or as much of it as memory can hold: rotary tables have this many rows."""
    stored_dtype: str | None
    """The dtype of the saved weights by ``config.json``; the files decide."""
    kept: tuple[KeptSlot, ...] = ()
    """Matrices that are kept as the integers that the folder stores; all others are plain numbers of the serving type.
    The controller decides it once for all workers (``kept``)."""

    @property
    def weights(self) -> str:
        """How matrices are kept, for people and profiles: names of forms, or ``plain``."""
        forms = {SmallWeights(form.bits, form.group_size, form.offset) for _, _, form in self.kept}
        return "+".join(sorted(form.name for form in forms)) or PLAIN_WEIGHTS

    @property
    def names(self) -> TensorNames:
        """Of the checkpoint's tensors."""
        return FAMILIES[self.architecture].names

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have biases."""
        return FAMILIES[self.architecture].biases.norm

    @property
    def has_spare_layers(self) -> bool:
        """Whether checkpoints may have layers behind the last one, which guess tokens ahead: they are not served."""
        mixture = FAMILIES[self.architecture].mixture
        return mixture is not None and mixture.has_spare_layers

    @property
    def is_plain(self) -> bool:
        """Whether every layer is one of Llama's, Mistral's, Qwen2's or Qwen3's: kernels have these in two calls."""
        names = self.names
        beside_attention = replace(self.arithmetic, attention_scale=0.0, is_interleaved=False, qk_norm="none")
        return (
            beside_attention == PLAIN and names.attention_out_norm is None and names.mlp_out_norm is None
            and all(kind == LayerKind(kind.window) and self.attends_in_one_call(kind) for kind in self.layers)
        )  # fmt: skip

    def attends_in_one_call(self, kind: LayerKind) -> bool:
        """Whether kernels have the attention of such a layer in one call, whatever its MLP is."""
        a, names = self.arithmetic, self.names
        has_its_norms = names.input_norm is not None and names.mlp_norm is not None
        return (
            has_its_norms and a.norm != "layer" and a.is_gated and a.qk_norm != "width" and a.query_growth is None
            and names.sinks is None and kind.rope is not None
        )  # fmt: skip

    @property
    def attention_scale(self) -> float:
        """That scores are multiplied by."""
        return self.arithmetic.attention_scale or self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        """Width of the rotary tables."""
        return self.ropes[0].rotary_dim

    @property
    def up_size(self) -> int:
        """Width of the MLP's first product."""
        return self.intermediate_size * (2 if self.arithmetic.is_gated else 1)

    def mlp_size(self, layer: int) -> int:
        """Intermediate size of the MLP that all tokens pass in a layer; 0: there is none."""
        experts = self.arithmetic.experts
        return experts.shared_size if experts is not None and self.layers[layer].is_sparse else self.intermediate_size

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def token_parameters(self) -> int:
        """Parameters of a layer's matrices that one token is multiplied with; of the layer that has the most."""
        experts = self.arithmetic.experts
        attention, factor = self.hidden_size * (self.qkv_size + self.q_size), 3 if self.arithmetic.is_gated else 2
        return attention + max(
            factor * self.hidden_size * self.mlp_size(layer)
            + (3 * self.hidden_size * experts.num_chosen * experts.intermediate_size
               if experts is not None and kind.is_sparse else 0)
            for layer, kind in enumerate(self.layers)
        )  # fmt: skip


def read_config(model_dir: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Read and check ``config.json``.

    ``max_model_len``: tokens of the longest request to be served; None = the model's context. A shorter one makes a
    sliding window that it fits in irrelevant, and the rotary tables smaller. Raises ModelError, naming the file and the
    remedy, for an unsupported model; ConfigError for a ``max_model_len`` beyond the model's context.
    """
    path = _existing(Path(model_dir))
    _refuse_other_kinds(path.parent)
    return parse_config(JsonObject.read(path), max_model_len)


def parse_config(keys: JsonObject, max_model_len: int | None = None) -> DecoderConfig:
    """``read_config`` of contents that are already in memory; ``keys.path`` names them in errors."""
    architecture, family = _family(keys)
    if family.text_types:
        keys, architecture, family = _text_part(keys, family)
    keys = JsonObject(keys.path, {"max_position_embeddings": family.default_context, **family.defaults, **keys.values})
    read_scheme(keys)  # refuses what it does not know
    num_layers = keys.positive_int("num_hidden_layers", most=MAX_LAYERS)
    hidden_size, num_heads = keys.positive_int("hidden_size"), keys.positive_int("num_attention_heads")
    absent = family.default_kv_heads if "num_key_value_heads" not in keys.values else None
    num_kv_heads = keys.positive_int("num_key_value_heads", absent or num_heads)
    if num_heads % num_kv_heads:
        raise keys.fail(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    context, told_by = read_context(keys, family)
    served = _served_context(keys, context, told_by, max_model_len)
    head_dim = _head_dim(keys, family, hidden_size, num_heads)
    ropes, layers = read_layers(keys, family, num_layers, head_dim, served)
    biases = family.biases
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.positive_int("intermediate_size"),
        vocab_size=keys.positive_int("vocab_size"),
        norm_eps=keys.positive_float(family.keys.eps, family.keys.default_eps),
        ropes=ropes,
        layers=layers,
        arithmetic=_arithmetic(keys, family, hidden_size),
        qkv_bias=biases.qkv or _has_bias(keys, family, biases.qkv_key),
        o_bias=_has_bias(keys, family, biases.o_key),
        mlp_bias=_has_bias(keys, family, biases.mlp_key),
        tied_embeddings=keys.flag("tie_word_embeddings", family.keys.tied),
        max_position_embeddings=context,
        max_model_len=served,
        stored_dtype=_stored_dtype(keys),
    )


def _has_bias(keys: JsonObject, family: Family, key: str | None) -> bool:
    return key is not None and keys.flag(key, family.biases.default)


def _arithmetic(keys: JsonObject, family: Family, hidden_size: int) -> Arithmetic:
    """The family's switches with the activation, multipliers and softcaps of the file."""
    read = family.arithmetic
    changes: dict[str, object] = {}
    name = None if family.keys.activation is None else keys.optional_text(family.keys.activation)
    if name is not None:
        if name not in _ACTIVATIONS:
            told = f"{family.keys.activation} {short_repr(name)} is not supported"
            raise keys.fail(f"{told}; supported: {', '.join(_ACTIVATIONS)}")
        changes["activation"] = _ACTIVATIONS[name]
    for key, value in family.keys.fixed.items():
        if keys.values.get(key) not in (None, value):
            raise keys.fail(f"{key} {short_repr(keys.values[key])} is not supported")
    if family.keys.qk_norm is not None:
        changes["qk_norm"] = "head" if keys.flag(family.keys.qk_norm) else "none"
    for key in family.keys.scales:
        if keys.values.get(key) is not None:
            field, value = _scale(key, keys.positive_float(key))
            changes[field] = value
    if read.norm == "rms_plus_one":  # Gemma: embeddings are as large as the width is
        changes["embedding_scale"] = hidden_size**0.5
    growth = read_query_growth(keys)
    return replace(read, query_growth=growth, experts=read_experts(keys, family), **changes)  # type: ignore[arg-type]


def _scale(key: str, value: float) -> tuple[str, float]:
    """The field of ``Arithmetic`` that a key of multipliers and softcaps sets."""
    match key:
        case "query_pre_attn_scalar":
            return "attention_scale", value**-0.5
        case "attention_multiplier":
            return "attention_scale", value
        case "attn_logit_softcapping":
            return "attention_softcap", value
        case "final_logit_softcapping":
            return "logits_softcap", value
        case "embedding_multiplier":
            return "embedding_scale", value
        case "residual_multiplier":
            return "residual_scale", value
        case "logits_scaling":
            return "logits_scale", 1.0 / value
        case _:
            return "logits_scale", value


def _existing(model_dir: Path) -> Path:
    if not model_dir.is_dir():
        what, hint = "not a folder" if model_dir.exists() else "no such folder", download_hint(str(model_dir))
        raise ModelError(f"{model_dir}: {what}; name a Hugging Face model folder{hint}")
    path = model_dir / "config.json"
    if not path.is_file():
        needs = "a model folder needs config.json, *.safetensors and tokenizer.json"
        if (found := other_weights(model_dir)) is not None:
            needs = f"the folder holds {found}"
        elif (model_dir / "adapter_config.json").is_file():
            needs = "adapter_config.json says that this is an adapter (LoRA); merge it into its model"
        raise ModelError(f"{path}: {why_not_itself(path) or f'not found; {needs}'}")
    return path


def _refuse_other_kinds(model_dir: Path) -> None:
    """Raise ModelError for a folder whose ``config.json`` says only a part of what its model is."""
    if (path := model_dir / "modules.json").is_file():
        raise ModelError(f"{path}: says that this is an embedding model (sentence-transformers); only models that "
                         "generate text are served")  # fmt: skip
    if (path := model_dir / "adapter_config.json").is_file():
        raise ModelError(f"{path}: says that the folder holds an adapter (LoRA), which would be left out; merge it "
                         "into its model, or take the file away")  # fmt: skip


def _family(keys: JsonObject) -> tuple[str, Family]:
    names = keys.values.get("architectures")
    model_type = keys.optional_text("model_type")
    if names is None or names == []:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise keys.wrong("architectures", "a list of names")
    name = names[0] if names else f"(model_type {model_type})"
    if name not in FAMILIES:
        if (reason := why_not_served(names[0] if names else model_type or "")) is not None:
            raise keys.fail(f"architecture {name[:60]} is not supported: {reason}")
        if name.endswith(_GENERATES_NO_TEXT) and not name.endswith("LMHeadModel"):
            raise keys.fail(f"architecture {name[:60]} is an encoder, an embedding model, a classifier or a reranker; "
                            "only models that generate text are served (ForCausalLM)")  # fmt: skip
        hint = " (its own code, auto_map, is never run)" if "auto_map" in keys.values else ""
        raise keys.fail(f"architecture {name[:60]} is not supported{hint}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if model_type not in (None, family.model_type):
        raise keys.fail(f"model_type {short_repr(model_type)} contradicts architecture {name}; mend one of the two")
    return name, family


def _text_part(keys: JsonObject, family: Family) -> tuple[JsonObject, str, Family]:
    """The text model of a model with images: its keys, with those of the whole that concern it."""
    part = keys.object("text_config")
    if part is None:
        raise keys.wrong("text_config", "the text model's configuration")
    kind = part.optional_text("model_type") or family.text_types[0]
    if kind not in family.text_types:
        reason = why_not_served(kind) or f"supported: {', '.join(family.text_types)}"
        raise keys.fail(f"text_config has model_type {short_repr(kind)}; {reason}")
    name, text = TEXTS_ALIKE.get(kind) or next(item for item in FAMILIES.items() if item[1].model_type == kind)
    of_whole = {key: keys.values[key] for key in _OF_THE_WHOLE if key in keys.values}
    return JsonObject(keys.path, {**text.text_sizes, **of_whole, **part.values}), name, text


def _head_dim(keys: JsonObject, family: Family, hidden_size: int, num_heads: int) -> int:
    head_dim = keys.optional_positive_int("head_dim") or family.default_head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise keys.fail(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise keys.fail(f"head_dim {head_dim} is odd, and rotary embedding turns pairs")
    return head_dim


def _served_context(keys: JsonObject, context: int, told_by: str, max_model_len: int | None) -> int:
    if max_model_len is None:
        return context
    if not 0 < max_model_len <= context:
        raise ConfigError(
            f"max_model_len {max_model_len} must be from 1 to the model's context, {context} "
            f"({told_by} in {keys.path})"
        )
    return max_model_len


def _stored_dtype(keys: JsonObject) -> str | None:
    name = keys.optional_text("dtype") or keys.optional_text("torch_dtype")
    return None if name is None else name.removeprefix("torch.")
