"""Formats are known by all of their keys, and a unit that makes no sense is not taken."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jettison.cli.main import app
from jettison.errors import ConfigError, TraceError
from jettison.simulate.workload_spec import parse_workload
from jettison.simulate.workloads import build_workload
from jettison.workload.bench import load_workload
from jettison.workload.cautions import cautions_of
from jettison.workload.formats import FORMATS, formats_of, is_date
from jettison.workload.options import BenchOptions
from jettison.workload.traces import read_trace
from jettison.workload.units import LONGEST_GAP_EVER_S, PER_S, Reading, doubt

NUM = 300
AT_S = np.round(61.114 + np.cumsum(np.random.default_rng(1).exponential(1.8, NUM)), 3)
SPAN_S = float(AT_S[-1] - AT_S[0])
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "hash_ids": [1, 2]}
MOONCAKE = {"hash_ids": [0, 1]}


def json_lines(folder: Path, stamps: object, more: dict, name: str = "t.jsonl") -> Path:
    lines = [json.dumps({"timestamp": at, "input_length": 5, "output_length": 7} | more) for at in stamps]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def csv(folder: Path, header: str, stamps: object, rest: str) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join([header, *(f"{at},{rest}" for at in stamps)]) + "\n")
    return path


def in_unit(unit: str) -> list[float | int]:
    return [float(at) if unit == "s" else round(at * PER_S[unit]) for at in AT_S]


def test_bailians_traces_are_in_seconds(tmp_path: Path) -> None:
    """Its keys are Mooncake's and more, and 550 s of it were replayed in half a second once."""
    load = read_trace(json_lines(tmp_path, in_unit("s"), BAILIAN))
    assert load.notes == ("300 requests read as bailian",) and load.doubts == ()
    assert load.duration_s == pytest.approx(SPAN_S) and load.rows[0][1:3] == (5, 7)


def test_a_part_of_bailians_keys_that_no_other_has_is_bailians(tmp_path: Path) -> None:
    load = read_trace(json_lines(tmp_path, in_unit("s"), {"chat_id": 1, "turn": 2}))
    assert "bailian" in load.source and load.duration_s == pytest.approx(SPAN_S)


@pytest.mark.parametrize(("more", "wrong", "right"), [
    (MOONCAKE, "s", "ms"), (BAILIAN, "ms", "s"), (BAILIAN, "us", "s"), (MOONCAKE, "us", "ms"),
])  # fmt: skip
def test_a_unit_that_makes_no_sense_is_refused_with_what_it_would_be(tmp_path, more, wrong, right) -> None:
    path = json_lines(tmp_path, in_unit(wrong), more)
    with pytest.raises(TraceError, match="the unit of its time stamps is in doubt") as caught:
        read_trace(path)
    told = str(caught.value)
    assert f"read in {right}, 300 requests arrive in " in told and f"; in {wrong} they would in {SPAN_S:.4g} s" in told
    assert "--unit" in told and "\n" not in told
    load = read_trace(path, reading=Reading(unit=wrong))
    assert load.duration_s == pytest.approx(SPAN_S, abs=0.002)
    assert load.notes[-1] == f"time stamps read in {wrong}, as asked" and load.doubts == ()


@pytest.mark.parametrize("unit", PER_S)
def test_any_unit_may_be_said(tmp_path: Path, unit: str) -> None:
    """Stamps since 1970, too."""
    stamps = [round((1.7e9 + at) * PER_S[unit]) for at in AT_S]
    table = csv(tmp_path, "Timestamp,Request tokens,Response tokens", stamps, "5,7")
    for path in (json_lines(tmp_path, stamps, MOONCAKE), table):
        load = read_trace(path, reading=Reading(unit=unit), jitter=False)
        assert load.duration_s == pytest.approx(SPAN_S, abs=1.01)


@pytest.mark.parametrize(("unit", "format", "read_in_s"), [
    ("ms", "burstgpt", "1.7e+12"), ("us", "burstgpt", "1.7e+15"), ("ms", "bailian", "1.7e+12"),
    ("us", "mooncake", "1.7e+12"), ("ns", "mooncake", "1.7e+15"),
])  # fmt: skip
def test_stamps_since_1970_in_another_unit_are_refused_with_that_unit(tmp_path, unit, format, read_in_s) -> None:
    stamps = [round((1.7e9 + at) * PER_S[unit]) for at in AT_S[:20]]
    if format == "burstgpt":
        path = csv(tmp_path, "Timestamp,Request tokens,Response tokens", stamps, "5,7")
    else:
        path = json_lines(tmp_path, stamps, BAILIAN if format == "bailian" else MOONCAKE)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    told = str(caught.value)
    assert f"which is {read_in_s} s, at most 1e+11 are possible (in {unit} it is 1.7e+09 s: say so with --unit)" in told
    assert len(read_trace(path, reading=Reading(unit=unit), jitter=False).rows) == 20


AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(("header", "stamps"), [
    (AZURE_COLUMNS, ["0.0"]), (AZURE_COLUMNS, range(20)), (AZURE_COLUMNS, ["2024-05-10 00:00:00", "2024-05-11"]),
    ("Timestamp,Request tokens,Response tokens", [1_700_000_000_000 + n for n in range(20)]),
    ("arrival_s,input_tokens,output_tokens", [1.7e18, 1.7e18 + 1e6]),
    (None, [1_700_000_000_000_000 + n for n in range(20)]), (None, [3000 * (n // 4) for n in range(40)]),
])  # fmt: skip
def test_lengths_are_read_whatever_the_unit_of_the_stamps(tmp_path: Path, header: str | None, stamps: object) -> None:
    path = csv(tmp_path, header, stamps, "100,5") if header else json_lines(tmp_path, stamps, MOONCAKE)
    load = read_trace(path, only_lengths=True)
    assert len(load.rows) == len(stamps) and load.doubts == ()


@pytest.mark.parametrize("stamps", [[2, 0, 1], [1.7e18 + 2e6, 1.7e18, 1.7e18 + 1e6], [0.002, 0.0, 0.001]])
def test_lengths_alone_are_in_the_order_of_arrival(tmp_path: Path, stamps: list[float]) -> None:
    """A recording's lines are in the order in which requests ended."""
    path = tmp_path / "t.csv"
    rows = [f"{at},{100 + index},5" for index, at in enumerate(stamps)]
    for header in (AZURE_COLUMNS, "arrival_s,input_tokens,output_tokens"):
        path.write_text("\n".join([header, *rows]) + "\n")
        assert [row.input_tokens for row in read_trace(path, only_lengths=True).rows] == [101, 102, 100]


def test_no_unit_is_named_where_none_helps(tmp_path: Path) -> None:
    path = csv(tmp_path, "Timestamp,Request tokens,Response tokens", [10**30], "5,7")
    with pytest.raises(TraceError, match=r"which is 1e\+30 s, at most 1e\+11 are possible$"):
        read_trace(path)


def test_dates_say_their_unit_themselves(tmp_path: Path) -> None:
    dates = ["2024-05-10T00:00:00.5Z", "2024-05-10T00:00:02Z", "2024-05-10T02:01:00.25+02:00"]
    path = json_lines(tmp_path, dates, MOONCAKE)
    assert [row.arrival_s for row in read_trace(path).rows] == pytest.approx([0.0, 1.5, 59.75])
    with pytest.raises(ConfigError, match="dates, which have no unit"):
        read_trace(path, reading=Reading(unit="ms"))
    numbers = csv(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", [1000, 2500], "5,7")
    with pytest.raises(TraceError, match="TIMESTAMP is '1000'"):
        read_trace(numbers)
    assert read_trace(numbers, reading=Reading(unit="ms")).duration_s == 1.5


def test_burstgpt_in_milliseconds_is_doubted_and_its_nights_are_not(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    with pytest.raises(TraceError, match="in ms they would in"):
        read_trace(csv(tmp_path, header, range(0, 400_000_000, 4_000_000), "GPT-4,5,7,12,API log"))
    quiet = read_trace(csv(tmp_path, header, range(0, 30_000, 1_500), "GPT-4,5,7,12,API log"))
    assert len(quiet.rows) == 20 and "in ms they would in 28.5 s" in quiet.doubts[0], "its nights are, so it is told"
    second = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    assert len(read_trace(csv(tmp_path, second, range(0, 300, 5), "a,1.5,GPT-4,5,7,12,API log")).rows) == 60


@pytest.mark.parametrize(("unit", "name"), [("s", "bailian"), ("ms", "mooncake")])
def test_keys_of_several_formats_are_of_the_one_whose_unit_is_plausible(tmp_path: Path, unit: str, name: str) -> None:
    load = read_trace(json_lines(tmp_path, in_unit(unit), {}))
    assert load.duration_s == pytest.approx(SPAN_S)
    [told] = load.doubts
    assert f"read as {name}, by whose unit its rate is plausible" in told and told in cautions_of(load)


@pytest.mark.parametrize("stamps", [[0, 0, 0], [5], range(0, 6000, 100)])
def test_keys_of_several_formats_are_refused_where_stamps_tell_nothing(tmp_path: Path, stamps: object) -> None:
    path = json_lines(tmp_path, stamps, {})
    with pytest.raises(TraceError, match=r"more than one trace format: mooncake .stamps in ms., bailian .stamps in s."):
        read_trace(path)
    for name, per_s in (("mooncake", 1000), ("bailian", 1)):
        load = read_trace(path, reading=Reading(format=name))
        assert load.duration_s == (max(stamps) - min(stamps)) / per_s and name in load.source
    assert read_trace(path, reading=Reading(unit="s")).duration_s == max(stamps) - min(stamps)
    assert len(read_trace(path, only_lengths=True).rows) == len(list(stamps))


@pytest.mark.parametrize("more", [MOONCAKE | {"session_id": "a"}, BAILIAN | {"model": "m"}, {"priority": 1}])
def test_keys_that_no_format_has_are_asked_about(tmp_path: Path, more: dict) -> None:
    """A format that is unknown here may have Mooncake's keys and another unit, as Bailian's had."""
    path = json_lines(tmp_path, in_unit("ms"), more)
    with pytest.raises(TraceError, match=r"'(session_id|model|priority)' is in none that has its other keys"):
        read_trace(path)
    assert read_trace(path, reading=Reading(format="mooncake")).duration_s == pytest.approx(SPAN_S)


@pytest.mark.parametrize("header", [
    "arrival_s,input_tokens,output_tokens,comment", "arrival_s,input_tokens,output_tokens,Unnamed: 0",
])  # fmt: skip
def test_columns_that_nothing_reads_are_no_matter_where_the_unit_is_said(tmp_path: Path, header: str) -> None:
    assert len(read_trace(csv(tmp_path, header, range(5), "2,3,x")).rows) == 5
    azure = csv(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens,Region", ["2024-05-10 00:00:00+00:00"], "2,3,x")
    assert "azure-2024" in read_trace(azure).source
    table = csv(tmp_path, ",Timestamp,Request tokens,Response tokens", range(5), "5,2,3")  # as pandas writes it
    assert len(read_trace(table).rows) == 5


def test_a_few_requests_tell_no_rate_and_what_was_taken_is_told(tmp_path: Path) -> None:
    load = read_trace(json_lines(tmp_path, [0.5, 1.25, 3.0], MOONCAKE))
    [told] = load.doubts
    assert "read in ms, 3 requests arrive in 0.0025 s (1,200 a second); in s they would in 2.5 s" in told
    assert read_trace(json_lines(tmp_path, [0, 10535, 27482], MOONCAKE)).doubts == ()
    assert read_trace(json_lines(tmp_path, [3000] * 40, MOONCAKE)).doubts == (), "all at once has no unit"


def test_our_own_seconds_are_taken_and_told_of_where_a_hand_wrote_them(tmp_path: Path) -> None:
    """arrival_s says its unit; a recording of a quiet server says, too, where it is from."""
    header = "arrival_s,input_tokens,output_tokens"
    by_hand = csv(tmp_path, header, [round(at * 1000) for at in AT_S], "5,7")
    [told] = read_trace(by_hand).doubts
    assert "in ms they would in" in told
    assert read_trace(by_hand, reading=Reading(unit="ms")).duration_s == pytest.approx(AT_S[-1])
    assert read_trace(csv(tmp_path, f"# source: a recording\n{header}", range(0, 10**6, 10**4), "5,7")).doubts == ()
    assert read_trace(csv(tmp_path, header, [at / 1e4 for at in range(5000)], "5,7")).doubts == (), "a burst is one"
    with pytest.raises(TraceError, match="look like dates, as seconds since 1970"):
        read_trace(csv(tmp_path, header, [1.7e9, 1.7e9 + 1], "5,7"))
    with pytest.raises(TraceError, match=r"1.7e\+12 s, at most 1e\+11 are possible$"):
        read_trace(csv(tmp_path, header, [1_700_000_000_000], "5,7"))


def test_what_a_table_program_writes_is_named_or_taken(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    load = read_trace(csv(tmp_path, header, ["2024-05-10 00:00:00"], "10.0,7.0"))
    assert load.rows[0][1:3] == (10, 7)
    for rest in ("10.5,7", "inf,7", "1e400,7", "ten,7"):
        with pytest.raises(TraceError, match="a whole number is expected"):
            read_trace(csv(tmp_path, header, ["2024-05-10 00:00:00"], rest))
    with pytest.raises(TraceError, match="say the unit with --unit"):
        read_trace(csv(tmp_path, header, ["17.25"], "10,7"))
    for apart in (";", "\t"):
        with pytest.raises(TraceError, match="its cells stand apart by"):
            read_trace(csv(tmp_path, header.replace(",", apart), ["2024-05-10 00:00:00"], "10,7"))


def test_the_doubt_is_of_wrong_units_and_of_no_real_rate() -> None:
    """Every rate that public traces have, taken by the wrong unit, for spans from a minute to a month."""
    for per_s in (0.1, 0.5, 3.0, 10.0, 45.0):
        for span_s in (60.0, 600.0, 3600.0, 86_400.0, 30 * 86_400.0):
            at_s = np.linspace(0.0, span_s, min(math.ceil(span_s * per_s) + 1, 3_000_000))
            if len(at_s) < 10 or len(at_s) / span_s < 0.9 * per_s:
                continue
            assert doubt(at_s, "s") is None and doubt(at_s, "ms") is None
            if span_s * per_s < 1e6:
                assert doubt(at_s / 1000, "ms") is not None, "seconds read as milliseconds"
                is_a_quiet_day = per_s >= 10 and span_s < 100  # and may be one: a request every 100 s for 17 hours
                assert (doubt(at_s * 1000, "s") is not None) != is_a_quiet_day, "the other way round"


def test_every_tool_that_reads_traces_takes_both(tmp_path: Path) -> None:
    path = json_lines(tmp_path, in_unit("s"), MOONCAKE)
    runner = CliRunner()
    for said, code in (([], 2), (["--unit", "s"], 0), (["--unit", "weeks"], 2), (["--format", "bailian"], 0)):
        told = runner.invoke(app, ["trace", "info", str(path), *said], catch_exceptions=True)
        ended = told.exit_code if not isinstance(told.exception, TraceError | ConfigError) else 2
        assert ended == code, (said, told.output, told.exception)
    assert len(load_workload(BenchOptions(trace=path, unit="s")).rows) == NUM
    dated = csv(tmp_path, "Timestamp,Request tokens,Response tokens", [1_700_000_000_000], "9,8")
    [note] = load_workload(BenchOptions(trace=path, unit="s", lengths_from=dated)).notes[2:]
    assert "lengths taken in order from burstgpt" in note
    with pytest.raises(ConfigError, match="a synthetic workload has seconds"):
        load_workload(BenchOptions(workload="burst", unit="s"))
    spec = parse_workload({"trace": path.name, "unit": "s"}, "workload")
    assert build_workload(spec, 0, tmp_path).duration_s == pytest.approx(SPAN_S)
    named = parse_workload({"trace": path.name, "format": "bailian"}, "workload")
    assert build_workload(named, 0, tmp_path).duration_s == pytest.approx(SPAN_S)
    with pytest.raises(ConfigError, match=r"workload\.unit is for traces"):
        parse_workload({"builtin": "burst", "unit": "s"}, "workload")
    with pytest.raises(ConfigError, match=r"workload\.unit"):
        parse_workload({"trace": path.name, "unit": "hours"}, "workload")
    with pytest.raises(ConfigError, match="no trace format 'excel'"):
        read_trace(path, reading=Reading(format="excel"))
    with pytest.raises(TraceError, match="burstgpt is CSV with a header of Timestamp"):
        read_trace(path, reading=Reading(format="burstgpt"))


def test_no_format_is_a_part_of_another() -> None:
    """What a format's own files have names it alone, but for the two that dates tell apart."""
    for each in FORMATS:
        found = [other.name for other in formats_of((*each.columns, *each.marks), each.is_json_lines, None)]
        assert found == (["azure-2024", "azure-2023"] if "azure" in each.name else [each.name])


@pytest.mark.parametrize("text", ["[\n", "{\n", '[{"timestamp": 1}]\n'])
def test_json_that_is_no_lines_is_called_that(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match="one object a line"):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("name", [
    "AzureLLMInferenceTrace_conv.csv.gz", "AzureLLMInferenceTrace_code.csv.gz", "mooncake_conversation_trace.jsonl.gz",
    "burstgpt_1_head400.csv",
])  # fmt: skip
def test_no_part_of_a_real_trace_is_doubted(data_dir: Path, tmp_path: Path, name: str) -> None:
    packed = (data_dir / "arrivals" / name).read_bytes()
    lines = (gzip.decompress(packed) if name.endswith(".gz") else packed).decode().splitlines()
    head = 0 if lines[0].startswith("{") else 1
    rows = lines[head:]
    for begin in range(0, len(rows), len(rows) // 8):
        for size in (2, 10, 30, 100, 1000):
            path = tmp_path / name.removesuffix(".gz")
            path.write_text("\n".join([*lines[:head], *rows[begin : begin + size]]) + "\n")
            load = read_trace(path, jitter=False)
            is_quiet = name.startswith("burstgpt") and load.duration_s / len(load.rows) > LONGEST_GAP_EVER_S
            assert load.doubts == () or is_quiet, (begin, size)


@pytest.mark.parametrize(("stamp", "is_one"), [
    ("20240510", False), ("20240510.5", False), ("10000101.0", False), (20240510.5, False),
    ("2024-05-10 00:00:01.5", True), ("2024-05-10 00:00:01+00:00", True)])
def test_a_bare_number_is_no_date_though_its_digits_could_be_one(stamp, is_one):
    assert is_date(stamp) is is_one
