"""How fast the simulator is: instances, requests, wall time, memory, one core; cost should grow with requests alone.

    python benchmarks/simulator.py --instances 1000 --requests 10000 100000 1000000

    python benchmarks/simulator.py --peers --dynamo-python ENV/bin/python --vidur CHECKOUT \
        --vidur-python ENV2/bin/python

A day with a tide (rate 1 to 3) and log-normal lengths of chat (means 640 in, 260 out), squeezed or stretched to the
number of requests at ``--rate`` a second on average, on Qwen2.5-14B over A800s. Each size runs in a process of its own,
so that peak memory is its own.

``--peers`` runs the same day on as many instances in other simulators, all of them pinned to one core. ENV:

    python -m venv ENV && ENV/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    ENV/bin/pip install pydantic msgspec tqdm typing_extensions numpy pyyaml

CHECKOUT is Vidur's source (microsoft/vidur); ENV2 has numpy, pandas below 3, scikit-learn, ddsketch and fasteners.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from engines.simulator_child import Timed
from engines.simulator_host import (
    Simulator,
    adapter,
    print_table,
    run,
    run_rounds,
    write_mooncake,
    write_profile,
    write_vidur,
)  # fmt: skip
from evidence import VIRTUAL, write_result

from jettison.core.ladder.lists import parse_overload
from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.policy.lookahead import LookaheadParams
from jettison.sim.setup import ClusterSetup, MemorySetup, setup_from_profile
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard
from jettison.workload.traces import TraceRow, Workload

MIB, GIB = 1 << 20, 1 << 30
FLOPS, MEMORY_BYTES_PER_S = 312e12 * 0.65, 2.04e12 * 0.70
"""A800: peaks, and the parts of them that vidur's tables of linear layers on an A100 reach."""


def qwen14_setup(num_instances: int, policy: str, compress: bool) -> ClusterSetup:
    """Shape: Hugging Face's config of Qwen2.5-14B."""
    shards = {layer_shard(i): 525 * MIB for i in range(48)} | {EMBED_SHARD: 1485 * MIB, HEAD_SHARD: 1485 * MIB}
    shape = ModelShape(48, 5120, 40, 8, 128, 13824, 152064, 2, False, shards)
    token_s = 2 * 14.77e9 / 48 / FLOPS
    weight_tokens = round(525 * MIB / MEMORY_BYTES_PER_S / token_s)
    cost = CostModel(
        48, pair_layer_s=4 * 5120 / FLOPS, kv_token_layer_s=4096 / MEMORY_BYTES_PER_S, token_layer_s=token_s,
        layer_s=2e-6, step_s=2e-3, entry_s=0.0, entry_token_s=0.0, head_s=1e-3, sample_s=1e-6,
        weight_tokens=weight_tokens,
    )  # fmt: skip
    profile = HardwareProfile(cost, 25e9, 10e-6, 5e-3, 0.0, 1e12, 6e9)
    limits = SchedulerLimits(
        64, 2048, 256, 32768, enable_prefix_caching=False, lookahead=LookaheadParams(enabled=policy == "drop")
    )
    params = ClusterParams(**parse_overload(policy)._asdict(), profile=profile)  # type: ignore[arg-type]
    setup = setup_from_profile(shape, limits, params, num_instances, MemorySetup(int(0.9 * 80 * GIB)), profile)
    return replace(setup, compress=compress)


def day(num_requests: int, rate: float, seed: int = 0) -> Workload:
    """Arrivals between tide and tide, by inversion of the cumulative rate."""
    rng = np.random.default_rng(seed)
    span_s = num_requests / rate
    grid = np.linspace(0.0, 1.0, 2881)
    cumulative = np.cumsum(2.0 - np.cos(2.0 * np.pi * grid))
    at = np.interp(np.sort(rng.random(num_requests)), cumulative / cumulative[-1], grid) * span_s

    def lengths(mean: float) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, num_requests)
        return np.clip(drawn, 1, 8192).astype(int)

    rows = tuple(TraceRow(*row) for row in zip(at.tolist(), lengths(640).tolist(), lengths(260).tolist(), strict=True))
    return Workload(rows, f"day of {num_requests}", "made up: tide, log-normal lengths", span_s=span_s)


def measure(args: argparse.Namespace, num_requests: int) -> dict[str, object]:
    """One size, in this process."""
    workload = day(num_requests, args.rate)
    setup = qwen14_setup(args.instances, args.policy, not args.naive)
    with Timed() as timed:
        run = simulate_workload(workload, setup, SimulationOptions(detail=False, observe_interval_s=60.0))
    wall_s = timed.row["wall_s"]
    return {
        "instances": args.instances, "requests": num_requests, "policy": args.policy, "virtual_s": run.duration_s,
        **timed.row, "us_per_request": wall_s / num_requests * 1e6, "events": run.config["num_events"],
        "completed": run.requests.completed,
        "ttft_p99_s": run.ttft_s.p99, "hash": run.config["event_log_hash"],
    }  # fmt: skip


# --- other simulators ------------------------------------------------------------------------------------------

OURS = "KV blocks, chunked prefill, preemption, layers dropped and restored, KV moved over shared links; the live core"
MOCKER = "KV blocks, chunked prefill, preemption; step times from our cost model's table; nothing moves"
VIDUR = (
    "KV blocks, chunked prefill (Sarathi), preemption by restart; times of operators from random forests (InternLM-20B "
    "on an A100); nothing moves"
)


