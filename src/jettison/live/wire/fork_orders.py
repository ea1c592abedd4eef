"""What a keeper and its fork server tell each other: one JSON message a packet, with descriptors beside it.

    keeper -> fork server   ForkWorker, with the descriptors of ``NUM_FIXED_FDS`` and the worker's listening sockets
    fork server -> keeper   WorkerForked (with a pidfd) or ForkFailed, and later WorkerEnded

A keeper that follows one that has ended asks for the workers that have outlived it:

    keeper -> fork server   AdoptWorkers
    fork server -> keeper   WorkerAdopted for each, with the descriptors of ``NUM_ADOPTED_FDS``, then AdoptionOver
"""

from __future__ import annotations

import msgspec

from jettison.live.wire.worker_config import WorkerStart
from jettison.types import WorkerId

MAX_MESSAGE_BYTES = 1 << 20
NUM_FIXED_FDS = 7
"""Descriptors that each order brings, in this order: the keeper's working directory (paths of the configuration are
relative to it, and it may have no name that can be written), standard output, standard error, the host's copy of the
parameters, the pipe for beats, the flag of steps that are given up, and the pipe's other end, which the fork server
keeps for the next keeper. The listening sockets follow."""
MAX_FDS = NUM_FIXED_FDS + 2
NUM_ADOPTED_FDS = 4
"""A pidfd, the host's copy of the parameters, the flag, the end of the pipe at which beats are heard."""


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True, tag="fork", forbid_unknown_fields=True):
    """One life of a worker, to be forked."""

    order: int
    """The keeper's own number of it; the answers bear it."""
    start: WorkerStart
    link_bytes_per_s: float | None


class AdoptWorkers(msgspec.Struct, frozen=True, tag="adopt", forbid_unknown_fields=True):
    """All workers without a keeper are to be this one's."""


KeeperOrder = ForkWorker | AdoptWorkers


class WorkerAdopted(msgspec.Struct, frozen=True, tag="adopted", forbid_unknown_fields=True):
    """One of them."""

    order: int
    """The fork server's own number of it, below 0."""
    pid: int
    worker: WorkerId
    life: int
    spec_digest: str
    """``worker_config.digest_of`` its device."""


class AdoptionOver(msgspec.Struct, frozen=True, tag="adoption-over", forbid_unknown_fields=True):
    """There are no more."""


class WorkerForked(msgspec.Struct, frozen=True, tag="forked", forbid_unknown_fields=True):
    """The process is there; its pidfd comes beside."""

    order: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The host had no process for it."""

    order: int
    why: str


class WorkerEnded(msgspec.Struct, frozen=True, tag="ended", forbid_unknown_fields=True):
    """The process has ended."""

    order: int
    returncode: int
    """Its exit code; -N where signal N ended it."""


ForkEvent = WorkerForked | ForkFailed | WorkerEnded | WorkerAdopted | AdoptionOver
