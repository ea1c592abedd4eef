"""How long the core takes to plan one step: 256 running and 1,000 waiting requests. Prints a table, writes JSON.

    python benchmarks/planning.py [--running 256] [--waiting 1000] [--json OUT]

Timed: ``Group.next_step`` (view, policy, application of the plan), ``Group.commit``, and the encoding of the
step into the arrays that a worker gets. Decode steps, full queue, memory that binds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from evidence import DECIDING, write_result

from jettison.core.ports import StepCompleted
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group, SchedulerLimits
from jettison.live.engine.encoder import StepEncoder
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.policy.merge import StagePlan
from jettison.types import LayerRange, Request, SampledToken, SamplingParams

BLOCK_SIZE = 16
PROMPT = 256


def build(num_running: int, num_waiting: int) -> tuple[Group, StepEncoder]:
    """A group whose batch is full and whose queue is long."""
    limits = SchedulerLimits(BLOCK_SIZE, num_running * PROMPT, num_running, 100_000)
    ledger = BlockLedger(num_running * (PROMPT // BLOCK_SIZE + 40), BLOCK_SIZE)
    group = Group(0, 0, (StagePlan(0, LayerRange(0, 12)),), {0: ledger}, limits, PrefixHasher(BLOCK_SIZE, b"k"))
    rng = random.Random(0)
    for i in range(num_running + num_waiting):
        prompt = tuple(rng.randrange(256) for _ in range(PROMPT))
        params = SamplingParams(max_tokens=10_000, temperature=0.0)
        group.queues.enqueue(RequestState(Request(f"r{i}", prompt, params, i), i))
    return group, StepEncoder({0: ledger}, BLOCK_SIZE, frozenset())


def measure(num_running: int, num_waiting: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of each part, step by step, after the prefill."""
    group, encoder = build(num_running, num_waiting)
    times: dict[str, list[float]] = {"plan": [], "encode": [], "commit": []}
    for step_id in range(num_steps + 1):
        t0 = time.perf_counter()
        step = group.next_step(step_id, step_id)
        t1 = time.perf_counter()
        assert step is not None and len(step.rows) == num_running
        encoder.encode(step)
        t2 = time.perf_counter()
        group.commit(StepCompleted(step_id, [SampledToken(7)] * num_running, {}, 0), step_id)
        t3 = time.perf_counter()
        if step_id > 0:
            for name, seconds in (("plan", t1 - t0), ("encode", t2 - t1), ("commit", t3 - t2)):
                times[name].append(seconds * 1e3)
    return times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times = measure(args.running, args.waiting, args.steps)
    print(f"{args.running} running, {args.waiting} waiting, {args.steps} decode steps; milliseconds")
    print(f"{'part':8} {'median':>8} {'p90':>8} {'max':>8}")
    result = {}
    for name, values in times.items():
        p90 = statistics.quantiles(values, n=10)[-1]
        result[name] = {"median_ms": statistics.median(values), "p90_ms": p90, "max_ms": max(values)}
        print(f"{name:8} {statistics.median(values):8.3f} {p90:8.3f} {max(values):8.3f}")
    if args.json:
        write_result(args.json, {"running": args.running, "waiting": args.waiting, "parts": result}, *DECIDING)


if __name__ == "__main__":
    main()
