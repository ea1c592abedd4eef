"""What an event costs the core with 10, 100 and 1,000 groups: flat in groups, linear in requests. Table and JSON.

    python benchmarks/core_scale.py [--groups 10,100,1000] [--requests 2000,8000] [--policy drop] [--json OUT]

A minimal driver in virtual time: every step takes 25 ms, transfers and layouts take fixed times, every decode is an
event of its own (a simulator may advance them together), arrivals are Poisson with the same load on each group. Times
are processor time, the driver's own included (about 4 us an event). ``ticks``: how many could decide something.
``--pressed`` gives each group too little memory for its requests.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from evidence import VIRTUAL, write_result

from jettison.core import ports
from jettison.core.cluster import ClusterCore, initial_groups
from jettison.core.ladder.lists import parse_overload
from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.policy.swapping import SwapParams
from jettison.types import (
    EMBED_SHARD,
    HEAD_SHARD,
    ModelShape,
    Request,
    SampledToken,
    SamplingParams,
    layer_shard,
)

MS = 1_000_000
STEP_NS, CALL_NS, TRANSFER_NS, TICK_NS = 25 * MS, 2 * MS, 5 * MS, 100 * MS
BLOCK_SIZE = 16
SHARD_BYTES = 450_000_000
TOKEN = SampledToken(7)


def model_shape() -> ModelShape:
    """About Qwen2.5-14B: a layer's parameters are worth 7,000 blocks of one layer."""
    shards = {layer_shard(i): SHARD_BYTES for i in range(48)} | {EMBED_SHARD: SHARD_BYTES, HEAD_SHARD: SHARD_BYTES}
    return ModelShape(48, 5120, 40, 8, 128, 13824, 152064, 2, False, shards)


@dataclass(frozen=True)
class Load:
    """What is asked of the cluster."""

    num_groups: int
    num_requests: int
    policy: str
    blocks: int
    prompt: int = 500
    output: int = 40
    per_group_s: float = 2.0


class VirtualCluster:
    """A core and pretend workers."""

    def __init__(self, load: Load) -> None:
        self.shape = model_shape()
        limits = SchedulerLimits(BLOCK_SIZE, 2048, 64, 100_000, enable_prefix_caching=False)
        params = ClusterParams(
            **parse_overload(load.policy)._asdict(), swap=SwapParams(num_host_slots=4096)  # type: ignore[arg-type]
        )
        self.full_blocks = load.blocks
        groups = initial_groups(range(load.num_groups), self.shape, static_pipeline=params.static_pipeline)
        stages = [stage for group in groups for stage in group]
        specs = {s.worker_id: LayoutSpec(self.shape.shards_for(s.layers), s.layers) for s in stages}
        capacity = {w: self.capacity(spec) for w, spec in specs.items()}
        self.core = ClusterCore(self.shape, limits, params, capacity, b"secret")
        self.versions = Counter[int]()
        self.heap: list[tuple[int, int, ports.Event]] = []
        self.sequence = 0
        self.num_events = self.num_ended = self.num_tokens = self.num_ticks = self.num_skipped = 0

    def capacity(self, spec: LayoutSpec) -> int:
        """Blocks that a layout leaves room for."""
        block = self.shape.block_bytes_per_layer(BLOCK_SIZE)
        total = self.full_blocks * self.shape.num_layers * block + self.shape.parameter_bytes
        total -= sum(self.shape.shard_bytes[s] for s in spec.shards)
        total -= sum(len(r.layers) * len(r.block_ids) * block for r in spec.retained)
        return total // (len(spec.kv_layers) * block)

    def at(self, time_ns: int, event: ports.Event) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_ns, self.sequence, event))

    def run(self, load: Load, seed: int = 0) -> None:
        """All requests, to their end."""
        rng = random.Random(seed)
        prompt, now_ns = (1,) * load.prompt, 0
        params = SamplingParams(max_tokens=load.output, temperature=0.0, ignore_eos=True)
        num_left = load.num_requests
        next_tick_ns, next_arrival_ns = TICK_NS, 0
        while self.num_ended < load.num_requests:
            if num_left and (not self.heap or next_arrival_ns <= self.heap[0][0]):
                now_ns, event = next_arrival_ns, ports.Arrived(Request(f"r{num_left}", prompt, params, next_arrival_ns))
                num_left -= 1
                next_arrival_ns += round(rng.expovariate(load.per_group_s * load.num_groups) * 1e9)
            else:
                now_ns, _, event = heapq.heappop(self.heap)
            while next_tick_ns <= now_ns:
                next_tick_ns = self.tick(next_tick_ns, now_ns)
            self.handle(event, now_ns)

    def tick(self, tick_ns: int, until_ns: int) -> int:
        """The ticks that come before an event, or the first of them if it matters; when the next one is due."""
        if self.core.awaits_tick:
            self.num_ticks += 1
            self.handle(ports.Tick(), tick_ns)
            return tick_ns + TICK_NS
        times = range(tick_ns, until_ns + 1, TICK_NS)
        self.num_skipped += len(times)
        self.core.skip_ticks(times)
        return times[-1] + TICK_NS

    def handle(self, event: ports.Event, now_ns: int) -> None:
        self.num_events += 1
        for action in self.core.handle(event, now_ns):
            self.carry_out(action, now_ns)

    def carry_out(self, action: ports.Action, now_ns: int) -> None:
        match action:
            case ports.RunStep():
                tokens = [TOKEN for row in action.rows if row.samples]
                self.at(now_ns + STEP_NS * len(action.stages), ports.StepCompleted(action.step_id, tokens, {}, STEP_NS))
            case ports.EmitTokens():
                self.num_tokens += len(action.tokens)
            case ports.Emit():
                self.num_tokens += len(action.tokens)
                self.num_ended += action.finish_reason is not None
            case ports.OfferLayout():
                capacity = self.capacity(action.spec)
                offer = LayoutOffer(self.versions[action.worker_id], capacity, capacity)
                self.at(now_ns + CALL_NS, ports.LayoutOffered(action.worker_id, action.call_id, offer))
            case ports.ApplyLayout():
                self.versions[action.worker_id] += 1
                missing = action.spec.shards - self.core.state.workers[action.worker_id].layout.shards
                version, capacity = self.versions[action.worker_id], self.capacity(action.spec)
                result = LayoutResult(version, capacity, 0, 1, CALL_NS, frozenset(), frozenset(missing))
                self.at(now_ns + CALL_NS, ports.LayoutApplied(action.worker_id, action.call_id, result))
            case ports.SendKV() | ports.SendShard():
                self.at(now_ns + TRANSFER_NS, ports.TransferEnded(action.transfer_id, True, 1_000_000, TRANSFER_NS))
            case ports.LoadShard():
                self.at(now_ns + TRANSFER_NS, ports.ShardLoaded(action.worker_id, action.call_id))


