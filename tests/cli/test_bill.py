"""`jettison bill` on what `jettison simulate` wrote: table, files, bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "simulate"))

from specs import spec

from jettison.cli.main import main


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bill")
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec()))
    results = folder / "runs.json"
    assert main(["simulate", str(folder / "spec.yaml"), "--json", str(results), "--processes", "1"]) == 0
    return results


def test_a_recorded_run_is_billed(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "bill.json", tmp_path / "bill.svg"
    assert main(["bill", str(recorded), "--epoch-s", "0.1", "--json", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "run, awake" in text and "best-fit" in text and "least" in text
    runs = {each["run"]: each for each in json.loads(out.read_text())["runs"]}
    rows = {row["what"]: row for row in runs["recompute"]["rows"]}
    assert rows["run, awake"]["mean_devices"] == 2.0
    assert rows["least"]["mean_devices"] <= rows["mell"]["mean_devices"]
    # A burst is more than two instances hold: that is what a drop is for.
    assert rows["mell"]["peak_devices"] > 2
    assert b"<svg" in (tmp_path / "bill-drop.svg").read_bytes() and not plot.exists()


def test_one_run_one_picture(recorded: Path, tmp_path: Path) -> None:
    plot = tmp_path / "bill.png"
    code = main(["bill", str(recorded), "--run", "drop", "--policies", "mell,worst-fit", "--plot", str(plot)])
    assert code == 0 and plot.read_bytes()[:4] == b"\x89PNG"


def test_files_are_there_where_the_reader_of_the_words_is_gone(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr("jettison.report.bill.print_bill", gone)
    files = tmp_path / "bill.json", tmp_path / "bill.svg"
    flags = ["--run", "drop", "--policies", "mell", "--json", str(files[0]), "--plot", str(files[1])]
    assert main(["bill", str(recorded), *flags]) == 1
    assert all(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--run", "nobody"], "no run named 'nobody'"),
        (["--policies", "mel"], "unknown packing 'mel'"),
        (["--capacity-tokens", "1"], "holds no block"),
        (["--plot", "bill.pdf"], ".svg or .png"),
    ],
)
def test_bad_input_is_one_line(
    recorded: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", str(recorded), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_an_unknown_file_and_a_run_without_requests_are_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", str(tmp_path / "none.json")]) == 2
    document = json.loads(recorded.read_text())
    for each in document["runs"]:
        each["requests_detail"] = None
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(document))
    assert main(["bill", str(bare)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "cannot be read" in first and "kept no requests" in second


@pytest.mark.parametrize("command", ["bill", "explain"])
def test_a_file_without_runs_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"failures": [], "format_version": 2, "runs": []}')
    assert main([command, str(empty)]) == 2
    assert f"{empty} holds no run" in capsys.readouterr().err
