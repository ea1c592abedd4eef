"""What a step takes alone, and while a worker's thread copies KV to its host pool, or back, beside it.

    python -m benchmarks chat copies --seconds 20 --json beside.json

A device with ``--layers`` layers of ``--hidden`` (random weights, bfloat16, ``--threads`` compute threads) runs the
same step alone and beside copies, in turns: which comes first changes from pair to pair. Steps: a batch of decodes, and
a chunk of a prompt. Columns: the step alone, beside copies, and the ratio of the two with the distance between its
quartiles; bytes copied beside a step, the rate reached, and what a KiB adds to the step. The first row of each kind has
no copies in either half: what the machine does by itself.

The copying thread is at work all the time: a server copies what a step may cost (``cost.predictor``). Absolute times
belong to one machine on one day.

Then victims, in virtual time with the core's own time measured: Llama-2-7B on an A100 serves chat beside a batch that
fills its memory, with checkpoints and without. Columns: requests that gave their blocks up, those of them with a
checkpoint, the controller's time for one that had a checkpoint (P99), and tokens that were computed again.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.shared import SERVING, Namespace, Row, keep, machine, parse, print_block, print_verdicts, settings_of
from jettison.config import EngineConfig
from jettison.core.requests import RequestState
from jettison.cost.model import StepShape
from jettison.device.model.create import create_model
from jettison.device.worker import DeviceWorker
from jettison.live.engine.assembly import assemble
from jettison.live.profile.beside_probe import BesidePair, BesideSpeed, measure_pairs, shapes_beside
from jettison.live.profile.measure import make_profile_device, shape_limits
from jettison.live.profile.step_timer import StepTimer
from jettison.sim.cluster import SimulatedCluster
from jettison.simulate.machines import cluster_setup, resolve_machine
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import parse_spec
from jettison.simulate.workloads import build_pool, build_workload

MIB = 1 << 20
MOST_FREE_MS = 1.0


def open_device(folder: Path, args: Namespace) -> tuple[DeviceWorker, StepTimer, list[StepShape]]:
    create_model(
        folder, arch="qwen3", layers=args.layers, hidden=args.hidden, heads=args.hidden // 64,
        kv_heads=args.hidden // 64, max_position_embeddings=2048,
    )
    config = EngineConfig.resolve(
        model=str(folder), memory="2GiB", num_threads=args.threads, dtype="bfloat16", max_num_batched_tokens=256,
        max_num_seqs=16,
    )
    assembly = assemble(config)
    limits = shape_limits(assembly)
    device = make_profile_device(assembly, limits)
    device.start()
    timer = StepTimer(device, limits)
    timer.prepare()
    return device, timer, shapes_beside(limits)


def alone_pairs(timer: StepTimer, shape: StepShape, num: int) -> list[BesidePair]:
    """Neighbours that both run alone."""
    return [BesidePair(timer.time_s(shape), timer.time_s(shape), 0) for _ in range(num)]


def row_of(kind: str, copies: str, pairs: list[BesidePair]) -> Row:
    ratios = [pair.beside_s / pair.alone_s for pair in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    speed = BesideSpeed.of(pairs)
    return {
        "step": kind, "copies": copies, "num_pairs": len(pairs),
        "alone_ms": 1e3 * statistics.median(pair.alone_s for pair in pairs),
        "beside_ms": 1e3 * statistics.median(pair.beside_s for pair in pairs), "ratio": middle,
        "ratio_spread": high - low, "step_bytes": statistics.median(pair.num_bytes for pair in pairs),
        "bytes_per_s": speed.bytes_per_s if speed else 0.0, "byte_s": speed.byte_s if speed else None,
        "pairs": [pair._asdict() for pair in pairs],
    }  # fmt: skip


def measure(args: Namespace) -> list[Row]:
    kinds = ("decodes", "prompt")
    with tempfile.TemporaryDirectory(prefix="jettison-beside-") as folder:
        device, timer, shapes = open_device(Path(folder) / "model", args)
        try:
            found = {
                copies: measure_pairs(device, timer, shapes, budget_s=args.seconds / 2, to_host=copies == "out")
                for copies in ("out", "in")
            }
            rows = []
            for index, kind in enumerate(kinds):
                noise = alone_pairs(timer, shapes[index], len(found["out"][index]))
                rows.append(row_of(kind, "none", noise))
                rows += [row_of(kind, copies, pairs[index]) for copies, pairs in found.items()]
        finally:
            device.close()
    return rows


def serve_beside_batch(mode: str, seconds: float) -> Row:
    """One mode of ``--offline``: who gave blocks up, in what time of this process, and what was computed again."""
    spec = parse_spec({
        "name": "victims", "cluster": {"preset": "conserve"},
        "workload": {
            "builtin": "azure-conv-like", "duration_s": seconds, "rate_scale": 0.3,
            "offline": {"lengths": "longbench", "unfinished": 64, "max_input_tokens": 3500},
        },
        "variants": [{"policy": "recompute", "settings": {
            "offline": mode, "host_memory": "64GiB", "slo_ttft_ms": 1500, "slo_tpot_ms": 110, "max_model_len": 16384,
        }}],
    })  # fmt: skip
    machine = resolve_machine(spec.cluster, spec.settings)
    taken_s: list[float] = []

    def watch(cluster: SimulatedCluster) -> None:
        counters = cluster.core.state.counters
        for group in cluster.core.groups.values():  # no rung of this policy makes others
            timed = _timed(group.preempt, lambda: counters.checkpoint_frees, taken_s)
            group.preempt = timed  # type: ignore[method-assign]

    options = SimulationOptions(name=mode, pool=build_pool(spec.workload, 0), on_start=watch)
    setup = cluster_setup(machine, spec, spec.variants[0], 0)
    events = simulate_workload(build_workload(spec.workload, 0), setup, options).events
    return {
        "offline": mode, "preemptions": events["preemptions"], "checkpoint_frees": events["checkpoint_frees"],
        **{f"free_p{q}_ms": 1e3 * float(np.percentile(taken_s, q)) if taken_s else None for q in (50, 99)},
        "recomputed_tokens": events["recomputed_tokens"],
    }


def _timed(
    preempt: Callable[[RequestState], None], num_freed: Callable[[], int], taken_s: list[float]
) -> Callable[[RequestState], None]:
    """Notes what it takes where a checkpoint was there."""

    def timed(state: RequestState) -> None:
        before, began_s = num_freed(), time.perf_counter()
        preempt(state)
        if num_freed() > before:
            taken_s.append(time.perf_counter() - began_s)

    return timed


def judge_victims(with_copies: Row, without: Row) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    free_ms, again = with_copies["free_p99_ms"], (with_copies["recomputed_tokens"], without["recomputed_tokens"])
    return [
        (
            free_ms is not None and free_ms < MOST_FREE_MS,
            f"a victim is freed in {free_ms} ms (P99; median {with_copies['free_p50_ms']}), {MOST_FREE_MS:g} allowed",
        ),
        (again[0] < again[1], f"{again[0]} tokens computed again with checkpoints, {again[1]} without"),
    ]


def main() -> None:
    args = parse(
        __doc__, layers=12, hidden=768, threads=(1, "compute threads"),
        seconds=(20.0, "about how long steps are measured"),
        virtual_seconds=(120.0, "of the chat whose victims are looked at"),
    )  # fmt: skip
    rows = measure(args)
    victims = [serve_beside_batch(mode, args.virtual_seconds) for mode in ("harvest", "scheduler")]
    print_block("beside", {"rows": rows, "victims": victims})
    found = {"rows": rows, "victims": victims, "verdicts": print_verdicts(judge_victims(*victims))}
    setting = settings_of(args) | {"machine": machine()}
    keep(args.json, {"setting": setting, **found}, *SERVING, "sim", "simulate", "workload")
