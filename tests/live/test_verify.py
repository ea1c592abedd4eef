"""What the proof table counts: differences, answers that are not whole, and models of unusual sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.device.reference import Verdict, transformers_available
from jettison.errors import ConfigError
from jettison.live import verify
from jettison.live.assembly import assemble
from jettison.live.local_cluster import LocalCluster
from jettison.live.scenarios import SCENARIOS, Observed, Outcome, Setting, make_cluster, make_prompts, observed, submit
from jettison.live.solo_reference import SoloReference
from jettison.types import FinishReason, SamplingParams


class AgreesWithAll:
    """A reference that finds everything right."""

    def check(self, prompt: list[int], output: list[int]) -> Verdict:
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
        monkeypatch.setattr(verify, "SCENARIOS", {"drop": lambda _, found=found: Outcome(found, True, "it happened")})
        assert verify.run_verify(model_dir, tmp_path / "v.json") == code
        assert json.loads((tmp_path / "v.json").read_text())["incomplete"] == code
    assert "1 requests ended early" in capsys.readouterr().out


def test_a_context_too_short_for_the_events_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a context of 128 tokens is too short"):
        verify.run_verify(make_model(tmp_path / "m", max_position_embeddings=128), None)


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
