"""Why a figure comes out as it does, in sentences made of what was found of memory, compute and bursts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jettison.cost.model import ChunkShape
from jettison.report.results import RunResult, percentile
from jettison.simulate.reproduce.measures import mean_load, mean_of, ttft, values
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results

ENDLESS_BATCH = 4096
"""Requests in a decode step of which each costs what its own KV and rows cost, the weights next to nothing."""

LATE_S = 10.0
"""Before the first drop, and after the burst: whose arrivals show what requests wait for then."""

NEARLY_OVER = 0.8
"""Of a burst's duration: from here on it counts as over or nearly so."""

LATE = 2.0
"""Times the median TTFT before the burst: from here on requests count as late."""

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
        budget = token_budget(results)
        fill_s = machine.kv_tokens * machine.profile.cost.batch_cost_s([ChunkShape(0, budget)]) / budget
        if stay_s and load:
            parts.append(
                f"{workload}: {fill_s:.0f} s to fill an instance's KV by prefill alone, {stay_s:.0f} s from first to "
                f"last token, so prefill takes about {100.0 * load * fill_s / stay_s:.0f} % of compute at the memory "
                f"load of {load:.2f} that was met"
            )
    return (
        "Why it is no more. By Little's law the memory load is the compute load of prefill times (stay / time to fill "
        "the memory by prefill). " + "; ".join(parts) + ". Twice the rate takes twice that, and decodes come on top. "
        "Where that is near all of compute, what waits for memory would wait for compute a little later, and no memory "
        "makes a first token come sooner than the prompts ahead of it are computed. The step times are not the reason: "
        "they agree with those that v3 states (kunserve-fig14)."
    )


def token_budget(results: Results) -> int:
    """Of a step, and so of the prefill steps by which memory is filled."""
    return int(results.spec.raw["settings"]["max_num_batched_tokens"])


def why(found: Mapping[str, Results]) -> list[str]:
    """Both reasons why memory alone does little at these loads."""
    return [balance(found), worth(found)]


def worth(found: Mapping[str, Results], system: str = "recompute") -> str:
    """What KV memory is worth in requests a second, beside what bursts ask for."""
    parts = []
    for workload, results in found.items():
        run = results.one(system)
        asked = rate_in_bursts(results)
        if run.requests_detail and asked:
            undropped, merged, endless = (
                sustained_rate(results, capacity) for capacity in (*_capacities(results, run), math.inf)
            )
            parts.append(
                f"{workload}: {undropped:.2f} requests a second with the undropped capacity, {merged:.2f} with the "
                f"merged ({merged / undropped - 1.0:+.0%}), {endless:.2f} with endless memory, and bursts bring "
                f"{asked:.2f}"
            )
    return (
        "What memory is worth once it stays full, by instance: KV memory bounds the batch, the batch divides the "
        "reading of weights, and a request costs its prefill and its share of decode steps (the presets' step times, "
        "the two not overlapped). " + "; ".join(parts) + ". So more memory delays the moment at which requests wait by "
        "what fills it meanwhile, and then serves as much more as that; a burst beyond the last figure makes the queue "
        "of any system grow."
    )


def sustained_rate(results: Results, kv_tokens: float, system: str = "recompute") -> float:
    """Requests a second that an instance can serve for ever with so much KV, all of it in use; ``math.inf`` for as much
    as one likes: then only what a request's own KV takes to be read is left of its decode steps."""
    rows = results.one(system).requests_detail or []
    prompt = sum(row["input_tokens"] for row in rows) / len(rows)
    output = sum(row["output_tokens"] for row in rows) / len(rows)
    cost = results.spec.machine.profile.cost
    context = round(prompt + output / 2)
    prefill_s = mean_prefill_s(results, system)
    batch = ENDLESS_BATCH if math.isinf(kv_tokens) else max(1, int(kv_tokens / context))
    decode_s = output * cost.batch_cost_s([ChunkShape(context, 1)] * batch) / batch
    return float(1.0 / (prefill_s + decode_s))


def mean_prefill_s(results: Results, system: str = "recompute") -> float:
    """What the prompt of mean length takes alone, in steps of the token budget."""
    rows = results.one(system).requests_detail or []
    prompt = round(sum(row["input_tokens"] for row in rows) / len(rows))
    cost, chunk = results.spec.machine.profile.cost, token_budget(results)
    return float(sum(
        cost.batch_cost_s([ChunkShape(start, min(chunk, prompt - start))]) for start in range(0, prompt, chunk)
    ))  # fmt: skip


def rate_in_bursts(results: Results, system: str = "recompute") -> float | None:
    """Requests a second and instance that arrive within the bursts of the first seed."""
    arrivals = results.spec.parsed.workload.arrivals
    rows = results.one(system).requests_detail or []
    bursts = () if arrivals is None else arrivals.bursts
    span_s = sum(burst.duration_s for burst in bursts)
    inside = [r for r in rows if any(0.0 <= r["scheduled_s"] - b.start_s < b.duration_s for b in bursts)]
    return len(inside) / span_s / results.spec.machine.num_instances if span_s else None


