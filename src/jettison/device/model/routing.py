"""Which experts a token passes, and what share of each: for each row by itself, in the precision of sums.

Shares are what transformers computes where it computes in that precision. Not here: the router's product, and experts
themselves (``Kernels.experts``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.model.arithmetic import Experts


def route(experts: Experts, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """(chosen, shares) of T tokens, [T, k] each: experts in int64, the best one first, and their shares.

    ``logits``: [T, E] of ``sum_dtype``; ``correction``: [E], where scores are sigmoids.
    """
    if experts.score == "softmax_of_chosen":
        best, chosen = logits.topk(experts.num_chosen, dim=-1)
        return chosen, best.softmax(-1)
    if experts.score == "sigmoid":
        scores = logits.sigmoid()
        chosen = _allowed(experts, scores if correction is None else scores + correction).topk(experts.num_chosen)[1]
        shares = scores.gather(1, chosen)
    else:
        shares, chosen = logits.softmax(-1).topk(experts.num_chosen, dim=-1)
    if experts.is_normed:
        total = _sum(shares)
        shares = shares / (total + 1e-20 if experts.score == "sigmoid" else total)
    return chosen, shares * experts.scale if experts.scale != 1.0 else shares


def _allowed(experts: Experts, scores: Tensor) -> Tensor:
    """The scores, -inf but in the groups whose two best experts have the largest sums (DeepSeek-V3)."""
    if experts.num_groups == 1:
        return scores
    grouped = scores.view(len(scores), experts.num_groups, -1)
    groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(experts.num_chosen_groups, dim=-1)[1]
    is_allowed = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, groups, True)
    return grouped.masked_fill(~is_allowed.unsqueeze(-1), -torch.inf).view_as(scores)


def _sum(shares: Tensor) -> Tensor:
    """[T, 1], in the order of a row's columns, however many rows there are."""
    total = shares[:, :1]
    for column in range(1, shares.shape[1]):
        total = total + shares[:, column : column + 1]
    return total
