"""Modelled links: flows of bytes that share the ports of workers, or of machines with one card.

A flow takes from three capacities: the sending rate of its sender's port, the receiving rate of its receiver's port
and, at each end, the rate of that port in both directions together (``LinkSpec.duplex_efficiency``). Between classes
priority is strict: a lower class gets the rate that the higher ones leave. Inside a class capacity is shared max-min
fairly: no flow can get more unless a flow with less gets less. Rates change only when a flow begins or ends, and only
for flows that share a port with it, directly or through others; in between bytes run off linearly.

Here bytes are a fluid; ``sim.transfers`` has the pieces, and the transfer of a link that is on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum

from jettison.sim.links import PortId, Topology
from jettison.sim.loop import EventLoop, Scheduled
from jettison.types import NANOSECONDS, WorkerId

ROUNDING = 1e-9
"""Of a port's rate: less than this is what rounding leaves of a full one."""


class FlowClass(IntEnum):
    """Classes of flows; lower numbers go first."""

    ACTIVATION = 0
    """Also remote attention's questions and answers."""
    URGENT_KV = 1
    """A request can run as soon as it is there."""
    KV = 2
    PARAMETERS = 3


class Capacity:
    """A rate that flows share, in bytes per nanosecond."""

    __slots__ = ("flows", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.flows: dict[int, Flow] = {}

    @property
    def used(self) -> float:
        """The part of the limit in use now."""
        return math.fsum(flow.rate for flow in self.flows.values())


class Flow:
    """Bytes on their way from one worker to another."""

    __slots__ = ("capacities", "dst", "end", "flow_class", "num_bytes", "number", "on_sent", "rate", "remaining",
                 "src", "started_ns", "updated_ns")  # fmt: skip

    def __init__(
        self, number: int, src: WorkerId, dst: WorkerId, num_bytes: int, flow_class: FlowClass, now_ns: int,
        capacities: tuple[Capacity, ...], on_sent: Callable[[], None],
    ) -> None:
        self.number = number
        self.src = src
        self.dst = dst
        self.num_bytes = num_bytes
        self.flow_class = flow_class
        self.capacities = capacities
        self.on_sent = on_sent
        self.remaining = float(num_bytes)
        self.rate = 0.0
        """Bytes per nanosecond."""
        self.started_ns = now_ns
        self.updated_ns = now_ns
        self.end: Scheduled | None = None

    def advance(self, now_ns: int) -> None:
        """Let the bytes run until now."""
        self.remaining = max(0.0, self.remaining - self.rate * (now_ns - self.updated_ns))
        self.updated_ns = now_ns

    def sent_bytes(self, now_ns: int) -> float:
        """Bytes that have left the sender until now."""
        return self.num_bytes - max(0.0, self.remaining - self.rate * (now_ns - self.updated_ns))


class Network:
    """All flows of a cluster."""

    def __init__(self, loop: EventLoop, topology: Topology) -> None:
        self.topology = topology
        self._loop = loop
        self._out: dict[PortId, Capacity] = {}
        self._in: dict[PortId, Capacity] = {}
        self._both: dict[PortId, Capacity] = {}
        self._flows: dict[int, Flow] = {}
        self._next_number = 0

    def start(
        self, src: WorkerId, dst: WorkerId, num_bytes: int, flow_class: FlowClass, on_sent: Callable[[], None]
    ) -> Flow:
        """Begin to send. ``on_sent`` is called when the last byte has left; it arrives ``latency_ns`` later."""
        flow = Flow(
            self._next_number, src, dst, num_bytes, flow_class, self._loop.now_ns, self._capacities(src, dst), on_sent
        )
        self._next_number += 1
        self._flows[flow.number] = flow
        for capacity in flow.capacities:
            capacity.flows[flow.number] = flow
        self._share(self._connected(flow))
        return flow

    def stop(self, flow: Flow) -> int:
        """Break a flow off; returns the whole bytes that it has sent. ``on_sent`` is not called. Idempotent."""
        if flow.number in self._flows:
            flow.advance(self._loop.now_ns)
            self._remove(flow)
        return int(flow.num_bytes - flow.remaining)

    def latency_ns(self, src: WorkerId, dst: WorkerId) -> int:
        """Nanoseconds from the last byte's leaving to its arrival."""
        return self.topology.link(src, dst).latency_ns

    def bulk_flows_at(self, src: WorkerId, dst: WorkerId) -> Iterable[Flow]:
        """Flows other than activations that leave the sender's port, or enter the receiver's."""
        out_port, in_port, *_ = self._capacities(src, dst)
        return [
            flow for flow in (out_port.flows | in_port.flows).values() if flow.flow_class is not FlowClass.ACTIVATION
        ]

    def check(self) -> None:
        """Check that no port exceeds its capacity, and that every flow has a full port. For tests. Raises
        AssertionError."""
        for ports in (self._out, self._in, self._both):
            for name, capacity in ports.items():
                assert capacity.used <= capacity.limit * (1 + 1e-9), f"{name} carries {capacity.used}"
        for flow in self._flows.values():
            full = any(c.used >= c.limit * (1 - 1e-9) for c in flow.capacities)
            assert full, f"flow {flow.number} could go faster"

    # --- sharing ----------------------------------------------------------------------------------------------

    def _capacities(self, src: WorkerId, dst: WorkerId) -> tuple[Capacity, ...]:
        link = self.topology.link(src, dst)
        limit = link.bytes_per_s / NANOSECONDS
        source, sink = self.topology.ends(src, dst)
        if source not in self._out:
            self._add_port(source, limit, link.duplex_efficiency)
        if sink not in self._out:
            self._add_port(sink, limit, link.duplex_efficiency)
        return self._out[source], self._in[sink], self._both[source], self._both[sink]

    def _add_port(self, port: PortId, limit: float, duplex_efficiency: float) -> None:
        self._out[port], self._in[port] = Capacity(limit), Capacity(limit)
        self._both[port] = Capacity(limit * (1.0 + duplex_efficiency))

    def _connected(self, flow: Flow) -> dict[int, Flow]:
        """All flows whose rates a change of this one can change."""
        found = {flow.number: flow}
        open_flows = [flow]
        while open_flows:
            for capacity in open_flows.pop().capacities:
                for number, other in capacity.flows.items():
                    if number not in found:
                        found[number] = other
                        open_flows.append(other)
        return found

    def _share(self, flows: dict[int, Flow]) -> None:
        """Set new rates for these flows, which share with no others, and schedule their ends anew."""
        now_ns = self._loop.now_ns
        ordered = [flows[number] for number in sorted(flows)]
        for flow in ordered:
            flow.advance(now_ns)
        rates = share_fairly(ordered)
        for flow in ordered:
            rate = rates[flow.number]
            if rate == flow.rate and flow.end is not None and flow.end.is_pending:
                continue
            flow.rate = rate
            if flow.end is not None:
                flow.end.cancel()
            flow.end = None
            if rate > 0.0 or flow.remaining <= 0.0:
                left_ns = math.ceil(flow.remaining / rate) if flow.remaining > 0.0 else 0
                flow.end = self._loop.after(left_ns, lambda flow=flow: self._ended(flow))  # type: ignore[misc]

    def _ended(self, flow: Flow) -> None:
        flow.remaining = 0.0
        self._remove(flow)
        flow.on_sent()

    def _remove(self, flow: Flow) -> None:
        neighbours = self._connected(flow)
        del neighbours[flow.number], self._flows[flow.number]
        for capacity in flow.capacities:
            capacity.flows.pop(flow.number, None)
        if flow.end is not None:
            flow.end.cancel()
        flow.rate = 0.0
        if neighbours:
            self._share(neighbours)


def share_fairly(flows: list[Flow]) -> dict[int, float]:
    """Rates by flow number: strict priority between classes, max-min fair inside each (progressive filling)."""
    left = {capacity: capacity.limit for flow in flows for capacity in flow.capacities}
    rates = dict.fromkeys((flow.number for flow in flows), 0.0)
    for flow_class in sorted({flow.flow_class for flow in flows}):
        open_flows = {f.number: f for f in flows if f.flow_class is flow_class}
        while open_flows:
            counts: dict[Capacity, int] = {}
            for flow in open_flows.values():
                for capacity in flow.capacities:
                    counts[capacity] = counts.get(capacity, 0) + 1
            # The tightest capacity decides the rate of the flows that share it; all others may get more.
            tightest = min(counts, key=lambda capacity: left[capacity] / counts[capacity])
            # What rounding leaves of a full port is not a rate: an activation would wait for a piece of bulk for years.
            is_full = left[tightest] <= ROUNDING * tightest.limit
            share = 0.0 if is_full else left[tightest] / counts[tightest]
            for flow in [f for f in open_flows.values() if tightest in f.capacities]:
                rates[flow.number] = share
                del open_flows[flow.number]
                for capacity in flow.capacities:
                    left[capacity] -= share
    return rates
