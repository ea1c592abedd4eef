"""What the core decided once: schedules whose actions were written down, in words that outlive its classes.

Work that changes the core's structure, or makes it cheaper, must not change a decision: each schedule's events and
actions are written in a neutral form (``neutral``) and compared, as a digest, with what was written before. A change
that is meant to decide otherwise records anew what it changes, and says why: ``python
tests/core/test_golden_schedules.py`` prints the table, ``... SEED`` one schedule in full.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, FakeCluster, Faults
from neutral import NeutralLog

from jettison.policy.overload import Trigger

POLICIES = ("drop", "recompute", "swap", "migrate", "pipeline")

GOLDEN: dict[tuple[str, int], str] = {
    ("drop", 1047): "53e9da24909a99ab",
    ("drop", 1006): "fb7bde4e906897bb",
    ("drop", 1030): "6dd4edcfe03ebaa7",
    ("drop", 1049): "6d94e5fd5a115e83",
    ("drop", 1038): "ba3d6fd12c6c87a0",
    ("drop", 1007): "c7016f210b7e0072",
    ("drop", 2000): "b2c9060f2f35745d",
    ("drop", 2003): "49b388cd42ea04cd",
    ("drop", 2005): "0cb4c038bfa5b6fb",
    ("drop", 2011): "820f243d3ca0d2d2",
    ("recompute", 1054): "9abffd23a01b2aaf",
    ("recompute", 1040): "9c8d19bb27328c5f",
    ("recompute", 1016): "17305cb2184b1314",
    ("recompute", 2003): "da67916a659f928a",
    ("recompute", 2004): "0dbeacf5cb376597",
    ("swap", 1000): "0346d875f160148f",
    ("swap", 1050): "02f31d4272be0113",
    ("swap", 1009): "087d9602fe64e527",
    ("swap", 1055): "32f66b478b7638b8",
    ("swap", 2001): "c7cf8c0daef2e786",
    ("swap", 2006): "5d3c82315f55b513",
    ("swap", 2009): "118b4c41361229b2",
    ("migrate", 1045): "7d4791d52d4e2b70",
    ("migrate", 1040): "c73579c37922ecc7",
    ("migrate", 1007): "fa8af5ccfcf80c06",
    ("migrate", 1049): "a217dee914142b48",
    ("migrate", 2000): "f002cdf65840cdbd",
    ("migrate", 2006): "5f25c732fb7d87c9",
    ("migrate", 2009): "956dc9b9df08a6e4",
    ("pipeline", 1019): "47e06949ef335bbc",
    ("pipeline", 1051): "d0632ea449327e5e",
    ("pipeline", 1009): "7b638c107ddb67ad",
    ("pipeline", 2000): "7e86004798bae4f7",
    ("pipeline", 2004): "8fe3dd04317e9645",
    ("pipeline", 2006): "d8ff3eb418352001",
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
    params, trigger = cluster.core.params, Trigger.PRESSURE if rng.random() < 0.6 else Trigger.FORECAST
    cluster.core.reconfigure(replace(params, overload=replace(params.overload, trigger=trigger)))
    return cluster


def run(policy: str, seed: int) -> NeutralLog:
    """The schedule, to its end."""
    cluster = schedule(policy, seed)
    log = NeutralLog(cluster)
    cluster.run()
    cluster.expect_outputs()
    return log


@pytest.mark.parametrize(("policy", "seed"), GOLDEN)
def test_the_same_events_give_the_actions_that_they_have_always_given(policy: str, seed: int) -> None:
    assert run(policy, seed).digest == GOLDEN[policy, seed]


if __name__ == "__main__":
    for policy, seed in GOLDEN:
        if len(sys.argv) == 1:
            print(f'    ("{policy}", {seed}): "{run(policy, seed).digest}",')  # noqa: T201
        elif str(seed) == sys.argv[1]:
            print("\n".join(run(policy, seed).lines))  # noqa: T201
