from __future__ import annotations

import pytest

from jettison.report.memory import MOST_SAMPLES, MemoryByUse, cluster_memory, worker_memory
from jettison.report.results import RunResult

MIB = 2.0**20

BYTES = {
    "worker_memory_bytes/parameters/0": [(0.0, 60 * MIB), (4.0, 30 * MIB)],
    "worker_memory_bytes/parameters/1": [(0.0, 60 * MIB), (4.0, 30 * MIB)],
    "worker_memory_bytes/kv/0": [(0.0, 20 * MIB), (4.0, 50 * MIB)],
    "worker_memory_bytes/kv/1": [(0.0, 20 * MIB), (4.0, 50 * MIB)],
    "worker_memory_bytes/free/0": [(0.0, 0.0)],
}
BLOCKS = {
    "kv_blocks_used/0": [(0.0, 5.0)], "kv_blocks_total/0": [(0.0, 10.0)],
    "kv_blocks_used/1": [(0.0, 10.0)], "kv_blocks_total/1": [(0.0, 10.0)],
    "kv_blocks_used/2": [(4.0, 10.0)], "kv_blocks_total/2": [(4.0, 50.0)],  # the two groups, merged
}  # fmt: skip


def memory_of(series: dict[str, list[tuple[float, float]]]) -> MemoryByUse:
    memory = cluster_memory(RunResult("r", series=series))
    assert memory is not None
    return memory


def test_the_cluster_s_kv_memory_is_split_by_the_share_of_blocks_that_requests_hold() -> None:
    memory = memory_of(BYTES | BLOCKS)
    assert memory.unit == "MiB" and list(memory.times_s) == [0.0, 4.0]
    assert list(memory.layers) == ["parameters", "kv_held", "kv_other"]  # nothing was ever free
    assert list(memory.layers["parameters"]) == [120.0, 60.0]
    assert memory.layers["kv_held"] == pytest.approx([40 * 15 / 20, 100 * 10 / 50])
    assert memory.layers["kv_held"] + memory.layers["kv_other"] == pytest.approx([40.0, 100.0])


def test_without_blocks_the_kv_memory_is_one_layer() -> None:
    assert list(memory_of(BYTES).layers["kv"]) == [40.0, 100.0]
    assert list(worker_memory(RunResult("r", series=BYTES), "1").layers["kv"]) == [20.0, 50.0]


def test_a_run_without_workers_shows_what_it_has() -> None:
    blocks = memory_of(BLOCKS)
    assert blocks.unit == "KV blocks" and list(blocks.layers["kv_held"]) == [15.0, 10.0]
    assert list(blocks.layers["kv_other"]) == [5.0, 40.0]
    usage = memory_of({"kv_usage": [(0.0, 0.25)]})
    assert usage.unit == "% of KV cache" and list(usage.layers["kv_held"]) == [25.0]
    assert cluster_memory(RunResult("nothing")) is None


def test_much_memory_is_told_in_gib_and_long_series_are_thinned() -> None:
    points = [(float(t), 64.0 * 2**30) for t in range(10 * MOST_SAMPLES)]
    memory = memory_of({"worker_memory_bytes/kv/0": points})
    assert memory.unit == "GiB" and memory.layers["kv"][0] == 64.0
    assert len(memory.times_s) <= MOST_SAMPLES
