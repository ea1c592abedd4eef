"""A chat beside a batch, on two engines: vLLM's equal budget, which arms a round has, what the judged lines say."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chat.interactive import (
    ARMS,
    CLOSE,
    MAX_NUM_SEQS,
    OURS,
    VLLM_BUDGET,
    closest,
    next_budget,
    turns,
    verdicts,
)

PLAN = {
    "common_rate": 2.0, "own_rate": {"jettison": 2.0, "vllm": 3.0}, "objectives_ms": {"slo_tpot_ms": 100.0},
}  # fmt: skip
NAMES = [arm.name for arm in ARMS]


def row(arm: str, p99: float, rate: float = 2.0, number: int = 0, offline: float = 0.0) -> dict[str, Any]:
    return {"round": number, "arm": arm, "rate_per_s": rate, "ttft_p99_ms": p99, "offline_total_per_s": offline}


@given(wanted=st.floats(100, 4_000), slope=st.floats(0.5, 4), least=st.floats(0, 50))
def test_the_equal_budget_is_found_where_there_is_one(wanted: float, slope: float, least: float) -> None:
    """More budget is more offline tokens, as a line: three budgets beside the default, and one is close."""
    def measure(budget: int) -> float:
        return least + slope * budget

    measured = {VLLM_BUDGET: measure(VLLM_BUDGET)}
    for _ in range(4):
        budget = next_budget(measured, wanted)
        assert MAX_NUM_SEQS <= budget <= VLLM_BUDGET
        measured[budget] = measure(budget)
    best = measured[closest(measured, wanted)]
    if wanted > measure(VLLM_BUDGET):
        assert closest(measured, wanted) == VLLM_BUDGET
    elif wanted > measure(MAX_NUM_SEQS):
        assert abs(best - wanted) <= max(CLOSE * wanted, 16 * slope)


def test_a_round_has_each_arm_at_the_common_rate_and_the_faster_engine_at_its_own_too() -> None:
    for number in range(3):
        met = turns(PLAN, NAMES, number)
        assert sorted(arm.name for arm, rate in met if rate == 2.0) == sorted(NAMES)
        assert {arm.engine for arm, rate in met if rate == 3.0} == {"vllm"}
        assert len(met) == len(NAMES) + 4
    assert turns(PLAN, NAMES, 0)[0] != turns(PLAN, NAMES, 1)[0]


def test_the_same_arrivals_alone_are_what_a_batch_is_compared_with() -> None:
    rows = [row("jettison alone", 100, number=n) for n in range(3)]
    rows += [row(OURS.name, 100 + added, number=n, offline=900.0) for n, added in enumerate((20, 90, 300))]
    rows += [row("vllm-equal alone", 200), row("vllm-equal batch", 280, offline=1000.0)]
    found = verdicts({"plan": PLAN, "rows": rows})
    slo, less = (line for line in found if line["load"] == "equal absolute load")
    assert (slo["added_ms"], slo["bound_ms"], slo["holds"]) == (90, 100.0, True)
    assert (less["added_ms"], less["bound_ms"], less["holds"], less["offline_ratio"]) == (90, 80, False, 0.9)


def test_nothing_is_judged_before_it_is_measured() -> None:
    assert verdicts({"plan": PLAN, "rows": [row(OURS.name, 100)]}) == []
