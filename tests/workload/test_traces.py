from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError, TraceError
from jettison.workload import shaping
from jettison.workload.traces import TraceRow, Workload, read_trace, write_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": stamp, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]})
    for stamp in (0, 0, 3000, 6000)
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_is_read_with_seven_digits(tmp_path: Path, name: str) -> None:
    workload = read_trace(write(tmp_path, name, AZURE))
    assert workload.name == "trace"
    assert [row[1:3] for row in workload.rows] == [(374, 44), (396, 109), (879, 55)]
    assert [row.arrival_s for row in workload.rows] == pytest.approx([0.0, 4.314579, 4.541877], abs=5e-8)


def test_windows_line_ends_and_a_missing_last_one_are_fine(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path, "a.csv", AZURE))
    assert read_trace(write(tmp_path, "b.csv", AZURE.replace("\n", "\r\n").rstrip())).rows == plain.rows


def test_burstgpt_failures_are_dropped_and_counted(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, "b.csv", BURSTGPT))
    assert [row[:3] for row in workload.rows] == [(0.0, 472, 18), (113.0, 417, 276)]
    assert "1 failed requests" in " ".join(workload.notes)


def test_mooncake_is_jittered_inside_its_steps_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, "m.jsonl.gz", MOONCAKE)
    exact = read_trace(path, jitter=False)
    assert [row.arrival_s for row in exact.rows] == [0.0, 0.0, 3.0, 6.0]
    jittered = read_trace(path, seed=1)
    moved = np.array([row.arrival_s for row in jittered.rows]) - np.array([0.0, 0.0, 3.0, 6.0])
    assert (moved >= 0).all() and (moved < 3).all() and len(set(moved)) == 4
    assert read_trace(path, seed=1) == jittered
    assert read_trace(path, seed=2) != jittered


@pytest.mark.parametrize("stamps_ms", [
    [0, 0, 1234, 2999, 2999, 6001, 7500, 7500],  # exact, some at the same millisecond
    [0, 3000, 6000, 9000, 12000],  # a request every 3 s: no two share a step
    [0] * 9 + [60_000] * 9 + [120_000] * 9,  # a batch a minute is no clock
    [0, 0, 4217, 4217],  # any two are a whole number of steps apart
], ids=["exact", "regular", "batches", "few"])  # fmt: skip
def test_mooncake_stamps_that_are_no_steps_stay(tmp_path: Path, stamps_ms: list[int]) -> None:
    """Any file of this format was jittered by up to 3 s once, its stamps exact or not."""
    lines = [json.dumps({"timestamp": stamp, "input_length": 5, "output_length": 5}) for stamp in stamps_ms]
    load = read_trace(write(tmp_path, "m.jsonl", "\n".join(lines)))
    assert [row.arrival_s for row in load.rows] == [stamp / 1000 for stamp in stamps_ms]
    assert not any("jittered" in note for note in load.notes)
    assert load.stamps is not None and load.stamps.startswith("no steps of a coarse clock")


