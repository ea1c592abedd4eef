"""A card's sampler as its runner uses it, without staging; on any device."""

from __future__ import annotations

import numpy as np
import torch

from jettison.device.cuda.sampler import CudaSampler
from jettison.device.step import SamplingRow

VOCAB = 300


def draw(logits: torch.Tensor, rows: list[int], sampling: list[SamplingRow], device="cpu", vocab_size=VOCAB):
    """What a runner does, without its staging."""
    sampler = CudaSampler(vocab_size)
    plan = sampler.plan(rows, sampling)
    there = logits.to(device)
    likeliest = torch.from_numpy(
        np.where(np.isfinite(logits.float().numpy()).all(1), logits[:, :vocab_size].float().numpy().argmax(1), -1)
    )
    arrays = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
    results = sampler.launch(there, likeliest.to(device), plan, arrays)
    on_host = {name: tensor.cpu().numpy() for name, tensor in results.items()}
    return sampler.finish(plan, on_host, lambda slot: logits[slot : slot + 1])


def row(number: int, **fields) -> SamplingRow:
    defaults = {"position": 7, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return SamplingRow(row=number, **(defaults | fields))
