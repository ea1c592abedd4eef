"""nano-vllm's bench here and by `transformers`' continuous batching on the same card, one after the other, a target.

    python3 -m benchmarks gpu peer --out gpu_peer.json            # a Qwen3-0.6B shape, under a minute
    python3 -m benchmarks gpu peer --device cpu --tiny            # the same at toy sizes

The same requests (a part of the bench's 256: the file says how many), each with its own length, greedy, no end token;
random weights on both sides. The other's run is cut off after ``--most-s`` seconds, and what it has produced until then
counts. Each is a process of its own; its time begins when it is loaded and warm. The other's attention is flash where
the image has it, else PyTorch's (said in the file).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.evidence import REPOSITORY
from benchmarks.gpu.engine import Measured, config_for
from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import SHAPES, TINY, folder_of

LEAST = 2.0
ANSWER = "peer: "
PAGE_TOKENS = 256
"""Of its cache's blocks by default. It gets room for all requests and no more: with PyTorch's attention it computes
over a mask as wide as what is cached."""
LOAD_S = 30.0
"""The other's process may take so long beside what it measures."""


def lengths(options: argparse.Namespace) -> list[tuple[int, int]]:
    """The first requests of the bench."""
    rng = random.Random(0)
    most = 24 if options.tiny else 1024
    return [(rng.randint(most // 10, most), rng.randint(most // 10, most)) for _ in range(options.requests)]


def transformers_run(options: argparse.Namespace) -> dict[str, Any]:
    """In the other's process: tokens, seconds, requests that ended, versions."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    is_card, has_flash = options.device == "cuda", importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if is_card and has_flash else "sdpa"
    config = AutoConfig.from_pretrained(options.serve, local_files_only=True)
    dtype = torch.bfloat16 if is_card else torch.float32
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=f"paged|{attention}").eval()
    rng, vocab, asked = random.Random(1), config.vocab_size, lengths(options)
    prompts = [[rng.randrange(vocab) for _ in range(num_prompt)] for num_prompt, _ in asked]
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(o for _, o in asked))
    num_blocks = sum((num_prompt + num_output) // PAGE_TOKENS + 2 for num_prompt, num_output in asked)
    batching = ContinuousBatchingConfig(
        allow_block_sharing=False, num_blocks=num_blocks, max_batch_tokens=4096 if is_card else 256)
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        _results_of(manager, prompts[:4], [(0, 8)] * 4, LOAD_S)  # captures, compiles
        begun = time.perf_counter()
        counts, ended = _results_of(manager, prompts, asked, options.most_s)
        seconds = time.perf_counter() - begun
        said = {"tokens": sum(counts.values()), "seconds": seconds, "ended": ended, "attention": attention,
                "version": transformers.__version__}  # fmt: skip
        print(ANSWER + json.dumps(said), flush=True)
        os._exit(0)  # its threads would first finish what was cut off


def _results_of(
    manager: Any, prompts: list[list[int]], asked: list[tuple[int, int]], most_s: float
) -> tuple[dict[str, int], int]:
    """Tokens by request, and how many have ended."""
    counts: dict[str, int] = {}
    for prompt, (_, num_output) in zip(prompts, asked, strict=True):
        name = manager.add_request(prompt, max_new_tokens=num_output, streaming=True)
        counts[name] = 0
    ends_s, ended = time.monotonic() + most_s, 0
    while ended < len(prompts) and time.monotonic() < ends_s:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread has ended")
            continue
        counts[result.request_id] = max(counts[result.request_id], len(result.generated_tokens))
        ended += result.is_finished()
    return counts, ended


async def own_run(models: Path, options: argparse.Namespace) -> float:
    """Output tokens a second of the live engine."""
    asked = lengths(options)
    async with Measured(config_for("0.6b", models, options, log_level="warning")) as measured:
        await measured.run([(8, 8)] * len(asked), 99)
        return sum(length for _, length in asked) / await measured.run(asked, 1)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_peer.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--most-s", type=float, default=15.0)
    parser.add_argument("--serve", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        transformers_run(options)
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for shape, layout in (TINY if options.tiny else SHAPES).items():
            layout.write(folder_of(models, shape))
        ours = asyncio.run(own_run(models, options))
        results.tell(f"nano-vllm's bench, {options.requests} requests of 256, tokens/s", ours)
        words = ["--serve", str(folder_of(models, "0.6b")), "--device", options.device, "--requests",
                 str(options.requests), "--most-s", str(options.most_s), *(["--tiny"] if options.tiny else [])]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "gpu", "peer", *words], cwd=REPOSITORY, stdout=subprocess.PIPE,
            text=True, timeout=options.most_s + LOAD_S, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        print(f"transformers' process ended with code {done.returncode} and no figure")
        return 1
    told = json.loads(lines[-1].removeprefix(ANSWER))
    theirs = told["tokens"] / told["seconds"]
    results.tell(f"transformers {told['version']}, generate_batch's manager with {told['attention']}, tokens/s", theirs)
    results.tell("its requests that ended in time", told["ended"])
    results.tell("ours over transformers'", ours / theirs, LEAST, ours / theirs >= LEAST)
    return 0
