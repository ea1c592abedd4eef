"""Bubbles and throughput of a pipeline with and without lookahead (KunServe v3 section 4.3, Fig. 14).

    python benchmarks/lookahead.py --stages 2 4 --json lookahead.json

    python benchmarks/lookahead.py --in-flight 8 --json lookahead_steady.json

Live: real worker processes, their layers dropped and merged into one pipeline, one thread each. Both variants have
workers of their own, started together and asked in turns with the same requests, so that what drifts on a shared
machine hits both. Lengths are LongBench-like (KunServe: 5.9K tokens in, 499 out), scaled down with the model; requests
come in bursts, as fast as the client can send them, or (``--in-flight``) one for each that ends: then there is never a
long queue to divide, and what arrives has to be fitted in among decodes.

Bubble share is measured in the workers: time a stage stood still while the pipeline had work, over that and the time
it computed. With more stages than cores a stage that waits for its turn on a core counts as computing: shares are then
lower bounds, and throughput is what the cores give.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from evidence import SERVING, write_result

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.types import Request, SamplingParams

VARIANTS = ("off", "on")
PAPER = {"bubble_share": {"off": 0.219, "on": 0.083}, "throughput_gain": 1.20}
LONGBENCH_TOKENS = (5_900, 499)
"""Mean prompt and output of KunServe's LongBench runs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, and how long."""

    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class RoundResult:
    """One replay of the requests by one variant."""

    burst_bubble_share: float
    """Until the last request has its first token: while there is something to look ahead at."""
    bubble_share: float
    """Until the last request has ended: decodes alone at the end."""
    bubble_share_by_stage: list[float]
    tokens_per_s: float
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    num_steps: int


