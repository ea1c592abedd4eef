"""The picture of README: made from a result file, and refused where the file has not what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.demo.picture import draw_picture
from jettison.errors import ConfigError
from jettison.report.results import RequestRecord, RunResult, build_run, write_results


def made(name: str, ttft_s: float) -> RunResult:
    records = [
        RequestRecord(i, float(i), 8, 4, "completed", float(i), i + ttft_s, i + ttft_s + 0.3, 4, [0.1] * 3)
        for i in range(5)
    ]
    series = {"worker_memory_bytes/parameters/0": [(0.0, 8e7), (2.0, 4e7)], "worker_memory_bytes/kv/0": [(0.0, 2e7)]}
    return build_run(name, records, series=series)


def test_it_is_of_the_first_comparison_and_comes_with_its_sentence(tmp_path: Path) -> None:
    results = tmp_path / "report.json"
    other_load = made("beyond: drop", 9.0)
    assert other_load.requests_detail is not None
    other_load.requests_detail[0]["input_tokens"] += 1
    write_results(results, [made("burst: recompute", 2.0), made("burst: drop", 0.5), other_load])
    told = draw_picture(results, tmp_path / "picture.svg")
    assert "with drop" in told and "4 times sooner" in told and "beyond" not in told
    drawn = (tmp_path / "picture.svg").read_text()
    assert "memory with recompute" in drawn and "memory with drop" in drawn and "time to first token" in drawn
    draw_picture(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    results = tmp_path / "report.json"
    write_results(results, [RunResult("nothing")])
    with pytest.raises(ConfigError, match="no series of memory"):
        draw_picture(results, tmp_path / "picture.svg")
    with pytest.raises(ConfigError, match="has to end in"):
        draw_picture(results, tmp_path / "picture.gif")
