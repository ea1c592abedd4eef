"""The recipes of all wanted tensors of a folder. Not here: a format's own, which its module has."""

from __future__ import annotations

from collections.abc import Iterable

from jettison.device.model.quantized import columns, compressed, fp8, mxfp4
from jettison.device.model.quantized.parts import PLAIN, Headers, Recipe, plain
from jettison.device.model.quantized.schemes import Awq, Compressed, Fp8, Gptq, Scheme
from jettison.device.model.shards import TensorSource


def recipes_of(scheme: Scheme | None, sources: Iterable[TensorSource], headers: Headers) -> dict[str, Recipe]:
    """The recipe of each wanted tensor, by its name. What is stored plainly is read plainly."""
    return {source.name: _recipe(scheme, source, headers) or plain(source) for source in sources}


def _recipe(scheme: Scheme | None, source: TensorSource, headers: Headers) -> Recipe | None:
    """None: it is not quantized."""
    if scheme is None or len(source.shape) < 2:
        return None
    if source.name in headers and headers[source.name].dtype in PLAIN:
        return None
    found = _of_format(scheme, source, headers)
    return found if found is not None and found.is_begun(headers) else None


def _of_format(scheme: Scheme, source: TensorSource, headers: Headers) -> Recipe | None:
    match scheme:
        case Fp8():
            return fp8.recipe(scheme, source, headers)
        case Awq():
            return columns.awq_recipe(scheme, source, headers)
        case Gptq():
            return columns.gptq_recipe(scheme, source, headers)
        case Compressed():
            return compressed.recipe(scheme, source, headers)
    return mxfp4.recipe(scheme, source, headers)
