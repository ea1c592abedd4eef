"""Scenarios of ``jettison verify`` with offline requests beside online ones (``--offline harvest``).

In one instance, or in one pipeline of several. Both classes are compared. As in ``live.verify.scenarios``, each says
whether what it is about really happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jettison.core.ladder.free import is_checkpointed
from jettison.core.serving.group import Group
from jettison.core.serving.slices import Slice
from jettison.core.totals import counters
from jettison.cost.hardware import HardwareProfile
from jettison.cost.predictor import nominal_cost
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify.applicable import Needs
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NEVER_MS,
    NUM_REQUESTS,
    Event,
    Outcome,
    Scenario,
    Setting,
    blocks_for_all,
    finish,
    make_cluster,
    make_config,
    make_prompts,
    moves_over,
    observed,
    produced,
    submit,
)
from jettison.types import ServiceClass

NUM_STAGES = 2
"""Of the pipelines."""
PLACES = 4
"""Of each instance. A burst takes half of them."""
NUM_ONLINE = 12
LONG = 120
SHORTEST_LONG = 60
"""Tokens of the long prompts, where the context has room for them and for an answer."""
FAST, SLOW = 1e15, 1.0
"""Bytes a second between KV and host pool, by a profile: copying is sooner over than computing again, or never is."""
KNOWN_STEPS = 8
"""After so many steps it is known what one takes."""


@contextmanager
def _harvesting(
    setting: Setting, num_blocks: int, num_stages: int, profile: HardwareProfile | None = None, **flags: object
) -> Iterator[LocalCluster]:
    """One group of so many stages, whose instances have ``num_blocks`` blocks together beside all parameters.

    Places are few: what a drop frees of a large model would hold any number of requests.
    """
    base: dict[str, Any] = {"offline": "harvest", "checkpoint_free": 1.0, "max_num_seqs": PLACES}
    blocks = -(-num_blocks // num_stages)
    with make_cluster(setting, num_blocks=blocks, instances=num_stages, profile=profile, **base | flags) as cluster:
        _merge_to(cluster, 1)
        yield cluster


def _merge_to(cluster: LocalCluster, num_groups: int) -> None:
    """Of groups of one instance each."""
    for _ in range(len(cluster.core.groups) - num_groups):
        cluster.request_drop()
        cluster.run(moves_over(cluster, "the drop"))


def _crowd(setting: Setting) -> int:
    """Blocks for half of the offline requests: a burst evicts some of them."""
    return (blocks_for_all(setting, 40) - 16) // 2


def _beside_bursts(cluster: LocalCluster, setting: Setting, ready: Until | None = None) -> list[list[int]]:
    """Offline requests in all places, and bursts of online ones, each when things are ``ready`` for it: the prompts of
    all."""
    (group,) = cluster.core.groups.values()
    size = len(group.stages) * PLACES // 2
    prompts = _offline(cluster, setting)
    for first in range(NUM_REQUESTS, len(prompts), size):
        cluster.run(produced(cluster, setting.num_output_tokens // 2))
        if ready is not None:
            cluster.run(ready, Pace.STEPS_LAST)
        submit(cluster, prompts[first : first + size], setting.num_output_tokens // 3, first)
    return prompts


def _one_by_one(cluster: LocalCluster, setting: Setting, ready: Until) -> list[list[int]]:
    """The same, each online request when things are ``ready`` for it."""
    prompts = _offline(cluster, setting)
    for index in range(NUM_REQUESTS, len(prompts)):
        cluster.run(produced(cluster, setting.num_output_tokens // 4))
        cluster.run(ready, Pace.STEPS_LAST)
        submit(cluster, [prompts[index]], setting.num_output_tokens // 3, index)
    return prompts


def _offline(cluster: LocalCluster, setting: Setting) -> list[list[int]]:
    """Submit the offline requests: the prompts of all."""
    prompts = make_prompts(setting, cluster, 10, 40, NUM_REQUESTS + NUM_ONLINE)
    submit(cluster, prompts[:NUM_REQUESTS], setting.num_output_tokens, service_class=ServiceClass.OFFLINE)
    return prompts


def _end(cluster: LocalCluster, until: Until | None = None) -> dict[str, float]:
    """Serve all, and check what is left: no KV at the host. The totals."""
    if until is not None:
        cluster.run(until)
    cluster.run()
    cluster.core.check()
    assert cluster.core.hosted.is_idle, "KV is left at the host"
    return counters(cluster.core)


def abandoned_steps(num_stages: int) -> Scenario:
    """Online requests arrive while steps of offline ones alone are under way, and find that they take too long."""

    def scenario(setting: Setting) -> Outcome:
        blocks = 2 * blocks_for_all(setting, 40)
        with _harvesting(
            setting, blocks, num_stages, slo_ttft_ms=0.001, safepoint_layers=1, checkpoint_free=0.0,
            offline_slices="off",
        ) as cluster:
            prompts = _into_offline_steps(cluster, setting)
            totals = _end(cluster)
            asked = sum(record.kind == "step_abandon_asked" for record in cluster.records)
            evidence = (
                f"{totals['steps_abandoned']:.0f} steps with {totals['tokens_abandoned']:.0f} tokens given up, "
                f"{asked} asked to"
            )
            return Outcome(observed(cluster, prompts), totals["steps_abandoned"] > 0, evidence)

    return scenario


def shed_rows(num_stages: int) -> Scenario:
    """The same, and what the steps have computed is kept: offline rows go on from there, beside the online ones that
    they join, and are stopped anew."""

    def scenario(setting: Setting) -> Outcome:
        blocks = 2 * blocks_for_all(setting, 40)
        with _harvesting(
            setting, blocks, num_stages, safepoint_layers=1, checkpoint_free=0.0, max_num_seqs=2 * NUM_REQUESTS
        ) as cluster:
            prompts = _into_offline_steps(cluster, setting)
            totals = _end(cluster)
            shed, resumed, layers = totals["steps_shed"], totals["slices_resumed"], _layers_behind(cluster)
            evidence = (
                f"{shed:.0f} steps shed rows behind {len(layers)} different layers, which went on {resumed:.0f} times; "
                f"{totals['slices_discarded']:.0f} given up"
            )
            return Outcome(observed(cluster, prompts), shed > 0 and resumed > 0, evidence)

    return scenario


def discarded_rows(num_stages: int) -> Scenario:
    """The same where places are short, and clients of the batch leave: what is kept of their steps is given up."""

    def scenario(setting: Setting) -> Outcome:
        blocks = 2 * blocks_for_all(setting, 40)
        with _harvesting(setting, blocks, num_stages, safepoint_layers=1, checkpoint_free=0.0) as cluster:
            prompts = _into_offline_steps(cluster, setting, leaves=True)
            totals = _end(cluster)
            given_up, tokens = totals["slices_discarded"], totals["tokens_discarded"]
            shed = totals["steps_shed"]
            evidence = f"{shed:.0f} steps shed rows, {given_up:.0f} times these were given up, {tokens:.0f} tokens"
            return Outcome(observed(cluster, prompts), given_up > 0, evidence)

    return scenario


def _into_offline_steps(cluster: LocalCluster, setting: Setting, *, leaves: bool = False) -> list[list[int]]:
    """Offline requests, and online ones, each of which comes in a step of offline requests alone; ``leaves``: once
    the client of an offline request goes while rows of its are kept. The prompts of all."""
    prompts = make_prompts(setting, cluster, 10, 40, 2 * NUM_REQUESTS)
    submit(cluster, prompts[:NUM_REQUESTS], setting.num_output_tokens, service_class=ServiceClass.OFFLINE)
    cluster.run(produced(cluster, KNOWN_STEPS * NUM_REQUESTS))
    for index, prompt in enumerate(prompts[NUM_REQUESTS:], start=NUM_REQUESTS):
        cluster.run(Until("a step of offline requests alone", lambda: _is_armed(cluster) or not cluster.num_open))
        submit(cluster, [prompt], 3, index)
        if leaves:
            cluster.run(_kept_or_on(cluster))
            if (kept := _kept(cluster)) is not None:
                leaves = False
                cluster.cancel(kept.rows[-1].state.request_id)
    return prompts


def _kept_or_on(cluster: LocalCluster) -> Until:
    """Rows are kept, or some tokens have come meanwhile."""
    some = produced(cluster, 2 * NUM_REQUESTS)
    return Until("rows that are kept", lambda: _kept(cluster) is not None or some())


def _kept(cluster: LocalCluster) -> Slice | None:
    (group,) = cluster.core.groups.values()
    return group.slices.kept


def _layers_behind(cluster: LocalCluster) -> set[object]:
    return {record.fields["layers"] for record in cluster.records if record.kind == "step_shed"}


def _is_armed(cluster: LocalCluster) -> bool:
    """The newest step of the group may be given up, and no online request is there yet."""
    (group,) = cluster.core.groups.values()
    flight = next(reversed(group.in_flight.values()), None)
    is_alone = all(state.is_offline for state in cluster.core.state.requests.values())
    return is_alone and flight is not None and flight.step.safepoint_layers > 0


class _WholeFrees:
    """Requests that were freed from a complete checkpoint: only their open block is computed again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.num = 0
        self._cluster = cluster
        self._seen = self._totals()

    def is_over(self) -> bool:
        """Look, after each unit of work; whether all requests have ended."""
        (frees, tokens), self._seen = self._seen, self._totals()
        # Of several at once that have less than a block to compute on average one has.
        self.num += self._seen[1] - tokens < BLOCK_SIZE * (self._seen[0] - frees)
        return self._cluster.num_open == 0

    def _totals(self) -> tuple[int, int]:
        counters = self._cluster.core.state.counters
        return counters.checkpoint_frees, counters.freed_recomputed_tokens


