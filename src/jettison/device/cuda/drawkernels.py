"""Draws on a card, in two launches for any number of rows and any width of what a row keeps.

``weigh_kernel`` makes weights, many programs a row. ``draw_kernel``, one program a row, finds where top-k and top-p cut
them, and the token. A cut is exact: weights, which are not negative, order as their bits do, so the edge is found by
halving the range of bits. Each look at the row moves an end of the range to a weight that there is, and the search ends
when one is left: after up to 20 looks, and up to 15 at logits that are rounded to bfloat16.

Not here: what a weight is and how it is counted, which ``draws`` says, and log-probabilities (``logprobkernels``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Logits of one program of ``weigh_kernel``."""

BLOCK = 8192
"""Weights that a program of ``draw_kernel`` reads at once; a row of weights is padded to whole blocks."""

DRAW_WARPS = 16
"""Of ``draw_kernel``."""


def draw(logits: Tensor, lines: Tensor, at_best: Tensor, of: Mapping[str, Tensor], tokens: Tensor) -> None:
    """See ``plaindraws.draw``."""
    num_rows, vocab = len(lines), logits.shape[1]
    size = triton.cdiv(vocab, BLOCK) * BLOCK
    bits = torch.empty(num_rows, size, dtype=torch.int32, device=logits.device)
    weigh_kernel[(num_rows, size // CHUNK)](
        logits, lines, at_best, of["temperature"], of["min_p"], bits, logits.stride(0), vocab, size, CHUNK=CHUNK,
        num_warps=8,
    )
    draw_kernel[(num_rows,)](
        bits, of["top_k"], of["top_p"], of["uniform"], of["slots"], tokens, size, BLOCK=BLOCK, num_warps=DRAW_WARPS
    )


@triton.jit(do_not_specialize=["lines", "temperature", "min_p"])
def weigh_kernel(
    logits, lines, at_best, temperature, min_p, bits, stride, vocab, size, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weights of the rows ``lines`` of ``logits``, as the bits of float32: 1 for the likeliest token (``at_best``), 0
    for what min-p leaves out, what is no number, and beyond the vocabulary. With a negative temperature only the
    largest logit has any."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    source = logits + tl.load(lines + row) * stride
    best = tl.load(source + tl.maximum(tl.load(at_best + row), 0)).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    logit = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    weight = tl.exp(tl.div_rn(logit - best, tl.abs(heat) + tl.zeros([CHUNK], tl.float32)).to(tl.float64)).to(tl.float32)
    weight = tl.where(heat < 0.0, (logit == best).to(tl.float32), weight)
    weight = tl.where((weight >= tl.load(min_p + row).to(tl.float32)) & (weight <= 1.0), weight, 0.0)
    tl.store(bits + row * size + ids, weight.to(tl.int32, bitcast=True))


@triton.jit
def _counted(bits):
    """Weights in whole units of 2^-40, the nearest, of two the even one: int64. Adding and taking 2^23 away rounds a
    smaller float32; a larger one is whole."""
    units = bits.to(tl.float32, bitcast=True) * 1099511627776.0
    return tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units).to(tl.int64)


@triton.jit
def _loaded(bits, start, BLOCK: tl.constexpr):
    """A block of weights in fours, each of which a thread loads, and adds up, by itself."""
    return tl.load(bits + start + 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def _edge(bits, size, least, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight at which it and all larger ones reach ``target``, as bits, at least ``least``; and what the
    larger ones reach. BY_COUNT: a weight adds one, else its units.

    A weight's distance from the middle, as a number without a sign, is small for those from the middle up, and from
    2^31 on for those below: the least distance is of the lowest above, the largest of the highest below."""
    most = tl.full((), 0x3F800000, tl.int32)  # 1, the weight of the likeliest token
    above = tl.full((), 0, tl.int64)
    while least < most:
        middle = least + (most - least + 1) // 2
        reached = tl.zeros([BLOCK // 4], tl.int64)
        nearest = tl.full([BLOCK // 4], 0xFFFFFFFF, tl.uint32)
        farthest = tl.zeros([BLOCK // 4], tl.uint32)
        for start in range(0, size, BLOCK):
            weight = _loaded(bits, start, BLOCK)
            is_up = weight >= middle
            reached += tl.sum(is_up.to(tl.int64) if BY_COUNT else _counted(tl.where(is_up, weight, 0)), 1)
            distance = (weight - middle).to(tl.uint32, bitcast=True)
            nearest = tl.minimum(nearest, tl.min(distance, 1))
            farthest = tl.maximum(farthest, tl.max(distance, 1))
        total = tl.sum(reached, 0)
        is_reached = total >= target
        above = tl.where(is_reached, above, total)
        least = tl.where(is_reached, middle + tl.min(nearest, 0).to(tl.int32, bitcast=True), least)
        most = tl.where(is_reached, most, middle + tl.max(farthest, 0).to(tl.int32, bitcast=True))
    return least, above


@triton.jit
def _total(bits, size, edge, BLOCK: tl.constexpr):
    """Units of all weights of at least ``edge``."""
    total = tl.zeros([BLOCK // 4], tl.int64)
    for start in range(0, size, BLOCK):
        weight = _loaded(bits, start, BLOCK)
        total += tl.sum(_counted(tl.where(weight >= edge, weight, 0)), 1)
    return tl.sum(total, 0)


@triton.jit
def _token(bits, edge, num_ties, target, BLOCK: tl.constexpr):
    """The first token at which the units of what is kept, by id, exceed ``target``: what is above the edge, and at the
    edge the first ``num_ties``. The kept ones together exceed it."""
    lanes = tl.arange(0, BLOCK)
    unit = _counted(edge)
    start = tl.full((), -BLOCK, tl.int32)
    before = tl.full((), 0, tl.int64)
    ties, here = before, before
    while before + here <= target:
        before += here
        num_ties -= tl.minimum(ties, num_ties)
        start += BLOCK
        weight = tl.load(bits + start + lanes)
        ties = tl.sum((weight == edge).to(tl.int64), 0)
        here = tl.sum(tl.where(weight > edge, _counted(weight), 0), 0) + tl.minimum(ties, num_ties) * unit
    weight = tl.load(bits + start + lanes)
    is_tie = weight == edge
    is_kept = (weight > edge) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= num_ties))
    running = before + tl.cumsum(tl.where(is_kept, _counted(weight), 0), 0)
    return start + tl.sum((running <= target).to(tl.int32), 0)


@triton.jit(do_not_specialize=["top_k", "top_p", "uniform", "slots", "tokens"])
def draw_kernel(bits, top_k, top_p, uniform, slots, tokens, size, BLOCK: tl.constexpr):
    """The token of one row of weights, in its slot of ``tokens``, where that is not negative; -1 if no token has any
    weight, which ends no search."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if tl.load(tokens + slot) >= 0:
        bits += row * size
        edge = tl.full((), 0, tl.int32)
        limit = tl.load(top_k + row)
        if limit > 0:
            edge, _ = _edge(bits, size, edge, limit, True, BLOCK)
        total = _total(bits, size, edge, BLOCK)
        token = tl.full((), -1, tl.int32)
        if total > 0:
            num_ties = tl.full((), 1 << 40, tl.int64)  # all
            share = tl.load(top_p + row)
            if share < 1.0:
                target = tl.minimum(tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1), total)
                edge, above = _edge(bits, size, edge, target, False, BLOCK)
                unit = _counted(edge)
                num_ties = (target - above + unit - 1) // unit
                total = above + num_ties * unit
            target = tl.minimum((tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64), total - 1)
            token = _token(bits, edge, num_ties, target, BLOCK)
        tl.store(tokens + slot, token.to(tl.int64))
