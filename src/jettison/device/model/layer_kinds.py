"""What each layer of a ``config.json`` does in its own way: its window, and how positions turn into angles; and how
many positions there are.

Not here: the angles themselves (``rope``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from jettison.device.model.arithmetic import LayerKind, QueryGrowth, Rope, RopeScaling
from jettison.device.model.expert_keys import sparse_layers
from jettison.device.model.families import Family
from jettison.device.model.jsonfile import MAX_SIZE, JsonObject, is_positive, short_repr

log = logging.getLogger(__name__)

SLIDING, FULL = "sliding_attention", "full_attention"
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_layers(
    keys: JsonObject, family: Family, num_layers: int, head_dim: int, served: int
) -> tuple[tuple[Rope, ...], tuple[LayerKind, ...]]:
    """The ways of rotating, and each layer's kind. ``served``: tokens of the longest request; a window that all of it
    fits in is none. Raises ModelError."""
    full, local = _ropes(keys, family, head_dim, served)
    ropes = (full,) if local in (None, full) else (full, local)
    window = _window(keys, family)
    types = _layer_types(keys, family, num_layers, window)
    rotated = _rotated(keys, family, num_layers, types, window)
    sparse = sparse_layers(keys, family, num_layers)
    kinds = []
    for layer_type, is_rotated, is_sparse in zip(types, rotated, sparse, strict=True):
        is_sliding = layer_type == SLIDING
        rope = None if not is_rotated else int(is_sliding and len(ropes) > 1)
        seen = window if is_sliding and window is not None and window < served else 0
        kinds.append(LayerKind(seen, rope, is_sparse))
    return ropes, tuple(kinds)


def read_context(keys: JsonObject, family: Family) -> tuple[int, str]:
    """(The model's context in tokens, the key that says so.)

    YaRN reaches as far as its factor says, as in vLLM; files that were scaled by hand keep the original context in
    ``max_position_embeddings``, others have the product there. Dual chunk attention (Qwen2.5-1M) is plain attention
    up to its original context, where the context ends here: logs a warning.
    """
    context, told_by = _stretched_context(keys, family)
    chunked = keys.object("dual_chunk_attention_config")
    if chunked is not None and (most := chunked.positive_int("original_max_position_embeddings")) < context:
        log.warning(
            "%s: dual_chunk_attention_config is not supported; the context ends where it begins to matter, at %d of %d "
            "tokens", keys.path, most, context,
        )  # fmt: skip
        return most, "original_max_position_embeddings of dual_chunk_attention_config"
    return context, told_by


def _stretched_context(keys: JsonObject, family: Family) -> tuple[int, str]:
    context, key = keys.positive_int("max_position_embeddings", family.default_context), "max_position_embeddings"
    params = _parts(keys, family)[FULL]
    original = _told_original_context(keys, params)
    if _kind(params, family) == "yarn" and original is not None and params.values.get("factor") is not None:
        reached = int(original * params.positive_float("factor"))
        if reached > MAX_SIZE:
            raise keys.fail(f"rope scaling: factor times original_max_position_embeddings is {reached:g} tokens")
        if reached > context:
            return reached, "factor times original_max_position_embeddings of its rope scaling"
    return context, key


def read_query_growth(keys: JsonObject) -> QueryGrowth | None:
    """``llama_4_scaling_beta`` among the rotary parameters (Ministral 3); 0 says that they do not grow."""
    params = keys.object("rope_scaling") or keys.object("rope_parameters")
    if params is None or params.values.get("llama_4_scaling_beta") in (None, 0):
        return None
    beta = params.positive_float("llama_4_scaling_beta")
    return QueryGrowth(beta, params.positive_int("original_max_position_embeddings"))


# ------------------------------------------------------------------------------------------------------------ windows


def _window(keys: JsonObject, family: Family) -> int | None:
    rule = family.windows.rule
    if rule == "never" or (rule in ("flagged", "all_flagged") and not keys.flag("use_sliding_window")):
        return None
    if "sliding_window" in keys.values:
        return keys.optional_positive_int("sliding_window")
    return family.windows.default


def _layer_types(keys: JsonObject, family: Family, num_layers: int, window: int | None) -> list[str]:
    """``sliding_attention`` or ``full_attention`` for each layer."""
    rule = family.windows.rule
    if rule == "never" or (window is None and rule != "typed"):
        return [FULL] * num_layers
    if rule in ("always", "all_flagged"):
        return [SLIDING] * num_layers
    listed = keys.values.get("layer_types")
    if listed is not None:
        if (
            not isinstance(listed, list) or len(listed) != num_layers
            or not all(each in (SLIDING, FULL) for each in listed)
        ):  # fmt: skip
            raise keys.fail(f"layer_types must name {SLIDING} or {FULL} for each of {num_layers} layers")
        return listed
    if rule == "flagged":
        if family.positions.without == "listed":
            rotated = _listed(keys, num_layers)
            return [FULL if is_rotated else SLIDING for is_rotated in rotated]
        first = keys.values.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise keys.wrong("max_window_layers", "a number of layers")
        return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    every = keys.positive_int(family.windows.pattern_key, family.windows.full_every)
    return [FULL if window is None or (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]


def _rotated(keys: JsonObject, family: Family, num_layers: int, types: list[str], window: int | None) -> list[bool]:
    """Which layers are told positions."""
    match family.positions.without:
        case "listed":
            return _listed(keys, num_layers)
        case "full" if window is not None:
            return [layer_type == SLIDING for layer_type in types]
        case _:
            return [True] * num_layers


def _listed(keys: JsonObject, num_layers: int) -> list[bool]:
    listed = keys.values.get("no_rope_layers")
    if listed is None:
        interval = keys.positive_int("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if (
        not isinstance(listed, list) or len(listed) != num_layers
        or not all(type(each) is int and each in (0, 1) for each in listed)
    ):  # fmt: skip
        raise keys.fail(f"no_rope_layers must have 0 or 1 for each of {num_layers} layers")
    return [value == 1 for value in listed]


# ------------------------------------------------------------------------------------------------------------- angles


def _ropes(keys: JsonObject, family: Family, head_dim: int, served: int) -> tuple[Rope, Rope | None]:
    """(of layers that see all positions, of those with a window)."""
    parts = _parts(keys, family)
    positions = family.positions
    full = _rope(keys, parts[FULL], family, head_dim, served, positions.default_theta)
    if positions.local_theta is None and positions.scales_local and not parts[SLIDING].values:
        return full, None
    theta = full.theta
    if positions.local_theta is not None:
        theta = keys.positive_float("rope_local_base_freq", positions.local_theta)
    plain = replace(full, theta=theta, scaling=None, magnitude=1.0)
    if not parts[SLIDING].values:
        return full, plain
    return full, _rope(keys, parts[SLIDING], family, head_dim, served, theta, is_local=True)


def _parts(keys: JsonObject, family: Family) -> dict[str, JsonObject]:
    """Rotary parameters by type of layer, from ``rope_scaling``, or from ``rope_parameters``, their newer spelling,
    which may have some for each type."""
    given = keys.object("rope_parameters") or JsonObject(keys.path, {})
    if given.values.keys() & {SLIDING, FULL}:
        parts = {name: given.object(name) or JsonObject(keys.path, {}) for name in (FULL, SLIDING)}
        if not given.values.keys() <= parts.keys() or (family.windows.rule == "never"):
            raise keys.fail("rope_parameters differ between layers in a way that is not supported")
    else:
        given = keys.object("rope_scaling") or given
        if any(isinstance(value, dict) for value in given.values.values()):
            raise keys.fail("rope_parameters differ between layers, which is not supported")
        parts = {FULL: given, SLIDING: JsonObject(keys.path, {})}
    return parts


def _kind(params: JsonObject, family: Family) -> str:
    kind = params.optional_text("rope_type") or params.optional_text("type") or "default"
    return "longrope" if family.model_type == "phi3" and kind in ("su", "yarn") else kind


def _rope(
    keys: JsonObject, params: JsonObject, family: Family, head_dim: int, served: int, default_theta: float,
    *, is_local: bool = False,
) -> Rope:
    theta = default_theta if is_local else keys.positive_float("rope_theta", default_theta)
    theta = params.positive_float("rope_theta", theta)
    if theta <= 1.0:
        raise keys.fail(f"rope_theta {theta:g} must be above 1")
    partial = keys.positive_float("partial_rotary_factor", family.positions.partial or 1.0)
    partial = params.positive_float("partial_rotary_factor", partial)
    if family.positions.partial is None and partial != 1.0:
        raise keys.fail(f"partial_rotary_factor {partial:g} is not supported for {family.model_type}")
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise keys.fail(f"partial_rotary_factor {partial:g} leaves {rotary_dim} of {head_dim} dimensions to be rotated")
    scaling, magnitude = _scaling(keys, params, family, _kind(params, family), rotary_dim, served)
    return Rope(theta, scaling, rotary_dim, magnitude)


def _scaling(
    keys: JsonObject, params: JsonObject, family: Family, kind: str, rotary_dim: int, served: int
) -> tuple[RopeScaling | None, float]:
    """(how frequencies are stretched, magnitude of cosine and sine)."""
    context = keys.positive_int("max_position_embeddings", family.default_context)
    if kind in ("default", "dynamic"):  # a dynamic one stretches only beyond the context, which no request passes
        return None, 1.0
    if kind == "linear":
        return RopeScaling("linear", params.positive_float("factor")), 1.0
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3", params.positive_float("factor"), params.positive_float("low_freq_factor"),
            params.positive_float("high_freq_factor"),
            _original_context(keys, params, context),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise keys.fail("rope scaling: low_freq_factor must be below high_freq_factor")
        return scaling, 1.0
    if kind == "yarn":
        return _yarn(params, context, _original_context(keys, params, context))
    if kind == "longrope":
        return _longrope(keys, params, rotary_dim, served, context)
    supported = "default, dynamic, linear, llama3, yarn, longrope"
    raise keys.fail(f"rope scaling {short_repr(kind)} is not supported; supported: {supported}")


def _original_context(keys: JsonObject, params: JsonObject, context: int) -> int:
    """Of pretraining."""
    return _told_original_context(keys, params) or context


def _told_original_context(keys: JsonObject, params: JsonObject) -> int | None:
    """Beside the rotary parameters or among them."""
    key = "original_max_position_embeddings"
    return keys.optional_positive_int(key) or params.optional_positive_int(key)


def _yarn(params: JsonObject, context: int, original: int) -> tuple[RopeScaling, float]:
    """YaRN (Peng et al. 2023), as transformers has it."""
    factor = params.positive_float("factor", context / original)
    scaling = RopeScaling(
        "yarn", factor, original_max_position_embeddings=original, beta_fast=params.positive_float("beta_fast", 32.0),
        beta_slow=params.positive_float("beta_slow", 1.0), truncates=params.flag("truncate", True),
    )

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    magnitude = growth(1.0)
    if params.values.get("mscale") and params.values.get("mscale_all_dim"):
        magnitude = growth(params.positive_float("mscale")) / growth(params.positive_float("mscale_all_dim"))
    return scaling, params.positive_float("attention_factor", magnitude)


def _longrope(
    keys: JsonObject, params: JsonObject, rotary_dim: int, served: int, context: int
) -> tuple[RopeScaling, float]:
    """LongRoPE (Ding et al. 2024): one set of divisors for contexts up to the original one, another for longer ones.

    Which one is decided by the served context, so that a token's key does not depend on how long its request gets."""
    original = _original_context(keys, params, context)
    factor = params.positive_float("factor", context / original)
    name = "long_factor" if served > original else "short_factor"
    divisors = params.values.get(name)
    if (
        not isinstance(divisors, list) or len(divisors) != rotary_dim // 2
        or not all(is_positive(each) for each in divisors)
    ):  # fmt: skip
        raise keys.fail(f"rope scaling: {name} must have {rotary_dim // 2} positive numbers")
    if original < 2:
        raise keys.fail("rope scaling: original_max_position_embeddings must be above 1")
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scaling = RopeScaling("longrope", factor, original_max_position_embeddings=original, divisors=tuple(divisors))
    return scaling, params.positive_float("attention_factor", magnitude)
