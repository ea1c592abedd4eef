"""Scenarios of ``jettison verify`` with instances that sleep: what they served goes on elsewhere, and they come back.

As in ``live.verify.scenarios``, each says whether what it is about really happened.
"""

from __future__ import annotations

from jettison.core.moving.sleeping import EMPTY
from jettison.core.totals import counters
from jettison.live.engine.local_cluster import LocalCluster, Pace, Until
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    NUM_REQUESTS,
    TWO,
    Event,
    Outcome,
    Setting,
    finish,
    make_cluster,
    make_prompts,
    observed,
    produced,
    submit,
)
from jettison.types import WorkerId


def sleep_with_running_requests(setting: Setting) -> Outcome:
    """An instance sleeps while it serves: its requests migrate and end elsewhere. Woken, it is filled by its peer, and
    serves again."""
    blocks = -(-2 * NUM_REQUESTS * (40 + setting.num_output_tokens) // BLOCK_SIZE) + 16
    with make_cluster(setting, num_blocks=blocks) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40, 2 * NUM_REQUESTS)
        submit(cluster, prompts[:NUM_REQUESTS], setting.num_output_tokens)
        cluster.run(produced(cluster, 2 * NUM_REQUESTS))
        num_running = len(cluster.core.groups[0].queues.running)
        cluster.request_sleep(0)
        cluster.run(_asleep(cluster, 0), Pace.STEPS_LAST)
        num_open = cluster.num_open
        cluster.request_wake(0)
        finish(cluster, "waking")
        submit(cluster, prompts[NUM_REQUESTS:], setting.num_output_tokens, NUM_REQUESTS)
        cluster.run(produced(cluster, NUM_REQUESTS))
        num_served = sum(len(g.queues.running) for g in cluster.core.groups.values() if 0 in g.worker_ids)
        cluster.run()
        totals = counters(cluster.core)
        evidence = (
            f"{totals['migrations']:.0f} of {num_running} running requests migrated, {num_open} were open when it "
            f"slept; woken, it served {num_served}"
        )
        happened = totals["migrations"] > 0 and num_open > 0 and totals["wakes"] == 1 and num_served > 0
        return Outcome(observed(cluster, prompts), happened, evidence)


def all_sleep_and_a_request_wakes_one(setting: Setting) -> Outcome:
    """All sleep when what was accepted has ended; the parameters come back from the machine's copy."""
    blocks = -(-NUM_REQUESTS * (40 + setting.num_output_tokens) // BLOCK_SIZE) + 16
    with make_cluster(setting, num_blocks=blocks) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40, 2 * NUM_REQUESTS)
        submit(cluster, prompts[:NUM_REQUESTS], setting.num_output_tokens)
        cluster.run(produced(cluster, NUM_REQUESTS))
        cluster.request_sleep(0, 1, level=1)
        cluster.run(_asleep(cluster, 0, 1))
        submit(cluster, prompts[NUM_REQUESTS : NUM_REQUESTS + 1], setting.num_output_tokens, NUM_REQUESTS)
        cluster.run(Until("an instance that serves", lambda: bool(cluster.core.groups)), Pace.STEPS_LAST)
        finish(cluster, "waking")
        totals = counters(cluster.core)
        submit(cluster, prompts[NUM_REQUESTS + 1 :], setting.num_output_tokens, NUM_REQUESTS + 1)
        cluster.run()  # if these queue for long, the other one is woken, too
        evidence = f"{totals['sleeps']:.0f} slept, {totals['wakes']:.0f} was woken by a request"
        happened = totals["sleeps"] == 2 and totals["wakes"] == 1 and not totals["pulled_bytes"]
        return Outcome(observed(cluster, prompts), happened, evidence)


def _asleep(cluster: LocalCluster, *worker_ids: WorkerId) -> Until:
    workers = cluster.core.state.workers
    return Until("sleep", lambda: all(workers[w].is_asleep and workers[w].layout == EMPTY for w in worker_ids))


SLEEP: dict[str, Event] = {
    "sleep with running requests, wake": Event(sleep_with_running_requests, TWO),
    "all sleep, a request wakes one": Event(all_sleep_and_a_request_wakes_one, TWO),
}
"""By name."""
