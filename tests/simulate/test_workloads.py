"""The requests of a spec: where its files are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.errors import ConfigError, TraceError
from jettison.simulate.workload_spec import WorkloadSpec, parse_workload
from jettison.simulate.workloads import build_workload


def servegen(windows: str) -> WorkloadSpec:
    return parse_workload({"servegen": {"windows": windows, "histograms": "h.csv", "duration_s": 300}}, "workload")


def test_windows_as_published_are_a_folder_beside_the_spec_or_among_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "little-model"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n600,2,1,Gamma,1,0.5\n")
    (tmp_path / "h.csv").write_text("field,tokens,probability\ninput_tokens,10,1\noutput_tokens,7,1\n")
    load = build_workload(servegen("little-model"), 3, tmp_path)
    assert load.name == "little-model" and len(load.rows) == pytest.approx(600, rel=0.2)
    monkeypatch.setenv("JETTISON_DATA", str(tmp_path))
    assert build_workload(servegen("little-model"), 3).rows == load.rows


def test_what_is_looked_for_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^workload\.servegen\.windows: there is no file or folder nowhere"):
        build_workload(servegen("nowhere"), 0, tmp_path)
    (tmp_path / "w").mkdir()
    (tmp_path / "h.csv").mkdir()
    with pytest.raises(TraceError, match=r"^workload\.servegen\.histograms: there is no file h\.csv"):
        build_workload(servegen("w"), 0, tmp_path)


def test_bad_rows_of_every_file_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n1,2,3\nsoon,2,3\n4,2,3\n")
    (tmp_path / "l.csv").write_text("arrival_s,input_tokens,output_tokens\n1,50,60\n1,many,3\n")
    raw = {"trace": "t.csv", "lengths": {"trace": "l.csv"}}
    with pytest.raises(TraceError, match="1 bad row, nothing loaded: line 3: arrival_s is 'soon'"):
        build_workload(parse_workload(raw, "workload"), 0, tmp_path)
    load = build_workload(parse_workload(raw | {"skip_bad_rows": True}, "workload"), 0, tmp_path)
    assert [row[:3] for row in load.rows] == [(1.0, 50, 60), (4.0, 50, 60)]
    told = [line.partition(" left out")[0] for line in load.skipped_rows]
    assert told == ["1 bad row of t.csv", "1 bad row of l.csv"]


def test_rows_are_left_out_of_files_only() -> None:
    with pytest.raises(ConfigError, match=r"^workload\.skip_bad_rows is for files"):
        parse_workload({"builtin": "burst", "skip_bad_rows": True}, "workload")
