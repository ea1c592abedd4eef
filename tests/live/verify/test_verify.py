"""What the proof table counts: differences, answers that are not whole, and models of unusual sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jettison.config import EngineConfig
from jettison.device.kernels import library
from jettison.device.model.create import create_model
from jettison.device.reference import Verdict, transformers_available
from jettison.errors import ConfigError, StalledError, WorkerLostError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import LocalCluster, Until
from jettison.live.verify import run as verify
from jettison.live.verify import scenarios
from jettison.live.verify.scenarios import (
    SCENARIOS,
    Event,
    Observed,
    Outcome,
    Setting,
    make_cluster,
    make_prompts,
    observed,
    submit,
)
from jettison.live.verify.scenarios_many import MANY
from jettison.live.verify.solo_reference import SoloReference
from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import FinishReason, Grammar, SamplingParams


class AgreesWithAll:
    """A reference that finds everything right."""

    def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
        del prompt
        return Verdict(len(output), False, False)


def make_model(folder: Path, **changes: object) -> Path:
    create_model(
        folder, **{"arch": "llama", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "seed": 5, "std": 0.2}
        | {"max_position_embeddings": 512} | changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("verify") / "model")


def test_a_request_that_ended_early_is_not_whole(model_dir: Path) -> None:
    setting = Setting(model_dir, "float64", 20, seed=1)
    with make_cluster(setting, num_blocks=200) as cluster:
        prompts = make_prompts(setting, cluster, 10, 20, 4)
        submit(cluster, prompts, 20)
        cluster.cancel("request-1")
        cluster.run()
        # As if the engine had given one up, and lost the end of another.
        cluster.completions["request-2"].finish_reason = FinishReason.ERROR
        del cluster.completions["request-3"].tokens[-1]
        problems = [r.problem for r in observed(cluster, prompts)]
    assert problems[:2] == ["", ""]
    assert "ended with" in problems[2]
    assert "after 19 of 20 tokens" in problems[3]


def test_what_the_context_cuts_off_is_whole(model_dir: Path) -> None:
    with make_cluster(Setting(model_dir, "float64", 20, 1), num_blocks=200, max_model_len=64) as cluster:
        prompts = [[1] * 50, [2] * 40]
        submit(cluster, prompts, 20)
        cluster.run()
        rows = observed(cluster, prompts)
    assert [(len(r.output), r.problem) for r in rows] == [(14, ""), (20, "")]


def test_rows_with_cut_answers_fail_the_table(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [Observed([1], [2, 3]), Observed([1], [], "ended with error after 0 of 2 tokens")]
    row = verify.compare("llama", "drop", Outcome(requests, True, "it happened"), AgreesWithAll())
    assert (row.tokens_compared, row.mismatches, row.incomplete) == (2, 0, 1)
    assert "0 of 2 tokens" in row.evidence

    whole = [Observed([1], [2, 3])]
    monkeypatch.setattr(verify, "TransformersReference", lambda *_: AgreesWithAll())
    monkeypatch.setattr(verify, "SoloReference", lambda *_: AgreesWithAll())
    for found, code in ((whole, 0), (requests, 1)):
        event = Event(lambda _, found=found: Outcome(found, True, "it happened"))
        monkeypatch.setattr(verify, "SCENARIOS", {"drop": event})
        assert verify.run_verify(model_dir, tmp_path / "v.json") == code
        assert json.loads((tmp_path / "v.json").read_text())["incomplete"] == code
    assert "1 requests ended early" in capsys.readouterr().out


FEW = ("chunked prefill", "prefix hit", "static pipeline", "drop + exchange (transfer)")


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    document = json.loads(path.read_text())
    return {row["event"]: row for row in document["rows"]} | {"": document}


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_events_that_a_shallow_model_cannot_have_are_listed_and_the_others_run(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_three = "drop + exchange (recompute), 3 instances"
    monkeypatch.setattr(verify, "SCENARIOS", {name: SCENARIOS[name] for name in FEW})
    monkeypatch.setattr(verify, "FULL_ONLY", {of_three: MANY[of_three]})
    monkeypatch.setattr(verify, "death_plan", lambda *_: [(ExchangeMode.LIVE, 2, ["before_remap", "after_flush"])])
    died: list[str] = []

    def fake_kills(setting: Setting, places: Sequence[str], on_row: Any, **flags: object) -> None:
        for place in places:
            died.append(place)
            on_row(place, Outcome([Observed([1, 2], [3])], True, "it died"))

    monkeypatch.setattr(verify, "kills", fake_kills)
    monkeypatch.setattr(verify, "make_reference", lambda *_: AgreesWithAll())
    folder = make_model(tmp_path / "m", layers=num_layers)
    assert verify.run_verify(folder, tmp_path / "v.json", full=True) == 0
    found = rows_of(tmp_path / "v.json")
    needs = {"static pipeline": 2, FEW[3]: 2, of_three: 3, "kill -9 before_remap (live), 2 instances": 2}
    applicable = {name: needs.get(name, 1) <= num_layers for name in found if name}
    assert len(applicable) == len(FEW) + 3
    assert {name: row["applicable"] for name, row in found.items() if name} == applicable
    assert all(row["happened"] == row["applicable"] for name, row in found.items() if name)
    assert (found[""]["complete"], found[""]["failed"]) == (True, 0)
    assert found[""]["not_applicable"] == list(applicable.values()).count(False)
    assert died == ["before_remap", "after_flush"][num_layers < 2 :]
    if num_layers == 1:
        assert "needs as many layers; this model has 1 layer" in found["static pipeline"]["evidence"]
        assert "events are none that this model can have" in capsys.readouterr().out


def test_merging_ends_where_a_drop_changes_nothing(tmp_path: Path) -> None:
    """Two layers make a pipeline of two; the third instance stays what it is."""
    folder = make_model(tmp_path / "m", layers=2)
    for name in ("drop + exchange (recompute), 3 instances", "restore + split, 3 instances"):
        outcome = MANY[name](Setting(folder, "float64", 24, seed=1))
        assert not any(request.problem for request in outcome.requests)
    assert not MANY[FEW[3] + ", 3 instances"](Setting(folder, "float64", 24, seed=1)).happened


def test_what_fails_or_hangs_is_a_row_with_a_name_and_the_rest_is_run(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "v.json"

    def hangs(setting: Setting) -> Outcome:
        with make_cluster(setting, num_blocks=50) as cluster:
            submit(cluster, make_prompts(setting, cluster, 4, 8, 2), 5)
            cluster.run(Until("a third instance", lambda: False))
        raise AssertionError("it came")

    def breaks(setting: Setting) -> Outcome:
        del setting
        # What was found so far is in the file, which says that it is not all.
        assert list(rows_of(path)) == ["waits", ""]
        assert rows_of(path)[""]["complete"] is False
        raise KeyError("a fault")

    def goes_well(setting: Setting) -> Outcome:
        del setting
        return Outcome([Observed([1], [2, 3])], True, "it happened")

    events = {"waits": Event(hangs), "breaks": Event(breaks), "goes on": Event(goes_well)}
    monkeypatch.setattr(verify, "SCENARIOS", events)
    monkeypatch.setattr(verify, "make_reference", lambda *_: AgreesWithAll())
    assert verify.run_verify(model_dir, path) == 1
    found = rows_of(path)
    assert "StalledError: waited for a third instance, and no worker works on it: groups" in found["waits"]["evidence"]
    assert "KeyError: 'a fault'" in found["breaks"]["evidence"]
    assert found["goes on"]["tokens_compared"] == 2
    assert (found[""]["complete"], found[""]["failed"]) == (True, 2)
    assert "2 of 3 events did not happen" in capsys.readouterr().out


def test_an_interrupted_table_is_printed_and_kept(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Setting) -> Outcome:
        raise KeyboardInterrupt

    well = Event(lambda _: Outcome([Observed([1], [2, 3])], True, "it happened"))
    monkeypatch.setattr(verify, "SCENARIOS", {"first": well, "second": Event(interrupted), "third": well})
    monkeypatch.setattr(verify, "make_reference", lambda *_: AgreesWithAll())
    with pytest.raises(KeyboardInterrupt):
        verify.run_verify(model_dir, tmp_path / "v.json")
    assert list(rows_of(tmp_path / "v.json")) == ["first", ""]
    assert rows_of(tmp_path / "v.json")[""]["complete"] is False
    assert "2 tokens compared" in capsys.readouterr().out


def test_an_engine_that_does_not_start_is_a_row_for_each_place(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_start(*_: object, **__: object) -> None:
        raise WorkerLostError("workers [1] were not ready in 600 s")

    monkeypatch.setattr(verify, "SCENARIOS", {})
    monkeypatch.setattr(verify, "FULL_ONLY", {})
    monkeypatch.setattr(verify, "death_plan", lambda *_: [(ExchangeMode.AUTO, 3, ["before_drop", "after_flush"])])
    monkeypatch.setattr(verify, "kills", no_start)
    monkeypatch.setattr(verify, "make_reference", lambda *_: AgreesWithAll())
    assert verify.run_verify(model_dir, tmp_path / "v.json", full=True) == 1
    found = rows_of(tmp_path / "v.json")
    names = [f"kill -9 {place} (auto), 3 instances" for place in ("before_drop", "after_flush")]
    assert list(found) == [*names, ""]
    assert all("WorkerLostError: workers [1] were not ready" in found[name]["evidence"] for name in names)


def test_too_many_units_of_work_are_told_with_what_was_waited_for(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "MAX_UNITS", 5)
    with make_cluster(Setting(model_dir, "float64", 20, 1), num_blocks=200) as cluster:
        submit(cluster, [[1, 2, 3]], 20)
        with pytest.raises(StalledError, match=r"waited for all requests to end .*, which 5 units"):
            cluster.run()


def test_without_transformers_the_first_line_says_what_that_means(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "transformers_available", lambda: False)
    monkeypatch.setattr(verify, "SCENARIOS", {"prefix hit": SCENARIOS["prefix hit"]})
    assert verify.run_verify(model_dir, tmp_path / "v.json") == 0
    assert capsys.readouterr().out.startswith("transformers is not installed: tokens are compared with what our own")
    document = rows_of(tmp_path / "v.json")[""]
    assert (document["reference"], document["complete"]) == ("one undisturbed instance", True)
    assert document["mismatches"] == 0 < document["tokens_compared"]


@pytest.mark.skipif(not transformers_available(), reason="compares with transformers")
def test_a_served_context_is_compared_up_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m", arch="mistral")
    monkeypatch.setattr(verify, "SCENARIOS", {name: SCENARIOS[name] for name in ("prefix hit", FEW[3])})
    assert verify.run_verify(folder, tmp_path / "v.json", max_model_len=176) == 0
    document = rows_of(tmp_path / "v.json")[""]
    assert (document["mismatches"], document["max_model_len"]) == (0, 176)
    assert document["tokens_compared"] > 1000


@pytest.mark.skipif(not (transformers_available() and library.supported_variants()), reason="needs both")
def test_torchs_products_agree_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``native+torch-linear``, named: exact where it is native, and in bfloat16 no further off than a tie."""
    folder = make_model(tmp_path / "m", arch="qwen3", hidden=64)
    monkeypatch.setattr(verify, "SCENARIOS", {name: SCENARIOS[name] for name in ("prefix hit", FEW[3])})
    for dtype in ("float64", "float32", "bfloat16"):
        path = tmp_path / f"{dtype}.json"
        code = verify.run_verify(folder, path, dtype, kernels="native+torch-linear")
        document = rows_of(path)[""]
        assert document["kernels"].endswith("+torch-linear")
        assert document["incomplete"] == 0 < document["tokens_compared"]
        # Of 16 requests. A product that is wrong makes all of them differ by more than a tie.
        assert document["mismatches"] <= (2 if dtype == "bfloat16" else 0)
        assert code == bool(document["mismatches"])


