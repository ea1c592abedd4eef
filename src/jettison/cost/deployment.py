"""A live cluster described as plain data: enough to simulate it, without its model folder and on another machine.

``GET /jettison/deployment`` answers such a document, and a result file has one (``config.deployment``). Pure: who
reads and writes it is elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts
from jettison.cost.profile_document import (
    Fingerprint,
    ProfileDocumentError,
    checked,
    field_kinds,
    profile_from_plain,
    profile_to_plain,
)
from jettison.errors import ConfigError
from jettison.types import ModelShape

FORMAT = "jettison-deployment-1"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Sizes are of one instance, in bytes."""

    name: str
    """Of the model, for people."""
    shape: ModelShape
    num_instances: int
    budget_bytes: int
    """Hard limit: parameters, KV and workspace."""
    workspace_bytes: int
    page_bytes: int
    max_model_len: int
    profile: HardwareProfile | None
    """None: nobody has profiled it, and it cannot be simulated."""
    core_knows_profile: bool = True
    """Whether the engine predicts with the profile, too; False: it fits while it serves."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat keys of ``jettison serve`` that decide what it does, as they are in force."""
    costs: HostCosts = field(default_factory=HostCosts)
    fingerprint: Fingerprint | None = None
    """What a profile must have been measured for to be one of this deployment; None where nobody said."""

    def foreign_to(self, mark: Fingerprint) -> list[str]:
        """How a profile of this fingerprint differs from one of this deployment, a text each; empty as far as is known.

        A deployment without a fingerprint has only what its settings say to be compared.
        """
        if self.fingerprint is not None:
            return mark.differences(self.fingerprint)
        dtype, kernels = (str(self.settings.get(name, "auto")) for name in ("dtype", "kernels"))
        return mark.differences(dataclasses.replace(
            mark, dtype=mark.dtype if dtype == "auto" else dtype,
            kernels=mark.kernels if kernels == "auto" else kernels,
        ))


def deployment_to_document(deployment: Deployment) -> dict[str, Any]:
    """Plain dictionaries, lists, texts and numbers; ``deployment_from_document`` gives an equal value back."""
    plain = {
        item.name: getattr(deployment, item.name)
        for item in dataclasses.fields(deployment)
        if item.name not in ("shape", "profile", "costs", "settings", "fingerprint")
    }
    return {
        "format": FORMAT, **plain,
        "shape": dataclasses.asdict(deployment.shape),
        "profile": None if deployment.profile is None else profile_to_plain(deployment.profile),
        "settings": dict(deployment.settings),
        "costs": costs_to_plain(deployment.costs),
        "fingerprint": None if deployment.fingerprint is None else dataclasses.asdict(deployment.fingerprint),
    }


def deployment_from_document(document: object, where: str) -> Deployment:
    """The deployment in a document. Raises ConfigError that begins with ``where`` and names what is wrong.

    ``fingerprint`` may be missing: earlier documents have none.
    """
    try:
        if isinstance(document, Mapping) and document.get("format") != FORMAT:
            raise ProfileDocumentError(f"format is {document.get('format')!r}, not {FORMAT!r}")
        kinds = field_kinds(Deployment) | {
            "format": str, "shape": dict, "profile": object, "settings": dict, "costs": dict, "fingerprint": object,
        }
        if isinstance(document, Mapping):
            document = {"fingerprint": None, **document}
        values = checked(document, kinds, "the description")
        del values["format"]
        shape = checked(values["shape"], field_kinds(ModelShape) | {"shard_bytes": dict}, "shape")
        for name, num_bytes in shape["shard_bytes"].items():
            if not isinstance(num_bytes, int) or num_bytes < 0:
                raise ProfileDocumentError(f"shape.shard_bytes.{name} is {num_bytes!r}: not a size")
        profile = None if values["profile"] is None else profile_from_plain(values["profile"], "profile")
        costs = costs_from_plain(values["costs"], "costs")
        mark = values["fingerprint"]
        if mark is not None:
            mark = Fingerprint(**checked(mark, field_kinds(Fingerprint), "fingerprint"))
        made = ModelShape(**shape)
        if made.shard_bytes.keys() != made.all_shards or made.num_layers < 1:
            raise ProfileDocumentError("shape.shard_bytes does not name every lending unit once")
        if min(values["num_instances"], values["page_bytes"], values["max_model_len"]) < 1:
            raise ProfileDocumentError("num_instances, page_bytes and max_model_len must be >= 1")
        return Deployment(**(values | {"shape": made, "profile": profile, "costs": costs, "fingerprint": mark}))
    except ProfileDocumentError as error:
        raise ConfigError(f"{where}: {error}") from None


_SHAPES = ("step_shape", "crowded_shape")


def costs_to_plain(costs: HostCosts) -> dict[str, Any]:
    """For a document."""
    lists = {name: [list(point) for point in getattr(costs, name)] for name in _SHAPES}
    return dataclasses.asdict(costs) | lists | {"core_speeds": list(costs.core_speeds)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


def costs_from_plain(plain: object, where: str) -> HostCosts:
    """Back again. Raises ProfileDocumentError naming the key."""
    if isinstance(plain, Mapping):  # earlier documents have less, and more
        kept = {key: value for key, value in plain.items() if key != "probe_s"}
        later = dict.fromkeys(("worker_stage_s", "controller_stage_s", "client_wake_s"), 0.0)
        plain = later | {"packs_wakes": False} | {name: [] for name in _SHAPES} | kept
    values = checked(plain, field_kinds(HostCosts) | dict.fromkeys(("core_speeds", *_SHAPES), list), where)
    speeds = values["core_speeds"]
    if not all(_is_number(speed) for speed in speeds):
        raise ProfileDocumentError(f"{where}.core_speeds needs numbers")
    for name in _SHAPES:
        if not all(map(_is_pair, values[name])):
            raise ProfileDocumentError(f"{where}.{name} needs pairs of numbers")
    try:
        return HostCosts(**(values | {
            "core_speeds": tuple(float(speed) for speed in speeds),
            **{name: tuple((int(tokens), float(factor)) for tokens, factor in values[name]) for name in _SHAPES},
        }))  # fmt: skip
    except ValueError as error:
        raise ProfileDocumentError(f"{where}: {error}") from None
