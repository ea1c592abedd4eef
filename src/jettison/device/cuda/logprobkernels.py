"""Log-probabilities on a card, in two launches: of chosen tokens, with their ranks, and of the likeliest ones.

``part_kernel`` reads the logits once, many programs a row: each has the largest logits of its chunk and a sum of
exponentials. ``describe_kernel``, one program a row, puts them together, in one order whatever the batch is.

Not here: named tokens' log-probabilities and long lists of the likeliest (``draws``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOP = 20
"""Likeliest tokens of a row, at most: each costs a pass over what a program holds."""

CHUNK = 4096
"""Logits of one program of ``part_kernel``."""

_LOWEST = tl.constexpr(-(1 << 63))
_IDS = tl.constexpr(0xFFFFFFFF)


def describe(logits: Tensor, lines: Tensor, tokens: Tensor, num_top: int) -> dict[str, Tensor]:
    """See ``plaindraws.describe``, for at most ``MOST_TOP`` likeliest tokens."""
    num_rows, vocab = len(lines), logits.shape[1]
    num_parts = triton.cdiv(vocab, CHUNK)
    # Two of them: the second half of one would be aligned for some numbers of rows alone, and compiled for anew.
    floats = [torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits.device) for _ in range(2)]
    above = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    keys = torch.empty(num_rows, num_parts, MOST_TOP, dtype=torch.int64, device=logits.device)
    own, rank = torch.empty_like(lines, dtype=torch.float64), torch.empty_like(lines)
    base = torch.empty(num_rows, 2, dtype=torch.float64, device=logits.device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, num_top, dtype=torch.float64, device=logits.device)
    part_kernel[(num_rows, num_parts)](
        logits, lines, tokens, *floats, above, keys, own, logits.stride(0), vocab, num_parts, num_top,
        CHUNK=CHUNK, MOST=MOST_TOP, num_warps=8,
    )
    describe_kernel[(num_rows,)](
        *floats, above, keys, own, rank, base, top_ids, top, num_parts, num_top, MOST=MOST_TOP,
        PARTS=triton.next_power_of_2(num_parts), KEYS=triton.next_power_of_2(num_parts * MOST_TOP), num_warps=4,
    )
    return {"own": own, "rank": rank, "base": base, "top_ids": top_ids, "top": top}


@triton.jit(do_not_specialize=["lines", "tokens", "num_top"])
def part_kernel(
    logits, lines, tokens, largest, sums, above, keys, own, stride, vocab, num_parts, num_top,
    CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Of one chunk: its largest logit, its exponentials relative to that one, the number of logits above the token's,
    and its ``num_top`` largest as keys. The first chunk writes the token's logit into ``own``.

    A key has a logit's bits, in an order, above its id, so that of equal logits the lowest id has the largest key.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = row * num_parts + part
    ids = part * CHUNK + tl.arange(0, CHUNK)
    source = logits + tl.load(lines + row) * stride
    mine = tl.load(source + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    logit = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(logit, 0)
    tl.store(largest + place, best.to(tl.float64))
    tl.store(sums + place, tl.sum(tl.exp(logit.to(tl.float64) - best.to(tl.float64)), 0))
    tl.store(above + place, tl.sum((logit > mine).to(tl.int32), 0))
    if part == 0:
        tl.store(own + row, mine.to(tl.float64))
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 is equal to 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (_IDS - ids.to(tl.int64))
    for i in range(num_top):
        top = tl.max(key, 0)
        tl.store(keys + place * MOST + i, top)
        key = tl.where(key == top, _LOWEST, key)


@triton.jit(do_not_specialize=["num_top"])
def describe_kernel(
    largest, sums, above, keys, own, rank, base, top_ids, top, num_parts, num_top,
    MOST: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of one row, from its chunks: ``own`` and ``rank`` of its token, ``top_ids`` with ``top``. ``base``: what is taken
    from any logit, the one after the other, to make its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    place = row * num_parts + parts
    best = tl.load(largest + place, mask=inside, other=float("-inf"))
    most = tl.max(best, 0)
    exponentials = tl.load(sums + place, mask=inside, other=0.0) * tl.exp(best - most)
    log_sum = tl.log(tl.sum(exponentials, 0))
    tl.store(base + row * 2, most)
    tl.store(base + row * 2 + 1, log_sum)
    tl.store(rank + row, tl.sum(tl.load(above + place, mask=inside, other=0), 0).to(tl.int64) + 1)
    tl.store(own + row, tl.load(own + row) - most - log_sum)
    candidates = tl.arange(0, KEYS)
    is_one = (candidates < num_parts * MOST) & (candidates % MOST < num_top)
    key = tl.load(keys + row * num_parts * MOST + candidates, mask=is_one, other=_LOWEST)
    for i in range(num_top):
        found = tl.max(key, 0)
        key = tl.where(key == found, _LOWEST, key)
        ordered = (found >> 32).to(tl.int32)
        logit = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
        tl.store(top_ids + row * num_top + i, _IDS - (found & _IDS))
        tl.store(top + row * num_top + i, logit.to(tl.float64) - most - log_sum)
