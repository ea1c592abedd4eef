"""What the core decided once: schedules whose actions were written down.

Work that makes the core cheaper must not change a decision, so each schedule's actions are compared, as a digest, with
those written down before. They were written anew the last time for the schedules in which a dead worker comes back
(since then it comes back empty, and its recovery fills it); before that when dispatch began to look at the prompts
ahead, the overload policy at how long requests stay, and merged groups ran as many requests as their members. A change
that is meant to decide otherwise records anew what it changes, and says why: ``python
tests/core/test_golden_schedules.py`` prints the table.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, FakeCluster, Faults

POLICIES = ("drop", "recompute", "swap", "migrate", "pipeline")

GOLDEN: dict[tuple[str, int], str] = {
    ("drop", 1047): "f8915bb964f1cd50",
    ("drop", 1006): "06cd515dc39485c2",
    ("drop", 1030): "c947c587762a9d9b",
    ("drop", 1049): "253ee6f0362b5bbf",
    ("drop", 1038): "5c2a087cec004b72",
    ("drop", 1007): "b0fd65a2700bde81",
    ("recompute", 1054): "4d5077c33631b9b3",
    ("recompute", 1040): "e4912a6107e48a07",
    ("recompute", 1016): "af7fc52d5cfb41b7",
    ("swap", 1000): "15da9f46ccb68385",
    ("swap", 1050): "59780939de305ac9",
    ("swap", 1009): "ff5a574447d462fc",
    ("swap", 1055): "09871e15e12cfac4",
    ("migrate", 1045): "6b4b5018d074e28b",
    ("migrate", 1040): "5bd9c49f58637e69",
    ("migrate", 1007): "e3a7504c137a7e52",
    ("migrate", 1049): "994f71b97b4ac005",
    ("pipeline", 1019): "167593a4f23b2f0b",
    ("pipeline", 1051): "f9d6f840bdf3feb4",
    ("pipeline", 1009): "496440de65576932",
}


def schedule(policy: str, seed: int) -> FakeCluster:
    """Bursts and calm on 2 to 12 workers: prefixes, priorities, cancels, orders, failures and deaths."""
    rng = random.Random(f"{policy} {seed}")
    num_workers = rng.choice([2, 3, 4, 5, 7, 8, 10, 12])
    full_blocks = rng.randint(16, 60)
    faults = Faults()
    if rng.random() < 0.5:
        faults = Faults(apply=0.1, offer=0.05, load=0.1, move=0.05, step=0.002, swap=0.05, remote=0.05, budget=6)
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=full_blocks, num_layers=rng.choice([6, 8, 12]), seed=seed, policy=policy,
        auto_restore=rng.random() < 0.8, max_seqs=rng.choice([4, 16]), max_tokens=rng.choice([16, 32, 64]),
        prefix_caching=rng.random() < 0.7, shard_bytes=rng.choice([64 * 1024, 1024, 4096]), faults=faults,
        eager=rng.random() < 0.7, host_slots=rng.choice([8, 64, 500]), swap_budget=rng.choice([1, 4, None]),
        migrate_threshold=rng.choice([1.0, 3.0, 8.0]), exchange=rng.choice(["auto", "auto", "live", "transfer"]),
    )
    cluster.recording = []
    cluster.check_every_event = False
    prefix = [rng.randrange(1, 60) for _ in range(16)]
    room = full_blocks * BLOCK_SIZE
    at_ms, number = 0.0, 0
    for _ in range(rng.randint(1, 3)):
        crowd = rng.choice([3, 8, 20])
        for _ in range(rng.randint(2, crowd) * num_workers):
            at_ms += rng.expovariate(num_workers / rng.choice([1.0, 8.0]))
            length = rng.randint(1, 40) if rng.random() < 0.95 else rng.randint(room // 2, room)
            prompt = (prefix[: rng.choice([0, 0, 8, 16])] + [rng.randrange(1, 60) for _ in range(length)])[: room - 4]
            cluster.submit(
                f"r{number}", prompt, min(rng.randint(1, 90), room - len(prompt)), at_ms,
                priority=rng.choice([0, 0, 0, 1]), stop_token_ids=(7, 11) if rng.random() < 0.3 else (),
                prompt_logprobs=0 if rng.random() < 0.05 else None,
            )
            if rng.random() < 0.1:
                cluster.cancel(f"r{number}", at_ms + rng.uniform(0, 200))
            number += 1
        at_ms += rng.choice([50.0, 700.0, 3000.0])
    for _ in range(rng.choice([0, 0, 3])):
        cluster.order_at(rng.choice(["drop", "restore"]), rng.uniform(0, at_ms))
    for worker in rng.sample(range(num_workers), rng.choice([0, 0, 1, min(3, num_workers)])):
        dies_ms = rng.uniform(0, at_ms)
        cluster.kill_at(worker, dies_ms)
        cluster.restart_at(worker, dies_ms + rng.uniform(40, 900))
    for worker in range(num_workers):  # in the end everybody is back
        cluster.restart_at(worker, at_ms + 2_000.0 + worker)
    params, horizon_s = cluster.core.params, 0.0 if rng.random() < 0.6 else 1.0
    cluster.core.params = replace(params, overload=replace(params.overload, horizon_s=horizon_s))
    return cluster


def digest(cluster: FakeCluster) -> str:
    """Of everything that was told and answered. Six digits of a float count: sums may be formed in another order."""
    assert cluster.recording is not None
    text = "\n".join(f"{now} {event} {actions}" for event, now, actions in cluster.recording)
    # Fields that requests got later; left at their defaults they say nothing.
    text = text.replace(", has_default_length=False", "").replace(", tenant=''", "")
    # What a plan merges, which its layouts tell as well, got into the record of the decision later.
    text = re.sub(r"\('merges', \[.*?\]\), ", "", text)
    # How much of the steps prompts took, which a verdict was formed with, got into its record later.
    text = re.sub(r"\('prefill_fill', [^)]*\), |, \('prefill_fill', [^)]*\)", "", text)
    # How a set prints is not how it counts.
    text = re.sub(r"frozenset\(\{(.*?)\}\)", lambda found: str(sorted(found[1].split(", "))), text)
    text = re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda found: f"{float(found[0]):.6g}", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run(policy: str, seed: int) -> FakeCluster:
    """The schedule, to its end."""
    cluster = schedule(policy, seed)
    cluster.run()
    cluster.expect_outputs()
    return cluster


@pytest.mark.parametrize(("policy", "seed"), GOLDEN)
def test_the_same_events_give_the_actions_that_they_have_always_given(policy: str, seed: int) -> None:
    assert digest(run(policy, seed)) == GOLDEN[policy, seed]


if __name__ == "__main__":
    for policy, seed in GOLDEN:
        print(f'    ("{policy}", {seed}): "{digest(run(policy, seed))}",')  # noqa: T201
