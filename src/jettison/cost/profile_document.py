"""A profile as a plain document (values that JSON holds), and back, checked.

Pure: dictionaries in and out; ``profiles`` reads and writes the files. A document states the machine, model and version
that it was measured for; the loader compares that fingerprint with its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jettison.cost.hardware import BatchPoint, HardwareProfile, PrefillPoint
from jettison.cost.model import CostModel
from jettison.types import ModelShape

FORMAT = "jettison-profile-1"

PLAIN_WEIGHTS = "plain"
"""No matrix is kept as integers."""


class ProfileDocumentError(ValueError):
    """A document that is no profile; the message names the key."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The conditions that a profile is valid for: a change of any of them may change every time."""

    hardware: str
    """Processor and number of cores (or accelerator)."""
    model: str
    """Digest of the model's configuration: sizes decide times, weights do not."""
    version: str
    """Version of this package."""
    dtype: str
    num_threads: int
    kernels: str
    weights: str = PLAIN_WEIGHTS
    """How matrices lie in memory: as numbers of ``dtype``, or the forms of those that are kept as integers."""

    def digest(self) -> str:
        """Twelve hexadecimal digits, for file names."""
        names = [item.name for item in dataclasses.fields(self) if item.name != "weights"]
        kept = [] if self.weights == PLAIN_WEIGHTS else [self.weights]
        text = "\0".join([*(str(getattr(self, name)) for name in names), *kept])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def differences(self, other: Fingerprint) -> list[str]:
        """One text for each field that differs, this one's value first."""
        names = [item.name for item in dataclasses.fields(self)]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} {mine!r} and not {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the measured model, enough to tell it from another model without the files of either."""

    num_layers: int
    hidden_size: int
    dtype_bytes: int

    @classmethod
    def of(cls, shape: ModelShape) -> ModelSizes:
        """The sizes of a model's shape."""
        return cls(shape.num_layers, shape.hidden_size, shape.dtype_bytes)

    def __str__(self) -> str:
        return f"{self.num_layers} layers, hidden {self.hidden_size}, {self.dtype_bytes} bytes a number"


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile with the conditions that it is valid for."""

    fingerprint: Fingerprint
    profile: HardwareProfile
    sizes: ModelSizes | None = None
    """None: in documents of earlier versions."""


_OPTIONAL: dict[str, tuple[Any, Any]] = {
    "device_copy_bytes_per_s": (float, None), "hop_s": (float, None), "contention": (float, 1.0),
    "contention_instances": (int, 1), "beside_bytes_per_s": (float, None), "beside_byte_s": (float, None),
    "link_beside_byte_s": (float, None), "remap_page_s": (float, None), "prefill_points": (list, []),
}  # fmt: skip
"""Optional keys, left out of a document at their default: kind, and default."""

_OPTIONAL_COSTS: dict[str, tuple[Any, Any]] = {"launch_layer_s": (float, 0.0), "graph_tokens": (int, 0)}
"""The same of the cost model: profiles of a CPU, and of earlier versions, have none of these."""

_POINTS: dict[str, Any] = {"batch_points": BatchPoint, "prefill_points": PrefillPoint}
"""The class of the points in each list of measured points."""


def to_document(stored: StoredProfile) -> dict[str, Any]:
    """Plain dictionaries, lists, texts and numbers; ``from_document`` gives an equal value back."""
    sizes = {} if stored.sizes is None else {"sizes": dataclasses.asdict(stored.sizes)}
    return {
        "format": FORMAT, "fingerprint": dataclasses.asdict(stored.fingerprint),
        "profile": profile_to_plain(stored.profile), **sizes,
    }


def from_document(document: object) -> StoredProfile:
    """The profile in a document. Raises ProfileDocumentError that names the missing or unknown key, or the value of a
    wrong kind."""
    if isinstance(document, Mapping) and document.get("format") != FORMAT:
        raise ProfileDocumentError(f"format is {document.get('format')!r}, not {FORMAT!r}")
    kinds: dict[str, Any] = {"format": str, "fingerprint": dict, "profile": dict}
    if isinstance(document, Mapping) and "sizes" in document:
        kinds["sizes"] = dict
    top = checked(document, kinds, "the document")
    fingerprint = fingerprint_from_plain(top["fingerprint"])
    sizes = ModelSizes(**checked(top["sizes"], field_kinds(ModelSizes), "sizes")) if "sizes" in top else None
    return StoredProfile(fingerprint, profile_from_plain(top["profile"], "profile"), sizes)


def fingerprint_from_plain(plain: object) -> Fingerprint:
    """The inverse of ``asdict``; documents of earlier versions say nothing of weights. Raises ProfileDocumentError."""
    if isinstance(plain, Mapping):
        plain = {"weights": PLAIN_WEIGHTS, **plain}
    return Fingerprint(**checked(plain, field_kinds(Fingerprint), "fingerprint"))


def profile_to_plain(profile: HardwareProfile) -> dict[str, Any]:
    """A profile alone, as part of a document."""
    plain = dataclasses.asdict(profile) | {
        name: [point._asdict() for point in getattr(profile, name)] for name in _POINTS
    }
    plain["cost"] = {n: value for n, value in plain["cost"].items() if value != _OPTIONAL_COSTS.get(n, (None, None))[1]}
    return {name: value for name, value in plain.items() if name not in _OPTIONAL or value != _OPTIONAL[name][1]}


def profile_from_plain(plain: object, where: str) -> HardwareProfile:
    """The inverse of ``profile_to_plain``. Raises ProfileDocumentError; the keys in its message begin with
    ``where``."""
    given = plain.keys() if isinstance(plain, Mapping) else ()
    kinds = field_kinds(HardwareProfile) | {"cost": dict, "batch_points": list}
    kinds |= {name: kind for name, (kind, _) in _OPTIONAL.items()}
    kinds = {name: kind for name, kind in kinds.items() if name not in _OPTIONAL or name in given}
    values = checked(plain, kinds, where)
    of_cost = values["cost"].keys()
    cost_kinds = {n: kind for n, kind in field_kinds(CostModel).items() if n not in _OPTIONAL_COSTS or n in of_cost}
    cost = checked(values["cost"], cost_kinds, f"{where}.cost")
    points = {
        name: [checked(item, field_kinds(kind), f"{where}.{name}") for item in values[name]]
        for name, kind in _POINTS.items() if name in values
    }
    try:
        made = {name: tuple(_POINTS[name](**point) for point in items) for name, items in points.items()}
        return HardwareProfile(**(values | {"cost": CostModel(**cost)} | made))
    except ValueError as error:
        raise ProfileDocumentError(str(error)) from None


def field_kinds(owner: type) -> dict[str, Any]:
    """The type of each field of a dataclass or named tuple."""
    return typing.get_type_hints(owner)


def checked(value: object, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a mapping that must have exactly the keys of ``kinds``, each of its kind; a whole number is a float
    too. Raises ProfileDocumentError."""
    if not isinstance(value, Mapping):
        raise ProfileDocumentError(f"{where} is not a mapping")
    for verb, names in (("has no", kinds.keys() - value.keys()), ("has an unknown", value.keys() - kinds.keys())):
        if names:
            raise ProfileDocumentError(f"{where} {verb} key {sorted(map(str, names))[0]!r}")
    return {name: _of_kind(value[name], kind, f"{where}.{name}") for name, kind in kinds.items()}


def _of_kind(value: object, kind: Any, where: str) -> object:
    if isinstance(kind, types.GenericAlias):
        kind = typing.get_origin(kind)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number:
        assert isinstance(value, (int, float))
        if math.isfinite(value):
            return float(value)
    elif kind is not float and isinstance(value, kind) and not (kind is int and not number):
        return value
    raise ProfileDocumentError(f"{where} is {value!r}: not a {'number' if kind in (int, float) else kind.__name__}")
