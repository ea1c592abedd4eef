"""Seeded deaths over live processes: each round kills or stops one worker at a named safepoint, and checks everything.

A round: a fresh set of requests, a drop, a restore, with one worker armed to die at one safepoint (or, for places
that were not reached, killed in the middle of it). Checked: every stream has one end and exactly the tokens of an
undisturbed run (float64, greedy), and when all is quiet again no block, ghost or transfer is left and both workers
serve on their own. One engine serves all rounds, so restarted workers are used again and again.

Used by the tests (a few rounds), ``benchmarks/faults.py`` (as many as one likes) and, one round at a time, by
whoever wants to put "kill in phase X" into a table of scenarios.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jettison.config import EngineConfig
from jettison.live.assembly import assemble
from jettison.live.engine import Engine
from jettison.live.local_cluster import LocalCluster
from jettison.live.safepoints import NAMES, VARIABLE, Rule
from jettison.live.scenarios import Observed, Outcome, Setting
from jettison.types import FinishReason, Request, SamplingParams, WorkerId

BLOCK_SIZE = 4
NUM_REQUESTS = 8
MAX_PROMPT = 40
ROUND_TIMEOUT_S = 120.0
HEARTBEAT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One death."""

    seed: int
    victim: WorkerId
    name: str
    count: int
    signal: signal.Signals

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """Every safepoint in turn; victim, count and signal by lot."""
        rng = random.Random(seed)
        # Frequent places are passed many times before a move begins.
        what = NAMES[seed % len(NAMES)].partition("_")[2]
        count = rng.randrange(1, 60) if what in ("stage", "sample", "flush", "piece_sent", "piece_written") else 1
        how = signal.SIGSTOP if rng.random() < 0.15 else signal.SIGKILL
        return cls(seed, rng.randrange(2), NAMES[seed % len(NAMES)], count, how)


class RoundLoad(NamedTuple):
    """What a round's requests and moves are like."""

    num_tokens: int = 90
    """Of each answer."""
    pauses_s: tuple[float, float] = (0.02, 0.25)
    """Between two moves, by lot."""


DEFAULT_LOAD = RoundLoad()
TABLE_LOAD = RoundLoad(200, (0.01, 0.05))
"""For ``kills``: its rows have to reach the place that they name, so moves follow closely and answers last."""


@dataclass(slots=True)
class RoundReport:
    """What a round showed. ``problems`` is empty if all is well."""

    schedule: Schedule
    reached: bool
    """The safepoint was met; else the worker was killed from outside while requests ran."""
    num_tokens: int = 0
    longest_pause_ms: float = 0.0
    problems: list[str] = field(default_factory=list)
    requests: list[Observed] = field(default_factory=list)


def make_config(
    model_dir: Path, load: RoundLoad = DEFAULT_LOAD, flags: Mapping[str, object] | None = None
) -> EngineConfig:
    """Instances (two, where ``flags`` say nothing) that hold all requests of a round, with short timeouts."""
    base: dict[str, object] = {
        "model": str(model_dir), "instances": 2, "memory": "1GiB", "page_size": 4096, "block_size": BLOCK_SIZE,
        "max_num_seqs": 32, "max_num_batched_tokens": 64, "num_threads": 1, "dtype": "float64",
        "exchange_piece_bytes": 1 << 12, "restore_dwell_ms": 3_600_000, "overload_min_wait_ms": 3_600_000,
        "worker_heartbeat_timeout": HEARTBEAT_TIMEOUT_S, "max_worker_restarts": 1_000_000,
    } | dict(flags or {})  # fmt: skip
    sized = assemble(EngineConfig.resolve(**base))  # type: ignore[arg-type]
    num_blocks = NUM_REQUESTS * (MAX_PROMPT + load.num_tokens) // BLOCK_SIZE
    return EngineConfig.resolve(**base | {"memory": sized.memory_for_blocks(num_blocks)})  # type: ignore[arg-type]


