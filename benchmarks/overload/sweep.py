"""Does the ladder decide well? Kinds of clusters and bursts in virtual time: against recompute, and against an oracle.

    python -m benchmarks overload sweep [--every 12] [--seeds 3] [--only rules] [--beside OLD.json] [--json OUT]
    python -m benchmarks overload sweep --seeds 1 --first-seed 1 --more SEED_0.json --json OUT

A cell is a number of instances, a share of memory that parameters take, a burst and a mix of lengths. At its rate
without the burst requests would hold half of the undropped KV capacity, or need half of the compute, whichever is
less; the burst comes on top. Each cell and seed meets the same arrivals three times:

- *recompute*: the memory as it is, nothing is dropped;
- *oracle*: recompute with the memory that dropping one copy in two would give, from the first second, without a
  pipeline, an exchange or a decision: the most that dropping could bring;
- *rules*: what this commit decides.

``--beside`` takes the file of another commit's rules (same cells, seeds and arrivals), and says which decides better.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.shared import VIRTUAL, Row, keep, parse, print_block, print_rows, say
from jettison.core.ladder.lists import parse_overload
from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.memory.kvtransfers import ExchangeMode
from jettison.policy.steadystate import Room, Traffic, steady_rows, steady_step
from jettison.report.results import RunResult
from jettison.sim.setup import ClusterSetup, Hops, MemorySetup, setup_from_profile
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec, generate
from jettison.workload.traces import Workload

LAYERS = 12
SHAPE = ModelShape(
    LAYERS, 384, 6, 2, 64, 1024, 260, 4, False,
    {layer_shard(i): 6_400_000 for i in range(LAYERS)} | {EMBED_SHARD: 400_000, HEAD_SHARD: 400_000},
)  # fmt: skip
COST = CostModel(
    num_layers=LAYERS, pair_layer_s=2e-9, kv_token_layer_s=1e-8, token_layer_s=1e-5, layer_s=6e-4, step_s=2.5e-3,
    entry_s=0.0, entry_token_s=0.0, head_s=5e-4, sample_s=2e-5,
)  # fmt: skip
"""A decode step of 8 takes 12 ms, 16 in a pipeline of two; a prompt token 0.12 ms."""
PROFILE = HardwareProfile(COST, 2e9, 1e-4, 2e-3, 0.0, 4e9, 1e9, ())
CONTENDERS = ("recompute", "oracle", "rules")
INSTANCES = (2, 3, 4, 8)
SHARES = (0.35, 0.5, 0.7, 0.85)
"""Of an instance's memory: parameters."""
BURSTS: dict[str, tuple[Burst, ...]] = {"none": (), "3x": (Burst(10.0, 5.0, 3.0),), "7x": (Burst(10.0, 3.0, 7.0),)}
MIXES = {
    "chat": (Lengths(64, 0.5, 300), Lengths(200, 0.5, 700)),
    "summaries": (Lengths(300, 0.6, 800), Lengths(40, 0.6, 200)),
    "short": (Lengths(60, 0.8, 400), Lengths(60, 0.8, 400)),
    "mixed": (Lengths(90, 1.1, 400), Lengths(110, 1.0, 600)),
}
"""Prompts and answers: medians, sigmas of the logarithm, largest."""
DURATION_S = 24.0
MEAN_LOAD = 0.5
"""Of KV capacity, and of compute, without the burst."""
LIMITS = SchedulerLimits(16, 256, 128, 1024, 0.01, frozenset(), False)
PAGE_BYTES = 65536
TOKEN_BYTES = SHAPE.num_layers * SHAPE.block_bytes_per_layer(LIMITS.block_size) // LIMITS.block_size
LEAST_OUTCOME_S = 1.0
"""A forecast that another drop overtook sooner is not compared."""
BINDS = 2.0
"""Memory binds where recompute's P99 TTFT is at least so many times the oracle's."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of cluster and load."""

    instances: int
    share: float
    burst: str
    mix: str

    @property
    def kv_tokens(self) -> float:
        """KV tokens of an instance beside all parameters."""
        return SHAPE.parameter_bytes * (1.0 / self.share - 1.0) / TOKEN_BYTES

    @property
    def spare_tokens(self) -> float:
        """KV tokens that each instance gains where as many copies are dropped as pairs can be formed."""
        return SHAPE.parameter_bytes / TOKEN_BYTES * (self.instances // 2) / self.instances

    def as_row(self) -> Row:
        """For the file."""
        return {"instances": self.instances, "share": self.share, "burst": self.burst, "mix": self.mix}


CELLS = tuple(
    random.Random(0).sample([Cell(*values) for values in product(INSTANCES, SHARES, BURSTS, MIXES)], k=192)
)
"""All of them, shuffled: any first part of them is a fair sample."""


def rate_per_s(cell: Cell) -> float:
    """Requests a second of the whole cell, without the burst.

    By Little's law and the cost model: so many rows that half of the memory is held, or so many requests as half of
    what full steps serve, whichever is less.
    """
    prompt, output = (_mean(lengths) for lengths in MIXES[cell.mix])
    times = StepTimePredictor(SHAPE.num_layers, COST)
    rows = max(1.0, MEAN_LOAD * cell.kv_tokens / (prompt + output / 2))
    traffic = Traffic(1.0, prompt, output)
    step_s = times.predict_s(steady_step(traffic, Room(rows * (prompt + output / 2), rows)))
    assert step_s is not None, "the cost model is known"
    by_memory = rows / (output * step_s)
    full = Room(cell.kv_tokens, LIMITS.max_num_seqs)
    full_step_s = times.predict_s(steady_step(traffic, full))
    assert full_step_s is not None, "the cost model is known"
    served_per_s = steady_rows(traffic, full) / (max(1.0, output) * full_step_s)
    return cell.instances * min(by_memory, MEAN_LOAD * served_per_s)


def _mean(lengths: Lengths) -> float:
    return float(lengths.draw(np.random.default_rng(0), 20_000).mean())


def load_of(cell: Cell, seed: int) -> Workload:
    """The cell's arrivals."""
    prompt, output = MIXES[cell.mix]
    spec = SyntheticSpec(cell.mix, rate_per_s(cell), DURATION_S, prompt, output, bursts=BURSTS[cell.burst])
    return generate(spec, seed)


def setup(
    cell: Cell, contender: str, seed: int, exchange: ExchangeMode = ExchangeMode.AUTO,
    profile: HardwareProfile = PROFILE,
) -> ClusterSetup:
    """The cell's cluster under a contender."""
    tokens = cell.kv_tokens + (cell.spare_tokens if contender == "oracle" else 0.0)
    limits, policy = LIMITS, "drop" if contender == "rules" else "recompute"
    if policy != "drop":
        limits = replace(limits, lookahead=replace(limits.lookahead, enabled=False))
    memory = MemorySetup.for_blocks(SHAPE, limits.block_size, int(tokens / limits.block_size), page_bytes=PAGE_BYTES)
    params = replace(ClusterParams(profile=profile, exchange=exchange), **parse_overload(policy)._asdict())
    return setup_from_profile(
        SHAPE, limits, params, cell.instances, memory, profile, overhead_s=0.5e-3, noise=0.08, seed=seed,
        hops=Hops(3e-4, 3e-4),
    )


def run(cell: Cell, contender: str, seed: int) -> Row:
    """The figures of one run."""
    options = SimulationOptions(name=contender, detail=False)
    result = simulate_workload(load_of(cell, seed), setup(cell, contender, seed), options)
    return cell.as_row() | {"contender": contender, "seed": seed} | figures(result)


def figures(result: RunResult) -> Row:
    """Of one run: times in seconds. ``forecast_errors``: of each forecast that memory is short by, over what came."""
    outcomes = [
        e for e in result.log("forecast_outcome")
        if e["after_s"] >= LEAST_OUTCOME_S and e.get("decision") in ("drop_decided", "wake_decided")
    ]
    return {
        "forecast_errors": [abs(e["foreseen_request_s"] / e["seen_request_s"] - 1.0) for e in outcomes],
        "requests": result.requests.submitted, "unanswered": result.requests.unanswered,
        "p50_ttft_s": result.ttft_s.p50, "p99_ttft_s": result.ttft_s.p99, "mean_ttft_s": result.ttft_s.mean,
        "mean_e2e_s": result.e2e_s.mean, "p50_tpot_s": result.tpot_s.p50, "drops": result.events.get("drops", 0),
    }  # fmt: skip


# --- what they come to


def medians(rows: Sequence[Row], cell: Cell, contender: str) -> dict[str, float]:
    """Of a contender's runs in a cell, over the seeds."""
    own = [row for row in rows if row["contender"] == contender and cell.as_row().items() <= row.items()]
    keys = ("p99_ttft_s", "mean_ttft_s", "mean_e2e_s", "p50_tpot_s", "drops")
    return {key: statistics.median(row[key] for row in own) for key in keys} if own else {}


def verdict(cell: Cell, recompute: dict[str, float], oracle: dict[str, float], rules: dict[str, float]) -> Row:
    """How the rules did in one cell. ``share_of_gain``: of the oracle's gain in the logarithm of P99 TTFT; None where
    memory does not bind. Drops are needless where requests wait and last no shorter than under recompute, by the
    forecast's own currency."""
    spent = [each["mean_e2e_s"] + each["mean_ttft_s"] for each in (rules, recompute)]
    possible = math.log(recompute["p99_ttft_s"] / oracle["p99_ttft_s"])
    found = math.log(recompute["p99_ttft_s"] / rules["p99_ttft_s"])
    return cell.as_row() | {
        "recompute_p99_ttft_s": recompute["p99_ttft_s"], "oracle_p99_ttft_s": oracle["p99_ttft_s"],
        "rules_p99_ttft_s": rules["p99_ttft_s"], "e2e_ratio": rules["mean_e2e_s"] / recompute["mean_e2e_s"],
        "share_of_gain": found / possible if possible >= math.log(BINDS) else None, "drops": rules["drops"],
        "needless": rules["drops"] if spent[0] >= spent[1] else 0,
    }  # fmt: skip


def verdicts(rows: Sequence[Row], rules: Sequence[Row]) -> list[Row]:
    """Of all cells that have all three contenders' runs."""
    made: list[Row] = []
    for cell in CELLS:
        found = medians(rows, cell, "recompute"), medians(rows, cell, "oracle"), medians(rules, cell, "rules")
        if all(found):
            made.append(verdict(cell, *found))
    return made


def summary(cells: Sequence[Row], rules: Sequence[Row]) -> Row:
    """What all cells come to. ``rules``: the runs of the rules in them."""
    errors = [error for row in rules for error in row.get("forecast_errors", ())]
    bound = [row["share_of_gain"] for row in cells if row["share_of_gain"] is not None]
    slower = [row["e2e_ratio"] for row in cells]
    return {
        "cells": len(cells), "memory_binds": len(bound),
        "half_of_gain": sum(share >= 0.5 for share in bound) / len(bound) if bound else None,
        "median_share_of_gain": statistics.median(bound) if bound else None,
        "slower_than_5_percent": sum(ratio > 1.05 for ratio in slower), "worst_e2e_ratio": max(slower),
        "median_forecast_error": statistics.median(errors) if errors else None,
        "needless_drops": sum(row["needless"] for row in cells), "drops": sum(row["drops"] for row in cells),
    }  # fmt: skip


def runs(
    cells: Iterable[Cell], contenders: Sequence[str], seeds: Iterable[int], processes: int,
    on_rows: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """All of them, the largest clusters first, in so many processes. ``on_rows``: what there is, again and again."""
    jobs = [(cell, contender, seed) for cell in cells for contender in contenders for seed in seeds]
    jobs.sort(key=lambda job: (job[2], -job[0].instances / job[0].share))
    with ProcessPoolExecutor(processes) as pool:
        rows: list[Row] = []
        for row in pool.map(run, *zip(*jobs, strict=True)):
            rows.append(row)
            if len(rows) % 20 == 0:
                say(f"{len(rows)} of {len(jobs)} runs")
                on_rows(rows)
    return rows


def main() -> None:
    args = parse(
        __doc__, every=(1, "of so many cells one"), seeds=3, processes=2,
        first_seed=(0, "where an earlier run of this commit has the seeds before it, which --more adds"),
        more=(Path, "a file of this commit: its runs are added"),
        only=(list(CONTENDERS), {"choices": CONTENDERS}),
        beside=(Path, "a file of another commit: its runs of contenders that are not run now, and its rules"),
    )  # fmt: skip
    earlier: list[Row] = [] if args.more is None else json.loads(args.more.read_text())["rows"]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = earlier + runs(
        CELLS[: len(CELLS) // args.every], args.only, seeds, args.processes,
        lambda rows: keep(args.json, {"rows": earlier + rows}, *VIRTUAL),
    )
    before: list[Row] = [] if args.beside is None else json.loads(args.beside.read_text())["rows"]
    shared = rows + [row for row in before if row["contender"] not in args.only]
    found, document = verdicts(shared, rows), {"rows": rows}
    keep(args.json, document, *VIRTUAL)
    print_rows(found, title="rules against recompute and the oracle, medians over the seeds")
    totals = {"now": summary(found, rows)} if found else {}
    if found_before := verdicts(shared, before):
        totals["beside"] = summary(found_before, before)
    print_block("overload_sweep", document | totals)
    keep(args.json, document | totals, *VIRTUAL)
