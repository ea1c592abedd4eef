"""What is read out of a server that was watched under known loads; watching takes a minute and is no test."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import ChunkShape, CostModel, StepShape
from jettison.live.core_speeds import interpolated
from jettison.live.host_costs import PROMPT, _factors, _gaps, _phase
from jettison.live.host_watch import Load, Window, read_steps, steps_of
from jettison.workload.traces import TraceRow

COST = CostModel(2, 1e-9, 1e-8, 1e-6, 1e-5, 1e-4, 0.0, 0.0, 1e-5, 1e-6)
PROFILE = HardwareProfile(COST, 1e9, 1e-5, 1e-3, 0.0, 1e9, 1e9)


def test_speeds_between_what_was_measured_are_on_straight_lines() -> None:
    assert interpolated([(1, 1.0), (2, 0.8)], 2) == [1.0, 0.8]
    assert interpolated([(2, 0.9), (4, 0.5)], 4) == pytest.approx([1.0, 0.9, 0.7, 0.5])
    assert interpolated([(2, 0.9)], 3) == pytest.approx([1.0, 0.9, 0.9])
    assert interpolated([(1, 1.0)], 1) == [1.0]


def step(begin_us: float, took_us: float, requests: int, tokens: int, prompt: int = 0) -> dict[str, Any]:
    args = {"requests": requests, "tokens": tokens, "prompt_tokens": prompt, "layers": [0, 2]}
    return {"cat": "step", "ts": begin_us, "dur": took_us, "args": args}


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """Two requests: their prompts in one step, then three decode steps of both, with gaps of 0.4 ms."""
    size, first_us = 2, 1000.0
    events: list[dict[str, Any]] = [step(first_us, 900.0, size, size * PROMPT, size * PROMPT)]
    at_us = first_us + 1300.0
    for index in range(3):
        shape = StepShape((ChunkShape(PROMPT + index + 1, 1),) * size, 2, True, size)
        took_us = 1.2e6 * COST.step_cost_s(shape)
        events.append(step(at_us, took_us, size, size))
        at_us += took_us + 400.0
    events.append({"cat": "request", "ts": 0.0, "ph": "b"})
    path = tmp_path / "line.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "otherData": {"first_ns": 5_000_000}}).encode()))
    return path


def window() -> Window:
    load = Load("decode 2", (TraceRow(0.0, PROMPT, 4),) * 2)
    return Window(load, 5_000_000, 5_000_000_000, 0.02, 0.03, 0.004)


def test_a_phase_is_counted_from_the_time_line(line: Path) -> None:
    steps = read_steps(line)
    phase = _phase(window(), steps)
    assert (phase.num_steps, phase.num_rows, phase.num_tokens, phase.num_requests) == (4, 8, 8, 2)
    assert phase.num_prompt_tokens == 2 * PROMPT and phase.controller_s == 0.02
    assert steps_of(Window(window().load, 0, 5_500_000, 0, 0, 0), steps) == []  # it had not begun


def test_what_a_step_took_of_a_core_is_in_the_time_line_and_of_several_threads_its_whole_time(line: Path) -> None:
    document = json.loads(gzip.decompress(line.read_bytes()))
    document["traceEvents"][0]["args"]["processor_us"] = 700.0
    line.write_bytes(gzip.compress(json.dumps(document).encode()))
    first, second, *_ = read_steps(line)
    assert first.processor_ns == 700_000, "it waited for a core as well"
    assert second.processor_ns == pytest.approx(second.end_ns - second.begin_ns, abs=1), "nobody told"
    assert read_steps(line, 2)[0].processor_ns == 900_000


def test_gaps_are_those_between_decodes_of_the_whole_batch(line: Path) -> None:
    gaps = _gaps([window()], read_steps(line))
    assert gaps == {2: pytest.approx([4e-4, 4e-4], abs=2e-6)}


def test_steps_while_serving_over_their_prediction(line: Path) -> None:
    assert _factors([window()], read_steps(line), PROFILE) == {2: pytest.approx(1.2, rel=0.01)}
