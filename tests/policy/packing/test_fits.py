"""The baselines: where an arrival goes, who leaves an outgrown device, what load balancing moves."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from packing_util import CAPACITY, MIXES, placement, random_operations

from jettison.config.sections import Packer
from jettison.policy.packing.fits import BestFit, LoadBalance, WorstFit
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.named import PACKERS
from jettison.policy.packing.types import Arrive, Depart, Grip, PackingParams, Resize

PARAMS = PackingParams(capacity=CAPACITY)
TWO_USED = [Arrive("a", 2000), Arrive("b", 1000)]


@pytest.mark.parametrize(("packer", "device"), [(BestFit, 0), (WorstFit, 1)])
def test_an_arrival_goes_where_it_fits_best_or_where_most_is_free(packer: type[WorstFit], device: int) -> None:
    packing = packer(PARAMS)
    assert packing.apply(TWO_USED).opened == (0, 1)
    assert packing.apply([Arrive("c", 300)]).placed[0].device == device
    assert packing.apply([Depart("b"), Depart("a"), Depart("c")]).closed == ((1, 0) if device == 0 else (0, 1))
    assert not packing.active


@pytest.mark.parametrize("packer", [BestFit, WorstFit])
def test_the_newest_of_an_outgrown_device_is_computed_again_elsewhere(packer: type[WorstFit]) -> None:
    packing = packer(PARAMS)
    packing.apply([Arrive("old", 1000)])
    packing.apply([Arrive("new", 1000)])
    plan = packing.apply([Resize("old", 1500)])
    assert [move.request_id for move in plan.recomputed] == ["new"]
    assert plan.moves == plan.overfull == ()


@pytest.mark.parametrize("packer", [BestFit, WorstFit, LoadBalance])
def test_what_is_outgrown_is_told_while_no_device_can_be_opened(packer: type[WorstFit]) -> None:
    packing = packer(PARAMS, devices=[3])
    packing.apply([Arrive("old", 1000), Arrive("new", 1000)])
    assert packing.outgrown == ()
    assert packing.apply([Resize("old", 1500)]).overfull == packing.outgrown == (3,)
    packing.set_taking(4, True)
    assert packing.outgrown == ()
    packing.apply([])
    assert packing.device_of("new") == 4


def test_load_balancing_migrates_instead() -> None:
    packing = LoadBalance(PARAMS)
    packing.apply([Arrive("old", 1000)])
    packing.apply([Arrive("new", 1000)])
    plan = packing.apply([Resize("old", 1500)])
    assert [move.request_id for move in plan.moves] == ["new"]
    assert plan.recomputed == ()


def test_load_balancing_evens_out_and_then_rests() -> None:
    packing = LoadBalance(PARAMS)
    first = packing.apply([Arrive(f"a{i}", 200, device=0) for i in range(10)] + [Arrive("b", 200, device=1)])
    moves = [len(plan.moves) for plan in (first, *(packing.apply([]) for _ in range(8)))]
    assert moves == [1, 1, 1, 1, 0, 0, 0, 0, 0], "six and five"
    packing.pin("b", Grip.PINNED)
    packing.apply([Depart(f"a{i}") for i in range(10)])
    assert packing.apply([]).moves == ()


def test_every_packing_has_a_name_that_can_be_configured() -> None:
    assert get_args(Packer) == ("none", *PACKERS)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("mix", MIXES)
def test_every_packing_holds_everybody_and_says_what_it_changes(name: str, mix: str) -> None:
    packing = PACKERS[name](PARAMS, None)
    where: dict[str, int] = {}
    for operation in random_operations(random.Random(3), mix, 150):
        plan = packing.apply([operation])
        if isinstance(operation, Depart):
            del where[operation.request_id]
        where.update(plan.placed)
        where.update({move.request_id: move.destination for move in plan.moves + plan.recomputed})
        found = placement(packing)
        assert {n: device for device, on_it in found.items() for n in on_it} == where
        over = {device for device, on_it in found.items() if sum(on_it.values()) > CAPACITY}
        assert over == set(plan.overfull) and not over
        assert all(packing.device_of(n) == device for n, device in where.items())


@pytest.mark.parametrize("mix", ["small", "all", "even"])
def test_mell_needs_no_more_devices_than_any_baseline(mix: str) -> None:
    used = dict.fromkeys(PACKERS, 0)
    for seed in range(6):
        operations = list(random_operations(random.Random(seed), mix, 500))
        for name, make in PACKERS.items():
            packing = make(PARAMS, None)
            for operation in operations:
                packing.apply([operation])
                used[name] += len(packing.active)
    assert all(used["mell"] <= used[name] for name in ("best-fit", "worst-fit", "load-balance")), used
    assert isinstance(PACKERS["mell"](PARAMS, None), Packing)
