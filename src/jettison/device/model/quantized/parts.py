"""The stored tensors that a wanted one is made of, and how: widened, or as the integers that it is stored as.

Not here: a format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jettison.device.model.integers import IntegerForm, Integers
from jettison.device.model.shards import TensorSource

if TYPE_CHECKING:
    from torch import Tensor

    from jettison.device.model.stored import Lazy

PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Number types of safetensors for plain weights, and for scales."""


class Header(NamedTuple):
    """A stored tensor as its file's header describes it."""

    dtype: str
    """As safetensors name it."""
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A stored tensor that has to be there."""

    name: str
    shape: tuple[int, ...]
    dtypes: frozenset[str] = PLAIN


Headers = Mapping[str, Header]
"""All stored tensors of a folder, by name."""

Stored: TypeAlias = "Mapping[str, Lazy]"
"""The parts of one tensor by their names in the recipe."""


class DamagedPart(Exception):
    """A part's values cannot be right; ``part``: its name in the recipe."""

    def __init__(self, part: str, what: str, mend: str = "download the file again") -> None:
        super().__init__(f"{what}; {mend}")
        self.part = part


class AsIntegers(NamedTuple):
    """How a matrix is read without being widened."""

    form: IntegerForm
    read: Callable[[Stored, int, int], Integers]
    """Rows [start, end) of the wanted matrix. Raises ``DamagedPart``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one wanted tensor is made of stored ones."""

    parts: dict[str, Part]
    """By a name that ``widen`` knows."""
    widen: Callable[[Stored, int, int], Tensor]
    """Rows [start, end) of the wanted tensor, in any float dtype and in new memory no larger than a few times theirs.
    Raises ``DamagedPart``."""
    left_out: tuple[str, ...] = ()
    """Stored tensors beside it that mean nothing for weights, if they are there: scales of activations."""
    integers: AsIntegers | None = None
    """None: it has to be widened."""

    def is_begun(self, headers: Headers) -> bool:
        """Whether any of the parts is there."""
        return any(part.name in headers for part in self.parts.values())

    def fits(self, headers: Headers) -> bool:
        """Whether all parts are there in their shapes and types."""
        return all(
            part.name in headers
            and headers[part.name].shape == part.shape
            and headers[part.name].dtype in part.dtypes
            for part in self.parts.values()
        )


def plain(source: TensorSource) -> Recipe:
    """A tensor that is stored as it is wanted, or a slice of one."""
    at, is_transposed = (None, False) if source.slice is None else (source.slice.at, source.slice.is_transposed)

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        tensor = stored["plain"] if at is None else stored["plain"][at]
        return tensor[:, start:end].T if is_transposed else tensor[start:end]

    return Recipe({"plain": Part(source.name, source.stored_shape)}, widen)


def slice_of(recipe: Recipe, at: int, num_stacked: int) -> Recipe:
    """One of several tensors of this recipe whose parts are stacked, in their own order of rows and columns."""
    parts = {name: Part(part.name, (num_stacked, *part.shape), part.dtypes) for name, part in recipe.parts.items()}

    def one_of(stored: Stored) -> Stored:
        return {name: tensor[at] for name, tensor in stored.items()}

    integers = recipe.integers
    if integers is not None:
        read = integers.read
        integers = integers._replace(read=lambda stored, start, end: read(one_of(stored), start, end))
    return Recipe(
        parts, lambda stored, start, end: recipe.widen(one_of(stored), start, end), recipe.left_out, integers
    )


def part_of(headers: Headers, name: str, *shapes: tuple[int, ...], dtypes: frozenset[str] = PLAIN) -> Part:
    """A part that may have any of ``shapes``: it gets the one that is stored, or else the first."""
    stored = headers[name].shape if name in headers else None
    return Part(name, stored if stored in shapes else shapes[0], dtypes)
