"""How long bytes take between two processes: links, control channels, and the step codec.

    python benchmarks/links.py [--seconds 0.5] [--rounds 3] [--json results.json]

A *hop* is what an activation goes through: written into the link by the sender, woken up for, read, and copied
out by the receiver; measured as half a round trip between two processes that block in epoll. Kinds are
interleaved over several rounds and the median of the rounds is reported with its range, because times on a
shared machine drift. ``control`` rows send a small command and get a small event: our socket against ZeroMQ.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
from evidence import write_result

from jettison.core import ports
from jettison.device.step import StepInput
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import WorkerChannel
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import Frame, FrameKind, Link
from jettison.transport.shm import ShmLink, SlotGeometry
from jettison.transport.sockets import Acceptor, connect, listening_socket
from jettison.transport.tcp import TcpLink

SECRET = bytes(range(32))
SIZES = (1 << 10, 8 << 10, 64 << 10, 1 << 20)
PIECE = 1 << 20
LINKS = ("shm", "tcp")
CONTROLS = ("socket", "zeromq")


class Poller:
    """Frames of one link, waiting in epoll when there is none."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.arrived: deque[Frame] = deque()
        self.epoll = select.epoll()
        self.epoll.register(link.fileno(), select.EPOLLIN)

    def frames(self):
        while True:
            self.arrived.extend(self.link.poll_frames())
            while self.arrived:
                yield self.arrived.popleft()
            if not self.link.is_open:
                return
            self.epoll.poll()

    def send(self, kind: FrameKind, tag: int, data: np.ndarray) -> None:
        while not self.link.send_frame(kind, tag, b"", len(data), lambda out: np.copyto(out, data)):
            self.wait()
        while self.link.wants_write:
            self.wait()

    def wait(self) -> None:
        wants_write = self.link.wants_write
        if wants_write:
            self.epoll.modify(self.link.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self.epoll.poll()
        self.arrived.extend(self.link.poll_frames())
        if wants_write:
            self.epoll.modify(self.link.fileno(), select.EPOLLIN)


def make_link(kind: str, sock, handshake) -> Link:
    return TcpLink(sock, handshake) if kind == "tcp" else ShmLink(sock, handshake, SlotGeometry())


# --- the other process


def child_link(kind: str, address: str) -> None:
    """Echo activations; swallow KV pieces, answering the last one (negative tag)."""
    sock, handshake = connect(address, SECRET, Identity(1, 0), Purpose.LINK, seqpacket=kind == "shm")
    poller = Poller(make_link(kind, sock, handshake))
    copy = np.empty(PIECE, dtype=np.uint8)
    for frame in poller.frames():
        size = len(frame.payload)
        np.copyto(copy[:size], frame.payload)
        bulk, tag = frame.kind.is_bulk, frame.tag
        frame.release()
        if not bulk:
            poller.send(FrameKind.ACTIVATION, tag, copy[:size])
        elif tag < 0:
            poller.send(FrameKind.ACTIVATION, 0, copy[:1])


def child_control(kind: str, address: str) -> None:
    answer = codec.encode(ports.ShardLoaded(1, 7))
    if kind == "zeromq":
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(address)
        dealer.send(answer)
        while dealer.recv() != b"":
            dealer.send(answer)
        return
    sock, _ = connect(address, SECRET, Identity(1, 0), Purpose.LINK)
    channel = WorkerChannel(sock)
    epoll = select.epoll()
    epoll.register(channel.fileno(), select.EPOLLIN)
    while channel.is_open:
        epoll.poll()
        for _ in channel.receive():
            channel.emit(ports.ShardLoaded(1, 7))


# --- this process


class Peer:
    """The child process and this end of its connection."""

    def __init__(self, what: str, kind: str, folder: str) -> None:
        self.what, self.kind = what, kind
        address = f"unix:{folder}/{what}-{kind}"
        if kind == "zeromq":
            self.router = zmq.Context.instance().socket(zmq.ROUTER)
            address = f"ipc://{folder}/{what}-{kind}"
            self.router.bind(address)
            self.process = self._spawn(address)
            self.identity, _ = self.router.recv_multipart()
            return
        listener = listening_socket("tcp:127.0.0.1:0" if kind == "tcp" else address, seqpacket=kind == "shm")
        if kind == "tcp":
            address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        self.process = self._spawn(address)
        acceptor = Acceptor(listener, SECRET, Identity(0, 0), Purpose.LINK)
        while not (proven := acceptor.poll()):
            select.select(acceptor.filenos(), [], [], 1.0)
        sock, handshake = proven[0]
        if what == "control":
            self.channel = WorkerChannel(sock)
            self.epoll = select.epoll()
            self.epoll.register(sock.fileno(), select.EPOLLIN)
            self.buffer = codec.encode(m.ReportMemory(7))
        else:
            self.poller = Poller(make_link(kind, sock, handshake))
            self.answers = self.poller.frames()
        acceptor.close()

    def _spawn(self, address: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, "--child", self.what, self.kind, address])

    def hop(self, data: np.ndarray, copy: np.ndarray) -> None:
        self.poller.send(FrameKind.ACTIVATION, 1, data)
        with next(self.answers) as frame:
            np.copyto(copy, frame.payload)

    def pieces(self, data: np.ndarray, count: int) -> None:
        for i in range(count):
            self.poller.send(FrameKind.KV_PIECE, -1 if i == count - 1 else i, data)
        next(self.answers).release()

    def command(self) -> None:
        if self.kind == "zeromq":
            self.router.send_multipart([self.identity, codec.encode(m.ReportMemory(7))])
            codec.decode_event(self.router.recv_multipart()[1])
            return
        # Framed by hand: this end plays the controller over a plain socket.
        sock = self.channel._sock
        sock.send(len(self.buffer).to_bytes(4, "little") + codec.encode(m.ReportMemory(7)))
        self.epoll.poll()
        codec.decode_event(sock.recv(1 << 16)[4:])

    def close(self) -> None:
        if self.kind == "zeromq":
            self.router.send_multipart([self.identity, b""])
        elif self.what == "control":
            self.channel.close()
        else:
            self.poller.link.close()
        self.process.wait(10)


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call over ``seconds``."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def step_of(rows: int, width: int) -> StepInput:
    column = np.arange(rows, dtype=np.int32)
    return StepInput(
        step_id=1, layer_lo=0, layer_hi=32, token_ids=column, query_lens=np.ones(rows, np.int32),
        context_lens=column, block_tables=np.zeros((rows, width), np.int32), sample_rows=column,
    )


