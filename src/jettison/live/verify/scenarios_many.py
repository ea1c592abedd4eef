"""Scenarios of ``jettison verify`` with more than two instances: merges of merged groups, splits by halves.

As in ``live.verify.scenarios``, each says whether what it is about really happened.
"""

from __future__ import annotations

from jettison.core.totals import counters
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify.applicable import Needs
from jettison.live.verify.scenarios import (
    Event,
    Outcome,
    Scenario,
    Setting,
    blocks_for_all,
    drop,
    exchange_evidence,
    make_cluster,
    make_prompts,
    observed,
    overwrite_tail,
    produced,
    restore,
    submit,
)
from jettison.memory.kvtransfers import ExchangeMode


def _merge_all(cluster: LocalCluster, mode: ExchangeMode = ExchangeMode.AUTO) -> int:
    """Drop until one group is left or a drop changes nothing, with a few tokens between; the number of drops."""
    before = counters(cluster.core)["drops"]
    num_groups = len(cluster.core.groups) + 1
    while 1 < len(cluster.core.groups) < num_groups:
        num_groups = len(cluster.core.groups)
        drop(cluster, mode)
        cluster.run(produced(cluster, 10))
    return round(counters(cluster.core)["drops"] - before)


def drops_until_one_group(num_instances: int, mode: ExchangeMode) -> Scenario:
    """Instances merge one after the other under running requests: uneven groups, repeated drops."""

    def scenario(setting: Setting) -> Outcome:
        blocks = blocks_for_all(setting, 40)
        with make_cluster(setting, num_blocks=blocks, instances=num_instances, exchange=str(mode)) as cluster:
            prompts = make_prompts(setting, cluster, 10, 40)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(produced(cluster, 40))
            num_drops = _merge_all(cluster, mode)
            stages = [len(group.stages) for group in cluster.core.groups.values()]
            cluster.run()
            happened, evidence = exchange_evidence(cluster, mode)
            evidence = f"{num_drops} drops to {' + '.join(map(str, stages))} stages; {evidence}"
            return Outcome(observed(cluster, prompts), happened and stages == [num_instances], evidence)

    return scenario


def splits_until_instances(num_instances: int) -> Scenario:
    """One pipeline of all becomes instances again under running requests, through halves where it has to."""

    def scenario(setting: Setting) -> Outcome:
        with make_cluster(
            setting, num_blocks=blocks_for_all(setting, 40), instances=num_instances, step_priority="prefill"
        ) as cluster:
            prompts = make_prompts(setting, cluster, 10, 40)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(produced(cluster, 30))
            _merge_all(cluster)
            was_one = len(cluster.core.groups) == 1
            overwrite_tail(cluster)
            cluster.run(produced(cluster, 20))
            for _ in range(num_instances):
                if all(len(g.stages) == 1 for g in cluster.core.groups.values()):
                    break
                restore(cluster)
            apart = len(cluster.core.groups) == num_instances
            cluster.run()
            totals = counters(cluster.core)
            pulled, returned = totals["pulled_bytes"], totals["returned_bytes"]
            evidence = f"{totals['restores']:.0f} restores, {pulled:.0f} bytes pulled, {returned:.0f} of KV returned"
            happened = was_one and apart and pulled > 0 and returned > 0
            return Outcome(observed(cluster, prompts), happened, evidence)

    return scenario


def _events(num: int) -> dict[str, Event]:
    drops = {
        f"drop + exchange ({mode}), {num} instances": Event(drops_until_one_group(num, mode), Needs(num, num))
        for mode in ExchangeMode
    }
    return drops | {f"restore + split, {num} instances": Event(splits_until_instances(num), Needs(num, num))}


MANY: dict[str, Event] = _events(3) | _events(4)
"""By name."""
