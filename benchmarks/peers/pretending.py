"""Workers and a front end that pretend, in processes beside a controller that does not: each speaks its real wire.

A worker answers every step after a fixed time with a token for each row that samples, and moves no memory. The front
end asks for as many streams as it is told, opens another for each that ends, and swallows their tokens.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import uvloop

from benchmarks.shared import REPOSITORY, quantile
from jettison.core.ports import StepCompleted
from jettison.device.model.identity import WeightsIdentity
from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import Message, TurnChannel
from jettison.live.frontend.hub import COUNTS
from jettison.live.host.keeper import Addresses
from jettison.live.machine.run_folder import RunFolder
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerStart
from jettison.server.metrics import Observed
from jettison.transport.handshake import Handshake, Identity, Purpose
from jettison.types import Request, SampledToken, SamplingParams

if TYPE_CHECKING:
    from jettison.transport.authority import Authority

TOKEN = SampledToken(97)
NOTHING_READ = WeightsIdentity({}, b"", "", {})
SALT_TOKENS = 4
"""Of a prompt, drawn for it alone, so that no prefix is shared."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a controller has to carry."""

    instances: int
    rows: int
    """Streams open for each instance, and the most rows of a step."""
    step_s: float
    """That a step takes on its device."""
    prompt_tokens: int
    output_tokens: int
    """On average; they are spread evenly over half of it to one and a half."""
    seconds: float
    """Measured, once all streams have been open for ``settle_s``."""
    settle_s: float
    step_ahead: str
    temperature: float
    """0: greedy, whose rows tell the sampler nothing."""
    model: str
    profile: str = ""
    """A file for cProfile of the controller; empty: none."""


class Window(msgspec.Struct, frozen=True):
    """What a process beside the controller is asked about, on the machine's monotonic clock."""

    from_s: float
    to_s: float


