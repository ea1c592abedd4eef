"""From logits to tokens: penalties, temperature, truncation, the draw, and log-probabilities.

A draw is a pure function of the row's own logits and of ``(seed, position)``: one uniform number from a counter-based
hash, inverted through the cumulative distribution in token-id order. Batch, slot and machine state do not enter, so a
preempted, migrated or recomputed request draws the same tokens again. For the same reason every sum runs along one row
of a C-contiguous array in numpy, which groups the terms independently of the number of rows. There are no threads: two
of them waited for the interpreter as long as they saved.

Order of processing (as in vLLM): bias, allowed tokens and bans; repetition, frequency, presence penalty; temperature;
min-p; top-k; top-p; draw. Log-probabilities are of the raw distribution, before all of that.

Not here: stop conditions and sequence state, which the core owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.step import SamplingRow, is_in_token_set, set_bits, unpack_ints, unpack_token_set
from jettison.types import SampledToken, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would overflow long before it changed the outcome."""

_CHUNK_ELEMENTS = 1 << 18
"""Logits worked on at once (1 MiB in float32): every pass over them stays in the cache."""

_SUM_BLOCK = 128
"""Weights in one entry of the running sum along the vocabulary."""

_FEW_CANDIDATES = 1024
"""Number of likeliest tokens that are tried first for top-p."""

Floats = npt.NDArray[np.floating]

_Made = TypeVar("_Made", int, TokenLogprobs)


class Sampler:
    """Stateless sampler for one vocabulary; thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(
        self, logits: Tensor, rows: Sequence[int], sampling: Sequence[SamplingRow],
        likeliest: Sequence[int] | None = None,
    ) -> list[SampledToken]:
        """Choose one token a row.

        ``logits``: [n, >= vocab_size], any float dtype, columns beyond the vocabulary (padding of the head) are
        ignored; not modified. ``rows``: the step's ``sample_rows`` in order, length n. ``sampling``: entries whose
        ``row`` is in ``rows``; every other row is argmax, ties going to the lowest id. ``likeliest``: the argmax of all
        rows, where it is known. Raises ValueError when the lengths differ or an entry's row is not sampled.
        """
        if len(rows) != logits.shape[0]:
            raise ValueError(f"{len(rows)} rows for logits of {tuple(logits.shape)}")
        logits = logits[:, : self.vocab_size]
        slot_of = {int(row): slot for slot, row in enumerate(rows)}
        try:
            slots = [slot_of[spec.row] for spec in sampling]
        except KeyError as error:
            raise ValueError(f"row {error} is not among the sampled rows") from None
        asked = list(zip(slots, sampling, strict=True))
        open_rows = asked
        if likeliest is not None:
            tokens = list(likeliest)
            open_rows = [(slot, spec) for slot, spec in asked if not _is_likeliest(spec, tokens[slot])]
        else:
            tokens = _argmax(logits) if len(slots) < len(rows) else [0] * len(rows)

        def choose(start: int, end: int) -> list[int]:
            part = open_rows[start:end]
            return _choose(_widen(logits, [slot for slot, _ in part]), self.vocab_size, [spec for _, spec in part])

        for (slot, _), token in zip(open_rows, self._by_parts(len(open_rows), choose), strict=True):
            tokens[slot] = token
        results = [SampledToken(token) for token in tokens]
        described = [(slot, spec) for slot, spec in asked if spec.logprobs >= 0]

        def describe(start: int, end: int) -> list[TokenLogprobs]:
            part = [slot for slot, _ in described[start:end]]
            named = [spec.logprob_token_ids for _, spec in described[start:end]]
            num_tops = [0 if spec.logprob_token_ids else spec.logprobs for _, spec in described[start:end]]
            logprobs = _log_softmax(logits, part)
            entries = _describe(logprobs, [tokens[slot] for slot in part], num_tops)
            return [_of_tokens(*each) for each in zip(entries, logprobs, named, strict=True)]

        for (slot, _), logprobs in zip(described, self._by_parts(len(described), describe), strict=True):
            results[slot] = SampledToken(tokens[slot], logprobs)
        return results

    def _by_parts(self, num_rows: int, work: Callable[[int, int], list[_Made]]) -> list[_Made]:
        """The results of ``work(start, end)`` for all rows, in order."""
        step = max(1, _CHUNK_ELEMENTS // self.vocab_size)
        parts = (work(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
        return [made for part in parts for made in part]

    def prompt_logprobs(self, logits: Tensor, target_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probability, rank and ``num_top`` likeliest alternatives of the token that followed each position.

        ``logits``: [m, >= vocab_size]; ``target_token_ids``: m ids. Raises ValueError when the lengths differ.
        """
        if len(target_token_ids) != logits.shape[0]:
            raise ValueError(f"{len(target_token_ids)} targets for logits of {tuple(logits.shape)}")
        targets = [int(token) for token in target_token_ids]
        logits = logits[:, : self.vocab_size]

        def describe(start: int, end: int) -> list[TokenLogprobs]:
            logprobs = _log_softmax(logits, list(range(start, end)))
            return _describe(logprobs, targets[start:end], [num_top] * (end - start))

        return self._by_parts(len(targets), describe)


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
    # numpy documents that argmax returns the first of equal maxima, which is the lowest id, and is ten times as fast
    # as torch here.
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    tokens: list[int] = []
    for start in range(0, logits.shape[0], step):
        part = logits[start : start + step]
        tokens += (part.float() if part.dtype == torch.bfloat16 else part).numpy().argmax(axis=1).tolist()
    return tokens


