"""Which experts a token passes, and what share of each: for each row by itself, in the precision of sums.

Shares are what transformers computes where it computes in that precision. Not here: the router's product, and experts
themselves (``Kernels.experts``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jettison.device.model.arithmetic import Experts

SAMPLED, STEPS_TOGETHER = 8, 512
"""Every so-many-th step is counted; after so many steps what experts had is told."""


class Routed(NamedTuple):
    """What experts had in the steps that were counted, summed over sparse layers."""

    tokens: int = 0
    """Pairs of a token and an expert."""
    at_busiest: int = 0
    """As many as there would be if each expert of a layer had what its busiest one had."""


class RoutingCounts:
    """Tokens that experts had, by layer, on the host. Not for tensors of a card: to read them is to wait for it."""

    def __init__(self, num_layers: int, experts: Experts | None) -> None:
        self._counts = torch.zeros(num_layers, 0 if experts is None else experts.number, dtype=torch.int64)
        self._num_steps = 0

    def note(self, layer: int, chosen: Tensor) -> None:
        """Tokens of a step: [T, k]."""
        if self._num_steps % SAMPLED == 0 and chosen.device.type == "cpu":
            self._counts[layer] += torch.bincount(chosen.reshape(-1), minlength=self._counts.shape[1])

    def step_ended(self) -> Routed:
        """What is to be told: after every ``STEPS_TOGETHER`` steps what they had, else nothing."""
        self._num_steps += 1
        if self._num_steps % STEPS_TOGETHER or not self._counts.numel():
            return Routed()
        tokens, busiest = int(self._counts.sum()), int(self._counts.amax(1).sum()) * self._counts.shape[1]
        self._counts.zero_()
        return Routed(tokens, busiest)


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
