"""Real devices give steps up at every safepoint: the tokens are those of an undisturbed run, and it replays."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.totals import counters
from jettison.device.model.create import create_model
from jettison.live.engine import inprocess
from jettison.live.engine.assembly import assemble
from jettison.live.engine.inprocess import MOST_LOOKS, LateFlag
from jettison.live.engine.local_cluster import LocalCluster, Until
from jettison.live.verify.scenarios import produced
from jettison.live.wire.stepflag import StepFlag
from jettison.types import SamplingParams, ServiceClass

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from fakes import describe

NUM_LAYERS = 4


class Insisting(StepFlag):
    """Has a step given up at each of its safepoints in turn, before it lets it run."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = cycle([*range(NUM_LAYERS), None])
        self.step_id: int | None = None
        self.num_looks, self.target = 0, None
        self.given_up_at: Counter[int] = Counter()

    def names(self, step_id: int) -> bool:
        if step_id != self.step_id:
            self.step_id, self.num_looks, self.target = step_id, 0, next(self.targets)
        self.num_looks += 1
        if self.num_looks - 1 != self.target:
            return False
        self.given_up_at[self.target] += 1
        return True


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    create_model(
        folder, arch="qwen3", layers=NUM_LAYERS, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3, std=0.2,
        max_position_embeddings=512,
    )
    return folder


SETTINGS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.3, seed=5, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=12, seed=6, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.4),
    SamplingParams(max_tokens=9, temperature=0.7, seed=7, ignore_eos=True, top_p=0.9, top_k=40, prompt_logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.0, min_tokens=4, logprobs=0),
]


def run(model_dir: Path, overload: str, instances: int, slices: str = "off", num_online: int = 0) -> LocalCluster:
    """Offline requests, greedy and sampled, in chunks, and online ones behind them; with a recording of all that the
    core was told."""
    settings: dict[str, object] = {
        "model": str(model_dir), "dtype": "float64", "instances": instances, "block_size": 4, "max_num_seqs": 8,
        "max_num_batched_tokens": 24, "overload": overload, "offline": "harvest",
        "safepoint_layers": 1, "offline_slices": slices,
    }
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(60)
    cluster = LocalCluster(EngineConfig.resolve(**settings, memory=memory), seed=1)
    with cluster:
        recording: list[tuple[ports.Event, int, list[object]]] = []
        handle = cluster.core.handle

        def recorded(event: ports.Event, now_ns: int) -> list[ports.Action]:
            actions = handle(event, now_ns)
            recording.append((event, now_ns, [describe(a) for a in actions]))
            return actions

        capacity = {w: s.full_blocks for w, s in cluster.core.state.workers.items()}
        cluster.core.handle = recorded  # type: ignore[method-assign]
        rng = random.Random(3)
        for i, params in enumerate(2 * SETTINGS):
            prompt = [rng.randrange(1, 200) for _ in range(rng.randint(1, 40))]
            is_online = i >= 2 * len(SETTINGS) - num_online
            if is_online:
                cluster.run(some_tokens(cluster))
            service_class = ServiceClass.ONLINE if is_online else ServiceClass.OFFLINE
            cluster.submit(f"r{i}", prompt, params, service_class=service_class)
        cluster.run()
        cluster.core.check()
        core = cluster.assembly.build_core(capacity, b"local-cluster")
        core.reconfigure(cluster.core.params)
        for event, now_ns, expected in recording:
            assert [describe(a) for a in core.handle(event, now_ns)] == expected
        assert counters(core) == counters(cluster.core)
    return cluster


def some_tokens(cluster: LocalCluster) -> Until:
    """Eight more, or all that there are."""
    more = produced(cluster, 8)
    return Until(more.what, lambda: cluster.num_open == 0 or more())


def results(cluster: LocalCluster) -> dict[str, tuple[object, ...]]:
    return {
        name: (done.tokens, done.prompt_logprobs, done.finish_reason, done.error)
        for name, done in cluster.completions.items()
    }


def test_a_word_is_seen_at_any_look_and_at_those_that_follow() -> None:
    flag, seen = LateFlag(), list[int]()
    for step_id in range(1, 200):
        flag.name(step_id)
        assert not flag.names(step_id - 1)
        looks = [flag.names(step_id) for _ in range(MOST_LOOKS)]
        assert looks == sorted(looks) and looks[-1]
        seen.append(looks.index(True))
    assert seen == [number % MOST_LOOKS for number in range(199)], "the first is the one that every step has"


@pytest.mark.parametrize(("overload", "instances", "looks"), [("recompute", 1, 4), ("pipeline", 2, 2)])
def test_steps_given_up_at_every_safepoint_change_no_token(
    overload: str, instances: int, looks: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(model_dir, overload, instances)
    assert counters(undisturbed.core)["steps_abandoned"] == 0
    flags: list[Insisting] = []

    def insisting() -> Insisting:
        flags.append(Insisting())
        return flags[-1]

    monkeypatch.setattr(inprocess, "LateFlag", insisting)
    disturbed = run(model_dir, overload, instances)
    assert results(disturbed) == results(undisturbed)
    assert set(flags[0].given_up_at) == set(range(looks)) and min(flags[0].given_up_at.values()) >= 10
    assert not any(flag.given_up_at for flag in flags[1:]), "only a first stage looks"
    totals = counters(disturbed.core)
    assert totals["steps_abandoned"] == sum(flags[0].given_up_at.values())
    assert totals["tokens_abandoned"] >= totals["steps_abandoned"]


@pytest.mark.parametrize(("overload", "instances"), [("recompute", 1), ("pipeline", 2)])
def test_steps_that_shed_rows_at_every_safepoint_change_no_token(
    overload: str, instances: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(model_dir, overload, instances, num_online=5)
    monkeypatch.setattr(inprocess, "LateFlag", Insisting)
    disturbed = run(model_dir, overload, instances, "on", num_online=5)
    assert results(disturbed) == results(undisturbed)
    totals = counters(disturbed.core)
    assert totals["steps_shed"] >= 10 and totals["slices_resumed"] >= 10
    assert any(record.kind == "step_shed" and record.fields["online"] for record in disturbed.records)
