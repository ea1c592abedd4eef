"""How long an instance takes to fall asleep and to wake, from each source, and what memory the system gets back.

    PYTHONPATH=src python benchmarks/sleep_wake.py --repeats 5 --json sleep_wake.json

Two real workers with a random Qwen3 of 107M parameters in bfloat16. Each round puts worker 0 to sleep and wakes it:
from its *peer*, which stays awake; from the *host* copy, both asleep at level 1; from the *disk* (most likely the page
cache), both asleep at level 1, and the copy emptied before one wakes, so that nothing else is left. Before each round
requests fill the KV, so that all of the budget is resident. Columns: milliseconds from the order to the end, as the
core records them (sleep: the layout is gone and pages are given back; wake: all shards are there and compared), and of
worker 0 the budget's bytes in use and the resident set, awake and asleep.

Then a burst of half as much again as two instances hold, on three: all *awake*; one *asleep*, which the ladder may wake
or do without; and one *kept* asleep (``--max-awake 2``), so that a drop is all there is. Columns: time to first token,
the way that was taken first and what each was predicted to take, and what waking took.

Absolute times belong to one machine on one day; bytes travel.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.weights import QWEN3_110M, make_folder
from evidence import SERVING, write_result

from jettison.config import EngineConfig
from jettison.core.moving.sleeping import SleepState
from jettison.live.engine.engine import Engine
from jettison.types import Request, SamplingParams

WAIT_S = 120.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Bench:
    """One engine, and what was measured on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: list[dict[str, Any]] = []

    async def fill(self) -> None:
        """Write all KV of both instances."""
        block_size = self.engine.core.state.limits.block_size
        length = 1024
        num = 1 + sum(w.full_blocks for w in self.engine.core.state.workers.values()) * block_size // length

        async def one(i: int) -> None:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            prompt = tuple((17 * i + j) % 1000 + 10 for j in range(length))
            async for _ in self.engine.submit(Request(f"fill-{len(self.rows)}-{i}", prompt, params, 0)):
                pass

        await asyncio.gather(*(one(i) for i in range(num)))

    def state(self, worker_id: int) -> SleepState:
        return self.engine.core.sleepers.state_of(worker_id)

    async def sleep(self, worker_ids: list[int], level: int) -> float:
        """Milliseconds until worker 0 slept."""
        self.engine.order(lambda core, now_ns: core.request_sleep(worker_ids, level, now_ns))
        await until(lambda: all(self.state(w) is SleepState.ASLEEP for w in worker_ids))
        return self._last_ms("asleep")

    async def wake(self, worker_id: int) -> float:
        self.engine.order(lambda core, now_ns: core.request_wake(worker_id, now_ns))
        await until(lambda: self.state(worker_id) is SleepState.AWAKE)
        return self._last_ms("woken")

    def _last_ms(self, kind: str) -> float:
        ends = [r for r in self.engine.event_log if r.kind == kind]
        mine = [r for r in ends if r.fields["worker"] == 0] or ends
        return float(str(mine[-1].fields["ms"]))

    def memory(self) -> dict[str, int]:
        worker = self.engine.snapshot().workers[0]
        return {"budget_used": worker.budget_bytes - worker.free_bytes, "rss": worker.rss_bytes}

    async def round(self, source: str) -> None:
        """Asleep and awake again."""
        await self.fill()
        awake = self.memory()
        slept_ms = await self.sleep([0] if source == "peer" else [0, 1], 2 if source == "peer" else 1)
        asleep = self.memory()
        if source == "disk":
            self.forget_copy()
        woken_ms = await self.wake(0)
        if source != "peer":
            await self.wake(1)
        self.rows.append({
            "source": source, "sleep_ms": slept_ms, "wake_ms": woken_ms, "awake": awake, "asleep": asleep,
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


async def measure(model: Path, memory: str, repeats: int) -> list[dict[str, Any]]:
    """All rounds on one engine."""
    config = EngineConfig.resolve(model=str(model), instances=2, memory=memory, num_threads=1, overload="recompute")
    engine = Engine(config)
    try:
        await engine.start()
        bench = Bench(engine)
        for _ in range(repeats):
            for source in ("peer", "host", "disk"):
                await bench.round(source)
        return bench.rows
    finally:
        await engine.close()


BURST = {"awake": {}, "asleep": {}, "kept": {"max_awake": 2}}
"""Variants of the burst, and their flags."""


async def measure_burst(model: Path, memory: str, variant: str) -> dict[str, Any]:
    """One burst on three instances."""
    config = EngineConfig.resolve(
        model=str(model), instances=3, memory=memory, num_threads=1, overload="drop", **BURST[variant]
    )
    engine = Engine(config)
    try:
        await engine.start()
        sleepers = engine.core.sleepers
        if variant == "asleep":
            engine.order(lambda core, now_ns: core.request_sleep([2], 2, now_ns))
        await until(lambda: len(sleepers.asleep) == (variant != "awake") and sleepers.is_idle)
        state = engine.core.state
        room = 2 * max(w.full_blocks for w in state.workers.values()) * state.limits.block_size
        started = asyncio.get_running_loop().time()

        async def one(i: int) -> float:
            params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
            prompt, ttft = tuple((17 * i + j) % 1000 + 10 for j in range(256)), 0.0
            async for event in engine.submit(Request(f"burst-{i}", prompt, params, 0)):
                if event.tokens and not ttft:
                    ttft = asyncio.get_running_loop().time() - started
            return ttft

        ttfts = sorted(await asyncio.gather(*map(one, range(3 * room // 2 // 320))))
        return {"variant": variant, "requests": len(ttfts), **burst_figures(engine, ttfts)}
    finally:
        await engine.close()


def burst_figures(engine: Engine, ttfts: list[float]) -> dict[str, Any]:
    """Of one burst, times in milliseconds."""
    log = list(engine.event_log)
    decided = next((r.fields for r in log if r.kind in ("wake_decided", "wake_declined")), {})
    predicted = {f"predicted_{name[:-2]}_ms": 1e3 * float(str(decided[name])) for name in ("wake_s", "drop_s")
                 if name in decided}  # fmt: skip
    woken = [float(str(r.fields["ms"])) for r in log if r.kind == "woken"]
    return {
        "ttft_p50_ms": 1e3 * statistics.median(ttfts), "ttft_p99_ms": 1e3 * ttfts[int(0.99 * (len(ttfts) - 1))],
        "way": decided.get("way", "-"), **predicted, "woken_ms": woken, "drops": sum(r.kind == "drop" for r in log),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by source, in the order in which they were tried."""
    result = []
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]

        def median(get: Callable[[dict[str, Any]], float], mine: list[dict[str, Any]] = mine) -> float:
            return statistics.median(get(row) for row in mine)

        result.append({
            "source": source, "rounds": len(mine), "sleep_ms": median(lambda r: r["sleep_ms"]),
            "wake_ms": median(lambda r: r["wake_ms"]), "wake_ms_worst": max(r["wake_ms"] for r in mine),
            **{f"{what}_{when}_mib": median(lambda r, w=what, t=when: r[t][w] / 2**20)  # type: ignore[misc]
               for what in ("budget_used", "rss") for when in ("awake", "asleep")},
        })  # fmt: skip
    return result


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", default="288MiB", help="of each instance; its KV is filled before each round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sleep-wake-") as scratch:
        model = make_folder(Path(scratch), QWEN3_110M)
        rows = asyncio.run(measure(model, options.memory, options.repeats))
        bursts = [asyncio.run(measure_burst(model, options.memory, v)) for _ in range(options.repeats) for v in BURST]
    medians = table(rows)
    for row in [*medians, *bursts]:
        cells = (f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(cells))
    if options.json is not None:
        result = {"memory": options.memory, "sources": medians, "rounds": rows, "bursts": bursts}
        write_result(options.json, result, *SERVING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
