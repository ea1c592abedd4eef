"""KunServe v1, Fig. 14: blocking exchange against live exchange, over link speeds. Nothing else arrives meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from matplotlib.figure import Figure as Picture

from jettison.core import ports
from jettison.sim.cluster import SimulatedCluster
from jettison.simulate.machines import cluster_setup
from jettison.simulate.workloads import build_workload
from jettison.types import NANOSECONDS, Request, RequestId, SamplingParams
from papers.claims import computed
from papers.figure import OWN_RANGE, Claim, Figure, Found, Part, Plot
from papers.pictures import bars
from papers.specs import read_spec

SPEC, WORKLOAD = "v1-exchange", "two 14B instances, 120 decoding requests"
GBPS = (25, 50, 100, 200)
MERGE_AT_S = 28.0
BLOCKING, LIVE = "blocking", "live"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one exchange did to the requests that were running."""

    duration_s: float
    max_stall_s: float
    mean_decode_s: float
    """At a moment of the exchange, how long the gap between tokens is that a request is in: the mean over both."""
    moved_bytes: int


@cache
def exchange(system: str, gbps: int) -> Exchange:
    """Let requests decode, merge the two instances, follow every token."""
    spec = read_spec(SPEC).changed(cluster={"link": {"gbps": gbps}})
    variant = next(v for v in spec.parsed.variants if v.name == system)
    setup = cluster_setup(spec.machine, spec.parsed, variant, 0)
    setup = replace(
        setup,
        params=replace(setup.params, overload=replace(setup.params.overload, min_blocked_s=1e9), auto_restore=False),
    )
    tokens: dict[RequestId, list[int]] = {}
    records: list[ports.Record] = []

    def note(emit: ports.Emit, now_ns: int) -> None:
        tokens.setdefault(emit.request_id, []).extend(now_ns for _ in emit.tokens)

    cluster = SimulatedCluster(setup, on_emit=note, on_record=records.append)
    for index, row in enumerate(build_workload(spec.parsed.workload, 0).rows):
        params = SamplingParams(max_tokens=row.output_tokens, temperature=0.0, ignore_eos=True)
        at_ns = round(row.arrival_s * NANOSECONDS)
        cluster.submit(Request(f"r{index}", (0,) * row.input_tokens, params, at_ns), at_ns)
    begin_ns = round(MERGE_AT_S * NANOSECONDS)
    cluster.loop.at(begin_ns, cluster.request_drop)
    cluster.run()
    end_ns = next(record.time_ns for record in records if record.kind == "exchange_done")
    parts = [part for times in tokens.values() for part in _overlaps_ns(times, begin_ns, end_ns)]
    counters = cluster.core.state.counters
    return Exchange(
        (end_ns - begin_ns) / NANOSECONDS,
        counters.max_stall_ns / NANOSECONDS,
        sum(overlap * gap for overlap, gap in parts) / sum(overlap for overlap, _ in parts) / NANOSECONDS,
        counters.exchanged_bytes,
    )


def _overlaps_ns(times: list[int], begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """Of one request: (part of the exchange that lies in a gap between tokens, that gap)."""
    return [(min(b, end_ns) - max(a, begin_ns), b - a) for a, b in pairwise(times) if begin_ns < b and a < end_ns]


def of_exchange(metric: str, number: Callable[[Exchange], float], gbps: int, system: str, unit: str) -> Claim:
    """One exchange's own number."""
    return computed(metric, system, lambda: number(exchange(system, gbps)), unit=unit)


def live_over_blocking(number: Callable[[Exchange], float], gbps: int) -> float:
    """Of one number."""
    return number(exchange(LIVE, gbps)) / number(exchange(BLOCKING, gbps))


def saved(gbps: int) -> Claim:
    """In percent."""

    def percent() -> float:
        return 100.0 * (live_over_blocking(lambda found: found.mean_decode_s, gbps) - 1.0)

    return computed("mean decode time during the exchange", LIVE, percent, BLOCKING, "%")


def longer(gbps: int) -> Claim:
    """In times."""

    def times() -> float:
        return live_over_blocking(lambda found: found.duration_s, gbps)

    return computed("exchange, times longer", LIVE, times, BLOCKING, "x")


def _draw(_: Mapping[str, Found]) -> Picture:
    groups = {
        f"{gbps} Gbps": {system: exchange(system, gbps).mean_decode_s for system in (BLOCKING, LIVE)} for gbps in GBPS
    }
    return bars(groups, "seconds", "mean decode time during the exchange", log=True)


FIG14 = Figure(
    "kunserve-v1-fig14", "live against blocking exchange, over bandwidths", "v1 section 5.3",
    (
        Part(
            WORKLOAD,
            (
                of_exchange("longest stall, 25 Gbps", lambda found: found.max_stall_s, 25, BLOCKING, "s").stated(
                    (None, 8.8)
                ),
                of_exchange("moved", lambda found: found.moved_bytes / 1e9, 25, BLOCKING, "GB"),
            ),
            SPEC,
        ),
        *(
            Part(
                f"{WORKLOAD}, {gbps} Gbps",
                (
                    saved(gbps).stated((-79.8, -51.7), (-90, -50), "the paper's range, widened"),
                    longer(gbps).stated((1.0, 2.4), (1.0, 2.4), OWN_RANGE),
                    of_exchange("exchange", lambda found: found.duration_s, gbps, BLOCKING, "s"),
                    of_exchange("exchange", lambda found: found.duration_s, gbps, LIVE, "s"),
                ),
            )
            for gbps in GBPS
        ),
    ),
    (Plot("decode-time", _draw),),
)  # fmt: skip
