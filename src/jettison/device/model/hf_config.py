"""A Hugging Face ``config.json`` as one frozen record, for the architectures that the decoder can run.

An allow-list: the architecture must be known, only the keys named here are read, and a key that would change the
arithmetic in a way the decoder does not know is refused. Nothing a folder brings along (``auto_map``) is ever
imported. Defaults for absent keys are those of the architecture in transformers.

Not here: the weights, and anything that needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jettison.config.hubcache import download_hint
from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.device.model.quantized import REFUSAL, other_weights, sign_in_config
from jettison.device.model.standins import why_not_itself
from jettison.errors import ConfigError, ModelError

MAX_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one architecture from the others."""

    model_type: str
    default_context: int
    """``max_position_embeddings`` where the key is absent."""
    qkv_bias: bool = False
    """Whether it always has these biases; the others have biases where ``attention_bias`` is true, on the output
    projection too."""
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    """None = hidden size / heads."""
    default_kv_heads: int | None = None
    """KV heads where the key is absent; None, and null in the file, = heads."""
    window: Literal["never", "always", "flagged"] = "never"
    """When ``sliding_window`` counts: never, always, or where ``use_sliding_window`` is true."""


# Defaults as in transformers 5.23: models/<type>/configuration_<type>.py.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", 2048, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family("mistral", 131_072, default_kv_heads=8, window="always"),
    "Qwen2ForCausalLM": Family("qwen2", 32_768, qkv_bias=True, default_kv_heads=32, window="flagged"),
    "Qwen3ForCausalLM": Family(
        "qwen3", 32_768, reads_attention_bias=True, qk_norm=True, default_head_dim=128, default_kv_heads=32,
        window="flagged",
    ),
}

_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining context; see ``rope.inverse_frequencies``."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    max_position_embeddings: int
    """The model's context, in tokens."""
    max_model_len: int
    """The served context, or as much of it as memory can hold: rotary tables have this many rows."""
    stored_dtype: str | None
    """The dtype of the saved weights by ``config.json``; the files decide."""
    bos_token_id: int | None

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


def read_config(model_dir: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Read and check ``config.json``.

    ``max_model_len``: tokens of the longest request to be served; None = the model's context. A shorter one makes a
    sliding window that it fits in irrelevant, and the rotary tables smaller. Raises ModelError, naming the file and the
    remedy, for an unsupported model; ConfigError for a ``max_model_len`` beyond the model's context.
    """
    return parse_config(JsonObject.read(_existing(Path(model_dir))), max_model_len)


def parse_config(keys: JsonObject, max_model_len: int | None = None) -> DecoderConfig:
    """``read_config`` of contents that are already in memory; ``keys.path`` names them in errors."""
    architecture, family = _family(keys)
    _refuse_unknown_arithmetic(keys)
    num_layers = keys.positive_int("num_hidden_layers", most=MAX_LAYERS)
    hidden_size, num_heads = keys.positive_int("hidden_size"), keys.positive_int("num_attention_heads")
    absent = family.default_kv_heads if "num_key_value_heads" not in keys.values else None
    num_kv_heads = keys.positive_int("num_key_value_heads", absent or num_heads)
    if num_heads % num_kv_heads:
        raise keys.fail(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    context = keys.positive_int("max_position_embeddings", family.default_context)
    rope_theta, rope_scaling = _rope(keys, context)
    served = _served_context(keys, context, max_model_len)
    _check_window(keys, family, num_layers, served)
    attention_bias = family.reads_attention_bias and keys.flag("attention_bias")
    bos = keys.token_ids("bos_token_id")
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, family, hidden_size, num_heads),
        intermediate_size=keys.positive_int("intermediate_size"),
        vocab_size=keys.positive_int("vocab_size"),
        rms_norm_eps=keys.positive_float("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        max_position_embeddings=context,
        max_model_len=served,
        stored_dtype=_stored_dtype(keys),
        bos_token_id=bos[0] if bos and bos[0] >= 0 else None,
    )


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


def _family(keys: JsonObject) -> tuple[str, Family]:
    names = keys.values.get("architectures")
    model_type = keys.optional_text("model_type")
    if names is None or names == []:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise keys.wrong("architectures", "a list of names")
    name = names[0] if names else f"(model_type {model_type})"
    if name not in FAMILIES:
        hint = " (its own code, auto_map, is never run)" if "auto_map" in keys.values else ""
        raise keys.fail(f"architecture {name[:60]} is not supported{hint}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if model_type not in (None, family.model_type):
        raise keys.fail(f"model_type {short_repr(model_type)} contradicts architecture {name}; mend one of the two")
    return name, family


def _refuse_unknown_arithmetic(keys: JsonObject) -> None:
    if (sign := sign_in_config(keys.values)) is not None:
        raise keys.fail(f"{sign}: {REFUSAL}")
    if keys.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.fail(f"hidden_act {short_repr(keys.values['hidden_act'])} is not supported; only silu is")


def _head_dim(keys: JsonObject, family: Family, hidden_size: int, num_heads: int) -> int:
    head_dim = keys.optional_positive_int("head_dim") or family.default_head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise keys.fail(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise keys.fail(f"head_dim {head_dim} is odd, and rotary embedding turns pairs")
    return head_dim


def _rope(keys: JsonObject, context: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``, their newer spelling."""
    params = keys.object("rope_scaling") or keys.object("rope_parameters") or JsonObject(keys.path, {})
    if any(isinstance(value, dict) for value in params.values.values()):
        raise keys.fail("rope_parameters differ between layers, which is not supported")
    for source in (keys, params):
        if source.positive_float("partial_rotary_factor", 1.0) != 1.0:
            raise keys.fail("partial_rotary_factor other than 1 is not supported")
    theta = params.positive_float("rope_theta", keys.positive_float("rope_theta", 10_000.0))
    kind = params.optional_text("rope_type") or params.optional_text("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", params.positive_float("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            params.positive_float("factor"),
            params.positive_float("low_freq_factor"),
            params.positive_float("high_freq_factor"),
            params.positive_int("original_max_position_embeddings", context),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise keys.fail("rope scaling: low_freq_factor must be below high_freq_factor")
        return theta, scaling
    raise keys.fail(f"rope scaling {short_repr(kind)} is not supported; supported: default, linear, llama3")


def _served_context(keys: JsonObject, context: int, max_model_len: int | None) -> int:
    if max_model_len is None:
        return context
    if not 0 < max_model_len <= context:
        raise ConfigError(
            f"max_model_len {max_model_len} must be from 1 to the model's context, {context} "
            f"(max_position_embeddings in {keys.path})"
        )
    return max_model_len


def _check_window(keys: JsonObject, family: Family, num_layers: int, served: int) -> None:
    """Raise ModelError for a sliding window that would hide a position from some token."""
    if family.window == "never" or (family.window == "flagged" and not keys.flag("use_sliding_window")):
        return
    if "sliding_window" in keys.values:
        window = keys.optional_positive_int("sliding_window")
    else:
        window = _DEFAULT_SLIDING_WINDOW
    if window is None or window >= served:
        return
    if family.window == "flagged":
        layer_types = keys.values.get("layer_types")
        if layer_types is None:
            first = keys.values.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
            if isinstance(first, int) and first >= num_layers:
                return
        elif layer_types == ["full_attention"] * num_layers:
            return
    raise keys.fail(
        f"a sliding window of {window} tokens is not supported; serve at most that many (--max-model-len {window})"
    )


def _stored_dtype(keys: JsonObject) -> str | None:
    name = keys.optional_text("dtype") or keys.optional_text("torch_dtype")
    return None if name is None else name.removeprefix("torch.")
