"""KV moves: every stage gets every layer, each layer once, in as few pieces as there can be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.memory.kvtransfers import KVTransferPlan, Place, plan_kv_transfers
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange


def stages(*ranges: tuple[int, int]) -> list[StagePlan]:
    return [StagePlan(worker, LayerRange(*r)) for worker, r in enumerate(ranges)]


def arenas(layers: Mapping[int, LayerRange]) -> dict[Place, LayerRange]:
    return {Place(worker): r for worker, r in layers.items()}


def test_an_instance_joins_a_pipeline() -> None:
    planned = plan_kv_transfers(arenas({0: LayerRange(0, 4)}), stages((0, 2), (2, 4)))
    assert planned == (KVTransferPlan(0, 1, LayerRange(2, 4)),)


def test_a_pipeline_returns_home() -> None:
    home = [StagePlan(1, LayerRange(0, 4))]
    moves = plan_kv_transfers(arenas({0: LayerRange(0, 2), 1: LayerRange(2, 4)}), home)
    assert moves == (KVTransferPlan(0, 1, LayerRange(0, 2)),)


def test_a_pipeline_grows_by_a_member() -> None:
    grown = [StagePlan(0, LayerRange(0, 2)), StagePlan(2, LayerRange(2, 4)), StagePlan(1, LayerRange(4, 6))]
    moves = plan_kv_transfers(arenas({0: LayerRange(0, 3), 1: LayerRange(3, 6)}), grown)
    assert moves == (KVTransferPlan(0, 2, LayerRange(2, 3)), KVTransferPlan(1, 2, LayerRange(3, 4)))


def test_from_host_pools_everything_comes_and_what_is_in_the_workers_own_comes_from_there() -> None:
    pools = {Place(w, is_host=True): r for w, r in {0: LayerRange(0, 2), 1: LayerRange(2, 4)}.items()}
    assert plan_kv_transfers(pools, stages((0, 2), (2, 4))) == (
        KVTransferPlan(0, 0, LayerRange(0, 2), from_host=True), KVTransferPlan(1, 1, LayerRange(2, 4), from_host=True),
    )
    everywhere = {Place(w, is_host=True): LayerRange(0, 4) for w in range(3)}
    assert plan_kv_transfers(everywhere, [StagePlan(2, LayerRange(0, 4))]) == (
        KVTransferPlan(2, 2, LayerRange(0, 4), from_host=True),
    )
    assert plan_kv_transfers(pools, [StagePlan(1, LayerRange(0, 4))]) == (
        KVTransferPlan(0, 1, LayerRange(0, 2), from_host=True), KVTransferPlan(1, 1, LayerRange(2, 4), from_host=True),
    )


def test_what_is_in_place_does_not_move() -> None:
    assert plan_kv_transfers(arenas({0: LayerRange(0, 2), 1: LayerRange(2, 4)}), stages((0, 2), (2, 4))) == ()


def test_the_source_that_reaches_furthest_is_taken() -> None:
    have = {0: LayerRange(0, 2), 1: LayerRange(0, 6), 2: LayerRange(1, 3)}
    planned = plan_kv_transfers(arenas(have), [StagePlan(9, LayerRange(0, 6))])
    assert planned == (KVTransferPlan(1, 9, LayerRange(0, 6)),)


def test_kv_that_is_nowhere_has_to_be_recomputed() -> None:
    with pytest.raises(ValueError, match="layer 2 is nowhere"):
        plan_kv_transfers(arenas({0: LayerRange(0, 2), 1: LayerRange(3, 4)}), stages((0, 2), (2, 4)))


def fewest_pieces(kv_at: Mapping[int, LayerRange], stage: StagePlan) -> int:
    """Pieces that a stage's missing layers need at least, by trying every choice of sources."""
    have = kv_at.get(stage.worker_id, LayerRange(0, 0))
    missing = [layer for layer in stage.layers.layers() if not have.lo <= layer < have.hi]
    choices = [[w for w, r in kv_at.items() if r.lo <= layer < r.hi] for layer in missing]
    best = len(missing)
    for chosen in itertools.product(*choices):
        pieces = sum(
            i == 0 or chosen[i] != chosen[i - 1] or missing[i] != missing[i - 1] + 1 for i in range(len(missing))
        )
        best = min(best, pieces)
    return best


RANGES = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda r: LayerRange(min(r), max(max(r), min(r) + 1)))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.integers(0, 3), RANGES, min_size=1), st.lists(st.integers(1, 5), max_size=3, unique=True))
def test_every_stage_gets_every_layer_from_somebody_who_has_it(
    kv_at: dict[int, LayerRange], cuts: Sequence[int]
) -> None:
    edges = [0, *sorted(cuts), 6]
    plan = [StagePlan(w, LayerRange(lo, hi)) for w, (lo, hi) in enumerate(itertools.pairwise(edges))]
    everywhere = {layer for r in kv_at.values() for layer in r.layers()}
    if everywhere != set(range(6)):
        with pytest.raises(ValueError, match="nowhere"):
            plan_kv_transfers(arenas(kv_at), plan)
        return
    moves = plan_kv_transfers(arenas(kv_at), plan)
    assert all(kv_at[m.src].covers(m.layers) and m.src != m.dst for m in moves)
    for stage in plan:
        arriving = [layer for m in moves if m.dst == stage.worker_id for layer in m.layers.layers()]
        have = set(kv_at.get(stage.worker_id, LayerRange(0, 0)).layers())
        assert sorted(arriving) == sorted(set(stage.layers.layers()) - have), "what is missing, each layer once"
        assert sum(m.dst == stage.worker_id for m in moves) == fewest_pieces(kv_at, stage)
