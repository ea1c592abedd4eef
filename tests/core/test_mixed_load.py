"""Thousands of mixed requests, a fifth of them cancelled, while layers are dropped and restored."""

from __future__ import annotations

import random

from fakes import FakeCluster


def test_two_thousand_requests_leave_nothing_behind() -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=48, shard_bytes=4096, seed=11, max_seqs=24, max_tokens=64, eager=True
    )
    cluster.check_every_event = False
    rng = random.Random(11)
    prefixes = [[rng.randrange(1, 60) for _ in range(8)] for _ in range(4)]
    now_ms, num_cancelled = 0.0, 0
    for i in range(2000):
        # Waves: bursts far above what the cluster can take, and valleys in which it restores.
        now_ms += rng.expovariate(1 / (0.4 if i % 500 < 350 else 14.0))
        prompt = rng.choice([[], [], prefixes[i % 4]]) + [rng.randrange(1, 60) for _ in range(rng.randint(1, 12))]
        cluster.submit(
            f"r{i}", prompt, rng.randint(1, 12), now_ms, priority=rng.choice([0, 0, 0, 1]),
            stop_token_ids=(7,) if rng.random() < 0.2 else (), prompt_logprobs=0 if rng.random() < 0.05 else None,
        )
        if rng.random() < 0.2:
            cluster.cancel(f"r{i}", now_ms + rng.expovariate(1 / 60))
            num_cancelled += 1
    for second in range(1, 8):
        cluster.order_at("drop", 700.0 * second)
        cluster.order_at("restore", 700.0 * second + 300)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    counters = cluster.core.state.counters
    ends = [end for ends in cluster.ends.values() for end in ends]
    assert len(ends) == 2000 and 350 <= num_cancelled <= 450
    assert counters.num_drops >= 4 and counters.num_restores >= 1
    assert counters.num_cancelled == ends.count("cancelled") > 50
    assert {"length", "stop", "cancelled"} == set(ends)
