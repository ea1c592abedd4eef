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

from jettison.live.host.heritage import Heritage
from jettison.live.wire.fork_orders import MAX_MESSAGE_BYTES

Command = tuple[str, ...]
_Key = tuple[int, Command, tuple[tuple[str, str], ...]]


class ForkServer:
    """One process, from this end."""

    def __init__(self, door: socket, process: subprocess.Popen[bytes] | None) -> None:
        """``process``: None where it outlives this one, which has found it."""
        self._door = door
        self._process = process

    @classmethod
    def start(cls, command: Command, env: dict[str, str], parent_pid: int) -> ForkServer:
        """One that ends with this parent. Raises OSError."""
        door, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        try:
            with theirs:
                return cls(door, subprocess.Popen((*command, str(parent_pid)), stdin=theirs.fileno(), env=env))
        except BaseException:
            door.close()
            raise

    @property
    def door(self) -> socket:
        """With which another process can find it."""
        return self._door

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
        """End it; its workers have ended. One that outlives this process ends with its parent."""
        self._door.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ForkServers:
    """All of this process: started when first asked for, ended when no keeper is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[_Key, ForkServer] = {}
        self._num_keepers = 0
        self._heritage: Heritage | None = None
        self._found: ForkServer | None = None
        """Which an earlier controller has started, until it is first asked for."""

    def inherit(self, heritage: Heritage) -> None:
        """From now on a fork server outlives this process, and the one that an earlier process has left is used."""
        with self._lock:
            self._heritage = heritage
            self._found = None if heritage.door is None else ForkServer(heritage.door, None)

    @property
    def has_found(self) -> bool:
        """Whether an earlier process has left one."""
        return self._found is not None

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
            if self._found is not None:
                self._servers[key], self._found = self._found, None
            if key in self._servers:
                try:
                    return self._servers[key], self._servers[key].connect()
                except ConnectionError:
                    self._servers.pop(key).close()
            heritage = self._heritage
            server = ForkServer.start(command, env, os.getpid() if heritage is None else heritage.parent_pid)
            try:
                line = server.connect()
            except BaseException:
                server.close()
                raise
            self._servers[key] = server
            if heritage is not None:
                heritage.keep_door(server.door)
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
    servers = FORK_SERVERS  # a keeper that no code closes leaves when it is collected, and then what it has entered
    servers.enter()
    try:
        yield
    finally:
        servers.leave()
