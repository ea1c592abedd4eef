"""Scenarios of ``jettison verify`` with several rungs at once: drops and restores over stored and migrating requests.

As in ``live.verify.scenarios``, each says whether what it is about really happened.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from jettison.core.moving.migrations import may_go
from jettison.core.totals import counters
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    MERGED,
    NEVER_MS,
    NUM_REQUESTS,
    Event,
    Outcome,
    Setting,
    blocks_for_all,
    finish,
    make_cluster,
    make_prompts,
    observed,
    produced,
    submit,
)
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import RequestId

TOGETHER = "swap+migrate+drop"


def _stored(cluster: LocalCluster) -> dict[RequestId, int]:
    """Requests whose KV is in host pools only, each with how often it has been preempted."""
    groups = cluster.core.groups.values()
    return {r: s.num_preemptions for g in groups for r, s in g.queues.stored.items()}


def _running(cluster: LocalCluster) -> list[RequestId]:
    return [r for group in cluster.core.groups.values() for r in (*group.queues.running, *group.queues.moving)]


def _run_on(cluster: LocalCluster, stored: dict[RequestId, int], where: str) -> int:
    """Run until none of these is stored; how many run without having been computed again."""
    cluster.run(Until(f"stored requests run on {where}", lambda: not stored.keys() & _stored(cluster).keys()))
    requests = cluster.core.state.requests
    return sum(requests[r].num_preemptions == before for r, before in stored.items() if r in requests)


def drop_over_stored_requests(setting: Setting) -> Outcome:
    """Instances have requests in their host pools and a queue; what is stored runs on in the pipeline."""
    with _crowded(setting) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40, 2 * NUM_REQUESTS)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(Until("stored requests", lambda: len(_stored(cluster)) >= 2))
        stored = _stored(cluster)
        cluster.request_drop()
        began = bool(cluster.core.merges)
        finish(cluster, "the drop")
        num_resumed = _run_on(cluster, stored, "in the pipeline")
        cluster.run()
        evidence = (
            f"the drop began at once: {began}; {num_resumed} of {len(stored)} stored requests ran on in the pipeline, "
            f"not computed again; {_counts(cluster)}"
        )
        happened = began and num_resumed > 0 and counters(cluster.core)["hosted_carried"] > 0
        return Outcome(observed(cluster, prompts), happened, evidence)


def restore_over_stored_requests(setting: Setting) -> Outcome:
    """A drop and, at its end, a restore: what was stored before runs on in the groups after the split.

    No unit of work lies between the two: what the pipeline has room for is still stored, however much that is. Clients
    of most running requests leave: those that stay fit into the instances, or the restore would be turned round.
    """
    with _crowded(setting) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40, NUM_REQUESTS + 2)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(Until("stored requests", lambda: len(_stored(cluster)) >= 2))
        stored = _stored(cluster)
        cluster.request_drop()
        for name in _running(cluster)[2:]:
            cluster.cancel(name)
        finish(cluster, "the drop")
        cluster.request_restore()
        is_split = Until("the split", lambda: not (cluster.core.in_transition and cluster.core.state.pipelines))
        cluster.run(is_split, Pace.STEPS_LAST)
        stored = _stored(cluster)
        num_resumed = _run_on(cluster, stored, "at home")
        cluster.run()
        totals = counters(cluster.core)
        evidence = (
            f"{num_resumed} of {len(stored)} stored requests ran on after the restore, not computed again; "
            f"{_counts(cluster)}"
        )
        happened = num_resumed > 0 and totals["restores"] > 0 and totals["hosted_carried"] > 1
        return Outcome(observed(cluster, prompts), happened, evidence)


def _crowded(setting: Setting) -> AbstractContextManager[LocalCluster]:
    """Instances with too little memory for all, and all rungs."""
    need = -(-(40 + setting.num_output_tokens) // BLOCK_SIZE)
    return make_cluster(
        setting, num_blocks=2 * need, overload=TOGETHER, swap_budget_blocks=8, overload_min_wait_ms=NEVER_MS
    )


def over_migrating_requests(setting: Setting) -> Outcome:
    """A drop and a restore while requests migrate between instances."""
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), overload=TOGETHER) as cluster:
        prompts = make_prompts(setting, cluster, 20, 40, NUM_REQUESTS)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, setting.num_output_tokens))
        source, destination = cluster.core.groups.values()
        going = Until("requests that decode", lambda: any(may_go(s) for s in source.queues.running.values()))
        cluster.run(going)
        name = next(s.request_id for s in source.queues.running.values() if may_go(s))
        cluster.request_migration(name, destination.group_id, MigrationKind.KV)
        cluster.request_drop()
        began = bool(cluster.core.merges)
        finish(cluster, "the drop")
        cluster.run(produced(cluster, 10))
        cluster.request_restore()
        cluster.run()
        totals = counters(cluster.core)
        happened = began and totals["migrations_given_way"] > 0 and totals["drops"] > 0 and totals["restores"] > 0
        evidence = f"the drop began at once: {began}; {totals['restores']:.0f} restores; {_counts(cluster)}"
        return Outcome(observed(cluster, prompts), happened, evidence)


def _counts(cluster: LocalCluster) -> str:
    totals = counters(cluster.core)
    brought_back = totals["hosted_brought_back"] + totals["migrations_given_way"]
    carried, given_up = totals["hosted_carried"], totals["hosted_given_up"]
    return f"carried {carried:.0f}, brought back {brought_back:.0f}, given up {given_up:.0f}"


RUNGS_TOGETHER: dict[str, Event] = {
    "drop over stored requests": Event(drop_over_stored_requests, MERGED),
    "drop + restore over stored requests": Event(restore_over_stored_requests, MERGED),
    "drop + restore over migrating requests": Event(over_migrating_requests, MERGED),
}
"""By name."""
