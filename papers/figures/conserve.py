"""ConServe (2024): its figures as data, and sweeps of what it leaves open. The loads follow from ``harvest_load``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jettison.report.classes import TOKEN_SERIES, class_figure, grown, total_per_s
from jettison.report.results import RunResult
from papers.claims import by_seed, change, higher, lower, own, share
from papers.figure import Claim, Figure, Found, Part, Plot
from papers.harvest_load import MAXIMUM, ONLINE_ONLY, most_held, share_of
from papers.measures import Measure, count, ratio, ttft
from papers.plots import by_measure, over_points, over_time
from papers.specs import Results, Seed
from papers.variants import Changes, Variant

ISSUE = "judged beforehand"
DIRECTION = "the paper's direction"
WITHIN_ONLINE = (None, 1.25)
"""Times online-only's P99 TTFT: the paper's own "within 25 %"."""

ONLINE = ONLINE_ONLY
ONLINE_512 = Variant("online-only, 512 tokens a step", "recompute", {"offline": "none", "max_num_batched_tokens": 512})
"""Shorter steps, later prompts: whichever of the two is lower is what a system is measured by."""
PRIORITY = MAXIMUM
SCHEDULER = Variant("+ scheduler", "swap", {"offline": "scheduler"}, Changes(copy_engine=False))
CHECKPOINTS = Variant("+ checkpoints", "recompute", {"offline": "scheduler+checkpoint"})
HARVEST = Variant("harvest", "recompute", {"offline": "harvest"})
"""What is checkpointed is not swapped, and what is not is computed again."""
SLICES = Variant("harvest, slices", "recompute", {"offline": "harvest", "offline_slices": "on"})
"""Not in the paper: offline rows stop for an arrival and go on later. A card cannot do it yet."""
ALONE = (ONLINE.name, ONLINE_512.name)

# --- measures


def itl_p99(run: RunResult) -> float | None:
    """Of every gap between two tokens of an online request: the paper's TPOT."""
    return run.itl_s.p99


def of_class(name: str, *keys: str) -> Measure:
    """A figure of one class."""
    return lambda run: class_figure(run, name, *keys)


OFFLINE = of_class("offline", "tokens", "total_per_s")


def output(run: RunResult) -> float | None:
    """Output tokens a second of both classes."""
    parts = [class_figure(run, name, "tokens", "output_per_s") for name in ("online", "offline")]
    return None if None in parts else sum(part or 0.0 for part in parts)


def between(start_s: float, end_s: float) -> Measure:
    """First-time tokens a second between two times."""

    def rate(run: RunResult) -> float | None:
        parts = [grown(run.series.get(name, ()), start_s, end_s) for name in TOKEN_SERIES]
        return None if None in parts else sum(part or 0.0 for part in parts) / (end_s - start_s)

    return rate


# --- claims


def over_alone(metric: str, measure: Measure, system: str) -> Claim:
    """Times what the better of the two online-only runs has."""

    def number(seed: Seed) -> float | None:
        theirs = [value for name in ALONE if (value := measure(seed.runs[name])) is not None]
        return ratio(measure(seed.runs[system]), min(theirs, default=None))

    return by_seed(metric, system, number, "online-only, the better one", "x")


def bound_of_alone() -> Claim:
    """What an arrival's wait for a step allows: that step shares online work, so it runs to its end, in one TPOT."""

    def number(seed: Seed) -> float | None:
        alone_s = min(value for name in ALONE if (value := ttft(99)(seed.runs[name])) is not None)
        return 1.0 + float(seed.spec.raw["settings"]["slo_tpot_ms"]) / 1e3 / alone_s

    return by_seed("bound: online-only's P99 TTFT and one TPOT objective, times", HARVEST.name, number, unit="x")


def of_slices(band: tuple[float | None, float | None] | None) -> tuple[Claim, ...]:
    """First tokens where offline rows stop for an arrival, and what that leaves of offline work."""
    return (
        over_alone("P99 TTFT, times", ttft(99), SLICES.name).stated(None, band),
        change("offline tokens/s, change", OFFLINE, SLICES.name, HARVEST.name),
    )


