"""README's claims, each with the file that its figures are read from, and the age of every result file. To measure
all of them again takes about an hour: a figure that takes longer has its place in benchmarks/results only.

    make claims                  # which files of benchmarks/results are of this code, and which of older
    make claims ARGS=--write     # README's table and those of all pages anew, from the files (figures.py)
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.evidence import REPOSITORY, digest, git
from benchmarks.figures import RESULTS, Document, load, stale_pages, table

BEGIN, END = "<!-- claims: begin -->\n", "<!-- claims: end -->"


class Claim(NamedTuple):
    """A row of the table: ``seen`` makes the middle cell of the documents of ``files``."""

    text: str
    files: tuple[str, ...]
    seen: Callable[..., str]
    how: str


def total(documents: tuple[Document, ...], name: str) -> int:
    """Sum of one figure over files."""
    return sum(d[name] for d in documents)


def spread(values: list[float], digits: int = 1) -> str:
    """Median and range, or the values where there are fewer than three."""
    told = [f"{v:.{digits}f}" for v in sorted(values)]
    if len(told) < 3:
        return " and ".join(told)
    return f"{statistics.median(values):.{digits}f} (median of {len(told)}, {told[0]} to {told[-1]})"


def seen_exact(proof: Document) -> str:
    """Of `verify --full`."""
    names = {row["architecture"] for row in proof["rows"]}
    happened = sum(row["happened"] for row in proof["rows"])
    return (f"{proof['tokens_compared']:,} tokens over {len(names)} architectures: {proof['mismatches']} differ from "
            f"`{proof['reference']}`, {proof['incomplete']} are missing; {happened} of {len(proof['rows'])} events "
            f"happened")  # fmt: skip


def seen_alone(proof: Document) -> str:
    """Of `verify --alone` below float64."""
    rows = proof["rows"]
    names, events = ({row[key] for row in rows} for key in ("architecture", "event"))
    return (f"{proof['tokens_compared']:,} tokens over {len(names)} architectures and {len(events)} events: "
            f"{proof['mismatches']} differ, {proof['incomplete']} are missing; of requests that ran as their KV moved "
            f"(`--exchange live`) {proof['in_parts']} differ, counted apart ([why](docs/decisions.md))")  # fmt: skip


def seen_burst(seeds: Document) -> str:
    """Of the demo's seeds."""
    rows = [row for row in seeds["rows"] if row["label"] == "burst"]

    def column(name: str) -> list[float]:
        return [row[name] for row in rows]

    p50, rate, tpot = (spread(column(n), 2) for n in ("p50_ratio", "throughput_ratio", "tpot_p50_ratio"))
    return (f"P99 TTFT without dropping is {spread(column('p99_ratio'))} times that with it, P50 TTFT {p50} times; "
            f"with dropping, throughput is {rate} times as high, P50 TPOT {tpot} times as long")  # fmt: skip


def seen_beside_vllm(document: Document) -> str:
    """P99 TTFT and mean end to end of each round, over those of dropping."""
    rounds: dict[str, dict[str, Document]] = {}
    for run in document["runs"]:
        number, _, contender = run["name"].partition(": ")
        rounds.setdefault(number, {})[contender] = run
    whole = [each for each in rounds.values() if "drop" in each]

    def over(contender: str, field: str, figure: str, drop: str = "drop") -> str:
        return spread([each[contender][field][figure] / each[drop][field][figure] for each in whole])

    named = "drop by objectives"
    return (
        f"P99 TTFT of the replicas is {over('vllm', 'ttft_s', 'p99')} times as long, and"
        f" {over('vllm', 'ttft_s', 'p99', named)} times where objectives are named; their mean end to end"
        f" {over('vllm', 'e2e_s', 'mean')} and {over('vllm', 'e2e_s', 'mean', named)} times; without dropping it is"
        f" {over('recompute', 'ttft_s', 'p99')} and {over('recompute', 'e2e_s', 'mean')} times"
    )


def seen_remap(remap: Document) -> str:
    """Of the drops of half of the layers."""
    return "; ".join(
        f"{row['drop_ms']:.1f} ms for {row['bytes_to_kv'] / 2**20:.0f} MiB ({row['num_pages']:,} pages)"
        for row in remap["rows"]
    )


def seen_deaths(*parts: Document) -> str:
    """Of all fault schedules that are kept."""
    problems = sum(len(part["problems"]) for part in parts)
    return (f"{total(parts, 'schedules')} seeded deaths over live processes: {total(parts, 'tokens_compared'):,} "
            f"tokens compared, {problems} problems ([docs/reliability.md](docs/reliability.md))")  # fmt: skip


