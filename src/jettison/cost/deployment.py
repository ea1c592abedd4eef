"""A live cluster described as plain data: enough to simulate it, without its model folder and on another machine.

``GET /jettison/deployment`` answers such a document, and a result file has one (``config.deployment``). Pure: other
modules read and write the documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jettison.cost.hardware import HardwareProfile
from jettison.cost.profile_document import (
    Fingerprint,
    ProfileDocumentError,
    checked,
    field_kinds,
    fingerprint_from_plain,
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
    """The model's name, for people."""
    shape: ModelShape
    num_instances: int
    budget_bytes: int
    """Hard limit: parameters, KV and workspace."""
    workspace_bytes: int
    page_bytes: int
    max_model_len: int
    profile: HardwareProfile | None
    """None: it has not been profiled, and cannot be simulated."""
    core_knows_profile: bool = True
    """Whether the engine itself predicts with the profile; False: it fits a model while it serves."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of ``jettison serve`` in force that change its behaviour, by flat key."""
    fingerprint: Fingerprint | None = None
    """The fingerprint that a profile of this deployment must have; None in documents that state none."""

    def foreign_to(self, mark: Fingerprint) -> list[str]:
        """The differences of a profile with this fingerprint from one of this deployment, a text each; empty where none
        is known.

        Without a fingerprint of its own, a deployment compares the ``dtype`` and ``kernels`` of its settings only.
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
        if item.name not in ("shape", "profile", "settings", "fingerprint")
    }
    return {
        "format": FORMAT, **plain,
        "shape": dataclasses.asdict(deployment.shape),
        "profile": None if deployment.profile is None else profile_to_plain(deployment.profile),
        "settings": dict(deployment.settings),
        "fingerprint": None if deployment.fingerprint is None else dataclasses.asdict(deployment.fingerprint),
    }


def deployment_from_document(document: object, where: str) -> Deployment:
    """The deployment in a document. Raises ConfigError that begins with ``where`` and names what is wrong.

    ``fingerprint`` may be missing: earlier documents have none. The key ``costs`` of earlier documents (times of a
    host's cores) is ignored.
    """
    try:
        if isinstance(document, Mapping) and document.get("format") != FORMAT:
            raise ProfileDocumentError(f"format is {document.get('format')!r}, not {FORMAT!r}")
        kinds = field_kinds(Deployment) | {
            "format": str, "shape": dict, "profile": object, "settings": dict, "fingerprint": object,
        }
        if isinstance(document, Mapping):
            document = {"fingerprint": None} | {key: value for key, value in document.items() if key != "costs"}
        values = checked(document, kinds, "the description")
        del values["format"]
        shape = checked(values["shape"], field_kinds(ModelShape) | {"shard_bytes": dict}, "shape")
        for name, num_bytes in shape["shard_bytes"].items():
            if not isinstance(num_bytes, int) or num_bytes < 0:
                raise ProfileDocumentError(f"shape.shard_bytes.{name} is {num_bytes!r}: not a size")
        profile = None if values["profile"] is None else profile_from_plain(values["profile"], "profile")
        mark = values["fingerprint"]
        if mark is not None:
            mark = fingerprint_from_plain(mark)
        made = ModelShape(**shape)
        if made.shard_bytes.keys() != made.all_shards or made.num_layers < 1:
            raise ProfileDocumentError("shape.shard_bytes does not name every shard once")
        if min(values["num_instances"], values["page_bytes"], values["max_model_len"]) < 1:
            raise ProfileDocumentError("num_instances, page_bytes and max_model_len must be >= 1")
        return Deployment(**(values | {"shape": made, "profile": profile, "fingerprint": mark}))
    except ProfileDocumentError as error:
        raise ConfigError(f"{where}: {error}") from None

