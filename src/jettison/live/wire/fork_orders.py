"""What a keeper and its fork server tell each other: one JSON message a packet, with descriptors beside it.

    keeper -> fork server   ForkWorker, with the descriptors of ``NUM_FIXED_FDS`` and the worker's listening sockets
    fork server -> keeper   WorkerForked (with a pidfd) or ForkFailed, and later WorkerEnded
"""

from __future__ import annotations

import msgspec

from jettison.live.wire.worker_config import WorkerStart

MAX_MESSAGE_BYTES = 1 << 20
NUM_FIXED_FDS = 5
"""Descriptors that each order brings, in this order: standard output, standard error, the host's copy of the
parameters, the pipe for beats, the flag of steps that are given up. The listening sockets follow."""
MAX_FDS = NUM_FIXED_FDS + 2


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True, tag="fork", forbid_unknown_fields=True):
    """One life of a worker, to be forked."""

    order: int
    """The keeper's own number of it; the answers bear it."""
    start: WorkerStart
    folder: str
    """The keeper's working directory: paths of the configuration are relative to it."""
    link_bytes_per_s: float | None


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


ForkEvent = WorkerForked | ForkFailed | WorkerEnded
