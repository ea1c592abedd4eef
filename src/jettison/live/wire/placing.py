"""What the controller and the process that places keepers tell each other: JSON, a message a line.

    controller -> placer   Open first, then Place, Admit, Remove and Ping, GiveBack at the end
    placer -> controller   Waits, and Opened or NoRoom; then for each Place: Waits, Requested, Over; Pong; Head where
                           that changes
"""

from __future__ import annotations

from typing import Literal

import msgspec

from jettison.live.wire.host_orders import KeeperPost

Strategy = Literal["pack", "spread"]


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker takes of its host."""

    num_cpus: int
    num_gpus: int
    memory_bytes: int
    """Of the host; 0: little."""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open", forbid_unknown_fields=True):
    """Join a cluster and reserve room there for the first ``num_reserved`` workers, together, or ``num_begun``."""

    address: str | None
    """Of a Ray cluster that there is; None: start one on this machine, which ends with the placer."""
    rooms: list[Room]
    """By worker."""
    strategy: Strategy
    timeout_s: float
    """For the room to be found."""
    name: str
    """Of the room, the same for every placer of a server: what an earlier one has reserved is taken over."""
    num_reserved: int
    """Together, at the start, and kept so. Each other worker's room is lone: reserved when it is placed, under a name
    of its own, and given back alone."""
    num_begun: int = 0
    """So many workers, the first ones, get their lone room now: Ray chooses their hosts together. With no
    ``num_reserved``."""
    homes: dict[int, str] = {}
    """By worker: the IP address of the host where its keeper is, of those that live. Its room is there."""


class Place(msgspec.Struct, frozen=True, tag="place", forbid_unknown_fields=True):
    """Start this keeper in its room, or where room is found for it. What an earlier life of it has left there goes."""

    post: KeeperPost


class Admit(msgspec.Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """Bring it its certificate."""

    number: int
    life: int
    certificate_pem: str


class GiveBack(msgspec.Struct, frozen=True, tag="give-back", forbid_unknown_fields=True):
    """The controller ends in order: its room is others'. What hangs up without this word may be followed by another."""


class Remove(msgspec.Struct, frozen=True, tag="remove", forbid_unknown_fields=True):
    """It is not needed."""

    number: int
    life: int


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Say whether the cluster that was joined is there."""


PlacerCommand = Open | Place | Admit | Remove | GiveBack | Ping


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """There is room for all that had to be reserved."""

    ip: str
    """This host's address, as the others reach it."""


class NoRoom(msgspec.Struct, frozen=True, tag="noroom", forbid_unknown_fields=True):
    """There is none, and the placer ends."""

    why: str


class Waits(msgspec.Struct, frozen=True, tag="waits", forbid_unknown_fields=True):
    """No host has room yet; it is waited for."""

    why: str
    number: int | None = None
    """Of the worker; None: for all that have to be reserved."""


class Requested(msgspec.Struct, frozen=True, tag="requested", forbid_unknown_fields=True):
    """The keeper is there, with its signing request in hex."""

    number: int
    life: int
    request_hex: str
    ip: str
    """Its host's address."""


class Over(msgspec.Struct, frozen=True, tag="over", forbid_unknown_fields=True):
    """No more is heard of the keeper this way."""

    number: int
    life: int
    why: str | None
    """None: its process has ended. Else it may still be there, bound to its lease alone."""


class Head(msgspec.Struct, frozen=True, tag="head", forbid_unknown_fields=True):
    """Ray's head does not answer; what has been placed needs none. When it is back, the placer ends: another one joins
    whatever has come back."""

    why_away: str


class Pong(msgspec.Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """It is, and has the room. Nothing is said where it has not."""


PlacerEvent = Opened | NoRoom | Waits | Requested | Over | Head | Pong