def _capacities(results: Results, run: RunResult) -> tuple[float, float]:
    """Of an instance, in tokens: undropped, and its share of the merged."""
    header, instances = run.config["fairness"], results.spec.machine.num_instances
    return header["kv_capacity_tokens"] / instances, header["merged_capacity_tokens"] / instances


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


def timing(found: Mapping[str, Results], system: str = WITHOUT_GUARD.name) -> str:
    """When memory ran short within the burst, what requests waited until then, and which waited longest."""
    courses, without = {}, []
    for workload, results in found.items():
        arrivals = results.spec.parsed.workload.arrivals
        dropped = [index for index, run in enumerate(results.runs[system]) if _times(run, "drop_decided")]
        if not dropped:
            without.append(workload)
        elif arrivals is not None and arrivals.bursts:
            run, recompute = results.runs[system][dropped[0]], results.runs["recompute"][dropped[0]]
            burst = arrivals.bursts[0]
            courses[workload] = _course(run, recompute, burst.start_s, burst.duration_s)
    told = [f"{workload}: {course}" for workload, course in courses.items()]
    told += [f"{workload}: no drop" for workload in without]
    return f"When memory runs short in {system} (first seed with a drop). {'; '.join(told)}.{_lateness(courses)}"


@dataclass(frozen=True, slots=True)
class _Course:
    """One burst as the dropping run met it. Times count from its begin; medians are of TTFT, None where nobody came."""

    burst_s: float
    drop_s: float
    exchange_s: float | None
    """Mean over exchanges."""
    before_s: float | None
    """Median of who came before the burst."""
    waiting_s: float | None
    """Of who came in the last ``LATE_S`` before the drop."""
    after_s: float | None
    recompute_after_s: float | None
    slowest_s: list[float]
    """When the slowest hundredth came, in order."""

    def __str__(self) -> str:
        exchanges = "no exchange" if self.exchange_s is None else f"exchanges of {self.exchange_s:.1f} s"
        slowest = f"{self.slowest_s[0]:.0f} to {self.slowest_s[-1]:.0f} s into the burst" if self.slowest_s else "never"
        return (
            f"first drop {self.drop_s:.0f} s into a burst of {self.burst_s:.0f} s, {exchanges}; median TTFT "
            f"{seconds(self.before_s)} before the burst, {seconds(self.waiting_s)} in the {LATE_S:.0f} s before the "
            f"drop, {seconds(self.after_s)} from {LATE_S:.0f} s after the burst on (recompute "
            f"{seconds(self.recompute_after_s)}); the slowest hundredth came {slowest}"
        )

    def against_lateness(self) -> list[str]:
        """What speaks against a drop that came too late for P99."""
        late = self.before_s is not None and self.waiting_s is not None and self.waiting_s >= LATE * self.before_s
        earlier = sum(came_s < self.drop_s for came_s in self.slowest_s)
        checks = (
            (self.drop_s >= NEARLY_OVER * self.burst_s, "memory ran short with much of the burst to come"),
            (late, "requests were not late before the drop"),
            (2 * earlier > len(self.slowest_s), "most of the slowest did not come before the drop"),
        )
        return [objection for holds, objection in checks if not holds]


def _lateness(courses: Mapping[str, _Course]) -> str:
    """Where dropping came too late for P99, and what speaks against it elsewhere."""
    objections = {workload: course.against_lateness() for workload, course in courses.items()}
    late = [workload for workload, found in objections.items() if not found]
    told = ""
    if late:
        told = (
            f" So in {', '.join(late)} memory fills when the burst is over or nearly so: requests are late before that "
            "already, and P99 is made of these."
        )
    others = [f"{workload}, {' and '.join(found)}" for workload, found in objections.items() if found]
    return f"{told} Not so in {'; '.join(others)}." if others else told


def seconds(value: float | None) -> str:
    """For people; None where there is nothing to tell."""
    return "(none)" if value is None else f"{value:.2f} s"


def _course(run: RunResult, recompute: RunResult, start_s: float, burst_s: float) -> _Course:
    """The burst from ``start_s`` on."""

    def median(of: RunResult, begin_s: float, end_s: float = math.inf) -> float | None:
        return percentile(values(of, "ttft_s", begin_s, end_s), 50)

    drop_s, late_s = min(_times(run, "drop_decided")), start_s + burst_s + LATE_S
    exchanges = [entry["ms"] / 1e3 for entry in run.events["log"] if entry["kind"] == "exchange_done"]
    rows = sorted((row for row in run.requests_detail or [] if row["ttft_s"]), key=lambda row: -float(row["ttft_s"]))
    return _Course(
        burst_s,
        drop_s - start_s,
        sum(exchanges) / len(exchanges) if exchanges else None,
        median(run, 0.0, start_s),
        median(run, max(start_s, drop_s - LATE_S), drop_s),
        median(run, late_s),
        median(recompute, late_s),
        sorted(row["scheduled_s"] - start_s for row in rows[: max(1, len(rows) // 100)]),
    )


def _times(run: RunResult, kind: str) -> list[float]:
    """When entries of a kind were logged, in seconds."""
    return [float(entry["t"]) for entry in run.events.get("log", ()) if entry["kind"] == kind]