def _widen(logits: Tensor, slots: list[int]) -> Floats:
    """A private copy of some rows in float32 (float64 for float64 logits), padded with -inf to whole sum blocks."""
    vocab_size = logits.shape[1]
    shape = len(slots), -(-vocab_size // _SUM_BLOCK) * _SUM_BLOCK
    is_half = logits.dtype == torch.bfloat16
    source = logits.view(torch.uint16).numpy() if is_half else logits.numpy()
    wide: npt.NDArray[Any] = np.empty(shape, dtype=np.uint32 if is_half else source.dtype)
    for row, slot in zip(wide, slots, strict=True):
        row[:vocab_size] = source[slot]
    if is_half:  # the upper half of a float32
        wide <<= np.uint32(16)
        wide = wide.view(np.float32)
    wide[:, vocab_size:] = -math.inf
    return wide


def _is_likeliest(spec: SamplingRow, token: int) -> bool:
    """Whether a row's choice is its argmax ``token``: it is greedy, and nothing keeps it from that. A grammar's mask
    seldom does, and then the row needs no pass over its logits."""
    if spec.temperature >= GREEDY_BELOW or spec.logit_bias or spec.banned_token_ids:
        return False
    if spec.repetition_penalty != 1.0 or spec.frequency_penalty or spec.presence_penalty:
        return False
    return not spec.allowed_token_ids or is_in_token_set(spec.allowed_token_ids, token)


def _choose(logits: Floats, vocab_size: int, sampling: Sequence[SamplingRow]) -> list[int]:
    """Tokens for rows that are not plain greedy; overwrites ``logits``, with a row for each entry of ``sampling``."""
    for i, spec in enumerate(sampling):
        _adjust(logits[i], spec)
    drawn = [i for i, spec in enumerate(sampling) if spec.temperature >= GREEDY_BELOW]
    if len(drawn) == len(sampling):
        return _draw(logits, vocab_size, sampling)
    tokens: list[int] = logits[:, :vocab_size].argmax(axis=1).tolist()
    if drawn:
        for i, token in zip(drawn, _draw(logits[drawn], vocab_size, [sampling[i] for i in drawn]), strict=True):
            tokens[i] = token
    return tokens


def _adjust(row: Floats, spec: SamplingRow) -> None:
    """Bias, bans and penalties of one row, in place; next to nothing for the common row that has none."""
    for token, bias in spec.logit_bias:
        row[token] += bias
    if spec.allowed_token_ids:
        _allow_only(row, spec.allowed_token_ids)
    if spec.banned_token_ids:
        _ban(row, list(spec.banned_token_ids))
    if spec.repetition_penalty != 1.0:
        # A token in both is written twice, with the same value, as the original row is read.
        seen = np.concatenate((unpack_ints(spec.prompt_ids), unpack_ints(spec.output_ids)))
        values = row[seen]
        row[seen] = np.where(values > 0, values / spec.repetition_penalty, values * spec.repetition_penalty)
    if (spec.frequency_penalty or spec.presence_penalty) and spec.output_ids:
        counts = unpack_ints(spec.output_counts)
        row[unpack_ints(spec.output_ids)] -= (spec.frequency_penalty * counts + spec.presence_penalty).astype(row.dtype)


def _allow_only(row: Floats, allowed: bytes) -> None:
    """Leave nothing but a set of tokens. Adding is thirty times as fast as choosing by a mask."""
    bits = set_bits(allowed)
    if bits is None:
        ids = unpack_token_set(allowed)
        kept = row[ids]
        row[:] = -math.inf
        row[ids] = kept
        return
    num_bits = min(len(row), 8 * len(bits))
    row[:num_bits] += np.take(_FORBIDDEN, bits, axis=0).reshape(-1)[:num_bits]
    row[num_bits:] = -math.inf


_FORBIDDEN = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -math.inf
).astype(np.float32)
"""[256, 8]: what is added to the logits of eight tokens, by the byte with their bits."""


