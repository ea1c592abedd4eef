"""KunServe v1, Fig. 14: blocking exchange against live exchange, over link speeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from jettison.core import ports
from jettison.sim.cluster import SimulatedCluster
from jettison.simulate.machines import cluster_setup
from jettison.simulate.reproduce.conditions import CALIBRATION
from jettison.simulate.reproduce.pictures import bars
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome, Row
from jettison.simulate.reproduce.specs import Spec, read_spec
from jettison.simulate.workloads import build_workload
from jettison.types import NANOSECONDS, Request, RequestId, SamplingParams

FIGURE, WORKLOAD = "kunserve-v1-fig14", "two 14B instances, 120 decoding requests"
GBPS = (25, 50, 100, 200)
MERGE_AT_S = 28.0


@dataclass(slots=True)
class Exchange:
    """What one exchange did to the requests that were running."""

    duration_s: float
    max_stall_s: float
    mean_decode_s: float
    """At a moment of the exchange, how long the gap between tokens is that a request is in: the mean over both."""
    moved_bytes: int


def reproduce_v1_fig14(runs: Runs) -> Outcome:
    """Four link speeds, both ways; nothing else arrives meanwhile."""
    spec = read_spec("v1-exchange")
    found = {(gbps, name): measure(spec.changed(gbps=gbps), name) for gbps in GBPS for name in ("blocking", "live")}
    outcome = Outcome()
    stalls = {gbps: found[gbps, "blocking"].max_stall_s for gbps in GBPS}
    outcome.rows.append(
        Row(
            FIGURE,
            WORKLOAD,
            f"longest stall, {GBPS[0]} Gbps",
            "blocking",
            "",
            Band(None, 8.8),
            stalls[GBPS[0]],
            "s",
        )
    )
    for gbps in GBPS:
        live, blocking = found[gbps, "live"], found[gbps, "blocking"]
        workload = f"{WORKLOAD}, {gbps} Gbps"
        saved = 100.0 * (live.mean_decode_s / blocking.mean_decode_s - 1.0)
        outcome.rows.append(
            Row(
                FIGURE,
                workload,
                "mean decode time during the exchange",
                "live",
                "blocking",
                Band(-79.8, -51.7),
                saved,
                "%",
                None,
                Band(-90.0, -50.0),
                "the paper's range, widened",
            )
        )
        outcome.rows.append(
            Row(
                FIGURE,
                workload,
                "exchange, times longer",
                "live",
                "blocking",
                Band(1.0, 2.4),
                live.duration_s / blocking.duration_s,
                "x",
                None,
                Band(1.0, 2.4),
                "the paper's own range",
            )
        )
    outcome.pictures["decode-time"] = bars(
        {f"{gbps} Gbps": {name: found[gbps, name].mean_decode_s for name in ("blocking", "live")} for gbps in GBPS},
        "seconds",
        "mean decode time during the exchange",
        log=True,
    )
    outcome.conditions[WORKLOAD] = [
        ("cluster", spec.machine.name),
        ("parameters' share of memory", f"{spec.machine.parameter_share:.4g}"),
        ("undropped KV capacity, tokens", f"{spec.machine.kv_tokens * spec.machine.num_instances:,}"),
        ("arrivals", "; ".join(build_workload(spec.parsed.workload, 0).notes)),
        ("step times", CALIBRATION),
        ("moved", ", ".join(f"{g} Gbps: {found[g, 'blocking'].moved_bytes / 1e9:.1f} GB" for g in GBPS)),
        (
            "exchange",
            ", ".join(
                f"{g} Gbps: {found[g, 'blocking'].duration_s:.2f} s blocking, {found[g, 'live'].duration_s:.2f} s live"
                for g in GBPS
            ),
        ),
        (
            "mean decode time",
            "mean gap of tokens that come during the exchange, and of each request's first one after it",
        ),
        ("duplex", "full: each direction has the whole line rate (times 0.87 for RDMA)"),
    ]
    outcome.remarks.append(
        "A moment of the exchange counts with the gap between tokens that a request is in. Whoever is blocked is in "
        "one as long as the exchange and more; whoever runs live is in one of a step, slowed by the way to its KV and "
        "back. The paper's saving is smaller: its live steps also slow the instance that is asked, which is not "
        "modelled here, and here a step waits only for the piece on the wire. The ratio of durations is near 1 because "
        "bulk does not make way for remote attention's few bytes."
    )
    return outcome


def measure(spec: Spec, variant_name: str) -> Exchange:
    """Let requests decode, merge the two instances, follow every token."""
    variant = next(v for v in spec.parsed.variants if v.name == variant_name)
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