def test_jitter_keeps_to_the_steps_that_are_seen(tmp_path: Path) -> None:
    stamps_ms = [500 + 1000 * (index // 3) for index in range(60)]
    lines = [json.dumps({"timestamp": stamp, "input_length": 5, "output_length": 5}) for stamp in stamps_ms]
    path = write(tmp_path, "m.jsonl", "\n".join(lines))
    moved = np.array([row.arrival_s for row in read_trace(path, seed=2).rows])
    steps = np.array(stamps_ms) / 1000 - 0.5
    assert (moved >= steps).all() and (moved < steps + 1.0).all() and len(set(moved)) == 60
    assert read_trace(path).stamps == "steps of 1 s (20 different ones of 60 requests)"


def test_any_format_may_be_jittered_in_steps_that_are_there(tmp_path: Path) -> None:
    own = write(tmp_path, "own.csv", "arrival_s,input_tokens,output_tokens\n" + "2,1,1\n2,1,1\n4,1,1\n8,1,1\n")
    assert [row.arrival_s for row in read_trace(own).rows] == [2.0, 2.0, 4.0, 8.0], "not of itself"
    assert any("inside 2 s steps" in note for note in read_trace(own, jitter=True).notes)
    whole_seconds = write(tmp_path, "b.csv", BURSTGPT)
    assert any("inside 1 s steps" in note for note in read_trace(whole_seconds, jitter=True).notes)
    with pytest.raises(ConfigError, match="exact"):
        read_trace(write(tmp_path, "c.csv", BURSTGPT.replace("118,", "118.4,")), jitter=True)


def test_a_span_that_ends_before_the_last_arrival_is_refused(tmp_path: Path) -> None:
    text = "# source: x\n# span_s: 10\narrival_s,input_tokens,output_tokens\n0,5,5\n100,5,5\n"
    with pytest.raises(TraceError, match="span_s is 10, and a request arrives at 100 s"):
        read_trace(write(tmp_path, "a.csv", text))


def test_what_is_moved_beyond_its_span_can_be_written_and_read_again(tmp_path: Path) -> None:
    rows = tuple(TraceRow(float(second), 5, 5) for second in range(11))
    load = shaping.upscale(Workload(rows, "x", "x", span_s=10.0), 2.0, 0, keep="span", spread_s=1.0)
    assert load.rows[-1].arrival_s > 10.0
    write_trace(tmp_path / "a.csv", load)
    assert len(read_trace(tmp_path / "a.csv").rows) == sum(len(cut.rows) for cut in shaping.slices(load, 3.0)) == 22
    write_trace(tmp_path / "b.csv", Workload((TraceRow(9.9999996, 5, 5),), "x", "x", span_s=9.9999997))
    assert read_trace(tmp_path / "b.csv").rows[0].arrival_s == 10.0


@pytest.mark.parametrize(("first", "is_bad"), [
    ("", False), ("yesterday,1,2", True), ("2024-05-10 00:00:00+00:00,1", True),
    ("2024-05-10 00:00:00 +00:00,7,0", False), ("2024-05-10 00:00:00.5 +00:00,7,0", False),
])  # fmt: skip
def test_azure_2024_is_recognised_by_the_first_row_that_can_be_read(tmp_path: Path, first: str, is_bad: bool) -> None:
    rows = ["2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:00.017335+00:00,2399,0"]
    path = write(tmp_path, "a.csv", "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", first, *rows]) + "\n")
    load = read_trace(path, skip_bad_rows=is_bad)
    assert [row.output_tokens for row in load.rows] == [5] and "azure-2024" in load.source
    assert [line.count("line 2: ") for line in load.skipped_rows] == [1] * is_bad


def test_a_blank_before_the_offset_changes_no_time(tmp_path: Path) -> None:
    header, stamps = "TIMESTAMP,ContextTokens,GeneratedTokens", ("00:00:00.25{0}+00:00", "03:00:01{0}+02:00")
    text = "\n".join([header, *(f"2024-05-10 {stamp},1,2" for stamp in stamps)]) + "\n"
    loads = [read_trace(write(tmp_path, "a.csv", text.format(blank))) for blank in ("", " ")]
    assert [row.arrival_s for row in loads[0].rows] == [row.arrival_s for row in loads[1].rows] == [0.0, 3600.75]


