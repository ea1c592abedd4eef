"""The simulator against live clusters on this machine: every spec of benchmarks/validation, and a page of the results.

    python benchmarks/validate.py --calibrate            # profile and host costs anew, then all specs: most of an hour
    python benchmarks/validate.py --only chat waves-4    # some of them
    python benchmarks/validate.py --again                # the simulated side again, of the live runs that are there
    python benchmarks/validate.py --only chat --twice    # live once more: how far two live runs are apart
    python benchmarks/validate.py --page                 # the page again, from what is there

The calibration has loads of its own; no spec of this folder was used to fit or to choose a constant.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jettison.config.files import read_yaml_mapping
from jettison.errors import ConfigError
from jettison.live.endings import ended_by_sigterm
from jettison.report.failures import check_answered
from jettison.report.output import write_whole
from jettison.simulate.cases import Case, cases_of
from jettison.simulate.spec import parse_spec
from jettison.simulate.validate_command import print_comparison, validate_command
from jettison.simulate.validate_live import serve_all
from jettison.simulate.validation import Pair, compare, compare_means
from jettison.simulate.validation_file import kept_run, read_document, simulate_again, write_document

FOLDER = Path(__file__).parent / "validation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="specs by their file's stem")
    parser.add_argument("--calibrate", action="store_true", help="measure profile and host costs first")
    parser.add_argument("--seeds", type=int, help="seeds 0 to N - 1 in place of the specs' own")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder of the results")
    parser.add_argument("--again", action="store_true", help="keep the live runs, simulate them anew")
    parser.add_argument("--twice", action="store_true", help="run live again, beside the live runs that are there")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    if options.calibrate and (options.again or options.twice):
        parser.error("--calibrate goes with new live runs and their simulation only")
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
            elif options.twice:
                twice(raw, path, out, options.out.parent / "twice" / out.name)
            else:
                validate_command(
                    raw, path.stem, path.parent, json_out=out, calibrates=calibrates, console=Console()
                )
            calibrates = False  # the specs share a model and a number of threads
    page = options.out.parent / "README.md"
    page.write_text(render(options.out) + render_twice(options.out.parent / "twice"), encoding="utf-8")
    print(f"wrote {page}")


def again(raw: dict[str, Any], path: Path, out: Path) -> None:
    """The live runs of a result file beside new simulations: after a change of the simulator."""
    console = Console()
    pairs = simulate_again(raw, path.stem, path.parent, read_document(out))
    print_comparison(pairs, console)
    write_document(out, pairs)
    check_answered([pair.live for pair in pairs])


def twice(raw: dict[str, Any], path: Path, kept: Path, out: Path) -> None:
    """The same requests live once more. The machine drifts in between, and each preemption moves the next."""
    console, document = Console(), read_document(kept)
    spec = parse_spec(raw, path.stem)
    first = {run["scenario"]: run for run in document["runs"]}

    def before_of(case: Case) -> dict[str, Any]:
        scenario = f"{spec.name}, {case.label}, seed {case.seed}"
        if scenario not in first:
            raise ConfigError(f"{path.stem}: there is no live run of {scenario}")
        return first[scenario]

    cases = cases_of(raw, path.stem, path.parent, factor=document["runs"][0]["factor"])
    cases = [replace(case, factor=before_of(case)["factor"]) for case in cases]
    pairs = []
    for served in serve_all(cases, spec, path.parent, console):
        case = served.case
        before = kept_run(before_of(case), case.raw["cluster"]["description"])
        pairs.append(Pair(spec.name, case.label, case.seed, before, served.run, case.factor, served.then))
    rows = [[row.as_dict() for row in rows] for rows in (compare_means(pairs), [r for p in pairs for r in compare(p)])]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps({"means": rows[0], "rows": rows[1]}, indent=1, sort_keys=True) + "\n")
    check_answered([run for pair in pairs for run in (pair.live, pair.simulated)])


def render_twice(folder: Path) -> str:
    """What two live runs of the same requests came to, minutes apart; nothing where nobody has run them."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not documents:
        return ""
    lines = [
        "", "## Live against live", "",
        "The same requests live once more, with no simulation in it: what is left to be asked of one. Differences are",
        "those of the second run over the first; the machine was faster or slower by then.", "",
        "| scenario | metric | first | second | difference of means | largest of one seed |",
        "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for document in documents:
        for row in document["means"]:
            same = [
                r["difference"] for r in document["rows"]
                if r["metric"] == row["metric"] and r["scenario"].startswith(row["scenario"])
            ]
            is_count = row["metric"] in ("drops", "preemptions")
            means = row["simulated"] - row["real"] if is_count else row["simulated"] / row["real"] - 1.0
            shown = [f"{value:+.1f}" if is_count else f"{value:+.1%}" for value in (means, max(same, key=abs))]
            lines.append(
                f"| {row['scenario']} | {row['metric']} | {row['real']:.4g} | {row['simulated']:.4g} | "
                + " | ".join(shown) + " |"
            )
    return "\n".join(lines) + "\n"


def render(folder: Path) -> str:
    """The page: a table of means over seeds for each spec, the worst scenario of all, and the constants."""
    documents: dict[str, dict[str, Any]] = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    }
    rows = [row for document in documents.values() for row in document["means"]]
    singles = [row for document in documents.values() for row in document["rows"]]
    lines = [
        "# The simulator against live runs", "",
        "Written by `python benchmarks/validate.py` ([docs/validation.md](../../docs/validation.md) says how it is",
        "done). Each line is a mean over the seeds of a spec; differences are simulated over real, less 1; of counts:",
        "how many more, in the seed where that is most.", "",
        f"{sum(row['within'] for row in rows)} of {len(rows)} means are within what is demanded, "
        f"{sum(row['within_goal'] for row in rows)} within the goal; of single runs "
        f"{sum(row['within'] for row in singles)} of {len(singles)}.", "",
        "| scenario | metric | real | simulated | difference | |", "|---|---|---:|---:|---:|---|",
    ]
    before = ""
    for row in rows:
        lines.append(_line(row, "" if row["scenario"] == before else row["scenario"]))
        before = row["scenario"]
    if documents:
        found = max((document["worst"] for document in documents.values()), key=lambda row: row["severity"])
        lines += [
            "", f"The worst single run: {found['scenario']}, {found['metric']}: real {found['real']:.4g}, simulated "
            f"{found['simulated']:.4g} (difference {found['difference']:+.3g}).",
        ]
        lines += [
            "", "How fast the cores were during the live runs, over calibration (mean, least, most of 3 s): "
            + _speeds(documents),
        ]
        lines += ["", "## Constants of the host", "", "| constant | value |", "|---|---:|"]
        costs = next(iter(documents.values())).get("host_costs") or {}
        for name, value in costs.items():
            shown = f"{1e6 * value:.1f} µs" if name.endswith("_s") else f"{value}"
            lines.append(f"| `{name}` | {shown} |")
    return "\n".join(lines) + "\n"


def _speeds(documents: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, document in documents.items():
        speeds = [speed for run in document["runs"] for _, speed in run["machine_speed"]]
        parts.append(f"{name} {sum(speeds) / len(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})")
    return "; ".join(parts) + "."


def _line(row: dict[str, Any], scenario: str) -> str:
    is_count = row["metric"] in ("drops", "preemptions")
    difference = f"{row['difference']:+.1f}" if is_count else f"{row['difference']:+.1%}"
    mark = "goal" if row["within_goal"] else "yes" if row["within"] else "**no**"
    return f"| {scenario} | {row['metric']} | {row['real']:.4g} | {row['simulated']:.4g} | {difference} | {mark} |"


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
