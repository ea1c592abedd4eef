"""Scenarios of ``jettison verify`` in which running requests go to another group: as KV by the rung, between instances;
as tokens, whatever the groups' shapes."""

from __future__ import annotations

from jettison.core.moving.migrations import may_go
from jettison.core.serving.group import Group
from jettison.core.totals import counters
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify.applicable import Needs
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    NUM_REQUESTS,
    TWO,
    Event,
    Outcome,
    Scenario,
    Setting,
    blocks_for_all,
    drop,
    make_cluster,
    make_prompts,
    observed,
    produced,
    submit,
)
from jettison.memory.kvtransfers import MigrationKind

NUM_MOVES = 2
STEP_TOKENS = 13
"""So that a request takes several steps of its destination."""


def migrate_while_decoding(setting: Setting) -> Outcome:
    """Clients of one instance leave; running requests of the other move over (the migrate baseline)."""
    blocks = -(-NUM_REQUESTS * (40 + setting.num_output_tokens) // (2 * BLOCK_SIZE)) + 8
    # Two fifths full count as full, and looks are frequent: whatever the length of answers, most is then still to come.
    with make_cluster(
        setting, num_blocks=blocks, overload="migrate", migrate_threshold=blocks / 5, migrate_period_ms=1
    ) as cluster:
        prompts = make_prompts(setting, cluster, 20, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, 2 * setting.num_output_tokens))
        for request_id in list(cluster.core.groups[1].queues.running)[1:]:
            cluster.cancel(request_id)
        moves = Until("a migration", lambda: counters(cluster.core)["migrations"] > 0 or not cluster.num_open)
        cluster.run(moves, Pace.STEPS_LAST)
        cluster.run()
        cluster.core.check()
        totals = counters(cluster.core)
        evidence = f"{totals['migrations']:.0f} requests moved, {totals['migrated_bytes']:.0f} bytes"
        return Outcome(observed(cluster, prompts), totals["migrations"] > 0, evidence)


def migrate_as_tokens(source_stages: int, destination_stages: int) -> Scenario:
    """Some requests move at once, others run at both ends; then one of those that came goes back."""

    def scenario(setting: Setting) -> Outcome:
        instances = source_stages + destination_stages
        with make_cluster(setting, num_blocks=blocks_for_all(setting, 60), instances=instances) as cluster:
            prompts = make_prompts(setting, cluster, 30, 60)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(Until("requests that decode", lambda: _num_movable(cluster) == len(prompts)), Pace.STEPS_LAST)
            if instances > 2:  # each instance has requests of its own by now: whatever a drop frees, the third one has
                drop(cluster)
            source, destination = _ends(cluster, source_stages)
            moved = _movable(source)[:NUM_MOVES]
            _move(cluster, moved, source, destination)
            _move(cluster, [name for name in moved if name in destination.queues.running][:1], destination, source)
            cluster.run()
            totals = counters(cluster.core)
            num_moved, num_computed = totals["migrations_as_tokens"], totals["migrated_tokens"]
            evidence = f"{num_moved:.0f} requests moved, {num_computed:.0f} tokens computed for that"
            return Outcome(observed(cluster, prompts), num_moved > len(moved) and num_computed > 0, evidence)

    return scenario


def _ends(cluster: LocalCluster, source_stages: int) -> tuple[Group, Group]:
    source, destination = sorted(cluster.core.groups.values(), key=lambda g: len(g.stages) != source_stages)
    return source, destination


def _movable(group: Group) -> list[str]:
    return [s.request_id for s in group.queues.running.values() if may_go(s)]


def _num_movable(cluster: LocalCluster) -> int:
    return sum(len(_movable(group)) for group in cluster.core.groups.values())


def _move(cluster: LocalCluster, names: list[str], source: Group, destination: Group) -> None:
    """Have requests go, and wait until they have arrived, or stay. Their source steps as little as that allows, so that
    they are caught up with."""
    for name in names:
        decodes = Until(f"{name} decodes", lambda name=name: may_go(cluster.core.state.requests[name]))  # type: ignore[misc]
        cluster.run(decodes, Pace.STEPS_LAST)
        cluster.request_migration(name, destination.group_id, MigrationKind.TOKENS, STEP_TOKENS)
    is_over = Until("the end of migrations", lambda: cluster.core.migrations.is_idle)
    cluster.run(is_over, Pace.STEPS_LAST, source.worker_ids)


MIGRATIONS: dict[str, Event] = {
    "migrate while decoding": Event(migrate_while_decoding, TWO),
    "migrate as tokens, instance to instance": Event(migrate_as_tokens(1, 1), Needs(1, 2)),
    "migrate as tokens, pipeline to instance": Event(migrate_as_tokens(2, 1), Needs(2, 3)),
    "migrate as tokens, instance to pipeline": Event(migrate_as_tokens(1, 2), Needs(2, 3)),
}
"""By name."""