def test_which_requests_are_kept_does_not_go_by_their_jitter(tmp_path: Path) -> None:
    lines = [f"{second},ChatGPT,100,10,110,Conversation log" for second in range(2000)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(tmp_path, "a.csv", "\n".join([header, *lines]) + "\n")
    load = shaping.thin_by_probability(read_trace(path, jitter=True, seed=5), 0.2, 5)
    offsets = load.columns.arrival_s % 1.0
    assert 300 < len(offsets) < 500
    assert np.mean(offsets) == pytest.approx(0.5, abs=0.06) and np.std(offsets) == pytest.approx(0.29, abs=0.04)


def test_exact_stamps_are_not_jittered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact"):
        read_trace(write(tmp_path, "a.csv", AZURE), jitter=True)


def test_bad_rows_are_all_counted_and_nothing_is_loaded(tmp_path: Path) -> None:
    bad = AZURE + "yesterday,1,1\n2023-11-16 18:15:52,-3,1\n2023-11-16 18:15:53,1\n\n" + "2023-11-16 18:15:54,x,1\n" * 5
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, "bad.csv", bad))
    message = str(caught.value)
    assert "8 bad rows, nothing loaded" in message
    for part in ("line 5: TIMESTAMP is 'yesterday'", "line 6: ContextTokens is -3", "line 7: 2 columns", "line 9:"):
        assert part in message
    assert "and 3 more" in message
    assert "\n" not in message


def test_bad_rows_may_be_left_out(tmp_path: Path) -> None:
    """They are counted and named; what was read is what the file has without them."""
    bad = AZURE + "yesterday,1,1\n2023-11-16 18:15:52,-3,1\n" + "2023-11-16 18:15:54,x,1\n" * 5
    bad += "2023-11-16 18:16:00,7,7\n"
    load = read_trace(write(tmp_path, "bad.csv", bad), skip_bad_rows=True)
    assert [row.input_tokens for row in load.rows] == [374, 396, 879, 7]
    [told] = load.skipped_rows
    assert told.startswith("7 bad rows of bad.csv left out: line 5: TIMESTAMP is 'yesterday'")
    assert told.endswith("and 2 more") and told in load.notes
    assert read_trace(write(tmp_path, "good.csv", AZURE), skip_bad_rows=True).skipped_rows == ()
    with pytest.raises(TraceError, match=r"no usable request in the file \(1 bad row of none\.csv left out: line 2"):
        read_trace(write(tmp_path, "none.csv", AZURE.splitlines()[0] + "\nx,1,1\n"), skip_bad_rows=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 1%s, "input_length": 2, "output_length": 3}' % ("0" * 400), "timestamp is a number of"),
        ('{"timestamp": 1, "input_length": 1%s, "output_length": 3}' % ("0" * 400), "at most"),
        ('{"timestamp": 1, "input_length": 2}', "no output_length"),
        ('{"timestamp": -1, "input_length": 2, "output_length": 3}', "timestamp is -1"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', "timestamp is nan"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 3}', "input_length is 2.5"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}', "input_length is True"),
        ('{"timestamp": 1, "input_length": null, "output_length": 3}', "input_length is None"),
    ],
)
def test_bad_json_lines_say_why(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(TraceError, match="line 5: ") as caught:
        read_trace(write(tmp_path, "bad.jsonl", f"{MOONCAKE}\n{line}\n"))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"a,b\n1,2\n", "no header of a known trace format"),
        (b"[" * 100_000, "no header of a known trace format"),
        (b'"' + b"a" * 200_000, "no header of a known trace format"),
        (b'arrival_s,input_tokens,output_tokens\n"%s",2,3\n' % (b"1" * 200_000), "line 2: 0 columns"),
        (b"\xff\xfe\x00bad", "not a text file"),
        (gzip.compress(AZURE.encode(), mtime=0)[:40], "cannot be read"),
        (AZURE.splitlines()[0].encode(), "no usable request"),
    ],
)
def test_files_that_are_no_trace_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv"):
        read_trace(tmp_path / "nowhere.csv")


# Real traces: figures of the data folder's README ("Measured statistics").