def _ban(row: Floats, token_ids: list[int]) -> None:
    """Ban tokens. If all remaining tokens are banned, the ban is lifted, as some token has to be drawn."""
    kept = row[token_ids]
    row[token_ids] = -math.inf
    if row.max() == -math.inf:
        row[token_ids] = kept


def _column(values: list[float], dtype: npt.DTypeLike) -> Floats:
    return np.array(values, dtype=dtype)[:, None]


def _draw(logits: Floats, vocab_size: int, sampling: Sequence[SamplingRow]) -> list[int]:
    """One token a row from the tempered, truncated distribution; overwrites ``logits``."""
    # Weights relative to the likeliest token, which has exactly 1: no overflow at any temperature, and min-p is a
    # comparison with the parameter itself.
    weights = logits
    weights -= weights.max(axis=1, keepdims=True)
    weights /= _column([spec.temperature for spec in sampling], weights.dtype)
    np.exp(weights, out=weights)
    if any(spec.min_p > 0.0 for spec in sampling):
        weights[weights < _column([min(spec.min_p, 1.0) for spec in sampling], weights.dtype)] = 0.0
    uniforms = uniform_draws([spec.seed for spec in sampling], [spec.position for spec in sampling])
    limits = [spec.top_k if 0 < spec.top_k < vocab_size else 0 for spec in sampling]
    narrow = [i for i, spec in enumerate(sampling) if limits[i] or spec.top_p < 1.0]
    if not narrow:
        return _invert(weights, uniforms)
    tokens = [0] * len(sampling)
    for i in narrow:
        tokens[i] = _draw_narrow(weights[i], limits[i], sampling[i].top_p, float(uniforms[i]))
    whole = sorted(set(range(len(sampling))).difference(narrow))
    if whole:
        for i, token in zip(whole, _invert(weights[whole], uniforms[whole]), strict=True):
            tokens[i] = token
    return tokens


def _running_sum(weights: Floats) -> npt.NDArray[np.float64]:
    """Running sum along the vocabulary, at the end of each block of ``_SUM_BLOCK``."""
    blocks = weights.reshape(weights.shape[0], -1, _SUM_BLOCK).sum(axis=2)
    return blocks.cumsum(axis=1, dtype=np.float64)


def _invert(weights: Floats, uniforms: npt.NDArray[np.float64]) -> list[int]:
    """The token at ``uniform * total`` of each row's cumulative weights, in token-id order."""
    running = _running_sum(weights)
    total = running[:, -1:]
    target = np.minimum(uniforms[:, None] * total, total * (1.0 - 2.0**-52))  # so that some block ends above it
    block = (running <= target).sum(axis=1, keepdims=True)
    before = np.where(block > 0, np.take_along_axis(running, np.maximum(block - 1, 0), axis=1), 0.0)
    inside = np.take_along_axis(weights, block * _SUM_BLOCK + np.arange(_SUM_BLOCK), axis=1)
    cumulative = inside.cumsum(axis=1, dtype=np.float64) + before
    # The two sums of a block may differ in their last bits: never pass the last token that has weight.
    last = _SUM_BLOCK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    offset = np.minimum((cumulative <= target).sum(axis=1), last)
    tokens: list[int] = (block[:, 0] * _SUM_BLOCK + offset).tolist()
    return tokens


