"""The whole ladder over a day at 64 instances, and each part of it alone, beside the same instances all awake: beyond
the papers, each of which has one rung."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Picture

from jettison.cost.model import ChunkShape
from jettison.report.bill import awake_of
from jettison.report.classes import grown
from jettison.report.results import RunResult
from papers.claims import by_seed, change, own, share
from papers.figure import Claim, Figure, Found, Part, Plot
from papers.measures import Measure, count, ratio, tpot, ttft, within
from papers.pictures import bars, lines
from papers.reasons import ENDLESS_BATCH
from papers.specs import Spec, read_spec
from papers.variants import Variant

SPEC = "ladder-day"
ALL_AWAKE, BY_PRIORITY, LADDER = "all awake", "all awake, batch by priority", "ladder"
PACK_AND_SLEEP = "only pack and sleep"
SIDE_BY_SIDE = (ALL_AWAKE, BY_PRIORITY, LADDER)
"""Told of part by part."""
HARVEST, NO_BATCH = "only harvest", "ladder, no batch"
OURS = "our goal"
PRICES = (0.0, 0.0002, 0.0005, 0.001, 0.002)
"""Of a batch's token, in device-seconds."""
HOURS = 24.0
HOUR_S = 3600.0

ALIKE_TOKENS = 32
"""Prompts that differ by less are taken for equally long."""

Span = tuple[float, float]
Parts = Mapping[str, Span]
Draw = Callable[[Mapping[str, Found]], Picture]

# --- the day's parts


def parts_of(spec: Spec) -> Parts:
    """By the hour of the day at which each begins: from and to in seconds of the run."""
    served = spec.parsed.workload.servegen
    assert served is not None and served.every_s is not None and served.part_s is not None
    num = math.ceil((HOURS * HOUR_S - served.start_s) / served.every_s)
    hours = ((served.start_s + i * served.every_s) / HOUR_S for i in range(num))
    return {f"{hour:g}:00": (i * served.part_s, (i + 1) * served.part_s) for i, hour in enumerate(hours)}


def whole_of(parts: Parts) -> Span:
    """Of the run: what ends later is a tail of a few requests, and no part of the day."""
    return 0.0, max(end_s for _, end_s in parts.values())

# --- measures


def devices(span: Span) -> Measure:
    """Instances that were not asleep, mean over a time."""

    def mean(run: RunResult) -> float | None:
        used = awake_of(run)
        return None if used is None else (used.device_s(span[1]) - used.device_s(span[0])) / (span[1] - span[0])

    return mean


def device_hours(span: Span) -> Measure:
    """A day: each part stands for the hours up to the next, and they are alike."""
    mean = devices(span)

    def hours(run: RunResult) -> float | None:
        return None if (num := mean(run)) is None else HOURS * num

    return hours


def batch_tokens_per_s(span: Span) -> Measure:
    """Prompt and output tokens of offline requests that were computed for the first time."""

    def rate(run: RunResult) -> float | None:
        parts = [grown(run.series.get(f"offline_{kind}_tokens", ()), *span) for kind in ("prompt", "output")]
        return None if None in parts else sum(part or 0.0 for part in parts) / (span[1] - span[0])

    return rate


def kept(run: RunResult) -> float | None:
    """Part of the online requests that met both objectives: first token, and mean gap."""
    rows, limits = run.requests_detail, run.goodput
    if not rows or limits is None:
        return None
    most = (limits["slo_ttft_s"], limits["slo_tpot_s"])
    return sum(_keeps(row["ttft_s"], most[0]) and _keeps(row["tpot_s"] or 0.0, most[1]) for row in rows) / len(rows)


def _keeps(took_s: float | None, most_s: float) -> bool:
    return took_s is not None and took_s <= most_s


def unanswered(run: RunResult) -> float:
    """Online requests that were not served to their end."""
    return float(sum(row["status"] != "completed" for row in run.requests_detail or ()))


# --- capacity


