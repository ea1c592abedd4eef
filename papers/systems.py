"""Systems that figures compare beside the policies as they are: what no setting can say, and static pipelines."""

from __future__ import annotations

from dataclasses import replace

from papers.jobs import MERGES_END_S
from papers.variants import Changes, Variant

KUNSERVE = {"overload_trigger": "pressure"}
"""Load above capacity with requests waiting, whatever compute says (v3 section 4.1)."""

BY_PRESSURE = Variant("drop by pressure", "drop", KUNSERVE)
"""KunServe's own trigger."""

SPARE = Variant("memory to spare", "recompute", changes=Changes(kv_scale=8.0))
"""What memory alone could give: eight times of it."""

WITHOUT_RESTORE = replace(BY_PRESSURE, name="drop without restore", settings={**KUNSERVE, "restore_threshold": 0.0})

DROPPING = ("drop", BY_PRESSURE.name)

NUM_PROCESSORS = 8
REPLICAS = Variant(f"{NUM_PROCESSORS} instances", "recompute")
MERGES = {"2 stages": 4, "4 stages": 6, "8 stages": 7}
"""Of eight instances, that make pipelines so long."""

STATIC_PIPELINES = tuple(Variant(name, "drop", {}, Changes(num_merges=merges)) for name, merges in MERGES.items())
"""Made by merging at the start, and stay."""

PIPELINES_STAND_S = MERGES_END_S
"""Arrivals before that do not count."""
