"""How fast the simulator is: instances, requests, wall time, memory, one core; cost should grow with requests alone.

    python -m benchmarks simulator size --instances 1000 --requests 10000 100000 1000000

A day with a tide (rate 1 to 3) and log-normal lengths of chat (means 640 in, 260 out), squeezed or stretched to the
number of requests at ``--rate`` a second on average, on Qwen2.5-14B over A800s. Each size runs in a process of its own,
so that peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import time
from dataclasses import replace

import numpy as np

from benchmarks.shared import REPOSITORY, SUPPRESS, VIRTUAL, Namespace, Row, again, keep, parse, print_block
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


def measure(args: Namespace, num_requests: int) -> Row:
    """One size, in this process."""
    workload = day(num_requests, args.rate)
    setup = qwen14_setup(args.instances, args.policy, not args.naive)
    began_s, processor_s = time.perf_counter(), time.process_time()
    run = simulate_workload(workload, setup, SimulationOptions(detail=False, observe_interval_s=60.0))
    wall_s, processor_s = time.perf_counter() - began_s, time.process_time() - processor_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {
        "instances": args.instances, "requests": num_requests, "policy": args.policy, "virtual_s": run.duration_s,
        "wall_s": wall_s, "processor_s": processor_s, "peak_mib": peak_mib,
        "us_per_request": wall_s / num_requests * 1e6, "events": run.config["num_events"],
        "completed": run.requests.completed, "ttft_p99_s": run.ttft_s.p99, "hash": run.config["event_log_hash"],
    }  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, instances=1000, requests=[10_000, 100_000], rate=(12.0, "requests a second, mean"), policy="drop",
        naive=(False, "one event a step"), here=(False, {"help": SUPPRESS}),
    )  # fmt: skip
    if args.here:
        print(json.dumps(measure(args, args.requests[0])))
        return
    rows = []
    for num_requests in args.requests:
        command = again("simulator", "size", "--here", "--instances", str(args.instances), "--requests",
                        str(num_requests), "--rate", str(args.rate), "--policy", args.policy)  # fmt: skip
        command += ["--naive"] * args.naive
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        rows.append(json.loads(done.stdout))
        print_block("simulator_million", {"rows": rows[-1:]})
    keep(args.json, {"rows": rows}, *VIRTUAL)
