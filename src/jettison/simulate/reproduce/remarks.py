"""Why a figure comes out as it does, in sentences made of what was found of memory, compute and bursts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jettison.cost.model import ChunkShape
from jettison.report.results import RunResult
from jettison.simulate.reproduce.measures import mean_load, mean_of, ttft
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results

CHUNK = 2048
"""Tokens of the prefill steps by which memory is filled here."""

DROPPING = ("drop", WITHOUT_GUARD.name)


def mean_stay_s(run: RunResult) -> float | None:
    """From first to last token, mean over requests."""
    stays = [row["e2e_s"] - row["ttft_s"] for row in run.requests_detail or [] if row["e2e_s"] and row["ttft_s"]]
    return sum(stays) / len(stays) if stays else None


def bound(found: Mapping[str, Results], systems: Sequence[str] = DROPPING) -> str:
    """What more memory alone could give, and what dropping gave of it."""
    parts = []
    for workload, results in found.items():
        figures = {name: mean_of(results.runs[name], ttft(99)) for name in ("recompute", SPARE.name, *systems)}
        base, spare = figures["recompute"], figures[SPARE.name]
        if base and spare:
            ours = ", ".join(f"{name} {figures[name]:.2f} s" for name in systems)
            parts.append(
                f"{workload}: recompute {base:.2f} s, eight times the KV memory {spare:.2f} s "
                f"({base / spare:.1f}x lower), {ours}"
            )
    return (
        "What memory alone could give in P99 TTFT: eight times the KV memory, everything else equal. "
        + "; ".join(parts) + ". Below that a system gets only by sharing compute, too: a merged group has one queue "
        "for its members, and lookahead spreads a long prompt over both."
    )


def balance(found: Mapping[str, Results], system: str = "recompute") -> str:
    """Why the bound is where it is: which part of compute a memory load takes."""
    parts = []
    for workload, results in found.items():
        machine = results.spec.machine
        stay_s = mean_of(results.runs[system], mean_stay_s)
        load = mean_of(results.runs[system], mean_load)
        fill_s = machine.kv_tokens * machine.profile.cost.batch_cost_s([ChunkShape(0, CHUNK)]) / CHUNK
        if stay_s and load:
            parts.append(
                f"{workload}: {fill_s:.0f} s to fill an instance's KV by prefill alone, {stay_s:.0f} s from first to "
                f"last token, so prefill takes about {100.0 * load * fill_s / stay_s:.0f} % of compute at the memory "
                f"load of {load:.2f} that was met"
            )
    return (
        "Why it is no more. By Little's law the memory load is the compute load of prefill times (stay / time to fill "
        "the memory by prefill). " + "; ".join(parts) + ". Twice the rate takes twice that, and decodes come on top: "
        "memory and compute run out together, and what then waits for memory would wait for compute a little later. "
        "The papers' systems must have had more compute to spare in their bursts. The step times are not the reason: "
        "they agree with those that v3 states (kunserve-fig14)."
    )


def pressure(found: Mapping[str, Results], systems: Sequence[str] = ("recompute", *DROPPING)) -> str:
    """How far memory was asked for, and what came of it."""
    parts = []
    for workload, results in found.items():
        known = [name for name in systems if name in results.runs]
        peak = mean_of(results.runs[known[0]], lambda run: run.config["fairness"]["peak_over_capacity"])
        preempted = {n: sum(int(r.events.get("preemptions", 0)) for r in results.runs[n]) for n in known}
        dropped = {n: sum(int(r.events.get("drops", 0)) for r in results.runs[n]) for n in known if n != "recompute"}
        told = ", ".join(f"{name} {count}" for name, count in preempted.items())
        drops = ", ".join(f"{name} {count}" for name, count in dropped.items())
        parts.append(
            f"{workload}: peak demand {peak or 0.0:.2f} of the undropped capacity, queue included; preemptions {told}; "
            f"drops {drops or 'none'}"
        )
    return "How hard memory was pressed. " + "; ".join(parts) + "."