class Child:
    """A process of this module: what it is told and answers are JSON lines."""

    def __init__(self, kind: str, *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.pretending", kind, *arguments], cwd=REPOSITORY,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds)

    def tell(self, line: object) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(line) + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> Any:
        """The next line that it says."""
        assert self.process.stdout is not None
        return msgspec.json.decode(await asyncio.to_thread(self.process.stdout.readline))

    def cpu_s(self) -> float:
        """That it has used so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """It ends with its input. Idempotent."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(10)


# --- the controller's side of workers


class _Handle:
    """See ``spawner.Handle``: a life that hangs never."""

    pid = 0
    why_lost = None

    def __init__(self) -> None:
        self.addresses = Addresses("near:nowhere", None)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def located(self) -> None: ...

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result(0)

    def abandon(self, step_id: int) -> None: ...

    def begin_beats(self, now_s: float) -> None: ...

    def why_hung(self, now_s: float, away_s: float, patience: Patience) -> str | None:
        return None


class PretendingSpawner:
    """See ``spawner.Spawner``: all workers in one process, which only speaks for them."""

    spans_hosts = False

    def __init__(self, step_s: float, capacity_blocks: int) -> None:
        self._arguments = str(step_s), str(capacity_blocks)
        self._handles: list[_Handle] = []

    async def open(self, authority: Authority | None) -> str:
        self._folder = RunFolder()
        self.child = Child("workers", *self._arguments)
        return f"unix:{self._folder.path}/control"

    async def close(self) -> None:
        self.child.end()
        self._folder.remove()

    def spawn(self, start: WorkerStart) -> _Handle:
        self.child.tell(start)
        self._handles.append(_Handle())
        return self._handles[-1]

    def let_go(self) -> None:
        """From now on no end of a worker is waited for."""
        for handle in self._handles:
            handle.kill()

    def hosts(self) -> Sequence[str]:
        return ["here"]

    def host_of(self, worker: int) -> str:
        return "here"

    def troubles(self) -> Sequence[str]:
        return ()

    def tell_waits(self, on_waits: Callable[[int, str], None]) -> None: ...

    async def able(self, worker: int) -> None: ...

    def empty_shared_copies(self) -> None: ...


# --- workers


class Gaps:
    """Times between a step's end and the next one's begin, of all workers."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        """When a step began, and how long after the end of the one before, in seconds."""

    def answer(self, window: Window) -> dict[str, float]:
        """Steps begun in a window, and the gaps before them."""
        gaps = [gap for began_s, gap in self.seen if window.from_s <= began_s < window.to_s]
        return {"steps": len(gaps), "gap_p50_ms": 1e3 * quantile(gaps, 0.5), "gap_p99_ms": 1e3 * quantile(gaps, 0.99)}


class Worker(asyncio.Protocol):
    """One life of one worker."""

    def __init__(self, start: WorkerStart, step_s: float, capacity_blocks: int, gaps: Gaps) -> None:
        self._id = start.spec.worker_id
        self._proof = Handshake(start.secret, Identity(self._id, start.epoch), Purpose.CONTROL, initiator=True)
        self._step_s = step_s
        self._capacity_blocks = capacity_blocks
        self._gaps = gaps
        self._messages = MessageBuffer()
        self._ends_s: float | None = None
        """When the last step that has come ends, or has ended."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._proof.first())

    def data_received(self, data: bytes) -> None:
        if not self._proof.done:
            self._transport.write(self._proof.take(data))
            if not self._proof.done:
                return
            data = self._proof.rest
            self._say(m.WorkerReady(self._id, 0, self._capacity_blocks, 0, "none", {}, NOTHING_READ))
        for message in self._messages.feed(data):
            match codec.decode_command(message):
                case m.Step(payload):
                    self._begin(payload)
                case m.ReportMemory(call_id):
                    self._say(m.MemoryReported(self._id, call_id, {}))
                case m.Stop():
                    self._transport.close()

    def _begin(self, payload: bytes) -> None:
        step = codec.decode_step(payload)
        loop = asyncio.get_running_loop()
        now_s = begins_s = time.monotonic()
        if self._ends_s is not None:
            begins_s = max(now_s, self._ends_s)
            self._gaps.seen.append((begins_s, begins_s - self._ends_s))
        self._ends_s = begins_s + self._step_s
        loop.call_later(self._ends_s - now_s, self._end, step.step_id, len(step.sample_rows), begins_s)

    def _end(self, step_id: int, num_tokens: int, began_s: float) -> None:
        completed = StepCompleted(step_id, [TOKEN] * num_tokens, {}, round(1e9 * self._step_s))
        self._say(m.StepDone(self._id, completed, round(1e9 * began_s), round(1e9 * (began_s + self._step_s))))
        told_s = time.monotonic()
        if self._ends_s is not None and self._ends_s < told_s:
            self._ends_s = told_s  # no later step has come: what this process is late counts for no controller

    def _say(self, event: m.Event) -> None:
        self._transport.write(framed(codec.encode(event)))


async def pretend_workers(step_s: float, capacity_blocks: int) -> None:
    """Workers until the input ends: a line is a life that begins, or a window that is asked about."""
    loop, gaps = asyncio.get_running_loop(), Gaps()
    async for line in _lines():
        told = msgspec.json.decode(line)
        if "from_s" in told:
            _print(gaps.answer(msgspec.convert(told, Window)))
            continue
        start = msgspec.convert(told, WorkerStart)
        path = start.control_address.removeprefix("unix:")
        await loop.create_unix_connection(lambda start=start: Worker(start, step_s, capacity_blocks, gaps), path)


# --- the front end


class Swallower:
    """The front end's end of the channel (``channel.Speaker``)."""

    def __init__(self, load: Load) -> None:
        self.channel = TurnChannel(self, reads_front=False)
        self._load = load
        self._draw = random.Random(1)
        self._num_opened = 0
        self.tokens: list[tuple[float, int]] = []
        """When some came, and how many."""
        self.ends: list[float] = []

    def open(self) -> None:
        """Another stream."""
        self._num_opened += 1
        number, load, draw = self._num_opened, self._load, self._draw
        prompt = [draw.randrange(250) for _ in range(SALT_TOKENS)] + [97] * (load.prompt_tokens - SALT_TOKENS)
        length = draw.randrange(load.output_tokens // 2, load.output_tokens * 3 // 2)
        params = SamplingParams(max_tokens=length, temperature=load.temperature, ignore_eos=True)
        request = Request(f"r{number}", tuple(prompt), params, time.monotonic_ns())
        for message in (w.Arrive(number, ""), w.Submit(number, request, False), w.Landed(number, is_accepted=True)):
            self.channel.say(message)

    def on_message(self, message: Message) -> None:
        """Swallow it."""
        match message:
            case w.Tokens(pairs):
                self.tokens.append((time.monotonic(), len(pairs) // 2))
            case w.Event(number, event):
                self.tokens.append((time.monotonic(), len(event.tokens)))
                if event.finish_reason is not None:
                    self.ends.append(time.monotonic())
                    self.channel.say(w.Leave(number))
                    self.open()
            case w.Refused(_, refusal):
                raise SystemExit(f"a stream was refused: {refusal.message}")
            case w.Tell():
                self.channel.say(w.Note(COUNTS, w.packed(Observed({}, {}, {}, 0, 0, (0, 0, 0, 0)))))

    def on_failure(self, message: Message, *, is_own: bool) -> None:
        raise SystemExit(f"a {type(message).__name__} failed")

    def on_lost(self, why: str) -> None: ...

    def answer(self, window: Window) -> dict[str, int]:
        """Of what came in a window."""
        return {"tokens": sum(count for at_s, count in self.tokens if window.from_s <= at_s < window.to_s),
                "requests": sum(window.from_s <= at_s < window.to_s for at_s in self.ends)}  # fmt: skip


async def swallow(load: Load, fd: int) -> None:
    """Streams until the input ends; a line is a window that is asked about."""
    swallower = Swallower(load)
    await asyncio.get_running_loop().create_connection(lambda: swallower.channel, sock=socket.socket(fileno=fd))
    for _ in range(load.rows * load.instances):
        swallower.open()
    async for line in _lines():
        _print(swallower.answer(msgspec.json.decode(line, type=Window)))


# --- lines


async def _lines() -> Any:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


def _print(answer: object) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        uvloop.run(pretend_workers(float(sys.argv[2]), int(sys.argv[3])))
    else:
        uvloop.run(swallow(msgspec.json.decode(sys.argv[2], type=Load), int(sys.argv[3])))
