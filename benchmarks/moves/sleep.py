"""How long an instance takes to fall asleep and to wake, from each source, and what memory the system gets back.

    python -m benchmarks moves sleep sources wake drop --repeats 10 --json sleep_wake.json

*sources*: two real workers with a random Qwen3 of 107M parameters in bfloat16. Each round puts worker 0 to sleep and
wakes it, where the sources are told and not chosen: from its *peer*, which stays awake; from the *host* copy, both
asleep at level 1; from the *disk* (most likely the page cache), both asleep at level 1, and the copy emptied before
one wakes, so that nothing else is left. Before the first round of each source requests fill the KV, so that all of
the budget is resident. Columns: milliseconds from the order to the end, as the core records them (sleep: the layout
is gone and pages are given back; wake: all shards are there and compared), median and 99th percentile, and of worker
0 the budget's bytes in use and the resident set, awake and asleep, and what both gave back.

*wake*, *drop*: a burst of half as much again as two instances hold, on three of which one sleeps. In the first
prompts are long and answers short, in the second it is the other way round. Told are the decisions as ``jettison
explain`` shows them: which began first, what it was forecast to save, and what came; times to first token, and how long
the drop and the wakes took beside their predictions. The command fails where neither began.

Absolute times belong to one machine on one day; bytes travel. Each part takes less than four minutes on two cores.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.engines.weights import QWEN3_110M, make_folder
from benchmarks.servers import greedy
from benchmarks.shared import SERVING, Row, keep, parse, print_rows, quantile
from jettison.config import EngineConfig
from jettison.core.moving.sleeping import Expected, SleepState
from jettison.live.engine.engine import Engine
from jettison.report.decisions import decisions_of
from jettison.report.explain import print_decisions
from jettison.report.results import RunResult
from jettison.types import Request

WAIT_S = 120.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Bench:
    """One engine, and what was measured on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: list[Row] = []

    async def fill(self) -> None:
        """Write all KV of both instances."""
        block_size = self.engine.core.state.limits.block_size
        length = 1024
        num = 1 + sum(w.full_blocks for w in self.engine.core.state.workers.values()) * block_size // length

        async def one(i: int) -> None:
            prompt = tuple((17 * i + j) % 1000 + 10 for j in range(length))
            async for _ in self.engine.submit(Request(f"fill-{len(self.rows)}-{i}", prompt, greedy(1), 0)):
                pass

        await asyncio.gather(*(one(i) for i in range(num)))

    def state(self, worker_id: int) -> SleepState:
        return self.engine.core.sleepers.state_of(worker_id)

    async def sleep(self, worker_ids: list[int], level: int) -> float:
        """Milliseconds until worker 0 slept."""
        self.engine.orders.order(lambda core, now_ns: core.request_sleep(worker_ids, level, now_ns))
        await until(lambda: all(self.state(w) is SleepState.ASLEEP for w in worker_ids))
        return self._last_ms("asleep")

    async def wake(self, worker_id: int) -> float:
        self.engine.orders.order(lambda core, now_ns: core.request_wake(worker_id, now_ns))
        await until(lambda: self.state(worker_id) is SleepState.AWAKE)
        return self._last_ms("woken")

    def _last_ms(self, kind: str) -> float:
        ends = [r for r in self.engine.event_log if r.kind == kind]
        mine = [r for r in ends if r.fields["worker"] == 0] or ends
        return float(str(mine[-1].fields["ms"]))

    def memory(self) -> dict[str, int]:
        worker = self.engine.snapshot().workers[0]
        return {"budget_used": worker.budget_bytes - worker.free_bytes, "rss": worker.rss_bytes}

    async def round(self, source: str, *, is_first: bool) -> None:
        """Asleep and awake again."""
        if is_first:
            await self.fill()
        awake = self.memory()
        slept_ms = await self.sleep([0] if source == "peer" else [0, 1], 2 if source == "peer" else 1)
        asleep = self.memory()
        if source == "disk":
            self.forget_copy()
        predict = self.engine.core.sleepers.predict
        self.engine.core.sleepers.predict = lambda worker_id: Expected(None, source, source != "peer")
        woken_ms = await self.wake(0)
        self.engine.core.sleepers.predict = predict
        if source != "peer":
            await self.wake(1)
        self.rows.append({
            "source": source, "is_filled": is_first, "sleep_ms": slept_ms, "wake_ms": woken_ms, "awake": awake,
            "asleep": asleep,
        })  # fmt: skip

    def forget_copy(self) -> None:
        """Empty the machine's copy, in the file and in the core's books: as after the machine has restarted."""
        self.engine.core.sleepers.host_copies.clear()
        for fd in shared_copies():
            os.ftruncate(fd, 0)


