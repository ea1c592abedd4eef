"""Every result file says of which code it is, changed code makes it older; README's table is the files'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims, evidence, figures
from jettison.report.results import read_results


def test_readme_has_the_table_that_the_files_give() -> None:
    readme = (evidence.REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert claims.with_table(readme) == readme, "make claims ARGS=--write"


def test_every_page_has_the_tables_that_the_files_give() -> None:
    assert not [page.name for page, _ in figures.stale_pages()], "make claims ARGS=--write"


def test_a_page_that_says_another_figure_than_its_file_is_stale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(figures.with_figures("before\n<!-- figures: remap -->\n<!-- end -->\nafter\n"))
    assert not figures.stale_pages([page])
    told = page.read_text()
    assert told.startswith("before\n") and "remap.json" in told and told.endswith("after\n")
    page.write_text(told.replace("276", "277"))
    assert figures.stale_pages([page]) == [(page, told)]
    with pytest.raises(KeyError, match="nowhere"):
        figures.with_figures("<!-- figures: nowhere -->\n<!-- end -->")


def test_every_file_that_a_page_links_is_there() -> None:
    for page in [evidence.REPOSITORY / "README.md", *figures.PAGES]:
        for name in re.findall(r"`?(?:benchmarks/results/)([\w.]+\.json)", page.read_text(encoding="utf-8")):
            assert (claims.RESULTS / name).is_file(), f"{page.name} names {name}"


def test_every_result_file_holds_its_evidence() -> None:
    for path in claims.RESULTS.rglob("*.json"):
        kept = json.loads(path.read_text())["evidence"]
        assert kept["commit"] and kept["date"], path
        assert claims.standing(kept).startswith(("current", "older: ")), path


def test_a_digest_changes_with_a_source_and_with_its_name_and_with_nothing_else(tmp_path: Path) -> None:
    room = tmp_path / "core"
    room.mkdir()
    (room / "a.py").write_text("x = 1\n")
    first = evidence.digest("core", tmp_path)
    (room / "a.pyc").write_text("y")
    assert evidence.digest("core", tmp_path) == first
    (room / "a.py").write_text("x = 2\n")
    second = evidence.digest("core", tmp_path)
    (room / "a.py").rename(room / "b.py")
    assert len({first, second, evidence.digest("core", tmp_path)}) == 3
    with pytest.raises(ValueError, match="no sources"):
        evidence.digest("nowhere", tmp_path)


def test_what_was_written_just_now_is_current_and_older_once_a_room_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    evidence.write_result(path, {"rows": [1]}, "core", "policy")
    document = json.loads(path.read_text())
    kept = document["evidence"]
    assert document["rows"] == [1]
    assert claims.standing(kept) == "current"
    kept["rooms"] |= {"policy": "0" * 16, "gone": "0" * 16}
    assert claims.standing(kept) == "older: policy, gone changed"
    assert claims.standing({"rooms": "unknown"}).startswith("older")


def test_a_file_of_runs_with_its_evidence_can_be_read() -> None:
    assert read_results(claims.RESULTS / "overload_vllm.json")


def test_a_swept_claim_is_one_row_of_ranges_and_others_keep_their_names() -> None:
    def row(metric: str, ours: float, in_band: bool = True) -> dict[str, Any]:
        judged = {"paper": None, "ours": ours, "unit": "x", "band": [None, 1.25], "in_band": in_band}
        return {"figure": "f", "metric": metric, "system": "s", "baseline": "b"} | judged

    rows = [row("P99, times, CV 1", 1.1), row("P99, times, CV 4", 1.3, False), row("P99, lower, 0.5 GiB", 2.0),
            row("P99, lower", 3.0), row("P99, lower, best of the sweep", 4.0)]  # fmt: skip
    told = figures.made("reproduction", {"rows": rows}).splitlines()
    assert "| f | P99, times | s | b |  | 1.1 to 1.3x | 1 of 2 |" in told
    assert len(told) == 2 + 4, "a header and a row for each of the others"
