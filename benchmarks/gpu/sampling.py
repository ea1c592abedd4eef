"""How long drawing tokens takes on one card, by what rows ask for, with targets beside; and the host's tokens.

    python3 -m benchmarks gpu sampling --out gpu_sampling.json      # a vocabulary of 152,064, in a quarter of a minute

A target is 5 % of a decode step of the 7B shape with as many rows. "Host" is how long planning and launching keeps the
host. Finding the likeliest token, which each step does before, reads the logits once. Without a GPU: a toy on the CPU,
to see that it runs (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.kernels import TARGETS_MS, captured, gpu_us
from benchmarks.gpu.model import DEVICE, GPU
from benchmarks.gpu.results import Results
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.sampler import CudaSampler
from jettison.device.sampler import Sampler
from jettison.device.step import SamplingRow, pack_ints

VOCAB = 152_064 if GPU else 9000
ROWS = (1, 64, 256) if GPU else (1, 3)
NUM_CHECKED = 4
"""Rows of each kind that the host draws, too."""
STEP_SHARE = 0.05

PENALIZED = {"repetition_penalty": 1.1, "prompt_ids": pack_ints(np.arange(0, VOCAB, VOCAB // 1000))}
KINDS: dict[str, tuple[str, dict]] = {
    "temperature": ("flat", {}),
    "top-p 0.9, flat": ("flat", {"top_p": 0.9}),
    "top-p 0.9, peaked": ("peaked", {"top_p": 0.9}),
    "top-k 50, top-p 0.9": ("peaked", {"top_k": 50, "top_p": 0.9}),
    "min-p 0.05": ("peaked", {"min_p": 0.05}),
    "penalties, top-p 0.9": ("peaked", {**PENALIZED, "top_p": 0.9}),
    "logprobs 5": ("flat", {"temperature": 0.0, "logprobs": 5}),
    "logprobs 20": ("flat", {"temperature": 0.0, "logprobs": 20}),
}
"""Which logits, and what every row asks for."""


def made_logits() -> dict[str, torch.Tensor]:
    """As random weights make them, and as a trained model does: thirty tokens stand out."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(ROWS[-1], VOCAB, generator=generator)
    peaked = 2.0 * flat
    peaked[:, torch.randint(VOCAB, (30,), generator=generator)] += 12.0
    return {"flat": flat.to(DEVICE), "peaked": peaked.to(DEVICE)}


class Drawn:
    """Rows of some logits that ask for the same, with seeds of their own."""

    def __init__(self, logits: torch.Tensor, likeliest: torch.Tensor, fields: dict) -> None:
        self.logits, self._likeliest = logits, likeliest
        self._sampler, self.tokens = CudaSampler(VOCAB), likeliest.clone()
        defaults = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        self.asked = [SamplingRow(i, 100 + i, seed=i, **(defaults | fields)) for i in range(len(logits))]
        self.plan = self._sampler.plan(list(range(len(logits))), self.asked)
        self._arrays = {name: torch.from_numpy(array).to(DEVICE) for name, array in self.plan.arrays.items()}

    def launch(self) -> None:
        self.tokens.copy_(self._likeliest)
        self._sampler.launch(self.logits, self.tokens, self.plan, self._arrays)

    def on_host(self) -> None:
        """What keeps the host in a step."""
        self._sampler.plan(list(range(len(self.logits))), self.asked)
        self.launch()

    def num_wrong(self) -> int:
        """Tokens of the first rows that are not the host's."""
        count = min(NUM_CHECKED, len(self.logits))
        theirs = Sampler(VOCAB).sample(self.logits[:count].cpu(), range(count), self.asked[:count])
        return sum(a != b.token_id for a, b in zip(self.tokens[:count].tolist(), theirs, strict=True))


def host_ms(function: Callable[[], None], repeat: int = 7) -> float:
    """Median milliseconds until a call returns, while the card has nothing else to do."""
    times = []
    for _ in range(repeat):
        if GPU:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def measure(logits: dict[str, torch.Tensor], results: Results) -> int:
    """Of some rows; wrong tokens."""
    rows, wrong = len(logits["flat"]), 0
    kernels = CudaKernels("cuda", DEVICE)
    likeliest = {name: torch.zeros(rows, dtype=torch.int64, device=DEVICE) for name in logits}
    for name, tokens in likeliest.items():
        kernels.argmax(logits[name], tokens)
    floor = captured(lambda: kernels.argmax(logits["flat"], likeliest["flat"]))
    results.tell(f"{rows} rows: the likeliest, ms", gpu_us(floor) / 1e3)
    step_ms = TARGETS_MS.get(f"7b {rows}")
    target = None if step_ms is None else STEP_SHARE * step_ms
    for kind, (which, fields) in KINDS.items():
        drawn = Drawn(logits[which], likeliest[which], fields)
        drawn.launch()
        wrong += drawn.num_wrong()
        ms = gpu_us(captured(drawn.launch)) / 1e3
        results.tell(f"{rows} rows: {kind}, ms", ms, target, target and ms <= target)
        results.tell(f"{rows} rows: {kind}, host ms", host_ms(drawn.on_host))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_sampling.json")
    results, made = Results(parser.parse_args().out), made_logits()
    wrong = sum(measure({name: each[:rows] for name, each in made.items()}, results) for rows in ROWS)
    results.tell("wrong tokens", wrong, 0, wrong == 0)
    return 0