def measure(seconds: float, rounds: int) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    step = step_of(256, 32)
    wire = codec.encode(codec.step_command(step))
    with tempfile.TemporaryDirectory(prefix="jettison-bench-") as folder:
        peers = [Peer("link", kind, folder) for kind in LINKS] + [Peer("control", kind, folder) for kind in CONTROLS]
        for _ in range(rounds):
            for size in SIZES:
                data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
                copy = np.empty_like(data)
                add(f"memcpy {size >> 10} KiB", microseconds(lambda c=copy, d=data: np.copyto(c, d), seconds / 5))
                for peer in peers[: len(LINKS)]:
                    took = microseconds(lambda p=peer, c=copy, d=data: p.hop(d, c), seconds) / 2
                    add(f"{peer.kind} hop {size >> 10} KiB", took)
            for peer in peers[: len(LINKS)]:
                took = microseconds(lambda p=peer, d=data: p.pieces(d, 32), seconds) / 32
                add(f"{peer.kind} bulk piece {size >> 10} KiB", took)
            for peer in peers[len(LINKS) :]:
                add(f"control {peer.kind} hop", microseconds(peer.command, seconds) / 2)
            took = microseconds(lambda: codec.encode(codec.step_command(step)), seconds / 5)
            add("encode step 256 x 32", took)
            took = microseconds(lambda: codec.decode_step(codec.decode_command(wire).payload), seconds / 5)
            add("decode step 256 x 32", took)
        for peer in peers:
            peer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, kind, address = arguments.child
        (child_link if what == "link" else child_control)(kind, address)
        return
    rows = measure(arguments.seconds, arguments.rounds)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{'microseconds':<28}{'median':>10}{'min':>10}{'max':>10}    ({machine})")
    for name, values in rows.items():
        print(f"{name:<28}{statistics.median(values):>10.1f}{min(values):>10.1f}{max(values):>10.1f}")
    if arguments.json:
        write_result(arguments.json, {"unit": "us", "load": os.getloadavg(), "rows": rows}, "transport")


if __name__ == "__main__":
    main()
