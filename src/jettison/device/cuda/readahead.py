"""Reading ahead: kernels that leave the memory idle ask for what the next product reads, its weights.

A request names bytes and returns at once; they then lie in the second-level cache. No bit of a result changes.

Not here: how much is worth asking for (``tiles``), and which kernel asks (``kernels``).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = tl.constexpr(2048)
"""Bytes of one request."""

_PACED_CHUNKS = tl.constexpr(8)
"""Requests of a program that takes its time, before it pauses."""

_ASK = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 2048; mov.b32 $0, 0; }"
)
_PAUSE = tl.constexpr("nanosleep.u32 $1; mov.b32 $0, 0;")


class Ahead(NamedTuple):
    """What is asked for: the start of a matrix."""

    weight: Tensor
    num_bytes: int
    pace_ns: int = 0
    """Pause of a program between some requests and the next, where other programs of the kernel wait for memory."""


@triton.jit
def read_ahead(weight, num_bytes, program, num_programs, THREADS: tl.constexpr, PACE_NS: tl.constexpr):
    """One program's share of the requests, one a thread. Needs compute capability 9."""
    LANES: tl.constexpr = _PACED_CHUNKS if PACE_NS else THREADS
    lanes = tl.arange(0, THREADS)
    num_chunks = num_bytes // _CHUNK
    start = weight.to(tl.int64)
    for first in tl.range(program, num_chunks, num_programs * LANES):
        chunk = first + lanes * num_programs
        asks = ((chunk < num_chunks) & (lanes < LANES)).to(tl.int32)
        ask(start + chunk.to(tl.int64) * _CHUNK, asks)
        if PACE_NS:
            pause = tl.full([THREADS], PACE_NS, tl.int32)
            tl.inline_asm_elementwise(_PAUSE, "=r,r", [pause], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask(addresses, asks):
    """For 2,048 bytes from each address (int64, a multiple of 16) whose ``asks`` (int32) is not zero. As many as
    threads: of fewer, each would be asked for several times."""
    tl.inline_asm_elementwise(_ASK, "=r,l,r", [addresses, asks], dtype=tl.int32, is_pure=False, pack=1)
