"""Every preemption has one of the reasons of one vocabulary, and the event log tells it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeCluster

import jettison.core
from jettison.core.preemption import Preempted, Preemption, told
from jettison.types import ServiceClass


def crowded(offline: str | None) -> FakeCluster:
    """More requests than the memory of one instance holds; with a batch some of them."""
    cluster = FakeCluster(
        policy="recompute", num_workers=1, full_blocks=40, host_slots=500, offline=offline, checkpoint_free=0.9
    )
    for i in range(8):
        rng = random.Random(f"crowd {i}")
        kind = ServiceClass.OFFLINE if offline is not None and i < 4 else ServiceClass.ONLINE
        prompt = [rng.randrange(1, 60) for _ in range(24 + i)]
        cluster.submit(f"r{i}", prompt, 60, 20.0 * i, service_class=kind, ignore_eos=True)
    cluster.run()
    return cluster


@pytest.mark.parametrize("offline", [None, "scheduler", "harvest"])
def test_the_log_tells_of_each_preemption_once_with_its_reason(offline: str | None) -> None:
    cluster = crowded(offline)
    records = [record.fields for record in cluster.records if record.kind == "preempted"]
    named = Counter(request_id for fields in records for request_id in fields["request_ids"])
    totals = [group.counters for group in cluster.core.groups.values()]
    assert sum(named.values()) == sum(total.num_preemptions for total in totals) > 0
    assert sum(fields["tokens"] for fields in records) == sum(total.num_recomputed_tokens for total in totals)
    assert {fields["reason"] for fields in records} <= {str(why) for why in Preemption}


def test_one_record_for_each_group_and_reason_of_an_event() -> None:
    fields = told([
        Preempted(0, Preemption.STEP, "a", 3), Preempted(1, Preemption.STEP, "b", 4),
        Preempted(0, Preemption.PAUSE, "c", 5), Preempted(0, Preemption.STEP, "d", 6),
    ])  # fmt: skip
    assert [tuple(told_of.values()) for told_of in fields] == [
        (0, Preemption.STEP, ["a", "d"], 9), (1, Preemption.STEP, ["b"], 4), (0, Preemption.PAUSE, ["c"], 5),
    ]  # fmt: skip


def test_every_reason_is_given_somewhere() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(jettison.core.__file__).parent.rglob("*.py"))
    assert not [why.name for why in Preemption if f"Preemption.{why.name}" not in sources]
