"""Fig. 10 as printed breaks Theorems 1 and 2, and the complete table does not."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policy" / "packing"))

from packing_properties import count_exceptions
from packing_util import MIXES, placement, random_operations

from jettison.policy.packing.bounds import l2_bound
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Arrive, PackingParams
from papers.printed import Printed

PARAMS = PackingParams(capacity=2400)


def counter_example(num_repeats: int, capacity: int = 1000) -> list[Arrive]:
    """Eleven M of 0.334 C, then among T: five of 0.166 C, one of C/4, four of 0.166 C; again and again."""
    sizes = [334] * 11 * num_repeats + ([166] * 5 + [250] + [166] * 4) * num_repeats
    return [Arrive(f"r{i}", size) for i, size in enumerate(sizes)]


def test_the_printed_figure_needs_1500_devices_where_1100_do() -> None:
    arrivals = counter_example(200)
    sizes = [arrival.num_blocks for arrival in arrivals]
    # Per repeat: four and a half of M, M and two of 0.166, and one of M, M and C/4.
    assert l2_bound(sizes, 1000) <= 1100
    assert sum(sizes) <= 1100 * 1000
    params = PackingParams(capacity=1000)
    printed, ours = Printed(params), Packing(params)
    for arrival in arrivals:
        printed.apply([arrival])
        ours.apply([arrival])
    assert len(printed.active) == 1500 > 4 * 1100 // 3 + 3
    assert count_exceptions(placement(printed), 1000).unfilled_others == 1100, "property 5"
    assert len(ours.active) == 1123 <= 4 * 1100 // 3 + 3
    assert sum(count_exceptions(placement(ours), 1000)) <= 2


@pytest.mark.parametrize("mix", MIXES)
def test_the_printed_figure_leaves_nobody_out(mix: str) -> None:
    for seed in range(5):
        packing = Printed(PARAMS)
        sizes: dict[str, int] = {}
        for operation in random_operations(random.Random(seed), mix, 120):
            plan = packing.apply([operation])
            sizes[operation.request_id] = getattr(operation, "num_blocks", 0)
            found = placement(packing)
            held = {name: size for on_it in found.values() for name, size in on_it.items()}
            assert held == {name: size for name, size in sizes.items() if size}
            over = tuple(sorted(d for d, on_it in found.items() if sum(on_it.values()) > 2400))
            assert plan.overfull == over
