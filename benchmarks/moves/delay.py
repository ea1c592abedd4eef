"""How much of a wire with a delay one link between hosts fills, and how long an activation takes beside it.

Two TUN devices, one in a network namespace, joined by a process that lets packets through at a rate and after a delay
(the kernels that we have know no `netem`). The queue before it is first come, first served, which is the worst that an
activation may meet: a host's own queue puts it first. Needs root and /dev/net/tun.

    python -m benchmarks moves delay --tls --mbit 200 1000 --delay-ms 0.1 1 10
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import socket
import struct
import subprocess
import time
from collections import deque
from itertools import product

from benchmarks.shared import Row, keep, parse, print_block
from jettison.live.machine.netns import entered
from jettison.live.worker.pieces import PieceSizer
from jettison.transport.authority import Authority
from jettison.transport.handshake import Handshake, Identity, Purpose
from jettison.transport.link import FrameKind
from jettison.transport.tcp import Connection, TcpLink
from jettison.transport.tls import Papers, TlsContexts, Wire

SECRET = b"s" * 32
QUEUE_BYTES = 2 << 20
"""Before the wire; what does not fit is lost."""
STAGE_NS = 2_000_000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_OURS, _THEIRS = "10.98.0.1", "10.98.0.2"


def open_tun(name: str) -> int:
    """A device that brings IP packets. Raises OSError."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def ip(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(("ip", *words), check=True)


