"""Event logs of the papers' specs that were written down once: work on the core's structure changes none of them.

Each spec is run under each of its variants, with its first requests alone, pressed together in time, and with no more
memory than a part of them fills. ``tests/sim/test_frozen_logs.py`` does the same for schedules that are made up for it.
``python tests/papers/test_frozen_specs.py`` writes the file.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jettison.simulate.machines import cluster_setup
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import VariantSpec
from jettison.simulate.workloads import build_batches, build_pool
from jettison.workload.rows import Workload
from longrun import part_of
from papers.jobs import changed
from papers.requests import requests_of
from papers.specs import Spec, read_spec, spec_names
from papers.variants import Changes

FILE = Path(__file__).parent / "frozen_specs.json"

NUM_REQUESTS = 120
PRESSED = 8.0
"""Times as fast as the spec has its requests arrive."""
HELD = 0.3
"""Part of the tokens of all these requests that the cluster's memory holds, where the spec has room for more."""
UNTIL_S = 40.0

PLAIN_RUN = (
    "ablation/+ lookahead", "burst-burstgpt-14b/swap", "burst-sharegpt-14b/drop", "burst-sharegpt-14b/migrate",
    "conserve-on-off/harvest", "conserve-gamma/vLLM++", "conserve-real/harvest", "extreme-burst/drop", "long-run/drop",
    "long-run/migrate", "mell-a100/best-fit", "mell-a100/mell", "v1-burst/drop", "v1-burst/pipeline",
    "v1-exchange/live", "v1-restore/drop",
)  # fmt: skip
"""Of the runs those that the plain suite makes: every spec's own rungs once."""


@cache
def first_requests(name: str) -> Workload:
    """Of a spec's first seed."""
    spec = read_spec(name)
    whole = requests_of(replace(spec.parsed, seeds=spec.parsed.seeds[:1]), 1.0)
    begin_s = whole.rows[0].arrival_s
    rows = tuple(row._replace(arrival_s=(row.arrival_s - begin_s) / PRESSED) for row in whole.rows[:NUM_REQUESTS])
    return Workload(rows, f"first of {name}", "pressed together")


def kv_scale(spec: Spec) -> float:
    """Times the spec's memory for KV; each instance holds the largest request."""
    rows, machine = first_requests(spec.name).rows, spec.machine
    tokens = [row.input_tokens + row.output_tokens for row in rows]
    return min(1.0, max(HELD * sum(tokens) / machine.num_instances, 1.5 * max(tokens)) / machine.kv_tokens)


def runs() -> dict[str, tuple[Spec, VariantSpec]]:
    """Of the specs whose requests are in the tree, by the names of spec and variant."""
    specs = [spec for name in spec_names() if (spec := read_spec(name)).why_not_run is None]
    return {f"{spec.name}/{variant.name}": (spec, variant) for spec in specs for variant in spec.parsed.variants}


def summary(spec: Spec, variant: VariantSpec) -> dict[str, Any]:
    """Hash and counts of a spec that is run now."""
    seed = spec.parsed.seeds[0]
    whole = cluster_setup(spec.machine, spec.parsed, variant, seed)
    setup = changed(whole, spec.machine, Changes(kv_scale=kv_scale(spec)))
    options = SimulationOptions(
        pool=build_pool(spec.parsed.workload, seed), batches=build_batches(spec.parsed.workload, seed),
        until_s=UNTIL_S,
    )
    result = simulate_workload(first_requests(spec.name), setup, options)
    records = dict(sorted(Counter(entry["kind"] for entry in result.events["log"]).items()))
    return {"hash": result.config["event_log_hash"][:16], "completed": result.requests.completed, "records": records}


def frozen() -> dict[str, dict[str, Any]]:
    """What was written down."""
    document: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", part_of(sorted(runs()), PLAIN_RUN))
def test_a_spec_gives_the_log_that_was_written_down(name: str) -> None:
    assert summary(*runs()[name]) == frozen()[name], "python tests/papers/test_frozen_specs.py, if it is meant"


def test_all_specs_are_frozen() -> None:
    assert set(frozen()) == set(runs())


if __name__ == "__main__":
    found = {name: summary(*run) for name, run in sorted(runs().items())}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
