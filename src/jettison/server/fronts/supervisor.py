"""Processes of front ends: their sockets, their start, and their start again.

Each has a listening socket of its own on the one address (SO_REUSEPORT), bound here and inherited. The kernel deals
connections out by their addresses: a burst is spread, where one socket for all would give it to the process that wakes
first, and streams stay where they began. A front end's socket listens once it serves. While it is down the socket is
closed, so the others get all new connections; the only one's is kept open, and clients wait in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

import jettison
from jettison.config import API_KEY_VARIABLES
from jettison.live.frontend.hub import Front, FrontId
from jettison.server.fronts.desk import FrontDesk
from jettison.server.fronts.start import FrontStart
from jettison.server.serving import open_socket

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "jettison.server.fronts.process")

FIRST_DELAY_S = 0.1
"""Before a front end is started again; twice as long after each life that was short."""
MOST_DELAY_S = 10.0
LONG_LIFE_S = 30.0
MOST_STARTS = 5
"""Of each front end while none has ever served; then the server is given up. A lack of memory or descriptors that
passes does so in their delays, some 3 s; what is wrong with the installation does not."""
LAST_WORDS_S = 0.5
"""For what an ended process has said to be read."""
END_S = 3.0
"""Time for front ends to write their last bytes and end, before they are killed."""


class FrontEnds:
    """``listen``, then ``start``; ``close`` ends them all. Calls on one asyncio loop."""

    def __init__(self, number: int, desk_of: Callable[..., FrontDesk]) -> None:
        """``desk_of(on_lost, on_serves)`` makes the desk, with its hub."""
        self.desk = desk_of(self._on_lost, self._on_serves)
        self.desk.num_wanted = number
        self._listeners: dict[FrontId, socket.socket] = {}
        self._address = ("", 0)
        self._processes: dict[FrontId, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self._serving: set[FrontId] = set()
        self._num_failed = dict.fromkeys(range(number), 0)
        """Front end -> its lives, while none has served."""
        self.served = asyncio.Event()
        """Set when the first one serves."""
        self.failed = asyncio.Event()
        """Set when none ever will."""

    def listen(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises ConfigError, also where another server of such sockets has the address."""
        with open_socket(host, port) as alone:  # sockets that share an address say nothing of each other
            self._address = (host, alone.getsockname()[1])
        for front in range(self.desk.num_wanted):
            self._listener(front)
        return self._address[1]

    def _listener(self, front: FrontId) -> socket.socket:
        if front not in self._listeners:
            self._listeners[front] = open_socket(*self._address, is_shared=True, listens=False)
        return self._listeners[front]

    def start(self, start_of: Callable[[FrontId, int], FrontStart]) -> None:
        """Start all; ``start_of`` tells what life number so and so of one is told."""
        self._tasks = [
            asyncio.create_task(self._keep(front, start_of), name=f"jettison-front-end-{front}")
            for front in range(self.desk.num_wanted)
        ]

    def pids(self) -> dict[FrontId, int]:
        """Of those that run."""
        return {front: process.pid for front, process in self._processes.items()}

    async def _keep(self, front: FrontId, start_of: Callable[[FrontId, int], FrontStart]) -> None:
        """Have a front end run."""
        delay_s, life = FIRST_DELAY_S, 0
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                code = await self._live(front, start_of(front, life))
            except Exception:
                logger.exception("front end %d does not start", front)
            else:
                if self._closing.is_set():
                    return
                logger.error("front end %d has ended (%s): its requests are cancelled", front, code)
            life += 1
            self._num_failed[front] += 1
            if not self.served.is_set() and min(self._num_failed.values()) >= MOST_STARTS:
                logger.error("no front end has served in %d starts of each: the server ends", MOST_STARTS)
                self.failed.set()
                return
            if time.monotonic() - began_s >= LONG_LIFE_S:
                delay_s = FIRST_DELAY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay_s)
            delay_s = min(MOST_DELAY_S, 2 * delay_s)

    async def _live(self, front: FrontId, start: FrontStart) -> int:
        """One life of its process; returns its exit code."""
        ours, theirs = socket.socketpair()
        listener = self._listener(front)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND, str(listener.fileno()), str(theirs.fileno()), stdin=asyncio.subprocess.PIPE,
                    pass_fds=(listener.fileno(), theirs.fileno()), env=_environment())
        except BaseException:
            ours.close()
            raise
        self._processes[front] = process
        channel: Front | None = None
        try:
            ours.setblocking(False)
            channel = await self.desk.hub.add(front, ours)
            assert process.stdin is not None
            with suppress(ConnectionError):  # its end is told below
                process.stdin.write(msgspec.json.encode(start))
                await process.stdin.drain()
            process.stdin.close()
            return await process.wait()
        finally:
            del self._processes[front]
            self._serving.discard(front)
            if self._serving and not self._closing.is_set():
                self._listeners.pop(front).close()
            if process.returncode is None:
                process.kill()
                await process.wait()
            if channel is not None:
                with suppress(TimeoutError):  # what it said last
                    await asyncio.wait_for(channel.gone.wait(), LAST_WORDS_S)
                self.desk.hub.drop(channel, "its process has ended")

    def _on_serves(self, front: FrontId) -> None:
        """It takes connections."""
        if front in self._processes:
            self._serving.add(front)
            self.served.set()

    def _on_lost(self, front: FrontId, why: str) -> None:
        """Its channel is closed: a process that has not ended is of no use."""
        process = self._processes.get(front)
        if process is None or self._closing.is_set() or process.returncode is not None:
            return
        logger.error("front end %d is lost: %s", front, why)
        with suppress(ProcessLookupError):
            process.kill()

    async def close(self) -> None:
        """End all. Idempotent."""
        self._closing.set()
        await self.desk.hub.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


def _environment() -> dict[str, str]:
    """Of a front end: without keys, and with the package that runs here."""
    environment = {name: value for name, value in os.environ.items() if name not in API_KEY_VARIABLES}
    package_root = str(Path(jettison.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    return environment
