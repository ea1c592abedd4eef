"""KunServe v3 (EuroSys'26): its figures as data. Larger ones have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from jettison.cost.model import ChunkShape
from papers import measures
from papers.claims import by_seed, change, higher, lower, own, share
from papers.figure import Claim, Figure, Part
from papers.figures import cost_model, v3_burst, v3_extreme
from papers.measures import Measure, count, in_burst, tpot, ttft, within
from papers.plots import by_measure, over_time
from papers.reasons import compute_bound, memory_bound, pressure
from papers.specs import Spec
from papers.systems import (
    BY_PRESSURE,
    KUNSERVE,
    MERGES,
    NUM_PROCESSORS,
    PIPELINES_STAND_S,
    REPLICAS,
    SPARE,
    STATIC_PIPELINES,
    WITHOUT_RESTORE,
)
from papers.variants import Variant

BARE, STAYS_DROPPED = BY_PRESSURE.name, WITHOUT_RESTORE.name

# --- Figs. 2 and 16: 640 s with two overloads

LONG = "BurstGPT 14B, 640 s"

FIG2 = Figure(
    "kunserve-fig2", "what overload does to recompute, swap and migrate", "v3 section 2.2",
    (
        Part(
            LONG, spec="long-run", systems=("drop", "recompute", "swap", "migrate", BY_PRESSURE, SPARE),
            conditions="recompute",
            claims=(
                *(
                    own("P99 over P50 TTFT", measures.over_median(99), system, "x").stated(paper, band)
                    for system, paper, band in (
                        ("recompute", 239, (20, None)), ("swap", 92, (20, None)), ("migrate", 148, (20, None)),
                        ("drop", None, (None, 5)), (BARE, None, (None, 5)),
                    )
                ),
                share("mean KV demand / capacity", measures.mean_load).stated(56.3),
                own("mean stay", measures.mean_stay_s, unit="s").stated(11),
                own("longest stay", lambda run: max(measures.stays_s(run)), unit="s").stated(150),
                own("peak KV demand of an instance", measures.peak_kilotokens, unit="K tokens").stated(243),
                *pressure(), *memory_bound(), *compute_bound(),
            ),
        ),
    ),
    (over_time("time-line", LONG, ("recompute", "swap", "migrate", "drop", BARE)),),
)  # fmt: skip

FIG16 = Figure(
    "kunserve-fig16", "with and without restoring, 640 s", "v3 section 5.5",
    (
        Part(
            LONG, spec="long-run", systems=("recompute", BY_PRESSURE, WITHOUT_RESTORE), conditions=BARE,
            claims=(
                change("P50 TTFT, change by restoring", ttft(50), BARE, STAYS_DROPPED).stated(
                    -28, (None, -16.7), "reference.md 11 (1.2 times or more)"
                ),
                change("P50 TPOT, change by restoring", tpot(50), BARE, STAYS_DROPPED).stated(-23),
                lower("P99 TTFT, times lower by restoring", ttft(99), BARE, STAYS_DROPPED).stated(6.4),
                lower("P99 TPOT, times lower by restoring", tpot(99), BARE, STAYS_DROPPED).stated(1.2),
                lower(
                    "P99 TTFT of the second wave, times lower by restoring",
                    in_burst("ttft_s", 99, "long-run", 1, before_s=10, after_s=40), BARE, STAYS_DROPPED,
                ).stated(6.4, (3, None)),
                *pressure(("recompute", BARE, STAYS_DROPPED)),
                own("restores", count("restores"), BARE),
                share("bubbles", measures.bubble_share, STAYS_DROPPED),
            ),
        ),
    ),
    (over_time("time-line", LONG, (BARE, STAYS_DROPPED, "recompute")),),
)  # fmt: skip

# --- Fig. 5: static pipelines where nothing is short (v1's Fig. 5 has the same runs)

STATIC = "BurstGPT 14B, no bursts"


def if_it_stands(measure: Measure) -> Measure:
    """None where the pipelines that were asked for have not come about."""
    return lambda run: measure(run) if run.series["groups"][-1][1] == NUM_PROCESSORS - MERGES.get(run.name, 0) else None


def static_pipelines(*claims: Claim) -> Part:
    """Microbatches by token counts, as in vLLM."""
    bubbles = (share("bubbles", measures.bubble_share, name) for name in MERGES)
    return Part(STATIC, (*claims, *bubbles), "parallelism", (REPLICAS, *STATIC_PIPELINES), conditions=REPLICAS.name)


PIPELINE_PLOT = by_measure(
    "latency", STATIC, "static pipelines on eight processors",
    {
        f"P{q} {label}, s": within(key, q, PIPELINES_STAND_S)
        for key, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")) for q in (50, 99)
    },
)  # fmt: skip

FIG5 = Figure(
    "kunserve-fig5", "latency against the number of pipeline stages", "v3 section 4.1",
    (
        static_pipelines(
            *(
                higher(f"{metric}, times higher", if_it_stands(measure), longer, shorter).stated(
                    (1, None), (1, None), "the paper's statement"
                )
                for shorter, longer in pairwise((REPLICAS.name, *MERGES))
                for metric, measure in (("P50 TTFT", ttft(50)), ("P50 TPOT", tpot(50)), ("P99 TPOT", tpot(99)))
            )
        ),
    ),
    (PIPELINE_PLOT,),
)  # fmt: skip

# --- Fig. 14: dropping, then coordinated exchange, then lookahead; without the test for compute, so that all drop

ABLATION = "LongBench 14B, burst"
PLAIN, EXCHANGE, LOOKAHEAD = "drop", "+ coordinated exchange", "+ lookahead"
SHIPPED = Variant("as shipped", "drop")
ABLATED = (
    "recompute",
    replace(BY_PRESSURE, name=PLAIN, settings={**KUNSERVE, "coordination": False, "lookahead": "off"}),
    replace(BY_PRESSURE, name=EXCHANGE, settings={**KUNSERVE, "lookahead": "off"}),
    replace(BY_PRESSURE, name=LOOKAHEAD),
    SHIPPED,
    SPARE,
)


def _in_burst(key: str, q: float) -> Measure:
    """Over requests that arrive in the burst and in the ten seconds after it."""
    return in_burst(key, q, "ablation", after_s=10)


def _step_ms(metric: str, chunks: Callable[[Spec], list[ChunkShape]]) -> Claim:
    """A step time that the paper mentions, beside the preset's: neither was fitted to them."""

    def cost(spec: Spec) -> float:
        return 1e3 * spec.machine.profile.cost.batch_cost_s(chunks(spec))

    return by_seed(metric, "the preset", lambda seed: cost(seed.spec), unit="ms")


