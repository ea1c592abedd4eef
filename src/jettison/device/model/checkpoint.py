"""Finds the decoder's tensors in the safetensors of a model folder: reads headers, not weights.

A folder with other tensors than its configuration implies is refused with one line that names the file and the cause:
weights that are quantized in another way than ``config.json`` says, lie in another place, or are of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.device.model.quantized.parts import PLAIN, Header, Part, Recipe
from jettison.device.model.quantized.recipes import recipes_of
from jettison.device.model.quantized.schemes import Scheme
from jettison.device.model.quantized.signs import REFUSAL, other_weights, sign_beside, sign_of_tensor, sign_of_type
from jettison.device.model.shards import TensorSource
from jettison.device.model.standins import why_not_itself
from jettison.device.model.tensorfile import TensorFile
from jettison.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""A text model's own names; the head's is the same in all models."""

IsSpare = Callable[[str, tuple[int, ...]], bool]
"""Whether a tensor of this name and shape may be there, to be ignored."""


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """The files of a model's tensors."""

    files: tuple[Path, ...]
    file_of: dict[str, Path]
    """File of each stored tensor."""
    recipes: dict[str, Recipe]
    """Of which stored tensors each wanted one is made, by its key."""
    doubt: str | None
    """For a folder with two copies of the weights, a line on the one that is read, and why; else None."""

    def files_of(self, source: TensorSource) -> list[Path]:
        """The files of a wanted tensor, without repetition."""
        return list(dict.fromkeys(self.file_of[part.name] for part in self.recipes[source.key].parts.values()))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a folder has to hold."""

    sources: dict[str, TensorSource]
    """By key."""
    is_spare: IsSpare
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class _Choice:
    """A set of files that may be the weights."""

    files: list[Path]
    listing: Path
    """File to name when a tensor is missing."""


class TextPart(NamedTuple):
    """How a checkpoint names the tensors of its text model, which may be a part of a model with images."""

    before: str = ""
    """Of a text model's own names."""
    after: str = ""
    """What stands in its place."""

    @classmethod
    def among(cls, names: Collection[str]) -> TextPart:
        """As the names of all tensors show."""
        for part in (cls("", "language_model."), cls("model.", "model.language_model.")):
            if part.stored_name(EMBEDDING) in names:
                return part
        return cls()

    def stored_name(self, name: str) -> str:
        """Of a text model's own name."""
        return self.after + name.removeprefix(self.before) if name.startswith(self.before) else name

    def own_name(self, stored: str) -> str:
        """The inverse."""
        return self.before + stored.removeprefix(self.after) if stored.startswith(self.after) else stored

    def is_of_others(self, stored: str) -> bool:
        """Whether a tensor is one of images, or of what joins them to text."""
        return bool(self.after) and not stored.startswith(self.after) and stored != HEAD


class _Mismatch(ModelError):
    """The files are valid, but hold other tensors than the model has."""


def find_weights(
    model_dir: Path, sources: Sequence[TensorSource], is_spare: IsSpare, scheme: Scheme | None = None
) -> FoundWeights:
    """Find every tensor, and check that the folder holds exactly what ``sources`` are made of, in the right shapes.

    ``scheme``: how weights are quantized (None: not at all). Raises ModelError.
    """
    wanted = _Wanted({source.key: source for source in sources}, is_spare, scheme)
    choices = _choices(model_dir, wanted)
    errors: list[ModelError] = []
    for choice in choices:
        try:
            file_of, recipes = _matched(choice, wanted)
        except ModelError as error:
            errors.append(error)
            continue
        doubt = _doubt(model_dir, bool(errors)) if len(choices) > 1 else None
        return FoundWeights(tuple(choice.files), file_of, recipes, doubt)
    if isinstance(errors[0], _Mismatch):
        raise _quantized(model_dir, choices[0].files, wanted) or errors[0]
    raise errors[0]


def _choices(model_dir: Path, wanted: _Wanted) -> list[_Choice]:
    """The copies of the weights in the folder, the preferred one first."""
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if not single.is_file():
        if index.is_file():
            return [_Choice(_indexed_files(index), index)]
        raise _no_weights(model_dir, wanted)
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


