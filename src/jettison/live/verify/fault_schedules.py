"""What a round of deaths (``live.verify.fault_rounds``) is to be: who dies, where, how, and what goes on meanwhile.

A place is a failpoint of a worker (``live.worker.failpoints``), met while drops, restores and migrations follow each
other, or ``role:point``: a failpoint or a phase (``live.verify.fault_places``) of a migration, of going to sleep or of
waking, in which the worker that dies has that role. Drawn from a seed.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from jettison.live.verify.fault_places import MOVE_PHASES, PHASES, Role
from jettison.live.worker.failpoints import (
    FILL_NAMES,
    LIVE_ONLY,
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

_FREQUENT = ("stage", "sample", "flush", "piece_sent", "piece_written", "attention")
"""Passed many times before a move begins."""


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
    """The machine's copy: everybody sleeps."""
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

    @classmethod
    def draw(cls, seed: int, num_workers: int = 2, names: Sequence[str] = ()) -> Schedule:
        """Every failpoint, or each of ``names``, in turn; victim, count, signal and the kind of moves by lot."""
        rng = random.Random(seed)
        names = names or ((*NAMES, *SLEEP_NAMES, *PULL_NAMES) if num_workers > 2 else (*NAMES, *SLEEP_NAMES))
        name = names[seed % len(names)]
        what = name.rpartition(":")[2].partition("_")[2]
        count = _draw_count(rng, name)
        how = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
        wake = rng.choice(list(Wake)) if how is signal.SIGSTOP else Wake.NEVER
        # Who comes first in every pipeline of whole instances; who is in the first one, and receives when it is turned.
        victim = 0 if what == "stage" else rng.randrange(2 if what == "shard_written" else num_workers)
        with_pieces = [m for m in ExchangeMode if m is not ExchangeMode.RECOMPUTE]
        modes = [ExchangeMode.LIVE] if name in LIVE_ONLY else with_pieces
        pulls = num_workers > 2 and (name in PULL_NAMES or rng.random() < 0.5)
        mode = rng.choice(modes)
        return cls(seed, victim, name, count, how, wake, mode, pulls, source_for(name, rng.choice(list(Source))))


def _draw_count(rng: random.Random, name: str) -> int:
    """For the how many-th time the place is reached when the victim dies there."""
    _, colon, point = name.rpartition(":")
    if not colon:
        if point.partition("_")[2] in _FREQUENT:
            return rng.randrange(1, 60)
        return rng.randrange(1, 8) if point in (*PULL_NAMES, *OFFLINE_NAMES) else 1
    if point in MOVE_PHASES:
        return rng.randrange(1, 3 if point.endswith("_round") else 8)
    return rng.randrange(1, 6) if point in (*PULL_NAMES, *FILL_NAMES) else rng.randrange(1, 3)


def source_for(name: str, wanted: Source = Source.PEERS) -> Source:
    """Where parameters have to come from for a place to be met, else as wanted."""
    role, _, point = name.partition(":")
    if role != Role.WAKER or point in _WRITTEN or point == _CHECKS[0]:
        return Source.PEERS
    return Source.HOST if point in _LOADS and wanted is Source.PEERS else wanted
