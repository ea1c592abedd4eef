"""A process that runs steps of a model with nobody's requests, when it is told: to measure what cores can do.

Both ends: ``StepProcess`` here, and ``python -m jettison.live.step_process`` as the process. It either runs steps of a
few shapes over and over between two times, or *probes*: one small step now and then, timed in the processor time that
it takes. Waiting for a turn is not in that, so a probe tells how fast a core is, whoever else wants it.
"""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from jettison.config import EngineConfig
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import WorkerLostError
from jettison.live.assembly import assemble
from jettison.live.launcher import worker_environment
from jettison.live.machine_time import machine_time
from jettison.live.profile import make_profile_device, shape_limits
from jettison.live.step_timer import StepTimer

DECODES, CONTEXT = (1, 16), 128
"""Batches of decodes that are run, and their cached tokens; and one prompt of the step's budget."""
PROBE_DECODES = 8
"""Requests of a probe: about a step while serving. A step of one request is mostly what is beside the arithmetic, and
feels others on the core more than steps with more of it (pure Python by two thirds, products of matrices an eighth)."""


class Sample(NamedTuple):
    """One probe."""

    at_s: float
    """Of the monotonic clock."""
    took_s: float
    """Processor time."""
    busy_cores: float = 0.0
    """Of this machine, on average since the sample before it."""
    stolen_cores: float = 0.0
    """That were wanted meanwhile, and which a hypervisor gave to others: processor time knows nothing of it."""


class StepProcess:
    """One process with a device of its own."""

    def __init__(self, config: EngineConfig) -> None:
        told = {key: value for key, value in config.flat().items() if key not in ("api_key", "timeline")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jettison.live.step_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=worker_environment(config.num_threads),
        )  # fmt: skip
        self._tell(told)

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it has ended, or was closed
            raise self._lost() from None

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._lost()
        return json.loads(line)

    def _lost(self) -> WorkerLostError:
        return WorkerLostError(f"a process that measures ended with code {self._process.wait()}")

    def wait_ready(self) -> None:
        """Until its device is loaded. Raises WorkerLostError, as all methods do when the process has ended."""
        self._hear()

    def run(self, begin_ns: int, end_ns: int) -> None:
        """Let it run steps between two times of the monotonic clock."""
        self._tell({"run_ns": [begin_ns, end_ns]})

    def answer(self) -> dict[str, float]:
        """What ``run`` came to: median seconds by shape."""
        answer: dict[str, float] = self._hear()
        return answer

    def watch(self, interval_s: float) -> None:
        """Let it probe, with so long a pause after each; it does when this returns."""
        self._tell({"watch_s": interval_s})
        self._hear()

    def end_watch(self) -> list[Sample]:
        """All probes since ``watch``, in order."""
        self._tell({})
        return [Sample(*values) for values in self._hear()]

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not read when it died
                pipe.close()


def main() -> None:
    """The process: configuration, then orders, a line each, on standard input."""
    config = EngineConfig.resolve(**json.loads(sys.stdin.readline()))
    assembly = assemble(config)
    limits = shape_limits(assembly)
    device = make_profile_device(assembly, limits)
    device.start()
    try:
        timer = StepTimer(device, limits)
        timer.prepare()
        shapes = _shapes(limits.num_layers, min(limits.max_num_tokens, limits.max_context), limits.max_num_seqs)
        probe = _decodes(limits.num_layers, min(PROBE_DECODES, limits.max_num_seqs))
        for shape in (*shapes.values(), probe):
            timer.time_s(shape)
        _say("ready")
        for line in sys.stdin:
            order = json.loads(line)
            if "run_ns" in order:
                _say(_run(timer, shapes, *order["run_ns"]))
            elif "watch_s" in order:
                _say("watching")  # the end of it must not come with its begin: ``select`` does not see what is buffered
                _say(_probe(timer, probe, order["watch_s"]))
            else:
                _say([])  # the end of a watch that there was not
    finally:
        device.close()


def _say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _shapes(num_layers: int, most_tokens: int, most_seqs: int) -> dict[str, StepShape]:
    decodes = {f"decode {size}": _decodes(num_layers, size) for size in DECODES if size <= most_seqs}
    return decodes | {"prefill": StepShape((ChunkShape(0, most_tokens),), num_layers, True, 1)}


def _decodes(num_layers: int, size: int) -> StepShape:
    return StepShape((ChunkShape(CONTEXT, 1),) * size, num_layers, True, size)


def _run(timer: StepTimer, shapes: dict[str, StepShape], begin_ns: int, end_ns: int) -> dict[str, float]:
    time.sleep(max(0.0, (begin_ns - time.monotonic_ns()) / 1e9))
    times: dict[str, list[float]] = {name: [] for name in shapes}
    while time.monotonic_ns() < end_ns or not all(times.values()):
        for name, shape in shapes.items():
            times[name].append(timer.time_s(shape))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _probe(timer: StepTimer, shape: StepShape, interval_s: float) -> list[Sample]:
    """Until the next line comes, which says no more than that."""
    samples = []
    since_s, since = time.monotonic(), machine_time()
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        at_s, before_s, now = time.monotonic(), time.process_time(), machine_time()
        timer.time_s(shape)
        took_s = time.process_time() - before_s
        busy, stolen = ((late - early) / (at_s - since_s) for early, late in zip(since, now, strict=True))
        samples.append(Sample(at_s, took_s, busy, stolen))
        since_s, since = at_s, now
    sys.stdin.readline()
    return samples


if __name__ == "__main__":
    main()