def _no_weights(model_dir: Path, wanted: _Wanted) -> ModelError:
    single = model_dir / SINGLE_FILE
    if (told := why_not_itself(single)) is not None:
        return ModelError(f"{single}: {told}")
    others = sorted(model_dir.glob("*.safetensors"))
    if (error := _quantized(model_dir, others, wanted)) is not None:
        return error
    pickled = sorted(path for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    if pickled and not others:
        return ModelError(f"{pickled[0]}: pickled weights are never opened; convert the model to safetensors")
    if not others and (found := other_weights(model_dir)) is not None:
        return ModelError(f"{model_dir}: no weights that can be read, but {found}")
    beside = f", beside {others[0].name}" if others else ""
    return ModelError(f"{model_dir}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}{beside}")


def _matched(choice: _Choice, wanted: _Wanted) -> tuple[dict[str, Path], dict[str, Recipe]]:
    """The file of each stored tensor, and the recipe of each wanted one."""
    file_of, headers = _headers(choice)
    part = TextPart.among(headers)
    stored = [source._replace(name=part.stored_name(source.name)) for source in wanted.sources.values()]
    if EMBEDDING not in headers and HEAD in headers and wanted.is_spare(HEAD, headers[HEAD].shape):
        stored = [source._replace(name=HEAD) if source.name == EMBEDDING else source for source in stored]
    recipes = recipes_of(wanted.scheme, stored, headers)
    recipes = {key: recipes[source.key] for key, source in zip(wanted.sources, stored, strict=True)}
    parts = {part.name: part for recipe in recipes.values() for part in recipe.parts.values()}
    left_out = {name for recipe in recipes.values() for name in recipe.left_out}
    for name, path in file_of.items():
        if name in parts:
            check_header(path, headers[name], parts[name])
        elif not (
            name in left_out or part.is_of_others(name) or wanted.is_spare(part.own_name(name), headers[name].shape)
        ):
            raise _Mismatch(f"{path}: unexpected tensor {name[:80]}; weights and config.json do not match")
    missing = [name for name in parts if name not in file_of]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "; set tie_word_embeddings if it shares the embedding" if missing == [HEAD] else ""
        raise _Mismatch(f"{choice.listing}: tensor {missing[0]}{more} is missing{hint}")
    return file_of, recipes


def _headers(choice: _Choice) -> tuple[dict[str, Path], dict[str, Header]]:
    """File and header of each stored tensor."""
    file_of: dict[str, Path] = {}
    headers: dict[str, Header] = {}
    for path in choice.files:
        for name, header in _headers_in(path).items():
            if name in file_of:
                raise _Mismatch(f"{path}: tensor {name} is in {file_of[name].name} too")
            file_of[name], headers[name] = path, header
    return file_of, headers


def _quantized(model_dir: Path, files: list[Path], wanted: _Wanted) -> ModelError | None:
    """The error for weights that do not match because they are quantized, though ``config.json`` says nothing of it;
    None: there is no sign of that."""
    if wanted.scheme is not None:
        return None
    names = {source.name for source in wanted.sources.values()}
    for path in files:
        for name, header in _headers_in(path).items():
            sign = sign_of_tensor(name)
            if sign is None and name in names:
                sign = sign_of_type(name, header.dtype)
            if sign is not None:
                return ModelError(f"{path}: {sign}: {REFUSAL}")
    if (sign := sign_beside(model_dir)) is not None:
        return ModelError(f"{model_dir}: {sign}: {REFUSAL}")
    return None


def _headers_in(path: Path) -> dict[str, Header]:
    """Of all tensors in a file, by name. Raises ModelError."""
    with TensorFile(path) as file:
        return {name: Header(entry.dtype, entry.shape) for name, entry in sorted(file.entries().items())}


def check_header(path: Path, header: Header, part: Part) -> None:
    """Raises ModelError where a stored tensor differs from what it has to be."""
    if header.dtype not in part.dtypes:
        only = ", ".join(sorted(part.dtypes))
        what = f"{path}: tensor {part.name} has type {header.dtype}"
        if part.dtypes == PLAIN:
            raise _Mismatch(f"{what}; only {only} can be served, so use the unquantized model")
        raise _Mismatch(f"{what}, expected {only}; weights and config.json do not match")
    if header.shape != part.shape:
        raise _Mismatch(
            f"{path}: tensor {part.name} has shape {header.shape}, expected {part.shape}; "
            "weights and config.json do not match"
        )


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
