"""Requests drawn from a characterisation have its rates, its irregularity and its lengths."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError, TraceError
from jettison.workload.lengths import TokenHistogram
from jettison.workload.servegen import LEAST_SHAPES, ClientWindow, ServeGenProfile, draw_servegen, read_servegen

WINDOWS = """client_id,timestamp,rate,cv,pattern,param1,param2
0,0,20,1.0,Gamma,1.0,0.05
0,600,2,1.0,Gamma,1.0,0.5
1,600,10,3.0,Weibull,0.45,0.05
1,1200,0,1.0,Gamma,1.0,1.0
"""
BINS = """field,tokens,probability
input_tokens,10,0.25
input_tokens,100,0.75
output_tokens,7,1.0
"""

ONE = TokenHistogram(np.ones(1, dtype=np.int32), np.ones(1))


def files(folder: Path, windows: str = WINDOWS, bins: str = BINS) -> tuple[Path, Path]:
    first, second = folder / "w.csv.gz", folder / "h.csv"
    first.write_bytes(gzip.compress(windows.encode()))
    second.write_text(bins)
    return first, second


@pytest.fixture
def profile(tmp_path: Path) -> ServeGenProfile:
    return read_servegen(*files(tmp_path))


def test_rates_are_those_of_the_windows(profile: ServeGenProfile) -> None:
    assert profile.window_s == 600 and profile.duration_s == 1200
    load = draw_servegen(profile, 1)
    counts = np.histogram(load.columns.arrival_s, bins=(0, 600, 1200))[0]
    assert counts[0] == pytest.approx(12_000, rel=0.05)
    assert counts[1] == pytest.approx(7_200, rel=0.15)
    assert profile.expected_requests(0, 1200) == 12_000 + 1_200 + 6_000
    assert profile.expected_requests(300, 700) == 300 * 20 + 100 * 12
    assert load.duration_s == 1200
    assert (np.diff(load.columns.arrival_s) >= 0).all()


def test_irregularity_is_kept_whatever_the_scale(profile: ServeGenProfile) -> None:
    only = ServeGenProfile("one", {"1": profile.clients["1"]}, 600.0, profile.inputs, profile.outputs)
    for scale in (1.0, 4.0):
        gaps = np.diff(draw_servegen(only, 2, rate_scale=scale, start_s=600.0).columns.arrival_s)
        assert gaps.std() / gaps.mean() == pytest.approx(2.5, rel=0.25)  # Weibull of shape 0.45


@pytest.mark.parametrize(("pattern", "shape"), LEAST_SHAPES.items())
def test_the_least_shapes_can_be_drawn(tmp_path: Path, pattern: str, shape: float) -> None:
    rows = "".join(f"{n},{at},0.05,1,{pattern},{shape},1\n" for n in range(20) for at in (0, 600))
    profile = read_servegen(*files(tmp_path, WINDOWS.splitlines()[0] + "\n" + rows))
    assert np.isfinite(draw_servegen(profile, 1).columns.arrival_s).all()


def test_lengths_are_the_histograms(profile: ServeGenProfile) -> None:
    columns = draw_servegen(profile, 3).columns
    assert (columns.input_tokens == 10).mean() == pytest.approx(0.25, abs=0.02)
    assert set(columns.output_tokens.tolist()) == {7}


def test_a_part_of_the_time_starts_at_zero(profile: ServeGenProfile) -> None:
    part = draw_servegen(profile, 4, start_s=300.0, duration_s=200.0, rate_scale=0.5)
    assert part.columns.arrival_s.max() < 200
    assert len(part.rows) == pytest.approx(2000, rel=0.1)
    assert draw_servegen(profile, 4) == draw_servegen(profile, 4)
    assert draw_servegen(profile, 4).rows != draw_servegen(profile, 5).rows


@given(start=st.integers(0, 3), every=st.integers(1, 4), part_s=st.floats(1.0, 600.0))
def test_a_compressed_day_is_the_first_part_of_every_so_many_windows(start: int, every: int, part_s: float) -> None:
    rates = [1.0, 0.0, 3.0, 2.0, 0.5, 4.0, 1.5, 2.5]
    clients = {
        "a": tuple(ClientWindow(600.0 * i, rate, "Gamma", 1.0) for i, rate in enumerate(rates) if rate),
        "b": (ClientWindow(0.0, 1.0, "Weibull", 0.9), ClientWindow(7 * 600.0, 2.0, "Weibull", 0.9)),
    }
    whole = ServeGenProfile("day", clients, 600.0, ONE, ONE)
    day = whole.compressed(600.0 * start, 600.0 * every, part_s)
    kept = range(start, 8, every)
    for index, number in enumerate(kept):
        at_s = 600.0 * number
        there = day.expected_requests(index * part_s, (index + 1) * part_s)
        assert there == pytest.approx(whole.expected_requests(at_s, at_s + part_s))
    assert day.window_s == part_s and day.duration_s <= len(kept) * part_s * (1 + 1e-9)


def test_a_part_of_a_day_is_within_a_window(profile: ServeGenProfile) -> None:
    for start_s, every_s, part_s in ((100.0, 600.0, 60.0), (0.0, 700.0, 60.0), (0.0, 600.0, 601.0), (0.0, 600.0, 0.0)):
        with pytest.raises(ConfigError, match=r"multiple|part_s"):
            profile.compressed(start_s, every_s, part_s)
    with pytest.raises(ConfigError, match="no request"):
        profile.compressed(profile.duration_s, 600.0, 60.0)


@pytest.mark.parametrize(
    ("windows", "bins", "reason"),
    [
        (WINDOWS + "2,600,-1,1,Gamma,1,1\n", BINS, "line 6: rate is '-1'"),
        (WINDOWS + "2,600,1,1,Normal,1,1\n2,600\n", BINS, "2 bad rows, nothing loaded: line 6: pattern is 'Normal'"),
        (WINDOWS + "2,600,1,1,Gamma,0,1\n", BINS, "line 6: param1 is '0'"),
        (WINDOWS + "2,600,1,1,Weibull,0.005,1\n", BINS, "line 6: param1 is '0.005', a Weibull shape of at least 0.05"),
        (WINDOWS + "2,600,1,1,Gamma,1e-310,1\n", BINS, "line 6: param1 is '1e-310', a Gamma shape of at least 0.001"),
        (WINDOWS + "0,600,1,1,Gamma,1,1\n", BINS, "client 0 has two windows"),
        (WINDOWS + "0,1500,1,1,Gamma,1,1\n0,1750,1,1,Gamma,1,1\n", BINS, "do not start at multiples"),
        (WINDOWS.splitlines()[0] + "\n", BINS, "no window has a rate"),
        ("a,b\n", BINS, "line 1 must be client_id"),
        (WINDOWS, BINS + "input_tokens,0,0\n", "line 5: tokens is 0"),
        (WINDOWS, BINS + "total,5,0.1\n", "line 5: field is 'total'"),
        (WINDOWS, BINS.replace("1.0", "0.5"), "probabilities of output_tokens sum to 0.5"),
        (WINDOWS, "field,tokens,probability\ninput_tokens,5,1\n", "no output_tokens"),
    ],
)
def test_bad_files_are_refused_with_line_numbers(tmp_path: Path, windows: str, bins: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_servegen(*files(tmp_path, windows, bins))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"start_s": 1200.0}, {"duration_s": -1.0}, {"rate_scale": 0.0}, {"rate_scale": 1e12}]
)
def test_impossible_draws_are_refused(profile: ServeGenProfile, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        draw_servegen(profile, 0, **options)


def test_the_published_day_has_its_published_figures(data_dir: Path) -> None:
    folder = data_dir / "servegen"
    day = read_servegen(folder / "deepseek-r1_24h_trace.csv.gz", folder / "deepseek-r1_24h_token_pdf.csv.gz")
    assert len(day.clients) == 73
    load = draw_servegen(day, 0, rate_scale=0.2)
    windows = np.histogram(load.columns.arrival_s, bins=144, range=(0, 86_400))[0] / 600 / 0.2
    assert windows.mean() == pytest.approx(16.0, rel=0.02)
    assert windows.max() == pytest.approx(42.5, rel=0.1)
    assert load.columns.input_tokens.mean() == pytest.approx(1268.2, rel=0.02)
    assert load.columns.output_tokens.mean() == pytest.approx(1527.4, rel=0.02)


# As published: a folder with a headerless file for each client.

CHUNKS = {
    "chunk-0-trace.csv": "0,20,1.0,Gamma,1.0,0.05\n600,2,1.0,Gamma,1.0,0.5\n1200,0,0,,0,0\n",
    "chunk-1-trace.csv": "0,0.0,0.0,,0.0,0.0\n600,10,3.0,Weibull,0.45,0.05\n1200,0,1.0,Gamma,1.0,1.0\n",
}


def folder_of(parent: Path, chunks: dict[str, str], bins: str = BINS) -> tuple[Path, Path]:
    folder, histograms = parent / "little-model", parent / "h.csv"
    folder.mkdir()
    for name, text in chunks.items():
        packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        (folder / name).write_bytes(packed)
    histograms.write_text(bins)
    return folder, histograms


def test_a_folder_as_published_means_what_the_joined_file_means(tmp_path: Path, profile: ServeGenProfile) -> None:
    published = read_servegen(*folder_of(tmp_path, {**CHUNKS, "chunk-0-dataset.json": "{}", "README.md": "#"}))
    assert published.name == "little-model"
    assert published.clients == profile.clients and published.window_s == profile.window_s
    one, other = (draw_servegen(found, 5) for found in (published, profile))
    assert one.rows == other.rows and one.duration_s == other.duration_s


def test_clients_draw_the_same_in_either_form_however_many_there_are(tmp_path: Path) -> None:
    windows = {client: f"0,{client + 1},1,Gamma,0.5,1\n600,2,1,Weibull,0.7,1\n" for client in range(12)}
    folder, histograms = folder_of(tmp_path, {f"chunk-{c}-trace.csv.gz": text for c, text in windows.items()})
    header = WINDOWS.splitlines()[0] + "\n"
    lines = [f"{client},{line}\n" for client, text in windows.items() for line in text.splitlines()]
    joined, _ = files(tmp_path, header + "".join(lines))
    assert draw_servegen(read_servegen(folder, histograms), 3).rows == draw_servegen(
        read_servegen(joined, histograms), 3
    ).rows  # fmt: skip


def test_idle_windows_say_how_long_a_window_is(tmp_path: Path) -> None:
    chunk = "0,5,1,Gamma,1,1\n600,0,0,,0,0\n1200,5,1,Gamma,1,1\n"
    assert read_servegen(*folder_of(tmp_path, {"chunk-7-trace.csv": chunk})).window_s == 600


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunk-1-trace.csv": "0,1,1,Gamma,1,1\n600,-1,1,Gamma,1,1\n"},
         "chunk-1-trace.csv: 1 bad row, nothing loaded: line 2: rate is '-1'"),
        ({"chunk-1-trace.csv": "0,1,1,Normal,1,1\n"}, "line 1: pattern is 'Normal'"),
        ({"chunk-1-trace.csv": "0,1,1,Gamma,0,1\n"}, "line 1: param1 is '0'"),
        ({"chunk-1-trace.csv": "0,0,nan,,nan,nan\n5,nan,0,,0,0\n"}, "line 2: rate is 'nan'"),
        ({"chunk-1-trace.csv": "1,0,1,1,Gamma,1,1\n"},
         "line 1: 7 columns, 6 are expected (timestamp,rate,cv,pattern,param1,param2)"),
        ({"chunk-1-trace.csv": "timestamp,rate,cv,pattern,param1,param2\n"}, "line 1: timestamp is 'timestamp'"),
        ({"chunk-1-trace.csv": "0,1,1,Gamma,1,1\n0,2,1,Gamma,1,1\n"}, "client 1 has two windows"),
        ({"chunk-1-trace.csv.gz": ""}, "client 1 has two files, chunk-1-trace.csv and chunk-1-trace.csv.gz"),
        ({"chunk-0-trace.csv": "", "chunk-1-trace.csv": ""}, "no window has a rate above 0"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_refused_with_file_and_line(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_servegen(*folder_of(tmp_path, {**CHUNKS, **changes}))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_such_files_is_told_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no file of this folder is named chunk-<client>-trace"):
        read_servegen(*folder_of(tmp_path, {"chunk-x-trace.csv": "", "chunk-1-dataset.json": "{}"}))
    with pytest.raises(TraceError, match="cannot be read"):
        read_servegen(tmp_path / "nowhere", tmp_path / "h.csv")


def test_the_published_day_is_the_same_as_a_folder(tmp_path: Path, data_dir: Path) -> None:
    joined = data_dir / "servegen" / "deepseek-r1_24h_trace.csv.gz"
    histograms = data_dir / "servegen" / "deepseek-r1_24h_token_pdf.csv.gz"
    chunks: dict[str, str] = {}
    for line in gzip.decompress(joined.read_bytes()).decode().splitlines()[1:]:
        client, _, window = line.partition(",")
        name = f"chunk-{client}-trace.csv"
        chunks[name] = chunks.get(name, "") + window + "\n"
    folder, _ = folder_of(tmp_path, chunks)
    one, other = (draw_servegen(read_servegen(path, histograms), 0, duration_s=3600.0) for path in (folder, joined))
    assert len(chunks) == 73 and one.rows == other.rows


def test_bad_rows_may_be_left_out_of_both_files(tmp_path: Path) -> None:
    """A window that is left out leaves nothing behind, its start neither."""
    windows = WINDOWS + "1,3,10,3.0,Weibull,none,0.05\n" + "1,7,10,3.0,Pareto,1,1\n"
    bins = BINS + "output_tokens,7\n"
    with pytest.raises(TraceError, match="2 bad rows, nothing loaded: line 6"):
        read_servegen(*files(tmp_path, windows, bins))
    found = read_servegen(*files(tmp_path, windows, bins), skip_bad_rows=True)
    assert found.window_s == 600
    first, second = found.skipped_rows
    assert first.startswith("2 bad rows of w.csv.gz left out: line 6: param1") and "line 7: pattern" in first
    assert second.startswith("1 bad row of h.csv left out: line 5: 2 columns")
    load, plain = draw_servegen(found, 3), draw_servegen(read_servegen(*files(tmp_path)), 3)
    assert load.rows == plain.rows
    assert load.skipped_rows == found.skipped_rows and set(found.skipped_rows) <= set(load.notes)
