"""Front ends over the real hub, in the test's process: the same bytes on the same sockets, without the processes."""

from __future__ import annotations

import asyncio
import socket

from jettison.live.frontend import wire as w
from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.server.fronts.desk import FrontDesk
from jettison.server.fronts.serving import serve_front, state_of
from jettison.server.fronts.start import divided
from jettison.server.parent.kept import unix_listener
from jettison.server.sockets import open_socket


class InProcessFronts:
    """So many front ends of one server, all on one port."""

    def __init__(self, state, engine, tokenizer, number, folder, orphan_timeout_s=0.0):
        self.desk = FrontDesk(state, engine, lambda front, why: self.lost.append((front.id, why)))
        self.desk.num_wanted = number
        self.states = {}
        self.channels = {}
        self.lost = []
        self.port = 0
        self._orphan_timeout_s = orphan_timeout_s
        self._sockets = {}
        self._tokenizer = tokenizer
        self._path = str(folder / "http")
        self._settings = divided(state.settings, number)
        self._tasks = []

    async def run(self, run_on, started):
        """Serve the controller and all front ends until ``run_on`` ends; returns its code."""
        controller = asyncio.create_task(run_on(listener=unix_listener(self._path)))
        try:
            for front in range(self.desk.num_wanted):
                await self.add(front)
            started.set_result(self.port)
            return await controller
        finally:
            await self.desk.hub.close()
            await asyncio.wait(self._tasks, timeout=5.0)

    async def add(self, front):
        """Begin one."""
        self._sockets[front] = asyncio.Queue()
        listener = open_socket("127.0.0.1", self.port, is_shared=True)
        self.port = listener.getsockname()[1]
        await self.connect(front)
        settings, serves = self._settings, asyncio.get_running_loop().create_future()

        def state(engine):
            made = state_of(
                engine, self._tokenizer, settings, "", records=settings.record_request is not None,
                traces=settings.trace_request is not None)
            self.states[front], self.channels[front] = made, engine.channel
            return made

        async def connect(channel):
            sock = await self._sockets[front].get()
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)

        serving = serve_front(
            RemoteEngine(self._orphan_timeout_s), state, self._path, connect, listener, w.Hello(front, 0),
            lambda: serves.set_result(None))
        self._tasks.append(asyncio.create_task(serving))
        await serves

    async def connect(self, front):
        """Have the controller serve it."""
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        await self.desk.hub.add(front, ours)
        self._sockets[front].put_nowait(theirs)

    async def part(self, front):
        """As where the controller is killed; the next to ``connect`` is the same one, which has none of it."""
        lost = self.desk.hub.fronts[front]
        lost.channel.hang_up("killed")
        await lost.gone.wait()
