"""House rules 3 and 8: the same events at the same times give the same actions, in any process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import FakeCluster, Faults, describe

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.ports import Event

HERE = Path(__file__).parent


def recorded_run(seed: int, tenants: tuple[str, ...] = ("",)) -> FakeCluster:
    """Bursts, shared prefixes, cancels, orders and a few faults, with everything written down."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=30, seed=seed, eager=True, faults=Faults(apply=0.1, move=0.05, step=0.005, budget=4)
    )
    cluster.recording = []
    cluster.check_every_event = False
    rng = random.Random(seed)
    shared = [rng.randrange(1, 60) for _ in range(8)]
    for i in range(30):
        head = shared if rng.random() < 0.5 else []
        prompt = head + [rng.randrange(1, 60) for _ in range(rng.randint(1, 20))]
        cluster.submit(
            f"r{i}", prompt, rng.randint(1, 40), rng.uniform(0, 150), priority=rng.choice([0, 0, 1]),
            tenant=tenants[i % len(tenants)])
        if rng.random() < 0.2:
            cluster.cancel(f"r{i}", rng.uniform(0, 300))
    cluster.order_at("drop", 60)
    cluster.order_at("restore", 200)
    cluster.order_at("drop", 230)
    cluster.run()
    return cluster


def replay(recording: list[tuple[object, int, list[object]]], core: ClusterCore) -> None:
    """Feed what was recorded to another core and compare, step by step."""
    for number, (event, now_ns, expected) in enumerate(recording):
        match event:
            case "drop":
                actions = core.request_drop(now_ns)
            case "restore":
                actions = core.request_restore(now_ns)
            case _:
                actions = core.handle(_event(event), now_ns)
        assert [describe(a) for a in actions] == expected, f"event {number} at {now_ns}: {event}"


def _event(event: object) -> Event:
    assert isinstance(event, tuple)
    return event  # type: ignore[return-value]


@pytest.mark.parametrize("tenants", [("",), ("a", "b", "c")])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_replays(seed: int, tenants: tuple[str, ...]) -> None:
    cluster = recorded_run(seed, tenants)
    assert cluster.recording and cluster.core.state.counters.num_drops > 0
    core = FakeCluster(num_workers=3, full_blocks=30, eager=True).core
    replay(cluster.recording, core)
    assert core.state.counters == cluster.core.state.counters
    assert core.state.is_idle()


def test_a_replay_notices_a_difference() -> None:
    cluster = recorded_run(0)
    assert cluster.recording is not None
    other = FakeCluster(num_workers=3, full_blocks=31, eager=True).core
    with pytest.raises(AssertionError):
        replay(cluster.recording, other)


def test_a_recording_says_whose_requests_they_are() -> None:
    """Without that a replay would serve them in another order."""
    cluster = recorded_run(0, ("a", "b"))
    assert cluster.recording is not None
    anonymous = [
        (ports.Arrived(dataclasses.replace(event.request, tenant="")) if isinstance(event, ports.Arrived) else event,
         now_ns, actions)
        for event, now_ns, actions in cluster.recording
    ]
    with pytest.raises(AssertionError):
        replay(anonymous, FakeCluster(num_workers=3, full_blocks=30, eager=True).core)


def event_log_hash(seed: int) -> str:
    recording = recorded_run(seed).recording
    assert recording is not None
    text = "\n".join(f"{now} {event} {actions}" for event, now, actions in recording)
    # How a set prints is not how it counts.
    text = re.sub(r"frozenset\(\{(.*?)\}\)", lambda found: str(sorted(found[1].split(", "))), text)
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_event_log_does_not_depend_on_the_process() -> None:
    """String hashes differ between processes: nothing may hang on the order of a set."""
    code = "import test_replay; print(test_replay.event_log_hash(1))"
    hashes = set()
    for hash_seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        hashes.add(done.stdout)
    assert len(hashes) == 1
