"""A step of an instance whose memory is full."""

from __future__ import annotations

from jettison.cost.stepwork import StepWork
from jettison.policy.steadystate import Room, Traffic, steady_step

TRAFFIC = Traffic(requests_per_s=10.0, prompt_tokens=100.0, output_tokens=50.0)
FULL = Room(kv_tokens=1250.0, max_rows=1000.0)


def test_a_steady_step_by_hand() -> None:
    """125 tokens a request on average: 10 rows. Each step has 10 decodes and 10/50 prompts of 100 tokens."""
    assert steady_step(TRAFFIC, FULL) == StepWork.of([(1, 125)] * 10 + [(20, 0)])
    crowded = steady_step(TRAFFIC, FULL._replace(kv_tokens=12_500.0))
    assert crowded == StepWork.of([(1, 125)] * 100 + [(100, 0)] * 2), "prompts are requests of their own"


def test_places_bound_a_step_where_memory_is_ample() -> None:
    assert steady_step(TRAFFIC, FULL._replace(kv_tokens=1e6)).num_rows >= 1000
    few = steady_step(TRAFFIC, FULL._replace(kv_tokens=1e6, max_rows=4.0))
    assert few == StepWork.of([(1, 125)] * 4 + [(8, 0)])
