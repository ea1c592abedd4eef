"""Draws and log-probabilities in PyTorch, on any device and in any precision: by sorting whole rows.

It says in few lines what the kernels compute, and computes it where Triton's kernels do not run: rows in the host's
memory, float64, and long lists of the likeliest tokens.

Not here: what rows ask for, changes of logits, and how many rows are worked on at once (``draws``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_UNIT = float(1 << 40)


def draw(logits: Tensor, lines: Tensor, at_best: Tensor, of: Mapping[str, Tensor], tokens: Tensor) -> None:
    """Draw from the rows ``lines`` of ``logits`` [n, vocab], and write what is drawn into ``tokens[of["slots"]]``
    where that is not negative; -1 if no token has any weight. ``at_best``: the likeliest token of each row, or any
    where it is not to be drawn."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    work = logits[lines].to(wide)
    temperature = of["temperature"][:, None]
    shifted = work - work.gather(1, at_best.clamp(0)[:, None])
    weights = (shifted / temperature.to(wide).abs()).double().exp().to(wide)
    weights = torch.where(temperature < 0, (shifted == 0).to(wide), weights)
    weights = torch.where((weights >= of["min_p"].to(wide)[:, None]) & (weights <= 1.0), weights, 0.0)
    running = _kept(weights, of["top_k"][:, None], of["top_p"][:, None]).cumsum(1)
    total = running[:, -1]
    target = torch.minimum((of["uniform"] * total).long(), total - 1)
    drawn = (running <= target[:, None]).sum(1)
    slots = of["slots"]
    tokens.index_copy_(0, slots, torch.where((tokens[slots] < 0) | (total == 0), -1, drawn))


def _kept(weights: Tensor, limit: Tensor, share: Tensor) -> Tensor:
    """Units of the weights that top-k (0: all), then top-p (above 1: all) keep, by id; 0 for the others. What is less
    than half a unit has none. All is exact in the weights' precision, as the unit is a power of two."""
    ranked, ids = weights.sort(dim=1, descending=True, stable=True)  # so that of equal ones the lowest ids come first
    edge = ranked.gather(1, (limit - 1).clamp(0)).masked_fill(limit == 0, 0.0)
    units = (ranked * _UNIT).round().long().masked_fill(ranked < edge, 0)  # all that tie with the k-th stay
    sums = units.cumsum(1)
    target = (share * sums[:, -1:]).ceil().long().clamp(1)
    units.masked_fill_(sums - units >= target, 0)
    return torch.zeros_like(units).scatter_(1, ids, units)


def describe(logits: Tensor, lines: Tensor, tokens: Tensor, num_top: int) -> dict[str, Tensor]:
    """Log-probabilities of the rows ``lines`` of ``logits`` [n, vocab]: ``own`` and ``rank`` of ``tokens`` [m],
    ``top`` and ``top_ids`` [m, num_top] of the likeliest. ``base`` [m, 2]: what is taken from any logit, the one after
    the other, to make its log-probability."""
    mine = logits[lines]
    wide = mine.double()
    most = wide.amax(1, keepdim=True)
    base = torch.cat((most, (wide - most).exp().sum(1, keepdim=True).log()), dim=1)
    own = wide.gather(1, tokens.clamp(0)[:, None])
    top_ids = _likeliest(mine, num_top)
    return {
        "own": (own - base[:, :1] - base[:, 1:])[:, 0], "rank": (wide > own).sum(1) + 1, "base": base,
        "top_ids": top_ids, "top": wide.gather(1, top_ids) - base[:, :1] - base[:, 1:],
    }  # fmt: skip


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [m, count]: ids of the largest logits, in descending order; equal ones by lowest id."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
