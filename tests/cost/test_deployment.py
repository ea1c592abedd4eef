"""Deployments as documents."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jettison.cost.deployment import Deployment, deployment_from_document, deployment_to_document
from jettison.cost.hardware import BatchPoint, HardwareProfile
from jettison.cost.model import CostModel
from jettison.cost.profile_document import Fingerprint
from jettison.errors import ConfigError
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard

SHAPE = ModelShape(2, 64, 4, 2, 16, 128, 256, 4, False, {
    layer_shard(0): 10, layer_shard(1): 10, EMBED_SHARD: 5, HEAD_SHARD: 5,
})  # fmt: skip
COST = CostModel(2, 1e-9, 1e-9, 1e-6, 1e-5, 1e-4, 0.0, 0.0, 1e-5, 1e-6)
PROFILE = HardwareProfile(COST, 1e9, 1e-5, 1e-3, 0.0, 1e9, 1e9, (BatchPoint(1, 2, 3, 4.0),))
MARK = Fingerprint("a machine", "digest", "0.1.0", "float32", 1, "native")
DEPLOYMENT = Deployment(
    "tiny", SHAPE, 2, 1000, 10, 4, 512, PROFILE, True, {"block_size": 8},
    MARK,
)


def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(deployment_to_document(DEPLOYMENT)))
    return made


def test_there_and_back_by_way_of_json() -> None:
    assert deployment_from_document(document(), "here") == DEPLOYMENT
    bare = replace(DEPLOYMENT, profile=None, core_knows_profile=False, fingerprint=None)
    assert deployment_from_document(json.loads(json.dumps(deployment_to_document(bare))), "here") == bare


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["format"], "x", "format is 'x'"),
        (["name"], 3, "name is 3"),
        (["num_instances"], 0, "num_instances, page_bytes and max_model_len must be >= 1"),
        (["budget_bytes"], "much", "budget_bytes is 'much'"),
        (["profile", "cost", "layer_s"], -1.0, "coefficients must be finite"),
        (["profile", "links"], 1, "profile has an unknown key 'links'"),
        (["shape", "shard_bytes", "layer:1"], -4, "shape.shard_bytes.layer:1 is -4: not a size"),
        (["shape", "shard_bytes", "layer:7"], 4, "shape.shard_bytes does not name every shard once"),
        (["fingerprint", "num_threads"], "two", "fingerprint.num_threads is 'two'"),
    ],
)
def test_what_is_wrong_is_named(place: list[str], value: object, message: str) -> None:
    broken = document()
    node = broken
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = value
    with pytest.raises(ConfigError) as raised:
        deployment_from_document(broken, "here")
    assert str(raised.value).startswith("here: ") and message in str(raised.value)


def test_earlier_documents_have_no_fingerprint() -> None:
    earlier = document()
    del earlier["fingerprint"]
    assert deployment_from_document(earlier, "here") == replace(DEPLOYMENT, fingerprint=None)


def test_what_earlier_documents_say_of_a_hosts_cores_is_left_aside() -> None:
    assert "costs" not in document()
    assert deployment_from_document(document() | {"costs": {"num_cores": 2}}, "here") == DEPLOYMENT


def test_which_profiles_are_foreign_as_far_as_is_known() -> None:
    other = replace(MARK, hardware="another", dtype="float64")
    assert DEPLOYMENT.foreign_to(MARK) == []
    assert DEPLOYMENT.foreign_to(other) == [
        "hardware 'another' and not 'a machine'", "dtype 'float64' and not 'float32'",
    ]
    untold = replace(DEPLOYMENT, fingerprint=None)
    assert untold.foreign_to(other) == []
    said = replace(untold, settings={"dtype": "float32", "kernels": "auto"})
    assert said.foreign_to(other) == ["dtype 'float64' and not 'float32'"]


@pytest.mark.parametrize("broken", [None, [], 3, {}])
def test_what_is_no_description(broken: object) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        deployment_from_document(broken, "here")
