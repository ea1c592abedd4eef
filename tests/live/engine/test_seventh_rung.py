"""A rung that the project knows nothing of: made here, named in ``--overload``, driven in virtual time and live.

``hush`` answers pressure by letting no newcomer in for a while where a group is nearly full: it caps admission while
memory is short and lifts the cap when it is not. It gives way to a drop at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "simulate"))

from specs import spec

from jettison.config import EngineConfig
from jettison.config import rungs as overload_words
from jettison.core.ladder import rung as ladder_rung
from jettison.core.ladder.lists import overload_name, parse_overload
from jettison.core.ladder.rung import Moment, Offer, Rung, register
from jettison.core.ports import Action, Record
from jettison.device.model.create import create_model
from jettison.errors import ConfigError
from jettison.live.engine.local_cluster import LocalCluster, Until
from jettison.live.verify.scenarios import Setting, make_cluster, make_prompts, observed, submit
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import cases_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HushOffer(Offer):
    """Let so many blocks be held at most."""

    cap_blocks: int


class HushRung(Rung):
    """Caps admission at nine tenths of a group that is fuller than that."""

    name = "hush"
    rank = 45

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        if moment is Moment.BEFORE_STEPS:
            return
        for group in self.means.state.groups.values():
            is_short = group.blocks.num_used * 10 > group.blocks.capacity * 9
            if is_short and group.blocks.admission_cap is None and not self.means.moves.is_moving(group):
                cap = group.blocks.capacity * 9 // 10
                yield HushOffer(groups=(group.group_id,), why="nearly full", cap_blocks=cap)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        assert isinstance(offer, HushOffer)
        self.means.state.groups[offer.groups[0]].blocks.cap_admission(self.name, offer.cap_blocks)
        return [Record("hushed", now_ns, {"group": offer.groups[0], "cap_blocks": offer.cap_blocks})]

    def leave(self, now_ns: int) -> list[Action]:
        over = [g for g in self.means.state.groups.values() if g.blocks.admission_cap is not None]
        over = [g for g in over if g.blocks.num_used * 2 < g.blocks.capacity]
        for group in over:
            group.blocks.uncap_admission(self.name)
        return [Record("hush_over", now_ns, {"group": g.group_id}) for g in over]

    def give_way(self, worker_ids: Collection[int], by: Rung | None, why: str, now_ns: int) -> list[Action]:
        for group in self.means.state.groups.values():
            if not set(worker_ids).isdisjoint(group.worker_ids):
                group.blocks.uncap_admission(self.name)
        return [Record("hush_gave_way", now_ns, {"to": by.name if by is not None else "an administrator"})]


@pytest.fixture(autouse=True, scope="module")
def _is_registered() -> Iterator[None]:
    """While the tests of this file run; other files' tests see the project's own rungs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_rung, "_RUNGS", dict(ladder_rung._RUNGS))
        patch.setattr(overload_words, "_WORDS", dict(overload_words._WORDS))
        register(HushRung)
        yield


def test_the_command_line_knows_it_and_its_place_in_the_ladder() -> None:
    spec = parse_overload("swap+hush+drop")
    assert spec.rungs == ("swap", "hush", "restore", "drop", "scale", "shed")
    assert overload_name(*spec[:1], static_pipeline=False) == "swap+hush+drop"
    assert EngineConfig.resolve(model="m", overload="hush+drop").overload.policy == "hush+drop"
    with pytest.raises(ConfigError, match="husk"):
        EngineConfig.resolve(model="m", overload="husk")


@pytest.mark.parametrize("policy", ["hush", "hush+drop", "swap+hush+migrate+drop"])
def test_it_works_beside_the_others_in_virtual_time(policy: str) -> None:
    (run,) = run_cases(cases_of(spec(variants=[policy]), "file"), num_processes=1)
    assert run.config["policy"] == policy
    assert run.requests.completed == run.requests.submitted > 0
    log = run.events["log"]
    assert "hushed" in {event["kind"] for event in log}
    if "drop" in policy:
        assert run.events["drops"] >= 1
        assert any(e["kind"] == "hush_gave_way" and e["to"] == "drop" for e in log)


@pytest.mark.parametrize("policy", ["hush", "swap+hush+migrate+drop"])
def test_it_works_beside_the_others_over_a_real_model(policy: str, tmp_path: Path) -> None:
    create_model(tmp_path / "m", arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3)
    setting = Setting(tmp_path / "m", "float64", 48, seed=1)
    outputs: list[list[list[int]]] = []
    for rungs, blocks in ((policy, 60), ("recompute", 400)):
        with make_cluster(setting, num_blocks=blocks, overload=rungs) as cluster:
            prompts = make_prompts(setting, cluster, 10, 40)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(Until("pressure", lambda: rungs == "recompute" or _hushed(cluster)))  # noqa: B023
            if "drop" in rungs:
                cluster.request_drop()
            cluster.run()
            outputs.append([list(row.output) for row in observed(cluster, prompts)])
            kinds = {record.kind for record in cluster.records}
            assert rungs == "recompute" or "hushed" in kinds
            assert "drop" not in rungs or {"hush_gave_way", "drop"} <= kinds
    assert outputs[0] == outputs[1], "the same tokens as with memory for all"


def _hushed(cluster: LocalCluster) -> bool:
    return any(group.blocks.admission_cap is not None for group in cluster.core.groups.values())
