"""Keepers as processes that this test starts: each stands for a host, with an address of its own, or a namespace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import msgspec

from jettison.errors import WorkerLostError
from jettison.live.host.keeper import worker_environment
from jettison.live.wire.host_orders import Place
from waiting import PATIENCE_S


class ProcessPlacer:
    """``host_of``: a worker's host; ``ips``: by host; ``prefix``: of the keeper's command, by host; ``fails``: places
    nothing while it is set. ``tells_ends``: of keepers' processes."""

    why_none = None

    def on_waits(self, number, why):
        """Not told to any, unless it is replaced."""

    async def able(self):
        """At once."""

    def __init__(self, host_of=str, ip_of=lambda host: "127.0.0.1", own_ip="127.0.0.1", prefix=lambda host: ()):
        self.host_of, self.ip_of, self.own_ip, self.prefix = host_of, ip_of, own_ip, prefix
        self.fails = None
        self.tells_ends = True
        self.processes = {}
        self.removed = []
        self.is_closed = False

    async def open(self):
        return self.own_ip

    def reopen(self, homes):
        self.homes = homes

    async def place(self, post):
        if self.fails is not None:
            raise self.fails
        command = (*self.prefix(self.host_of(post.number)), sys.executable, "-P", "-m", "jettison.live.host.far_keeper")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment(1), start_new_session=True
        )
        self.processes[post.number, post.life] = process
        process.stdin.write(msgspec.json.encode(post) + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise WorkerLostError("the keeper has ended")
        return bytes.fromhex(line.decode())

    async def admit(self, post, certificate_pem):
        host = self.host_of(post.number)
        place = Place(host=host, ip=self.ip_of(host), certificate_pem=certificate_pem)
        self.processes[post.number, post.life].stdin.write(msgspec.json.encode(place) + b"\n")

    async def place_nothing(self, post, certificate_pem):
        """In the place of ``admit``: the certificate is lost on the way."""

    async def ended(self, post):
        await self.processes[post.number, post.life].wait()
        if not self.tells_ends:
            await asyncio.Event().wait()

    async def remove(self, post):
        self.removed.append((post.number, post.life))
        if (post.number, post.life) in self.processes:
            self.processes[post.number, post.life].stdin.close()

    async def close(self):
        for process in self.processes.values():
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), PATIENCE_S)
            except TimeoutError:  # a test has failed that would have woken it up
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        self.is_closed = True

    def signal(self, number, what=signal.SIGSTOP, life=0):
        """To a keeper."""
        os.kill(self.processes[number, life].pid, what)
