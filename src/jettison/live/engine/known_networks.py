"""What networks between hosts carry, by the names of the hosts, from one controller of a server to the next.

A controller that comes back finds its workers busy, so that it cannot probe as ``link_classes`` does; and it numbers
machines anew. So rates are kept by names, in a memory file of the parent's, which every controller inherits. The parent
does not read it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import msgspec

from jettison.live.engine.link_classes import Pair
from jettison.live.engine.spawner import HostName
from jettison.policy.links import MachineId

log = logging.getLogger(__name__)

_Rates = list[tuple[HostName, HostName, float]]


class KnownNetworks:
    """As measured by this controller, and else by the last one before it that has measured."""

    def __init__(self, fd: int | None = None) -> None:
        """``fd``: of the memory file; None: no controller comes after this one."""
        self._fd = fd
        self._rates: dict[tuple[HostName, HostName], float] = {}

    def recall(self) -> None:
        """Take up what an earlier controller has kept, which counts where this one has measured nothing. What cannot be
        read, as that controller was killed while it wrote, is as if it had measured nothing."""
        if self._fd is None:
            return
        try:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            kept = msgspec.json.decode(data, type=_Rates) if data else []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("what networks between hosts carry is not known from before: %s", error)
            return
        self._rates = {(src, dst): rate for src, dst, rate in kept} | self._rates

    def note(self, networks: Mapping[Pair, float], names: Mapping[HostName, MachineId]) -> None:
        """Keep what this controller has measured: bytes per second, by (from, to). ``names``: of the machines; one that
        has no name is left out."""
        name_of = {machine: name for name, machine in names.items()}
        self._rates |= {
            (name_of[src], name_of[dst]): rate
            for (src, dst), rate in networks.items() if src in name_of and dst in name_of
        }
        if self._fd is None:
            return
        data = msgspec.json.encode([(src, dst, rate) for (src, dst), rate in self._rates.items()])
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
        except OSError as error:
            log.warning("what networks between hosts carry is not kept: %s", error)

    def between(self, names: Mapping[HostName, MachineId]) -> dict[Pair, float]:
        """Bytes per second from one of these machines to another, by (from, to), where it is known."""
        return {
            (names[src], names[dst]): rate for (src, dst), rate in self._rates.items() if src in names and dst in names
        }
