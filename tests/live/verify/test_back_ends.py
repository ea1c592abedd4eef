"""Instances on a back end whose memory is not the host's serve the same tokens through every move of memory.

Real workers' loops, links and transfers in one process (``jettison verify``'s way) over the double of
``tests/device/doubledevice.py``: what goes around the device port, anywhere, is noted there and fails the event. And
over a pretended card (``tests/device/cardbackend.py``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cardbackend import PretendedBackEnd
from doubledevice import BYPASSES, UNDER_WAY, DoubleBackEnd
from underway import MEDDLED

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.reference import TransformersReference, transformers_available
from jettison.device.worker import DeviceWorker
from jettison.live.engine import local_cluster
from jettison.live.verify.run import SCENARIOS, compare
from jettison.live.verify.scenarios import Setting
from jettison.live.worker.device_port import device_spec

pytestmark = pytest.mark.skipif(not transformers_available(), reason="the reference needs transformers")

EVENTS = [
    "chunked prefill", "preempt and recompute", "swap out + in", "migrate while decoding", "static pipeline",
    "drop + exchange (transfer)", "drop + exchange (live)", "restore + split", "drop again during restore",
    "migrate as tokens, instance to instance", "harvest: abandoned steps", "harvest: freed from checkpoints",
    "harvest: prefetched beside steps", "sleep with running requests, wake", "packed while running",
    "steps planned ahead",
]  # fmt: skip


BESIDE_STEPS = {"migrate while decoding": 1, "packed while running": 2}
"""In these KV goes over links while steps run, whatever the machine's pace: with the prompts of this seed."""


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> TransformersReference:
    return TransformersReference(model_dir, "float64")


@pytest.fixture(autouse=True)
def on_the_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        local_cluster, "make_device_worker", lambda spec: DeviceWorker(device_spec(spec), DoubleBackEnd())
    )


def check(event: str, model_dir: Path, reference: TransformersReference, *, is_double: bool = True) -> None:
    BYPASSES.clear()
    MEDDLED.clear()
    num_before = UNDER_WAY.num_checked
    try:
        outcome = SCENARIOS[event](Setting(model_dir, "float64", 24, seed=BESIDE_STEPS.get(event, 1)))
    finally:
        assert not BYPASSES, "something went around the port"
        assert not MEDDLED, "something was written that a step under way reads, or read that it writes"
    if event in BESIDE_STEPS and is_double:
        assert UNDER_WAY.num_checked > num_before, "no piece was written or read beside a step"
    row = compare("qwen3", event, outcome, reference)
    assert outcome.happened, outcome.evidence
    assert row.mismatches == 0 and row.tokens_compared > 100


@pytest.mark.parametrize("event", EVENTS)
def test_tokens_do_not_depend_on_memory_events(event: str, model_dir: Path, reference: TransformersReference) -> None:
    check(event, model_dir, reference)


CARD_EVENTS = [event for event in EVENTS if event != "drop again during restore"]
"""A pretended card restores so slowly on a busy machine that the requests may end before the second drop."""


@pytest.mark.parametrize("event", CARD_EVENTS)
def test_tokens_are_right_on_a_pretended_card(
    event: str, model_dir: Path, reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's runner, pages that are mapped ahead and poisoned where they are not owned, bytes and host pool."""
    made: list[PretendedBackEnd] = []

    def make(spec):
        made.append(PretendedBackEnd())
        return DeviceWorker(replace(device_spec(spec), kernels="auto"), made[-1])

    monkeypatch.setattr(local_cluster, "make_device_worker", make)
    check(event, model_dir, reference, is_double=False)
    if event in BESIDE_STEPS:
        assert any(back_end.card.steps.num_checked for back_end in made), "no piece was moved beside a step"
    assert made and not any(back_end.fake.size for back_end in made), "the card has its memory back"
    for back_end in made:
        back_end.fake.close()


def _write_around(self: DeviceWorker, shard: str, offset: int, data) -> None:
    as_numpy_uint8(self._open_memory.shard_bytes(shard))[offset : offset + len(data)] = data



def _hand_on_around(self: DeviceWorker, hidden):
    return hidden.numpy().reshape(-1).view("uint8")


@pytest.mark.parametrize(
    ("event", "method", "bypass"),
    [
        ("restore + split", "write_shard", _write_around),
        ("static pipeline", "hidden_to_bytes", _hand_on_around),
    ],
)
def test_a_way_around_the_port_fails_the_event(
    event: str, method: str, bypass: object, model_dir: Path, reference: TransformersReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a worker survives it: a shard that did not come is read from the folder, and tokens are right."""
    monkeypatch.setattr(DeviceWorker, method, bypass)
    with pytest.raises(AssertionError, match="something went around the port"):
        check(event, model_dir, reference)
