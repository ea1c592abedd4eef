"""What a ``config.json`` says about experts: how many, how they are chosen, and in which layers they are.

Not here: which architecture has which keys (``families``), and routing itself (``routing``).
"""

from __future__ import annotations

from jettison.device.model.arithmetic import Experts
from jettison.device.model.families import Family, Mixture
from jettison.device.model.jsonfile import JsonObject

MOST_EXPERTS = 1 << 17
"""Of all layers: several times as many as any model has. Each has a few tensors, which are listed."""


def read_experts(keys: JsonObject, family: Family) -> Experts | None:
    """The experts of sparse layers; None: the architecture has none. Raises ModelError."""
    mixture = family.mixture
    if mixture is None:
        return None
    number = _number(keys, mixture)
    if number * (num_layers := keys.positive_int("num_hidden_layers")) > MOST_EXPERTS:
        raise keys.fail(f"{number} experts in each of {num_layers} layers are more than {MOST_EXPERTS} in all")
    num_chosen = keys.positive_int("num_experts_per_tok", mixture.num_chosen)
    if num_chosen > number:
        raise keys.fail(f"num_experts_per_tok {num_chosen} is more than the {number} experts")
    size = keys.positive_int(*mixture.size)
    num_groups = num_chosen_groups = 1
    scale = 1.0
    if mixture.score == "sigmoid":
        scale = keys.positive_float("routed_scaling_factor", 1.0)
        num_groups, num_chosen_groups = keys.positive_int("n_group", 1), keys.positive_int("topk_group", 1)
        if number % num_groups or num_chosen_groups > num_groups:
            raise keys.fail(f"n_group {num_groups} and topk_group {num_chosen_groups} do not go with {number} experts")
        if number // num_groups < 2 or num_chosen > number // num_groups * num_chosen_groups:
            raise keys.fail(f"n_group {num_groups}: the groups of {number} experts are too small")
    is_normed = True
    if mixture.is_normed is not None:
        is_normed = keys.flag("norm_topk_prob", mixture.is_normed)
    return Experts(
        number, num_chosen, size, size * _num_shared(keys, mixture), mixture.score, is_normed, scale, num_groups,
        num_chosen_groups, mixture.has_bias,
    )


def sparse_layers(keys: JsonObject, family: Family, num_layers: int) -> list[bool]:
    """For each layer, whether its MLP is a mixture of experts. Raises ModelError."""
    mixture = family.mixture
    if mixture is None:
        return [False] * num_layers
    if mixture.num_dense is not None:
        first = _count(keys, "first_k_dense_replace", mixture.num_dense)
        return [layer >= first for layer in range(num_layers)]
    if mixture.size[0] != "moe_intermediate_size":  # layers have no other width, so none is dense
        return [True] * num_layers
    step = keys.positive_int("decoder_sparse_step", 1)
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise keys.wrong("mlp_only_layers", "a list of layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _number(keys: JsonObject, mixture: Mixture) -> int:
    name, default = mixture.number
    names = [name, *(other for other in mixture.also if other != name)]
    given = next((each for each in names if keys.values.get(each) is not None), name)
    return keys.positive_int(given, default, most=1 << 14)


def _num_shared(keys: JsonObject, mixture: Mixture) -> int:
    return _count(keys, "n_shared_experts", mixture.num_shared) if mixture.num_shared else 0


def _count(keys: JsonObject, key: str, default: int) -> int:
    """A number from 0 on; null counts as absent."""
    return 0 if keys.values.get(key) == 0 else keys.positive_int(key, default)