def freed_from_checkpoints(num_stages: int) -> Scenario:
    """Offline requests of which every full block is at the host give their blocks up to online ones, and come back."""

    def scenario(setting: Setting) -> Outcome:
        with _harvesting(
            setting, _crowd(setting), num_stages, _with_link(setting, FAST), offline="scheduler+checkpoint"
        ) as cluster:
            whole = _WholeFrees(cluster)
            ready = Until("a complete checkpoint", lambda: whole.is_over() or _is_whole(cluster))
            prompts = _one_by_one(cluster, setting, ready)
            totals = _end(cluster, Until("the end of all requests", whole.is_over))
            frees, back = totals["checkpoint_frees"], totals["prefetched_blocks"]
            evidence = f"{frees:.0f} frees, {whole.num} of complete checkpoints; {back:.0f} blocks back before steps"
            return Outcome(observed(cluster, prompts), whole.num > 0 and back > 0, evidence)

    return scenario


def _complete(cluster: LocalCluster) -> Until:
    return Until("a complete checkpoint", lambda: _is_whole(cluster) or not cluster.num_open)


def _is_whole(cluster: LocalCluster) -> bool:
    """The next victim's full blocks are all at the host, and are when its step has ended."""
    (group,) = cluster.core.groups.values()
    state = next(iter(group.queues.running_offline()), None)
    entry = None if state is None else cluster.core.hosted.store.entry(state)
    if state is None or entry is None:
        return False
    return (entry.pools.num_tokens or 0) > (state.num_computed + state.num_pending) - BLOCK_SIZE


