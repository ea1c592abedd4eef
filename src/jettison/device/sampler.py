"""From logits to tokens: penalties, temperature, truncation, the draw, and log-probabilities.

A draw is a pure function of the row's own logits and of ``(seed, position)``: one uniform number from a
counter-based hash, inverted through the cumulative distribution in token-id order. Batch, slot and machine
state do not enter, so a preempted, migrated or recomputed request draws the same tokens again. For the same
reason nothing here sums along the vocabulary with an operation whose grouping depends on the batch: totals are
the last entry of a running sum.

Order of processing (as in vLLM): bias and bans; repetition, frequency, presence penalty; temperature; min-p;
top-k; top-p; draw. Log-probabilities are of the raw distribution, before all of that.

Not here: stop conditions and sequence state, which the core owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.step import SamplingRow
from jettison.types import SampledToken, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would overflow long before it changed the outcome."""

_FEW_CANDIDATES = 256
"""Tokens looked at first for top-p; rows whose nucleus is larger are sorted whole."""

_LOGPROB_ELEMENTS = 1 << 22
"""Most logits widened at once for prompt log-probabilities (32 MiB in float64)."""


class Sampler:
    """Stateless sampler for one vocabulary; thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[int], sampling: Sequence[SamplingRow]) -> list[SampledToken]:
        """Choose one token a row.

        ``logits``: [n, >= vocab_size], any float dtype, columns beyond the vocabulary (padding of the head) are
        ignored; not modified. ``rows``: the step's ``sample_rows`` in order, length n. ``sampling``: entries whose
        ``row`` is in ``rows``; every other row is argmax, ties going to the lowest id. Raises ValueError when the
        lengths differ or an entry's row is not sampled.
        """
        if len(rows) != logits.shape[0]:
            raise ValueError(f"{len(rows)} rows for logits of {tuple(logits.shape)}")
        logits = logits[:, : self.vocab_size]
        if not sampling:
            return [SampledToken(token) for token in _argmax(logits)]
        slot_of = {int(row): slot for slot, row in enumerate(rows)}
        try:
            slots = [slot_of[spec.row] for spec in sampling]
        except KeyError as error:
            raise ValueError(f"row {error} is not among the sampled rows") from None
        tokens = _argmax(logits) if len(slots) < len(rows) else [0] * len(rows)
        chosen = _choose(_widen(logits[slots]), sampling)
        for slot, token in zip(slots, chosen, strict=True):
            tokens[slot] = token
        results = [SampledToken(token) for token in tokens]
        with_logprobs = [(slot, spec.logprobs) for slot, spec in zip(slots, sampling, strict=True) if spec.logprobs >= 0]
        for slot, num_top in with_logprobs:
            token = tokens[slot]
            results[slot] = SampledToken(token, _describe(_log_softmax(logits[slot : slot + 1])[0], token, num_top))
        return results

    def prompt_logprobs(
        self, logits: Tensor, target_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probability, rank and ``num_top`` likeliest alternatives of the token that followed each position.

        ``logits``: [m, >= vocab_size]; ``target_token_ids``: m ids. Raises ValueError when the lengths differ.
        """
        if len(target_token_ids) != logits.shape[0]:
            raise ValueError(f"{len(target_token_ids)} targets for logits of {tuple(logits.shape)}")
        step = max(1, _LOGPROB_ELEMENTS // self.vocab_size)
        result: list[TokenLogprobs] = []
        for start in range(0, len(target_token_ids), step):
            logprobs = _log_softmax(logits[start : start + step, : self.vocab_size])
            targets = target_token_ids[start : start + step]
            result += [_describe(row, int(token), num_top) for row, token in zip(logprobs, targets, strict=True)]
        return result


def uniform_draws(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): two rounds of SplitMix64's finalizer over both.

    A counter-based generator: no state, any order, equal keys give equal numbers. 53 random bits each.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array([value & 0xFFFFFFFFFFFFFFFF for value in positions], dtype=np.uint64)
    mixed = _mix(_mix(seed + _GOLDEN) ^ (position * _GOLDEN))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _argmax(logits: Tensor) -> list[int]:
    # torch documents that argmax returns the first of equal maxima, which is the lowest id. bfloat16 is widened
    # first: its reduction is not vectorized and costs more than the conversion.
    if logits.shape[0] == 0:
        return []
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    tokens: list[int] = wide.argmax(dim=-1).tolist()
    return tokens


def _widen(logits: Tensor) -> Tensor:
    """A private copy in float32, or float64 for float64 logits."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def _choose(logits: Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
    """Tokens for rows that are not plain greedy; overwrites ``logits`` (which lines up with ``sampling``)."""
    for row, spec in zip(logits, sampling, strict=True):
        _adjust(row, spec)
    drawn = [i for i, spec in enumerate(sampling) if spec.temperature >= GREEDY_BELOW]
    if len(drawn) == len(sampling):
        return _draw(logits, sampling)
    tokens = _argmax(logits)
    if drawn:
        for i, token in zip(drawn, _draw(logits[drawn], [sampling[i] for i in drawn]), strict=True):
            tokens[i] = token
    return tokens


def _adjust(row: Tensor, spec: SamplingRow) -> None:
    """Bias, bans and penalties of one row, in place; returns at once for the common row that has none."""
    for token, bias in spec.logit_bias:
        row[token] += bias
    if spec.banned_token_ids:
        row[list(spec.banned_token_ids)] = -math.inf
    if spec.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*spec.prompt_token_ids, *spec.output_token_ids}), dtype=torch.long)
        values = row[seen]
        penalty = spec.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (spec.frequency_penalty or spec.presence_penalty) and spec.output_token_ids:
        ids, counts = np.unique(np.asarray(spec.output_token_ids, dtype=np.int64), return_counts=True)
        penalties = spec.frequency_penalty * counts + spec.presence_penalty
        row[torch.from_numpy(ids)] -= torch.from_numpy(penalties).to(row.dtype)


def _draw(logits: Tensor, sampling: Sequence[SamplingRow]) -> list[int]:
    """One token a row from the tempered, truncated distribution; overwrites ``logits``."""
    temperatures = torch.tensor([spec.temperature for spec in sampling], dtype=logits.dtype).unsqueeze(1)
    # Weights relative to the likeliest token, which has exactly 1: no overflow at any temperature, and min-p is a
    # comparison with the parameter itself.
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures).exp_()
    if any(spec.min_p > 0.0 for spec in sampling):
        min_p = torch.tensor([spec.min_p for spec in sampling], dtype=logits.dtype).unsqueeze(1)
        weights.masked_fill_(weights < min_p, 0.0)
    _truncate(weights, sampling)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniforms = uniform_draws([spec.seed for spec in sampling], [spec.position for spec in sampling])
    # Strictly below the total, so that the first entry above the target is always a token with weight.
    target = torch.minimum(torch.from_numpy(uniforms).unsqueeze(1) * total, total * (1.0 - 2.0**-52))
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    tokens: list[int] = index.clamp_(max=weights.shape[1] - 1).tolist()
    return tokens


def _truncate(weights: Tensor, sampling: Sequence[SamplingRow]) -> None:
    """Zero the weights that top-k, then top-p exclude, in place.

    Top-k keeps every token that ties with the k-th. Top-p keeps the smallest set of likeliest tokens whose share
    of what top-k left reaches ``top_p``; among equal weights at its edge the lowest ids.
    """
    vocab_size = weights.shape[1]
    ks = [spec.top_k if 0 < spec.top_k < vocab_size else 0 for spec in sampling]
    narrow = [i for i, spec in enumerate(sampling) if ks[i] or spec.top_p < 1.0]
    if not narrow:
        return
    has_top_p = any(sampling[i].top_p < 1.0 for i in narrow)
    num_best = min(vocab_size, max([ks[i] for i in narrow] + [_FEW_CANDIDATES if has_top_p else 1]))
    part = weights if len(narrow) == len(sampling) else weights[narrow]
    best = part.topk(num_best, dim=-1).values
    k = torch.tensor([ks[i] for i in narrow]).unsqueeze(1)
    if bool((k > 0).any()):
        edge = best.gather(1, (k - 1).clamp_(min=0))
        part.masked_fill_((part < edge) & (k > 0), 0.0)
        best.masked_fill_((best < edge) & (k > 0), 0.0)
    if has_top_p:
        _keep_nucleus(part, best, torch.tensor([min(sampling[i].top_p, 1.0) for i in narrow], dtype=torch.float64))
    if part is not weights:
        weights[narrow] = part


def _keep_nucleus(weights: Tensor, best: Tensor, top_p: Tensor) -> None:
    """Top-p in place; ``best`` holds each row's largest weights, descending, possibly too few of them."""
    target = top_p * weights.cumsum(dim=-1, dtype=torch.float64)[:, -1]
    limited = top_p < 1.0
    enough = best.cumsum(dim=-1, dtype=torch.float64)[:, -1] >= target
    for mask, all_in_best in ((limited & enough, True), (limited & ~enough, False)):
        rows = mask.nonzero().squeeze(1)
        if rows.numel() == 0:
            continue
        part = weights[rows]
        ranked = best[rows] if all_in_best else part.sort(dim=-1, descending=True).values
        weights[rows] = _cut(part, ranked, target[rows].unsqueeze(1))


def _cut(weights: Tensor, ranked: Tensor, target: Tensor) -> Tensor:
    """Keep the fewest of ``ranked`` (descending) whose sum reaches ``target``; ties at the edge by lowest id."""
    num_short = (ranked.cumsum(dim=-1, dtype=torch.float64) < target).sum(dim=-1, keepdim=True)
    last = num_short.clamp_(max=ranked.shape[1] - 1)
    edge = ranked.gather(1, last)
    num_edge_kept = last + 1 - (ranked > edge).sum(dim=-1, keepdim=True)
    at_edge = weights == edge
    drop = weights < edge
    if bool((at_edge.sum(dim=-1, keepdim=True) > num_edge_kept).any()):
        drop |= at_edge & (at_edge.cumsum(dim=-1) > num_edge_kept)
    return weights.masked_fill_(drop, 0.0)


def _log_softmax(logits: Tensor) -> Tensor:
    """Natural-log probabilities in float64 (a row at a time inside torch, so the batch does not enter)."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float64)


def _describe(logprobs: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """``TokenLogprobs`` of one position from its float64 [vocab_size] log-probabilities."""
    own = float(logprobs[token])
    rank = int((logprobs > own).sum()) + 1
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        edge = logprobs.topk(min(num_top, logprobs.shape[0])).values[-1]
        ids = (logprobs >= edge).nonzero().squeeze(1)  # ascending, so a stable sort gives ties to the lowest id
        values, order = logprobs[ids].sort(descending=True, stable=True)
        top = tuple(zip(ids[order].tolist()[:num_top], values.tolist()[:num_top], strict=True))
    return TokenLogprobs(token, own, rank, top)
