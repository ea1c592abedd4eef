"""Seeded deaths over live processes: each round kills or stops one worker at a named failpoint, and checks everything.

A round: clients that send one request after another, online and offline ones by lot, migrations of both kinds, drops
and restores in between without a break until the worker that is armed for one failpoint has met it there (or, after
``FORCE_S``, is killed wherever it is), and then as much time as the last requests need. A stopped worker stays stopped
until it has been replaced and is killed; or it is woken *late*, after it has been given up, and must reach no process
and end; or *soon*, and then nothing may have happened.
Checked: every stream has one end and exactly the tokens of an undisturbed run (float64, greedy), and when all is quiet
again no block, host slot, ghost or transfer is left and all workers serve. One engine serves all rounds, so restarted
workers are used again and again.

Used by the tests (a few rounds), ``benchmarks/faults.py`` (as many as one likes) and, one round at a time, by
a table of scenarios with rows like "kill in phase X".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple

from jettison.config import EngineConfig
from jettison.core.moving.migrations import may_go
from jettison.core.moving.sleeping import LEVELS
from jettison.core.totals import counters
from jettison.errors import JettisonError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify.scenarios import Observed, Outcome, Setting
from jettison.live.worker.failpoints import (
    LIVE_ONLY,
    NAMES,
    OFFLINE_NAMES,
    PULL_NAMES,
    SLEEP_NAMES,
    VARIABLE,
    Rule,
)
from jettison.memory.kvtransfers import ExchangeMode, MigrationKind
from jettison.memory.stages import Pull, StagePlan
from jettison.types import FinishReason, LayerRange, Request, SamplingParams, ServiceClass, WorkerId

BLOCK_SIZE = 4
NUM_REQUESTS = 8
PLACES = 3
"""Of an instance: too few for all, so that offline requests are evicted for online ones and come back."""
OFFLINE_WORK = ("steps_abandoned", "checkpointed_blocks", "checkpoint_frees", "offline_discards", "prefetched_blocks")
NUM_PROMPTS = 32
"""Different prompts meet each fault."""
MAX_PROMPT = 40
ROUND_TIMEOUT_S = 120.0
HEARTBEAT_TIMEOUT_S = 3.0
FORCE_S = 30.0
FILL_S = 3.0
"""Before a drop with pulls."""
SHORT_STOP_S = (0.1, 1.2)
"""A stop that must have no consequences: well below the heartbeat's bound."""


class Wake(StrEnum):
    """What becomes of a worker that was stopped."""

    NEVER = "never"
    """It is killed when it is given up."""
    SOON = "soon"
    """It goes on before its silence means anything."""
    LATE = "late"
    """It goes on when it has been given up, or even replaced."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One death, or one stop."""

    seed: int
    victim: WorkerId
    name: str
    count: int
    signal: signal.Signals
    wake: Wake = Wake.NEVER
    mode: ExchangeMode | None = None
    """Of the exchanges of this round; None: the engine's."""
    pulls: bool = False
    """The second drop gives members layers that they do not hold (three instances)."""

    @classmethod
    def draw(cls, seed: int, num_workers: int = 2, names: Sequence[str] = ()) -> Schedule:
        """Every failpoint, or each of ``names``, in turn; victim, count, signal and the kind of moves by lot."""
        rng = random.Random(seed)
        names = names or ((*NAMES, *SLEEP_NAMES, *PULL_NAMES) if num_workers > 2 else (*NAMES, *SLEEP_NAMES))
        name = names[seed % len(names)]
        what = name.partition("_")[2]
        # Frequent places are passed many times before a move begins.
        frequent = what in ("stage", "sample", "flush", "piece_sent", "piece_written", "attention")
        some = name in PULL_NAMES or name in OFFLINE_NAMES
        count = rng.randrange(1, 60) if frequent else rng.randrange(1, 8) if some else 1
        how = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
        wake = rng.choice(list(Wake)) if how is signal.SIGSTOP else Wake.NEVER
        # Who comes first in every pipeline of whole instances; who is in the first one, and receives when it is turned.
        victim = 0 if what == "stage" else rng.randrange(2 if what == "shard_written" else num_workers)
        with_pieces = [m for m in ExchangeMode if m is not ExchangeMode.RECOMPUTE]
        modes = [ExchangeMode.LIVE] if name in LIVE_ONLY else with_pieces
        pulls = num_workers > 2 and (name in PULL_NAMES or rng.random() < 0.5)
        return cls(seed, victim, name, count, how, wake, rng.choice(modes), pulls)