def prefetched_beside_steps(num_stages: int) -> Scenario:
    """The same, and they come back beside steps of others."""

    def scenario(setting: Setting) -> Outcome:
        with _harvesting(setting, _crowd(setting), num_stages, _with_link(setting, FAST)) as cluster:
            prompts = _beside_bursts(cluster, setting, _complete(cluster))
            totals = _end(cluster)
            frees, back = totals["checkpoint_frees"], totals["prefetched_blocks"]
            evidence = f"{frees:.0f} frees, {back:.0f} blocks back beside steps"
            return Outcome(observed(cluster, prompts), frees > 0 and back > 0, evidence)

    return scenario


def discarded(num_stages: int) -> Scenario:
    """There is no host memory: what victims have is thrown away."""

    def scenario(setting: Setting) -> Outcome:
        with _harvesting(setting, _crowd(setting), num_stages, host_memory=0) as cluster:
            prompts = _beside_bursts(cluster, setting)
            totals = _end(cluster)
            discards, tokens = totals["offline_discards"], totals["recomputed_tokens"]
            evidence = f"{discards:.0f} requests without a checkpoint evicted, {tokens:.0f} tokens computed again"
            happened = discards > 0 and tokens > 0 and totals["checkpointed_blocks"] == 0
            return Outcome(observed(cluster, prompts), happened, evidence)

    return scenario


def given_up_for_a_slow_link(num_stages: int) -> Scenario:
    """Checkpoints whose way back takes longer, by the profile, than computing them again: the link has become slower
    since they were made, or none would have been."""

    def scenario(setting: Setting) -> Outcome:
        with _harvesting(setting, _crowd(setting), num_stages, _with_link(setting, FAST)) as cluster:
            state = cluster.core.state
            slow = replace(state.params, profile=_with_link(setting, SLOW))

            def is_slow() -> bool:
                if _is_whole(cluster):
                    state.params = slow
                return state.params is slow or not cluster.num_open

            prompts = _one_by_one(cluster, setting, Until("a complete checkpoint", is_slow))
            totals = _end(cluster)
            frees, given_up = totals["checkpoint_frees"], totals["hosted_given_up"]
            evidence = f"{frees:.0f} frees, {given_up:.0f} checkpoints given up and computed again"
            return Outcome(observed(cluster, prompts), frees > 0 and given_up > 0, evidence)

    return scenario


def _with_link(setting: Setting, bytes_per_s: float) -> HardwareProfile:
    """What a copy adds to a step is nothing: by the profile checkpoints keep up with any model's KV."""
    num_layers = assemble(make_config(setting, BLOCK_SIZE, 1)).shape.num_layers
    return HardwareProfile(
        nominal_cost(num_layers), link_bytes_per_s=1e9, link_latency_s=0.0, remap_fixed_s=0.0, remap_s_per_byte=0.0,
        host_copy_bytes_per_s=bytes_per_s, disk_bytes_per_s=1e9, beside_bytes_per_s=bytes_per_s, beside_byte_s=0.0,
    )


