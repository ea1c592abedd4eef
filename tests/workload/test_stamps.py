"""Steps of a coarse clock are seen in the stamps, and only where they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.workload.stamps import fit, look_at
from jettison.workload.traces import read_trace


@given(
    seed=st.integers(0, 2**32), step_s=st.sampled_from([1.0, 1.5, 2.0, 3.0, 5.0, 10.0]), start_s=st.floats(0, 1e6),
    off_s=st.sampled_from([0.0, 0.002]),
)  # fmt: skip
def test_steps_are_found_whatever_they_are_counted_from(seed: int, step_s: float, start_s: float, off_s: float) -> None:
    """And also where each tick of the clock comes some milliseconds early or late."""
    rng = np.random.default_rng(seed)
    ticks = np.floor(rng.uniform(0.0, 100.0, 500))
    late = rng.uniform(-off_s, off_s, 101)
    seen = look_at(start_s + ticks * step_s + late[ticks.astype(int)])
    assert seen.step_s == step_s
    assert seen.off_s <= 2 * off_s + 2e-6


@given(seed=st.integers(0, 2**32), num=st.integers(3, 400), span_s=st.floats(20.0, 1e5))
def test_exact_stamps_are_no_steps(seed: int, num: int, span_s: float) -> None:
    arrival_s = np.round(np.random.default_rng(seed).uniform(0.0, span_s, num), 3)
    assert look_at(arrival_s).step_s is None


def test_few_stamps_fit_a_step_without_being_seen_as_steps() -> None:
    two = np.array([5.0, 118.0])
    assert fit(two, 1.0) and not fit(two, 2.0) and look_at(two).step_s is None
    assert fit(np.array([5.0]), 1.0) and look_at(np.array([5.0, 5.0])).num_different == 1


def test_the_published_mooncake_trace_has_steps_of_three_seconds(data_dir: Path) -> None:
    path = data_dir / "arrivals" / "mooncake_conversation_trace.jsonl.gz"
    exact = read_trace(path, jitter=False).columns.arrival_s
    seen = look_at(exact)
    assert (seen.step_s, seen.num_different, seen.num_requests) == (3.0, 1180, 12_031)
    assert 0.0 < seen.off_s < 0.005, "some stand a few milliseconds beside their step"


@pytest.mark.parametrize(
    "name", ["AzureLLMInferenceTrace_conv.csv.gz", "AzureLLMInferenceTrace_code.csv.gz", "burstgpt_1_head400.csv"]
)
def test_other_published_traces_have_none(data_dir: Path, name: str) -> None:
    assert look_at(read_trace(data_dir / "arrivals" / name).columns.arrival_s).step_s is None


def test_a_mooncake_trace_at_exact_times_keeps_its_bursts(tmp_path: Path) -> None:
    """What jitter would smear: 200 requests inside a tenth of a second."""
    stamps_ms = [*sorted(np.random.default_rng(1).integers(0, 100, 200).tolist()), 500_003]
    rows = [{"timestamp": stamp, "input_length": 5, "output_length": 5} for stamp in stamps_ms]
    path = tmp_path / "exact.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    arrivals = read_trace(path).columns.arrival_s
    assert arrivals[199] - arrivals[0] < 0.1
