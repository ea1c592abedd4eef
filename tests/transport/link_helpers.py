"""Pairs of connected links, made without listening sockets."""

from __future__ import annotations

import socket
import tempfile

from jettison.transport.authority import Applicant, Authority
from jettison.transport.dialling import DialledLink
from jettison.transport.handshake import Handshake, Identity, Purpose
from jettison.transport.inproc import InProcessLink
from jettison.transport.shm import ShmLink, SlotGeometry
from jettison.transport.sockets import Acceptor, listening_socket
from jettison.transport.tcp import Connection, TcpLink
from jettison.transport.tls import Credentials, TlsContexts

SECRET = b"0123456789abcdef0123456789abcdef"
SMALL = SlotGeometry(activation_slots=3, bulk_slots=2, activation_bytes=4096, bulk_bytes=8192)


def proven(a=1, b=2, purpose=Purpose.LINK):
    """Both ends of a finished handshake."""
    ours = Handshake(SECRET, Identity(a, 0), purpose, initiator=True)
    theirs = Handshake(SECRET, Identity(b, 0), purpose, initiator=False)
    theirs.feed(ours.feed(theirs.feed(ours.first())))
    return ours, theirs


AUTHORITY = Authority()


def contexts(worker, life=0, authority=AUTHORITY, named=None):
    """Of a worker with a certificate of its own name, or of another one's."""
    me = Identity(worker, life)
    applicant = Applicant(me)
    return TlsContexts(applicant.papers(authority.sign(applicant.request, named or me), authority.certificate))


def shm_pair(geometry=SMALL, pin=None):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = proven()
    a, b = ShmLink(left, ours, geometry, pin=pin), ShmLink(right, theirs, geometry, pin=pin)
    a.wait_attached(1.0)
    b.wait_attached(1.0)
    return a, b


def connected():
    """Two TCP sockets, one at each end."""
    listener = socket.create_server(("127.0.0.1", 0))
    left = socket.create_connection(listener.getsockname())
    right, _ = listener.accept()
    listener.close()
    return left, right


def tcp_pair(activation_bytes=4096, bulk_bytes=8192, num_connections=1):
    ends = [[], []]
    for _ in range(num_connections):
        for end, *connection in zip(ends, connected(), proven(), strict=True):
            end.append(Connection(*connection))
    sizes = {"activation_bytes": activation_bytes, "bulk_bytes": bulk_bytes}
    a, b = (TcpLink(*end[0], *end[1:], **sizes) for end in ends)
    a.wait_attached(1.0)
    b.wait_attached(1.0)
    return a, b


def tcp_pair_of_two():
    return tcp_pair(num_connections=2)


def inproc_pair():
    return InProcessLink.pair(1, 2, activation_slots=3, bulk_slots=3, activation_bytes=4096, bulk_bytes=8192)


def dialled_pair(scheme, num_connections, tls=False, waits=True):
    """Opened without waiting; both ends are what takes the opening link's place. ``waits``: until the accepting end
    knows that it is used, which a worker does not ask."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/link" if scheme == "unix" else "tcp:127.0.0.1:0"
        listener = listening_socket(address, seqpacket=scheme == "unix")
        if scheme == "tcp":
            address += str(listener.getsockname()[1])
            address = address.replace(":0", ":")
        acceptor = Acceptor(listener, SECRET, Identity(2, 0), Purpose.LINK, frozenset({Purpose.URGENT}),
                            tls=contexts(2) if tls else None)
        opening = DialledLink(
            address, Credentials(SECRET, Identity(1, 0), contexts(1) if tls else None), Identity(2, 0),
            [Purpose.LINK, Purpose.URGENT][:num_connections], make,
            (4096, 8192),
        )
        accepted = []
        while opening.settled is None:
            assert opening.is_open, opening.failure
            assert not list(opening.poll_frames())
            accepted += [Connection(*proven) for proven in acceptor.poll()]
            if len(accepted) == num_connections:
                theirs = make(*accepted)
                accepted.append(theirs)
        acceptor.close()
    if waits:
        theirs.wait_attached(1.0)
    return opening.settled, theirs


def tls_pair():
    return dialled_pair("tcp", 2, tls=True)


def make(bulk, urgent=None):
    if bulk.sock.family == socket.AF_UNIX:
        return ShmLink(*bulk, SMALL)
    return TcpLink(*bulk, urgent, activation_bytes=4096, bulk_bytes=8192)


PAIRS = {"shm": shm_pair, "shm, pinned": lambda: shm_pair(pin=lambda memory: lambda: None), "tcp": tcp_pair,
         "tcp, two connections": tcp_pair_of_two, "inproc": inproc_pair,
         "dialled shm": lambda: dialled_pair("unix", 1), "dialled tcp": lambda: dialled_pair("tcp", 2),
         "tls": lambda: dialled_pair("tcp", 1, tls=True), "tls, two connections": tls_pair}
