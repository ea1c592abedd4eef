"""What the decoders of different architectures compute, as switches: one record for a model, one for each layer.

The defaults are Llama's: RMS norms before attention and MLP, SiLU, rotation of whole heads, every position seen.

Not here: how a ``config.json`` is read (``hf_config``), which architecture sets what (``families``), the checkpoint's
names (``tensor_names``), and the arithmetic itself (``decoder``, ``general_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RmsNorm = Literal["rms", "rms_once", "rms_plus_one"]
"""Rounded before it is multiplied by its gain; rounded once, after that; likewise with a gain of ``1 + weight``."""
Norm = Literal[RmsNorm, "layer"]
"""... or mean and variance (LayerNorm), rounded once."""

Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_clamped"]
"""Of an MLP. ``swiglu_clamped``: of pairs of neighbours (gate, up), clamped, as gpt-oss has it."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of ``swiglu_clamped``; so in ``csrc/experts.h``."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining context; see ``rope.inverse_frequencies``."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    """yarn: whether the borders of what is interpolated are whole dimensions."""
    divisors: tuple[float, ...] = ()
    """longrope: of each pair's frequency."""


@dataclass(frozen=True, slots=True)
class Rope:
    """One way of turning positions into angles."""

    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int = 0
    """Dimensions of a head that are rotated: the first ones."""
    magnitude: float = 1.0
    """Of cosine and sine (yarn, longrope)."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer does in its own way."""

    window: int = 0
    """A token sees so many positions, its own among them; 0: all before it."""
    rope: int | None = 0
    """Index into ``DecoderConfig.ropes``; None: positions are not told (NoPE)."""
    is_sparse: bool = False
    """Whether its MLP is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: in a sparse layer each token passes a few MLPs, which a router chooses for it."""

    number: int
    num_chosen: int
    """Of a token."""
    intermediate_size: int
    """Of one expert."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token passes besides; 0: there is none."""
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """What makes shares of the router's logits: the softmax of all experts, the sigmoid of each (with a correction that
    counts for the choice alone), or the softmax of those that the largest logits chose."""
    is_normed: bool = False
    """Whether a token's shares are divided by their sum."""
    scale: float = 1.0
    """Of shares."""
    num_groups: int = 1
    """Groups of experts that lie one after the other; a token's experts are of the best few of them."""
    num_chosen_groups: int = 1
    has_bias: bool = False
    """Whether router and experts have biases."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position: times 1 + beta * log(1 + floor(position / period)) (Ministral 3, Llama 4)."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What all layers have in common."""

    norm: Norm = "rms"
    qk_norm: Literal["none", "head", "width"] = "none"
    """Of queries and keys: none, each head by itself, or all heads together."""
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the MLP multiplies two projections; otherwise it has one."""
    is_parallel: bool = False
    """Whether attention and MLP read the same norm, and are added together."""
    is_interleaved: bool = False
    """Whether rotation pairs neighbours in the checkpoint. Its rows are put in the order of halves as they are loaded.
    """
    attention_scale: float = 0.0
    """Of scores; 0: 1 / sqrt(head size)."""
    attention_softcap: float = 0.0
    """Scores stay below it; 0: they are free."""
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what a half of a layer adds."""
    logits_scale: float = 1.0
    query_growth: QueryGrowth | None = None
    experts: Experts | None = None
    """Of sparse layers; see ``LayerKind.is_sparse``."""


PLAIN = Arithmetic()
