"""The fork servers of this process, shared by its keepers: one for each program and environment, while a keeper has use
for it.

``live.worker.forked`` is the process itself. Here: when one is started, the keepers' lines to it, and its end. Engines
of one process may live in several threads, so what they share is behind a lock; a line belongs to one loop.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import AF_UNIX, SO_SNDBUF, SOCK_SEQPACKET, SOL_SOCKET, send_fds, socket, socketpair

from jettison.live.wire.fork_orders import MAX_MESSAGE_BYTES

Command = tuple[str, ...]
_Key = tuple[int, Command, tuple[tuple[str, str], ...]]


class ForkServer:
    """One process, from this end."""

    def __init__(self, command: Command, env: dict[str, str]) -> None:
        """Start it. Raises OSError."""
        self._door, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen((*command, str(os.getpid())), stdin=theirs.fileno(), env=env)
        except BaseException:
            self._door.close()
            raise

    def connect(self) -> socket:
        """A new line. Raises OSError, also where the process has ended."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        try:
            with theirs:
                send_fds(self._door, [b"line"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        ours.setsockopt(SOL_SOCKET, SO_SNDBUF, MAX_MESSAGE_BYTES)
        return ours

    def close(self) -> None:
        """End it; its workers have ended."""
        self._door.close()
        self._process.kill()
        self._process.wait()


class ForkServers:
    """All of this process: started when first asked for, ended when no keeper is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[_Key, ForkServer] = {}
        self._num_keepers = 0

    def enter(self) -> None:
        """A keeper begins."""
        with self._lock:
            self._num_keepers += 1

    def leave(self) -> None:
        """A keeper ends; with the last one all fork servers do."""
        with self._lock:
            self._num_keepers -= 1
            if self._num_keepers == 0:
                for server in self._servers.values():
                    server.close()
                self._servers.clear()

    def connect(self, command: Command, env: dict[str, str]) -> tuple[ForkServer, socket]:
        """The fork server that runs ``command`` in ``env``, and a line to it. It is started where there is none or
        where it has ended. Raises OSError where this host has no process or descriptor for it."""
        key = (os.getpid(), command, tuple(sorted(env.items())))  # a forked copy of this process has none yet
        with self._lock:
            if key in self._servers:
                try:
                    return self._servers[key], self._servers[key].connect()
                except ConnectionError:
                    self._servers.pop(key).close()
            server = ForkServer(command, env)
            try:
                line = server.connect()
            except BaseException:
                server.close()
                raise
            self._servers[key] = server
            return server, line

    def forget(self, server: ForkServer) -> None:
        """A keeper has seen it end: no line to it is made any more. Idempotent."""
        with self._lock:
            for key, other in self._servers.items():
                if other is server:
                    del self._servers[key]
                    server.close()
                    return


FORK_SERVERS = ForkServers()


@contextmanager
def fork_servers_kept() -> Iterator[None]:
    """While inside, fork servers outlive their keepers: for a process that opens one cluster after another."""
    FORK_SERVERS.enter()
    try:
        yield
    finally:
        FORK_SERVERS.leave()
