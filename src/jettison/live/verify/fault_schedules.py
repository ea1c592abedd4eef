"""What a round of deaths (``live.verify.fault_rounds``) is to be: which worker dies, where, how, and what goes on.

A place is a failpoint of a worker (``live.worker.failpoints``), met while drops, restores and migrations follow each
other, or ``role:point``: a failpoint or a phase (``live.verify.fault_places``) of a migration, of going to sleep or of
waking, in which the worker that dies has that role. Drawn from a seed: ``tests/live/verify/drawn_schedules.py``.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from jettison.live.verify.fault_places import PHASES, Role
from jettison.live.worker.failpoints import (
    FILL_NAMES,
    NAMES,
    OFFLINE_NAMES,
    PULL_NAMES,
    SLEEP_NAMES,
)
from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import WorkerId

_KEEPS, _LOADS, _CHECKS = FILL_NAMES[:2], FILL_NAMES[2:4], FILL_NAMES[4:]
_SENT, _WRITTEN = PULL_NAMES[:2], PULL_NAMES[2:]
_POINTS = {
    Role.SLEEPER: (*_KEEPS, *SLEEP_NAMES[:2]),
    Role.WAKER: (*SLEEP_NAMES[2:], *_WRITTEN, *_LOADS, *_CHECKS),
    Role.SENDER: _SENT,
}
"""Failpoints at which these are met."""

MOVES = tuple(f"{role}:{point}" for role in Role for point in (*PHASES[role], *_POINTS.get(role, ())))
"""Every phase of a migration, as KV and as tokens, at both ends; of going to sleep; and of waking."""

PLACES = (*NAMES, *PULL_NAMES, *OFFLINE_NAMES, *MOVES)

class Wake(StrEnum):
    """What becomes of a worker that was stopped."""

    NEVER = "never"
    """It is killed when it is given up."""
    SOON = "soon"
    """It goes on before its silence means anything."""
    LATE = "late"
    """It goes on when it has been given up, or even replaced."""


class Source(StrEnum):
    """Where the parameters of a worker that is woken come from."""

    PEERS = "peers"
    HOST = "host"
    """The machine's copy: all sleep."""
    DISK = "disk"
    """The machine's copy is lost besides."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One death, or one stop."""

    seed: int
    victim: WorkerId
    name: str
    """The place."""
    count: int
    signal: signal.Signals
    wake: Wake = Wake.NEVER
    mode: ExchangeMode | None = None
    """Of the exchanges of this round; None: the engine's."""
    pulls: bool = False
    """The second drop gives members layers that they do not hold (three instances)."""
    source: Source = Source.PEERS

    @property
    def role(self) -> Role | None:
        """What the victim is in a migration, on the way to sleep or back; None: drops and restores go on."""
        if self.name in SLEEP_NAMES:
            return Role.SLEEPER
        role, colon, _ = self.name.partition(":")
        return Role(role) if colon else None

    @property
    def point(self) -> str:
        """The failpoint or the phase."""
        return self.name.rpartition(":")[2]

    @property
    def is_phase(self) -> bool:
        """The controller sees when it is entered; else the victim itself."""
        return self.role is not None and self.point in PHASES[self.role]

    @property
    def is_of_requests(self) -> bool:
        """Requests migrate between instances that serve on."""
        return self.role in (Role.SOURCE, Role.DESTINATION)


def source_for(name: str, wanted: Source = Source.PEERS) -> Source:
    """Where parameters have to come from for a place to be met, else as wanted."""
    role, _, point = name.partition(":")
    if role != Role.WAKER or point in _WRITTEN or point == _CHECKS[0]:
        return Source.PEERS
    return Source.HOST if point in _LOADS and wanted is Source.PEERS else wanted
