"""`jettison profile` on one card, how well it predicts steps, and a simulation from it beside a live run, with targets.

    python3 -m benchmarks gpu foreseen --out gpu_foreseen.json    # two instances of a 7B shape, a minute and a half
    python3 -m benchmarks gpu foreseen --device cpu --tiny        # the same on a processor, at toy sizes

The profile is a quick one, with all instances at work where it asks what they cost each other. Errors are on shapes
that no model was fitted to. The live run is a seeded load without an overload, twice: what the two differ by is the
least that a simulation can be asked for. The simulation takes arrivals and lengths of the first, and the profile.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.engine import config_for
from benchmarks.gpu.replay import PolicyEngine, at_once, replay
from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import SHAPES, TINY, folder_of
from jettison.config import EngineConfig
from jettison.cost.shapes import ShapeKind
from jettison.live.profile.measure import FULL_MODEL, NO_PREFIX, ProfileResult, run_profile
from jettison.profiles import save_profile
from jettison.report.results import RunResult
from jettison.simulate.counterfactual import counterfactual_runs
from jettison.simulate.validation import METRICS
from jettison.workload.rows import Workload
from jettison.workload.synthetic import Lengths, SyntheticSpec, generate

MOST_ERROR, MOST_MEAN, MOST_P99 = 0.05, 0.10, 0.20
POLICY = "recompute"
"""Nothing is preempted: no rung matters, and none has to be simulated."""


def config_of(models: Path, options: argparse.Namespace, **more: object) -> EngineConfig:
    """Of the profile, and of what is served with it."""
    settings: dict[str, object] = {
        "instances": 2, "memory": "24GiB", "max_num_batched_tokens": 2048, "overload": POLICY, "log_level": "warning",
        "enable_prefix_caching": False,
    }  # fmt: skip
    config = config_for("7b", models, options, **settings)
    return EngineConfig.resolve(**config.flat() | ({"num_threads": 1} if options.tiny else {}) | more)


def tell_errors(profile: ProfileResult, results: Results) -> None:
    """Of steps without a prefix, with one, and all; and what a model that knows no prefix makes of them."""
    without, behind = profile.errors(FULL_MODEL, ShapeKind.PREFILL), profile.errors(FULL_MODEL, ShapeKind.PREFIX)
    for name, errors in (("prefill", without), ("prefill with a prefix", behind), ("all", profile.errors(FULL_MODEL))):
        if errors is not None:
            results.tell(f"error of steps held out, {name}", errors.mean, MOST_ERROR, errors.mean <= MOST_ERROR)
            results.tell(f"its maximum, {name}, of {errors.num_samples}", errors.max)
    for sample in profile.held_out():
        shape, ms = sample.shape, 1e3 * sample.seconds
        told = f"{len(shape.chunks)} x {shape.num_tokens} behind {shape.num_kv_tokens} in {shape.num_layers} layers"
        results.tell(f"foreseen over measured, {told}, {ms:.2f} ms",
                     profile.models[FULL_MODEL].step_cost_s(shape) / sample.seconds)  # fmt: skip
    if (blind := profile.errors(NO_PREFIX, ShapeKind.PREFIX)) is not None:
        results.tell("error of a model without prefixes, prefill with a prefix", blind.mean)
    stored = profile.stored.profile
    results.tell("a step while all instances compute, of alone", stored.contention)
    results.tell("link, GB/s", stored.link_bytes_per_s / 1e9)
    results.tell("hop to the controller, us", 1e6 * (stored.hop_s or 0.0))


def load_of(options: argparse.Namespace) -> Workload:
    """No overload: what is simulated are steps, batches and queues."""
    prompt, output, rate = (16, 48, 20.0) if options.tiny else (400, 160, options.rate)
    lengths = Lengths(prompt, 0.5, cap=4 * prompt), Lengths(output, 0.5, cap=3 * output)
    return generate(SyntheticSpec("steady", rate, options.seconds, *lengths), 0)


async def serve(config: EngineConfig, load: Workload) -> tuple[RunResult, RunResult]:
    """The load twice."""
    engine = PolicyEngine(config)
    try:
        await engine.start()
        await replay(engine, at_once([(64, 8)] * 16, "warm"), "warm", 1)
        runs = [await replay(engine, load, name) for name in ("live", "live again")]
        for run in runs:
            run.config |= {"policy": POLICY, "deployment": engine.deployment_document()}
        return runs[0], runs[1]
    finally:
        await engine.close()


def tell_differences(live: RunResult, again: RunResult, simulated: RunResult, results: Results) -> None:
    """Relative, of what a run has."""
    for metric in METRICS:
        ours, other, foretold = (metric.value(run) for run in (live, again, simulated))
        if metric.is_count or not ours or other is None or foretold is None:
            continue
        most = MOST_P99 if metric.name.endswith("P99") else MOST_MEAN
        off = foretold / ours - 1.0
        results.tell(f"{metric.name}, live", ours)
        results.tell(f"{metric.name}, simulated over live", off, most, abs(off) <= most)
        results.tell(f"{metric.name}, live again over live", other / ours - 1.0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_foreseen.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--seconds", type=float, default=6.0, help="of the load, which is replayed twice")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--profile-seconds", type=float, default=6.0, help="about so long steps are measured")
    options = parser.parse_args()
    results, begun = Results(options.out), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for shape, layout in (TINY if options.tiny else SHAPES).items():
            layout.write(folder_of(models, shape))
        profile = run_profile(config_of(models, options, profile="none"), quick=True, budget_s=options.profile_seconds)
        results.tell("profile, s", time.monotonic() - begun)
        tell_errors(profile, results)
        path = models / "profile.json"
        save_profile(path, profile.stored)
        live, again = asyncio.run(serve(config_of(models, options, profile=str(path)), load_of(options)))
        results.tell("requests", live.requests.submitted)
        results.tell("requests not answered", live.requests.unanswered, 0, live.requests.unanswered == 0)
        (simulated,) = counterfactual_runs(live, [POLICY], profile=path, num_processes=1).values()
        tell_differences(live, again, simulated, results)
        results.tell("seconds", time.monotonic() - begun)
    return 0
