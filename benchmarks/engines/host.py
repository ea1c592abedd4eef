"""The parent's side of a comparison: starts engine processes, keeps the idle ones still, times them in turn.

Only one engine computes at a time. The others are stopped (SIGSTOP): several engines poll or spin while they wait,
and would take cores from the one that is measured. Prompts and protocol are in ``child.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.engines.child_server import NOT_INHERITED
from benchmarks.engines.processes import members_of, processor_s, signal_all

HERE = Path(__file__).resolve().parent


class EngineFailedError(Exception):
    """The engine does not run here; the message says why."""


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together."""

    num_requests: int
    prompt_len: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_requests} x {self.prompt_len} in, {self.max_tokens} out"


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine."""

    name: str
    script: str
    """File beside this one."""
    settings: dict[str, Any]
    python: str = sys.executable
    environ: tuple[tuple[str, str], ...] = ()
    note: str = ""
    """What was set, for the report."""


@dataclass(frozen=True)
class Measurement:
    """One batch on one engine."""

    seconds: float
    output_tokens: int
    cores_used: float
    """Processor seconds of the engine's processes, over the time."""
    cores_of_others: float
    """The same of everything else on the machine: what disturbed the measurement."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


class Runs(Protocol):
    """What is measured: an engine in a process of its own, or another maker's program for just that."""

    spec: EngineSpec

    def run(self, workload: Workload, seed: int, timeout_s: float) -> Measurement:
        """One batch. Raises EngineFailedError."""
        ...


class EngineProcess:
    """One running engine. ``start`` waits until it is loaded; ``close`` is idempotent."""

    def __init__(self, spec: EngineSpec, cores: list[int], realtime: bool = False) -> None:
        self.spec = spec
        self.facts: dict[str, Any] = {}
        self._cores = cores
        self._realtime = realtime
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[psutil.Process] = []

    def start(self, timeout_s: float) -> None:
        """Raises EngineFailedError with the last lines that the engine wrote."""
        environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        if self.spec.python != sys.executable:
            environ.pop("PYTHONPATH", None)  # another environment: our packages are not its
        settings = json.dumps({**self.spec.settings, "cores": self._cores, "num_threads": len(self._cores)})
        self._process = subprocess.Popen(
            [self.spec.python, str(HERE / self.spec.script), settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env={**environ, **dict(self.spec.environ)}, start_new_session=True,
        )  # fmt: skip
        self.facts = self._reply(timeout_s)["facts"]
        self._members = members_of(self._process.pid)
        signal_all(self._members, signal.SIGSTOP)

    def run(self, workload: Workload, seed: int, timeout_s: float) -> Measurement:
        """One batch. Raises EngineFailedError."""
        assert self._process is not None and self._process.stdin is not None
        with self._awake():
            own, everything = processor_s(self._members), _machine_processor_s()
            started = time.perf_counter()
            self._process.stdin.write(json.dumps({**asdict(workload), "seed": seed}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._reply(timeout_s)
            wall = time.perf_counter() - started
            own, everything = processor_s(self._members) - own, _machine_processor_s() - everything
        if self._realtime:
            time.sleep(min(wall, 10.0))  # what was held up catches up before the next measurement
        others = max(0.0, everything - own)
        return Measurement(answer["seconds"], answer["output_tokens"], own / wall, others / wall)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        signal_all(self._members, signal.SIGCONT)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        signal_all(self._members[1:], signal.SIGKILL)  # those that left the process group

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        signal_all(self._members, signal.SIGCONT)
        if self._realtime:
            self._schedule(os.SCHED_RR, 1)
        try:
            yield
        finally:
            if self._realtime:
                self._schedule(os.SCHED_OTHER, 0)
            signal_all(self._members, signal.SIGSTOP)

    def _schedule(self, policy: int, priority: int) -> None:
        for member in self._members:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                for thread in member.threads():
                    os.sched_setscheduler(thread.id, policy, os.sched_param(priority))

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise EngineFailedError(f"no answer within {timeout_s:.0f} s" if not ready else self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line]
        return (named or lines or ["ended without a word"])[-1].strip()[-300:]


def _machine_processor_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