def expected_tokens(config: EngineConfig, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The undisturbed run, in this process."""
    with LocalCluster(config) as cluster:
        for i, prompt in enumerate(prompts):
            cluster.submit(f"r{i}", prompt, _params(num_tokens))
        cluster.run()
        return [cluster.completions[f"r{i}"].token_ids for i in range(len(prompts))]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def kills(setting: Setting, safepoints: Sequence[str], **flags: object) -> list[tuple[str, Outcome]]:
    """Rows for a table like ``jettison verify``'s: a worker process dies at each of these places of a move.

    Each place is tried with one worker after the other, because not every move passes every place at all of them.
    ``flags`` of the engine: its number of instances, its mode of exchange.
    """

    async def run() -> list[tuple[str, Outcome]]:
        rows = []
        async with FaultRounds.running(setting.model_dir, TABLE_LOAD, dtype=setting.dtype, **flags) as rounds:
            for name in safepoints:
                for victim in range(len(rounds.engine.core.state.workers)):
                    report = await rounds.run(Schedule(setting.seed, victim, name, 1, signal.SIGKILL))
                    if report.reached or report.problems:
                        break
                rows.append((name, _outcome(report)))
                if report.problems:
                    break  # what comes after it on this engine proves nothing
        return rows

    return asyncio.run(run())


def _outcome(report: RoundReport) -> Outcome:
    evidence = f"worker {report.schedule.victim} killed, longest pause {report.longest_pause_ms:.0f} ms"
    if report.problems:
        evidence = "; ".join(report.problems)
    return Outcome(report.requests, report.reached and not report.problems, evidence)


class FaultRounds:
    """One engine and the rounds it goes through. Use as ``async with FaultRounds.running(...)``."""

    def __init__(self, engine: Engine, config: EngineConfig, load: RoundLoad) -> None:
        self.engine = engine
        self._load = load
        rng = random.Random(11)
        self._prompts = [[rng.randrange(256) for _ in range(rng.randint(6, MAX_PROMPT))] for _ in range(NUM_REQUESTS)]
        self._expected = expected_tokens(config, self._prompts, load.num_tokens)
        self._num_rounds = 0

    @staticmethod
    @asynccontextmanager
    async def running(
        model_dir: Path, load: RoundLoad = DEFAULT_LOAD, **flags: object
    ) -> AsyncIterator[FaultRounds]:
        """Start an engine, and close it and disarm everything at the end."""
        config = make_config(model_dir, load, flags)
        engine = Engine(config)
        try:
            await engine.start()
            yield FaultRounds(engine, config, load)
        finally:
            os.environ.pop(VARIABLE, None)
            await engine.close()

    async def run(self, schedule: Schedule) -> RoundReport:
        """One round. The armed life is a new one: the victim is restarted first, which is a death as well."""
        report = RoundReport(schedule, reached=False)
        self._num_rounds += 1
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await self._arm(schedule)
                life = self._life(schedule.victim)
                streams = [asyncio.create_task(self._stream(i, report)) for i in range(len(self._prompts))]
                try:
                    await self._moves(random.Random(schedule.seed), streams, lambda: self._died(schedule, life))
                    report.reached = self._died(schedule, life)
                    if not report.reached:
                        self._kill(schedule.victim, schedule.signal)
                    await asyncio.gather(*streams)
                    await self._until(lambda: self._died(schedule, life) and self._is_quiet())
                finally:
                    for stream in streams:
                        stream.cancel()
        except TimeoutError:
            report.problems.append(f"no rest after {ROUND_TIMEOUT_S:.0f} s: {self._describe()}")
            return report
        report.problems += self._leaks()
        return report

    async def _arm(self, schedule: Schedule) -> None:
        """Give the victim a life with the rule in its environment."""
        life = self._life(schedule.victim) + 1
        rule = Rule(schedule.victim, life, schedule.name, schedule.count, schedule.signal)
        os.environ[VARIABLE] = str(rule)
        self._kill(schedule.victim, signal.SIGKILL)
        await self._until(lambda: self._life(schedule.victim) == life and self._is_quiet())
        del os.environ[VARIABLE]

    async def _moves(
        self, rng: random.Random, streams: list[asyncio.Task[None]], is_dead: Callable[[], bool]
    ) -> None:
        """Drop and restore under load, until the victim is dead or the requests are through."""

        def over() -> bool:
            return is_dead() or all(s.done() for s in streams)

        drops = [self.engine.request_drop] * (len(self.engine.core.state.workers) - 1)
        for order in [*drops, self.engine.request_restore] * 2:
            await asyncio.sleep(rng.uniform(*self._load.pauses_s))
            if over():
                return
            order()
            await self._until(lambda: over() or not self.engine.core.in_transition)

    async def _stream(self, index: int, report: RoundReport) -> None:
        prompt, expected = self._prompts[index], self._expected[index]
        name = f"round-{self._num_rounds}-{index}"
        got: list[int] = []
        last_s = asyncio.get_running_loop().time()
        reason: FinishReason | None = None
        async for event in self.engine.submit(Request(name, tuple(prompt), _params(self._load.num_tokens), 0)):
            now_s = asyncio.get_running_loop().time()
            report.longest_pause_ms = max(report.longest_pause_ms, 1e3 * (now_s - last_s))
            last_s = now_s
            got += [t.token_id for t in event.tokens]
            reason = event.finish_reason
        report.num_tokens += len(got)
        report.requests.append(Observed(prompt, got))
        if reason is not FinishReason.LENGTH or got != expected:
            right = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            report.problems.append(f"{name} ended with {reason} after {len(got)} tokens, right up to {right}")

    # --- looking

    def _life(self, worker: WorkerId) -> int:
        return self.engine.core.state.workers[worker].life

    def _died(self, schedule: Schedule, life: int) -> bool:
        worker = self.engine.core.state.workers[schedule.victim]
        return not worker.alive or worker.life > life

    def _is_quiet(self) -> bool:
        core = self.engine.core
        return all(w.alive for w in core.state.workers.values()) and not core.in_transition and core.state.is_idle()

    def _kill(self, worker: WorkerId, how: signal.Signals) -> None:
        pid = next(w.pid for w in self.engine.snapshot().workers if w.worker_id == worker)
        if pid:
            os.kill(pid, how)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    def _leaks(self) -> list[str]:
        core = self.engine.core
        core.check()
        problems = []
        for worker in core.state.workers.values():
            if worker.ledger.num_held or worker.ghosts or worker.num_relayouts_open or worker.ledger_locked:
                left = f"{worker.ledger.num_held} blocks, {worker.ghosts}"
                problems.append(f"worker {worker.worker_id} is left with {left}")
        for snapshot in self.engine.snapshot().workers:
            parts = (snapshot.parameter_bytes, snapshot.kv_bytes, snapshot.workspace_bytes, snapshot.free_bytes)
            if sum(parts) != snapshot.budget_bytes:
                problems.append(f"worker {snapshot.worker_id}: pages of {parts} do not make {snapshot.budget_bytes}")
        return problems

    def _describe(self) -> str:
        core = self.engine.core
        moves = [str(m.phase) for m in core.merges] + [str(r.phase) for r in core.restores]
        recoveries = {w: str(r.phase) for w, r in core.recoveries.by_worker.items()}
        groups = {g.group_id: (g.worker_ids, g.paused, list(g.in_flight)) for g in core.groups.values()}
        alive = {w.worker_id: (w.alive, w.life) for w in core.state.workers.values()}
        requests = list(core.state.requests.values())
        return f"{self.engine.state} {alive} groups {groups} moves {moves} recoveries {recoveries} requests {requests}"