def seen_day(document: Document) -> str:
    """Of the demo's days."""
    rows = document["rows"]
    shares = spread([row["device_seconds_over_baseline"] for row in rows], 2)
    names = ("day", "baseline")
    day, baseline = (spread([row[name]["p99_ttft_s"] for row in rows], 2) for name in names)
    are_done = all(row[name]["num_done"] == row[name]["num_lines"] for row in rows for name in names)
    return (f"{shares} times the device-seconds of four that stay awake; P99 TTFT {day} s, with the four {baseline} s; "
            f"{'all' if are_done else 'not all'} lines of the batch were done both times")  # fmt: skip


def seen_sleep(document: Document) -> str:
    """Of the sources."""
    wakes = ", ".join(
        f"from {row['source']} {row['wake_ms_p50']:.0f} ms (P99 {row['wake_ms_p99']:.0f})"
        for row in document["sources"]
    )
    given = min(row["rss_given_back_mib"] for row in document["sources"])
    return f"{given:.0f} MiB of RSS given back (memory {document['memory']}); awake again {wakes}"


CLAIMS = (
    Claim("Greedy output is the same tokens whatever memory did meanwhile (float64)", ("verify_full.json",),
          seen_exact, "`jettison verify --full`"),
    Claim("In bfloat16 native kernels give a request the tokens it has alone, whatever batch, chunk, stage or move",
          ("verify_alone_bfloat16.json",), seen_alone, "`jettison verify --alone --dtype bfloat16`"),
    Claim("In a burst that exhausts KV memory, P99 TTFT falls with dropping", ("demo_seeds.json",), seen_burst,
          "`python -m benchmarks demo seeds`, `jettison demo --scene burst`"),
    Claim("In a burst first tokens come sooner than from two vLLM replicas with the same weights, memory and cores",
          ("overload_vllm.json",), seen_beside_vllm, "`python -m benchmarks overload vllm --vllm-python ...`"),
    Claim("Layers become KV capacity in milliseconds, without a copy", ("remap.json",), seen_remap,
          "`python -m benchmarks moves remap`"),
    Claim("kill -9 or SIGSTOP of a worker anywhere in a move loses no request and no token",
          ("faults.json", "faults_of_three.json"), seen_deaths, "`python -m benchmarks moves deaths --schedules 100`"),
    Claim("A day with quiet hours takes fewer device-seconds, and first tokens come sooner", ("demo_day.json",),
          seen_day, "`make demo`, `python -m benchmarks demo day`"),
    Claim("An instance that sleeps gives its memory back, and serves again in a fraction of a second",
          ("sleep_wake.json",), seen_sleep, "`python -m benchmarks moves sleep sources wake drop`"),
)  # fmt: skip


def claims_table() -> str:
    """What stands between README's markers."""
    lines = ["| claim | seen | how to see it | from |", "|---|---|---|---|"]
    for claim in CLAIMS:
        files = ", ".join(f"[{name}](benchmarks/results/{name})" for name in claim.files)
        lines.append(f"| {claim.text} | {claim.seen(*map(load, claim.files))} | {claim.how} | {files} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """README with the table of the files as they are. Raises ValueError without the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README has not both of {BEGIN.strip()} and {END}")
    return before + begin + claims_table() + end + after


def standing(evidence: Document) -> str:
    """``current``, or what has changed since."""
    if not isinstance(evidence["rooms"], dict):
        return "older: no digest was kept"
    changed = []
    for room, then in evidence["rooms"].items():
        try:
            same = digest(room) == then
        except ValueError:  # the room is gone
            same = False
        if not same:
            changed.append(room)
    return f"older: {', '.join(changed)} changed" if changed else "current"


def age(commit: str | None) -> str:
    """Commits since, or a question mark where git does not know the commit."""
    try:
        return git("rev-list", "--count", f"{(commit or 'unknown').removesuffix('-dirty')}..HEAD")
    except (subprocess.CalledProcessError, OSError):
        return "?"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README's table and the tables of all pages anew")
    if parser.parse_args().write:
        readme = REPOSITORY / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
        for page, anew in stale_pages():
            page.write_text(anew, encoding="utf-8")
    claimed = {name for claim in CLAIMS for name in claim.files}
    rows = []
    for path in sorted(RESULTS.rglob("*.json")):
        name = path.relative_to(RESULTS).as_posix()
        kept = load(name)["evidence"]
        rows.append([name, "yes" if name in claimed else "", str(kept["commit"]), kept["date"],
                      age(kept["commit"]), standing(kept)])  # fmt: skip
    print(table(("file", "in README", "commit", "of", "commits since", "figures are"), rows))


if __name__ == "__main__":
    main()
