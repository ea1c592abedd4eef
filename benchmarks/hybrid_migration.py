"""Migration as KV, as tokens, and each move as is best (MELL section V), over links of 10, 100 and 1,000 Mbit/s.

    PYTHONPATH=src python benchmarks/hybrid_migration.py --json hybrid_migration.json

Two workers in two network namespaces, joined by a veth pair that `tc tbf` limits in both directions (as
`benchmarks/exchange.py` has it; needs root, `ip` and `tc`, and says so where they are refused). Qwen3 of 107M
parameters, prefix caching off, no profile: boundaries are the predictor's, the link's rate is what one short move has
shown.

*Cells*: one request, or eight at once, with contexts of `--context` tokens go from one instance to the other, while
`--others` short requests decode at each. All three ways keep the same boundary: a step of the destination takes as many
tokens as make it half as long again. Columns: the time until the last of them has arrived (`-`: some never did, as they
grow faster than the link carries), how many went as tokens, and the P99 gap between tokens of the others meanwhile.

*Stops*: a request with a context of 512 and of the model's longest goes to and fro over 1 Gbit/s: how long it stands
still, P50 and P99, as it is done (rounds, at most 16 blocks at last), with all its KV in one go, and computed again
from its tokens (sent as a new prompt, until its next token).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.weights import QWEN3_110M, make_folder
from evidence import SERVING, write_result
from exchange import Client, network, until, why_not

from jettison.config import EngineConfig
from jettison.core.ladder.movekinds import prefill_boundary_of
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.machine.netns import Placement
from jettison.memory.kvtransfers import MigrationKind

WAYS = ("kv", "tokens", "adaptive")
ASK_S = 0.05
"""Between two times that moves which wait are asked for again."""
STEADY_S = 2.0
"""Watched before anything moves."""
FEW_TOKENS = 16
"""Have been decoded before anything moves."""
SHORT_PROMPT = 64
"""Tokens of the others' prompts; their answers fill the model's context, and outlast a cell."""
ALL_AT_ONCE = 1 << 20
"""Blocks: more than any request has."""


@dataclass
class Cell:
    """One way over one link."""

    mbit: float
    moves: int
    way: str
    complete_s: float | None
    """None: not all arrived in time."""
    as_tokens: int
    others_p99_ms: float
    steady_p99_ms: float
    """Of the same requests before."""


@dataclass
class Stop:
    """How long a request stands still, in ms."""

    context: int
    how: str
    p50_ms: float
    p99_ms: float
    times: int


def quantile(values: list[float], share: float) -> float:
    """Of the sorted values, the one at ``share``; 0 where there are none."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


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


