"""Everything that one card can show, in under nine minutes: ``make gpu-check``.

    python3 -m benchmarks gpu check --out gpu_check.json            # all parts
    python3 -m benchmarks gpu check --parts pages verify            # some
    python3 -m benchmarks gpu check --list

Each part is a process with a limit of its own, and leaves what it has found where it dies or runs over. One line a
check: figure, target, whether it is met. The file is written anew after each part. What a bare image lacks is
installed from wheels in ``.whl`` (``--wheels``) where that folder is there, without a network; ``make gpu-wheels``
fills it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence import REPOSITORY, commit

Document = dict[str, Any]
Numbers = tuple[int, ...]
PYTHON = sys.executable
MOST_S = 540.0
"""Of all parts together."""
OUT = "{out}"
"""In a command: the file that the part writes."""


class Check(NamedTuple):
    """A figure beside its target."""

    name: str
    value: float | int | str
    target: str
    passed: bool


class Part(NamedTuple):
    """One process."""

    name: str
    limit_s: float
    command: Sequence[str]
    checks_of: Callable[[Path], list[Check]]
    """Reads what the part has written, as far as it came."""
    told: str
    may_be_cut: bool = False
    """At its limit, without a failure: what it found until then is its answer."""
    beside_next: bool = False
    """It runs at the same time as the next part, as neither measures a time."""


def measured(path: Path) -> list[Check]:
    """Of a benchmark of this family: figures that have a target, one a line of its file."""
    document = json.loads(path.read_text())
    found = document.get("checks", document)
    rows = found.items() if isinstance(found, dict) else [(row["name"], row) for row in found]
    return [
        Check(name, row["value"], str(row["target"]), bool(row["pass"]))
        for name, row in rows if isinstance(row, dict) and row.get("target") is not None
    ]  # fmt: skip


def of_pytest(path: Path, least: int) -> list[Check]:
    """Of pytest's report: no test failed, and at least so many ran."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    count = {name: sum(int(suite.get(name, 0)) for suite in suites)
             for name in ("tests", "failures", "errors", "skipped")}  # fmt: skip
    ran, bad = count["tests"] - count["skipped"], count["failures"] + count["errors"]
    return [Check("tests that fail", bad, "0", bad == 0), Check("tests that run", ran, f">= {least}", ran >= least)]


def exact(path: Path) -> list[Check]:
    """Of ``jettison verify --json``."""
    proof = json.loads(path.read_text())
    happened = sum(row["happened"] for row in proof["rows"])
    return [
        Check("tokens that differ", proof["mismatches"], f"0 of {proof['tokens_compared']:,}",
              proof["mismatches"] == 0 and proof["incomplete"] == 0 and proof["tokens_compared"] > 0),
        Check("events that happened", happened, str(len(proof["rows"])), happened == len(proof["rows"])),
    ]  # fmt: skip


def bench(name: str, *options: str) -> tuple[str, ...]:
    """A part of this family of benchmarks."""
    return (PYTHON, "-m", "benchmarks", "gpu", name, "--out", OUT, *options)


def tests(which: str, *options: str) -> tuple[str, ...]:
    """A part of the tests that are marked `cuda`."""
    return (PYTHON, "-m", "pytest", "-m", which, "tests/device", "-q", "-p", "no:cacheprovider",
            f"--junitxml={OUT}", *options)  # fmt: skip


PARTS = (
    Part("contracts", 62, tests("cuda and not whole_card", "-n", "8"), partial(of_pytest, least=30), beside_next=True,
         told="pages, kernels against float64, runner and copies"),
    Part("verify", 62, bench("verify"), exact, may_be_cut=True,
         told="tokens through one move after the other, equal to those of each request alone"),
    Part("faults", 66, bench("faults"), measured, "an exchange, a restore and two deaths of workers under load"),
    Part("foreseen", 100, bench("foreseen"), measured, "a profile's errors, and a simulation from it beside a run"),
    Part("price", 82, bench("price"), measured, "cuda beside cuda-invariant in turns, cuda's tokens but for ties"),
    Part("peer", 60, bench("peer"), measured, "nano-vllm's bench beside transformers' continuous batching"),
    Part("sampling", 12, bench("sampling"), measured, "draws by what rows ask for, and whether they are the host's"),
    Part("engine", 80, bench("engine"), measured, "decode, prefill and gaps of the live engine, nano-vllm's bench"),
    Part("steps", 20, bench("steps"), measured, "a worker's whole steps of the 7B shape, sampling, prefill"),
    Part("copies", 23, bench("copies"), measured, "KV to host pools and links' slots, alone and beside decoding"),
    Part("pages", 19, bench("pages", "--auto-only"), measured, "drops, restores, 1,000 cycles, sleep"),
    Part("memory", 16, tests("whole_card"), partial(of_pytest, least=1), "what graphs take, what sleep gives back"),
)  # fmt: skip
"""What changes most from card to card comes first: tests and tokens, whose answers are exact. At their limits all fit
into ``MOST_S``. Runs of their own: `gpu overload`, and `gpu kernels` (steps in kernels alone, both kinds, all batches:
`steps` and `price` have whole workers').
"""


