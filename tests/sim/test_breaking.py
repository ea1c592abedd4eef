"""What single faults do to a simulated cluster, and what is over with them. Whole schedules: ``test_faults``."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from scenarios import Watched, make_setup

from jettison.core import ports
from jettison.report.timeline import Timeline
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.faults import Crash, Delay, Duplicate, Slow
from jettison.sim.links import LinkClass, LinkSpec, Topology, host_of
from jettison.types import NANOSECONDS, Request, SamplingParams

SLOW_HOST = Topology(LinkSpec.of(LinkClass.ETHERNET, 2e7), host=LinkSpec.of(LinkClass.PCIE, 2e6))
"""Swaps take longer than steps."""


@pytest.mark.parametrize("crash_s", [0.0502, 0.0511, 0.0527])
def test_a_death_in_mid_step_takes_every_copy_of_its_report_with_it(crash_s: float) -> None:
    told: list[tuple[int, ports.Event]] = []
    cluster = SimulatedCluster(
        make_setup("recompute", num_workers=1), on_emit=lambda emit, now_ns: None,
        on_event=lambda event, now_ns: told.append((now_ns, event)),
    )
    cluster.submit(Request("r", (0,) * 100, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True), 0), 0)
    cluster.inject((Duplicate(0.0, 0, 10.0, 0.0), Crash(crash_s, 0, 1.0, detect_s=0.2)))
    cluster.run()
    ends = [(now_ns, event.step_id) for now_ns, event in told if isinstance(event, ports.StepCompleted)]
    assert set(Counter(step_id for _, step_id in ends).values()) == {2}
    # What it had told before it died is still on its way for one hop.
    last_ns = round(crash_s * NANOSECONDS) + cluster.setup.hops.report_ns
    lost_ns = next(now_ns for now_ns, event in told if isinstance(event, ports.WorkerLost))
    assert min(now_ns for now_ns, _ in ends) < last_ns < lost_ns < max(now_ns for now_ns, _ in ends)
    assert not [now_ns for now_ns, _ in ends if last_ns < now_ns <= lost_ns]


def test_faults_of_one_worker_that_overlap_each_end_by_themselves() -> None:
    cluster = SimulatedCluster(make_setup())
    cluster.inject((
        Slow(0.1, 0, 0.4, 2.0), Slow(0.2, 0, 0.1, 3.0), Delay(0.1, 0, 0.1, 0.02), Delay(0.15, 0, 0.35, 0.03),
        Duplicate(0.1, 0, 0.4, 0.01), Duplicate(0.2, 0, 0.1, 0.0),
    ))  # fmt: skip
    seen = []
    for at_s in (0.05, 0.17, 0.25, 0.35, 0.6):
        cluster.run(until_ns=round(at_s * NANOSECONDS))
        worker = cluster.workers[0]
        seen.append((worker.slowness, worker.extra_hop_ns / 1e6, cluster.breaking.copies_after_ns(0)))
    assert seen == [
        (1.0, 0, ()), (2.0, 50, (10_000_000,)), (6.0, 30, (10_000_000, 0)), (2.0, 30, (10_000_000,)), (1.0, 0, ()),
    ]  # fmt: skip
    assert cluster.workers[1].slowness == 1.0 and not cluster.breaking.copies_after_ns(1)


@pytest.mark.parametrize("policy", ["drop", "swap", "pipeline"])
def test_overlapping_faults_cost_time_and_no_request(policy: str) -> None:
    watched = Watched(make_setup(policy))
    watched.load(1, num_requests=12, span_s=0.2)
    watched.cluster.inject(
        fault for kind in (Slow, Delay, Duplicate) for fault in (kind(0.05, 0, 0.3, 2.0), kind(0.1, 0, 0.1, 3.0))
    )
    watched.cluster.run(until_ns=900 * NANOSECONDS)
    watched.expect_all_served()


def test_the_swaps_of_a_worker_die_with_it() -> None:
    watched = Watched(make_setup("swap", topology=SLOW_HOST))
    watched.load(1, num_requests=30, span_s=0.2)
    cluster, host = watched.cluster, host_of(0)

    def is_swapping(*ways: tuple[int, int]) -> bool:
        return any(cluster.transfers.is_busy(*way) for way in ways)

    for src, dst in ((0, host), (host, 0)):
        cluster.run(is_over=partial(is_swapping, (src, dst)))
        crash_s = cluster.loop.now_ns / NANOSECONDS
        cluster.inject((Crash(crash_s, 0, 0.5),))
        cluster.run(until_ns=cluster.loop.now_ns)
        assert not cluster.workers[0].alive
        assert not is_swapping((0, host), (host, 0)) and not list(cluster.network.bulk_flows_at(0, host))
    cluster.run(until_ns=900 * NANOSECONDS)
    watched.expect_all_served()
    assert watched.kinds().count("worker_lost") == 2


class Begun(Timeline):
    """A time line that counts the transfers of which it is told."""

    num_transfers = 0

    def transfer_begun(self, transfer: ports.Transfer, now_ns: int) -> None:
        self.num_transfers += 1
        super().transfer_begun(transfer, now_ns)


def test_transfers_that_die_with_a_worker_end_in_the_time_line() -> None:
    timeline = Begun()
    cluster = SimulatedCluster(
        make_setup("drop", topology=SLOW_HOST), on_emit=lambda emit, now_ns: None, observer=timeline)
    for i in range(30):
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        cluster.submit(Request(f"r{i}", (0,) * 200, params, 0), 0)
    cluster.run(is_over=lambda: bool(cluster.core.state.book.transfers))
    cluster.inject((Crash(cluster.loop.now_ns / NANOSECONDS, 0, 0.5),))
    cluster.run(until_ns=900 * NANOSECONDS)
    bars = [e for e in timeline.document()["traceEvents"] if e["ph"] == "b" and e["cat"] == "transfer"]
    assert len(bars) == timeline.num_transfers
    assert any(not bar["args"]["complete"] for bar in bars)
