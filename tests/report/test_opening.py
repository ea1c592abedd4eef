from __future__ import annotations

from typing import Any

import pytest

from jettison.report.opening import key_rows, opening_sentence
from jettison.report.results import RequestCounts, RunResult, Summary
from jettison.report.variants import loads_of, variants_of


def made(
    name: str, ttft_p99_s: float | None, *, tpot_s: float = 0.02, speed: float = 500.0, failed: int = 0,
    arrivals: int = 0, config: dict[str, Any] | None = None, **events: float,
) -> RunResult:
    """A run of ten requests; runs of one number under ``arrivals`` met the same."""
    detail = [{"scheduled_s": float(i + arrivals), "input_tokens": 10, "wanted_tokens": 5} for i in range(10)]
    return RunResult(
        name, config=config or {}, requests=RequestCounts(10, 10 - failed, failed),
        ttft_s=Summary(p50=ttft_p99_s and ttft_p99_s / 10, p99=ttft_p99_s), tpot_s=Summary(p50=tpot_s),
        output_tokens_per_s=speed, events=events, requests_detail=detail,
    )  # fmt: skip


BASELINE = made("recompute", 5.0, drops=0, preemptions=40)


def test_a_comparison_that_was_won_says_by_how_much_and_what_it_cost() -> None:
    drop = made("drop", 0.5, tpot_s=0.024, drops=2)
    assert opening_sentence([BASELINE, drop]) == (
        "99 of 100 first tokens came within 500 ms with drop, in place of 5 s with recompute: 10 times sooner, while"
        " later tokens came 20% slower and throughput was the same."
    )


def test_a_comparison_that_was_lost_says_so() -> None:
    told = opening_sentence([BASELINE, made("drop", 7.5, speed=450.0, drops=2)])
    assert "1.50 times later, so here it did worse" in told and "throughput fell by 10%" in told
    assert "sooner" not in told


def test_where_nothing_differed_and_nothing_was_dropped_both_are_said() -> None:
    told = opening_sentence([BASELINE, made("drop", 5.1, drops=0)])
    assert "about the same" in told and "no layers were dropped" in told


def test_what_was_not_answered_comes_first() -> None:
    told = opening_sentence([made("recompute", 5.0, failed=4), made("drop", 0.5)])
    assert told.startswith("Not every request was answered (recompute: 4 of 10 failed or were refused); of what was")
    assert "10 times sooner" in told
    assert opening_sentence([made("drop", None, failed=10)]) == "No request was answered in drop."


def test_a_single_run_is_told_and_not_compared() -> None:
    told = opening_sentence([made("drop", 0.5, drops=1, restores=1, preemptions=0)])
    assert told == (
        "Drop answered 10 of 10 requests: half of the first tokens came within 50 ms and 99 of 100 within 500 ms, with"
        " 1 drop, 1 restore and no preemptions."
    )
    assert "with" not in opening_sentence([made("a server", None)])
    assert "nothing is compared" in opening_sentence([BASELINE, made("drop", 0.5, arrivals=7)])
    assert opening_sentence([]) == "There is no run to report."


def test_two_loads_are_two_clauses() -> None:
    runs = [
        made("burst: recompute", 5.0), made("burst: drop", 0.5),
        made("beyond: recompute", 8.0, arrivals=1), made("beyond: drop", 16.0, arrivals=1),
    ]  # fmt: skip
    told = opening_sentence(runs)
    assert told.startswith("In burst, 99 of 100") and "; in beyond, 99 of 100" in told
    assert "10 times sooner" in told and "2 times later" in told
    assert [[v.name for v in load] for load in loads_of(variants_of(runs))] == [
        ["burst: recompute", "burst: drop"], ["beyond: recompute", "beyond: drop"],
    ]  # fmt: skip


def test_several_policies_are_ranked() -> None:
    runs = [BASELINE, made("swap", 9.0), made("pipeline", 0.2), made("drop", 0.5), made("empty", None)]
    assert opening_sentence(runs) == (
        "99 of 100 first tokens came within 200 ms with pipeline, 500 ms with drop, 5 s with recompute (the baseline)"
        " and 9 s with swap; no first token with empty."
    )


def simulated(name: str, seed: int, ttft_p99_s: float, point: float = 0.0) -> RunResult:
    config = {"simulated": True, "seed": seed, "point": {"load": point}}
    return made(f"{name} seed={seed}", ttft_p99_s, arrivals=seed, config=config, drops=seed)


def test_seeds_of_a_variant_are_one_column_with_medians_and_the_spread_of_ratios() -> None:
    runs = [
        simulated(name, seed, ttft_s)
        for seed in range(3)
        for name, ttft_s in (("recompute", 6.0), ("drop", seed + 1.0))
    ]
    variants = variants_of(runs)
    assert [(variant.name, len(variant.runs)) for variant in variants] == [("recompute", 3), ("drop", 3)]
    assert variants[1].figure("TTFT p99") == 2.0 and variants[1].ratios("TTFT p99") == [6.0, 3.0, 2.0]
    assert "3 times sooner (3 seeds: 2 times sooner to 6 times sooner)" in opening_sentence(runs)
    tail = key_rows(variants)[2]
    assert tail.cells == (("6 s", ""), ("2 s", "3.00x"))
    assert key_rows(variants)[0].cells[1][0] == "30 of 30"


def test_a_sweep_is_counted() -> None:
    runs = [
        simulated(f"{name} load={point}", 0, ttft_s, float(point))
        for point, ours_s in enumerate((0.5, 5.0, 20.0))
        for name, ttft_s in (("recompute", 5.0), ("drop", ours_s))
    ]
    told = opening_sentence(runs)
    assert told.startswith("1 of 3 comparisons had an earlier tail of first tokens (P99) than its baseline, at most 10")
    assert "1 had a later one, at most 4 times" in told and "1 about the same" in told


@pytest.mark.parametrize("share", [None, 0.75])
def test_there_are_eight_rows_whatever_is_known(share: float | None) -> None:
    run = made("drop", 0.5)
    run.goodput = None if share is None else {"share": share}
    rows = key_rows(variants_of([run, RunResult("empty")]))
    assert len(rows) == 8 and {len(row.cells) for row in rows} == {2}
    sixth = rows[5]
    assert (sixth.label, sixth.cells[0][0]) == (("P99 end to end", "-") if share is None else ("goodput", "75.0%"))
    assert rows[-1].cells == (("-", ""), ("-", ""))