def served_for_ever(spec: Spec, run: RunResult, *, kv_tokens: float) -> float | None:
    """Requests a second that all instances together serve for ever, each with so much KV, all of it in use.

    As ``reasons.served``, but by requests as they are found at an instant: those with long answers are found longer.
    """
    rows = run.requests_detail
    if not rows:
        return None
    cost, budget = spec.machine.profile.cost, spec.token_budget
    prompts, outputs = ([int(row[key]) for row in rows] for key in ("input_tokens", "wanted_tokens"))
    total = sum(outputs)
    context = round(sum(o * (p + o / 2) for p, o in zip(prompts, outputs, strict=True)) / total)
    batch = ENDLESS_BATCH if math.isinf(kv_tokens) else max(1, int(kv_tokens / context))
    decode_s = total / len(rows) * cost.batch_cost_s([ChunkShape(context, 1)] * batch) / batch
    alike = Counter(-(-prompt // ALIKE_TOKENS) * ALIKE_TOKENS for prompt in prompts)
    prefill_s = math.fsum(
        num * cost.batch_cost_s([ChunkShape(start, min(budget, prompt - start))])
        for prompt, num in alike.items() for start in range(0, prompt, budget)
    ) / len(rows)
    return spec.machine.num_instances / (prefill_s + decode_s)


def peak_per_s(spec: Spec, run: RunResult) -> float:
    """Requests a second in the part with the most."""
    arrivals, spans = [float(row["scheduled_s"]) for row in run.requests_detail or ()], parts_of(spec).values()
    return max(sum(start <= at < end for at in arrivals) / (end - start) for start, end in spans)


def kv_at_peak(spec: Spec, run: RunResult) -> float | None:
    """Percent of the KV memory in use, mean over the part in which it is the most."""
    total = dict(run.series["kv_blocks_total"])
    shares = [(t, used / total[t]) for t, used in run.series["kv_blocks_used"] if total[t]]
    means = (_mean(value for t, value in shares if start <= t < end) for start, end in parts_of(spec).values())
    most = max((mean for mean in means if mean is not None), default=None)
    return None if most is None else 100.0 * most


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _capacity() -> tuple[Claim, ...]:
    """Which of memory and compute binds, and how much of it the peak takes."""

    def claim(metric: str, unit: str, number: Callable[[Spec, RunResult], float | None]) -> Claim:
        return by_seed(metric, ALL_AWAKE, lambda seed: number(seed.spec, seed.runs[ALL_AWAKE]), unit=unit)

    def full(spec: Spec, run: RunResult) -> float | None:
        return served_for_ever(spec, run, kv_tokens=spec.machine.kv_tokens)

    def endless(spec: Spec, run: RunResult) -> float | None:
        return served_for_ever(spec, run, kv_tokens=math.inf)

    def percent(spec: Spec, run: RunResult, of: Callable[[Spec, RunResult], float | None]) -> float | None:
        part = ratio(peak_per_s(spec, run), of(spec, run))
        return None if part is None else 100.0 * part

    return (
        claim("arrivals in the peak part", "requests/s", peak_per_s),
        claim("served for ever, undropped KV (memory binds)", "requests/s", full),
        claim("served for ever, endless KV (compute binds)", "requests/s", endless),
        claim("peak / served for ever, undropped KV", "%", lambda spec, run: percent(spec, run, full)),
        claim("peak / served for ever, endless KV", "%", lambda spec, run: percent(spec, run, endless)),
        claim("KV in use, mean of the fullest part", "%", kv_at_peak),
    )


# --- claims

_COUNTS = {
    "drops": "drops", "restores": "restores", "sleeps": "sleeps", "wakes": "wakes", "migrations": "migrations",
    "packing_queued": "waiting requests that packing queued elsewhere", "preemptions": "preemptions",
    "steps_abandoned": "steps given up for online requests", "scale_out_requests": "requests for more instances",
}  # fmt: skip
"""By the name of the counter."""


def _whole_day(name: str, span: Span) -> tuple[Claim, ...]:
    """One system's numbers."""
    return (
        own("device-hours a day", device_hours(span), name),
        own("P50 TTFT", ttft(50), name, "s"), own("P99 TTFT", ttft(99), name, "s"),
        own("P50 TPOT", tpot(50), name, "s"), own("P99 TPOT", tpot(99), name, "s"),
        share("requests within both objectives", kept, name),
        own("batch tokens/s", batch_tokens_per_s(span), name),
        own("batch tokens a device-second", _per_device(span), name),
        own("online requests not served", unanswered, name).stated(None, (0, 0), OURS),
        *(own(label, count(key), name) for key, label in _COUNTS.items()),
    )  # fmt: skip


def _per_device(span: Span) -> Measure:
    return lambda run: ratio(batch_tokens_per_s(span)(run), devices(span)(run))


def _part_by_part(name: str, parts: Parts) -> tuple[Claim, ...]:
    """The same by the part of the day in which requests arrive."""
    return tuple(
        claim
        for hour, span in parts.items()
        for claim in (
            own(f"instances awake, {hour}", devices(span), name),
            own(f"P50 TTFT, {hour}", within("ttft_s", 50, *span), name, "s"),
            own(f"P99 TTFT, {hour}", within("ttft_s", 99, *span), name, "s"),
            own(f"P50 TPOT, {hour}", within("tpot_s", 50, *span), name, "s"),
            own(f"P99 TPOT, {hour}", within("tpot_s", 99, *span), name, "s"),
            own(f"batch tokens/s, {hour}", batch_tokens_per_s(span), name),
        )
    )


def _claims(systems: Iterable[str], parts: Parts) -> tuple[Claim, ...]:
    names, span = tuple(systems), whole_of(parts)
    return (
        change("device-hours", device_hours(span), LADDER, ALL_AWAKE).stated(None, (None, 0), OURS),
        change("P99 TTFT", ttft(99), LADDER, ALL_AWAKE),
        change("P99 TTFT", ttft(99), LADDER, BY_PRIORITY).stated(None, (None, 0), OURS),
        change("batch tokens", batch_tokens_per_s(span), LADDER, BY_PRIORITY),
        *_capacity(),
        *(claim for name in names for claim in _whole_day(name, span)),
        *(claim for name in names if name in SIDE_BY_SIDE for claim in _part_by_part(name, parts)),
    )


# --- pictures


def _draw_awake(workload: str, parts: Parts) -> Draw:
    """Instances awake over the run's time, in systems that let some sleep."""

    def draw(found: Mapping[str, Found]) -> Picture:
        end_s = whole_of(parts)[1]
        series = {}
        for name in (ALL_AWAKE, LADDER, PACK_AND_SLEEP):
            used = awake_of(found[workload][0].one(name))
            if used is not None:
                num = int((used.times_s < end_s).sum())
                held = used.devices[:num].tolist()
                series[name] = ([*used.times_s[:num].tolist(), end_s], [*held, held[-1]])
        xlabel = f"seconds; every {end_s / len(parts):g} s another part of the day: {', '.join(parts)}"
        return lines(series, xlabel, "instances awake", workload)

    return draw


def _bars_by_part(
    workload: str, parts: Parts, ylabel: str, measure: Callable[[Span], Measure], *, log: bool = False
) -> Draw:
    def draw(found: Mapping[str, Found]) -> Picture:
        runs = {name: found[workload][0].one(name) for name in SIDE_BY_SIDE}
        groups = {hour: {name: measure(span)(run) for name, run in runs.items()} for hour, span in parts.items()}
        return bars(groups, ylabel, f"{workload}: {ylabel}", log=log)

    return draw


# --- the figures


def a_day(
    name: str, title: str, workload: str, changes: Mapping[str, Any], *, is_long: bool = False,
    only: Collection[str] | None = None,
) -> Figure:
    """The spec with such changes, as a figure; ``only``: of these of its systems."""
    spec = read_spec(SPEC)
    parts = parts_of(spec.changed(**changes))
    systems = tuple(
        Variant(v.name, v.policy, dict(v.settings)) for v in spec.parsed.variants if only is None or v.name in only
    )
    claims = _claims((v.name for v in systems), parts)
    plots = (
        Plot("awake", _draw_awake(workload, parts)),
        Plot("ttft", _bars_by_part(workload, parts, "P99 TTFT, s", lambda span: within("ttft_s", 99, *span), log=True)),
        Plot("batch", _bars_by_part(workload, parts, "batch tokens/s", batch_tokens_per_s)),
    )
    part = Part(workload, claims, SPEC, systems, changes, conditions=LADDER)
    return Figure(name, title, "beyond the papers", (part,), plots, is_long)


def smaller(instances: int, part_s: float) -> Mapping[str, Any]:
    """So many instances with their part of the requests and of the batch, and parts of so many seconds."""
    raw = read_spec(SPEC).raw
    share, load = instances / raw["cluster"]["instances"], raw["workload"]
    served, batch = load["servegen"], load["offline"]
    return {
        "cluster": {"instances": instances},
        "workload": {
            "servegen": {**served, "part_s": part_s, "rate_scale": served["rate_scale"] * share},
            "offline": {**batch, "unfinished": round(batch["unfinished"] * share)},
        },
    }


def prices(
    name: str, title: str, workload: str, changes: Mapping[str, Any], of_a_token: Sequence[float] = PRICES
) -> Figure:
    """What a batch is given for each price of its tokens: device-hours against tokens and first tokens."""
    spec = read_spec(SPEC)
    span = whole_of(parts_of(spec.changed(**changes)))
    plain = {v.name: Variant(v.name, v.policy, dict(v.settings)) for v in spec.parsed.variants}
    ladder = plain[LADDER]
    systems = (
        replace(ladder, name=NO_BATCH, settings={**ladder.settings, "offline": "none"}),
        *(replace(ladder, name=_priced(price), settings={**ladder.settings, "price_batch_token": price})
          for price in of_a_token),
        plain[HARVEST],
    )  # fmt: skip
    shown: dict[str, Measure] = {
        "device-hours a day": device_hours(span), "batch tokens/s": batch_tokens_per_s(span),
        "P99 TTFT": ttft(99), "P50 TPOT": tpot(50),
    }  # fmt: skip
    claims = (
        *(own(metric, measure, system.name) for system in systems for metric, measure in shown.items()),
        *(own("online requests not served", unanswered, system.name).stated(None, (0, 0), OURS) for system in systems),
        *(change("device-hours", device_hours(span), _priced(price), HARVEST) for price in of_a_token),
    )

    def draw(found: Mapping[str, Found]) -> Picture:
        runs = [found[workload][0].one(_priced(price)) for price in of_a_token]
        points = [(device_hours(span)(run) or 0.0, batch_tokens_per_s(span)(run) or 0.0) for run in runs]
        series = {"by the price of a token": ([x for x, _ in points], [y for _, y in points])}
        return lines(series, "device-hours a day", "batch tokens/s", workload)

    part = Part(workload, claims, SPEC, systems, changes, conditions=NO_BATCH)
    return Figure(name, title, "beyond the papers", (part,), (Plot("curve", draw),), is_long=True)


def _priced(price: float) -> str:
    return f"a token at {price:g} device-seconds"


FIGURES = (
    a_day(
        "ladder-day", "a day under the whole ladder, and under each part of it alone", "a day at 64 instances", {},
        is_long=True,
    ),
    a_day(
        "ladder-day-short", "the same with all instances and a fifth of the time",
        "two minutes of each part at 64 instances", smaller(64, 120.0), is_long=True,
        only=(*SIDE_BY_SIDE, PACK_AND_SLEEP),
    ),
    a_day(
        "ladder-day-small", "the same with a quarter of the instances and a twentieth of the time",
        "a day at 16 instances", smaller(16, 30.0),
    ),
    prices(
        "ladder-prices", "what a batch is given for its tokens' price", "two minutes of each part at 64 instances",
        smaller(64, 120.0),
    ),
)  # fmt: skip
