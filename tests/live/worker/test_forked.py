"""The fork server without its workers: what becomes of a keeper's line."""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from descriptors import no_descriptor_left
from jettison.live.wire.fork_orders import AdoptionOver, AdoptWorkers, ForkEvent
from jettison.live.worker.forked import ForkServer
from waiting import PATIENCE_S


def packet_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    return ours, theirs


def is_served(line: socket.socket) -> bool:
    line.send(msgspec.json.encode(AdoptWorkers()))
    return isinstance(msgspec.json.decode(line.recv(1 << 16), type=ForkEvent), AdoptionOver)


def test_a_line_without_a_descriptor_is_closed_and_the_others_are_served_on():
    door, servers_door = packet_pair()
    server = ForkServer(servers_door, os.getpid(), lambda config: 0)
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    (line, given), (late, too_late) = packet_pair(), packet_pair()
    with line, given, late:
        socket.send_fds(door, [b"line"], [given.fileno()])
        assert is_served(line)
        with no_descriptor_left():
            socket.send_fds(door, [b"line"], [too_late.fileno()])
            assert is_served(line), "behind the other, which is received by then"
        too_late.close()
        assert late.recv(16) == b""
        door.close()
        serving.join(PATIENCE_S)
        assert not serving.is_alive()
