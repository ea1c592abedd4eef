"""The recipes of all wanted tensors of a folder. Not here: a format's own, which its module has.

A format widens with torch, so its module is imported where a folder has it: what is stored plainly is found without.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from jettison.device.model.integers import IntegerForm
from jettison.device.model.quantized.parts import PLAIN, Headers, Recipe, plain, slice_of
from jettison.device.model.quantized.schemes import Awq, Compressed, Fp8, GgufBlocks, Gptq, Scheme
from jettison.device.model.shards import TensorSource


def recipes_of(scheme: Scheme | None, sources: Iterable[TensorSource], headers: Headers) -> dict[str, Recipe]:
    """The recipe of each wanted tensor, by its key. What is stored plainly is read plainly."""
    found = {source.key: _recipe(scheme, source, headers) or plain(source) for source in sources}
    if isinstance(scheme, Gptq):
        _take_zero_biases(found, headers)
    return found


def _take_zero_biases(recipes: dict[str, Recipe], headers: Headers) -> None:
    """Have a bias that the architecture does not want be read beside its matrix, as zeros: AutoGPTQ wrote one beside
    each matrix."""
    wanted = {part.name for recipe in recipes.values() for part in recipe.parts.values()}
    for key, recipe in recipes.items():
        if "qweight" in recipe.parts:
            name = recipe.parts["qweight"].name.removesuffix("qweight") + "bias"
            if name in headers and name not in wanted:
                recipes[key] = _format("columns").beside_zeros(recipe, name)


def form_without_files(scheme: Scheme | None, source: TensorSource) -> IntegerForm | None:
    """The form in which a projection would be kept if a folder had one; None: widened."""
    recipe = None if scheme is None else _of_format(scheme, source, {})
    return None if recipe is None or recipe.integers is None else recipe.integers.form


def _recipe(scheme: Scheme | None, source: TensorSource, headers: Headers) -> Recipe | None:
    """None: it is not quantized."""
    if scheme is None or len(source.shape) < 2:
        return None
    if source.name in headers and headers[source.name].dtype in PLAIN:
        return None
    found = _of_format(scheme, source, headers)
    if found is not None and source.slice is not None:
        found = slice_of(found, source.slice.at, source.slice.num_stacked)
    return found if found is not None and found.is_begun(headers) else None


def _of_format(scheme: Scheme, source: TensorSource, headers: Headers) -> Recipe | None:
    found: Recipe | None
    match scheme:
        case Fp8():
            found = _format("fp8").recipe(scheme, source, headers)
        case Awq():
            found = _format("columns").awq_recipe(scheme, source, headers)
        case Gptq():
            found = _format("columns").gptq_recipe(scheme, source, headers)
        case Compressed():
            found = _format("compressed").recipe(scheme, source, headers)
        case GgufBlocks():
            found = _format("blocks").recipe(source, headers)
        case _:
            found = _format("mxfp4").recipe(scheme, source, headers)
    return found


def _format(name: str) -> Any:
    """Its module."""
    return import_module(f"{__package__}.{name}")
