"""Replaying recorded steps through the predictor and the classes beside it, on made-up recordings."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predictor.replay import CONTENDERS, FORMAT, compare, read, rows_of
from jettison.cost.model import ChunkShape, CostModel

COST = CostModel(4, 2e-8, 6e-8, 2e-5, 3e-4, 1e-4, 5e-5, 5e-7, 2e-4, 1e-5)


def write_recording(path: Path, num_stages: int, *, slower: float = 1.0, num_steps: int = 400) -> Path:
    """A group whose machine takes ``slower`` times what the profile has; pipelines are always full, stages even."""
    rng, rows = random.Random(0), []
    ends = [0] * num_stages
    for number in range(num_steps):
        chunks = [[1, rng.randrange(500)] for _ in range(rng.randrange(1, 20))]
        if number % 4 == 0:
            chunks.append([rng.randrange(50, 480), 0])
        shapes = [ChunkShape(context, tokens) for tokens, context in chunks]
        whole_ns = round(1e9 * slower * COST.batch_cost_s(shapes))
        # A place is taken again at once; the bottleneck takes its share of the work after the step before.
        issued_ns, ended_ns = ends[-num_stages], ends[-1] + whole_ns // num_stages
        ends.append(ended_ns)
        stages = [[w, 4 * w // num_stages, 4 * (w + 1) // num_stages] for w in range(num_stages)]
        spans = [[w, ended_ns - whole_ns // num_stages, ended_ns] for w in range(num_stages)]
        rows.append({
            "group": 0, "stages": stages, "issued_ns": issued_ns, "ended_ns": ended_ns, "chunks": chunks,
            "samples": len(chunks), "spans": spans,
        })
    document: dict[str, Any] = {
        "format": FORMAT, "model": "made-up", "workload": f"{num_stages}", "num_layers": 4, "budget": 512,
        "profile": {"cost": dataclasses.asdict(COST), "added_stage_s": 2e-4}, "steps": rows,
    }
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_exact_lone_steps_are_foretold_by_all(tmp_path: Path) -> None:
    found = compare(read(write_recording(tmp_path / "a.json.gz", 1)))
    (lone,) = [row for row in rows_of({"a": found}) if row["use"] == "lone step" and row["recording"] == "a"]
    assert lone["median_error"].keys() == CONTENDERS.keys()
    assert all(error < 0.05 for error in lone["median_error"].values())
    assert lone["median_error"]["profile alone"] == pytest.approx(0.0, abs=1e-6)


def test_a_slower_machine_is_learned_but_by_the_profile_alone(tmp_path: Path) -> None:
    found = compare(read(write_recording(tmp_path / "a.json.gz", 1, slower=2.0)))
    (lone,) = [row for row in rows_of({"a": found}) if row["use"] == "lone step" and row["recording"] == "a"]
    assert lone["median_error"].pop("profile alone") == pytest.approx(0.5, abs=1e-3)
    assert all(error < 0.05 for error in lone["median_error"].values())


def test_busy_pipelines_have_periods_and_stages(tmp_path: Path) -> None:
    recording = read(write_recording(tmp_path / "a.json.gz", 2))
    assert all(step.period_s is not None for step in recording.steps[3:-1])
    found = compare(recording)
    for use in ("stage", "throughput", "merged step"):
        assert len(found["predictor, profiled"].of[use]) >= 40
    (throughput, _) = [row["median_error"] for row in rows_of({"a": found}) if row["use"] == "throughput"]
    assert throughput["predictor"] < 0.05 and throughput["predictor, profiled"] < 0.05


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json.gz"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="no recording"):
        read(path)