def longest_batch_stay_s(run: RunResult) -> float | None:
    """Of an offline request from its first token to its last. By priority alone an online one that finds memory full
    waits for such ends and for nothing else, as no offline request is admitted before it."""
    rows = (run.classes or {}).get("offline", {}).get("requests_detail") or ()
    stays = [row["e2e_s"] - row["ttft_s"] for row in rows if row["e2e_s"] is not None and row["ttft_s"] is not None]
    return max(stays, default=None)


def bound_of_priority() -> Claim:
    """How many times lower ours could be at most."""

    def number(seed: Seed) -> float | None:
        runs = seed.runs
        stay_s, alone_s = longest_batch_stay_s(runs[PRIORITY.name]), ttft(99)(runs[ONLINE.name])
        return None if stay_s is None or alone_s is None else ratio(alone_s + stay_s, ttft(99)(runs[HARVEST.name]))

    metric = "bound: online-only's P99 TTFT and the longest stay of an offline request, times lower"
    return by_seed(metric, HARVEST.name, number, PRIORITY.name, "x")


def at_point(claim: Claim, index: int, label: str) -> Claim:
    """A claim at one point of a sweep."""
    numbers: Callable[[Found], Sequence[float | None]] = lambda found: claim.numbers([found[index]])  # noqa: E731
    return replace(claim, metric=f"{claim.metric}, {label}", numbers=numbers)


def mechanisms(system: str, *, by_harvest: bool = True) -> tuple[Claim, ...]:
    """How often each mechanism worked: where one of harvesting's is 0, the run says nothing of it."""
    counts = (
        ("steps_abandoned", "abandoned steps"), ("steps_shed", "steps that shed rows"),
        ("checkpointed_blocks", "checkpointed blocks"),
        ("checkpoint_frees", "freed by their checkpoint"), ("offline_discards", "discarded"),
        ("prefetched_blocks", "prefetched blocks"), ("prefetch_stalls", "prefetch stalls"),
        ("swapped_out_blocks", "swapped blocks"), ("preemptions", "preemptions"),
        ("recomputed_tokens", "tokens computed again"),
    )  # fmt: skip
    proofs = ("steps_abandoned", "checkpoint_frees", "prefetched_blocks")
    return tuple(
        replace(own(label, count(name), system), is_proof=by_harvest and name in proofs) for name, label in counts
    )


def latencies(systems: Sequence[str]) -> tuple[Claim, ...]:
    """Of online requests, of which no row states a paper's number."""
    return tuple(
        claim
        for name in systems
        for claim in (
            own("P50 TTFT", ttft(50), name, "s"), own("P99 TTFT", ttft(99), name, "s"),
            own("P99 gap between tokens", itl_p99, name, "s"),
            share("requests within the TTFT objective", of_class("online", "ttft_within"), name),
            share("gaps within the TPOT objective", of_class("online", "gaps_within"), name),
        )
    )  # fmt: skip


def throughputs(stated: Mapping[str, float | None]) -> tuple[Claim, ...]:
    """Tokens a second of both classes, and of outputs alone, by system."""
    return tuple(
        claim
        for name, paper in stated.items()
        for claim in (
            own("prompt and output tokens/s", total_per_s, name).stated(paper),
            own("output tokens/s", output, name),
            own("offline prompt and output tokens/s", OFFLINE, name),
        )
    )


# --- Figs. 2 and 5: 15 minutes of chat, at two loads

AT_SHARE, AT_MOST = "chat at 46 % of the maximum", "the most chat that is held"
REAL = "conserve-real"
PLAIN = (ONLINE, ONLINE_512, PRIORITY, HARVEST)
SLICED = (*PLAIN, SLICES)
SEEDS: Mapping[str, Any] = {"seeds": [0, 1, 2]}