def measure(load: Load) -> dict[str, object]:
    """One run, in this process."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cluster = VirtualCluster(load)
    began = time.process_time()
    cluster.run(load)
    cpu_s = time.process_time() - began
    counters = cluster.core.state.counters
    return {
        "groups": load.num_groups,
        "requests": load.num_requests,
        "events": cluster.num_events,
        "tokens": cluster.num_tokens,
        "cpu_s": cpu_s,
        "us_per_event": cpu_s * 1e6 / cluster.num_events,
        "us_per_request": cpu_s * 1e6 / load.num_requests,
        "ticks": cluster.num_ticks,
        "ticks_skipped": cluster.num_skipped,
        "memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024,
        "drops": counters.num_drops,
        "restores": counters.num_restores,
        "migrations": counters.num_migrations,
        "swapped_blocks": counters.swapped_out_blocks,
    }


def main() -> None:
    """Command line; each run in a process of its own, for its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="10,100,1000")
    parser.add_argument("--requests", default="2000,8000")
    parser.add_argument("--policy", default="drop", choices=["drop", "recompute", "swap", "migrate", "pipeline"])
    parser.add_argument("--pressed", action="store_true", help="memory for two requests a group")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    groups, requests = ([int(n) for n in text.split(",")] for text in (args.groups, args.requests))
    if args.one:
        blocks = 75 if args.pressed else 4000
        print(json.dumps(measure(Load(groups[0], requests[0], args.policy, blocks))))
        return
    rows = []
    columns = ("groups", "requests", "events", "us_per_event", "us_per_request", "cpu_s", "memory_mib", "drops")
    print(f"policy {args.policy}{', pressed' if args.pressed else ''}")
    print(" ".join(f"{name:>14}" for name in columns))
    for num_groups in groups:
        for num_requests in requests:
            command = [sys.executable, __file__, "--one", f"--groups={num_groups}", f"--requests={num_requests}"]
            command += [f"--policy={args.policy}", *(["--pressed"] if args.pressed else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            rows.append(row)
            print(" ".join(f"{row[n]:>14.1f}" if isinstance(row[n], float) else f"{row[n]:>14}" for n in columns))
    if args.json:
        write_result(args.json, {"policy": args.policy, "pressed": args.pressed, "rows": rows}, *VIRTUAL)


if __name__ == "__main__":
    main()
