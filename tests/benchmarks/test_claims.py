"""Every result file says of which code it is, changed code makes it older; README's table is the files'."""

from __future__ import annotations

import json
from pathlib import Path

import claims
import evidence
import pytest

from jettison.report.results import read_results


def test_readme_has_the_table_that_the_files_give() -> None:
    readme = (evidence.REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert claims.with_table(readme) == readme, "make claims ARGS=--write"


def test_every_result_file_holds_its_evidence() -> None:
    for path in claims.RESULTS.glob("*.json"):
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