FIG2 = Figure(
    "conserve-fig2", "what a batch by priority does to chat", "ConServe section 3",
    (
        Part(
            AT_SHARE, spec=REAL, systems=PLAIN, load=share_of(0.46), changes=SEEDS, conditions=ONLINE.name,
            claims=(
                over_alone("P99 TTFT, times higher", ttft(99), PRIORITY.name).stated(59.7, (1, None), DIRECTION),
                over_alone("P99 gap, times higher", itl_p99, PRIORITY.name).stated(3.16, (1, None), DIRECTION),
                *latencies((*ALONE, PRIORITY.name)),
            ),
        ),
    ),
    (over_time("time-line", AT_SHARE, (ONLINE.name, PRIORITY.name)),),
)  # fmt: skip


def overall(*, judged: bool) -> tuple[Claim, ...]:
    """What Fig. 5 says of one load; the bands are of the one that the paper's throughputs are of."""

    def band(low: float | None, high: float | None) -> tuple[float | None, float | None] | None:
        return (low, high) if judged else None

    ours, theirs = HARVEST.name, PRIORITY.name
    return (
        by_seed(
            "online-only over vLLM++, tokens/s", ONLINE.name,
            lambda seed: _percent(total_per_s(seed.runs[ONLINE.name]), total_per_s(seed.runs[theirs])), theirs, "%",
        ).stated(46 if judged else None),
        higher("prompt and output tokens/s, times higher", total_per_s, ours, ONLINE.name).stated(
            1.85, band(1.85, None), ISSUE
        ),
        higher("prompt and output tokens/s, part of", total_per_s, ours, theirs).stated(0.86, band(0.86, None), ISSUE),
        lower("P99 TTFT, times lower", ttft(99), ours, theirs).stated(84, band(20, None), ISSUE),
        lower("P99 gap, times lower", itl_p99, ours, theirs).stated(25),
        bound_of_priority(),
        own("longest stay of an offline request", longest_batch_stay_s, theirs, "s"),
        over_alone("P99 TTFT, times", ttft(99), ours).stated(None, band(*WITHIN_ONLINE)),
        bound_of_alone(), *of_slices(band(*WITHIN_ONLINE)),
        own("P99 gap", itl_p99, ours, "s").stated((None, 0.11), band(None, 0.11), ISSUE),
        own("P99 TTFT in absolute terms", ttft(99), theirs, "s").stated(83.8),
        own("requests/s", lambda run: float(run.config["workload"]["mean_rate_per_s"]), ONLINE.name),
        *throughputs({ONLINE.name: 1999, theirs: 4308, ours: 3702}),
        *latencies((*ALONE, theirs, ours)), *mechanisms(ours),
        *mechanisms(theirs, by_harvest=False),
    )  # fmt: skip


def _percent(part: float | None, whole: float | None) -> float | None:
    found = ratio(part, whole)
    return None if found is None else 100.0 * found


FIG5 = Figure(
    "conserve-fig5", "chat and a batch over 15 minutes", "ConServe section 6.2",
    (
        Part(AT_SHARE, overall(judged=True), REAL, SLICED, load=share_of(0.46), changes=SEEDS, conditions=ONLINE.name),
        Part(AT_MOST, overall(judged=False), REAL, SLICED, load=most_held(), changes=SEEDS, conditions=ONLINE.name),
    ),
    tuple(
        over_time(f"time-line-{name}", workload, (ONLINE.name, PRIORITY.name, HARVEST.name))
        for name, workload in (("share", AT_SHARE), ("most", AT_MOST))
    ),
)  # fmt: skip

# --- Fig. 6: on and off

ON_OFF = "on and off"
OFF_FROM_S, OFF_TO_S = 180.0, 360.0

