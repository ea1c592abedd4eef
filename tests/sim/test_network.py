"""Modelled links: what is sent arrives, no port carries more than it can, and who goes first goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.sim.links import LinkClass, LinkSpec, Topology, host_of
from jettison.sim.loop import EventLoop
from jettison.sim.network import Flow, FlowClass, Network
from jettison.sim.transfers import Transfer, TransferEnd, Transfers

GB = 10**9
"""A port of 1 GB/s sends a byte a nanosecond."""


def network(duplex: float = 1.0, latency_s: float = 0.0, **topology: object) -> tuple[EventLoop, Network]:
    loop = EventLoop()
    return loop, Network(loop, Topology(LinkSpec(GB, latency_s, duplex), **topology))  # type: ignore[arg-type]


def ends(loop: EventLoop, net: Network, *flows: tuple[int, int, int, FlowClass]) -> list[int]:
    """When each of these flows, all begun now, has left its sender."""
    done = [0] * len(flows)
    for i, flow in enumerate(flows):
        net.start(*flow, lambda i=i: done.__setitem__(i, loop.now_ns))  # type: ignore[misc]
    loop.run()
    return done


def test_a_lone_flow_has_the_port_for_itself() -> None:
    assert ends(*network(), (0, 1, 1000, FlowClass.KV)) == [1000]


def test_flows_of_one_class_share_and_the_rest_is_shared_anew() -> None:
    assert ends(*network(), (0, 1, 1000, FlowClass.KV), (0, 2, 500, FlowClass.KV)) == [1500, 1000]


def test_a_higher_class_goes_first() -> None:
    flows = ((0, 1, 1000, FlowClass.PARAMETERS), (0, 2, 500, FlowClass.KV), (0, 1, 100, FlowClass.ACTIVATION))
    assert ends(*network(), *flows) == [1600, 600, 100]


def test_max_min_a_flow_that_is_held_up_elsewhere_leaves_its_share_to_others() -> None:
    # Three into port 3; the one from 0 shares its own port with a flow to 4, which gets what is left of it.
    flows = [(src, 3, 300, FlowClass.KV) for src in (0, 1, 2)] + [(0, 4, 600, FlowClass.KV)]
    done = ends(*network(), *flows)
    assert done[:3] == [900, 900, 900]
    assert done[3] == 900


@pytest.mark.parametrize(("duplex", "expected"), [(1.0, 1000), (0.0, 2000), (0.5, 1334)])
def test_both_directions_share_what_duplex_efficiency_leaves(duplex: float, expected: int) -> None:
    done = ends(*network(duplex), (0, 1, 1000, FlowClass.KV), (1, 0, 1000, FlowClass.KV))
    assert done == pytest.approx([expected] * 2, abs=1)


def test_links_inside_a_machine_and_to_the_host_have_ports_of_their_own() -> None:
    topology = {
        "inside": LinkSpec(10 * GB, 0.0, link_class=LinkClass.NVLINK), "machine_of": {0: 0, 1: 0, 2: 1},
        "host": LinkSpec(2 * GB, 0.0, link_class=LinkClass.PCIE),
    }
    flows = ((0, 1, 1000, FlowClass.KV), (0, 2, 1000, FlowClass.KV), (0, host_of(0), 1000, FlowClass.KV))
    assert ends(*network(**topology), *flows) == [100, 1000, 500]


def test_a_stopped_flow_tells_what_it_has_sent_and_makes_room() -> None:
    loop, net = network()
    done: list[int] = []
    first = net.start(0, 1, 1000, FlowClass.KV, lambda: done.append(-1))
    net.start(0, 1, 1000, FlowClass.KV, lambda: done.append(loop.now_ns))
    loop.at(400, lambda: done.append(net.stop(first)))
    loop.run()
    assert done == [200, 1200]
    assert net.stop(first) == 200


flow_lists = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.integers(0, 5000), st.sampled_from(list(FlowClass)),
        st.integers(0, 3000),
    ).filter(lambda f: f[0] != f[1]),
    min_size=1, max_size=12,
)


@given(flow_lists, st.sampled_from([0.0, 0.4, 1.0]), st.lists(st.integers(0, 8000), max_size=3))
def test_bytes_are_conserved_and_no_port_carries_more_than_it_can(
    flows: list[tuple[int, int, int, FlowClass, int]], duplex: float, looks: list[int]
) -> None:
    loop, net = network(duplex)
    arrived: list[int] = []

    def start(src: int, dst: int, num_bytes: int, flow_class: FlowClass) -> None:
        net.start(src, dst, num_bytes, flow_class, lambda: arrived.append(num_bytes))
        net.check()

    for src, dst, num_bytes, flow_class, at_ns in flows:
        loop.at(at_ns, lambda f=(src, dst, num_bytes, flow_class): start(*f))  # type: ignore[misc]
    for at_ns in looks:
        loop.at(at_ns, net.check)
    loop.run()
    assert sorted(arrived) == sorted(f[2] for f in flows)


@given(flow_lists)
def test_work_is_conserved_no_flow_ends_later_than_if_all_went_one_after_the_other(
    flows: list[tuple[int, int, int, FlowClass, int]]
) -> None:
    loop, net = network()
    for src, dst, num_bytes, flow_class, at_ns in flows:
        loop.at(at_ns, lambda f=(src, dst, num_bytes, flow_class): net.start(*f, lambda: None))  # type: ignore[misc]
    loop.run()
    assert loop.now_ns <= max(f[4] for f in flows) + sum(f[2] for f in flows) + len(flows) ** 2


# --- transfers ---------------------------------------------------------------------------------------------------


class Recorder:
    """Transfers over two workers, and when what ended."""

    def __init__(self, *, coordinate: bool = True, piece_bytes: int = 100, latency_s: float = 0.0) -> None:
        self.loop, self.net = network(latency_s=latency_s)
        self.transfers = Transfers(self.loop, self.net, piece_bytes, coordinate=coordinate)
        self.ended: dict[int, tuple[int, TransferEnd]] = {}
        self.arrived: list[int] = []

    def send(self, transfer_id: int, num_bytes: int, flow_class: FlowClass = FlowClass.KV, at_ns: int = 0) -> None:
        transfer = Transfer(
            transfer_id, 0, 1, num_bytes, flow_class,
            lambda end: self.ended.__setitem__(transfer_id, (self.loop.now_ns, end)),
        )
        self.loop.at(at_ns, lambda: self.transfers.start(transfer))

    def activate(self, at_ns: int, num_bytes: int = 10) -> None:
        def send() -> None:
            self.transfers.send_activation(0, 1, num_bytes, lambda: self.arrived.append(self.loop.now_ns))

        self.loop.at(at_ns, send)


def test_a_link_sends_one_transfer_after_the_other_urgent_ones_and_kv_first() -> None:
    r = Recorder()
    r.send(1, 1000, FlowClass.PARAMETERS)
    r.send(2, 500, FlowClass.KV, at_ns=100)
    r.send(3, 100, FlowClass.URGENT_KV, at_ns=200)
    r.loop.run()
    assert {move: at for move, (at, _) in r.ended.items()} == {3: 300, 2: 700, 1: 1600}
    assert r.ended[1][1] == TransferEnd(True, 1000, 1600)


def test_an_activation_waits_at_most_for_the_piece_on_the_wire() -> None:
    r = Recorder()
    r.send(1, 1000)
    r.activate(130)  # 70 of the second piece are left
    r.loop.run()
    assert r.arrived == [210]
    assert r.ended[1][0] == 1010


def test_without_coordination_it_goes_behind_all_that_is_queued() -> None:
    r = Recorder(coordinate=False)
    r.send(1, 1000)
    r.send(2, 500, at_ns=10)
    r.activate(130)
    r.send(3, 700, at_ns=200)
    r.loop.run()
    assert r.arrived == [1510]


def test_latency_is_paid_after_the_last_byte() -> None:
    r = Recorder(latency_s=1e-6)
    r.send(1, 100)
    r.activate(5000)
    r.loop.run()
    assert r.ended[1][0] == 1100 and r.arrived == [6010]


def test_a_cancelled_transfer_ends_incomplete_with_what_it_has_sent() -> None:
    r = Recorder()
    r.send(1, 1000)
    r.send(2, 300)
    r.loop.at(400, lambda: r.transfers.cancel(0, 1))
    r.loop.at(450, lambda: r.transfers.cancel(0, 99))
    r.loop.run()
    assert r.ended[1] == (400, TransferEnd(False, 400, 400))
    assert r.ended[2][0] == 700 and r.ended[2][1].is_complete


def test_what_a_lost_link_carried_is_handed_back_untold() -> None:
    r = Recorder()
    r.send(1, 1000)
    r.send(2, 300)
    dropped: list[Transfer] = []
    r.loop.at(400, lambda: dropped.extend(r.transfers.drop(0, 1)))
    r.loop.run()
    assert not r.ended
    assert [(t.transfer_id, t.sent_bytes, t.begun_ns) for t in dropped] == [(1, 400, 0), (2, 0, None)]
    assert not r.transfers.is_busy(0, 1)


def test_a_flow_knows_what_it_has_sent() -> None:
    loop, net = network()
    flow: Flow = net.start(0, 1, 1000, FlowClass.KV, lambda: None)
    loop.at(300, lambda: None)
    loop.run(until_ns=300)
    assert flow.sent_bytes(loop.now_ns) == 300.0


@pytest.mark.parametrize("bad", [(0.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, 0.0, 1.5), (float("inf"), 0.0, 1.0)])
def test_impossible_links_are_refused(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError):
        LinkSpec(*bad)


@pytest.mark.parametrize(("host_rate", "expected"), [(GB, [2000, 2000]), (2 * GB, [1000, 500])])
def test_links_of_one_class_and_rate_share_a_port(host_rate: int, expected: list[int]) -> None:
    near = LinkSpec(GB, 0.0, link_class=LinkClass.PCIE)
    host = LinkSpec(host_rate, 0.0, link_class=LinkClass.PCIE)
    loop, net = network(inside=near, host=host, machine_of={0: 0, 1: 0})
    assert ends(loop, net, (0, 1, 1000, FlowClass.KV), (0, host_of(0), 1000, FlowClass.KV)) == expected


def test_workers_behind_one_card_share_it_and_what_stays_in_their_machine_does_not_take_it() -> None:
    machines = {0: 0, 1: 0, 2: 1, 3: 1}
    inside = LinkSpec(GB, 0.0, link_class=LinkClass.PCIE)
    flows = [(0, 2, 1000, FlowClass.KV), (1, 3, 1000, FlowClass.KV), (1, 0, 1000, FlowClass.KV)]
    loop, net = network(inside=inside, machine_of=machines, card_of=machines)
    assert ends(loop, net, *flows) == [2000, 2000, 1000]
    net.check()
    assert ends(*network(inside=inside, machine_of=machines), *flows) == [1000, 1000, 1000], "a card each"


def test_what_rounding_leaves_of_a_full_port_is_no_rate() -> None:
    """An activation behind a piece of such a flow would wait for years."""
    _, net = network()
    bulk = net.start(0, 1, 1000, FlowClass.KV, lambda: None)
    for sink in (1, 2, 3):
        net.start(0, sink, 1000, FlowClass.ACTIVATION, lambda: None)
    assert bulk.rate == 0.0
    net.check()
