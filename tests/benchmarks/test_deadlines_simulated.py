"""Twenty random batches with completion windows beside a chat, in virtual time, while instances sleep: none is late.

``JETTISON_DEADLINE_SEEDS=20`` is the long run.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent.parent / room) for room in ("sim", "simulate")]

from scenarios import COST, PROFILE
from specs import deployment

from benchmarks.chat.deadlines_simulated import Scene, one_seed, row_of
from jettison.cost.deployment import deployment_to_document
from longrun import part_of

SLOW = replace(COST, step_s=0.05, token_layer_s=2e-4)
"""A decode step of one takes 60 ms: minutes of load are few steps."""

SCENE = Scene(
    cluster={"description": deployment_to_document(
        deployment(num_instances=4, num_blocks=200, profile=replace(PROFILE, cost=SLOW, disk_bytes_per_s=1e7))
    )},
    settings={"max_num_seqs": 4, "slo_tpot_ms": 400, "slo_ttft_ms": 4000}, sleep_after_s=10.0, chat_s=900.0,
    rate_per_s=0.1, chat_lengths=(30, 12), lines=(40, 160), prompts=(20, 60), answers=(6, 16), longest=40,
)  # fmt: skip

NUM_SEEDS = int(os.environ.get("JETTISON_DEADLINE_SEEDS", "1"))


@pytest.mark.parametrize("num_tenants", part_of([1, 3], [3]))
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_batch_is_late_and_instances_sleep_all_the_same(seed: int, num_tenants: int) -> None:
    row = row_of(seed, *one_seed(replace(SCENE, num_tenants=num_tenants), seed))
    assert row["batches"] == 20 and not row["late_batches"], row
    assert row["wakes_for_deadlines"], row
    assert row["awake_instance_s"] < 0.9 * row["all_awake_instance_s"], row