FIG6 = Figure(
    "conserve-fig6", "three minutes at the most that is held, three of nothing", "ConServe section 6.3.1",
    (
        Part(
            ON_OFF, spec="conserve-on-off", systems=SLICED, load=most_held(), changes=SEEDS, conditions=ONLINE.name,
            claims=(
                over_alone("P99 TTFT, times", ttft(99), HARVEST.name).stated(None, WITHIN_ONLINE), bound_of_alone(),
                *of_slices(WITHIN_ONLINE), over_alone("P99 gap, times", itl_p99, HARVEST.name),
                own("P99 TTFT in absolute terms", ttft(99), HARVEST.name, "s").stated((None, 0.35)),
                own("P99 gap in absolute terms", itl_p99, HARVEST.name, "s").stated((None, 0.09)),
                higher("P99 TTFT, times higher", ttft(99), PRIORITY.name, HARVEST.name).stated(
                    (1.4, 11), (1, None), DIRECTION
                ),
                higher("P99 gap, times higher", itl_p99, PRIORITY.name, HARVEST.name).stated(
                    (1.4, 11), (1, None), DIRECTION
                ),
                own("tokens/s while off", between(OFF_FROM_S, OFF_TO_S), HARVEST.name).stated(5868),
                own("tokens/s while off", between(OFF_FROM_S, OFF_TO_S), PRIORITY.name),
                *throughputs(dict.fromkeys((ONLINE.name, PRIORITY.name, HARVEST.name))),
                *latencies((*ALONE, PRIORITY.name, HARVEST.name)), *mechanisms(HARVEST.name),
            ),
        ),
    ),
    (over_time("time-line", ON_OFF, (ONLINE.name, PRIORITY.name, HARVEST.name)),),
)  # fmt: skip

# --- Fig. 7: burstiness and rate

GAMMA = "conserve-gamma"
CVS, RATES = (0.5, 1.0, 2.0, 4.0), (1.0, 1.5, 2.0, 2.5)
BY_CV, BY_RATE = "by CV, 2 requests/s", "by rate, CV 1"


def arrivals(rate_per_s: float, cv: float) -> dict[str, Any]:
    """A point of a sweep over Gamma arrivals."""
    process = {"process": "gamma", "rate_per_s": rate_per_s, "cv": cv, "duration_s": 300}
    return {"workload": {"arrivals": process}}


def swept(labels: Sequence[str]) -> tuple[Claim, ...]:
    """What Fig. 7 says at each point, and over all of them."""
    at_each = (
        over_alone("P99 TTFT, times", ttft(99), HARVEST.name).stated(None, WITHIN_ONLINE), bound_of_alone(),
        *of_slices(WITHIN_ONLINE), over_alone("P99 gap, times", itl_p99, HARVEST.name),
        change("offline tokens/s, change", OFFLINE, HARVEST.name, PRIORITY.name).stated((4, 12), (0, None), DIRECTION),
        own("steps abandoned", count("steps_abandoned"), HARVEST.name),
        own("P99 TTFT", ttft(99), ONLINE.name, "s"),
        own("P99 TTFT", ttft(99), HARVEST.name, "s"),
        own("P99 TTFT", ttft(99), PRIORITY.name, "s"),
        own("P99 gap", itl_p99, HARVEST.name, "s"),
        *(own("offline tokens/s", OFFLINE, name) for name in (PRIORITY.name, HARVEST.name)),
    )
    plain = own("least P99 TTFT of all points", ttft(99), PRIORITY.name, "s")
    every = replace(
        plain, middle=min, numbers=lambda found: [value for results in found for value in plain.numbers([results])]
    )
    return (
        every.stated((4.98, None)),
        *(at_point(claim, index, label) for index, label in enumerate(labels) for claim in at_each),
    )


def _arrival_number(key: str) -> Callable[[Results], float]:
    return lambda results: float(results.spec.raw["workload"]["arrivals"][key])


def _lines(workload: str, name: str, where: Callable[[Results], float], xlabel: str) -> tuple[Plot, ...]:
    return (
        over_points(f"{name}-ttft", workload, where, xlabel, "P99 TTFT, s", ttft(99)),
        over_points(f"{name}-tokens", workload, where, xlabel, "offline tokens/s", OFFLINE),
    )


