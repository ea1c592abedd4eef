"""The live engine on a card: decode of a 7B and a 14B shape, prefill, the gap between steps, nano-vllm's bench.

    python3 -m benchmarks gpu engine --out gpu_engine.json
    python3 -m benchmarks gpu engine --device cpu --tiny      # the same on a processor, at toy sizes

Weights are random, filled on the device from a seed; workers are processes, requests are submitted to the engine
without HTTP. A step's time is the slope between two lengths of output; the gap is a step's time less what the card
takes alone for the same layers, measured before in this process. nano-vllm's bench is its README's: 256 requests of
100 to 1,024 tokens in and as many out, a Qwen3-0.6B shape. Targets stand beside the figures of a card that has some.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, TINY, folder_of
from jettison.config import EngineConfig
from jettison.live.engine.engine import Engine
from jettison.types import Request, SamplingParams

PEAK_TFLOPS = 989.0
"""Of bf16 on an H100 or H200 without sparsity."""
TARGETS = {
    "7b decode 1, ms": (6.0, 4.2), "7b decode 64 x 1k, ms": (7.6, 5.3), "14b decode 1, ms": (11.9, 8.3),
    "nano-vllm, tokens/s": (10_000, 12_000), "7b prefill 8k, share of peak": (0.5, 0.5),
    "7b decode 64 x 1k, gap as a share of a step": (0.05, 0.05),
}  # fmt: skip
"""On an H100, on an H200."""
AT_LEAST = {"nano-vllm, tokens/s", "7b prefill 8k, share of peak"}


class Measured:
    """An engine of one instance."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self._number = 0

    async def __aenter__(self) -> Measured:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def run(self, lengths: Sequence[tuple[int, int]], seed: int) -> float:
        """Seconds for requests of these (prompt, output) lengths, all submitted at once."""
        rng = random.Random(seed)
        vocab = self.engine.info.vocab_size
        requests = []
        for num_prompt, num_output in lengths:
            self._number += 1
            params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
            prompt = tuple(rng.randrange(vocab) for _ in range(num_prompt))
            requests.append(Request(f"r{self._number}", prompt, params, 0))
        begun = time.perf_counter()
        counts = await asyncio.gather(*(self._length(request) for request in requests))
        taken = time.perf_counter() - begun
        assert counts == [length for _, length in lengths], "a request has not all of its tokens"
        return taken

    async def _length(self, request: Request) -> int:
        count = 0
        async for event in self.engine.submit(request):
            count += len(event.tokens)
        return count

    async def step_ms(self, rows: int, context: int, short: int, long: int) -> float:
        """Milliseconds a decode step: the median of three slopes."""
        slopes = []
        for attempt in range(3):
            brief = await self.run([(context, short)] * rows, 2 * attempt)
            whole = await self.run([(context, long)] * rows, 2 * attempt + 1)
            slopes.append((whole - brief) / (long - short) * 1e3)
        return statistics.median(slopes)


def config_for(shape: str, models: Path, options: argparse.Namespace, **more: object) -> EngineConfig:
    """One instance of a shape on the card, with the memory of it."""
    settings: dict[str, object] = {
        "model": str(folder_of(models, shape)), "load_format": "random", "device": options.device, "instances": 1,
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "seed": 0,
    } | more  # fmt: skip
    if options.tiny:
        settings |= {"memory": "64MiB", "max_num_batched_tokens": 256, "max_num_seqs": 16, "dtype": "float32"}
    return EngineConfig.resolve(**settings)  # type: ignore[arg-type]


def card_alone_ms() -> float:
    """Milliseconds that the card takes for the layers of a decode step of 64 requests at 1k of context of the 7B shape;
    its memory is given back."""
    import torch

    from benchmarks.gpu.kernels import step_ms
    from benchmarks.gpu.model import CONTEXT, DEVICE, SHAPES, Model
    from jettison.device.cuda.kernels import CudaKernels

    model = Model(CudaKernels("cuda-invariant", DEVICE), SHAPES["7b"], 64, 0)
    taken = step_ms(model, 64)
    assert CONTEXT == 1024
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return taken


async def decode_and_prefill(shape: str, models: Path, options: argparse.Namespace, told: dict[str, float]) -> None:
    """Of one shape: batch 1; of the 7B also 64 requests at 1k context, and a prompt of 8k."""
    tiny = options.tiny
    alone_ms = card_alone_ms() if shape == "7b" and options.device == "cuda" else 0.0
    async with Measured(config_for(shape, models, options)) as measured:
        short, long = (4, 12) if tiny else (16, 80)
        await measured.run([(8, long)] * 2, 99)  # compiles, captures graphs
        told[f"{shape} decode 1, ms"] = await measured.step_ms(1, 16, short, long)
        if shape != "7b":
            return
        rows, context, prompt = (4, 20, 48) if tiny else (64, 1024, 8000)
        step_ms = told["7b decode 64 x 1k, ms"] = await measured.step_ms(rows, context, short, long)
        if alone_ms:
            told["7b decode 64 x 1k, the card alone, ms"] = alone_ms
            told["7b decode 64 x 1k, gap as a share of a step"] = max(0.0, step_ms - alone_ms) / step_ms
        took = statistics.median([await measured.run([(prompt, 1)], 100 + i) for i in range(3)])
        shapes = TINY if tiny else SHAPES
        told["7b prefill 8k, s"] = took
        told["7b prefill 8k, share of peak"] = shapes["7b"].prefill_flop(prompt) / took / (PEAK_TFLOPS * 1e12)


async def nano_vllm(models: Path, options: argparse.Namespace, told: dict[str, float]) -> None:
    """Output tokens a second of its bench."""
    rng = random.Random(0)
    count, most = (8, 24) if options.tiny else (256, 1024)
    lengths = [(rng.randint(most // 10, most), rng.randint(most // 10, most)) for _ in range(count)]
    async with Measured(config_for("0.6b", models, options)) as measured:
        await measured.run([(8, 8)] * count, 99)
        took = await measured.run(lengths, 0)
        told["nano-vllm, tokens/s"] = sum(length for _, length in lengths) / took


def checks_of(told: dict[str, float], card: str) -> list[dict[str, Any]]:
    """A row a figure, with the target of this card where there is one."""
    column = next((i for i, name in enumerate(("H100", "H200")) if name in card), None)
    targets = {} if column is None else {name: pair[column] for name, pair in TARGETS.items()}
    rows = []
    for name, value in told.items():
        target = targets.get(name)
        met = None if target is None else (value >= target if name in AT_LEAST else value <= target)
        rows.append({"name": name, "value": value, "target": target, "pass": met})
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--shapes", nargs="+", default=["7b", "14b", "0.6b"])
    options = parser.parse_args()
    card = "cpu"
    if options.device == "cuda":
        from jettison.config.cards import visible_cards

        card = visible_cards()[0].name
    told: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for shape, layout in (TINY if options.tiny else SHAPES).items():
            layout.write(folder_of(models, shape))
        for shape in options.shapes:
            part = nano_vllm(models, options, told) if shape == "0.6b" else (
                decode_and_prefill(shape, models, options, told))  # fmt: skip
            asyncio.run(part)
            document = {"benchmark": "gpu_engine", "card": card, "checks": checks_of(told, card)}
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["checks"]:
        print(f"{row['name']}: {row['value']:.4g}" + ("" if row["target"] is None else f" (target {row['target']:g})"))
    return 0