def shared_copies() -> list[int]:
    """Descriptors of this process that are a machine's copy."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:jettison-parameters" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
        except OSError:
            continue  # the listing's own
    return found


async def measure(model: Path, memory: str, repeats: int) -> list[Row]:
    """All rounds on one engine."""
    config = EngineConfig.resolve(model=str(model), instances=2, memory=memory, num_threads=1, overload="recompute")
    engine = Engine(config)
    try:
        await engine.start()
        bench = Bench(engine)
        for source in ("peer", "host", "disk"):
            for i in range(repeats):
                await bench.round(source, is_first=i == 0)
        return bench.rows
    finally:
        await engine.close()


@dataclass(frozen=True)
class Case:
    """A burst while one of three sleeps."""

    prompt_tokens: int
    output_tokens: int


CASES = {"wake": Case(128, 64), "drop": Case(16, 176)}


async def measure_burst(model: Path, memory: str, name: str) -> Row:
    """One burst on three instances."""
    case = CASES[name]
    config = EngineConfig.resolve(
        model=str(model), instances=3, memory=memory, num_threads=1, overload="drop",
        max_num_seqs=64, slo_ttft_ms=1e6,  # memory is to decide, not compute
    )
    engine = Engine(config)
    try:
        await engine.start()
        sleepers = engine.core.sleepers
        engine.orders.order(lambda core, now_ns: core.request_sleep([2], 2, now_ns))
        await until(lambda: len(sleepers.asleep) == 1 and sleepers.is_idle)
        state = engine.core.state
        room = 2 * max(w.full_blocks for w in state.workers.values()) * state.limits.block_size
        started = asyncio.get_running_loop().time()

        async def one(i: int) -> float:
            prompt, ttft = tuple((17 * i + j) % 1000 + 10 for j in range(case.prompt_tokens)), 0.0
            async for event in engine.submit(Request(f"burst-{i}", prompt, greedy(case.output_tokens), 0)):
                if event.tokens and not ttft:
                    ttft = asyncio.get_running_loop().time() - started
            return ttft

        num = 3 * room // 2 // (case.prompt_tokens + case.output_tokens)
        ttfts = sorted(await asyncio.gather(*map(one, range(num))))
        return {"case": name, "requests": num, **burst_figures(engine, ttfts)}
    finally:
        await engine.close()


def burst_figures(engine: Engine, ttfts: list[float]) -> Row:
    """Of one burst, times in milliseconds; its decisions are printed."""
    log = [{"t": (r.time_ns - engine.started_ns) / 1e9, "kind": r.kind, **r.fields} for r in engine.event_log]
    decisions = [d for d in decisions_of(RunResult(name="burst", events={"log": log})) if d.kind in TOLD]
    print_decisions(decisions, Console(width=160))
    first = next((d for d in decisions if d.kind in BEGUN), None)
    foreseen = {} if first is None else {**first.predicted, **first.outcome}
    return {
        "ttft_p50_ms": 1e3 * statistics.median(ttfts), "ttft_p99_ms": 1e3 * quantile(ttfts, 0.99),
        "begun": None if first is None else first.kind,
        **{name: foreseen.get(name) for name in FORESEEN},
        "wakes": [[r.get("predicted_ms"), r["since_order_ms"]] for r in log if r["kind"] == "woken"],
        "drops_ms": [r["decision_to_serving_ms"] for r in log if r["kind"] == "drop"],
    }  # fmt: skip


BEGUN = ("wake sleepers", "drop")
TOLD = (*BEGUN, "no wake", "no drop", "sleep", "wake")
FORESEEN = ("stay_request_s", "taken_request_s", "after_s", "foreseen_request_s", "seen_request_s")
"""Request-seconds of staying and of what began, and after so many seconds those that were foreseen and those that
came."""


def table(rows: list[Row]) -> list[Row]:
    """By source, in the order in which they were tried; memory of the rounds that had all KV written."""
    result = []
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        filled = next(row for row in mine if row["is_filled"])
        line: Row = {"source": source, "rounds": len(mine)}
        for what in ("sleep_ms", "wake_ms"):
            values = [row[what] for row in mine]
            line |= {f"{what}_p50": statistics.median(values), f"{what}_p99": quantile(values, 0.99)}
        for what in ("budget_used", "rss"):
            awake, asleep = (filled[when][what] / 2**20 for when in ("awake", "asleep"))
            line |= {f"{what}_awake_mib": awake, f"{what}_asleep_mib": asleep, f"{what}_given_back_mib": awake - asleep}
        result.append(line)
    return result


def main() -> int:
    options = parse(
        __doc__, parts=(["sources", "wake", "drop"], "of: sources, wake, drop", {"nargs": "*", "positional": True}),
        repeats=(10, "rounds of each source"), bursts=(1, "of each case"),
        memory=("288MiB", "of each instance; its KV is filled before each source"),
        burst_memory=("264MiB", "of each instance in bursts"),
    )  # fmt: skip
    rows: list[Row] = []
    bursts: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sleep-wake-") as scratch:
        model = make_folder(Path(scratch), QWEN3_110M)
        if "sources" in options.parts:
            rows = asyncio.run(measure(model, options.memory, options.repeats))
        for name in [part for part in options.parts if part in CASES] * options.bursts:
            bursts.append(asyncio.run(measure_burst(model, options.burst_memory, name)))
    medians = table(rows)
    print_rows(medians)
    print_rows(bursts)
    keep(options.json, {"memory": options.memory, "sources": medians, "rounds": rows, "bursts": bursts}, *SERVING)
    return 0 if all(b["is_as_predicted"] and b["is_the_case"] for b in bursts) else 1
