"""The same requests in other simulators' formats, and what becomes of a simulator that is slow or fails."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from engines.simulator_host import Outcome, Simulator, run, run_rounds, write_mooncake, write_profile, write_vidur

from jettison.cost.model import ChunkShape, CostModel
from jettison.workload.traces import TraceRow

ROWS = (TraceRow(0.25, 1, 7), TraceRow(1.5, 130, 1), TraceRow(1.5, 64, 3))
CORE = min(os.sched_getaffinity(0))


def test_mooncake_lines_have_milliseconds_and_a_hash_of_its_own_for_every_block(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "day.jsonl", ROWS, block_tokens=64)
    lines = [json.loads(line) for line in (tmp_path / "day.jsonl").read_text().splitlines()]
    assert [(line["timestamp"], line["input_length"], line["output_length"]) for line in lines] == [
        (250.0, 1, 7), (1500.0, 130, 1), (1500.0, 64, 3)
    ]  # fmt: skip
    assert [line["hash_ids"] for line in lines] == [[0], [1, 2, 3], [4]]


def test_vidur_reads_seconds_and_tokens(tmp_path: Path) -> None:
    write_vidur(tmp_path / "day.csv", ROWS)
    with (tmp_path / "day.csv").open(encoding="utf-8") as file:
        read = [(float(row["arrived_at"]), int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
                for row in csv.DictReader(file)]  # fmt: skip
    assert read == [(0.25, 1, 7), (1.5, 130, 1), (1.5, 64, 3)]


def test_step_times_in_the_table_are_the_cost_models(tmp_path: Path) -> None:
    cost = CostModel(4, 1e-9, 2e-9, 1e-6, 2e-6, 2e-3, 0.0, 0.0, 1e-3, 1e-6, weight_tokens=100)
    write_profile(tmp_path / "steps.npz", cost, max_batch_tokens=257, num_kv_tokens=1000, max_context=129)
    with np.load(tmp_path / "steps.npz") as table:
        assert table["prefill_ttft_ms"][-1] == pytest.approx(1e3 * cost.recompute_cost_s(257))
        row, column = 10, 99  # 100 tokens of KV, a context of 100: one decode
        assert (table["decode_active_kv_tokens"][row], table["decode_context_length"][column]) == (100.0, 100.0)
        assert table["decode_itl"][row, column] == pytest.approx(1e3 * cost.batch_cost_s([ChunkShape(99, 1)]), rel=0.01)


def test_a_slow_simulator_is_ended_and_a_failing_one_tells_its_last_line() -> None:
    with pytest.raises(TimeoutError, match="ended after 0 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], CORE, limit_s=0.2)
    with pytest.raises(RuntimeError, match="ValueError: no such trace"):
        run([sys.executable, "-c", "raise ValueError('no such trace')"], CORE, limit_s=60)


def test_rounds_take_turns_and_the_median_counts() -> None:
    answer = 'print(\'{"wall_s": 2.0, "peak_mib": 7, "virtual_s": 5.0}\')'
    good = Simulator("good", [sys.executable, "-c", answer], "everything")
    slow = Simulator("slow", [sys.executable, "-c", answer.replace("2.0", "50.0")], "everything")
    bad = Simulator("bad", [sys.executable, "-c", "raise SystemExit(3)"], "nothing")
    outcomes = run_rounds([good, slow, bad], num_rounds=3, core=CORE, limit_s=60)
    assert [len(outcomes[name].answers) for name in ("good", "slow", "bad")] == [3, 1, 0]
    row = outcomes["good"].row(good, 4, 10)
    assert (row["wall_s"], row["requests_per_s"], row["peak_mib"], row["virtual_s"]) == (2.0, 5.0, 7, 5.0)
    assert outcomes["bad"].row(bad, 4, 10)["stopped"] == "exit status 3"


def test_the_median_is_of_all_rounds() -> None:
    outcome = Outcome([{"wall_s": wall_s, "peak_mib": peak} for wall_s, peak in ((3.0, 5), (1.0, 9), (2.0, 4))])
    row = outcome.row(Simulator("it", [], "all"), 1, 8)
    assert (row["wall_s"], row["peak_mib"], row["walls_s"]) == (2.0, 9, [3.0, 1.0, 2.0])