class RoundLoad(NamedTuple):
    """What a round's requests and moves are like."""

    num_tokens: int = 90
    """Of each answer."""
    pauses_s: tuple[float, float] = (0.02, 0.25)
    """Between two moves, by lot."""
    force_s: float = FORCE_S
    """For so long moves follow each other to bring the worker to its failpoint."""


DEFAULT_LOAD = RoundLoad()
TABLE_LOAD = RoundLoad(200, (0.01, 0.05))
"""For ``kills``: its rows have to reach the place that they name, so moves follow closely and answers last."""


@dataclass(slots=True)
class RoundReport:
    """What a round showed. ``problems`` is empty if all is well."""

    schedule: Schedule
    reached: bool
    """The failpoint was met; else the worker was killed from outside while requests ran."""
    phases: tuple[str, ...] = ()
    """Of the moves that the worker was part of when it was lost."""
    num_token_migrations: int = 0
    """Requests that went to another group as tokens."""
    offline_work: dict[str, int] = field(default_factory=dict)
    """What was done for and to offline requests, by the names of ``core.totals``."""
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
        "max_num_seqs": PLACES, "max_num_batched_tokens": 64, "num_threads": 1, "dtype": "float64",
        "exchange_piece_bytes": 1 << 12, "restore_dwell_ms": 3_600_000, "overload_min_wait_ms": 3_600_000,
        "worker_heartbeat_timeout": HEARTBEAT_TIMEOUT_S, "max_worker_restarts": 1_000_000,
        "offline": "harvest", "checkpoint_free": 1.0, "slo_ttft_ms": 1, "safepoint_layers": 1,
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


