"""The simulator against live clusters on this machine: every spec of benchmarks/validation, and a page of the results.

    python benchmarks/validate.py --calibrate            # the profile anew, then all specs: more than an hour
    python benchmarks/validate.py --only chat waves-4    # some of them
    python benchmarks/validate.py --again                # the simulated side again, of the live runs that are there
    python benchmarks/validate.py --page                 # the page again, from what is there

Every seed is served live twice: what the two differ by stands beside what the simulation differs by.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from jettison.config.files import read_yaml_mapping
from jettison.live.machine.endings import ended_by_sigterm
from jettison.report.failures import check_answered
from jettison.simulate.validate_command import print_comparison, validate_command
from jettison.simulate.validation_file import read_document, simulate_again, write_document

FOLDER = Path(__file__).parent / "validation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="specs by their file's stem")
    parser.add_argument("--calibrate", action="store_true", help="measure the profile first")
    parser.add_argument("--seeds", type=int, help="seeds 0 to N - 1 in place of the specs' own")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder of the results")
    parser.add_argument("--again", action="store_true", help="keep the live runs, simulate them anew")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    if options.calibrate and options.again:
        parser.error("--calibrate goes with new live runs only")
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


def again(raw: dict[str, Any], path: Path, out: Path) -> None:
    """The live runs of a result file beside new simulations: after a change of the simulator."""
    trios = simulate_again(raw, path.stem, path.parent, read_document(out))
    print_comparison(trios, Console())
    write_document(out, trios)
    check_answered([run for trio in trios for run in (trio.live, trio.again)])


def render(folder: Path) -> str:
    """The page: a table of means over seeds for each spec that has been run."""
    lines = [
        "# The simulator against live runs", "",
        "Written by `python benchmarks/validate.py` ([docs/simulate.md](../../docs/simulate.md) says how it is",
        "done). Each line is a mean over the seeds of a spec. The last column is what two live runs of the same",
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


def _line(row: dict[str, Any], scenario: str) -> str:
    figures = " | ".join(f"{row[side]:.4g}" for side in ("live", "live_again", "simulated"))
    over = " | ".join(f"{row[k]:+.1f}" if row["is_count"] else f"{row[k]:+.1%}" for k in ("difference", "floor"))
    return f"| {scenario} | {row['metric']} | {figures} | {over} |"


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
