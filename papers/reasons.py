"""Claims that no paper states and that say why others come out so: memory, compute, and when bursts met them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from jettison.cost.model import ChunkShape
from jettison.report.results import RunResult, percentile
from papers.claims import by_seed, own, share
from papers.figure import Claim
from papers.measures import count, mean_exchange_s, mean_load, mean_stay_s, peak_load, ttft, values
from papers.specs import Spec
from papers.systems import BY_PRESSURE, DROPPING, SPARE

ENDLESS_BATCH = 4096
"""Requests in a decode step of which each costs what its own KV and rows cost, the weights next to nothing."""

JUST_BEFORE_S = 10.0
"""Before the first drop: what arrives then shows what requests wait for."""


def pressure(systems: Sequence[str] = ("recompute", *DROPPING)) -> tuple[Claim, ...]:
    """How far memory was asked for, and what came of it."""
    return (
        share("peak KV demand / undropped capacity", peak_load, systems[0]),
        *(own("preemptions", count("preemptions"), name) for name in systems),
        *(own("drops", count("drops"), name) for name in systems if name != "recompute"),
    )


def memory_bound(systems: Sequence[str] = DROPPING) -> tuple[Claim, ...]:
    """What more memory alone could give, and what dropping gave of it."""
    return tuple(own("P99 TTFT", ttft(99), name, "s") for name in ("recompute", SPARE.name, *systems))


def compute_bound() -> tuple[Claim, ...]:
    """Why memory alone gives no more: what compute is left for it, and what it is worth in requests a second."""

    def claim(metric: str, number: Callable[[Spec, RunResult], float | None], unit: str = "requests/s") -> Claim:
        return by_seed(metric, "recompute", lambda seed: number(seed.spec, seed.runs["recompute"]), unit=unit)

    return (
        claim("time to fill an instance's KV by prefill alone", lambda spec, _: fill_s(spec), "s"),
        claim("part of compute that prefill takes", prefill_percent, "%"),
        claim("arrivals in bursts, an instance", burst_rate),
        claim("served for ever, an instance, undropped KV", lambda s, run: served(s, run, _kv(s, run, "kv"))),
        claim("served for ever, an instance, merged KV", lambda s, run: served(s, run, _kv(s, run, "merged"))),
        claim("served for ever, an instance, endless KV", lambda s, run: served(s, run, math.inf)),
    )


def timing(system: str = BY_PRESSURE.name) -> tuple[Claim, ...]:
    """When memory ran short within the first burst, what requests waited until then, and whether those that waited
    longest had come by then: where most had, the drop was too late for P99. Seeds without a drop say nothing."""

    def claim(metric: str, number: Callable[[RunResult, float, float], float | None], unit: str = "s") -> Claim:
        def of_drop(spec: Spec, run: RunResult) -> float | None:
            drop_s = first_drop_s(run)
            return None if drop_s is None else number(run, spec.bursts[0].start_s, drop_s)

        return by_seed(metric, system, lambda seed: of_drop(seed.spec, seed.runs[system]), unit=unit)

    def just_before(run: RunResult, begin_s: float, drop_s: float) -> float | None:
        return percentile(values(run, "ttft_s", max(begin_s, drop_s - JUST_BEFORE_S), drop_s), 50)

    return (
        claim("first drop, after the burst begins", lambda _, begin_s, drop_s: drop_s - begin_s),
        own("mean exchange", mean_exchange_s, system, "s"),
        claim("P50 TTFT before the burst", lambda run, begin_s, _: percentile(values(run, "ttft_s", 0.0, begin_s), 50)),
        claim(f"P50 TTFT in the {JUST_BEFORE_S:.0f} s before the first drop", just_before),
        claim("of the slowest hundredth, came before it", lambda run, _, drop_s: slowest_percent(run, drop_s), "%"),
    )


def fill_s(spec: Spec) -> float:
    """What an instance's KV takes to be filled by full prefill steps."""
    return spec.machine.kv_tokens * _step_s(spec, 0, spec.token_budget) / spec.token_budget


def prefill_percent(spec: Spec, run: RunResult) -> float | None:
    """By Little's law the memory load is the compute load of prefill times (stay / time to fill the memory)."""
    stay_s = mean_stay_s(run)
    return 100.0 * mean_load(run) * fill_s(spec) / stay_s if stay_s else None


def served(spec: Spec, run: RunResult, kv_tokens: float) -> float | None:
    """Requests a second that an instance can serve for ever with so much KV, all of it in use: KV bounds the batch, the
    batch divides the reading of weights, and a request costs its prefill and its share of decode steps, the two not
    overlapped. ``math.inf``: only what a request's own KV takes to be read is left of its decode steps."""
    rows = run.requests_detail
    if not rows:
        return None
    prompt, output = (fmean(row[key] for row in rows) for key in ("input_tokens", "output_tokens"))
    context, budget = round(prompt + output / 2), spec.token_budget
    batch = ENDLESS_BATCH if math.isinf(kv_tokens) else max(1, int(kv_tokens / context))
    decode_s = output * spec.machine.profile.cost.batch_cost_s([ChunkShape(context, 1)] * batch) / batch
    starts = range(0, round(prompt), budget)
    prefill_s = math.fsum(_step_s(spec, start, min(budget, round(prompt) - start)) for start in starts)
    return float(1.0 / (prefill_s + decode_s))


def _kv(spec: Spec, run: RunResult, which: str) -> float:
    """An instance's part of a capacity, in tokens."""
    return float(run.config["fairness"][f"{which}_capacity_tokens"] / spec.machine.num_instances)


def burst_rate(spec: Spec, run: RunResult) -> float | None:
    """Requests a second and instance that arrive within the bursts."""
    span_s = sum(burst.duration_s for burst in spec.bursts)
    inside = [values(run, "scheduled_s", b.start_s, b.start_s + b.duration_s) for b in spec.bursts]
    return sum(map(len, inside)) / span_s / spec.machine.num_instances if span_s else None


def slowest_percent(run: RunResult, until_s: float) -> float | None:
    """How many of the slowest hundredth by TTFT arrived before a time."""
    rows = sorted((row for row in run.requests_detail or [] if row["ttft_s"]), key=lambda row: -float(row["ttft_s"]))
    slowest = rows[: max(1, len(rows) // 100)]
    return 100.0 * sum(row["scheduled_s"] < until_s for row in slowest) / len(slowest) if slowest else None


def first_drop_s(run: RunResult) -> float | None:
    """When it was decided."""
    log = run.events.get("log", ())
    return min((float(entry["t"]) for entry in log if entry["kind"] == "drop_decided"), default=None)


def _step_s(spec: Spec, num_context: int, num_tokens: int) -> float:
    return float(spec.machine.profile.cost.batch_cost_s([ChunkShape(num_context, num_tokens)]))
