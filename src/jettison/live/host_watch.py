"""A server watched from outside while it serves a load made for it: processor times, and steps from its time line."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jettison.config import EngineConfig
from jettison.errors import JettisonError
from jettison.live.assembly import assemble
from jettison.live.server_process import ServerProcess
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.rows import Workload, as_columns
from jettison.workload.traces import TraceRow

SPARE_BLOCKS = 72
"""Of servers for such loads: the last block of each request is not full."""


@dataclass(frozen=True, slots=True)
class Load:
    """One phase's requests."""

    name: str
    rows: tuple[TraceRow, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """What was read around a phase."""

    load: Load
    begin_ns: int
    end_ns: int
    server_s: float
    worker_s: float
    client_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the time line, or one stage's part of it."""

    begin_ns: int
    end_ns: int
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    is_first_stage: bool
    processor_ns: int
    """Of the thread that computed it; its whole time where several compute and one's tells nothing of the others'."""


class WatchedServer:
    """``with WatchedServer(...) as server: window = server.watch(load)``; ``steps`` once it has ended.

    Prompts are others each time, or the server would find them in its cache.
    """

    def __init__(
        self, config: EngineConfig, num_instances: int, kv_tokens: int, *, overload: str = "recompute"
    ) -> None:
        """``kv_tokens``: what the largest load needs in each instance."""
        self._config = config
        self._flags = {**serving_flags(config, kv_tokens), "instances": num_instances, "overload": overload}
        self._prompt_seeds = itertools.count(1)
        self._exits = ExitStack()
        self._server: ServerProcess | None = None
        self._workers: list[int] = []
        self.steps: list[Step] = []
        """What its time line tells; empty until it has ended."""

    def __enter__(self) -> WatchedServer:
        """Raises JettisonError: it does not come up."""
        with ExitStack() as exits:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="jettison-watched-")))
            line = folder / "timeline.json.gz"
            server = ServerProcess(
                Path(self._config.model.model), {**self._flags, "timeline": line}, folder / "server.log"
            )
            exits.push(lambda kind, *_: self._read_line(line) if kind is None else None)  # after the server's end
            self._server = exits.enter_context(server)
            self._workers = workers_of(server.pid)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _read_line(self, line: Path) -> None:
        self.steps = read_steps(line, self._config.num_threads)

    @property
    def process(self) -> ServerProcess:
        """What runs, or has run. Raises JettisonError before."""
        if self._server is None:
            raise JettisonError("the server has not been started")
        return self._server

    def replay(self, load: Load) -> None:
        """Serve a load unwatched. Raises JettisonError where a request fails."""
        replay(self.process.url, load, self._config, next(self._prompt_seeds))

    def watch(self, load: Load) -> Window:
        """Serve a load. Raises JettisonError where a request fails."""
        return watched(self.process.pid, self._workers, load, lambda: self.replay(load))

    def watch_idle(self, seconds: float) -> Window:
        """Ask nothing of it."""
        return watched(self.process.pid, self._workers, Load("idle", ()), lambda: time.sleep(seconds))


def serving_flags(config: EngineConfig, kv_tokens: int) -> dict[str, object]:
    """Of a server for loads that need so many tokens of KV in each instance, told as the cluster's configuration has
    it; nothing of overload will come up."""
    assembly = assemble(config)
    blocks = -(-kv_tokens // config.memory.block_size) + SPARE_BLOCKS
    return {
        "num_threads": config.num_threads, "dtype": assembly.worker_specs[0].dtype,
        "kernels": config.model.kernels, "block_size": config.memory.block_size, "page_size": config.memory.page_bytes,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_seqs": config.scheduler.max_num_seqs, "max_num_queued_reqs": "none",
        "step_priority": config.scheduler.step_priority,
        "memory": assembly.memory_for_blocks(blocks), "overload": "recompute", "profile": config.profile,
    }  # fmt: skip


def replay(url: str, load: Load, config: EngineConfig, prompt_seed: int) -> None:
    """Send a load and wait for its end. ``prompt_seed``: another one each time, or the server finds the prompts in its
    cache. Raises JettisonError where a request fails."""
    workload = Workload(as_columns(load.rows), load.name, "calibration")
    options = ReplayOptions(
        name=load.name, model=config.model.served_model_name, observe=False, prompts=PromptMaker(seed=prompt_seed),
        detail=False,
    )  # fmt: skip
    run = replay_sync(url, workload, options)
    if run.requests.completed < run.requests.submitted:
        raise JettisonError(f"{run.requests.submitted - run.requests.completed} requests of load {load.name} failed")


def watched(server: int, workers: Sequence[int], load: Load, act: Callable[[], None]) -> Window:
    """What a server and its workers, by process id, and this process take while ``act`` serves the load."""
    server_s, worker_s, client_s = processor_s(server), _sum_s(workers), time.process_time()
    begin_ns = time.monotonic_ns()
    act()
    time.sleep(0.05)  # what is still to be done of the last answer
    end_ns = time.monotonic_ns()
    return Window(
        load, begin_ns, end_ns, processor_s(server) - server_s, _sum_s(workers) - worker_s,
        time.process_time() - client_s,
    )


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process, exactly where the kernel tells, else in its ticks."""
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9
    except (OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _sum_s(pids: Iterable[int]) -> float:
    return sum(processor_s(pid) for pid in pids)


def workers_of(server: int) -> list[int]:
    """Process ids of a server's workers. Raises JettisonError."""
    workers = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            if parent == server and b"worker_main" in command:
                workers.append(int(folder.name))
    if not workers:
        raise JettisonError("the server has no worker")
    return workers


def read_steps(path: Path, num_threads: int = 1) -> list[Step]:
    """Of all workers, of so many threads each, from a server's time line. Raises JettisonError if it is not whole."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    if document["otherData"].get("forgotten_events"):
        raise JettisonError(f"{path.name}: its oldest events are forgotten: so long a session cannot be measured")
    first_ns = document["otherData"]["first_ns"]

    def processor_ns(event: dict[str, Any]) -> int:
        return round(1e3 * (event["dur"] if num_threads > 1 else event["args"].get("processor_us", event["dur"])))

    steps = [
        Step(
            first_ns + round(event["ts"] * 1e3), first_ns + round((event["ts"] + event["dur"]) * 1e3),
            event["args"]["requests"], event["args"]["tokens"], event["args"]["prompt_tokens"],
            event["args"]["layers"][0] == 0, processor_ns(event),
        )
        for event in document["traceEvents"] if event.get("cat") == "step"
    ]  # fmt: skip
    return sorted(steps, key=lambda step: step.begin_ns)


def steps_of(window: Window, steps: Sequence[Step]) -> list[Step]:
    """Those that began in it."""
    return [step for step in steps if window.begin_ns <= step.begin_ns < window.end_ns]