def kills(
    setting: Setting, failpoints: Sequence[str], on_row: Callable[[str, Outcome], None], **flags: object
) -> None:
    """Rows for a table like ``jettison verify``'s: a worker process dies at each of these places of a move.

    Each place is tried with one worker after the other, because not every move passes every place at all of them.
    ``on_row`` is told of each when it is over. ``flags`` of the engine: its number of instances, its mode of exchange.
    Raises what the engine's start does.
    """
    base: dict[str, object] = {
        "dtype": setting.dtype, "max_model_len": setting.max_model_len, "kernels": setting.kernels,
    }  # fmt: skip
    context = assemble(make_config(setting.model_dir, TABLE_LOAD, base | flags)).limits.max_model_len
    load = TABLE_LOAD._replace(num_tokens=min(TABLE_LOAD.num_tokens, context - MAX_PROMPT))

    async def run(names: list[str]) -> None:
        """Until a round has a problem: what comes after it on this engine would prove nothing."""
        async with FaultRounds.running(setting.model_dir, load, **base | flags) as rounds:
            while names:
                for victim in range(len(rounds.engine.core.state.workers)):
                    report = await rounds.run(Schedule(setting.seed, victim, names[0], 1, signal.SIGKILL))
                    if report.reached or report.problems:
                        break
                on_row(names.pop(0), _outcome(report))
                if report.problems:
                    return

    left = list(failpoints)
    while left:
        asyncio.run(run(left))


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
        vocab = engine.core.state.shape.vocab_size
        self._prompts = [[rng.randrange(vocab) for _ in range(rng.randint(6, MAX_PROMPT))] for _ in range(NUM_PROMPTS)]
        """Requests of each round draw from these."""
        self._expected = expected_tokens(config, self._prompts, load.num_tokens)
        self._num_rounds = 0
        self._cut_off: list[str] = []
        """What was waited for when the waiting was ended from outside."""

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
        self._cut_off.clear()
        if schedule.mode is not None:
            self.engine.core.reconfigure(replace(self.engine.core.params, exchange=schedule.mode))
        self.engine.keep_hung_workers(schedule.wake is Wake.LATE)
        over = asyncio.Event()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await self._arm(schedule)
                totals_before = counters(self.engine.core)
                losses_before = self.engine.core.state.counters.num_worker_losses
                clients = [asyncio.create_task(self._client(i, report, over)) for i in range(NUM_REQUESTS)]
                moves = asyncio.create_task(self._moves(schedule, over, clients))
                migrations = asyncio.create_task(self._migrations(schedule, over))
                try:
                    await self._fate(schedule, report)
                    over.set()
                    with self._awaiting("the end of all streams and of the last move"):
                        await asyncio.gather(*clients, moves, migrations)
                    self._wake_all()
                    await self._until(self._is_quiet, "rest after the last request")
                finally:
                    for task in (*clients, moves, migrations):
                        task.cancel()
        except (TimeoutError, JettisonError) as error:
            waited = f"waited for {self._cut_off[0]}" if self._cut_off else "no rest"
            why = str(error) or f"not there after {ROUND_TIMEOUT_S:.0f} s"
            report.problems.append(f"{waited}: {why}: {self._describe()}")
            return report
        num_losses = self.engine.core.state.counters.num_worker_losses - losses_before
        if num_losses != (schedule.wake is not Wake.SOON):
            report.problems.append(f"{num_losses} workers were given up")
        totals = counters(self.engine.core)
        report.num_token_migrations = round(totals["migrations_as_tokens"] - totals_before["migrations_as_tokens"])
        report.offline_work = {name: round(totals[name] - totals_before[name]) for name in OFFLINE_WORK}
        report.problems += self._leaks()
        return report

    async def _arm(self, schedule: Schedule) -> None:
        """Give the victim a life with the rule in its environment."""
        life = self._life(schedule.victim) + 1
        rule = Rule(schedule.victim, life, schedule.name, schedule.count, schedule.signal)
        os.environ[VARIABLE] = str(rule)
        self._kill(schedule.victim, signal.SIGKILL)
        await self._until(
            lambda: self._life(schedule.victim) == life and self._is_quiet(), "the armed life of the victim"
        )
        del os.environ[VARIABLE]

    async def _fate(self, schedule: Schedule, report: RoundReport) -> None:
        """Wait until the victim has met its failpoint, and see that what must follow does."""
        victim, life, pid = schedule.victim, self._life(schedule.victim), self._pid(schedule.victim)
        num_records = len(self.engine.event_log)

        def is_lost() -> bool:
            worker = self.engine.core.state.workers[victim]
            return not worker.alive or worker.life > life

        def is_back() -> bool:
            worker = self.engine.core.state.workers[victim]
            return worker.alive and worker.life > life

        try:
            async with asyncio.timeout(self._load.force_s):
                await self._until(lambda: is_lost() or _is_stopped(pid), f"worker {victim} at {schedule.name}")
            report.reached = True
        except TimeoutError:
            self._cut_off.clear()  # foreseen
            os.kill(pid, schedule.signal)
        rng = random.Random(schedule.seed)
        if schedule.wake is Wake.SOON:
            await asyncio.sleep(rng.uniform(*SHORT_STOP_S))
            os.kill(pid, signal.SIGCONT)
            return
        await self._until(is_lost, "the loss of the victim")
        lost = [r for r in list(self.engine.event_log)[num_records:] if r.kind == "worker_lost"]
        report.phases = tuple(str(p) for r in lost if r.fields["worker"] == victim for p in r.fields["moves"])  # type: ignore[attr-defined]
        if schedule.wake is Wake.LATE:
            await self._until(is_back if rng.random() < 0.5 else is_lost, "the victim's successor")
            os.kill(pid, signal.SIGCONT)
            await self._until(lambda: not _exists(pid), "the end of a victim that was woken up late")

    async def _moves(self, schedule: Schedule, over: asyncio.Event, clients: Sequence[asyncio.Task[None]]) -> None:
        """Drop and restore under load until the round is over; by lot also while it recovers."""
        rng = random.Random(schedule.seed)
        goes_on = rng.random() < 0.3
        for order in self._orders(schedule):
            # A shard is pulled only where KV has been written over it: the pipeline must have filled its new blocks.
            if order == self._drop_with_pulls and not over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), FILL_S)
            await asyncio.sleep(rng.uniform(*self._load.pauses_s))
            if over.is_set() and not (goes_on and any(not c.done() for c in clients)):
                return
            order()
            await self._until(lambda: not self.engine.core.in_transition, "the end of a drop or restore")

    async def _migrations(self, schedule: Schedule, over: asyncio.Event) -> None:
        """Where groups share no worker, requests go from one to another, in either way, until the round is over."""
        rng, core = random.Random(f"migrations {schedule.seed}"), self.engine.core
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rng.uniform(*self._load.pauses_s) / 4)
            states = [s for g in core.groups.values() for s in g.queues.running.values() if may_go(s)]
            if states and len(core.groups) > 1:
                state, group_id = rng.choice(states), rng.choice(list(core.groups))
                # A few tokens a step: the request is on its way for a while.
                self.engine.request_migration(state.request_id, group_id, rng.choice(list(MigrationKind)), 8)

    def _orders(self, schedule: Schedule) -> Iterator[Callable[[], None]]:
        if schedule.name in SLEEP_NAMES:
            level = random.Random(schedule.seed).choice(LEVELS)
            return cycle([lambda: self._sleep(schedule.victim, level), self._wake_all])
        drops = [self.engine.request_drop] * (len(self.engine.core.state.workers) - 1)
        if schedule.pulls:
            drops[1] = self._drop_with_pulls
        return cycle([*drops, self.engine.request_restore])

    def _sleep(self, victim: WorkerId, level: int) -> None:
        """Where it may: others may have died, or it sleeps already."""
        with contextlib.suppress(ValueError):
            self.engine.order(lambda core, now_ns: core.request_sleep([victim], level, now_ns))

    def _wake_all(self) -> None:
        for worker_id in self.engine.core.sleepers.out:
            self.engine.order(lambda core, now_ns, one=worker_id: core.request_wake(one, now_ns))  # type: ignore[misc]

    def _drop_with_pulls(self) -> None:
        """Merge a pipeline of two and an instance so that the pipeline's stages change places."""
        core = self.engine.core
        moving = core.moves.moving_workers()
        idle = sorted((g for g in core.groups.values() if moving.isdisjoint(g.worker_ids)), key=lambda g: len(g.stages))
        if [len(g.stages) for g in idle[:2]] != [1, 2]:
            self.engine.request_drop()
            return
        (middle,), (last, first) = idle[0].worker_ids, idle[1].worker_ids
        num_layers = core.state.shape.num_layers
        cuts = (0, 1, num_layers - 1, num_layers)
        layers = [LayerRange(lo, hi) for lo, hi in pairwise(cuts)]
        stages = tuple(StagePlan(w, part) for w, part in zip((first, middle, last), layers, strict=True))
        held = {s.worker_id: core.state.workers[s.worker_id].layout.shards for s in stages}
        pulls = []
        for stage in stages:
            for index, shard in enumerate(sorted(core.state.shape.shards_for(stage.layers) - held[stage.worker_id])):
                holders = [w for w, shards in held.items() if shard in shards]
                pulls.append(Pull(shard, holders[index % len(holders)], stage.worker_id))  # so that every holder sends
        self.engine.request_merge([g.group_id for g in idle[:2]], stages, tuple(pulls))

    async def _client(self, index: int, report: RoundReport, over: asyncio.Event) -> None:
        """One request after another until the round is over."""
        for number in range(1_000_000):
            # Every other request finds the one before in the prefix cache; the others write blocks of their own.
            drawn = random.Random(f"{self._num_rounds} {index} {number // 2}").randrange(NUM_PROMPTS)
            await self._stream(drawn, f"round-{self._num_rounds}-{index}-{number}", report, salt=f"{number // 2}")
            if over.is_set():
                return

    async def _stream(self, drawn: int, name: str, report: RoundReport, salt: str) -> None:
        prompt, expected = self._prompts[drawn], self._expected[drawn]
        got: list[int] = []
        last_s = asyncio.get_running_loop().time()
        reason: FinishReason | None = None
        # By lot: most rounds have both classes at each instance.
        service_class = random.Random(f"class {name}").choice(list(ServiceClass))
        request = Request(
            name, tuple(prompt), _params(self._load.num_tokens), 0, cache_salt=salt, service_class=service_class
        )
        async for event in self.engine.submit(request):
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

    def _is_quiet(self) -> bool:
        core = self.engine.core
        return all(w.alive for w in core.state.workers.values()) and not core.in_transition and core.state.is_idle()

    def _pid(self, worker: WorkerId) -> int:
        return next(w.pid for w in self.engine.snapshot().workers if w.worker_id == worker) or 0

    def _kill(self, worker: WorkerId, how: signal.Signals) -> None:
        if pid := self._pid(worker):
            os.kill(pid, how)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        with self._awaiting(what):
            while not condition():
                if self.engine.failure is not None:
                    raise JettisonError(self.engine.failure)
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def _awaiting(self, what: str) -> Iterator[None]:
        """Note what is waited for where the waiting does not end by itself."""
        try:
            yield
        except asyncio.CancelledError:
            self._cut_off.append(what)
            raise

    def _leaks(self) -> list[str]:
        core = self.engine.core
        core.check()
        problems = []
        for worker in core.state.workers.values():
            if worker.ledger.num_held or worker.ghosts or worker.num_relayouts_open or worker.ledger_locked:
                left = f"{worker.ledger.num_held} blocks, {worker.ghosts}"
                problems.append(f"worker {worker.worker_id} is left with {left}")
            if worker.copying or worker.pool.num_free != worker.pool.num_slots:
                left = f"{worker.pool.holders()} in its host pool, {worker.copying}"
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


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP holds a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