def figures(workload: Workload) -> tuple[float, ...]:
    values = np.array(workload.rows)
    inputs, outputs = values[:, 1], values[:, 2]
    return (
        inputs.mean(), np.percentile(inputs, 50), np.percentile(inputs, 99),
        outputs.mean(), np.percentile(outputs, 50), np.percentile(outputs, 99),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_rows", "span_s", "expected"),
    [
        ("AzureLLMInferenceTrace_conv.csv.gz", 19_366, 3501.7, (1154.7, 1020, 4142, 211.1, 129, 601)),
        ("AzureLLMInferenceTrace_code.csv.gz", 8_819, 3435.9, (2047.8, 1469, 7436, 27.9, 13, 251)),
        ("burstgpt_1_head400.csv", 383, 37269.0, (543.6, 353, 1958, 288.8, 238, 1425)),
        ("mooncake_conversation_trace.jsonl.gz", 12_031, 3537.0, (12035.1, 6909, 85400, 342.6, 350, 1119)),
    ],
)
def test_real_traces_have_their_published_figures(
    data_dir: Path, name: str, num_rows: int, span_s: float, expected: tuple[float, ...]
) -> None:
    workload = read_trace(data_dir / "arrivals" / name, jitter=False)
    assert len(workload.rows) == num_rows
    assert workload.duration_s == pytest.approx(span_s, abs=0.05)
    assert figures(workload) == pytest.approx(expected, abs=0.6)


def test_jitter_removes_mooncakes_three_second_steps(data_dir: Path) -> None:
    path = data_dir / "arrivals" / "mooncake_conversation_trace.jsonl.gz"

    def gap_cv(workload: Workload) -> float:
        gaps = np.diff([row.arrival_s for row in workload.rows])
        return float(gaps.std() / gaps.mean())

    assert gap_cv(read_trace(path, jitter=False)) == pytest.approx(3.03, abs=0.01)
    assert gap_cv(read_trace(path, seed=0)) == pytest.approx(1.0, abs=0.1)


# Azure 2024, and our own format.

AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 02:00:02.5+02:00,76,15
2024-05-10 00:00:03.25+00:00,100,0
"""


def test_azure_2024_has_offsets_and_unanswered_requests(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, "week.csv.gz", AZURE_2024))
    assert [row.arrival_s for row in workload.rows] == pytest.approx([0.0, 0.99007, 2.49007], abs=1e-6)
    assert [row[1:3] for row in workload.rows] == [(2162, 5), (2399, 6), (76, 15)]
    assert workload.notes[0] == "3 requests read as azure-2024"
    assert "1 failed requests" in workload.notes[1]


@pytest.mark.parametrize("none", ["0", " 0 ", "0.0"])
def test_a_failed_request_of_azure_2024_is_dropped_however_its_zero_is_written(tmp_path: Path, none: str) -> None:
    text = AZURE_2024 + f"2024-05-10 00:00:04+00:00,2399,{none}\n"
    workload = read_trace(write(tmp_path, "week.csv", text))
    assert len(workload.rows) == 3 and "2 failed requests" in workload.notes[1]
    with pytest.raises(TraceError, match="line 7: GeneratedTokens is -1, at least 0 is expected"):
        read_trace(write(tmp_path, "week.csv", text + "2024-05-10 00:00:05+00:00,2399,-1\n"))


@pytest.mark.parametrize("stamp", ["2024-05-10 00:00:00.+00:00", "2024-05-10", "2024-05-10 00:00:00.5+99:00", ".5"])
def test_stamps_that_are_none_are_bad_rows(tmp_path: Path, stamp: str) -> None:
    if stamp == "2024-05-10":  # a day is a stamp: midnight
        assert read_trace(write(tmp_path, "a.csv", AZURE + f"{stamp},1,1\n")).rows
        return
    with pytest.raises(TraceError, match="line 5: TIMESTAMP is"):
        read_trace(write(tmp_path, "a.csv", AZURE + f"{stamp},1,1\n"))


ROWS = st.lists(
    st.builds(
        lambda at, tokens, out, cached, *more: TraceRow(at, tokens, out, min(cached, tokens), *more),
        st.integers(0, 10**12).map(lambda micros: micros / 1e6), st.integers(1, 10**6), st.integers(1, 10**6),
        st.integers(0, 100), st.booleans(), st.sampled_from([0, 0, 1, 2]),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz"])
@given(rows=ROWS, span=st.one_of(st.none(), st.floats(0, 1e7)))
def test_what_is_written_is_read_back(tmp_path_factory, name: str, rows: list[TraceRow], span: float | None) -> None:
    path = tmp_path_factory.mktemp("own") / name
    empty = Workload((), "own", "somewhere", ("first: one", "then # two"), span)
    workload = empty.with_rows(rows, "third", span_s=span)
    write_trace(path, workload)
    back = read_trace(path)
    assert [tuple(row) for row in back.rows] == [tuple(row) for row in workload.rows]
    assert back.source == "somewhere" and back.span_s == workload.span_s
    assert back.notes == ("first: one", "then # two", "third", f"{len(rows)} requests read as jettison")


def test_equal_workloads_are_equal_files(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, "a.csv", AZURE))
    for name in ("one.csv.gz", "two.csv.gz"):
        write_trace(tmp_path / name, workload)
    assert (tmp_path / "one.csv.gz").read_bytes() == (tmp_path / "two.csv.gz").read_bytes()


PART_2 = "# part: 2\n# source: a recording\narrival_s,input_tokens,output_tokens\n86400.50,2,3\n"


def test_parts_of_a_recording_are_read_one_by_one_and_together(tmp_path: Path) -> None:
    part_3 = PART_2.replace("part: 2", "part: 3").replace("86400.50", "86500.00,9,9\n86390.50")
    two, three = (read_trace(write(tmp_path, name, text)) for name, text in (("2.csv", PART_2), ("3.csv", part_3)))
    both = read_trace(write(tmp_path, "both.csv", PART_2 + part_3))
    assert [row.arrival_s for row in two.rows] == [0.0]
    assert [row.arrival_s for row in three.rows] == [0.0, 109.5]
    assert [row.arrival_s for row in both.rows] == [0.0, 10.0, 109.5]
    assert both.notes[-1] == "part 2 of a recording: arrivals count from 86390.50 s of it"
    bare = PART_2.replace("2", "3", 1).removesuffix("86400.50,2,3\n")
    empty_after = read_trace(write(tmp_path, "after.csv", PART_2 + bare))
    assert len(empty_after.rows) == 1 and empty_after.source == "a recording"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# span_s: soon\narrival_s,input_tokens,output_tokens\n1,2,3\n", "span_s is 'soon'"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n-1,2,3\n", "line 3: arrival_s is '-1'"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n1,2,9999999999\n", "line 3: output_tokens is 9999999999"),
        ("arrival_s,input_tokens,output_tokens,class\n1,2,3,batch\n", "line 2: class is 'batch'"),
        ("arrival_s,input_tokens,output_tokens,cached_tokens\n1,2,3,4\n", "line 2: cached_tokens is 4, more than"),
        ("# only notes\n", "the file is empty"),
        ("# part: 0\narrival_s,input_tokens,output_tokens\n1,2,3\n", "part is '0', a number from 1 is expected"),
        (PART_2 + PART_2.replace("2", "4", 1), "line 5: part 4 of a recording does not follow part 2"),
        (PART_2 + "# part: 3\n# note: x\n5,6,7\n", "line 5: part 3 of a recording has no header"),
        (PART_2 + "# part: 3\n", "line 5: part 3 of a recording has no header"),
        # Two traces that are no parts of one recording are not one trace.
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n" * 2, "line 3: arrival_s is 'arrival_s'"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n# part: 2\n", "line 3: 1 columns, the header has 3"),
    ],
)
def test_bad_files_of_our_own_say_why(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, "own.csv", text))
    assert reason in str(caught.value) and "own.csv" in str(caught.value)


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.csv: cannot be written"):
        write_trace(tmp_path / "folder.csv", read_trace(write(tmp_path, "a.csv", AZURE)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "folder.csv"]
