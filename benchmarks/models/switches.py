"""What sets an architecture apart from Llama's, in words, read from the record that the decoder works by.

Not here: which models are tabulated (``table``).
"""

from __future__ import annotations

from collections.abc import Iterator

from jettison.device.model.hf_config import DecoderConfig


def switches(config: DecoderConfig) -> list[str]:
    """Each in a few words; nothing of a model that is Llama's in all."""
    return [*_norms(config), *_attention(config), *_positions(config), *_mlp(config), *_scales(config)]


def _norms(config: DecoderConfig) -> Iterator[str]:
    a, names = config.arithmetic, config.names
    if a.norm == "layer":
        yield "LayerNorm with biases" if config.has_norm_bias else "LayerNorm"
    if a.norm == "rms_plus_one":
        yield "norms with gain 1 + w"
    if names.input_norm is None:
        yield "norms after halves alone"
    elif names.attention_out_norm is not None:
        yield "norms before and after halves"
    if a.is_parallel:
        yield "attention and MLP side by side"
    if a.qk_norm != "none":
        yield "norms of queries and keys, " + ("head by head" if a.qk_norm == "head" else "all heads together")


def _attention(config: DecoderConfig) -> Iterator[str]:
    a, names = config.arithmetic, config.names
    windows = [kind.window for kind in config.layers if kind.window]
    if windows:
        yield "windows" if len(windows) == config.num_layers else f"windows in {len(windows)} of {config.num_layers}"
    if a.attention_softcap:
        yield "softcap of scores"
    if names.sinks is not None:
        yield "sinks"
    if a.query_growth is not None:
        yield "queries that grow with their position"
    parts = ("q, k, v", config.qkv_bias), ("o", config.o_bias), ("MLP", config.mlp_bias)
    biased = [name for name, has in parts if has]
    if biased:
        yield f"biases ({', '.join(biased)})"
    if names.qkv is not None or names.gate_up is not None:
        yield "fused checkpoint"


def _positions(config: DecoderConfig) -> Iterator[str]:
    if config.rotary_dim < config.head_dim:
        yield f"{config.rotary_dim / config.head_dim:.0%} of a head rotated"
    if config.arithmetic.is_interleaved:
        yield "neighbours rotated"
    kinds = dict.fromkeys(rope.scaling.kind for rope in config.ropes if rope.scaling is not None)
    yield from (f"angles by {kind}" for kind in kinds)
    if len(config.ropes) > 1:
        yield "angles of their own in windows"
    unrotated = sum(kind.rope is None for kind in config.layers)
    if unrotated:
        yield f"{unrotated} of {config.num_layers} without positions"


def _mlp(config: DecoderConfig) -> Iterator[str]:
    a = config.arithmetic
    if not a.is_gated:
        yield "MLP without gate"
    if a.activation != "silu":
        yield {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "swiglu_clamped": "clamped SwiGLU"}[a.activation]
    if a.experts is None:
        return
    e = a.experts
    sparse = sum(kind.is_sparse for kind in config.layers)
    score = {"softmax": "softmax", "sigmoid": "sigmoid with correction", "softmax_of_chosen": "softmax of the chosen"}
    is_normed = e.is_normed and e.score != "softmax_of_chosen"
    yield f"experts in {sparse} of {config.num_layers} ({score[e.score]}{', normed' if is_normed else ''})"
    if e.num_groups > 1:
        yield "groups of experts"
    if e.shared_size:
        yield "shared expert"


def _scales(config: DecoderConfig) -> Iterator[str]:
    a = config.arithmetic
    scaled = [name for name, has in (
        ("embedding", a.embedding_scale != 1.0), ("scores", a.attention_scale != 0.0),
        ("residual", a.residual_scale != 1.0), ("logits", a.logits_scale != 1.0),
    ) if has]  # fmt: skip
    if scaled:
        yield f"scales ({', '.join(scaled)})"
    if a.logits_softcap:
        yield "softcap of logits"
    if config.tied_embeddings:
        yield "tied head"