FIG7 = Figure(
    "conserve-fig7", "latency and harvest by burstiness and by rate", "ConServe section 6.3.2",
    (
        Part(
            BY_CV, swept([f"CV {cv:g}" for cv in CVS]), GAMMA, SLICED,
            sweep=tuple(arrivals(2.0, cv) for cv in CVS), changes=SEEDS, conditions=ONLINE.name,
        ),
        Part(
            BY_RATE, swept([f"{rate:g} requests/s" for rate in RATES]), GAMMA, SLICED,
            sweep=tuple(arrivals(rate, 1.0) for rate in RATES), changes=SEEDS, conditions=ONLINE.name,
        ),
    ),
    (
        *_lines(BY_CV, "cv", _arrival_number("cv"), "CV of arrivals"),
        *_lines(BY_RATE, "rate", _arrival_number("rate_per_s"), "requests/s"),
    ),
)  # fmt: skip

# --- Fig. 8: one part after the other

STEPS = "2 requests/s, CV 1"
PAPERS_BUDGET = Variant("harvest, the paper's budget", "recompute", {"offline": "harvest", "offline_fill": "paper"})
ABLATED = (ONLINE, ONLINE_512, PRIORITY, SCHEDULER, CHECKPOINTS, HARVEST, PAPERS_BUDGET, SLICES)


def _next(system: Variant, before: Variant, paper: float, *, falls: bool = False) -> Claim:
    band = (None, 0) if falls else (0, None)
    return change("offline tokens/s, change", OFFLINE, system.name, before.name).stated(paper, band, DIRECTION)


FIG8 = Figure(
    "conserve-fig8", "what each part adds", "ConServe section 6.4.1",
    (
        Part(
            STEPS, spec=GAMMA, systems=ABLATED, conditions=ONLINE.name,
            changes=SEEDS,
            claims=(
                own("offline tokens/s", OFFLINE, PRIORITY.name).stated(3674),
                _next(SCHEDULER, PRIORITY, -19.7, falls=True), _next(CHECKPOINTS, SCHEDULER, 14.0),
                _next(HARVEST, CHECKPOINTS, 13.6), _next(HARVEST, PRIORITY, 4.0),
                lower("P99 TTFT, times lower", ttft(99), SCHEDULER.name, PRIORITY.name).stated(
                    3.0, (1, None), DIRECTION
                ),
                lower("P99 TTFT, times lower", ttft(99), HARVEST.name, PRIORITY.name).stated(
                    4.3, (1, None), DIRECTION
                ),
                over_alone("P99 TTFT, times", ttft(99), HARVEST.name).stated(1.26, WITHIN_ONLINE), bound_of_alone(),
                *of_slices(WITHIN_ONLINE), over_alone("P99 TTFT, times", ttft(99), PAPERS_BUDGET.name),
                change("offline tokens/s, change", OFFLINE, PAPERS_BUDGET.name, HARVEST.name),
                *latencies([system.name for system in ABLATED]),
                *(
                    own("prompt and output tokens/s", total_per_s, system.name) for system in ABLATED
                ),
                *(claim for s in ABLATED[2:] for claim in mechanisms(s.name, by_harvest=s is HARVEST)),
            ),
        ),
    ),
    (
        by_measure(
            "latency", STEPS, STEPS, {"P50 TTFT, s": ttft(50), "P99 TTFT, s": ttft(99), "P99 gap, s": itl_p99},
        ),
    ),
)  # fmt: skip

# --- what the paper leaves open: safepoints, objectives, the link to the host

LAYERS = (1, 2, 4, 8, 16, 32)
SELDOM: Mapping[str, Any] = {
    "workload": {"arrivals": {"process": "gamma", "rate_per_s": 0.1, "cv": 1.0, "duration_s": 900}},
    "settings": {"slo_ttft_ms": 200, "max_num_batched_tokens": 8192},
}
"""So seldom that requests find offline steps that are alone, and those so long beside the objective that some are given
up: at 2 requests/s an online one is always there, and no step of 2,048 tokens keeps a prompt from 1,500 ms."""
SLO_TIMES = (0.5, 1.0, 2.0, 4.0)
HOST_GB_S = (32, 8, 4, 1)
"""Line rates; the first is the preset's. What bulk reaches of them is the preset's part."""
SAFEPOINTS, OBJECTIVES, LINK = "layers between safepoints", "objectives, times 1500 and 110 ms", "link to the host"


