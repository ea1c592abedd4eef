"""What the numbers of the overload and restore policies do, in virtual time: many seeds, no noisy machine, seconds.

    python -m benchmarks overload vary [--vary overload.min_gain_s 0.2 0.5] [--vary restore.early_usage 0 0.6] ...

The core runs unchanged (``jettison.simulate``); steps, links and remaps take what the constants below say: two
instances of the model of ``traces.MODEL`` on two cores, rounded. Loads: ``burst`` is the built-in one,
at its own rate; ``conv`` and ``mixed`` are Azure's conversations, and its code arrivals with conversations' lengths
(an hour in 48 s, thinned so that the mean load is 0.4 to 0.5), where there is data. Every combination of the values
given with ``--vary`` is run on every load and seed; ratios are to recompute on the same arrivals: P99 TTFT as a
geometric mean with the worst seed, mean end to end as a mean. Above 1: dropping is better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.shared import VIRTUAL, data_dir, keep, parse, print_rows
from jettison.core.ladder.lists import parse_overload
from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.report.results import RunResult
from jettison.sim.setup import ClusterSetup, Hops, MemorySetup, setup_from_profile
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard
from jettison.workload import shaping
from jettison.workload.synthetic import generate, preset
from jettison.workload.traces import Workload, read_trace

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
KV_BLOCKS = 133
LOADS = ("conv", "mixed", "code", "burst")
MIN_BLOCKED_S = 0.05
"""``serve``'s default."""
KEEP = {"conv": 0.0185, "mixed": 0.03, "code": 0.16}
LENGTHS = {"output": 0.625, "input": 0.055}


def setup(policy: str, params: ClusterParams) -> ClusterSetup:
    """The cluster under one policy."""
    limits = SchedulerLimits(16, 256, 128, 1024, 0.01, frozenset(), False)
    if policy != "drop":
        limits = replace(limits, lookahead=replace(limits.lookahead, enabled=False))
    memory = MemorySetup.for_blocks(SHAPE, limits.block_size, KV_BLOCKS, page_bytes=65536)
    return setup_from_profile(
        SHAPE, limits, replace(params, **parse_overload(policy)._asdict()), 2, memory, PROFILE,  # type: ignore[arg-type]
        overhead_s=0.5e-3, noise=0.08, hops=Hops(3e-4, 3e-4),
    )


def loads(names: list[str], seeds: int, data: Path | None) -> Iterator[tuple[str, Workload]]:
    """Every load with every seed."""
    for name in names:
        trace = None if name == "burst" else _trace(name, data_dir(data))
        for seed in range(seeds):
            if trace is None:
                yield name, generate(preset("burst"), seed)
            else:
                yield name, shaping.thin_by_probability(trace, KEEP[name], seed)


def _trace(name: str, folder: Path) -> Workload:
    conv = read_trace(folder / "AzureLLMInferenceTrace_conv.csv.gz")
    load = conv
    if name != "conv":
        load = read_trace(folder / "AzureLLMInferenceTrace_code.csv.gz")
    if name == "mixed":
        load = shaping.swap_lengths(load, conv)
    load = shaping.scale_lengths(load, LENGTHS["output"], floor_tokens=2, input_factor=LENGTHS["input"])
    return shaping.scale_time(shaping.cap_lengths(load, 1024), 75.0)


def varied(settings: dict[str, float]) -> ClusterParams:
    """The default parameters with some values replaced: ``overload.<field>`` or ``restore.<field>``."""
    params = ClusterParams()
    params = replace(params, overload=replace(params.overload, min_blocked_s=MIN_BLOCKED_S))
    for key, value in settings.items():
        section, _, name = key.partition(".")
        params = replace(params, **{section: replace(getattr(params, section), **{name: value})})
    return params


def figures(name: str, pairs: list[tuple[RunResult, RunResult]]) -> dict[str, Any]:
    """Over the seeds of one load: (recompute, drop) of each."""
    p99 = [base.ttft_s.p99 / drop.ttft_s.p99 for base, drop in pairs if base.ttft_s.p99 and drop.ttft_s.p99]
    e2e = [base.e2e_s.mean / drop.e2e_s.mean for base, drop in pairs if base.e2e_s.mean and drop.e2e_s.mean]
    return {
        "load": name, "seeds": len(pairs), "p99_ratio": math.exp(statistics.mean(map(math.log, p99))),
        "p99_ratio_worst": min(p99), "e2e_ratio": statistics.mean(e2e),
        "recompute_p99_ttft_s": max(base.ttft_s.p99 or 0.0 for base, _ in pairs),
        "drop_p99_ttft_s": max(drop.ttft_s.p99 or 0.0 for _, drop in pairs),
        "mean_load": statistics.mean(base.config["fairness"]["mean_load"] for base, _ in pairs),
        "drops": statistics.mean(drop.events["drops"] for _, drop in pairs),
    }


def main() -> None:
    args = parse(
        __doc__, vary=(None, {"default": [], "action": "append", "nargs": "+"}),
        loads=(list(LOADS), {"choices": LOADS}), seeds=4,
        data=(Path, "folder with arrivals/ (else JETTISON_DATA, else ../shared/data)"),
    )  # fmt: skip
    met = [(name, load, _run("recompute", {}, load)) for name, load in loads(args.loads, args.seeds, args.data)]
    keys = [entry[0] for entry in args.vary]
    rows: list[dict[str, Any]] = []
    for values in product(*([float(v) for v in entry[1:]] for entry in args.vary)):
        settings = dict(zip(keys, values, strict=True))
        for name in args.loads:
            pairs = [(base, _run("drop", settings, load)) for other, load, base in met if other == name]
            rows.append(settings | figures(name, pairs))
    print_rows(rows, title="recompute over drop; above 1: dropping is better")
    keep(args.json, {"rows": rows}, *VIRTUAL)


def _run(policy: str, settings: dict[str, float], load: Workload) -> RunResult:
    return simulate_workload(load, setup(policy, varied(settings)), SimulationOptions(name=policy))
