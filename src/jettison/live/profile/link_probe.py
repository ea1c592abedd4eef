"""How fast bytes go from one process to another over a shared-memory link, as workers use it.

Both ends: ``measure_link`` here, and ``python -m jettison.live.profile.link_probe`` as the peer, which copies every
frame out of the link (as a worker puts KV into its arenas) and answers. Not here: what the figures are used for.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from jettison.errors import WorkerLostError
from jettison.live.host.keeper import worker_environment
from jettison.live.machine.run_folder import RunFolder
from jettison.live.worker.peers import BULK_SHARE, MAX_BULK_NS
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import Frame, FrameKind
from jettison.transport.shm import ShmLink, SlotGeometry
from jettison.transport.sockets import Acceptor, connect, listening_socket

SMALL_BYTES = 1024
PAUSE_NS = 4_000_000
"""Before an activation: about a step, for which the peer sleeps."""
PIECES = 16
"""Bulk pieces in one go: several times the slots there are, so that the sender has to wait as in a real transfer."""

SPAN_S = 0.02
"""Shorter steps are repeated for so long: a peer gets its share of a busy core in slices of milliseconds."""

_HERE, _PEER = Identity(0, 0), Identity(1, 0)
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0


class LinkSpeed(NamedTuple):
    """Medians."""

    latency_s: float
    """One small activation to a peer that sleeps until it comes: most of that is waking it up."""
    bytes_per_s: float
    """Bulk pieces, copied in and copied out."""


class _ProbeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the peer is told on standard input."""

    address: str
    secret_hex: str
    piece_bytes: int


class _End:
    """One end of the link; waits in epoll when there is nothing."""

    def __init__(self, link: ShmLink, timeout_s: float | None) -> None:
        self.link = link
        self._timeout_s = timeout_s
        self._arrived: deque[Frame] = deque()
        self._epoll = select.epoll()
        self._epoll.register(link.fileno(), select.EPOLLIN)

    def next_frame(self) -> Frame | None:
        """The next frame; None once the link is down. Raises WorkerLostError when none comes in time."""
        while not self._arrived:
            self._arrived.extend(self.link.poll_frames())
            if self._arrived:
                break
            if not self.link.is_open:
                return None
            self._wait()
        return self._arrived.popleft()

    def send(self, kind: FrameKind, tag: int, data: np.ndarray) -> None:
        """Copy ``data`` into the link, waiting for room."""
        while not self.link.send_frame(kind, tag, b"", len(data), lambda out: np.copyto(out, data)):
            self._wait()
            self._arrived.extend(self.link.poll_frames())

    def offer(self, kind: FrameKind, tag: int, data: np.ndarray) -> bool:
        """Copy ``data`` into the link if there is room now."""
        self._arrived.extend(self.link.poll_frames())
        return self.link.send_frame(kind, tag, b"", len(data), lambda out: np.copyto(out, data))

    def close(self) -> None:
        self._epoll.close()
        self.link.close()

    def _wait(self) -> None:
        if not self._epoll.poll(self._timeout_s):
            raise WorkerLostError("the link probe's peer does not answer")


def measure_link(piece_bytes: int, rounds: int = 7) -> LinkSpeed:
    """Latency and rate to a fresh process on this machine. Raises WorkerLostError when it does not come or ends."""
    data = np.random.default_rng(0).integers(0, 256, piece_bytes, dtype=np.uint8)
    with _peer(piece_bytes) as end:
        hops, rates = [], []
        for index in range(rounds + 1):  # the first one maps the slots
            hop_s, awake_s = map(statistics.median, zip(*(_hops_s(end, data[:SMALL_BYTES]) for _ in range(20))))
            start_ns = time.perf_counter_ns()
            for piece in range(PIECES):
                end.send(FrameKind.KV_PIECE, -1 if piece == PIECES - 1 else piece, data)
            _answer(end)
            bulk_s = (time.perf_counter_ns() - start_ns) / 1e9
            if index:
                hops.append(hop_s)
                rates.append(PIECES * piece_bytes / max(bulk_s - awake_s, 1e-9))
        return LinkSpeed(statistics.median(hops), statistics.median(rates))


