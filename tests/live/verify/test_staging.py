"""Events of ``jettison verify`` happen by construction: on models of any shape, or for a reason of a closed list not.

What a step, a copy or a pull takes differs with layers, heads, vocabulary and context; here they differ widely.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jettison.device.model.create import create_model
from jettison.device.model.samples import make_sample
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify import run as verify
from jettison.live.verify.applicable import Has, Lack, Needs, why_not
from jettison.live.verify.scenarios import BLOCK_SIZE, Setting, make_cluster, make_prompts, produced, submit
from jettison.live.verify.solo_reference import SoloReference
from longrun import LONG

STAGED = (
    "migrate while decoding", "drop + exchange (live)", "restore + split", "drop again during restore",
    "cancel in mid-exchange (transfer)", "migrate as tokens, instance to pipeline",
    "drop over stored requests", "drop + restore over stored requests", "drop + restore over migrating requests",
    "harvest: freed from checkpoints", "harvest: prefetched beside steps", "harvest: slow link, computed again",
    "harvest: pause in a drop", "sleep with running requests, wake", "packed while running",
    "harvest: abandoned steps, in a pipeline", "harvest: freed from checkpoints, in a pipeline",
    "harvest: pause in a drop, in a pipeline", "all sleep, a request wakes one",
)  # fmt: skip
"""In which something has to meet."""

SHAPES: dict[str, dict[str, object]] = {
    "one-layer": {"layers": 1},
    "two-layers-one-head": {"arch": "qwen3", "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 64},
    "three-layers": {"layers": 3, "hidden": 96, "heads": 3, "kv_heads": 3, "max_position_embeddings": 256},
    "five-layers": {"arch": "qwen2", "layers": 5, "hidden": 64, "kv_heads": 1},
    "seven-layers-wide-heads": {
        "arch": "mistral", "layers": 7, "hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 80,
        "max_position_embeddings": 256,
    },
    "thirty-layers": {
        "layers": 30, "hidden": 36, "heads": 9, "kv_heads": 3, "head_dim": 32, "vocab": 2000, "tied": True,
        "max_position_embeddings": 8192,
    },
    "fifty-layers": {"arch": "qwen3", "layers": 50, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 96},
    "large-vocabulary": {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "vocab": 50_000, "tied": True},
    "large-untied": {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 20_000},
    "little-kv": {"layers": 4, "hidden": 128, "heads": 16, "kv_heads": 1, "head_dim": 8},
    "much-kv": {"arch": "qwen3", "layers": 4, "hidden": 16, "heads": 8, "kv_heads": 8, "head_dim": 128},
    "short-context": {"layers": 4, "max_position_embeddings": 128},
    "long-context": {"layers": 4, "max_position_embeddings": 131_072, "rope_scaling": "llama3"},
}  # fmt: skip
TURNS = 1 if LONG else 12
"""Each event is staged on every twelfth shape, others than the next event: all on all take minutes."""

BASE: dict[str, object] = {
    "arch": "llama", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "std": 0.2, "seed": 7,
    "max_position_embeddings": 512,
}  # fmt: skip


def make_model(folder: Path, **changes: object) -> Path:
    create_model(folder, **BASE | changes)  # type: ignore[arg-type]
    return folder


def has_of(setting: Setting, memory: tuple[int, str] | None = None) -> Has:
    return Has(verify.check_served(setting), BLOCK_SIZE, memory)


@pytest.mark.parametrize("shape", SHAPES)
def test_events_happen_on_any_shape_or_cannot_for_want_of_layers(shape: str, tmp_path: Path) -> None:
    turn = list(SHAPES).index(shape)
    setting = Setting(make_model(tmp_path / "m", **SHAPES[shape]), "float32", verify.NUM_OUTPUT_TOKENS, seed=0)
    has, events = has_of(setting), verify.SCENARIOS | verify.FULL_ONLY
    for name in STAGED[turn % TURNS :: TURNS]:
        lack = why_not(events[name].needs, has)
        if lack is not None:
            assert lack[0] is Lack.LAYERS and has.assembly.shape.num_layers < events[name].needs.num_stages, name
            continue
        outcome = events[name](setting)
        assert outcome.happened, f"{name}: {outcome.evidence}"
        assert not [r.problem for r in outcome.requests if r.problem], name


@pytest.mark.parametrize("architecture", verify.ARCHITECTURES, ids=lambda a: a.name)
def test_our_own_shapes_can_have_every_event(architecture: verify.Architecture, tmp_path: Path) -> None:
    folder = make_sample(architecture, tmp_path / "m", seed=0)
    has = has_of(Setting(folder, "float64", 96, 0), (2 << 30, "the least that a machine has"))
    events = verify.SCENARIOS | verify.FULL_ONLY
    assert {name: why_not(event.needs, has) for name, event in events.items()} == dict.fromkeys(events)


def test_the_list_of_reasons_is_closed(tmp_path: Path) -> None:
    """Each of them by a model or a machine that lacks the thing, and at its bound one that does not."""
    has = has_of(Setting(make_model(tmp_path / "m", layers=3), "float32", 96, 0))
    assert why_not(Needs(num_stages=3), has) is None
    lack = why_not(Needs(num_stages=4), has)
    assert lack == (Lack.LAYERS, "a pipeline of 4 stages needs as many layers; this model has 3 layers")
    needs = Needs(num_instances=3, num_tokens=400)
    enough = 3 * has.assembly.memory_for_blocks(100) + has.assembly.shape.parameter_bytes
    assert why_not(needs, has._replace(memory=(enough, "this machine"))) is None
    lack = why_not(needs, has._replace(memory=(enough - 1, "this machine")))
    assert lack is not None and lack[0] is Lack.MEMORY
    assert lack[1].startswith("3 instances and the reference need") and "this machine is" in lack[1]
    limits = replace(has.assembly.limits, sheds_rows=False)
    lack = why_not(Needs(sheds_rows=True), has._replace(assembly=replace(has.assembly, limits=limits)))
    assert lack is not None and lack[0] is Lack.ROWS and "cannot go on later" in lack[1]
    assert why_not(Needs(has_tokenizer=True), has) is None
    (tmp_path / "m" / "tokenizer.json").unlink()
    lack = why_not(Needs(has_tokenizer=True), has)
    assert lack is not None and lack[0] is Lack.TOKENIZER and "this folder has none" in lack[1]
    assert set(Lack) == {Lack.LAYERS, Lack.ROWS, Lack.TOKENIZER, Lack.MEMORY}


def test_answers_that_would_end_early_do_not(tmp_path: Path) -> None:
    """A model that ends every answer with its first token: events ask for whole ones."""
    folder = make_model(tmp_path / "m", vocab=261)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": list(range(261))}))
    setting = Setting(folder, "float32", 96, seed=0)
    outcome = verify.SCENARIOS["migrate as tokens, instance to pipeline"](setting)
    assert outcome.happened, outcome.evidence
    assert all(len(request.output) == 96 for request in outcome.requests)
    reference = SoloReference(folder, "float32")
    assert verify.compare("llama", "as tokens", outcome, reference).mismatches == 0


def drop_under(folder: Path, pace: Pace) -> tuple[int, LocalCluster]:
    """Tokens that requests get while layers are dropped under them."""
    setting = Setting(folder, "float32", 96, seed=0)
    with make_cluster(setting, num_blocks=300, exchange="live") as cluster:
        submit(cluster, make_prompts(setting, cluster, 10, 20), 40)
        cluster.run(produced(cluster, 40))
        before = num_tokens(cluster)
        cluster.request_drop()
        cluster.run(Until("the drop", lambda: not cluster.core.in_transition), pace)
        return num_tokens(cluster) - before, cluster


def num_tokens(cluster: LocalCluster) -> int:
    return sum(len(done.tokens) for done in cluster.completions.values())


def test_moves_or_requests_get_ahead_as_the_pace_says(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", layers=6)
    last, _ = drop_under(folder, Pace.STEPS_LAST)
    by_lot, _ = drop_under(folder, Pace.BY_LOT)
    first, _ = drop_under(folder, Pace.STEPS_FIRST)
    assert last < by_lot < first


def test_runs_repeat_to_the_unit_of_work(tmp_path: Path) -> None:
    """No reading of a real clock is among what is decided by."""
    folder = make_model(tmp_path / "m")
    records = [drop_under(folder, Pace.BY_LOT)[1].records for _ in range(2)]
    told = [[(r.kind, r.time_ns, r.fields) for r in run if "remap_ms" not in r.fields] for run in records]
    assert told[0] == told[1]
    assert told[0]