@dataclass(frozen=True)
class Peers:
    """What the other simulators are told: our instances, in their words."""

    args: argparse.Namespace
    setup: ClusterSetup
    folder: Path

    def shared(self) -> dict[str, Any]:
        """Settings that every adapter takes."""
        limits = self.setup.limits
        return {"instances": self.args.instances, "max_batch": limits.max_num_seqs, "max_tokens": 16384,
                "max_batch_tokens": limits.max_num_batched_tokens}  # fmt: skip

    def num_kv_blocks(self) -> int:
        """Of an instance that has dropped nothing."""
        shape, memory = self.setup.shape, self.setup.memory
        block_bytes = shape.block_bytes_per_layer(self.setup.limits.block_size) * shape.num_layers
        return (memory.budget_bytes - sum(shape.shard_bytes.values())) // block_bytes

    def dynamo(self, workload: Workload) -> Simulator:
        """Mooncake's format, the same arrivals and lengths."""
        trace, profile = self.folder / "day.jsonl", self.folder / "steps.npz"
        block_tokens, num_blocks = self.setup.limits.block_size, self.num_kv_blocks()
        write_mooncake(trace, workload.rows, block_tokens)
        shared = self.shared()
        write_profile(profile, self.setup.profile.cost, shared["max_batch_tokens"], num_blocks * block_tokens, 16384)
        settings = {**shared, "trace": str(trace), "profile": str(profile), "block_tokens": block_tokens,
                    "num_blocks": num_blocks}  # fmt: skip
        command = adapter(self.args.dynamo_python, "dynamo_simulator.py", settings)
        return Simulator("Dynamo's mocker", command, MOCKER, own_packages=True)

    def vidur(self, workload: Workload, train: bool = False) -> Simulator:
        """Its trace replay, the same arrivals and lengths."""
        trace = self.folder / "day.csv"
        write_vidur(trace, workload.rows)
        num_kv_tokens = self.num_kv_blocks() * self.setup.limits.block_size
        settings = {**self.shared(), "trace": str(trace), "checkout": str(Path(self.args.vidur).resolve()),
                    "output": str(self.folder), "train": train, "num_kv_tokens": num_kv_tokens}  # fmt: skip
        command = adapter(self.args.vidur_python, "vidur_simulator.py", settings)
        return Simulator("Vidur", command, VIDUR, own_packages=True)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All simulators at all sizes, one after the other; the table is printed as it is."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        peers = Peers(args, qwen14_setup(args.instances, args.policy, True), Path(folder))
        for num_requests in args.requests:
            workload = day(num_requests, args.rate)
            simulators = [Simulator("Jettison", here(args, num_requests, False), OURS)]
            if args.naive:
                simulators.append(Simulator("Jettison, an event a step", here(args, num_requests, True), OURS))
            if args.dynamo_python:
                simulators.append(peers.dynamo(workload))
            if args.vidur and args.vidur_python and trained(peers, workload, args):
                simulators.append(peers.vidur(workload))
            outcomes = run_rounds(simulators, args.rounds, args.core, args.peer_limit_s)
            size = [outcomes[it.name].row(it, args.instances, num_requests) for it in simulators]
            print(f"\n{num_requests:,} requests in {workload.span_s:,.0f} s, {args.instances:,} instances:\n")
            print_table(size)
            rows += [{**row, "rate": args.rate} for row in size]
    return rows


def trained(peers: Peers, workload: Workload, args: argparse.Namespace) -> bool:
    """Vidur's forests are fitted before the first run, and told apart; later ones find them in its cache."""
    try:
        answer = run(peers.vidur(workload, train=True).command, args.core, args.peer_limit_s, own_packages=True)
    except (TimeoutError, RuntimeError) as error:
        print(f"Vidur left out: its training {error}")
        return False
    print(f"Vidur trained, or found in its cache, in {answer['wall_s']:.1f} s, {answer['peak_mib']:,} MiB")
    return True


def here(args: argparse.Namespace, num_requests: int, naive: bool) -> list[str]:
    """The command that measures one size of ours in a process of its own."""
    command = [sys.executable, __file__, "--here", "--instances", str(args.instances), "--requests",
               str(num_requests), "--rate", str(args.rate), "--policy", args.policy]  # fmt: skip
    return command + ["--naive"] * naive


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second, mean")
    parser.add_argument("--policy", default="drop")
    parser.add_argument("--naive", action="store_true", help="one event a step (with --peers: a row more)")
    parser.add_argument("--json", type=Path, help="write the rows here; with --peers, behind the rows that it holds")
    parser.add_argument("--peers", action="store_true", help="the same day in other simulators too")
    parser.add_argument("--dynamo-python", metavar="PATH", help="an environment that has ai-dynamo")
    parser.add_argument("--vidur", metavar="CHECKOUT")
    parser.add_argument("--vidur-python", metavar="PATH", help="an environment that has what Vidur imports")
    parser.add_argument("--peer-limit-s", type=float, default=600.0, help="a run that takes longer is ended")
    parser.add_argument("--rounds", type=int, default=1, help="of each simulator, in turn: the median counts")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="all are pinned to it (--peers)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.here:
        print(json.dumps(measure(args, args.requests[0])))
        return
    if args.peers:
        if not args.dynamo_python:
            print("Dynamo's mocker left out: no --dynamo-python")
        if not (args.vidur and args.vidur_python):
            print("Vidur left out: no --vidur and --vidur-python")
        rows = compare(args)
        if args.json and Path(args.json).exists():
            rows = json.loads(Path(args.json).read_text(encoding="utf-8")) + rows
    else:
        rows = []
        for num_requests in args.requests:
            done = subprocess.run(here(args, num_requests, args.naive), capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout))
            row = rows[-1]
            print(f"{row['requests']:>9} requests  {row['wall_s']:8.1f} s  {row['us_per_request']:6.0f} us a request  "
                  f"{row['events']:>9} events  {row['peak_mib']:>5} MiB", flush=True)
    if args.json:
        write_result(args.json, {"rows": rows}, *VIRTUAL)


if __name__ == "__main__":
    main()
