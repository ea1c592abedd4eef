"""Seeded deaths over live processes: each round kills or stops one worker at a named place, and checks everything.

A round: clients that send one request after another, online and offline ones by lot, and moves without a break
(``live.verify.fault_orders``) until the worker that is to die at one place has met it there (or, after ``FORCE_S``, is
killed wherever it is), and then as much time as the last requests need. A stopped worker stays stopped
until it has been replaced and is killed; or it is woken *late*, after it has been given up, and must reach no process
and end; or *soon*, and then nothing may have happened.
Checked: every stream has one end and exactly the tokens of an undisturbed run (float64, greedy), and when all is quiet
again no block, host slot, ghost or transfer is left and all workers serve. One engine serves all rounds, so restarted
workers are used again and again.

Used by the tests (a few rounds), ``python -m benchmarks moves deaths`` (as many as one likes) and, one round at a time,
by the rows of ``live.verify.deaths``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from jettison.config import EngineConfig
from jettison.core.totals import counters
from jettison.errors import JettisonError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify.fault_orders import FaultOrders
from jettison.live.verify.fault_places import Watch
from jettison.live.verify.fault_schedules import Schedule, Wake
from jettison.live.verify.scenarios import Observed
from jettison.live.worker.failpoints import VARIABLE, Rule, arm, is_met
from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import FinishReason, Request, SamplingParams, ServiceClass, WorkerId

BLOCK_SIZE = 4
NUM_REQUESTS = 8
PLACES = 3
"""Of an instance: too few for all, so that offline requests are evicted for online ones and come back."""
OFFLINE_WORK = (
    "steps_shed", "slices_resumed", "slices_discarded", "steps_abandoned", "checkpointed_blocks", "checkpoint_frees",
    "offline_discards", "prefetched_blocks",
)
NUM_PROMPTS = 32
"""Different prompts meet each fault."""
MAX_PROMPT = 40
ROUND_TIMEOUT_S = 300.0
"""Of a hang; on a machine that others keep busy a restart alone may take a minute."""
PIECE_BYTES = 1 << 12
MOST_PIECES = 1024
"""Of all parameters: small pieces, so that much happens while they travel, but a large model's come to an end, too."""
HEARTBEAT_TIMEOUT_S = 3.0
FORCE_S = 30.0
SHORT_STOP_S = (0.1, 1.2)
"""A stop that must have no consequences: well below the heartbeat's bound."""


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
"""For a table: its rows have to reach the place that they name, so moves follow closely and answers last."""


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
        "exchange_piece_bytes": PIECE_BYTES, "restore_dwell_ms": 3_600_000, "overload_min_wait_ms": 3_600_000,
        "worker_heartbeat_timeout": HEARTBEAT_TIMEOUT_S, "max_worker_restarts": 1_000_000,
        "offline": "harvest", "checkpoint_free": 1.0, "slo_ttft_ms": 1, "safepoint_layers": 1,
    } | dict(flags or {})  # fmt: skip
    sized = assemble(EngineConfig.resolve(**base))  # type: ignore[arg-type]
    num_blocks = NUM_REQUESTS * (MAX_PROMPT + load.num_tokens) // BLOCK_SIZE
    base["memory"] = sized.memory_for_blocks(num_blocks)
    if base["exchange_piece_bytes"] == PIECE_BYTES:
        base["exchange_piece_bytes"] = max(PIECE_BYTES, sized.shape.parameter_bytes // MOST_PIECES)
    return EngineConfig.resolve(**base)  # type: ignore[arg-type]


def expected_tokens(config: EngineConfig, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The undisturbed run, in this process."""
    with LocalCluster(config) as cluster:
        for i, prompt in enumerate(prompts):
            cluster.submit(f"r{i}", prompt, _params(num_tokens))
        cluster.run()
        return [cluster.completions[f"r{i}"].token_ids for i in range(len(prompts))]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


class FaultRounds:
    """One engine and the rounds it goes through. Use as ``async with FaultRounds.running(...)``."""

    def __init__(self, engine: Engine, config: EngineConfig, load: RoundLoad, rules: Path) -> None:
        self.engine = engine
        self._rules = rules
        """Which worker dies where: the file at which workers look."""
        self._load = load
        rng = random.Random(11)
        vocab = engine.core.state.shape.vocab_size
        self._prompts = [[rng.randrange(vocab) for _ in range(rng.randint(6, MAX_PROMPT))] for _ in range(NUM_PROMPTS)]
        """Requests of each round draw from these."""
        self._expected = expected_tokens(config, self._prompts, load.num_tokens)
        self._exchange = engine.core.params.exchange
        """Of rounds that name none."""
        self._num_rounds = 0
        self._is_struck = False
        """The victim was killed or stopped where the controller had watched for the place."""
        self._is_exact = str(config.model.dtype) == "float64"
        self._cut_off: list[str] = []
        """What was waited for when the waiting was ended from outside."""
        self._was_live = False
        """Requests of this round may run while their KV moves."""

    @staticmethod
    @asynccontextmanager
    async def running(
        model_dir: Path, load: RoundLoad = DEFAULT_LOAD, **flags: object
    ) -> AsyncIterator[FaultRounds]:
        """Start an engine whose workers can be armed, and close it at the end."""
        config = make_config(model_dir, load, flags)
        engine = Engine(config)
        with tempfile.TemporaryDirectory(prefix="jettison-faults-") as folder:
            rules = Path(folder) / "rules"
            arm(rules, [])
            os.environ[VARIABLE] = str(rules)  # for every life of each worker
            try:
                await engine.start()
                # A wake asks its peers first: where the disk is predicted to be sooner no place of a pull would be met.
                engine.core.sleepers.predict = lambda worker_id: None
                yield FaultRounds(engine, config, load, rules)
            finally:
                os.environ.pop(VARIABLE, None)
                await engine.close()

    async def run(self, schedule: Schedule) -> RoundReport:
        """One round."""
        report = RoundReport(schedule, reached=False)
        self._num_rounds += 1
        self._cut_off.clear()
        exchange = schedule.mode or self._exchange
        self._was_live = exchange is ExchangeMode.LIVE
        self.engine.core.reconfigure(replace(self.engine.core.params, exchange=exchange))
        self.engine.orders.keep_hung_workers(schedule.wake is Wake.LATE)
        over = asyncio.Event()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                self._arm(schedule)
                totals_before = counters(self.engine.core)
                losses_before = self.engine.core.state.counters.num_worker_losses
                orders = FaultOrders(self.engine, schedule, self._load.pauses_s, over, self._until)
                asks = [self._client(i, report, over, orders.may_ask) for i in range(NUM_REQUESTS)]
                clients = [asyncio.create_task(client) for client in asks]
                others = [asyncio.create_task(orders.change_layouts(clients)), asyncio.create_task(orders.migrate())]
                try:
                    await self._fate(schedule, report)
                    over.set()
                    with self._awaiting("the end of all streams and of the last move"):
                        await asyncio.gather(*clients, *others)
                    orders.wake_all()
                    await self._until(self._is_quiet, "rest after the last request")
                finally:
                    self.engine.orders.watch(None)
                    for task in (*clients, *others):
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

    def _arm(self, schedule: Schedule) -> None:
        """Tell the victim where it dies, or have the controller watch for the place."""
        self._is_struck = False
        if schedule.role is not None and schedule.is_phase:
            arm(self._rules, [])
            pid = self._pid(schedule.victim)

            def strike() -> None:
                self._is_struck = True
                os.kill(pid, schedule.signal)

            self.engine.orders.watch(Watch(
                self.engine.core, schedule.victim, schedule.role, schedule.point, schedule.count, strike,
            ).look)
            return
        victim = schedule.victim
        arm(self._rules, [Rule(victim, self._life(victim), schedule.point, schedule.count, schedule.signal)])

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
            report.reached = self._is_struck or is_met(self._rules)
            if not report.reached:
                report.problems.append(f"worker {victim} ended by itself, and not at {schedule.name}")
        except TimeoutError:
            self._cut_off.clear()  # foreseen
            arm(self._rules, [])  # one that is woken soon is not to be stopped once more
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

    async def _client(self, index: int, report: RoundReport, over: asyncio.Event, may_ask: asyncio.Event) -> None:
        """One request after another until the round is over."""
        for number in range(1_000_000):
            await may_ask.wait()
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
        report.requests.append(Observed(prompt, got, was_live=self._was_live))
        # Attention in parts rounds otherwise: then the table compares the tokens, and counts what differs apart.
        is_right = got == expected if self._is_exact or not self._was_live else len(got) == len(expected)
        if reason is not FinishReason.LENGTH or not is_right:
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
