"""A worker process, as the fork server forks it (``live.worker.forked``), which is this module run as a program.

Owns what ``WorkerLoop`` does not: sockets, the wait for them, signals, and the bond to its controller. One
thread, which blocks when there is nothing to do, and one that copies beside it (``live.worker.copies``).

What ends it: a Stop command, or the end of its controller (end of file on the control channel; the kernel's
parent-death signal while it is loading). With a server's parent it outlives its controller (``worker.orphan``).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
from collections.abc import Callable

from jettison.errors import JettisonError, LinkDownError, UserError
from jettison.live.machine.address_space import explained
from jettison.live.machine.garbage import imports_that_stay, settle_garbage_collector
from jettison.live.wire import messages as m
from jettison.live.wire.channel import WorkerChannel
from jettison.live.wire.heartbeat import Heart
from jettison.live.wire.stepflag import StepFlag
from jettison.live.wire.worker_config import WorkerConfig, WorkerSpec
from jettison.live.worker.copies import CopyThread
from jettison.live.worker.device_port import Device, device_spec
from jettison.live.worker.doors import Doors
from jettison.live.worker.failpoints import from_environment
from jettison.live.worker.forked import serve_forks
from jettison.live.worker.loop import WorkerLoop
from jettison.live.worker.orphan import Orphan
from jettison.live.worker.transfers import bulk_frame_bytes
from jettison.transport.handshake import Identity, Purpose, secret_under
from jettison.transport.tls import Credentials, TlsContexts
from jettison.types import ShardId

log = logging.getLogger(__name__)

CERTIFICATE_TIMEOUT_S = 60.0
"""The controller answers at once; its loop may be busy with the starts of others."""

DeviceFactory = Callable[[WorkerSpec], Device]


def make_device_worker(spec: WorkerSpec) -> Device:
    """The real device."""
    from jettison.device.worker import make_device  # torch, which a test's fork server does not need

    return make_device(device_spec(spec))


class WorkerProcess:
    """One worker's sockets and waiting, around its ``WorkerLoop``."""

    def __init__(self, config: WorkerConfig, make_device: DeviceFactory) -> None:
        self._config = config
        self._me = Identity(config.spec.worker_id, config.epoch)
        self._make_device = make_device
        self._flag = StepFlag.attach(config.flag_fd)
        self._heart = Heart(config.beat_fd, config.beat_interval_s, self._flag)
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}
        self._early: list[m.Command] = []
        """Came with the certificate: for the loop, once there is one."""

    def run(self) -> int:
        """Serve until told to stop or left alone; returns the exit code."""
        channel, tls = self._connected()
        device: Device | None = None
        try:
            if tls is None:
                tls = self._certified(channel)
            self._heart.start()
            device = self._make_device(self._config.spec)
            device.start()
            doors = self._open_doors(device, tls, self._config.controller_epoch)
            loop = self._make_loop(channel, device, doors)
            settle_garbage_collector()
        except Exception as raised:
            error = explained(raised)
            if not isinstance(error, UserError):
                log.exception("start failed")
            self._heart.stop()
            self._report_failed_start(channel, error)
            if device is not None:
                device.close()
            return 2 if isinstance(error, UserError) else 1
        orphan = Orphan(self._config, Credentials(self._config.secret, self._me, tls))
        try:
            channel.emit(self._ready(device))
            while not self._serve(channel, loop, device) and self._config.orphan_timeout_s:
                loop.close()
                doors.close()
                channel.close(0.0)
                kept = sorted(device.start_over())
                self._heart.waiting = True
                channel, self._early = orphan.next_controller()
                doors = self._open_doors(device, tls, orphan.epoch)
                loop = self._make_loop(channel, device, doors)
                self._epoll.close()
                self._epoll, self._watched = select.epoll(), {}
                channel.emit(self._ready(device, kept))
            return 0
        finally:
            self._heart.stop()
            loop.close()
            device.close()
            channel.close()
            doors.close()
            self._flag.close()

    def _make_loop(self, channel: WorkerChannel, device: Device, doors: Doors) -> WorkerLoop:
        spec = self._config.spec
        return WorkerLoop(
            self._me.worker_id, device, {}, channel.emit, spec.piece_bytes, spec.adapt_pieces, spec.coordinate,
            shares_clock=self._config.shares_clock, failpoint=from_environment(*self._me), copier=CopyThread(),
            flag=self._flag, doors=doors, receive=channel.receive,
        )

    def _ready(self, device: Device, kept: list[ShardId] | None = None) -> m.WorkerReady:
        return m.WorkerReady(
            self._me.worker_id, os.getpid(), device.capacity_blocks, device.layout_version, device.kernels_name,
            device.memory_report(), device.weights_identity, *device.reading_ns, device.own_products, kept,
        )

    # --- start

    def _connected(self) -> tuple[WorkerChannel, TlsContexts | None]:
        """The control channel; over a network also the certificate, which opens it. Raises LinkDownError."""
        config = self._config
        if config.authority_pem is None:
            return WorkerChannel.connect(config.control_address, Credentials(config.secret, self._me)), None
        asks = Credentials(config.secret, self._me, TlsContexts.without_certificate(config.authority_pem.encode()))
        desk = WorkerChannel.connect(config.control_address, asks, Purpose.ENROL)
        try:
            tls = self._certified(desk)
        finally:
            desk.close()
        return WorkerChannel.connect(config.control_address, Credentials(config.secret, self._me, tls)), tls

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

    def _certified(self, channel: WorkerChannel) -> TlsContexts | None:
        """Make a key, and have it certified; None where no peer is on another host. Raises LinkDownError."""
        token = self._config.token_hex
        if token is None:
            return None
        from jettison.transport.authority import Applicant  # brings cryptography, which one host does without

        applicant = Applicant(self._me)
        channel.emit(m.CertificateWanted(self._me.worker_id, bytes.fromhex(token), applicant.request))
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while channel.is_open:
            if not poll.poll(1e3 * CERTIFICATE_TIMEOUT_S):
                raise LinkDownError(f"no certificate came in {CERTIFICATE_TIMEOUT_S:g} s")
            self._early += channel.receive()
            for at, command in enumerate(self._early):
                if isinstance(command, m.Certificate):
                    del self._early[at]
                    return TlsContexts(applicant.papers(command.certificate, command.authority))
                if isinstance(command, m.Stop):
                    raise LinkDownError("told to stop while waiting for a certificate")
        raise LinkDownError("the controller is gone")

    def _open_doors(self, device: Device, tls: TlsContexts | None, controller_epoch: int) -> Doors:
        """Of a controller's time. The sockets go on listening under the next one, so the doors have copies of them."""
        config = self._config
        own = Credentials(secret_under(config.secret, controller_epoch), self._me, tls)
        return Doors(
            [socket.socket(fileno=os.dup(fd)) for fd in config.listen_fds], own,
            bulk_bytes=bulk_frame_bytes(config.spec.piece_bytes, device.kv_block_bytes),
            coordinate=config.spec.coordinate, bytes_per_s=config.link_bytes_per_s, pin=device.pin,
        )

    # --- service

    def _serve(self, channel: WorkerChannel, loop: WorkerLoop, device: Device) -> bool:
        """Tick while there is work; else wait for a command, a link, or room to write. Whether it was told to stop;
        else its controller has ended."""
        busy = True
        for command in self._early:
            loop.deliver(command)
        while not loop.stopped:
            self._watch(channel, loop)
            self._heart.waiting = not busy
            ready = {fd for fd, _ in self._epoll.poll(0 if busy else None)}
            self._heart.waiting = False
            self._heart.unit += 1
            if channel.fileno() in ready:
                for command in channel.receive():
                    loop.deliver(command)
            if not channel.is_open:
                log.warning("the controller is gone")
                return False
            busy = loop.tick()
            if channel.wants_write:
                channel.flush()
        return True

    def _watch(self, channel: WorkerChannel, loop: WorkerLoop) -> None:
        """Bring the epoll set up to date."""
        wanted = {
            channel.fileno(): select.EPOLLIN | (select.EPOLLOUT if channel.wants_write else 0),
            loop.links_fd: select.EPOLLIN,
        }
        if loop.copies_fd is not None:
            wanted[loop.copies_fd] = select.EPOLLIN
        if wanted == self._watched:
            return
        for fd, mask in wanted.items():
            try:
                self._epoll.modify(fd, mask)
            except FileNotFoundError:
                self._epoll.register(fd, mask)
        self._watched = wanted


def run_worker(config: WorkerConfig, make_device: DeviceFactory = make_device_worker) -> int:
    """Serve as the worker of ``config``, to its end; returns the exit code. ``make_device`` is for tests: no input can
    name code to run."""
    os.environ.update(config.spec.environment)  # in time: no CUDA has been opened before the fork
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level,
        format=f"%(asctime)s %(levelname)s %(name)s (worker {config.spec.worker_id}): %(message)s",
    )
    return WorkerProcess(config, make_device).run()


def _import_device() -> None:
    """All that ``make_device_worker`` imports and a device on the host, torch among it. Thread counts are in the
    environment by now."""
    with imports_that_stay():
        from jettison.device.worker import import_for_the_host

        import_for_the_host()  # what a card needs besides, the worker that has one imports


if __name__ == "__main__":
    serve_forks(run_worker, _import_device)