def measure_link_beside(step_s: Callable[[], float], piece_bytes: int, rounds: int) -> float | None:
    """What a byte adds to a step at a link's end: steps alone, and with bulk turns after them as a worker has them, in
    turns. ``step_s``: runs one, and says how long it took. None where the link took nothing. Raises WorkerLostError, as
    ``measure_link`` does.
    """
    data = np.random.default_rng(0).integers(0, 256, piece_bytes, dtype=np.uint8)
    step_s()
    repeats = math.ceil(SPAN_S / max(step_s(), 1e-6))
    prices: list[float] = []
    with _peer(piece_bytes) as end:
        for index in range(rounds + 1):  # the first one maps the slots
            alone_s = sum(step_s() for _ in range(repeats))
            turn_ns = min(MAX_BULK_NS, round(1e9 * alone_s / repeats) // BULK_SHARE)
            num_pieces, beside_s = 0, 0.0
            for _ in range(repeats):
                beside_s += step_s()
                start_ns = time.perf_counter_ns()
                while end.offer(FrameKind.KV_PIECE, 0, data):
                    num_pieces += 1
                    if time.perf_counter_ns() - start_ns >= turn_ns:
                        break
                beside_s += (time.perf_counter_ns() - start_ns) / 1e9
            end.send(FrameKind.KV_PIECE, -1, data)
            _answer(end)
            if index and num_pieces:
                prices.append((beside_s - alone_s) / (num_pieces * piece_bytes))
    return max(0.0, statistics.median(prices)) if prices else None


def _hops_s(end: _End, data: np.ndarray) -> tuple[float, float]:
    """One way, to a peer that has slept for as long as a step, and to the same that is awake."""
    until_ns = time.perf_counter_ns() + PAUSE_NS
    while time.perf_counter_ns() < until_ns:
        pass  # the sender computes, as a stage does before it hands on
    start_ns = time.perf_counter_ns()
    end.send(FrameKind.ACTIVATION, 1, data)
    _answer(end)
    between_ns = time.perf_counter_ns()
    end.send(FrameKind.ACTIVATION, 1, data)
    _answer(end)
    both_ways_ns, awake_ns = between_ns - start_ns, time.perf_counter_ns() - between_ns
    return max(both_ways_ns - awake_ns / 2, both_ways_ns / 2) / 1e9, awake_ns / 2e9


def _answer(end: _End) -> None:
    frame = end.next_frame()
    if frame is None:
        raise WorkerLostError(f"the link probe's peer is gone: {end.link.failure}")
    frame.release()


@contextlib.contextmanager
def _peer(piece_bytes: int) -> Iterator[_End]:
    """A peer process and this end of the link to it; both are gone afterwards."""
    secret = secrets.token_bytes(32)
    geometry = SlotGeometry(bulk_bytes=piece_bytes)
    with RunFolder() as folder:
        config = _ProbeConfig(f"unix:{folder.path}/link", secret.hex(), piece_bytes)
        acceptor = Acceptor(listening_socket(config.address, seqpacket=True), secret, _HERE, Purpose.LINK)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jettison.live.profile.link_probe"],
            stdin=subprocess.PIPE, env=worker_environment(1),
        )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
            end = _End(_accept(acceptor, process, geometry), _ANSWER_TIMEOUT_S)
            try:
                yield end
            finally:
                end.close()
            process.wait(_ANSWER_TIMEOUT_S)
        finally:
            acceptor.close()
            if process.poll() is None:
                process.kill()
            process.wait()


def _accept(acceptor: Acceptor, process: subprocess.Popen[bytes], geometry: SlotGeometry) -> ShmLink:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        for sock, handshake in acceptor.poll():
            assert isinstance(sock, socket.socket), "over a Unix socket nothing is encrypted"
            return ShmLink(sock, handshake, geometry)
        if process.poll() is not None:
            raise WorkerLostError(f"the link probe's peer ended with code {process.returncode}")
        select.select(acceptor.filenos(), [], [], 0.2)
    raise WorkerLostError("the link probe's peer did not connect in time")


def main() -> None:
    """The peer: echo activations; copy bulk pieces out, and answer the last of them (negative tag)."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=_ProbeConfig)
    sock, handshake = connect(config.address, bytes.fromhex(config.secret_hex), _PEER, Purpose.LINK, seqpacket=True)
    end = _End(ShmLink(sock, handshake, SlotGeometry(bulk_bytes=config.piece_bytes)), None)
    copy = np.empty(config.piece_bytes, dtype=np.uint8)
    while (frame := end.next_frame()) is not None:
        size = len(frame.payload)
        np.copyto(copy[:size], frame.payload)
        is_last, is_bulk = frame.tag < 0, frame.kind.is_bulk
        frame.release()
        if not is_bulk or is_last:
            end.send(FrameKind.ACTIVATION, 0, copy[:SMALL_BYTES])
    end.close()


if __name__ == "__main__":
    main()
