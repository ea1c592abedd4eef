"""``jettison trace``: what it writes, what it prints, and one clear line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jettison.cli.main import main
from jettison.workload.bench import load_workload
from jettison.workload.options import LoadOptions
from jettison.workload.traces import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.5000000,{100 + second},{10 + second}\n" for second in range(0, 50, 2)
)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def run(*arguments: object) -> int:
    return main(["trace", *map(str, arguments)])


def test_info_prints_and_writes_the_figures(azure: Path, tmp_path: Path, capsys) -> None:
    assert run("info", azure, "--json", tmp_path / "new" / "info.json") == 0
    shown = capsys.readouterr().out
    assert "25 requests in 48.0 s" in shown and "peak/mean" in shown and "█" in shown
    info = json.loads((tmp_path / "new" / "info.json").read_text())
    assert info["num_requests"] == 25 and info["inputs"]["mean"] == 124.0


def test_slice_cuts_by_time_and_rows(azure: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "cut.csv.gz"
    assert run("slice", azure, "--out", out, "--start", 10, "--end", 30, "--skip", 2, "--num-requests", 5) == 0
    rows = read_trace(out).columns
    assert rows.arrival_s.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert rows.input_tokens.tolist() == [114, 116, 118, 120, 122]
    assert "5 requests" in capsys.readouterr().out


def test_slice_thins_before_it_limits_as_bench_does(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut.csv"
    assert run("slice", azure, "--out", out, "--num-requests", 6, "--thin", 0.5, "--seed", 3) == 0
    expected = load_workload(LoadOptions(trace=azure, num_requests=6, thin=0.5, seed=3)).columns
    assert read_trace(out).columns.input_tokens.tolist() == expected.input_tokens.tolist()
    assert len(expected) == 6


def test_upscale_by_factor_and_to_a_rate(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "more.csv"
    assert run("upscale", azure, "--out", out, "--factor", 2, "--keep", "span") == 0
    assert len(read_trace(out).rows) == 50
    assert run("upscale", azure, "--out", out, "--rate", 3, "--keep", "span", "--spread", 1) == 0
    assert read_trace(out).mean_rate_per_s == pytest.approx(3.0, rel=0.05)
    assert "TraceUpscaler" in " ".join(read_trace(out).notes)


def test_synth_makes_what_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "made.csv"
    assert run("synth", "--out", out, "--rate", 20, "--duration", 500, "--lengths", "longbench") == 0
    made = read_trace(out)
    assert made.mean_rate_per_s == pytest.approx(20, rel=0.1) and made.duration_s == 500
    assert made.columns.input_tokens.mean() == pytest.approx(5900, rel=0.05)
    assert run("synth", "--out", out, "--process", "gamma", "--cv", 4, "--rate", 20, "--num-requests", 5000) == 0
    gaps = np.diff(read_trace(out).columns.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(4.0, rel=0.15)
    turns = ("--process", "on-off", "--rate", 20, "--on", 5, "--off", 15)
    assert run("synth", "--out", out, *turns, "--duration", 100) == 0
    assert (read_trace(out).columns.arrival_s % 20 < 5).all()
    assert run("synth", "--out", out, "--process", "diurnal", "--rate", 5, "--duration", 600, "--period", 600) == 0
    burst = ("--rate", 1, "--duration", 100, "--burst", "20:10:30", "--burst", "60:5:30")
    assert run("synth", "--out", out, *burst, "--prompt", 64, "--output", 200) == 0
    inside = read_trace(out).columns.arrival_s
    assert 250 < ((inside >= 20) & (inside < 30)).sum() < 350


def test_synth_repeats_a_burst(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "extreme.csv"
    of_trace = ("synth", "--out", out, "--process", "burst", "--trace", azure, "--burst-end", 20, "--repeat", 3)
    assert run(*of_trace, "--burst-start", 10) == 0
    assert read_trace(out).duration_s == 50
    assert len(read_trace(out).rows) == 10 + 3 * 5
    assert run(*of_trace, "--burst-start", 0) == 0, "0 is a time like others"


def test_synth_refuses_a_zero_that_is_another_process_s(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    load = ("--rate", 1, "--duration", 10, "--prompt", 64, "--output", 200)
    assert run("synth", "--out", tmp_path / "x.csv", *load, "--burst-start", 0) == 2
    assert "--burst-start is for --process burst" in capsys.readouterr().err


def test_upscaling_says_why_a_rate_is_not_the_mean(azure: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for keep, told in (("requests", True), ("span", False)):
        assert run("upscale", azure, "--out", tmp_path / f"{keep}.csv.gz", "--rate", 3, "--keep", keep) == 0
        assert ("--keep span" in capsys.readouterr().out) == told


def test_servegen_reads_a_folder_as_published(tmp_path: Path) -> None:
    folder, histograms = tmp_path / "model", tmp_path / "h.csv"
    folder.mkdir()
    (folder / "chunk-3-trace.csv").write_text("0,5,1,Gamma,1,0.2\n600,5,1,Gamma,1,0.2\n")
    histograms.write_text("field,tokens,probability\ninput_tokens,10,1\noutput_tokens,7,1\n")
    arguments = ("--process", "servegen", "--windows", folder, "--histograms", histograms)
    assert run("synth", "--out", tmp_path / "day.csv", *arguments) == 0
    made = read_trace(tmp_path / "day.csv")
    assert len(made.rows) == pytest.approx(6000, rel=0.1) and made.source == "servegen (model)"


def test_what_is_made_can_be_replayed(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.csv.gz"
    assert run("upscale", azure, "--out", out, "--factor", 2) == 0
    load = load_workload(LoadOptions(trace=out, max_model_len=110))
    assert len(load.rows) == 25 and max(row.input_tokens + row.output_tokens for row in load.rows) == 110


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arguments = ("--rate", 5, "--duration", 60, "--lengths", "sharegpt", "--seed", seed)
        assert run("synth", "--out", tmp_path / f"{name}.csv.gz", *arguments) == 0
    a, b, c = ((tmp_path / f"{name}.csv.gz").read_bytes() for name in "abc")
    assert a == b != c


def test_fetch_without_a_name_lists_traces(capsys) -> None:
    assert run("fetch") == 0
    shown = capsys.readouterr().out
    assert "burstgpt-1" in shown and "CC-BY 4.0" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("info", "nowhere.csv"), "nowhere.csv"),
        (("info", "{bad}"), "1 bad row, nothing loaded: line 27: ContextTokens is -1"),
        (("info", "{azure}", "--jitter"), "exact"),
        (("slice", "{azure}", "--out", "{out}", "--start", "400"), "no window"),
        (("slice", "{azure}", "--out", "{out}", "--skip", "99"), "has 25 requests"),
        (("slice", "{azure}", "--out", "{out}", "--start", "10.5", "--end", "11"), "no request is left"),
        (("upscale", "{azure}", "--out", "{out}"), "--factor or --rate"),
        (("upscale", "{azure}", "--out", "{out}", "--factor", "0.5"), "thin"),
        (("upscale", "{azure}", "--out", "{out}", "--rate", "0.01"), "already"),
        (("upscale", "{azure}", "--out", "{out}", "--factor", "1e12", "--keep", "span"), "100,000,000 requests"),
        (("synth", "--out", "{out}", "--duration", "5"), "--process poisson needs --rate"),
        (("synth", "--out", "{out}", "--rate", "5"), "--duration or --num-requests"),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--cv", "2"), "--cv is for --process gamma"),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--on", "2"), "--on is for --process on-off"),
        (("synth", "--out", "{out}", "--rate", "-5", "--duration", "5"), "rate_per_s must be above 0"),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--burst", "soon"), "START:SECONDS:FACTOR"),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--prompt", "1e12"), "--prompt needs a number"),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--output", "1e12"), "--output needs a number"),
        (("synth", "--out", "{out}", "--rate", "1e300", "--duration", "5"), "more than 100,000,000 requests"),
        (("synth", "--out", "{out}", "--process", "gamma", "--rate", "5", "--duration", "5", "--cv", "1e160"), "cv "),
        (("synth", "--out", "{out}", "--rate", "5", "--duration", "5", "--lengths", "gpt"), "known: burstgpt"),
        (("synth", "--out", "{out}", "--process", "servegen", "--windows", "{azure}", "--histograms", "{azure}"),
         "line 1 must be client_id"),
        (("synth", "--out", "{azure}/x.csv", "--rate", "5", "--duration", "5"), "cannot be written"),
        (("slice", "{azure}", "--out", "."), ".: cannot be written: it is a folder"),
        (("slice", "{azure}", "--out", "/"), "/: cannot be written: it is a folder"),
        (("fetch", "everything"), "unknown public trace"),
        (("fetch", "azure-conv-2023", "--url", "file:///etc/passwd", "--out", "{out}"), "only http"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(azure: Path, tmp_path: Path, capsys, arguments, reason: str) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(AZURE + "2023-11-16 18:16:00,-1,5\n")
    names = {"azure": azure, "bad": bad, "out": tmp_path / "out.csv"}
    assert run(*(argument.format(**names) for argument in arguments)) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


def test_bad_rows_are_named_before_anything_else(azure: Path, tmp_path: Path, capsys) -> None:
    azure.write_text(AZURE + "yesterday,1,1\n")
    out = tmp_path / "cut.csv"
    for arguments in (["info", azure], ["slice", azure, "--out", out], ["upscale", azure, "--out", out, "--factor", 2]):
        assert run(*arguments) == 2
        assert "1 bad row, nothing loaded: line 27" in capsys.readouterr().err
        assert run(*arguments, "--skip-bad-rows") == 0
        assert capsys.readouterr().err.startswith("mind: 1 bad row of azure.csv left out: line 27: TIMESTAMP is 'yest")
    synth = ["synth", "--out", out, "--rate", 5, "--num-requests", 9, "--lengths-from", azure]
    assert run(*synth) == 2 and run(*synth, "--skip-bad-rows") == 0
    assert "left out: line 27" in capsys.readouterr().err
    assert any("left out: line 27" in note for note in read_trace(out).notes)


def test_info_says_what_was_seen_of_the_stamps(azure: Path, tmp_path: Path, capsys) -> None:
    assert run("info", azure) == 0
    assert "time stamps: no steps of a coarse clock (25 different ones of 25 requests)" in capsys.readouterr().out
    steps = tmp_path / "steps.jsonl"
    rows = [{"timestamp": 3000 * (n // 4), "input_length": 5, "output_length": 5} for n in range(40)]
    steps.write_text("\n".join(map(json.dumps, rows)))
    assert run("info", steps) == 0
    shown = capsys.readouterr().out
    assert "time stamps: steps of 3 s (10 different ones of 40 requests)" in shown
    assert "arrivals jittered uniformly inside 3 s steps" in shown


def test_hours_without_a_request_are_named(tmp_path: Path, capsys) -> None:
    night = tmp_path / "night.csv"
    night.write_text("arrival_s,input_tokens,output_tokens\n10,5,5\n20,5,5\n30000,5,5\n33599,5,5\n37199,5,5\n")
    assert run("info", night) == 0
    told = "from 20 s to 30,000 s (8.3 h), from 33,599 s to 37,199 s (1.0 h)"
    assert capsys.readouterr().err == f"mind: night: no request arrives {told}\n"