def test_a_context_too_short_for_the_events_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a context of 127 tokens is too short.*verify needs 128"):
        verify.run_verify(make_model(tmp_path / "m", max_position_embeddings=127), None)


def test_tokens_outside_of_the_vocabulary_are_refused(model_dir: Path) -> None:
    config = EngineConfig.resolve(model=str(model_dir), dtype="float64", instances=1, memory="64MiB")
    with LocalCluster(config) as cluster:
        for wrong in ([3, cluster.assembly.shape.vocab_size], [-1]):
            with pytest.raises(ValueError, match="outside of the vocabulary"):
                cluster.submit("r", wrong, SamplingParams(max_tokens=1))
        assert cluster.num_open == 0


@pytest.mark.skipif(not transformers_available(), reason="transformers makes the model")
@pytest.mark.parametrize(
    "event",
    ["restore + split", "drop again during restore", "chunked prefill", "chunked prefill, prompts first"],
)
def test_models_with_few_tokens_and_a_short_context(event: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=verify.MIN_CONTEXT, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    outcome = SCENARIOS[event](Setting(tmp_path, "float64", 96, seed=1))
    assert outcome.happened, outcome.evidence
    row = verify.compare("llama", event, outcome, verify.TransformersReference(tmp_path, "float64"))
    assert (row.mismatches, row.incomplete) == (0, 0)
    assert row.tokens_compared > 400


def test_the_reference_without_transformers_makes_room_for_the_model(tmp_path: Path) -> None:
    # Two tables of 140,000 rows of 512 in float64 are 1.07 GiB.
    folder = make_model(tmp_path / "wide", vocab=140_000, hidden=512, layers=1, tied=False)
    reference = SoloReference(folder, "float64")
    first = reference.check([1, 2, 3], [0, 0])
    assert first.num_compared >= 1
    budget = reference._config.memory.memory_bytes
    assert budget > 1 << 30
    assembly = assemble(reference._config)
    assert budget - assembly.workspace_bytes < 1.2 * sum(assembly.shape.shard_bytes.values())


def test_a_model_that_can_have_no_event_is_not_found_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "memory_limit", lambda: (1, "this machine"))
    assert verify.run_verify(make_model(tmp_path / "m"), tmp_path / "v.json", alone=True) == 1
    assert "nothing was compared" in capsys.readouterr().out
    table = json.loads((tmp_path / "v.json").read_text())
    assert table["not_applicable"] == len(table["rows"]) > 0 and table["tokens_compared"] == table["failed"] == 0
