"""`make gpu-check` without a card: parts that pass, miss a target, die, hang and write nonsense."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import check, verify
from benchmarks.gpu.check import (
    MOST_S,
    OUT,
    PARTS,
    Part,
    check_all,
    is_there,
    least_versions,
    measured,
    of_pytest,
    rounds,
)
from benchmarks.gpu.verify import ADDED, merged

WRITE = (
    "import json, sys;"
    "json.dump({'checks': [{'name': 'drop, ms', 'value': %s, 'target': 5, 'pass': %s}]}, open(sys.argv[1], 'w'));"
)


def part(name: str, code: str, limit_s: float = 60.0) -> Part:
    return Part(name, limit_s, (sys.executable, "-c", code, OUT), measured, "")


def run(parts: list[Part], folder: Path, capsys) -> tuple[bool, dict, list[str]]:
    passed = check_all(parts, folder / "out.json", folder / "no wheels")
    return passed, json.loads((folder / "out.json").read_text())["parts"], capsys.readouterr().out.splitlines()


def test_a_figure_that_meets_its_target_passes(tmp_path, capsys):
    passed, found, lines = run([part("good", WRITE % ("3.25", "True"))], tmp_path, capsys)
    assert passed and found["good"]["passed"] and found["good"]["ended"] == "exit code 0"
    assert lines[0] == "pass  good: drop, ms: 3.25 (target 5)" and lines[-1].startswith("1 of 1 parts passed")


def test_a_part_that_ends_badly_fails_alone_and_keeps_what_it_found(tmp_path, capsys):
    parts = [
        part("misses", WRITE % ("7.5", "False")),
        part("dies", WRITE % ("3", "True") + "sys.exit('no card')"),
        part("hangs", WRITE % ("3", "True") + "import time; open(sys.argv[1]).close(); time.sleep(600)", 3.0),
        part("silent", "pass"),
        part("nonsense", "import sys; open(sys.argv[1], 'w').write('{')"),
        part("empty", "import sys; open(sys.argv[1], 'w').write('{}')"),
        part("good", WRITE % ("1", "True")),
    ]
    passed, found, lines = run(parts, tmp_path, capsys)
    assert not passed and [name for name, each in found.items() if each["passed"]] == ["good"]
    assert "FAIL  misses: drop, ms: 7.5 (target 5)" in lines
    assert found["dies"]["checks"][0]["passed"] and "no card" in found["dies"]["said"]
    assert found["hangs"]["ended"].startswith("over its limit of 3 s") and found["hangs"]["checks"]
    assert "nothing to read" in found["silent"]["ended"] and "nothing to read" in found["nonsense"]["ended"]
    assert any(line.startswith("FAIL  empty: exit code 0") for line in lines), "no check is no pass"


def test_a_part_that_may_be_cut_passes_by_what_it_found_until_then(tmp_path, capsys):
    hang = "import time; open(sys.argv[1]).close(); time.sleep(600)"
    parts = [part("right", WRITE % ("3", "True") + hang, 3.0), part("wrong", WRITE % ("7", "False") + hang, 3.0),
             part("nothing", "import time; time.sleep(600)", 0.5), part("dies", WRITE % ("3", "True") + "sys.exit(1)")]
    passed, found, lines = run([each._replace(may_be_cut=True) for each in parts], tmp_path, capsys)
    assert not passed and [name for name, each in found.items() if each["passed"]] == ["right"]
    assert [line.split()[:2] for line in lines if "over its limit" in line] == [
        ["cut", "right:"], ["FAIL", "wrong:"], ["FAIL", "nothing:"]]  # fmt: skip


def test_pytest_s_report_fails_where_a_test_does_or_none_runs(tmp_path):
    def report(tests: int, failures: int, skipped: int) -> list[bool]:
        path = tmp_path / "report.xml"
        path.write_text(f'<testsuites><testsuite tests="{tests}" failures="{failures}" errors="0" '
                        f'skipped="{skipped}"/></testsuites>')  # fmt: skip
        return [check.passed for check in of_pytest(path, least=30)]

    assert report(40, 0, 4) == [True, True]
    assert report(40, 1, 4) == [False, True]
    assert report(40, 0, 40) == [True, False]


def test_all_parts_take_less_than_nine_minutes_at_most():
    assert MOST_S == 540.0
    assert sum(max(part.limit_s for part in together) for together in rounds(PARTS)) <= MOST_S, "at their limits"
    assert [part.name for part in PARTS if part.may_be_cut] == ["verify"]
    run = subprocess.run([sys.executable, "-m", "benchmarks", "gpu", "check", "--list"], capture_output=True, text=True,
                         check=True, cwd=Path(__file__).parents[2])  # fmt: skip
    assert [line.split()[0] for line in run.stdout.splitlines()] == [part.name for part in PARTS]


def test_parts_that_measure_no_time_run_beside_the_next_one(tmp_path, capsys):
    meets = "import pathlib, sys, time; pathlib.Path({mine!r}).touch(); ends = time.monotonic() + 30\n" \
            "while not pathlib.Path({other!r}).exists(): assert time.monotonic() < ends; time.sleep(0.01)\n"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    parts = [part("first", meets.format(mine=a, other=b) + WRITE % ("1", "True"))._replace(beside_next=True),
             part("second", meets.format(mine=b, other=a) + WRITE % ("1", "True")),
             part("third", WRITE % ("1", "True"))]  # fmt: skip
    assert [[each.name for each in together] for together in rounds(parts)] == [["first", "second"], ["third"]]
    passed, found, _ = run(parts, tmp_path, capsys)
    assert passed and list(found) == ["first", "second", "third"]
    assert [[each.name for each in together] for together in rounds(parts[:1])] == [["first"]], "also when it is alone"


def test_tables_of_several_models_are_one():
    counts = dict.fromkeys(ADDED, 0) | {"max_model_len": 256, "complete": True}
    one = counts | {"rows": [{"event": "a"}], "tokens_compared": 5}
    other = counts | {"rows": [{"event": "b"}], "tokens_compared": 7, "mismatches": 2, "complete": False}
    assert merged([one, other]) == counts | {
        "rows": [{"event": "a"}, {"event": "b"}], "tokens_compared": 12, "mismatches": 2, "complete": False
    }  # fmt: skip


def test_all_models_end_with_the_first_that_fails(tmp_path, monkeypatch):
    """One whose process cannot start is not passed over because the others take longer than the part may."""
    begin = subprocess.Popen

    def instead(command: list[str], **more: object) -> subprocess.Popen:
        code = "raise SystemExit(3)" if "broken" in command else "import time; time.sleep(600)"
        return begin([sys.executable, "-c", code])

    monkeypatch.setattr(verify.subprocess, "Popen", instead)
    options = argparse.Namespace(architectures=["slow", "broken"], device="cpu", out=tmp_path / "out.json")
    assert verify.beside_each_other(options) == 3


def test_the_last_part_has_what_is_left_of_the_nine_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MOST_S", 0.0)
    out = tmp_path / "check.json"
    assert not check_all([part("late", "import time; time.sleep(60)")], out, tmp_path)
    assert json.loads(out.read_text())["parts"]["late"]["ended"].startswith("over its limit of 0 s")


def test_what_is_older_than_the_package_asks_for_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2.9,<=2.13.0", "typer>=0.19", "backports.zstd>=1; extra < \'4\'"]\n'
        '[project.optional-dependencies]\ncuda = ["cuda-bindings>=12.8"]\nbare = ["lm_eval[api]>=0.4.8", "types-x"]\n'
    )
    least = least_versions(tmp_path / "pyproject.toml")
    assert least == {"torch": (2, 9), "typer": (0, 19), "backports-zstd": (1,), "cuda-bindings": (12, 8),
                     "lm-eval": (0, 4, 8)}  # fmt: skip
    versions = {"typer": "0.16.1", "torch": "2.11.0+cu130", "backports_zstd": "1.0", "rich": "1"}

    def version(name: str) -> str:
        if name not in versions:
            raise check.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(check.metadata, "version", version)
    there = [is_there(name, least) for name in ("typer", "torch", "backports_zstd", "rich", "msgspec")]
    assert there == [False, True, True, True, False]