class Bench:
    """A started engine and what runs on it."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.args = args
        self._num = 0
        self._num_told = 0

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

    async def know_the_link(self) -> None:
        """One short move each way, as KV."""
        name, client = self.short()
        await self.until_decoding([client])
        for _ in range(2):
            before = self.engine.core.state.counters.num_migrations
            target = 1 if name in self.at(0) else 0
            self.engine.request_migration(name, target, MigrationKind.KV)
            await until(lambda before=before: self.engine.core.state.counters.num_migrations > before)
        await self.leave({name})

    async def cell(self, mbit: float, num_moves: int, way: str) -> Cell:
        others = [self.short() for _ in range(2 * self.args.others)]
        await self.until_decoding([c for _, c in others])
        crowd = [self.client(self.args.context, self.args.output) for _ in range(2 * num_moves)]
        await until(lambda: {n for n, _ in crowd} <= self.at(0) | self.at(1), 300.0)
        travellers = sorted({n for n, _ in crowd} & self.at(0))[:num_moves]
        await self.leave({n for n, _ in crowd} - {*travellers})
        assert len(travellers) == num_moves, f"{len(travellers)} of {num_moves} are at the first instance"
        await self.until_decoding([c for n, c in crowd if n in travellers])
        await asyncio.sleep(STEADY_S)
        started = time.monotonic_ns()
        steady = [g for _, c in others for g in c.gaps_ms(started - int(STEADY_S * 1e9), started)]
        before = self.engine.core.state.counters.num_token_migrations
        arrived = await self._move(travellers, way)
        ended = time.monotonic_ns()
        gaps = [g for _, c in others for g in c.gaps_ms(started, ended)]
        found = Cell(
            mbit, num_moves, way, (ended - started) / 1e9 if arrived else None,
            self.engine.core.state.counters.num_token_migrations - before, quantile(gaps, 0.99), quantile(steady, 0.99),
        )
        if self.args.trace:
            self._trace(started)
        await self.leave({*travellers} | {n for n, _ in others})
        return found

    def _trace(self, started_ns: int) -> None:
        """Tell how each move of a cell went."""
        log = self.engine.event_log
        state = self.engine.core.state
        print({k: v.bytes_per_s for k, v in state.link_rates.items()}, prefill_boundary_of(state, self.engine.core.groups[1]), file=sys.stderr)
        for r in log:
            if r.kind == "migrated" and r.time_ns > started_ns:
                print(f"   at {(r.time_ns - started_ns) / 1e9:.3f}", r.fields, file=sys.stderr)

    async def _move(self, names: list[str], way: str) -> bool:
        """Have them go to the second instance until all are there; False where that takes too long."""
        core, deadline = self.engine.core, time.monotonic() + self.args.patience
        while not {*names} <= self.at(1):
            if time.monotonic() > deadline:
                return False
            left = [name for name in names if name in self.at(0)]
            if way == "adaptive":
                self.engine.request_migrations(dict.fromkeys(left, 1))
            else:
                boundary = prefill_boundary_of(core.state, core.groups[1])
                tokens = None if boundary is None else max(1, boundary.step_tokens)
                for name in left:
                    self.engine.request_migration(name, 1, MigrationKind(way), tokens)
            await asyncio.sleep(ASK_S)
        return True

    async def stops(self, context: int, times: int) -> list[Stop]:
        others = [self.short() for _ in range(2 * self.args.others)]
        await self.until_decoding([c for _, c in others])
        found: list[Stop] = []
        for how, blocks in (("rounds", None), ("all KV at once", ALL_AT_ONCE)):
            name, client = self.client(context, self.args.stop_output)
            await self.until_decoding([client])
            stops = [await self._stop_ms(name, blocks) for _ in range(times)]
            found.append(Stop(context, how, quantile(stops, 0.5), quantile(stops, 0.99), times))
            await self.leave({name})
        again: list[float] = []
        for _ in range(max(1, times // 4)):
            started = time.monotonic_ns()
            name, client = self.client(context, 64)
            await until(lambda client=client: bool(client.times), 300.0)
            again.append((client.times[0] - started) / 1e6)
            await self.leave({name})
        found.append(Stop(context, "computed again", quantile(again, 0.5), quantile(again, 0.99), len(again)))
        await self.leave({n for n, _ in others})
        return found

    async def _stop_ms(self, name: str, max_final_blocks: int | None) -> float:
        core, driver = self.engine.core, self.engine._driver
        assert driver is not None
        await until(lambda: any(name in self.at(g) for g in (0, 1)))
        source = 0 if name in self.at(0) else 1
        num_before = sum(r.kind == "migrated" for r in self.engine.event_log)
        state, groups = core.groups[source].queues.running[name], core.groups
        more = {} if max_final_blocks is None else {"max_final_blocks": max_final_blocks}
        now_ns = time.monotonic_ns()
        actions = core.migrations.start(state, groups[source], groups[1 - source], now_ns, **more)
        driver.carry_out(actions + core.stepping.plan(now_ns))
        await until(lambda: sum(r.kind == "migrated" for r in self.engine.event_log) > num_before)
        record = [r for r in self.engine.event_log if r.kind == "migrated"][-1]
        await asyncio.sleep(ASK_S)
        return float(record.fields["stop_ms"])


def verdict(ratio: float, most: float) -> str:
    """Whether it is no more than asked."""
    return f"{ratio:.2f}, at most {most:.2f}: {'holds' if ratio <= most else 'MISSED'}"


def bounds(cells: list[Cell]) -> list[str]:
    """What is asked of the adaptive way in each cell, and whether it holds."""
    lines = []
    for mbit, moves in dict.fromkeys((c.mbit, c.moves) for c in cells):
        took = {c.way: c.complete_s or math.inf for c in cells if (c.mbit, c.moves) == (mbit, moves)}
        if not {*WAYS} <= took.keys() or min(took["kv"], took["tokens"]) == math.inf:
            continue
        better, worse = sorted((took["kv"], took["tokens"]))
        most = 0.8 if moves >= 8 and worse <= 2 * better else 1.1
        ratio = took["adaptive"] / better
        lines.append(f"{mbit:g} Mbit/s, {moves}: adaptive over the better single way: {verdict(ratio, most)}")
    return lines


def stop_bounds(stops: list[Stop]) -> list[str]:
    """In rounds at most one third of all at once, at the longest context."""
    longest = max((s.context for s in stops), default=0)
    p99 = {s.how: s.p99_ms for s in stops if s.context == longest}
    if not p99:
        return []
    ratio = p99["rounds"] / p99["all KV at once"]
    return [f"stop at {longest} tokens over all KV at once: {verdict(ratio, 1 / 3)}"]


def table(cells: list[Cell], stops: list[Stop]) -> str:
    lines = ["| Mbit/s | moves | way | done after s | as tokens | others' P99 gap ms (before) |", "|---" * 6 + "|"]
    for c in cells:
        done = "-" if c.complete_s is None else f"{c.complete_s:.2f}"
        gaps = f"{c.others_p99_ms:.0f} ({c.steady_p99_ms:.0f})"
        lines.append(f"| {c.mbit:g} | {c.moves} | {c.way} | {done} | {c.as_tokens} | {gaps} |")
    if stops:
        lines += ["", "| context | how | stop P50 ms | P99 ms | times |", "|---|---|---|---|---|"]
        lines += [f"| {s.context} | {s.how} | {s.p50_ms:.1f} | {s.p99_ms:.1f} | {s.times} |" for s in stops]
    return "\n".join([*lines, "", *bounds(cells), *stop_bounds(stops)])


async def over_link(
    model: Path, mbit: float, placements: dict[int, Placement], args: argparse.Namespace, *, stops: bool,
    tell: list[Cell | Stop],
) -> None:
    most = max(args.moves)
    need = 2 * most * (args.context + args.output) + 2 * args.others * args.longest
    engine = Engine(settings(model, max(need, 2 * args.longest), args.longest), placements)
    await engine.start()
    try:
        bench = Bench(engine, args)
        await bench.know_the_link()
        if stops:
            for context in (512, args.longest - args.stop_output):
                tell += await bench.stops(context, args.times)
            return
        for num_moves in args.moves:
            for way in args.ways:
                tell.append(await bench.cell(mbit, num_moves, way))
                print(tell[-1], file=sys.stderr)
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--moves", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=int, default=3000, help="that a traveller may decode: it must live to arrive")
    parser.add_argument("--others", type=int, default=4, help="at each instance")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds that a cell may take")
    parser.add_argument("--longest", type=int, default=4096, help="the model's")
    parser.add_argument("--times", type=int, default=24, help="that a request goes to and fro")
    parser.add_argument("--stop-output", type=int, default=1000)
    parser.add_argument("--trace", action="store_true", help="tell of each move")
    parser.add_argument("--no-stops", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    told: list[Cell | Stop] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder), QWEN3_110M)
        for mbit, stops in [*((m, False) for m in args.mbit), *(() if args.no_stops else ((1000.0, True),))]:
            with network(mbit) as placements:
                asyncio.run(over_link(model, mbit, placements, args, stops=stops, tell=told))
            if args.json is not None:  # after each link: a run that is cut short keeps what it has
                plain = {k: v for k, v in vars(args).items() if k != "json"}
                write_result(args.json, {"settings": plain, "rows": list(map(asdict, told))}, *SERVING)
    cells, found = [t for t in told if isinstance(t, Cell)], [t for t in told if isinstance(t, Stop)]
    print(table(cells, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