def relay(ends: tuple[int, int], bytes_per_s: float, delay_s: float) -> None:
    """For ever: what one end says, the other hears."""
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    free_s = dict.fromkeys(ends, 0.0)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        now_s = time.monotonic()
        wakes_s = now_s + 0.05
        for end, queue in queues.items():
            while queue and queue[0][0] <= now_s:
                with contextlib.suppress(BlockingIOError):
                    os.write(other[end], queue.popleft()[1])
            if queue:
                wakes_s = min(wakes_s, queue[0][0])
        for end in select.select(ends, [], [], max(0.0, wakes_s - time.monotonic()))[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(end, 1 << 16)
                    now_s = time.monotonic()
                    starts_s = max(now_s, free_s[end])
                    if (starts_s - now_s) * bytes_per_s < QUEUE_BYTES:
                        free_s[end] = starts_s + len(packet) / bytes_per_s
                        queues[end].append((free_s[end] + delay_s / 2, packet))


def proven(purpose: Purpose) -> tuple[Handshake, Handshake]:
    """Both ends of a finished handshake."""
    ours = Handshake(SECRET, Identity(1, 0), purpose, initiator=True)
    theirs = Handshake(SECRET, Identity(2, 0), purpose, initiator=False)
    theirs.feed(ours.feed(theirs.feed(ours.first())))
    return ours, theirs


def wired(sock: socket.socket, papers: Papers | None, *, accepts: bool) -> Wire:
    """With papers over TLS, as between hosts."""
    if papers is None:
        return sock
    sock.setblocking(False)
    return TlsContexts(papers).wrap(sock, accepts=accepts)


def receive(
    listener: socket.socket, proofs: list[Handshake], papers: Papers | None, told: multiprocessing.Queue
) -> None:
    """Until the other end hangs up: bytes, seconds, and the times of activations in milliseconds."""
    bulk, urgent = (Connection(wired(listener.accept()[0], papers, accepts=True), proof) for proof in proofs)
    link = TcpLink(*bulk, urgent, bulk_bytes=1 << 20)
    poll, num_bytes, begun_s, times_ms = select.poll(), 0, 0.0, []
    poll.register(link.fileno(), select.POLLIN)
    while link.is_open:
        poll.poll(200)
        for frame in link.poll_frames():
            if frame.kind.is_bulk:
                begun_s = begun_s or time.monotonic()
                num_bytes += len(frame.payload)
                frame.release()
            else:
                times_ms.append((time.monotonic_ns() - frame.tag) / 1e6)
    told.put((num_bytes, time.monotonic() - begun_s, sorted(times_ms)))


def send(namespace: str, port: int, proofs: list[Handshake], papers: Papers | None, seconds: float) -> None:
    """Pieces without a pause, and every 20 ms an activation."""
    with entered(namespace):
        socks = [socket.create_connection((_OURS, port)) for _ in proofs]
    bulk, urgent = (
        Connection(wired(sock, papers, accepts=False), proof) for sock, proof in zip(socks, proofs, strict=True)
    )
    link, sizer, poll = TcpLink(*bulk, urgent, bulk_bytes=1 << 20), PieceSizer(1 << 20, True), select.poll()
    poll.register(link.fileno(), select.POLLIN | select.POLLOUT)
    ends_s, urgent_s = time.monotonic() + seconds, 0.0
    while (now_s := time.monotonic()) < ends_s:
        if link.send_frame(FrameKind.KV_PIECE, 1, b"", sizer.piece_bytes, lambda to: None):
            sizer.sent(sizer.piece_bytes, time.monotonic_ns(), STAGE_NS)
            link.limit_unsent(sizer.piece_bytes)
        else:
            sizer.refused(time.monotonic_ns())
            poll.poll(5)
        if now_s - urgent_s > 0.02:
            link.send_frame(FrameKind.ACTIVATION, time.monotonic_ns(), b"", 8192, lambda to: None)
            urgent_s = now_s
        list(link.poll_frames())
    link.close()


def measure(mbit: float, delay_ms: float, seconds: float, *, tls: bool, mtu: int) -> Row:
    """One wire. Raises CalledProcessError, OSError."""
    namespace, bytes_per_s = f"jtdelay{os.getpid()}", mbit * 1e6 / 8
    ends = (open_tun("jtdelay0"), open_tun("jtdelay1"))
    context = multiprocessing.get_context("fork")
    wire = context.Process(target=relay, args=(ends, bytes_per_s, delay_ms / 1e3), daemon=True)
    try:
        ip("netns", "add", namespace)
        ip("link", "set", "jtdelay1", "netns", namespace)
        for where, name, address in (((), "jtdelay0", _OURS), (("-n", namespace), "jtdelay1", _THEIRS)):
            ip(*where, "addr", "add", f"{address}/30", "dev", name)
            ip(*where, "link", "set", name, "mtu", str(mtu), "txqueuelen", "2000", "up")
        wire.start()
        pairs = [proven(Purpose.LINK), proven(Purpose.URGENT)]
        authority = Authority() if tls else None
        papers = [None if authority is None else authority.papers_for(Identity(worker, 0)) for worker in (1, 2)]
        told: multiprocessing.Queue = context.Queue()
        with socket.create_server((_OURS, 0)) as listener:
            port = listener.getsockname()[1]
            receiver = context.Process(target=receive, args=(listener, [p[1] for p in pairs], papers[1], told))
            sender = context.Process(target=send, args=(namespace, port, [p[0] for p in pairs], papers[0], seconds))
            receiver.start()
            sender.start()
            num_bytes, took_s, times_ms = told.get(timeout=60 + seconds)
            sender.join()
            receiver.join()
    finally:
        wire.kill()
        wire.join()
        for end in ends:
            os.close(end)
        subprocess.run(("ip", "netns", "del", namespace), check=False)
    return {
        "mbit": mbit, "delay_ms": delay_ms, "tls": tls, "share_of_wire": num_bytes / took_s / bytes_per_s,
        "activation_p50_ms": times_ms[len(times_ms) // 2], "activation_worst_ms": times_ms[-1],
    }  # fmt: skip


def main() -> None:
    """The command."""
    args = parse(
        __doc__, mbit=([200.0],), delay_ms=([10.0], "there and back"), seconds=5.0,
        tls=(False, "encrypted, as links between hosts are"),
        mtu=(9000, "of the devices: fewer packets cost the relay less"),
    )  # fmt: skip
    wires = product(args.mbit, args.delay_ms)
    rows = [measure(mbit, delay_ms, args.seconds, tls=args.tls, mtu=args.mtu) for mbit, delay_ms in wires]
    print_block("wire", {"rows": rows})
    keep(args.json, {"rows": rows}, "transport", "live")


if __name__ == "__main__":
    main()
