"""Whether steps are filled with offline work: as long as online requests are foreseen to find their blocks."""

from __future__ import annotations

import itertools

import pytest
from fakes import BLOCK_SIZE, FakeCluster

from jettison.core.load.outlook import Outlook
from jettison.core.ports import Record
from jettison.policy.forecast import Arrivals, Load
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.onlineneed import most_growth_tokens
from jettison.types import ServiceClass

OFFLINE = OfflineParams(slo=SloParams(ttft_s=2.0, tpot_s=0.05), checkpoints=False, prefetches=False)


def told(cluster: FakeCluster) -> list[Record]:
    return [r for r in cluster.records if r.kind in ("filling_stops", "filling_goes_on")]


def chats_beside_a_batch(num_chats: int, full_blocks: int) -> FakeCluster:
    """A batch, and chats that hold 3 blocks each at first and 20 in the end."""
    cluster = FakeCluster(
        num_workers=1, full_blocks=full_blocks, offline=OFFLINE, policy="recompute", prefix_caching=False,
    )
    for i in range(4):
        cluster.submit(f"o{i}", [1 + i] * 12, 40, 0.0, service_class=ServiceClass.OFFLINE)
    for i in range(num_chats):
        cluster.submit(f"r{i}", [1 + i] * 12, 64, 5.0 * i)
    return cluster


def test_steps_are_filled_where_all_that_is_foreseen_finds_room() -> None:
    cluster = chats_beside_a_batch(2, 400)
    cluster.run()
    assert not told(cluster)
    cluster.expect_outputs()


def test_steps_are_not_filled_from_before_memory_runs_out_until_it_is_there_again() -> None:
    cluster = chats_beside_a_batch(3, 48)
    cluster.run()
    records = told(cluster)
    assert [r.kind for r in records[:1]] == ["filling_stops"]
    kinds = [r.kind for r in records]
    assert all(before != after for before, after in itertools.pairwise(kinds)), "only what is new is told"
    for record in records:
        fields = record.fields
        need = fields["online_blocks"] + fields["growth_blocks"]  # type: ignore[operator]
        assert (need > fields["blocks"]) is (record.kind == "filling_stops")
        assert fields["group"] == 0 and fields["ahead_s"] == 2.0
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_what_comes_while_a_request_stays_has_to_find_room_not_only_what_comes_at_once(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chats a second with long answers: those of two seconds find room, those of one stay do not."""
    load = Load([], [], Arrivals(5.0, 5.0, 60.0, 12.0, (2000.0,)))
    monkeypatch.setattr(Outlook, "load", lambda self, groups, share=None: load)
    cluster = chats_beside_a_batch(40, 1600)
    assert most_growth_tokens(load, 0.05, 2.0) < 1600 * BLOCK_SIZE / 2
    cluster.run()
    first = told(cluster)[0]
    assert first.kind == "filling_stops" and int(str(first.fields["online_blocks"])) < 800
    cluster.expect_outputs()
