"""Scenarios of ``jettison verify`` in which requests are packed onto fewer instances while they run.

As in ``live.verify.scenarios``, each says whether what it is about really happened.
"""

from __future__ import annotations

from dataclasses import replace

from jettison.core.totals import counters
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify.applicable import Needs
from jettison.live.verify.scenarios import (
    Event,
    Outcome,
    Setting,
    blocks_for_all,
    make_cluster,
    make_prompts,
    observed,
    produced,
    submit,
)


def packed_while_running(setting: Setting) -> Outcome:
    """Requests are spread over three instances, and then packed: they end on fewer, and no stream notices."""
    blocks = blocks_for_all(setting, 60)
    with make_cluster(setting, num_blocks=blocks, instances=3, packing="mell", packing_epoch_s=0.01) as cluster:
        core, packed = cluster.core, cluster.core.params
        assert packed.packing is not None
        core.reconfigure(replace(packed, rungs=tuple(r for r in packed.rungs if r != "pack")))
        prompts = make_prompts(setting, cluster, 20, 60)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, 2 * len(prompts)))
        num_before = _num_used(cluster)
        core.reconfigure(packed)
        is_packed = Until("requests on fewer instances", lambda: _num_used(cluster) < num_before)
        cluster.run(is_packed, Pace.STEPS_LAST)
        num_open, num_after = cluster.num_open, _num_used(cluster)
        cluster.run()
        moved = counters(core)["packing_migrations"]
        evidence = f"{moved:.0f} migrations, from {num_before} instances to {num_after} with {num_open} requests open"
        return Outcome(observed(cluster, prompts), num_before == 3 and moved > 0 and num_open > 0, evidence)


def _num_used(cluster: LocalCluster) -> int:
    return sum(bool(group.queues.all_requests()) for group in cluster.core.groups.values())


PACKING: dict[str, Event] = {"packed while running": Event(packed_while_running, Needs(num_instances=3))}
"""By name."""