def make_requests(num: int, scale: float, context: int, num_bursts: int, gap_s: float, seed: int) -> list[Asked]:
    """Bursts of requests with log-normal lengths whose means are the paper's, times ``scale``."""
    rng = np.random.default_rng(seed)
    prompt_mean, output_mean = (scale * tokens for tokens in LONGBENCH_TOKENS)

    def lengths(mean: float, sigma: float, cap: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
        return [int(x) for x in np.clip(np.rint(drawn), 2, cap)]

    prompts, outputs = lengths(prompt_mean, 0.8, context * 3 // 4), lengths(output_mean, 0.5, context // 8)
    per_burst = -(-num // num_bursts)
    return [Asked(i // per_burst * gap_s, p, o) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]


class Pipeline:
    """An engine whose instances are merged into one group of ``num_stages``."""

    def __init__(self, config: EngineConfig, num_stages: int) -> None:
        self.engine = Engine(config)
        self._num_stages = num_stages
        self._num_asked = 0
        self._num_prefilling = 0
        self._at_last_first_token: list[tuple[float, float]] = []

    async def start(self, cores: Sequence[int]) -> None:
        """Start the workers, bind each to a core, and merge until one group is left."""
        await self.engine.start()
        # Where compute binds the engine would rather split again; here the pipeline itself is measured.
        self.engine.core.reconfigure(replace(self.engine.core.params, auto_restore=False))
        for worker in self.engine.snapshot().workers:
            os.sched_setaffinity(worker.pid, {cores[worker.worker_id % len(cores)]})
        for _ in range(200):
            if len(self.engine.core.groups) == 1:
                return
            self.engine.orders.request_drop()
            await asyncio.sleep(0.05)
        raise RuntimeError("the groups did not merge")

    async def replay(self, asked: Sequence[Asked], vocab_size: int, in_flight: int | None = None) -> RoundResult:
        """All requests, to their ends; at most ``in_flight`` at a time."""
        before = self._stage_times()
        group = next(iter(self.engine.core.groups.values()))
        steps_before = group.counters.num_steps
        self._num_prefilling = len(asked)
        started = time.monotonic()
        places = asyncio.Semaphore(in_flight or len(asked))
        ends = await asyncio.gather(*(self._ask(a, started, places, vocab_size) for a in asked))
        seconds = time.monotonic() - started
        after = self._stage_times()
        tokens = sum(a.num_prompt + a.num_output for a in asked)
        ttft, tpot = [e[0] for e in ends], [e[1] for e in ends]
        return RoundResult(
            bubble_share(before, self._at_last_first_token), bubble_share(before, after),
            [bubble_share([b], [a]) for b, a in zip(before, after, strict=True)], tokens / seconds, seconds,
            float(np.percentile(ttft, 50)), float(np.percentile(ttft, 99)),
            float(np.percentile(tpot, 50)), float(np.percentile(tpot, 99)),
            group.counters.num_steps - steps_before,
        )

    def _stage_times(self) -> list[tuple[float, float]]:
        """(busy, bubble) seconds of each worker so far."""
        workers = self.engine.snapshot().workers
        return [(w.stage_busy_seconds, w.stage_bubble_seconds) for w in workers]

    async def _ask(
        self, asked: Asked, started: float, places: asyncio.Semaphore, vocab_size: int
    ) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds, once there is a place."""
        await asyncio.sleep(max(0.0, started + asked.at_s - time.monotonic()))
        async with places:
            return await self._stream(asked, vocab_size)

    async def _stream(self, asked: Asked, vocab_size: int) -> tuple[float, float]:
        self._num_asked += 1
        rng = np.random.default_rng(self._num_asked)  # no prompt twice: the prefix cache must not help
        prompt = tuple(int(t) for t in rng.integers(3, vocab_size, asked.num_prompt))
        params = SamplingParams(max_tokens=asked.num_output, temperature=0.0, ignore_eos=True)
        sent = time.monotonic()
        first = last = sent
        request = Request(f"b{self._num_asked}", prompt, params, time.monotonic_ns())
        num_tokens = 0
        async for event in self.engine.submit(request):
            if event.error is not None:
                raise RuntimeError(event.error)
            if event.tokens:
                last = time.monotonic()
                if num_tokens == 0:
                    first = last
                    self._num_prefilling -= 1
                    if self._num_prefilling == 0:
                        self._at_last_first_token = self._stage_times()
                num_tokens += len(event.tokens)
        return first - sent, (last - first) / max(1, num_tokens - 1)


def bubble_share(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> float:
    """Bubble over bubble and busy time between two readings."""
    busy = sum(a[0] - b[0] for b, a in zip(before, after, strict=True))
    bubble = sum(a[1] - b[1] for b, a in zip(before, after, strict=True))
    return bubble / (busy + bubble)


def config_of(arguments: argparse.Namespace, model: Path, num_stages: int, lookahead: str) -> EngineConfig:
    """One variant. Restores are off; memory is ample, so that nothing but the pipeline is measured."""
    keys: dict[str, object] = {
        "model": str(model), "instances": num_stages, "dtype": "float32", "num_threads": 1,
        "max_num_batched_tokens": arguments.budget, "max_num_seqs": min(64, arguments.budget), "lookahead": lookahead,
        "lookahead_min_tokens": arguments.floor, "restore_threshold": 0.0, "enable_prefix_caching": False,
    }
    blocks = 2 * arguments.requests * arguments.context // 16 // num_stages
    return EngineConfig.resolve(**keys, memory=assemble(EngineConfig.resolve(**keys)).memory_for_blocks(blocks))


async def measure(arguments: argparse.Namespace, model: Path, num_stages: int) -> dict[str, list[RoundResult]]:
    """Rounds of both variants, in turns; the first round warms up and is not counted."""
    asked = make_requests(
        arguments.requests, arguments.scale, arguments.context, arguments.bursts, arguments.gap, arguments.seed
    )
    pipelines = {v: Pipeline(config_of(arguments, model, num_stages, v), num_stages) for v in VARIANTS}
    results: dict[str, list[RoundResult]] = {v: [] for v in VARIANTS}
    try:
        for pipeline in pipelines.values():
            await pipeline.start(arguments.cores)
        vocab_size = pipelines["on"].engine.info.vocab_size
        for round_index in range(-1, arguments.rounds):
            order = VARIANTS if round_index % 2 else VARIANTS[::-1]
            for variant in order:
                result = await pipelines[variant].replay(asked, vocab_size, arguments.in_flight)
                if round_index >= 0:
                    results[variant].append(result)
    finally:
        for pipeline in pipelines.values():
            await pipeline.engine.close()
    return results


def summary(results: dict[str, list[RoundResult]]) -> dict[str, object]:
    """Medians of each variant, and the median of the rounds' ratios."""
    by_variant = {
        variant: {
            key: statistics.median(asdict(r)[key] for r in rounds)
            for key in asdict(rounds[0])
            if key != "bubble_share_by_stage"
        }
        for variant, rounds in results.items()
    }
    gains = [on.tokens_per_s / off.tokens_per_s for off, on in zip(results["off"], results["on"], strict=True)]
    return {**by_variant, "throughput_gain": statistics.median(gains), "throughput_gains": gains}


def print_table(num_stages: int, results: dict[str, list[RoundResult]]) -> None:
    print(f"\n{num_stages} stages, median of {len(results['on'])} rounds (least to most)")
    print(f"{'':20}" + "".join(f"{f'lookahead {v}':>28}" for v in VARIANTS))
    for key, scale, unit in (
        ("burst_bubble_share", 100, "%"), ("bubble_share", 100, "%"),
        ("tokens_per_s", 1, ""), ("ttft_p50_s", 1e3, "ms"), ("ttft_p99_s", 1e3, "ms"),
        ("tpot_p50_s", 1e3, "ms"), ("tpot_p99_s", 1e3, "ms"), ("num_steps", 1, ""),
    ):
        cells = []
        for variant in VARIANTS:
            values = [scale * getattr(r, key) for r in results[variant]]
            cells.append(f"{statistics.median(values):.1f}{unit} ({min(values):.1f}-{max(values):.1f})")
        print(f"{key:20}" + "".join(f"{cell:>28}" for cell in cells))
    print(f"throughput with over without: {summary(results)['throughput_gain']:.3f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--bursts", type=int, default=1)
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between bursts")
    parser.add_argument("--in-flight", type=int, default=None, metavar="N", help="a closed loop: N requests at a time")
    parser.add_argument("--scale", type=float, default=0.2, help="lengths over the paper's")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step")
    parser.add_argument("--floor", type=int, default=None, help="fewest prompt tokens of a microbatch (default: auto)")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)), metavar="CORE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("lookahead.json"))
    arguments = parser.parse_args()
    document: dict[str, object] = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "cores": len(arguments.cores), "paper": PAPER, "stages": {},
    }
    with tempfile.TemporaryDirectory(prefix="jettison-lookahead-") as scratch:
        model = Path(scratch) / "model"
        create_model(
            model, arch="qwen3", layers=arguments.layers, hidden=arguments.hidden, heads=4, kv_heads=1, seed=0,
            max_position_embeddings=arguments.context,
        )
        for num_stages in arguments.stages:
            results = asyncio.run(measure(arguments, model, num_stages))
            print_table(num_stages, results)
            document["stages"][str(num_stages)] = {  # type: ignore[index]
                "summary": summary(results),
                "rounds": {v: [asdict(r) for r in rounds] for v, rounds in results.items()},
            }
    write_result(arguments.json, document, *SERVING)
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
