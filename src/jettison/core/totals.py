"""The cluster's monotone totals by the names under which metrics and results carry them, live and simulated."""

from __future__ import annotations

from dataclasses import replace

from jettison.core.cluster import ClusterCore
from jettison.core.counters import FRESH, SCALE_OUTS, TOLD


def counters(core: ClusterCore) -> dict[str, float]:
    """Monotone totals of the cluster, groups that are gone included."""
    total = core.state.counters
    live = [g.counters for g in core.groups.values()]
    found: dict[str, float] = {}
    for name, told in TOLD.items():
        value = getattr(total, name)
        if told.of_groups:
            value += sum(getattr(counts, name) for counts in live)
        found[told.name] = value / 1e9 if name.endswith("_ns") else value
    fresh = replace(total.fresh)
    for counts in live:
        fresh.add(counts.fresh)
    return found | {name: getattr(fresh, name.removesuffix("_tokens")) for name in FRESH} | {
        SCALE_OUTS: core.ladder.num_scale_outs
    }  # fmt: skip
