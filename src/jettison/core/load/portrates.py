"""Rates of ports, and the bytes that they have to carry, as known at one decision (``policy.links.PortMap``).

A card's rate may be a parameter (``ClusterParams.card_bytes_per_s``). Else a port has the rate of the fastest link
through it: transfers that have shared the port with others have measured less than it carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jettison.core.load.pullrates import PullRates
from jettison.core.state import ClusterState
from jettison.policy.exchange import LinkId
from jettison.policy.links import PortId, PortKind


class PortRates:
    """Rates of the ports that some links take."""

    def __init__(self, cluster: ClusterState, links: Iterable[LinkId]) -> None:
        """``links``: the links whose ports are asked for. Rates of other measured links count where these take one of
        the ports."""
        self._ports, rates = cluster.params.ports, PullRates(cluster)
        self._rates: dict[PortId, float | None] = {}
        for link in dict.fromkeys(links):
            self._note(link, rates.of_kv(link))
        for link in cluster.link_rates:
            if not self._rates.keys().isdisjoint(self._ports.of(*link)):
                self._note(link, rates.of_kv(link))
        told = cluster.params.card_bytes_per_s
        if told is not None:
            self._rates |= {port: told for port in self._rates if port.kind is PortKind.CARD}

    def _note(self, link: LinkId, rate: float | None) -> None:
        for port in self._ports.of(*link):
            before = self._rates.get(port)
            self._rates[port] = rate if before is None else max(before, rate or before)

    def of(self, port: PortId) -> float | None:
        """Bytes a second of a port; None where its rate is not known, or none of the links takes it."""
        return self._rates.get(port)

    def by_port(self, link_bytes: Mapping[LinkId, int]) -> dict[PortId, int]:
        """Bytes over links, as bytes through ports: each port that a link takes carries all of the link's bytes."""
        found: dict[PortId, int] = {}
        for link, num_bytes in link_bytes.items():
            for port in self._ports.of(*link):
                found[port] = found.get(port, 0) + num_bytes
        return found
