"""House rule 3: events recorded from a live cluster, fed through a fresh core, give the same actions.

The cluster is the in-process one: real devices and memory moves. The fresh core is what the simulator drives, too.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.device.model.create import create_model
from jettison.live.assembly import assemble
from jettison.live.local_cluster import LocalCluster
from jettison.types import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from fakes import describe

SECRET = b"local-cluster"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    create_model(
        folder, arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3, std=0.2,
        max_position_embeddings=512,
    )
    return folder


class Recorded(LocalCluster):
    """Writes every call of the core down, with what came of it."""

    def start(self) -> None:
        super().start()
        self.recording: list[tuple[object, int, list[object]]] = []
        self.capacity = {w: s.full_blocks for w, s in self.core.state.workers.items()}
        for name in ("handle", "request_drop", "request_restore"):
            self._record(name)

    def _record(self, name: str) -> None:
        call = getattr(self.core, name)

        def recorded(*args: object) -> list[ports.Action]:
            actions: list[ports.Action] = call(*args)
            event, now_ns = args if name == "handle" else (name, args[0])
            self.recording.append((event, int(now_ns), [describe(a) for a in actions]))  # type: ignore[call-overload]
            return actions

        setattr(self.core, name, recorded)


def config_for(model_dir: Path, policy: str) -> EngineConfig:
    settings = {
        "model": str(model_dir), "dtype": "float64", "instances": 2, "block_size": 4, "max_num_batched_tokens": 32,
        "max_num_seqs": 16, "overload": policy,
    }
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(40)
    return EngineConfig.resolve(**settings, memory=memory)


@pytest.mark.parametrize("policy", ["drop", "recompute", "migrate"])
def test_a_live_recording_replays_through_a_fresh_core(policy: str, model_dir: Path) -> None:
    config = config_for(model_dir, policy)
    rng = random.Random(5)
    with Recorded(config, seed=2) as live:
        for i in range(14):
            prompt = [rng.randrange(1, 200) for _ in range(rng.randint(1, 40))]
            live.submit(f"r{i}", prompt, SamplingParams(max_tokens=rng.randint(1, 30), temperature=0.0, seed=i))
        if policy == "drop":
            live.run(until=lambda: sum(len(c.tokens) for c in live.completions.values()) > 30)
            live.request_drop()
            live.run(until=lambda: any(r.kind == "exchange_done" for r in live.records))
            live.request_restore()
        live.cancel("r3")
        live.run()
        recording, capacity, params = live.recording, live.capacity, live.core.params
        live_counters = live.core.state.counters
        core = live.assembly.build_core(capacity, SECRET)
        core.params = params
    assert (live_counters.num_drops > 0) == (policy == "drop")
    replay(recording, core)
    assert core.state.counters == live_counters
    assert core.state.is_idle()


def replay(recording: list[tuple[object, int, list[object]]], core: ClusterCore) -> None:
    """Feed what was recorded and compare, step by step."""
    for number, (event, now_ns, expected) in enumerate(recording):
        if isinstance(event, str):
            actions = getattr(core, event)(now_ns)
        else:
            actions = core.handle(event, now_ns)  # type: ignore[arg-type]
        assert [describe(a) for a in actions] == expected, f"event {number} at {now_ns}: {event}"
