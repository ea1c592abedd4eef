"""Runs a figure: its specs over the pool, its claims on what came of them, its plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from papers.conditions import conditions
from papers.figure import Claim, Figure, Found, Part
from papers.pool import Runs
from papers.rows import Outcome, Row
from papers.specs import Results, read_spec, run_specs


def reproduce(figure: Figure, runs: Runs) -> Outcome:
    """All that the figure's parts come to; their runs are simulated side by side. Where a file is missing that holds a
    part's requests, its rows are empty, its conditions say why, and there are no plots. Raises ConfigError,
    JettisonError."""
    missing = {
        part.workload: why
        for part in figure.parts
        if part.spec is not None and (why := read_spec(part.spec).why_not_run) is not None
    }
    found = _run([part for part in figure.parts if part.workload not in missing], runs)
    claims = [(part.workload, claim) for part in figure.parts for claim in part.claims]
    return Outcome(
        [
            Row(figure.name, workload, claim, None) if workload in missing
            else row(figure.name, workload, claim, found[workload])
            for workload, claim in claims
        ],
        {} if missing else {plot.name: plot.draw(found) for plot in figure.plots},
        {workload: [("not run", why)] for workload, why in missing.items()} | {
            part.workload: conditions(found[part.workload][-1], part.conditions)
            for part in figure.parts
            if part.conditions and part.workload not in missing
        },
    )


def _run(parts: Sequence[Part], runs: Runs) -> Mapping[str, Found]:
    """By workload."""
    wanted = [
        (part, replace(read_spec(part.spec), load=part.load).changed(**part.changes).changed(**point))
        for part in parts
        if part.spec is not None
        for point in part.sweep
    ]
    results = run_specs([(spec, part.variants) for part, spec in wanted], runs)
    found: dict[str, list[Results]] = {part.workload: [] for part in parts}
    for (part, _), result in zip(wanted, results, strict=True):
        found[part.workload].append(result)
    return found


def row(figure: str, workload: str, claim: Claim, found: Found) -> Row:
    """The claim with ours: the middle of its numbers and their range. What is None is left out."""
    known = [number for number in claim.numbers(found) if number is not None and math.isfinite(number)]
    spread = (min(known), max(known)) if known else None
    ours = claim.middle(known) if known else None
    return Row(figure, workload, claim, ours, spread, _never_dropped(claim.system, found))


def _never_dropped(system: str, found: Found) -> bool:
    """Whether the system has a policy that drops, and never did."""
    runs = [run for results in found for run in results.runs.get(system, ())]
    return bool(runs) and all(run.config["policy"] == "drop" and not run.events.get("drops") for run in runs)
