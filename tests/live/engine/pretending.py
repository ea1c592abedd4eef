"""A spawner without processes: workers are tasks on the test's own loop, and what befalls them is scripted."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from jettison.core import ports
from jettison.live.host.keeper import Addresses
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.transport.authority import Applicant
from jettison.transport.handshake import Handshake, Identity, Purpose

_pids = itertools.count(1_000_000)


class PretendingHandle:
    """One life. ``hung``: why it counts as hung, while it does; it obeys no command then."""

    def __init__(self, start):
        self.start = start
        self.pid = next(_pids)
        name = f"{start.spec.worker_id}.{start.epoch}"
        self.addresses = Addresses(f"near:{name}", f"far:{name}")
        self.why_lost = None
        self.commands = []
        self.certificates = []
        self.ended = asyncio.get_running_loop().create_future()
        self.named = 0
        self.hung = None
        self.awake = asyncio.Event()
        self.awake.set()
        self.counts = False

    async def located(self):
        pass

    def kill(self):
        self.end(-9)

    def end(self, code):
        if not self.ended.done():
            self.ended.set_result(code)

    def abandon(self, step_id):
        self.named = step_id

    def begin_beats(self, now_s):
        self.counts = True

    def why_hung(self, now_s, away_s, patience):
        return self.hung if self.counts and any(patience) and not self.ended.done() else None

    def hang(self):
        self.hung = "silent for so long"
        self.awake.clear()

    def wake(self):
        self.hung = None
        self.awake.set()


class PretendingSpawner:
    """``scripts``: what a worker does at its start, by id: ready, crash, budget, silent, forger (asks for a certificate
    with a token of its own), greedy (asks for two). Two workers a host."""

    def __init__(self, scripts=None):
        self.scripts = defaultdict(lambda: "ready", scripts or {})
        self.handles: list[PretendingHandle] = []
        self.refuses = False
        self.num_emptied = 0
        self.released = []
        self._folder = None
        self._tasks = []

    spans_hosts = True

    async def open(self, authority):
        self._folder = tempfile.TemporaryDirectory(prefix="pretending-")
        return f"unix:{self._folder.name}/control"

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._folder.cleanup()

    @property
    def is_closed(self):
        return not Path(self._folder.name).exists()

    async def adopt(self, num_threads):
        return ()

    def spawn(self, start):
        if self.refuses:
            raise OSError(12, "Cannot allocate memory")
        handle = PretendingHandle(start)
        self.handles.append(handle)
        self._tasks.append(asyncio.create_task(self._live(handle)))
        return handle

    def release(self, worker):
        self.released.append(worker)

    def hosts(self):
        return ["first", "second", "third"]

    def host_of(self, worker):
        return self.hosts()[worker // 2]

    def troubles(self):
        return ()

    def tell_waits(self, on_waits):
        """There is room."""

    async def able(self, worker):
        """At once."""

    def empty_shared_copies(self):
        self.num_emptied += 1

    async def _live(self, handle):
        """From the connection to the end; a death closes the connection, and so does the controller."""
        address = handle.start.control_address.removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(address)
        with closing(writer):
            await self._speak(handle, reader, writer)

    async def _speak(self, handle, reader, writer):
        start, script = handle.start, self.scripts[handle.start.spec.worker_id]
        worker = start.spec.worker_id
        proof = Handshake(start.secret, Identity(worker, start.epoch), Purpose.CONTROL, initiator=True)
        writer.write(proof.first())
        writer.write(proof.feed(await reader.readexactly(proof.needed)))

        def tell(event):
            writer.write(framed(codec.encode(event)))

        token = bytes.fromhex(start.token_hex)
        if script in ("forger", "greedy"):
            applicant = Applicant(Identity(worker, start.epoch))
            wanted = m.CertificateWanted(worker, token if script == "greedy" else b"x" * 32, applicant.request)
            for _ in range(2 if script == "greedy" else 1):
                tell(wanted)
        if script == "ready":
            applicant = Applicant(Identity(worker, start.epoch))
            tell(m.CertificateWanted(worker, token, applicant.request))
            tell(m.WorkerReady(worker, handle.pid, 8, 0, "none", {}))
        elif script == "budget":
            tell(m.WorkerStartFailed(worker, "BudgetError", "4096 bytes are needed", True))
        if script in ("crash", "budget"):
            writer.write_eof()
            await reader.read()  # the controller has heard all
            handle.end(7 if script == "crash" else 2)
        else:
            reading = asyncio.create_task(self._obey(handle, reader, tell))
            await asyncio.wait([reading, handle.ended], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            handle.end(0)

    async def _obey(self, handle, reader, tell):
        buffer, worker = MessageBuffer(), handle.start.spec.worker_id
        while data := await reader.read(1 << 16):
            await handle.awake.wait()
            for command in map(codec.decode_command, buffer.feed(data)):
                if isinstance(command, m.Certificate):
                    handle.certificates.append(command)
                    continue
                handle.commands.append(command)
                match command:
                    case m.Stop():
                        return
                    case m.ReportMemory():
                        tell(m.MemoryReported(worker, command.call_id, {"kv": 1}))
                    case m.Step():
                        step = codec.decode_step(command.payload)
                        gives_up = step.safepoint_layers and handle.named == step.step_id
                        done = m.StepDone(worker, ports.StepCompleted(step.step_id, [], {}, 0))
                        tell(ports.StepAbandoned(step.step_id) if gives_up else done)
