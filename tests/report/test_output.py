"""Files that a command writes, and what it says meanwhile."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jettison.cli.main import main
from jettison.errors import ConfigError
from jettison.report.output import check_writable, safe_name, write_whole
from jettison.report.terminal import PacedLines, note_phase, phase


def test_asking_whether_a_file_can_be_written_leaves_none(tmp_path: Path) -> None:
    check_writable(tmp_path / "deep" / "out.json")
    assert list((tmp_path / "deep").iterdir()) == []
    old = tmp_path / "old.json"
    old.write_text("kept")
    check_writable(old)
    assert old.read_text() == "kept"


@pytest.mark.parametrize("where", ["a file/out.json", "."])
def test_what_cannot_be_written_is_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / where)


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    for text in ("first", "second"):
        write_whole(path, text)
        assert path.read_text() == text
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half, then \udc80")
    assert path.read_text() == "second" and list(path.parent.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_lines_come_every_ten_seconds_where_no_bar_is_seen() -> None:
    now_s = [0.0]
    err, shown = io.StringIO(), []
    with contextlib.redirect_stderr(err):
        lines = PacedLines(Console(file=io.StringIO()), clock=lambda: now_s[0])
        for now_s[0] in (0.0, 9.9, 10.0, 10.1, 19.9, 20.5, 30.4, 30.5):
            lines.offer(lambda: f"at {now_s[0]:g}")
    assert err.getvalue().split("\n") == ["at 10", "at 20.5", "at 30.5", ""]
    terminal = PacedLines(Console(file=io.StringIO(), force_terminal=True), clock=lambda: now_s[0])
    now_s[0] = 1e9
    terminal.offer(lambda: shown.append(1) or "never")
    assert not shown, "a bar says it there"


@pytest.mark.slow
def test_a_failed_command_leaves_no_file(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    spec = tmp_path / "spec.yaml"
    spec.write_text("cluster: nothing\nworkload: burst\n")
    written = ["--json", str(out)]
    for command in (
        ["bench", "--url", "http://127.0.0.1:9", "--workload", "burst", *written, "--html", str(page)],
        ["simulate", str(spec), *written, "--html", str(page), "--timeline", str(tmp_path / "line.json")],
        ["plan", str(spec), "--slo-ttft-p99", "1", *written],
        ["validate", str(spec), *written],
        ["reproduce", "nothing", *written],
        ["explain", str(tmp_path / "none.json"), *written],
        ["trace", "info", str(tmp_path / "none.csv"), *written],
        ["verify", str(tmp_path / "none"), *written],
        ["profile", str(tmp_path / "none"), *written, "--html", str(page)],
    ):
        assert main(command) == 2, command
        assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.yaml"], command


@pytest.mark.parametrize(
    ("text", "name"), [("burst: drop", "burst-drop"), ("a/../b", "a-..-b"), ("x=1 seed=0", "x=1-seed=0"), (": ", "run")]
)
def test_names_of_files(text: str, name: str) -> None:
    assert safe_name(text) == name


@given(st.text())
def test_any_text_makes_a_name(text: str) -> None:
    assert re.fullmatch(r"[\w=][\w.=-]*", safe_name(text))


def test_phases_are_lines_where_no_bar_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    with phase("first [of] two", console):
        note_phase("second", console)
    assert capsys.readouterr().err.split("\n")[:2] == ["first [of] two", "second"]
    note_phase("third", Console(file=io.StringIO(), force_terminal=True))
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
