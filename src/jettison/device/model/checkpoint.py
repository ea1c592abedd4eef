"""Finds the decoder's tensors in the safetensors of a model folder: reads headers, not weights.

A folder with other tensors than its configuration implies is refused with one line that names the file and the cause: a
quantized model, weights in another place, or a file of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.device.model.quantized import REFUSAL, other_weights, sign_beside, sign_of_tensor, sign_of_type
from jettison.device.model.shards import TensorSource
from jettison.device.model.standins import why_not_itself
from jettison.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

STORED_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """The files of a model's tensors."""

    files: tuple[Path, ...]
    file_of: dict[str, Path]
    """File of each tensor."""
    doubt: str | None
    """For a folder with two copies of the weights, a line on the one that is read, and why; else None."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A set of files that may be the weights."""

    files: list[Path]
    listing: Path
    """File to name when a tensor is missing."""


class _Mismatch(ModelError):
    """The files are valid, but hold other tensors than the model has."""


def find_weights(
    model_dir: Path, sources: Sequence[TensorSource], is_spare: Callable[[str], bool]
) -> FoundWeights:
    """Find every tensor, and check that the folder holds exactly ``sources``, in their shapes.

    ``is_spare``: whether a tensor of this name may be there, to be ignored. Raises ModelError.
    """
    expected = {source.name: source for source in sources}
    choices = _choices(model_dir, expected)
    errors: list[ModelError] = []
    for choice in choices:
        try:
            file_of = _matched(choice, expected, is_spare)
        except ModelError as error:
            errors.append(error)
            continue
        doubt = _doubt(model_dir, bool(errors)) if len(choices) > 1 else None
        return FoundWeights(tuple(choice.files), file_of, doubt)
    if isinstance(errors[0], _Mismatch):
        raise _quantized(model_dir, choices[0].files, expected) or errors[0]
    raise errors[0]


def _choices(model_dir: Path, expected: dict[str, TensorSource]) -> list[_Choice]:
    """The copies of the weights in the folder, the preferred one first."""
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if not single.is_file():
        if index.is_file():
            return [_Choice(_indexed_files(index), index)]
        raise _no_weights(model_dir, expected)
    choices = [_Choice([single], single)]
    if index.is_file():
        with suppress(ModelError):  # an index without its files is ignored beside a single file
            files = _indexed_files(index)
            if files != [single]:
                choices.append(_Choice(files, index))
    return choices


def _doubt(model_dir: Path, is_index: bool) -> str:
    if is_index:
        why = f"what the index names is read, since {SINGLE_FILE} does not fit config.json"
    else:
        why = f"{SINGLE_FILE} is read, as transformers reads it (vLLM reads what the index names)"
    return f"{model_dir} holds {SINGLE_FILE} and {INDEX_FILE}: {why}; remove the one that is stale"


def _no_weights(model_dir: Path, expected: dict[str, TensorSource]) -> ModelError:
    single = model_dir / SINGLE_FILE
    if (told := why_not_itself(single)) is not None:
        return ModelError(f"{single}: {told}")
    others = sorted(model_dir.glob("*.safetensors"))
    if (error := _quantized(model_dir, others, expected)) is not None:
        return error
    pickled = sorted(path for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    if pickled and not others:
        return ModelError(f"{pickled[0]}: pickled weights are never opened; convert the model to safetensors")
    if not others and (found := other_weights(model_dir)) is not None:
        return ModelError(f"{model_dir}: no weights that can be read, but {found}")
    beside = f", beside {others[0].name}" if others else ""
    return ModelError(f"{model_dir}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}{beside}")


def _matched(
    choice: _Choice, expected: dict[str, TensorSource], is_spare: Callable[[str], bool]
) -> dict[str, Path]:
    """The file of each tensor."""
    file_of: dict[str, Path] = {}
    for path in choice.files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                if name in file_of:
                    raise _Mismatch(f"{path}: tensor {name} is in {file_of[name].name} too")
                if name in expected:
                    check_header(path, file.get_slice(name), expected[name])
                elif not is_spare(name):
                    raise _Mismatch(f"{path}: unexpected tensor {name[:80]}; weights and config.json do not match")
                file_of[name] = path
    missing = [name for name in expected if name not in file_of]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "; set tie_word_embeddings if it shares the embedding" if missing == ["lm_head.weight"] else ""
        raise _Mismatch(f"{choice.listing}: tensor {missing[0]}{more} is missing{hint}")
    return file_of


def _quantized(model_dir: Path, files: list[Path], expected: dict[str, TensorSource]) -> ModelError | None:
    """The error for weights that do not match because they are quantized; None: there is no sign of that."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                sign = sign_of_tensor(name)
                if sign is None and name in expected:
                    sign = sign_of_type(name, file.get_slice(name).get_dtype())
                if sign is not None:
                    return ModelError(f"{path}: {sign}: {REFUSAL}")
    if (sign := sign_beside(model_dir)) is not None:
        return ModelError(f"{model_dir}: {sign}: {REFUSAL}")
    return None


def check_header(path: Path, stored: Any, source: TensorSource) -> None:
    """Raises ModelError where a stored tensor (a slice of safetensors') differs from ``source``."""
    if stored.get_dtype() not in STORED_DTYPES:
        raise _Mismatch(
            f"{path}: tensor {source.name} has type {stored.get_dtype()}; only {', '.join(sorted(STORED_DTYPES))} "
            "can be served, so use the unquantized model"
        )
    if tuple(stored.get_shape()) != source.stored_shape:
        raise _Mismatch(
            f"{path}: tensor {source.name} has shape {tuple(stored.get_shape())}, expected {source.stored_shape}; "
            "weights and config.json do not match"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; errors of the library and the system become ModelError."""
    with errors_of(path), safe_open(path, framework="pt") as file:
        yield file


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Errors of the library and the system become ModelError, which names the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = str(error).partition("\n")[0]
        told = why_not_itself(path) or f"truncated or not safetensors ({reason}); download the file again"
        raise ModelError(f"{path}: {told}") from None


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names; all must be beside it."""
    weight_map = JsonObject.read(index).values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing; download the file again")
    files = []
    for name in dict.fromkeys(weight_map.values()):
        if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {short_repr(name)} is not the name of a safetensors file in this folder")
        path = index.parent / name
        if not path.is_file():
            told = why_not_itself(path) or f"not found, but named in {INDEX_FILE}; download the file"
            raise ModelError(f"{path}: {told}")
        files.append(path)
    return files