def _draw_narrow(weights: Floats, top_k: int, top_p: float, uniform: float) -> int:
    """The token at ``uniform`` of one row's weights, after top-k (0: all), then top-p.

    Top-k keeps every token that ties with the k-th. Top-p keeps the smallest set of likeliest tokens with a share of
    the weights after top-k of at least ``top_p``; among equal weights at its edge the lowest ids.
    """
    least = float(np.finfo(weights.dtype).smallest_subnormal)
    if top_k:
        edge = float(np.partition(weights, len(weights) - top_k)[len(weights) - top_k])
        ids = np.flatnonzero(weights >= max(edge, least))
        kept = weights[ids]
        total = float(kept.sum(dtype=np.float64))
    else:
        total = float(_running_sum(weights[None])[0, -1])
        # Tokens below this weigh less than 1 - top_p of the whole, together: the nucleus is among the others.
        bound = 0.999 * (1.0 - top_p) * total / len(weights)
        ids = np.flatnonzero(weights >= max(bound, least))
        kept = weights[ids]
    if top_p < 1.0:
        nucleus = _nucleus(kept, top_p * total)
        ids, kept = ids[nucleus], kept[nucleus]
    cumulative = kept.cumsum(dtype=np.float64)
    place = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _nucleus(weights: Floats, target: float) -> npt.NDArray[np.intp]:
    """Indices, ascending, of the fewest largest ``weights`` with a sum of at least ``target``; ties by lowest index."""
    ranked = np.sort(weights)[::-1]
    sums = ranked[:_FEW_CANDIDATES].cumsum(dtype=np.float64)
    if sums[-1] < target:
        sums = ranked.cumsum(dtype=np.float64)
    last = min(int(sums.searchsorted(target)), len(ranked) - 1)
    edge = ranked[last]
    chosen = weights > edge
    num_at_edge = last + 1 - np.count_nonzero(chosen)
    chosen[np.flatnonzero(weights == edge)[:num_at_edge]] = True
    return np.flatnonzero(chosen)


def _log_softmax(logits: Tensor, slots: list[int]) -> Floats:
    """Natural-log probabilities of some rows, in float64."""
    wide = _widen(logits, slots)[:, : logits.shape[1]]
    shifted = wide - wide.max(axis=1, keepdims=True).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _describe(logprobs: Floats, tokens: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
    """``TokenLogprobs`` of each row of log-probabilities; equal ones rank by lowest id."""
    num_rows, vocab_size = logprobs.shape
    own = np.take_along_axis(logprobs, np.array(tokens)[:, None], axis=1)
    ranks = ((logprobs > own).sum(axis=1) + 1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * num_rows
    count = min(max(num_tops), vocab_size)
    if count > 0:
        edges = np.partition(logprobs, vocab_size - count, axis=1)[:, vocab_size - count, None]
        rows, ids = np.nonzero(logprobs >= edges)  # at least `count` a row, more where there are ties
        values = logprobs[rows, ids]
        order = np.lexsort((ids, -values, rows))
        starts = np.searchsorted(rows, np.arange(num_rows))
        best = order[starts[:, None] + np.arange(count)]
        pairs = zip(ids[best].tolist(), values[best].tolist(), num_tops, strict=True)
        tops = [tuple(zip(row_ids[:num], row_values[:num], strict=True)) for row_ids, row_values, num in pairs]
    return [TokenLogprobs(*fields) for fields in zip(tokens, own[:, 0].tolist(), ranks, tops, strict=True)]


def _of_tokens(entry: TokenLogprobs, logprobs: Floats, token_ids: Sequence[int]) -> TokenLogprobs:
    """The entry with the requested tokens instead of the likeliest ones; ``logprobs`` is the entry's row."""
    if not token_ids:
        return entry
    return entry._replace(top=tuple(zip(token_ids, logprobs[list(token_ids)].tolist(), strict=True)))
