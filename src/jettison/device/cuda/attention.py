"""Paged attention in Triton: prefill, chunks and decode in one launch, over the items of ``worklist``.

A token's positions are processed ``POSITIONS`` at a time; the sums of ``SPLIT`` positions form a split, and the sums of
all splits are merged in ascending order. Either one program does all of it, or several programs each do a split and the
last to end merges. Products that could be fused with an addition in one place and not in another are fused here by
name. So a token's bits depend on its position, its queries and its keys and values alone: not on the batch, the chunk
or the tile. Positions and splits that a window hides from all tokens of a tile are left out; hidden ones that are not
change no bit. The list of work is the same for all windows, so layers with and without one share it.

Not here: the list of work (``worklist``), sizes (``tiles``), and checks of arguments (``kernels``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jettison.device.cuda.launching import launch as launch_kernel
from jettison.device.cuda.tiles import PART_ROWS, POSITIONS, SPLIT, Tile
from jettison.device.cuda.worklist import HEADER_WORDS, ITEM_WORDS

_LN_2 = tl.constexpr(math.log(2))
_HEADER = tl.constexpr(HEADER_WORDS)
_ITEM = tl.constexpr(ITEM_WORDS)


class Launch(NamedTuple):
    """The options of a launch of attention."""

    tile: Tile
    programs: int
    only_context: bool = False
    lse: Tensor | None = None
    early: bool = False
    """See ``early_launch``."""
    window: int = 0
    softcap: float = 0.0


def early_launch(early: bool) -> dict[str, bool]:
    """Options of a launch that may begin while the kernel before it ends (compute capability 9 on); such a kernel waits
    before it touches memory that others write."""
    return {"launch_pdl": True} if early else {}


class Parts:
    """Memory of the sums of splits until they are merged: for one launch at a time, so each stream has its own."""

    @staticmethod
    def num_bytes(kv_heads: int, head_dim: int) -> int:
        """Bytes of these sums on the device: 34 MB with 4 KV heads of 128."""
        return 4 * PART_ROWS * kv_heads * (triton.next_power_of_2(head_dim) + 3)

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device) -> None:
        width = triton.next_power_of_2(head_dim)
        self.sums = torch.empty(PART_ROWS * kv_heads * width, dtype=torch.float32, device=device)
        self.scales = torch.empty(2 * PART_ROWS * kv_heads, dtype=torch.float32, device=device)
        """The largest score and the sum of exponentials of each row, one after the other for each split."""
        self.arrived = torch.zeros(PART_ROWS * kv_heads, dtype=torch.int32, device=device)
        """Finished splits of each tile: zero between launches."""


def attend(
    q: Tensor, arena: Tensor, tables: Tensor, work: Tensor, out: Tensor, scale: float, parts: Parts, launch: Launch,
) -> None:
    """See ``Kernels.attention``; ``tables``: int32 [R, max_blocks] and ``work`` (``worklist.fill_work``) on the device.

    Reads nothing on the host, so a captured launch goes with any later list. An early launch reads ``work`` while the
    kernel before it runs: no kernel may write it, and a copy must be in the stream before that kernel.
    """
    _, _, kv_heads, block_size, head_dim = arena.shape
    softcap = launch.softcap
    inner = 2 * scale / softcap * math.log2(math.e) if softcap else 0.0
    arguments = (
        q, arena, tables, work, out, out if launch.lse is None else launch.lse,
        parts.sums, parts.scales, parts.arrived, tables.stride(0), q.stride(0), out.stride(0),
        (softcap or scale) * math.log2(math.e), inner, launch.window,
    )  # fmt: skip
    constants = {
        "KVH": kv_heads, "G": q.shape[1] // kv_heads, "D": head_dim, "DP": triton.next_power_of_2(head_dim),
        "BS": block_size, "BM": launch.tile.rows, "BN": POSITIONS, "SPLIT": SPLIT, "CAUSAL": not launch.only_context,
        "HAS_LSE": launch.lse is not None, "WINDOWED": launch.window > 0, "CAPPED": softcap > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "PDL": launch.early,
    }  # fmt: skip
    launch_kernel(
        attend_kernel, (launch.programs,), arguments, constants, num_warps=launch.tile.warps,
        num_stages=launch.tile.stages, **early_launch(launch.early),
    )


@triton.jit(do_not_specialize=["tables", "work", "table_stride", "window"])  # they differ from step to step, or layer
def attend_kernel(
    q, arena, tables, work, out, lse, part_sums, part_scales, arrived,
    table_stride, q_stride, o_stride, scale, inner, window,
    KVH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_LSE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes every so-many-th (item, KV head). Row r of a tile is token r // G with query head r % G.

    A dot product times ``scale`` is an exponent of two. Where ``CAPPED`` it is first replaced by the tanh of what it is
    to be, of which the e^2x is two to the power of the product times ``inner``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BM)
    dims = tl.arange(0, DP)
    total = tl.load(work) * KVH
    part_rows = tl.load(work + 1)
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        item = work + _HEADER + (index // KVH) * _ITEM
        kvh = index % KVH
        table = tables + tl.load(item).to(tl.int64) * table_stride
        token = tl.load(item + 1).to(tl.int64)
        valid = rows // G < tl.load(item + 2)
        kv_end = tl.load(item + 4)
        split = tl.load(item + 5)
        slot = tl.load(item + 6)
        if PDL:
            tl.extra.cuda.gdc_wait()  # returns at once except for the first item
        position = tl.load(item + 3) + rows // G
        lowest = 0
        first_split = 0
        if WINDOWED:
            lowest = tl.maximum(tl.load(item + 3) - window + 1, 0)
            first_split = lowest // SPLIT
        inside = valid[:, None] & (dims < D)[None, :]
        at = (rows // G) * q_stride + (kvh * G + rows % G) * D
        query = tl.load(q + token * q_stride + at[:, None] + dims[None, :], mask=inside, other=0.0)
        num_splits = tl.cdiv(kv_end, SPLIT)
        top, weight, sums = _splits(
            query, arena + kvh * (BS * D), table, position, split, first_split,
            tl.where(slot < 0, num_splits, split + 1), kv_end, lowest, scale, inner, window,
            KVH, D, DP, BS, BM, BN, SPLIT, CAUSAL, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        is_last = slot < 0
        if slot >= 0:
            is_last, top, weight, sums = _gathered(
                part_sums, part_scales, arrived + slot * KVH + kvh, (slot * KVH + kvh) * part_rows + rows,
                KVH * part_rows, split, first_split, num_splits, valid, top, weight, sums, BM, DP, WINDOWED,
            )  # fmt: skip
        if is_last:
            at_out = (rows // G) * o_stride + (kvh * G + rows % G) * D
            value = _average(sums, weight, WINDOWED and not CAUSAL).to(out.dtype.element_ty)
            tl.store(out + token * o_stride + at_out[:, None] + dims[None, :], value, mask=inside)
            if HAS_LSE:
                at_lse = (token + rows // G) * (KVH * G) + kvh * G + rows % G
                tl.store(lse + at_lse, (top + tl.log2(weight)) * _LN_2, mask=valid)
    if PDL:
        if total == 0:
            tl.extra.cuda.gdc_wait()  # else the next kernel could overtake the previous one


@triton.jit
def _splits(
    query, keys, table, position, split, first_split, end, kv_end, lowest, scale, inner, window,
    KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of the splits from ``split`` to ``end``, merged in ascending order, less what lies before
    ``first_split``."""
    first = split
    if WINDOWED:
        first = tl.maximum(split, first_split)
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, DP], tl.float32)
    for s in tl.range(first, end):
        m, el, o = _one_split(
            query, keys, table, position, s * SPLIT, tl.minimum((s + 1) * SPLIT, kv_end), lowest, scale, inner,
            window, KVH, D, DP, BS, BM, BN, CAUSAL, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        top, weight, sums = _merge(top, weight, sums, m, el, o)
    return top, weight, sums


@triton.jit
def _one_split(
    query, keys, table, position, start, stop, lowest, scale, inner, window,
    KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest score (times log2 e), sum of exponentials and weighted sum of values over positions start to stop. No row
    sees a position below ``lowest``."""
    dims = tl.arange(0, DP)
    m = tl.full([BM], float("-inf"), tl.float32)
    el = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, DP], tl.float32)
    if WINDOWED:
        start = tl.maximum(start, lowest // BN * BN)
    ahead = start + tl.arange(0, BN)
    block = tl.load(table + ahead // BS, mask=ahead < stop, other=0)
    for first in tl.range(start, stop, BN):
        there = first + tl.arange(0, BN)
        is_kv = there < stop
        if WINDOWED:
            is_kv = is_kv & (there >= lowest)
        next_block = tl.load(table + (there + BN) // BS, mask=there + BN < stop, other=0)
        at = (block.to(tl.int64) * (2 * KVH * BS * D) + (there % BS) * D)[:, None] + dims[None, :]
        inside = is_kv[:, None]
        if DP != D:
            inside = inside & (dims < D)[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(keys + KVH * BS * D + at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0)
        seen = is_kv[None, :]
        if CAUSAL:
            seen = seen & (there[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (there[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1) * scale)
        shift = tl.where(top == float("-inf"), 0.0, -top)
        p = tl.exp2(tl.fma(scores, scale, shift[:, None]))
        fade = tl.exp2(m + shift)
        el = tl.fma(el, fade, tl.sum(p, 1))
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision=PRECISION)
        m = top
        block = next_block
    return m, el, o


@triton.jit
def _gathered(
    part_sums, part_scales, arrived, first, step, split, first_split, num_splits, valid, top, weight, sums,
    BM: tl.constexpr, DP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Put the sums of a split beside those of the tile's other splits, the first of which is at ``first`` and each next
    one ``step`` behind. The last to arrive gets the sums of all."""
    part = first + split * step
    counts = valid
    if WINDOWED:
        counts = counts & (split >= first_split)
    at_sums = part.to(tl.int64)[:, None] * DP + tl.arange(0, DP)[None, :]
    tl.store(part_sums + at_sums, sums, mask=counts[:, None])
    tl.store(part_scales + 2 * part, top, mask=counts)
    tl.store(part_scales + 2 * part + 1, weight, mask=counts)
    tl.debug_barrier()  # one thread counts below: it must not run ahead of the others' stores
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_last:
        tl.store(arrived, 0)
        top, weight, sums = _merged(
            part_sums, part_scales, first + first_split * step, step, num_splits - first_split, valid, BM, DP
        )
    return is_last, top, weight, sums


@triton.jit
def _merged(
    part_sums, part_scales, first, step, num_splits, valid, BM: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """All splits of a tile in ascending order. Few rows: four wait for memory at once, as registers allow."""
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, DP], tl.float32)
    TOGETHER: tl.constexpr = 4 if BM <= 16 else 1
    for s in tl.range(0, num_splits, TOGETHER):
        part = first + s * step
        m, el, o = _load_part(part_sums, part_scales, part, valid, DP)
        if TOGETHER == 4:
            m1, el1, o1 = _load_part(part_sums, part_scales, part + step, valid & (s + 1 < num_splits), DP)
            m2, el2, o2 = _load_part(part_sums, part_scales, part + 2 * step, valid & (s + 2 < num_splits), DP)
            m3, el3, o3 = _load_part(part_sums, part_scales, part + 3 * step, valid & (s + 3 < num_splits), DP)
            top, weight, sums = _merge(top, weight, sums, m, el, o)
            top, weight, sums = _merge(top, weight, sums, m1, el1, o1)
            top, weight, sums = _merge(top, weight, sums, m2, el2, o2)
            top, weight, sums = _merge(top, weight, sums, m3, el3, o3)
        else:
            top, weight, sums = _merge(top, weight, sums, m, el, o)
    return top, weight, sums


@triton.jit
def _load_part(part_sums, part_scales, part, valid, DP: tl.constexpr):
    """The result of a split; where it is not valid, values that do not change a merge."""
    at_sums = part.to(tl.int64)[:, None] * DP + tl.arange(0, DP)[None, :]
    m = tl.load(part_scales + 2 * part, mask=valid, other=float("-inf"), cache_modifier=".cg")
    el = tl.load(part_scales + 2 * part + 1, mask=valid, other=0.0, cache_modifier=".cg")
    o = tl.load(part_sums + at_sums, mask=valid[:, None], other=-0.0, cache_modifier=".cg")
    return m, el, o


@triton.jit
def _average(sums, weight, MAY_SEE_NOTHING: tl.constexpr):
    """Weighted sums over their weights; zeros for a row that sees nothing."""
    if MAY_SEE_NOTHING:
        weight = tl.where(weight == 0, 1.0, weight)
    return sums / weight[:, None]


@triton.jit
def _merge(top, weight, sums, m, el, o):
    """Merge the sums of the next split into the sums so far."""
    both = tl.maximum(top, m)
    shift = tl.where(both == float("-inf"), 0.0, -both)
    a = tl.exp2(top + shift)
    b = tl.exp2(m + shift)
    return both, tl.fma(weight, a, el * b), tl.fma(sums, a[:, None], o * b[:, None])
