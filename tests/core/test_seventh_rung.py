"""A rung that the project knows nothing of: made here, named in ``--overload``, driven in virtual time and live.

``hush`` answers pressure by letting nobody new in for a while where a group is nearly full: it caps admission while memory
is short and lifts the cap when it is not. It gives way to a drop at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pytest
from fakes import FakeCluster

from jettison.config import EngineConfig
from jettison.core.ladder.lists import overload_name, parse_overload
from jettison.core.ladder.rung import Moment, Offer, Rung, register
from jettison.core.ports import Action, Record
from jettison.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HushOffer(Offer):
    """Let so many blocks be held at most."""

    cap_blocks: int


@register
class HushRung(Rung):
    """Caps admission at nine tenths of a group that is fuller than that."""

    name = "hush"
    rank = 45

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        if moment is not Moment.TICK:
            return
        for group in self.means.state.groups.values():
            is_short = group.used_blocks * 10 > group.capacity_blocks * 9
            if is_short and group.admission_cap_blocks is None and not self.means.moves.is_moving(group):
                cap = group.capacity_blocks * 9 // 10
                yield HushOffer(groups=(group.group_id,), why="nearly full", cap_blocks=cap)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        assert isinstance(offer, HushOffer)
        self.means.state.groups[offer.groups[0]].admission_cap_blocks = offer.cap_blocks
        return [Record("hushed", now_ns, {"group": offer.groups[0], "cap_blocks": offer.cap_blocks})]

    def leave(self, now_ns: int) -> list[Action]:
        over = [g for g in self.means.state.groups.values() if g.admission_cap_blocks is not None]
        over = [g for g in over if g.used_blocks * 2 < g.capacity_blocks]
        for group in over:
            group.admission_cap_blocks = None
        return [Record("hush_over", now_ns, {"group": g.group_id}) for g in over]

    def give_way(self, worker_ids: Collection[int], by: Rung, why: str, now_ns: int) -> list[Action]:
        for group in self.means.state.groups.values():
            if not set(worker_ids).isdisjoint(group.worker_ids):
                group.admission_cap_blocks = None
        return [Record("hush_gave_way", now_ns, {"to": by.name})]


def test_the_command_line_knows_it_and_its_place_in_the_ladder() -> None:
    spec = parse_overload("swap+hush+drop")
    assert spec.rungs == ("swap", "hush", "restore", "drop", "scale", "shed")
    assert overload_name(*spec[:1], static_pipeline=False) == "swap+hush+drop"
    assert EngineConfig.resolve(model="m", overload="hush+drop").overload.policy == "hush+drop"
    with pytest.raises(ConfigError, match="husk"):
        EngineConfig.resolve(model="m", overload="husk")


@pytest.mark.parametrize("policy", ["hush", "hush+drop", "swap+hush+migrate+drop"])
@pytest.mark.parametrize("seed", range(3))
def test_it_works_beside_the_others(policy: str, seed: int) -> None:
    cluster = FakeCluster(policy=policy, full_blocks=40, host_slots=500, eager=True, seed=seed)
    rng = random.Random(seed)
    for i in range(40):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 60, 0.5 * i)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    kinds = {r.kind for r in cluster.records}
    assert "hushed" in kinds
    if "drop" in policy:
        assert "drop" in kinds
        assert any(r.kind == "hush_gave_way" and r.fields["to"] == "drop" for r in cluster.records)
