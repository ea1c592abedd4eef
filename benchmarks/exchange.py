"""What a drop costs its running requests on a slow link: modes of exchange, and links with and without coordination.

    PYTHONPATH=src python benchmarks/exchange.py --mbit 200 --rounds 2 --json exchange.json

Two workers in two network namespaces, joined by a veth pair that `tc tbf` limits in both directions; the controller
stays outside (its messages go over Unix sockets). Requests decode on both instances, then a drop is ordered and new,
short requests arrive, which the pipeline serves while the KV moves. Cases, interleaved, one engine each a round:

    transfer        KV is sent, requests stand still until theirs is there
    live            requests attend to their KV where it lies while it moves
    recompute, auto
    ... + "blind"   transfer and live without coordination: bulk is not cut to size and does not yield

Columns, over the time from the drop to the end of that case's exchange: its length; of the requests that ran at the
drop the mean decode gap (every gap that overlaps with the exchange, in full), the mean over requests of the exchange's
time over the tokens each produced in it (at least one), the P99 gap, and the gap that a client is in at a random
moment of it (mean of gaps weighted by their length: one stall of a second is not made good by fifty quick tokens
after it); then over an equal time for all cases, the longest exchange's: tokens that these requests produced and the
time that one took them; mean and longest stall; time that activations were on their way, mean and P99; mean gap of the
new requests. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence import SERVING, write_result

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.machine.netns import Placement
from jettison.types import Request, SamplingParams

NAMES = ("jettison-x0", "jettison-x1")
HOSTS = ("10.213.77.1", "10.213.77.2")
CASES = {
    "transfer": ("transfer", True),
    "live": ("live", True),
    "recompute": ("recompute", True),
    "auto": ("auto", True),
    "transfer blind": ("transfer", False),
    "live blind": ("live", False),
}


@dataclass
class Outcome:
    """One case, one round. Times in ms."""

    case: str
    exchange_ms: float
    mean_gap_ms: float
    per_request_ms: float
    """Mean over requests of the exchange's time over the tokens that the request produced in it."""
    p99_gap_ms: float
    felt_gap_ms: float
    """Mean gap, each weighted by its length."""
    steady_gap_ms: float
    """Before the drop."""
    token_times_ms: list[float]
    """Of the requests that ran, since the drop."""
    mean_stall_ms: float
    max_stall_ms: float
    activation_mean_ms: float
    activation_p99_ms: float
    new_mean_gap_ms: float
    moved_mib: float
    live_rows: int
    by_choice: str


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def network(mbit: float) -> Iterator[dict[int, Placement]]:
    """Two namespaces and a limited link between them; gone afterwards, whatever happened."""
    remove_network()
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "v0", "netns", NAMES[0], "type", "veth", "peer", "name", "v1", "netns", NAMES[1])
        for i, (name, host) in enumerate(zip(NAMES, HOSTS, strict=True)):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"{host}/24", "dev", f"v{i}")
            # Large frames, as in machine rooms: with small ones the packets' handling would take a tenth of a core.
            run(*inside, "ip", "link", "set", f"v{i}", "mtu", "9000", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            device = ("dev", f"v{i}")
            # Buckets of a few packets: the link is never idle for longer and never faster. Below them the queue that
            # Linux gives an interface by itself.
            run(*inside, "tc", "qdisc", "add", *device, "root", "handle", "1:", "tbf", "rate", f"{mbit}mbit",
                "burst", "16kb", "latency", "50ms")  # fmt: skip
            run(*inside, "tc", "qdisc", "add", *device, "parent", "1:", "handle", "2:", "pfifo_fast")
        yield {i: Placement(host, name) for i, (name, host) in enumerate(zip(NAMES, HOSTS, strict=True))}
    finally:
        remove_network()


def remove_network() -> None:
    for name in NAMES:
        subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def why_not() -> str | None:
    """What is missing here, if anything."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    try:
        with network(100):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"no network namespaces here: {detail}"


def settings(model: Path, mode: str, coordination: bool, args: argparse.Namespace) -> EngineConfig:
    flags: dict[str, object] = {
        "model": str(model), "instances": 2, "memory": "2GiB", "num_threads": 1, "exchange": mode,
        "coordination": coordination, "max_num_batched_tokens": 256, "max_num_seqs": 64, "overload": "drop",
        "enable_prefix_caching": False, "restore_dwell_ms": 600_000, "log_level": "error",
    }  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    blocks = 2 * args.requests * (args.prompt + args.output) // sized.config.memory.block_size
    flags["memory"] = sized.memory_for_blocks(blocks)
    return EngineConfig.resolve(**flags)  # type: ignore[arg-type]


class Client:
    """One request and when its tokens came, in ns."""

    def __init__(self, engine: Engine, name: str, num_prompt: int, num_output: int, seed: int) -> None:
        prompt = tuple((seed * 7919 + i * 31) % 250 + 1 for i in range(num_prompt))
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        self.times: list[int] = []
        self._events = engine.submit(Request(name, prompt, params, time.monotonic_ns(), 0, ""))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._events:
            self.times += [time.monotonic_ns()] * len(event.tokens)

    def gaps_ms(self, start: int, end: int) -> list[float]:
        """Gaps that overlap with the span, in full."""
        return [(b - a) / 1e6 for a, b in zip(self.times, self.times[1:], strict=False) if b > start and a < end]


async def until(condition: object, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the case did not come to its end")
        await asyncio.sleep(0.002)


async def measure(case: str, model: Path, placements: dict[int, Placement], args: argparse.Namespace) -> Outcome:
    mode, coordination = CASES[case]
    engine = Engine(settings(model, mode, coordination, args), LocalSpawner(placements))
    await engine.start()
    try:
        running = [Client(engine, f"r{i}", args.prompt + 13 * i, args.output, i) for i in range(args.requests)]
        await until(lambda: all(len(c.times) >= 12 for c in running), 120.0)
        steady = [g for c in running for g in c.gaps_ms(c.times[-8], c.times[-1])]
        before = engine.delays.num_activations
        dropped = time.monotonic_ns()
        engine.orders.request_drop()
        new = [Client(engine, f"n{i}", 16, args.output, 100 + i) for i in range(args.new)]
        await until(lambda: engine.core.state.counters.num_drops == 1 and not engine.core.in_transition)
        ended = time.monotonic_ns()
        num_delays = engine.delays.num_activations - before
        delays = list(engine.delays.recent_activation_ns)[-num_delays:] if num_delays else [0]
        seen = [len(c.times) for c in running]
        await until(lambda: all(len(c.times) > n for c, n in zip(running, seen, strict=True)))
        await asyncio.sleep(args.tail)
        gaps = sorted(g for c in running for g in c.gaps_ms(dropped, ended))
        num_tokens = [sum(dropped < t <= ended for t in c.times) for c in running]
        per_request = [(ended - dropped) / 1e6 / max(1, num) for num in num_tokens]
        counters = engine.core.state.counters
        record = next(r for r in engine.event_log if r.kind == "exchange_done")
        new_gaps = [g for c in new for g in c.gaps_ms(dropped, ended)]
        return Outcome(
            case, (ended - dropped) / 1e6, statistics.fmean(gaps), statistics.fmean(per_request),
            gaps[int(0.99 * (len(gaps) - 1))],
            sum(g * g for g in gaps) / sum(gaps), statistics.fmean(steady),
            sorted((t - dropped) / 1e6 for c in running for t in c.times if t > dropped),
            counters.stall_ns / 1e6 / max(1, counters.num_stalls), counters.max_stall_ns / 1e6,
            statistics.fmean(delays) / 1e6, sorted(delays)[int(0.99 * (len(delays) - 1))] / 1e6,
            statistics.fmean(new_gaps) if new_gaps else 0.0, counters.exchanged_bytes / 2**20,
            counters.num_live_rows, json.dumps(record.fields["requests"]),
        )
    finally:
        await engine.close()


def table(outcomes: list[Outcome], num_requests: int) -> str:
    common_ms = max(o.exchange_ms for o in outcomes)
    lines = [
        "| case | exchange ms | gap mean ms | time over tokens, mean of requests, ms | gap P99 ms | gap felt ms | "
        "steady gap ms | "
        "equal time: tokens, ms a token | stall mean / max ms | activation delay mean / P99 ms | "
        "gap of new requests ms | choices |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(o.case for o in outcomes):
        mine = [o for o in outcomes if o.case == case]

        def mean(name: str, mine: list[Outcome] = mine) -> str:
            values = [getattr(o, name) for o in mine]
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
            return f"{statistics.fmean(values):.1f}{spread}"

        tokens = statistics.fmean(sum(t <= common_ms for t in o.token_times_ms) for o in mine)
        lines.append(
            f"| {case} | {mean('exchange_ms')} | {mean('mean_gap_ms')} | {mean('per_request_ms')} | "
            f"{mean('p99_gap_ms')} | "
            f"{mean('felt_gap_ms')} | "
            f"{mean('steady_gap_ms')} | {tokens:.0f}, {num_requests * common_ms / tokens:.1f} | "
            f"{mean('mean_stall_ms')} / {mean('max_stall_ms')} | "
            f"{mean('activation_mean_ms')} / {mean('activation_p99_ms')} | {mean('new_mean_gap_ms')} | "
            f"{mine[0].by_choice} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8, help="running at the drop")
    parser.add_argument("--new", type=int, default=4, help="arriving with the drop")
    parser.add_argument("--prompt", type=int, default=1200)
    parser.add_argument("--output", type=int, default=900)
    parser.add_argument("--tail", type=float, default=2.0, help="seconds watched after the exchange")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, network(args.mbit) as placements:
        model = Path(folder) / "model"
        create_model(
            model, arch="llama", layers=args.layers, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=1408,
            max_position_embeddings=4096,
        )
        for case in args.rounds * args.cases:
            outcomes.append(asyncio.run(measure(case, model, placements, args)))
            print(f"{case}: {outcomes[-1].exchange_ms:.0f} ms", file=sys.stderr)
            if args.json is not None:  # after each case: a run that is cut short keeps what it has
                told = {k: str(v) for k, v in vars(args).items()}
                write_result(args.json, {"settings": told, "outcomes": list(map(asdict, outcomes))}, *SERVING)
    print(table(outcomes, args.requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