def rounds(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """What runs at the same time."""
    together: list[Part] = []
    for part in parts:
        together.append(part)
        if not part.beside_next:
            yield together
            together = []
    if together:
        yield together


def run_round(parts: Sequence[Part], folder: Path, env: dict[str, str], left_s: float = MOST_S) -> list[Document]:
    """Run them at the same time, each to its end or its limit, at most ``left_s``: of each what it found, how it ended,
    and the end of what it said."""
    begun_s = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for part in parts:
            with (folder / f"{part.name}.log").open("wb") as file:
                command = [word.replace(OUT, str(folder / f"{part.name}.out")) for word in part.command]
                processes.append(subprocess.Popen(
                    command, cwd=REPOSITORY, env=env, stdout=file, stderr=file, start_new_session=True))  # fmt: skip
        return [
            end_of(part, process, folder, begun_s, min(part.limit_s, left_s))
            for part, process in zip(parts, processes, strict=True)
        ]
    finally:
        for process in processes:
            stop(process)


def end_of(
    part: Part, process: subprocess.Popen[bytes], folder: Path, begun_s: float, limit_s: float
) -> Document:
    """Wait for a part's process, and read what it has written."""
    is_enough = False
    try:
        code = process.wait(max(0.0, begun_s + limit_s - time.monotonic()))
        ended, is_enough = f"exit code {code}", code == 0
    except subprocess.TimeoutExpired:
        ended, is_enough = f"over its limit of {max(0.0, limit_s):.0f} s", part.may_be_cut
    stop(process)
    checks: list[Check] = []
    try:
        checks = part.checks_of(folder / f"{part.name}.out")
    except (OSError, ValueError, KeyError, TypeError, ElementTree.ParseError) as error:
        ended += f"; nothing to read: {type(error).__name__}: {error}"
    return {
        "ended": ended, "seconds": round(time.monotonic() - begun_s, 1),
        "checks": [check._asdict() for check in checks],
        "passed": is_enough and bool(checks) and all(check.passed for check in checks),
        "said": "" if is_enough else (folder / f"{part.name}.log").read_text(errors="replace")[-2000:],
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it, and what it left behind where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(name: str, found: Document) -> Iterator[str]:
    """One a check, and one where the part did not come to its end."""
    for check in found["checks"]:
        value = f"{check['value']:.4g}" if isinstance(check["value"], float) else check["value"]
        yield f"{'pass' if check['passed'] else 'FAIL'}  {name}: {check['name']}: {value} (target {check['target']})"
    if found["ended"] != "exit code 0" or not found["checks"]:
        yield f"{'cut ' if found['passed'] else 'FAIL'}  {name}: {found['ended']} after {found['seconds']} s"


def least_versions(pyproject: Path = REPOSITORY / "pyproject.toml") -> dict[str, Numbers]:
    """Distribution -> its lower bound, of those that the package asks for."""
    project = tomllib.loads(pyproject.read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    found = (re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)", text) for text in asked)
    return {plain(match[1]): numbers(match[2]) for match in found if match is not None}


def plain(distribution: str) -> str:
    """One spelling of its name."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def numbers(version: str) -> Numbers:
    """Of a version, up to what is no number."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def is_there(distribution: str, least: Mapping[str, Numbers]) -> bool:
    """Whether it is installed, and no older than the package's own lower bound."""
    try:
        return numbers(metadata.version(distribution)) >= least.get(plain(distribution), ())
    except metadata.PackageNotFoundError:
        return False


def installed(wheels: Path, folder: Path) -> str | None:
    """A folder with those packages of ``wheels`` that this interpreter lacks, or has in too old a version; None where
    there are none. Raises CalledProcessError."""
    least = least_versions()
    files = [file for file in sorted(wheels.glob("*.whl")) if not is_there(file.name.partition("-")[0], least)]
    if not files:
        return None
    target = folder / "site"
    subprocess.run(
        [PYTHON, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, *files], check=True
    )
    return str(target)


def check_all(parts: Sequence[Part], out: Path, wheels: Path, keep: Path | None = None) -> bool:
    """Run the parts one after the other, but for those that run beside the next; whether all of them passed. ``keep``:
    a folder for what each part writes and says."""
    document: Document = {"benchmark": "gpu_check", "commit": commit(), "parts": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        paths = [str(REPOSITORY / "src"), installed(wheels, folder), env.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        begun_s = time.monotonic()
        for together in rounds(parts):
            done = run_round(together, folder, env, begun_s + MOST_S - time.monotonic())
            for part, found in zip(together, done, strict=True):
                document["parts"][part.name] = found
                out.write_text(json.dumps(document, indent=1) + "\n")
                for line in lines_of(part.name, found):
                    print(line, flush=True)
    passed = [found["passed"] for found in document["parts"].values()]
    print(f"{sum(passed)} of {len(passed)} parts passed in {time.monotonic() - begun_s:.0f} s; {out}")
    return all(passed)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--wheels", type=Path, default=REPOSITORY / ".whl")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the files and logs of the parts there")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    options = parser.parse_args()
    parts = [part for part in PARTS if options.parts is None or part.name in options.parts]
    if options.list:
        for part in parts:
            print(f"{part.name:10} {part.limit_s:4g} s  {part.told}")
        return 0
    return 0 if check_all(parts, options.out, options.wheels, options.keep) else 1
