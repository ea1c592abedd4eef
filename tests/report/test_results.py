from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import UserError
from jettison.report.results import (
    RequestCounts,
    RequestRecord,
    RunResult,
    Summary,
    build_run,
    goodput,
    percentile,
    read_results,
    summarize,
    write_results,
)

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


def record(index: int = 0, **changes: Any) -> RequestRecord:
    made = RequestRecord(
        index, scheduled_s=1.0, input_tokens=10, wanted_tokens=3, status="completed", sent_s=1.1, first_s=2.0,
        finished_s=3.5, output_tokens=3, gaps_s=[0.5, 0.5],
    )  # fmt: skip
    return replace(made, **changes)


@given(values=VALUES, q=st.floats(0, 100))
def test_percentiles_interpolate_between_order_statistics(values: list[float], q: float) -> None:
    found = percentile(values, q)
    ordered = sorted(values)
    at = q / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    expected = low + (high - low) * (at - math.floor(at))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(values=VALUES)
def test_summaries_are_ordered_and_inside_their_sample(values: list[float]) -> None:
    found = summarize([*values, None])
    assert found.p50 is not None and found.p90 is not None and found.p99 is not None and found.mean is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert min(values) <= found.mean <= max(values)


def test_nothing_has_no_percentiles() -> None:
    assert percentile([], 50) is None
    assert summarize([]) == summarize([None]) == Summary()


def test_one_request_has_its_metrics() -> None:
    run = build_run("one", [record()], slo_ttft_s=1.0)
    assert run.ttft_s.p50 == pytest.approx(1.0)
    assert run.ttft_from_send_s.p50 == pytest.approx(0.9)
    assert run.tpot_s.p50 == pytest.approx(0.5)
    assert run.e2e_s.p50 == pytest.approx(2.5)
    assert run.duration_s == 3.5
    assert run.output_tokens_per_s == pytest.approx(3 / 3.5)
    assert run.goodput == {
        "slo_ttft_s": 1.0, "slo_tpot_s": None, "requests_within": 1, "share": 1.0, "requests_per_s": 1 / 3.5,
    }  # fmt: skip


def test_tokens_that_share_a_chunk_count_for_tpot() -> None:
    assert record(output_tokens=5).tpot_s == pytest.approx(0.25)
    assert record(output_tokens=1, gaps_s=[]).tpot_s is None


def test_counts_add_up_and_only_completed_requests_have_an_end_to_end_time() -> None:
    records = [
        record(0),
        record(1, status="cancelled", output_tokens=2, gaps_s=[9.0]),
        record(2, status="rejected", first_s=None, output_tokens=0, gaps_s=[]),
        record(3, status="failed", first_s=None, finished_s=None, sent_s=None, output_tokens=0, gaps_s=[]),
    ]
    run = build_run("mixed", records)
    assert run.requests == RequestCounts(submitted=4, completed=1, failed=1, cancelled=1, rejected=1)
    assert run.itl_s.max == 9.0 and run.tpot_s.max == pytest.approx(0.5)
    assert run.e2e_s.max == pytest.approx(2.5)
    assert run.goodput is None
    assert run.requests_detail is not None and [row["status"] for row in run.requests_detail] == [
        "completed", "cancelled", "rejected", "failed",
    ]  # fmt: skip


def test_goodput_counts_failures_against_it() -> None:
    records = [record(0), record(1, status="failed"), record(2, first_s=2.9), record(3, gaps_s=[0.1, 1.3])]
    found = goodput(records, 10.0, slo_ttft_s=1.5, slo_tpot_s=0.6)
    assert (found["requests_within"], found["share"], found["requests_per_s"]) == (1, 0.25, 0.1)
    assert goodput([], 0.0, slo_ttft_s=1.0, slo_tpot_s=None)["share"] is None


OPTIONAL_S = st.none() | st.floats(0, 1e4)
RECORDS = st.lists(
    st.builds(
        RequestRecord,
        index=st.integers(0, 10**6),
        scheduled_s=st.floats(0, 1e4),
        input_tokens=st.integers(1, 10**6),
        wanted_tokens=st.integers(1, 10**6),
        status=st.sampled_from(["completed", "failed", "cancelled", "rejected"]),
        sent_s=OPTIONAL_S,
        first_s=OPTIONAL_S,
        finished_s=OPTIONAL_S,
        output_tokens=st.integers(0, 10**6),
        gaps_s=st.lists(st.floats(0, 100), max_size=5),
        error=st.none() | st.text(max_size=20),
    ),
    max_size=6,
)


POINTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12)), max_size=4)


