"""Stages of a model whose head is heavy, in virtual time: neither stands still for the other."""

from __future__ import annotations

from dataclasses import replace

from scenarios import BLOCK_SIZE, COST, PAGE_BYTES, PROFILE, Watched, make_setup, make_shape

from jettison.sim.setup import MemorySetup, setup_from_profile

NUM_LAYERS = 16
HEAVY = replace(COST, num_layers=NUM_LAYERS, head_s=1e-3, sample_s=3e-4)
"""The head takes as long as six or seven layers for a batch of many rows."""


def test_the_stages_of_a_pair_stand_still_about_as_long_where_the_head_is_heavy() -> None:
    shape, profile = make_shape(NUM_LAYERS, 100 * PAGE_BYTES), replace(PROFILE, cost=HEAVY)
    setup = make_setup(eager=False, shape=shape)
    memory = MemorySetup.for_blocks(shape, BLOCK_SIZE, 400, page_bytes=PAGE_BYTES)
    params = replace(setup.params, profile=profile)
    watched = Watched(setup_from_profile(shape, setup.limits, params, 2, memory, profile))
    for i in range(1200):
        watched.submit(f"r{i}", 60, 60, 0.009 * i)
    watched.cluster.loop.at(8_000_000_000, watched.cluster.request_drop)  # when the traffic is known
    watched.cluster.run(20_000_000_000)
    (drop,) = (r.fields for r in watched.records if r.kind == "drop")
    (_, first_end), (last_begin, _) = drop["stages"]  # type: ignore[misc]
    assert first_end == last_begin and first_end > NUM_LAYERS // 2 + 1, drop["stages"]
    first, last = (watched.cluster.bubbles.totals[w] for w in drop["workers"])  # type: ignore[attr-defined]
    span_ns = max(times.busy_ns + times.bubble_ns for times in (first, last))
    assert span_ns > 5_000_000_000
    # With eight layers each the first stage stands still for 45 % of the time, the last one for none.
    assert abs(first.bubble_ns - last.bubble_ns) <= 0.1 * span_ns
