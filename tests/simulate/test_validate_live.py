"""One little spec live and simulated: both sides run, from one file, and what is compared is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jettison.config.files import parse_yaml
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.cost.profile_document import StoredProfile
from jettison.errors import ConfigError
from jettison.live.engine.assembly import assemble
from jettison.profiles import default_path, fingerprint, save_profile
from jettison.simulate import validate_live
from jettison.simulate.cases import Case
from jettison.simulate.counterfactual import counterfactual_runs
from jettison.simulate.local import local_config
from jettison.simulate.spec import parse_spec
from jettison.simulate.validate_command import validate_command
from jettison.simulate.validation import compare
from jettison.simulate.validation_file import read_document, simulate_again

SPEC = """
name: tiny
cluster:
  model: {folder}
  create: {{arch: qwen2, layers: 2, hidden: 32, heads: 4, kv_heads: 2, max_position_embeddings: 256}}
  instances: 2
  kv_tokens: 512
settings: {{dtype: float32, max_num_batched_tokens: 64, max_num_seqs: 16, num_threads: 1, page_size: 4096}}
workload: {{rows: [[0.0, 20, 10], [0.1, 30, 12], [0.2, 8, 20], [0.3, 40, 5]]}}
variants: [drop]
"""

PROFILE = HardwareProfile(
    CostModel(2, 1e-9, 1e-8, 2e-6, 5e-5, 3e-4, 0.0, 0.0, 5e-5, 2e-6), 1e9, 2e-5, 1e-3, 0.0, 1e9, 1e9
)

def test_the_live_side_has_the_simulated_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Any] = parse_yaml(SPEC.format(folder=tmp_path / "model"), "test")
    told = []
    monkeypatch.setattr(validate_live, "run_config", lambda keys, *_, **__: told.append(keys["max_num_queued_reqs"]))
    monkeypatch.setattr(validate_live, "read_steps", lambda *_: ())
    monkeypatch.setattr(validate_live, "fitted_to", lambda *_: None)
    for settings in ({}, {"max_num_queued_reqs": 9}):
        spec = parse_spec(raw | {"settings": raw["settings"] | settings})
        worker = assemble(local_config(spec.cluster, spec.settings, tmp_path)).worker_specs[0]
        mark = fingerprint(Path(worker.model_dir), worker.dtype, worker.num_threads, worker.kernels)
        save_profile(default_path(tmp_path / "model", mark), StoredProfile(mark, PROFILE))
        list(validate_live.serve_all([Case("tiny", raw, variant="drop")], spec, tmp_path, Console(quiet=True)))
    assert told == ["none", "none", 9, 9]


@pytest.mark.live
def test_a_spec_live_and_simulated(tmp_path: Path) -> None:
    raw: dict[str, Any] = parse_yaml(SPEC.format(folder=tmp_path / "model"), "test")
    # In place of a minute of measuring.
    spec = parse_spec(raw)
    config = local_config(spec.cluster, spec.settings, tmp_path)
    worker = assemble(config).worker_specs[0]
    mark = fingerprint(Path(worker.model_dir), worker.dtype, worker.num_threads, worker.kernels)
    path = default_path(tmp_path / "model", mark)
    save_profile(path, StoredProfile(mark, PROFILE))
    console, out = Console(record=True, width=160), tmp_path / "validation.json"
    (trio,) = validate_command(raw, "tiny", tmp_path, json_out=out, console=console)
    for run in (trio.live, trio.again, trio.simulated):
        assert run.requests.completed == 4
        assert [row["output_tokens"] for row in run.requests_detail or []] == [10, 12, 20, 5]
    shown = console.export_text()
    assert "TTFT mean" in shown and "live again" in shown
    document = json.loads(out.read_text())
    assert {row["metric"] for row in document["rows"]} >= {"output tokens/s", "TPOT mean", "TTFT P99", "drops"}
    # Steps are those that the live run recorded: not the profile's, which was made up.
    assert trio.steps != PROFILE.cost and trio.steps.num_layers == 2
    assert document["runs"][0]["steps"] == asdict(trio.steps)
    # What is kept of the live runs is enough to simulate them again, and with another profile it is not.
    (again,) = simulate_again(raw, "tiny", tmp_path, read_document(out))
    assert again.simulated.ttft_s == trio.simulated.ttft_s and again.steps == trio.steps
    assert [row.as_dict() for row in compare(again)] == document["rows"]
    save_profile(path, StoredProfile(mark, replace(PROFILE, hop_s=6e-5)))
    with pytest.raises(ConfigError, match="measured anew"):
        simulate_again(raw, "tiny", tmp_path, document)
    # The live run says of itself what a simulation needs.
    others = counterfactual_runs(trio.live, ["recompute"], num_processes=1)
    assert all(run.requests.completed == 4 for run in others.values()) and len(others) == 2
