"""Migration as KV, as tokens, and each move as is best (MELL section V), over links of 10, 100 and 1,000 Mbit/s.

    python -m benchmarks packing migration --json hybrid_migration.json

Two workers in two network namespaces, joined by a veth pair that `tc tbf` limits in both directions (needs root,
`ip` and `tc`). Where these are refused, or with `--limiter`, the workers' links limit themselves (`transport.pacing`),
and the output says so. Qwen3 of 107M parameters, prefix caching off, no profile: boundaries are the predictor's, and
the link's rate is what transfers have shown. So that both are known, one short request goes to and fro as KV, and once
as tokens, before anything is measured.

*Cells*: one request, or eight at once, with contexts of `--context` tokens go from one instance to the other, while
`--others` short requests decode at each. All three ways are divided by the same rules into the same bins
(`policy.movekinds`), those of one kind alone with only that to choose from; so they keep the same boundaries. A way
that took less than `--short` seconds is taken again by others of the same length, `--repeats` times in all. Columns:
the time until the last of them has arrived (median; `-`: some never did, as they grow faster than the link carries),
how many moves went as tokens of how many, their longest stop, and the P99 gap between tokens of the others meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engines.weights import QWEN3_110M, make_folder
from benchmarks.packing.network import network, why_not
from benchmarks.servers import greedy
from benchmarks.shared import SERVING, Namespace, Row, keep, parse, print_rows, quantile, settings_of
from jettison.config import EngineConfig
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.machine.netns import Placement
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import Request

WAYS = {
    "kv": (MigrationKind.KV,), "tokens": (MigrationKind.TOKENS,), "adaptive": (MigrationKind.KV, MigrationKind.TOKENS),
}  # fmt: skip
ASK_S = 0.05
"""Between two times that moves which wait are asked for again."""
STEADY_S = 2.0
"""Watched before anything moves."""
FEW_TOKENS = 16
"""Have been decoded before anything moves."""
SHORT_PROMPT = 64
"""Tokens of the others' prompts; their answers fill the model's context, and outlast a cell."""
@dataclass
class Cell:
    """One way over one link."""

    mbit: float
    moves: int
    way: str
    all_s: list[float] = field(default_factory=list)
    """Until all had arrived, each time; empty: not all arrived in time."""
    as_tokens: int = 0
    num_moved: int = 0
    stop_ms: float = 0.0
    """The longest that one of them stood still."""
    gaps_ms: list[float] = field(default_factory=list)
    """Between tokens of the others, meanwhile."""
    steady_gaps_ms: list[float] = field(default_factory=list)
    """Of the same requests before."""

    @property
    def complete_s(self) -> float:
        """Median; infinite where not all arrived."""
        return statistics.median(self.all_s) if self.all_s else math.inf

    def summary(self) -> Row:
        """As a row of results."""
        gaps = {"others_p99_ms": quantile(self.gaps_ms, 0.99), "steady_p99_ms": quantile(self.steady_gaps_ms, 0.99)}
        return {k: v for k, v in vars(self).items() if not k.endswith("gaps_ms")} | gaps


def settings(model: Path, num_tokens: int, longest: int) -> EngineConfig:
    """``num_tokens``: that an instance has room for."""
    flags: dict[str, object] = {
        "model": str(model), "instances": 2, "memory": "8GiB", "num_threads": 1, "max_num_batched_tokens": 256,
        "max_num_seqs": 64, "overload": "recompute", "rebalance": False, "enable_prefix_caching": False,
        "max_model_len": longest, "log_level": "error",
    }  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    flags["memory"] = sized.memory_for_blocks(num_tokens // sized.config.memory.block_size)
    return EngineConfig.resolve(**flags)  # type: ignore[arg-type]


class Client:
    """One request and when its tokens came, in ns."""

    def __init__(self, engine: Engine, name: str, num_prompt: int, num_output: int, seed: int) -> None:
        prompt = tuple((seed * 7919 + i * 31) % 250 + 1 for i in range(num_prompt))
        self.times: list[int] = []
        self._events = engine.submit(Request(name, prompt, greedy(num_output), time.monotonic_ns(), 0, ""))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._events:
            self.times += [time.monotonic_ns()] * len(event.tokens)

    def gaps_ms(self, start: int, end: int) -> list[float]:
        """Gaps that overlap with the span, in full."""
        return [(b - a) / 1e6 for a, b in itertools.pairwise(self.times) if b > start and a < end]


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


class Bench:
    """A started engine and what runs on it."""

    def __init__(self, engine: Engine, args: Namespace) -> None:
        self.engine = engine
        self.args = args
        self._num = 0

    def client(self, num_prompt: int, num_output: int) -> tuple[str, Client]:
        self._num += 1
        name = f"q{self._num}"
        return name, Client(self.engine, name, num_prompt, num_output, self._num)

    def short(self) -> tuple[str, Client]:
        return self.client(SHORT_PROMPT, self.args.longest - SHORT_PROMPT)

    def at(self, group_id: int) -> set[str]:
        return set(self.engine.core.groups[group_id].queues.running)

    async def until_decoding(self, clients: list[Client]) -> None:
        await until(lambda: all(len(c.times) >= FEW_TOKENS for c in clients), 300.0)

    async def leave(self, names: set[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        await until(lambda: not names & (self.at(0) | self.at(1)))

    async def know_both_ways(self) -> None:
        """One short move to and fro as KV, so that the link's rates are known, and one as tokens, so that the predictor
        has seen decodes beside chunks."""
        name, client = self.short()
        await self.until_decoding([client])
        for kind in (MigrationKind.KV, MigrationKind.KV, MigrationKind.TOKENS):
            before = self.engine.core.state.counters.num_migrations
            self.engine.orders.request_migration(name, 1 if name in self.at(0) else 0, kind)
            await until(lambda before=before: self.engine.core.state.counters.num_migrations > before)
        await self.leave({name})

    async def cell(self, mbit: float, num_moves: int, way: str) -> Cell:
        cell = Cell(mbit, num_moves, way)
        while len(cell.all_s) < self.args.repeats:
            took_s = await self._once(cell)
            if took_s is not None:
                cell.all_s.append(took_s)
            if took_s is None or took_s > self.args.short:
                break
        return cell

    async def _once(self, cell: Cell) -> float | None:
        """All arrive, as soon as that; None: not in time."""
        others = [self.short() for _ in range(2 * self.args.others)]
        await self.until_decoding([c for _, c in others])
        travellers = await self._travellers(cell.moves)
        await asyncio.sleep(STEADY_S)
        started = time.monotonic_ns()
        arrived = await self._move(travellers, WAYS[cell.way])
        ended = time.monotonic_ns()
        for _, client in others:
            cell.steady_gaps_ms += client.gaps_ms(started - int(STEADY_S * 1e9), started)
            cell.gaps_ms += client.gaps_ms(started, ended)
        moved = [r.fields for r in self.engine.event_log if r.kind == "migrated" and r.time_ns > started]
        cell.as_tokens += sum("went_as" in fields for fields in moved)
        cell.num_moved += len(moved)
        cell.stop_ms = max([cell.stop_ms, *(float(str(fields["stop_ms"])) for fields in moved)])
        await self.leave({*travellers} | {n for n, _ in others})
        return (ended - started) / 1e9 if arrived else None

    async def _travellers(self, num: int) -> list[str]:
        """So many requests that decode at the first instance."""
        crowd = [self.client(self.args.context, self.args.output) for _ in range(2 * num)]
        await until(lambda: {n for n, _ in crowd} <= self.at(0) | self.at(1), 300.0)
        travellers = sorted({n for n, _ in crowd} & self.at(0))[:num]
        await self.leave({n for n, _ in crowd} - {*travellers})
        assert len(travellers) == num, f"{len(travellers)} of {num} are at the first instance"
        await self.until_decoding([c for n, c in crowd if n in travellers])
        return travellers

    async def _move(self, names: list[str], kinds: Collection[MigrationKind]) -> bool:
        """Have them go to the second instance until all are there; False where that takes too long. A request that
        waits is asked for again when one has arrived, or a moment has passed."""
        deadline = time.monotonic() + self.args.patience
        while not {*names} <= (there := self.at(1)):
            if time.monotonic() > deadline:
                return False
            left = [name for name in names if name not in there]
            self.engine.orders.request_migrations(dict.fromkeys(left, 1), kinds)
            next_s = time.monotonic() + ASK_S
            while self.at(1) == there and time.monotonic() < next_s:
                await asyncio.sleep(0.002)
        return True

def limited(mbit: float) -> dict[int, Placement]:
    """Two addresses of this machine, each of which sends so much at most."""
    return {i: Placement(f"127.0.0.{i + 1}", bytes_per_s=mbit * 1e6 / 8) for i in range(2)}


def bounds(cells: list[Cell]) -> list[str]:
    """What is asked of the adaptive way in each cell, and whether it holds."""
    lines = []
    for mbit, moves in dict.fromkeys((c.mbit, c.moves) for c in cells):
        took = {c.way: c.complete_s for c in cells if (c.mbit, c.moves) == (mbit, moves)}
        if not WAYS.keys() <= took.keys():
            continue
        if min(took["kv"], took["tokens"]) == math.inf:
            lines.append(f"{mbit:g} Mbit/s, {moves}: neither single way arrives, adaptive {took['adaptive']:.1f} s")
            continue
        better, worse = sorted((took["kv"], took["tokens"]))
        most = 0.8 if moves >= 8 and worse <= 2 * better else 1.1
        ratio = took["adaptive"] / better
        told = f"{ratio:.2f}, at most {most:.2f}: {'holds' if ratio <= most else 'MISSED'}"
        lines.append(f"{mbit:g} Mbit/s, {moves}: adaptive over the better single way: {told}")
    return lines


async def over_link(
    model: Path, mbit: float, placements: dict[int, Placement], args: Namespace, tell: list[Cell]
) -> None:
    most = max(args.moves)
    need = 2 * most * (args.context + args.output) + 2 * args.others * args.longest
    engine = Engine(settings(model, max(need, 2 * args.longest), args.longest), LocalSpawner(placements))
    await engine.start()
    try:
        bench = Bench(engine, args)
        await bench.know_both_ways()
        for num_moves in args.moves:
            for way in args.ways:
                tell.append(await bench.cell(mbit, num_moves, way))
                print(tell[-1].summary(), file=sys.stderr)
    finally:
        await engine.close()


def main() -> None:
    args = parse(
        __doc__, mbit=[10.0, 100.0, 1000.0], moves=[1, 8], ways=(list(WAYS), {"choices": WAYS}), context=512,
        output=(3000, "that a traveller may decode: it must live to arrive"), others=(4, "at each instance"),
        patience=(90.0, "seconds that a cell may take"), longest=(4096, "the model's"),
        repeats=(5, "of a way that takes a short time"),
        short=(3.0, "seconds"), limiter=(False, "have links limit themselves, also where `tc` works"),
    )  # fmt: skip
    reason = "as told" if args.limiter else why_not()
    if reason is not None:
        print(f"links limit themselves: {reason}")
    told: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder), QWEN3_110M)
        for mbit in args.mbit:
            with network(mbit) if reason is None else nullcontext(limited(mbit)) as placements:
                asyncio.run(over_link(model, mbit, placements, args, told))
            links = "tc tbf" if reason is None else f"limit themselves: {reason}"
            # After each link: a run that is cut short keeps what it has.
            document = {"settings": settings_of(args) | {"links": links}, "rows": [t.summary() for t in told]}
            keep(args.json, document, *SERVING)
    print_rows([cell.summary() for cell in told])
    print(*bounds(told), sep="\n")
