"""Greedy groupings against all of them."""

from __future__ import annotations

import pytest

from jettison.report.grouping import best_cost, partitions, strategy_cost
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard

SHAPE = ModelShape(8, 64, 4, 2, 8, 128, 256, 2, False, {
    **{layer_shard(i): 1 << 20 for i in range(8)}, EMBED_SHARD: 1 << 18, HEAD_SHARD: 1 << 18,
})  # fmt: skip


def throughput(size: int) -> float:
    """Longer pipelines lose more."""
    return size * (1.0 - 0.05 * (size - 1))


def test_partitions() -> None:
    assert [len(list(partitions(n))) for n in (1, 4, 8)] == [1, 5, 22]
    assert all(sum(parts) == 8 for parts in partitions(8))


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_pairs_are_the_best_while_pairs_suffice(copies: int) -> None:
    best = best_cost(8, copies, throughput)
    assert strategy_cost("throughput", 8, copies, SHAPE, 1 << 30, throughput) == pytest.approx(best)
    assert strategy_cost("memory", 8, copies, SHAPE, 1 << 30, throughput) >= best


def test_an_unknown_size_is_said() -> None:
    with pytest.raises(ValueError, match="no throughput"):
        best_cost(2, 1, lambda size: None)