@settings(max_examples=40)
@given(records=RECORDS, name=st.text(max_size=20), points=POINTS)
def test_what_is_written_is_read_back(tmp_path_factory, records, name: str, points) -> None:
    folder = tmp_path_factory.mktemp("results")
    events = {"drops": 2, "log": [{"t": 1.5, "kind": "drop"}]}
    run = build_run(name, records, config={"b": 1, "a": {"x": None}}, events=events, series={"queue": points})
    write_results(folder / "one.json", [run, run])
    again = read_results(folder / "one.json")
    write_results(folder / "two.json", again)
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    assert again[0].requests == run.requests and again[0].name == name and again[0].events == run.events
    assert (again[0].ttft_s.mean is None) == (run.ttft_s.mean is None)
    if run.ttft_s.mean is not None:
        assert again[0].ttft_s.mean == pytest.approx(run.ttft_s.mean, rel=1e-6)


def test_keys_are_sorted_and_bytes_the_same(tmp_path: Path) -> None:
    write_results(tmp_path / "a.json", [RunResult("r", config={"b": 1, "a": 2})])
    write_results(tmp_path / "b.json", [RunResult("r", config={"a": 2, "b": 1})])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert list(json.loads((tmp_path / "a.json").read_text())["runs"][0]) == sorted(
        json.loads((tmp_path / "a.json").read_text())["runs"][0]
    )


def test_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_results(tmp_path / "a.json", [RunResult("r", duration_s=math.nan)])


def test_what_was_not_answered_stands_first(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    failed = record(1, status="failed", first_s=None, error="HTTP 500: broken")
    write_results(path, [build_run("good", [record()]), build_run("bad", [record(), failed])])
    document = json.loads(path.read_text())
    assert list(document) == ["failures", "format_version", "runs"]
    assert document["failures"] == [
        {"run": "bad", "submitted": 2, "failed": 1, "rejected": 0, "first_error": "HTTP 500: broken"}
    ]
    assert document["runs"][1]["ttft_s"]["count"] == 1 and document["runs"][0]["itl_s"]["count"] == 2


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    """They do not say of how many requests a percentile is."""
    path = tmp_path / "r.json"
    write_results(path, [build_run("r", [record()])])
    document = json.loads(path.read_text())
    for value in document["runs"][0].values():
        if isinstance(value, dict):
            value.pop("count", None)
    path.write_text(json.dumps({"format_version": 1, "runs": document["runs"]}))
    [run] = read_results(path)
    assert run.ttft_s.count is None and run.ttft_s.p99 == pytest.approx(1.0)
    document["format_version"] = 3
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="format_version is 3, this program reads 1 and 2"):
        read_results(path)


def test_files_from_before_there_were_two_clocks_are_read(tmp_path: Path) -> None:
    """What they call TTFT was the clock of the first chunk."""
    path = tmp_path / "r.json"
    write_results(path, [build_run("r", [record()])])
    document = json.loads(path.read_text())
    del document["runs"][0]["first_chunk_s"]
    path.write_text(json.dumps(document))
    [run] = read_results(path)
    assert run.first_chunk_s == run.ttft_s and not run.opens_early


def test_result_files_have_no_line_ends_but_their_own(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path, [build_run("a\u2028b\u2029c\x85d", [record()])])
    text = path.read_text()
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    assert read_results(path)[0].name == "a\u2028b\u2029c\x85d"


SPOILT = {"mean": 1, "p50": 1, "p90": 1, "p99": 1, "max": 1, "count": 1}


def spoil(**changes: Any):
    return lambda run: run.update(changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (spoil(name=3), r"runs\[0\]\.name: a string"),
        (spoil(surprise=1), r"unknown keys \['surprise'\]"),
        (lambda run: run.pop("itl_s"), r"missing keys \['itl_s'\]"),
        (spoil(ttft_s={"mean": 1}), "ttft_s: missing keys"),
        (spoil(ttft_s=SPOILT | {"mean": "1"}), r"ttft_s\.mean: a number"),
        (spoil(ttft_s=SPOILT | {"count": 1.5}), r"ttft_s\.count: a whole number"),
        (spoil(ttft_s=SPOILT | {"count": -1}), r"ttft_s\.count: a whole number"),
        (spoil(duration_s=None), "duration_s: a number"),
        (spoil(series={"queue": [[1]]}), r"series\.queue: a list of \[t, value\] pairs"),
        (spoil(series=[]), "series: an object"),
        (spoil(events=[]), "events: an object"),
        (lambda run: run["requests"].update(submitted=5), "must be the sum"),
        (lambda run: run["requests"].update(failed=-1), "at least 0"),
        (lambda run: run["requests"].update(failed=None), r"failed: a number"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, change, reason: str) -> None:
    path = tmp_path / "r.json"
    write_results(path, [build_run("r", [record()])])
    document = json.loads(path.read_text())
    change(document["runs"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=reason) as caught:
        read_results(path)
    assert "r.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": {}}', '{"runs": [3], "format_version": 1}', '{"runs": []}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.json"):
        read_results(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_results(tmp_path / "none.json")