def _of_harvest(*more: Claim) -> tuple[Claim, ...]:
    return (
        own("P99 TTFT", ttft(99), HARVEST.name, "s"), own("P99 gap", itl_p99, HARVEST.name, "s"),
        own("offline tokens/s", OFFLINE, HARVEST.name),
        replace(own("steps abandoned", count("steps_abandoned"), HARVEST.name), is_proof=True),
        *more,
    )  # fmt: skip


def _at_points(claims: Sequence[Claim], labels: Sequence[str]) -> tuple[Claim, ...]:
    return tuple(at_point(claim, index, label) for index, label in enumerate(labels) for claim in claims)


def _setting(key: str) -> Callable[[Results], float]:
    return lambda results: float(results.spec.raw["settings"][key])


SWEEP_LAYERS = Figure(
    "conserve-safepoints", "layers between two looks at the flag", "ConServe section 6.4.2",
    (
        Part(
            SAFEPOINTS, _at_points(_of_harvest(own("tokens abandoned", count("tokens_abandoned"), HARVEST.name)),
                                   [f"k = {layers}" for layers in LAYERS]),
            GAMMA, (HARVEST,), sweep=tuple({"settings": {"safepoint_layers": layers}} for layers in LAYERS),
            changes=SELDOM, conditions=HARVEST.name,
        ),
    ),
    _lines(SAFEPOINTS, "layers", _setting("safepoint_layers"), "layers between safepoints"),
)  # fmt: skip

SWEEP_SLO = Figure(
    "conserve-slo", "harvest by how tight the objectives are", "ConServe section 6.1",
    (
        Part(
            OBJECTIVES, _at_points(
                _of_harvest(
                    share("requests within the TTFT objective", of_class("online", "ttft_within"), HARVEST.name),
                    share("gaps within the TPOT objective", of_class("online", "gaps_within"), HARVEST.name),
                ),
                [f"x {times:g}" for times in SLO_TIMES],
            ),
            GAMMA, (HARVEST,), conditions=HARVEST.name,
            sweep=tuple(
                {"settings": {"slo_ttft_ms": 1500 * times, "slo_tpot_ms": 110 * times}} for times in SLO_TIMES
            ),
        ),
    ),
    _lines(OBJECTIVES, "slo", _setting("slo_tpot_ms"), "TPOT objective, ms"),
)  # fmt: skip


def _with_link(gb_per_s: int) -> Variant:
    return replace(HARVEST, name=f"harvest, {gb_per_s} GB/s", changes=Changes(host_link=gb_per_s / HOST_GB_S[0]))


LINKS = tuple(_with_link(gb_per_s) for gb_per_s in HOST_GB_S)

SWEEP_LINK = Figure(
    "conserve-link", "harvest by the link to the host", "ConServe section 4.4",
    (
        Part(
            LINK, spec=GAMMA, systems=LINKS, conditions=LINKS[0].name,
            claims=tuple(
                claim
                for system in LINKS
                for claim in (
                    own("P99 TTFT", ttft(99), system.name, "s"), own("P99 gap", itl_p99, system.name, "s"),
                    own("offline tokens/s", OFFLINE, system.name), *mechanisms(system.name),
                )
            ),
        ),
    ),
    (by_measure("latency", LINK, LINK, {"P99 TTFT, s": ttft(99), "P99 gap, s": itl_p99}),),
)  # fmt: skip

FIGURES = (FIG2, FIG5, FIG6, FIG7, FIG8, SWEEP_LAYERS, SWEEP_SLO, SWEEP_LINK)
