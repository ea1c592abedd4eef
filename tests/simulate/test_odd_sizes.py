"""Merged instances become instances again while requests still come, whatever their number.

On the presets' timing with a third of their memory: a burst that merges all, then a load at which members are clearly
faster apart, while the pipeline's usage stays above what each of three could hold of all.
"""

from __future__ import annotations

from typing import Any

import pytest

from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case
from longrun import part_of

DURATION_S = 110.0


def burst_on(num_instances: int) -> RunResult:
    """A burst of 4.2 times the load, 15 s long, 15 s after the beginning."""
    arrivals = {
        "process": "gamma", "cv": 0.3, "rate_per_s": 1.55 * num_instances, "duration_s": DURATION_S,
        "bursts": [{"start_s": 15, "duration_s": 15, "multiplier": 4.2}],
    }
    spec: dict[str, Any] = {
        "name": "odd sizes",
        "cluster": {"preset": "kunserve-a", "instances": num_instances, "kv_tokens": 60_000},
        "workload": {"arrivals": arrivals, "lengths": {"input": 600, "output": 600}},
        "variants": ["drop"],
        "settings": {"block_size": 64, "max_num_batched_tokens": 4096, "max_num_seqs": 1024},
    }
    return run_case(cases_of(spec, "odd sizes")[0])


@pytest.mark.parametrize(("num_instances", "largest"), part_of([(3, 3), (4, 2)], [(3, 3)]))
def test_all_are_instances_again_before_requests_end(num_instances: int, largest: int) -> None:
    run = burst_on(num_instances)
    log = run.events["log"]
    assert max(len(e["workers"]) for e in log if e["kind"] == "drop") == largest
    assert run.requests.completed == run.requests.submitted
    ends_s = [e["t"] for e in log if e["kind"] in ("restore_done", "came_home")]
    assert max(ends_s) < DURATION_S - 5.0
    assert run.series["groups"][-1][1] == num_instances
    assert run.events["restores"] == run.events["drops"], "no drop follows a restore"
    assert run.events["restores_turned"] == 0
