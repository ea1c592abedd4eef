"""The simulator against live clusters on this machine: every spec of benchmarks/validation, and a page of the results.

    python -m benchmarks simulator validate --calibrate           # the profile anew, then all specs: more than an hour
    python -m benchmarks simulator validate --only chat waves-4   # some of them
    python -m benchmarks simulator validate --again               # the simulated side again, of the kept live runs
    python -m benchmarks simulator validate --page                # the page again, from what is there

Every seed is served live twice: what the two differ by stands beside what the simulation differs by.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.shared import Row, parse
from jettison.config.files import read_yaml_mapping
from jettison.report.failures import check_answered
from jettison.simulate.validate_command import print_comparison, validate_command
from jettison.simulate.validation_file import read_document, simulate_again, write_document

FOLDER = Path(__file__).parents[1] / "validation"


def main() -> None:
    options = parse(
        __doc__, only=(None, "specs by their file's stem", {"nargs": "*"}),
        calibrate=(False, "measure the profile first"), seeds=(int, "seeds 0 to N - 1 in place of the specs' own"),
        out=(FOLDER / "results", "folder of the results", {"type": Path}),
        again=(False, "keep the live runs, simulate them anew"), page=(False, "write the page only"),
    )  # fmt: skip
    if options.calibrate and options.again:
        raise SystemExit("--calibrate goes with new live runs only")
    specs = sorted(path for path in FOLDER.glob("*.yaml") if not options.only or path.stem in options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.page:
        calibrates = options.calibrate
        for path in specs:
            raw = read_yaml_mapping(path, "the spec")
            if options.seeds:
                raw["seeds"] = options.seeds
            out = options.out / f"{path.stem}.json"
            if options.again:
                again(raw, path, out)
            else:
                validate_command(raw, path.stem, path.parent, json_out=out, calibrates=calibrates, console=Console())
            calibrates = False  # the specs share a model and a number of threads
    page = options.out.parent / "README.md"
    page.write_text(render(options.out), encoding="utf-8")
    print(f"wrote {page}")


def again(raw: Row, path: Path, out: Path) -> None:
    """The live runs of a result file beside new simulations: after a change of the simulator."""
    trios = simulate_again(raw, path.stem, path.parent, read_document(out))
    print_comparison(trios, Console())
    write_document(out, trios)
    check_answered([run for trio in trios for run in (trio.live, trio.again)])


def render(folder: Path) -> str:
    """The page: a table of means over seeds for each spec that has been run."""
    lines = [
        "# The simulator against live runs", "",
        "Written by `python -m benchmarks simulator validate` ([docs/simulate.md](../../docs/simulate.md) says how",
        "it is done). Each line is a mean over the seeds of a spec. The last column is what two live runs of the same",
        "requests differ by: no simulation can be asked for less. Of counts: how many more.", "",
    ]
    rows = [row for path in sorted(folder.glob("*.json")) for row in read_document(path)["means"]]
    if rows:
        lines += [
            "| scenario | metric | live | live again | simulated | simulated over live | live again over live |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
    before = ""
    for row in rows:
        lines.append(_line(row, "" if row["scenario"] == before else row["scenario"]))
        before = row["scenario"]
    return "\n".join(lines).rstrip() + "\n"


def _line(row: Row, scenario: str) -> str:
    figures = " | ".join(f"{row[side]:.4g}" for side in ("live", "live_again", "simulated"))
    over = " | ".join(f"{row[k]:+.1f}" if row["is_count"] else f"{row[k]:+.1%}" for k in ("difference", "floor"))
    return f"| {scenario} | {row['metric']} | {figures} | {over} |"
