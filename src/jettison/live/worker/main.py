"""A worker process: ``python -m jettison.live.worker.main``, configured by JSON on standard input.

Owns what ``WorkerLoop`` does not: sockets, the wait for them, signals, and the bond to its controller. One
thread, which blocks when there is nothing to do, and one that copies beside it (``live.worker.copies``).

Who ends it: a Stop command, or the end of its controller (end of file on the control channel; the kernel's
parent-death signal while it is loading). SIGINT, SIGTERM and SIGHUP are ignored on purpose: a terminal or a service
manager sends them to the whole process group, and the controller needs its workers to drain, or to go on.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from jettison.errors import JettisonError, LinkDownError, UserError
from jettison.live.machine.address_space import explained
from jettison.live.machine.garbage import no_collections, settle_garbage_collector
from jettison.live.wire import messages as m
from jettison.live.wire.channel import WorkerChannel
from jettison.live.wire.heartbeat import Heart
from jettison.live.wire.stepflag import StepFlag
from jettison.live.wire.worker_config import WorkerConfig, WorkerSpec
from jettison.live.worker.copies import CopyThread
from jettison.live.worker.device_port import Device, device_spec
from jettison.live.worker.failpoints import from_environment
from jettison.live.worker.loop import WorkerLoop
from jettison.live.worker.transfers import bulk_frame_bytes
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import Link
from jettison.transport.pacing import Pacer
from jettison.transport.shm import ShmLink, SlotGeometry
from jettison.transport.sockets import Acceptor, connect
from jettison.transport.tcp import Connection, TcpLink
from jettison.types import WorkerId

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PAGE = 4096
_REJOIN_CONNECT_S = 10.0
"""How long a restarted worker looks for a peer, which lives already; a dead one is found by trying again."""

DeviceFactory = Callable[[WorkerSpec], Device]


def make_device_worker(spec: WorkerSpec) -> Device:
    """The real device. Imports torch, so only after the thread counts are set."""
    with no_collections():
        from jettison.device.worker import make_device

    return make_device(device_spec(spec))


class WorkerProcess:
    """One worker's sockets and waiting, around its ``WorkerLoop``."""

    def __init__(self, config: WorkerConfig, make_device: DeviceFactory) -> None:
        self._config = config
        self._me = Identity(config.spec.worker_id, config.epoch)
        self._make_device = make_device
        self._deadline = time.monotonic() + config.start_timeout_s
        self._has_two = config.link_kind == "tcp" and config.spec.coordinate
        """Links have a second connection for what is urgent."""
        self._halves: dict[tuple[Identity, Purpose], Connection] = {}
        """Accepted connections whose other half has not come."""
        self._acceptor = Acceptor(
            socket.socket(fileno=config.listen_fd), config.secret, self._me, Purpose.LINK,
            frozenset({Purpose.URGENT}) if self._has_two else frozenset(),
        )
        self._flag = StepFlag.attach(config.flag_fd)
        self._heart = Heart(config.beat_fd, config.beat_interval_s)
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}

    def run(self) -> int:
        """Serve until told to stop or left alone; returns the exit code."""
        channel = WorkerChannel.connect(self._config.control_address, self._config.secret, self._me)
        device: Device | None = None
        spec = self._config.spec
        try:
            device = self._make_device(spec)
            device.start()
            loop = WorkerLoop(
                self._me.worker_id, device, {}, channel.emit, spec.piece_bytes, spec.adapt_pieces, spec.coordinate,
                shares_clock=self._config.shares_clock, failpoint=from_environment(*self._me), copier=CopyThread(),
                flag=self._flag,
            )
            for link, life in self._link_peers(device):
                loop.attach_link(link.peer, link, life)
            settle_garbage_collector()
        except Exception as raised:
            error = explained(raised)
            if not isinstance(error, UserError):
                log.exception("start failed")
            self._report_failed_start(channel, error)
            if device is not None:
                device.close()
            return 2 if isinstance(error, UserError) else 1
        try:
            channel.emit(
                m.WorkerReady(self._me.worker_id, os.getpid(), device.capacity_blocks, device.layout_version,
                              device.kernels_name, device.memory_report(), device.weights_identity, *device.reading_ns)
            )
            self._heart.start()
            self._serve(channel, loop, device)
            return 0
        finally:
            self._heart.stop()
            loop.close()
            device.close()
            channel.close()
            self._acceptor.close()
            self._flag.close()
            for half in self._halves.values():
                half.sock.close()

    # --- start

    def _report_failed_start(self, channel: WorkerChannel, error: Exception) -> None:
        known = isinstance(error, JettisonError)
        channel.emit(
            m.WorkerStartFailed(
                self._me.worker_id,
                type(error).__name__ if known else JettisonError.__name__,
                str(error) if known else f"{type(error).__name__}: {error}",
                isinstance(error, UserError),
            )
        )
        channel.close()

    def _link_peers(self, device: Device) -> list[tuple[Link, int]]:
        """Links to all peers, with the life of each. Raises LinkDownError.

        Connections go from higher to lower ids, and from a restarted worker to all that live: so waiting here ends.
        """
        links: dict[WorkerId, tuple[Link, int]] = {}
        for peer, address in self._config.connect_to.items():
            bulk = self._connect(peer, address, Purpose.LINK)
            urgent = self._connect(peer, address, Purpose.URGENT) if self._has_two else None
            link = self._make_link(bulk, urgent, device)
            # The peer has taken the link into use before it sends this: no command can meet it without the link.
            link.wait_attached(self._seconds_left())
            links[peer] = (link, bulk.handshake.peer.epoch)
        while not links.keys() >= set(self._config.accept_from):
            select.select(self._acceptor.filenos(), [], [], min(1.0, self._seconds_left()))
            links.update((link.peer, (link, life)) for link, life in self._accept(device))
        return list(links.values())

    def _connect(self, peer: WorkerId, address: str, purpose: Purpose) -> Connection:
        sock, handshake = connect(
            address, self._config.secret, self._me, purpose, seqpacket=self._config.link_kind == "shm",
            timeout_s=min(self._seconds_left(), _REJOIN_CONNECT_S if self._me.epoch else math.inf),
        )
        if handshake.peer.worker_id != peer:
            raise LinkDownError(f"worker {handshake.peer.worker_id} answers at the address of worker {peer}")
        return Connection(sock, handshake)

    def _accept(self, device: Device) -> list[tuple[Link, int]]:
        """Links that are complete now, with the life of each peer."""
        links: list[tuple[Link, int]] = []
        for sock, handshake in self._acceptor.poll():
            peer, bulk = handshake.peer, Connection(sock, handshake)
            urgent: Connection | None = None
            if self._has_two:
                self._keep_half(bulk)
                if not all((peer, purpose) in self._halves for purpose in (Purpose.LINK, Purpose.URGENT)):
                    continue
                bulk, urgent = (self._halves.pop((peer, purpose)) for purpose in (Purpose.LINK, Purpose.URGENT))
            try:
                links.append((self._make_link(bulk, urgent, device), peer.epoch))
            except LinkDownError as error:
                log.warning("a peer hung up while it was being accepted: %s", error)
        return links

    def _keep_half(self, half: Connection) -> None:
        """Until the other half comes; what an older life has left is closed."""
        peer = half.handshake.peer
        stale = [key for key in self._halves if key[0].worker_id == peer.worker_id and key[0] != peer]
        for key in stale:
            self._halves.pop(key).sock.close()
        self._halves[peer, half.handshake.purpose] = half

    def _make_link(self, bulk: Connection, urgent: Connection | None, device: Device) -> ShmLink | TcpLink:
        bulk_bytes = bulk_frame_bytes(self._config.spec.piece_bytes, device.kv_block_bytes)
        if self._config.link_kind == "tcp":
            rate = self._config.link_bytes_per_s
            return TcpLink(
                *bulk, urgent, bulk_bytes=bulk_bytes, coordinate=self._config.spec.coordinate,
                pacer=None if rate is None else Pacer(rate),
            )
        return ShmLink(*bulk, SlotGeometry(bulk_bytes=-(-bulk_bytes // _PAGE) * _PAGE))

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LinkDownError(f"the peers were not there within {self._config.start_timeout_s:.0f} s")
        return left

    # --- service

    def _serve(self, channel: WorkerChannel, loop: WorkerLoop, device: Device) -> None:
        """Tick while there is work; else wait for a command, a peer, or room to write."""
        busy = True
        while not loop.stopped:
            self._watch(channel, loop)
            self._heart.waiting = not busy
            ready = {fd for fd, _ in self._epoll.poll(0 if busy else None)}
            self._heart.waiting = False
            self._heart.unit += 1
            if not ready.isdisjoint(self._acceptor.filenos()):
                self._watched = {}  # a descriptor's number may stand for another socket now
                for link, life in self._accept(device):  # before commands: they may already name the new peer
                    loop.attach_link(link.peer, link, life)
            if channel.fileno() in ready:
                for command in channel.receive():
                    loop.deliver(command)
            if not channel.is_open:
                log.warning("the controller is gone")
                return
            busy = loop.tick()
            if channel.wants_write:
                channel.flush()

    def _watch(self, channel: WorkerChannel, loop: WorkerLoop) -> None:
        """Bring the epoll set up to date; closed descriptors have left it by themselves."""
        wanted = dict.fromkeys(self._acceptor.filenos(), select.EPOLLIN)
        if loop.copies_fd is not None:
            wanted[loop.copies_fd] = select.EPOLLIN
        ends: list[WorkerChannel | Link] = [channel, *loop.links.values()]
        for end in ends:
            fd = end.fileno()
            if fd >= 0:
                wanted[fd] = select.EPOLLIN | (select.EPOLLOUT if end.wants_write else 0)
        if wanted == self._watched:
            return
        for fd, mask in wanted.items():
            try:
                self._epoll.modify(fd, mask)
            except FileNotFoundError:
                self._epoll.register(fd, mask)
        self._watched = wanted


def main(make_device: DeviceFactory = make_device_worker) -> int:
    """Read the configuration and serve. ``make_device`` is for tests: no input can name code to run."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    _die_with(config.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(config.spec.num_threads)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level,
        format=f"%(asctime)s %(levelname)s %(name)s (worker {config.spec.worker_id}): %(message)s",
    )
    return WorkerProcess(config, make_device).run()


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent: also while it loads and reads no socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was made
        raise SystemExit(0)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Everything is closed; unloading torch piece by piece would keep the launcher waiting for a second or two.
    os._exit(exit_code)
