"""What is known of load: how much of the prompts the prefix cache spares, and for how long that is remembered."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster

from jettison.core.monitor import NUM_PROMPTS, TrafficMonitor


def test_the_share_is_by_tokens_and_exact_while_prompts_are_few() -> None:
    traffic = TrafficMonitor()
    assert traffic.prefix_hit_share == 0.0
    for num_tokens, num_cached in ((100, 90), (300, 0), (200, 60)):
        traffic.note_prompt(num_tokens, num_cached)
    assert traffic.prefix_hit_share == pytest.approx(150 / 600)


@pytest.mark.parametrize(("before", "after"), [(90, 0), (0, 90)])
def test_the_share_follows_the_last_few_hundred_prompts(before: int, after: int) -> None:
    traffic = TrafficMonitor()
    for _ in range(100_000):
        traffic.note_prompt(100, before)
    assert traffic.prefix_hit_share == pytest.approx(before / 100)
    for _ in range(3 * NUM_PROMPTS):
        traffic.note_prompt(100, after)
    assert traffic.prefix_hit_share == pytest.approx(after / 100, abs=0.06)


def test_each_prompt_counts_once_with_what_its_first_admission_found() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=40, max_tokens=64)
    shared = [7] * 16
    cluster.submit("first", [*shared, 1, 2, 3, 4], 3)
    for i in range(3):
        cluster.submit(f"r{i}", [*shared, 10 + i, 2, 3, 4], 3, at_ms=200 * (i + 1))
    cluster.run()
    traffic = cluster.core.traffic
    assert traffic.num_prompts == 4 and traffic.prefix_hit_share == pytest.approx(3 * 16 / (4 * 20))
    # Recomputing after a preemption is no new prompt.
    crowded = FakeCluster(num_workers=1, full_blocks=12, max_tokens=64, policy="recompute")
    rng = random.Random(1)
    for i in range(6):
        crowded.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 20)
    crowded.run()
    assert sum(g.counters.num_preemptions for g in crowded.core.groups.values()) > 0
    assert crowded.core.traffic.num_prompts == 6
