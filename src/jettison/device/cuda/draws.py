"""The arithmetic of sampling on a device, for all rows at once: draws, and log-probabilities. It only launches.

Weights are rounded to float32 from an exponential in double, and summed as whole multiples of 2^-40: such sums are
exact in any order, so no token depends on the batch or on how a card adds. The host (``device.sampler``) rounds its
sums, so the two may differ where a draw falls on an edge within about 1e-8.

Not here: what rows ask for, and records of it (``sampler``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CANDIDATES = 1024
"""Likeliest tokens among which top-k and top-p look for their edge."""

NOT_HERE = -2
"""The token of a row whose top-p needs more candidates."""

_PART_ELEMENTS = 1 << 22
"""Logits worked on at once: 32 MiB for each tensor of doubles."""

_UNIT = float(1 << 40)
"""Weights, of at most 1, are counted in its inverse: a vocabulary's sum fits in 63 bits."""

Columns = Mapping[str, Tensor]
"""What rows ask for, by name, on the device."""


def rows_at_once(vocab_size: int) -> int:
    """Rows that are worked on together."""
    return max(1, _PART_ELEMENTS // vocab_size)


def draw(logits: Tensor, of: Columns) -> Tensor:
    """The tokens of some rows of ``logits`` [n, vocab_size]: int64, one for each of ``of["slots"]``; ``NOT_HERE`` where
    a nucleus is wider than the candidates.

    ``of``: ``temperature`` (negative: greedy) and ``uniform``; where a row has it, ``min_p``, ``top_k`` (0: all) with
    ``top_p`` (above 1: all); and what changes logits: ``bias``, ``ban``, ``repetition`` and ``count``, each as places
    (``.at``) in the flat logits of these rows, and values (``.by``)."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    work = logits.index_select(0, of["slots"]).to(wide)
    _adjust(work, of)
    vocab_size = work.shape[1]
    best = work.amax(1, keepdim=True)
    greedy = torch.where(work == best, torch.arange(vocab_size, device=work.device), vocab_size - 1).amin(1)
    work.sub_(best).div_(of["temperature"].to(wide)[:, None].abs())
    weights = work.double().exp_().to(wide)
    if "min_p" in of:
        weights.masked_fill_(weights < of["min_p"].to(wide)[:, None], 0.0)
    is_beyond: Tensor | None = None
    if "top_k" in of:
        weights, is_beyond = _narrow(weights, of["top_k"], of["top_p"])
    running = _counted(weights).cumsum(1)
    total = running[:, -1]
    target = torch.minimum((of["uniform"] * total).long(), total - 1)
    drawn = (running <= target[:, None]).sum(1).clamp_(max=vocab_size - 1)
    if is_beyond is not None:
        drawn = torch.where(is_beyond, NOT_HERE, drawn)
    return torch.where(of["temperature"] < 0, greedy, drawn)


def describe(logits: Tensor, tokens: Tensor, num_top: int, reported: Tensor | None = None) -> dict[str, Tensor]:
    """Log-probabilities and ranks of ``tokens`` [m], the ``num_top`` likeliest and the ``reported`` [m, k] ones of each
    row of ``logits`` [m, vocab_size]."""
    num_top, size = min(num_top, logits.shape[1]), rows_at_once(logits.shape[1])
    pieces: list[dict[str, Tensor]] = []
    for start in range(0, len(logits), size):
        at = slice(start, start + size)
        log = _log_softmax(logits[at])
        own = log.gather(1, tokens[at].clamp(0)[:, None])
        piece = {"own": own[:, 0], "rank": (log > own).sum(1) + 1}
        if num_top:
            piece["top_ids"] = _likeliest(logits[at], num_top)
            piece["top"] = log.gather(1, piece["top_ids"])
        if reported is not None:
            piece["reported"] = log.gather(1, reported[at])
        pieces.append(piece)
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _adjust(work: Tensor, of: Columns) -> None:
    """Bias, bans and penalties, in place, in the host's order; places of one kind are distinct, or get one value."""
    flat = work.view(-1)
    if "bias.at" in of:
        at = of["bias.at"]
        flat[at] = flat[at] + of["bias.by"].to(work.dtype)
    if "ban.at" in of:
        at = of["ban.at"]
        kept = flat[at]
        flat[at] = -torch.inf
        is_lifted = (work.amax(1) == -torch.inf)[at // work.shape[1]]  # as some token has to be drawn
        flat[at] = torch.where(is_lifted, kept, -torch.inf)
    if "repetition.at" in of:
        at, by = of["repetition.at"], of["repetition.by"].to(work.dtype)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / by, values * by)
    if "count.at" in of:
        at = of["count.at"]
        flat[at] = flat[at] - of["count.by"].to(work.dtype)


def _counted(weights: Tensor) -> Tensor:
    """Weights in whole units; what is less than half of one has no share. All is exact in the weights' own precision,
    as the unit is a power of two."""
    return (weights * _UNIT).round_().long()


def _narrow(weights: Tensor, limit: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Weights after top-k, then top-p, 0 for what is left out; and rows whose top-p goes beyond the candidates."""
    num_candidates = min(CANDIDATES, weights.shape[1])
    top = weights.topk(num_candidates, dim=1).values
    edge = top.gather(1, (limit - 1).clamp(0)[:, None]).masked_fill(limit[:, None] == 0, 0.0)
    weights = weights.masked_fill(weights < edge, 0.0)  # all that tie with the k-th stay
    top = top.masked_fill(top < edge, 0.0)
    target = (share * _counted(weights).sum(1)).ceil().long()[:, None]
    sums = _counted(top).cumsum(1)
    last = (sums < target).sum(1, keepdim=True)
    is_wide = share > 1.0
    is_beyond = (last[:, 0] >= num_candidates) & (top[:, -1] > 0) & ~is_wide
    if num_candidates == weights.shape[1]:
        is_beyond = torch.zeros_like(is_beyond)
    edge = top.gather(1, last.clamp(max=num_candidates - 1)).masked_fill(is_wide[:, None], 0.0)
    is_edge = weights == edge
    num_above = (top > edge).sum(1, keepdim=True)
    # Of equal weights at the edge the lowest ids, as many as reach the target.
    is_kept = (weights > edge) | (is_edge & (is_edge.cumsum(1) <= last + 1 - num_above)) | is_wide[:, None]
    return weights.masked_fill(~is_kept, 0.0), is_beyond


def _log_softmax(logits: Tensor) -> Tensor:
    """Natural-log probabilities in float64."""
    shifted = logits.double()
    shifted = shifted - shifted.amax(1, keepdim=True)
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [m, count]: ids of the largest logits, in descending order; equal ones by lowest id."""
    if logits.dtype == torch.float64:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    bits = (logits.float() + 0.0).view(torch.int32)  # the sum makes -0 equal to 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)  # all distinct, so the order is one
    return 0xFFFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