def paused_in_a_drop(num_instances: int) -> Scenario:
    """A burst takes all that offline requests have, their group pauses, and then drops layers: they go along, stored,
    and run on in the pipeline. Of three instances two are a pipeline before."""

    def scenario(setting: Setting) -> Outcome:
        num_tokens = setting.num_output_tokens // 3
        blocks = -(-(LONG + num_tokens) // BLOCK_SIZE) + 6  # one of the long ones, and little else
        with make_cluster(
            setting, num_blocks=blocks, instances=num_instances, profile=_with_link(setting, FAST), offline="harvest",
            checkpoint_free=1.0, overload_min_wait_ms=NEVER_MS, max_num_seqs=_places(setting, blocks, num_instances),
        ) as cluster:
            _merge_to(cluster, 2)
            num_short, num_long = 2 * NUM_REQUESTS, _num_for_all_blocks(cluster)
            longest = min(LONG, cluster.assembly.limits.max_model_len - num_tokens)
            prompts = make_prompts(setting, cluster, 10, 40, num_short)
            prompts += make_prompts(setting, cluster, longest * 2 // 3, longest, num_long)
            submit(cluster, prompts[:num_short], num_tokens, service_class=ServiceClass.OFFLINE)
            cluster.run(Until("a checkpoint", lambda: _has_checkpoint(cluster)), Pace.STEPS_LAST)
            submit(cluster, prompts[num_short:], num_tokens, num_short)
            cluster.run(Until("a pause", lambda: bool(_paused(cluster))))
            cluster.request_drop()
            began = bool(cluster.core.merges) and bool(_paused(cluster))
            for index in range(2 * num_short, len(prompts)):
                cluster.cancel(f"request-{index}")  # they were there to fill a large pipeline
            finish(cluster, "the drop")
            totals = _end(cluster)
            pauses, carried = totals["offline_pauses"], totals["hosted_carried"]
            evidence = f"{pauses:.0f} pauses, a drop began in one: {began}; {carried:.0f} stored requests went along"
            return Outcome(observed(cluster, prompts), began and totals["drops"] > 0 and carried > 0, evidence)

    return scenario


def _num_for_all_blocks(cluster: LocalCluster) -> int:
    """Of the long requests: more than all groups hold."""
    num_blocks = sum(group.blocks.capacity for group in cluster.core.groups.values())
    return max(2 * NUM_REQUESTS, NUM_REQUESTS + num_blocks // (SHORTEST_LONG // BLOCK_SIZE))


def _places(setting: Setting, num_blocks: int, num_instances: int) -> int:
    """Of each instance, for those as well that fill what a drop of all but one copy of the parameters frees."""
    sized = assemble(make_config(setting, BLOCK_SIZE, 1))
    freed_bytes = (num_instances - 2) * sized.shape.parameter_bytes
    freed_blocks = freed_bytes // (sized.shape.num_layers * sized.shape.block_bytes_per_layer(BLOCK_SIZE))
    return MAX_NUM_SEQS + (num_instances * num_blocks + freed_blocks) // (SHORTEST_LONG // BLOCK_SIZE)


def _has_checkpoint(cluster: LocalCluster) -> bool:
    """A request that is running offline has KV at the host."""
    return any(is_checkpointed(s) for g in cluster.core.groups.values() for s in g.queues.running_offline())


def _paused(cluster: LocalCluster) -> list[Group]:
    return [group for group in cluster.core.groups.values() if group.queues.offline_holders]


def _events(num_stages: int, where: str = "") -> dict[str, Event]:
    kept = Needs(num_stages, num_stages, sheds_rows=True)
    return {
        f"harvest: rows that stop and go on{where}": Event(shed_rows(num_stages), kept),
        f"harvest: rows that stop and are given up{where}": Event(discarded_rows(num_stages), kept),
    } | {
        f"harvest: {name}{where}": Event(scenario, Needs(max(stages, num_stages), max(stages, num_stages)))
        for name, scenario, stages in (
            ("abandoned steps", abandoned_steps(num_stages), 1),
            ("freed from checkpoints", freed_from_checkpoints(num_stages), 1),
            ("prefetched beside steps", prefetched_beside_steps(num_stages), 1),
            ("discarded", discarded(num_stages), 1),
            ("slow link, computed again", given_up_for_a_slow_link(num_stages), 1),
            ("pause in a drop", paused_in_a_drop(num_stages + 1), num_stages + 1),
        )
    }


HARVEST: dict[str, Event] = _events(1)
"""By name."""

HARVEST_IN_PIPELINES: dict[str, Event] = _events(NUM_STAGES, ", in a pipeline")
"""By name."""