FIG14 = Figure(
    "kunserve-fig14", "ablation: drop, coordinated exchange, lookahead", "v3 section 5.3",
    (
        Part(
            ABLATION, spec="ablation", systems=ABLATED, conditions="recompute",
            claims=(
                _step_ms("prefill step of 2048 tokens", lambda _: [ChunkShape(0, 2048)]).stated(221),
                _step_ms(
                    "decode step, memory full", lambda spec: [ChunkShape(5900, 1)] * (spec.machine.kv_tokens // 5900)
                ).stated(60),
                own("exchange", measures.mean_exchange_s, EXCHANGE, "s").stated(1.3),
                *(
                    lower(f"P{q:g} TTFT, times lower", _in_burst("ttft_s", q), PLAIN, "recompute").stated(paper, band)
                    for q, paper, band in ((90, 8.8, None), (99, 11.7, (5, None)), (99.9, 10.3, None))
                ),
                change("P50 TPOT, increase", _in_burst("tpot_s", 50), PLAIN, "recompute").stated((21, 31.9), (10, 40)),
                *(
                    lower(f"P{q:g} TTFT, times lower", _in_burst("ttft_s", q), EXCHANGE, PLAIN).stated(paper, band)
                    for q, paper, band in ((99, 1.5, (1.2, 2)), (99.9, 1.4, None))
                ),
                *(
                    change(f"P{q:g} TPOT, change", _in_burst("tpot_s", q), EXCHANGE, PLAIN).stated(-5)
                    for q in (90, 99.9)
                ),
                *(
                    change(f"P{q:g} TPOT, change", _in_burst("tpot_s", q), LOOKAHEAD, EXCHANGE).stated(paper)
                    for q, paper in ((90, -4.5), (99, -10.6), (99.9, -9.7))
                ),
                share("bubbles", measures.bubble_share, EXCHANGE).stated(21.9, (15, 30)),
                share("bubbles", measures.bubble_share, LOOKAHEAD).stated(8.3, (None, 12)),
                change("throughput, change", measures.throughput, LOOKAHEAD, EXCHANGE).stated(20, (8, 25)),
                lower("P99 TTFT, whole run, times lower", ttft(99), LOOKAHEAD, "recompute"),
                lower("P50 TPOT, whole run, times lower", tpot(50), LOOKAHEAD, "recompute"),
                *memory_bound((PLAIN, LOOKAHEAD)),
                *(own("drops", count("drops"), name) for name in (PLAIN, EXCHANGE, LOOKAHEAD, SHIPPED.name)),
                *(
                    own("exchanged", lambda run: run.events.get("exchanged_bytes", 0) / 1e9, name, "GB")
                    for name in (PLAIN, EXCHANGE, LOOKAHEAD, SHIPPED.name)
                ),
            ),
        ),
    ),
    (
        by_measure(
            "latency", ABLATION, "requests that arrive in the burst",
            {f"P{q:g} TTFT, s": _in_burst("ttft_s", q) for q in (50, 90, 99)}
            | {f"P{q:g} TPOT, s": _in_burst("tpot_s", q) for q in (50, 99)},
        ),
    ),
)  # fmt: skip

FIGURES = (FIG2, FIG5, v3_burst.FIG12, v3_burst.FIG13, FIG14, cost_model.FIG15, FIG16, v3_extreme.FIG17)
