"""Everything of a layer but attention and products, in Triton: norms, heads on their way into attention and the cache,
activations, rows by number, blocks of KV in and out, the likeliest token.

Results are rounded as in ``torch_kernels``; sums are float32. One program makes a row's sums, in the same way in every
batch, so no row depends on another. Each kernel waits for the one before it
(``PDL``) only after it has loaded the data that no kernel writes.

Kernels are not specialized on values that differ from step to step, so that a server compiles before its first step
only.

Not here: checks of arguments and choices of sizes (``kernels``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from jettison.device.model.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT

MOVE_WORDS = 4096
"""Words of four bytes that one program of ``move_rows_kernel`` has under way: 16 KiB, as many as its registers hold."""

ARGMAX_CHUNK = 4096
"""Logits that one program of the first stage of argmax reads."""


_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _normalized(value, gain, total, width, eps, KIND: tl.constexpr):
    """The normalized value in float32, times ``gain`` and of its type. KIND: see ``arithmetic.RmsNorm``."""
    scaled = value * (1.0 / tl.sqrt_rn(total / width + eps))
    factor = gain.to(tl.float32)
    if KIND == "rms":
        scaled = scaled.to(gain.dtype).to(tl.float32)
    if KIND == "rms_plus_one":
        factor += 1.0
    return (scaled * factor).to(gain.dtype)


@triton.jit
def _squares(value):
    """Squares, rounded before they are added: else two threads that add the same squares could fuse different ones, and
    differ."""
    return tl.fma(value, value, 0.0)


@triton.jit
def norm_kernel(
    x, residual, gains, out, x_stride, residual_stride, out_stride, width, eps,
    ADD: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``Kernels.rms_norm``, and with ``ADD`` ``add_rms_norm``. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < width
    gain = tl.load(gains + dims, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + dims, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + dims, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(out.dtype.element_ty)
        tl.store(residual + row * residual_stride + dims, rounded, mask=inside)
        value = rounded.to(tl.float32)
    total = tl.sum(_squares(value), 0)
    tl.store(out + row * out_stride + dims, _normalized(value, gain, total, width, eps, KIND), mask=inside)


@triton.jit
def layer_norm_kernel(
    x, gains, biases, out, x_stride, out_stride, width, eps,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``Kernels.layer_norm``. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < width
    gain = tl.load(gains + dims, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(biases + dims, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + dims, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scaled = value * (1.0 / tl.sqrt_rn(tl.sum(_squares(value), 0) / width + eps))
    tl.store(out + row * out_stride + dims, tl.fma(scaled, gain, bias).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gains(q_gains, k_gains, at, q_mask, k_mask):
    """Of the heads' norms: queries' and keys' own, and no other's."""
    of_queries = tl.load(q_gains + at[None, :], mask=q_mask, other=0.0)
    return of_queries + tl.load(k_gains + at[None, :], mask=k_mask, other=0.0)


@triton.jit
def _biased(value, bias, at, inside):
    """The value with its bias, summed in float32."""
    return (value.to(tl.float32) + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)


@triton.jit
def _turned(value, partners, cos, sin, position, num_positions, dims, R: tl.constexpr):
    """Heads at their position, in float32. ``partners``: what each element is turned with."""
    known = (dims < R) & (position >= 0) & (position < num_positions)
    c = tl.load(cos + position.to(tl.int64) * R + dims, mask=known, other=1.0)
    s = tl.load(sin + position.to(tl.int64) * R + dims, mask=known, other=0.0)
    s = tl.where(dims < R // 2, -s, s)
    return tl.fma(value.to(tl.float32), c[None, :], partners.to(tl.float32) * s[None, :])


@triton.jit(do_not_specialize=["positions", "slots"])
def heads_kernel(
    qkv, bias, arena, q_gains, k_gains, cos, sin, positions, slots, stride, num_positions, eps,
    HQ: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, BS: tl.constexpr,
    HB: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, KIND: tl.constexpr, ROTATES: tl.constexpr,
    WRITES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From the product of queries, keys and values to the input of attention: bias, norm of heads, rotation, cache.

    ``qkv``: [T, HQ + 2 * KVH heads]. Queries change in place. With ``WRITES`` keys and values go to their places in the
    cache; else keys change in place, too. A token with a negative slot is padding, and writes nothing to the cache. HB
    heads a program. With KVH = 0 all heads are queries.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    dims = tl.arange(0, DP)
    HALF: tl.constexpr = R // 2
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < R, dims - HALF, dims))
    is_q = head < HQ
    is_k = (head >= HQ) & (head < HQ + KVH)
    is_v = (head >= HQ + KVH) & (head < HQ + 2 * KVH)
    inside = (head < HQ + 2 * KVH)[:, None] & (dims < D)[None, :]
    own = head[:, None] * D + dims[None, :]
    other = head[:, None] * D + partner[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + token.to(tl.int64) * stride
    x = tl.load(source + own, mask=inside, other=0.0)
    y = tl.load(source + other, mask=inside, other=0.0)
    tl.debug_barrier()  # all have read before one writes
    if HAS_BIAS:
        x = _biased(x, bias, own, inside)
        y = _biased(y, bias, other, inside)
    value = x
    if HAS_NORM:
        wide = x.to(tl.float32)
        total = tl.sum(_squares(wide), 1)[:, None]
        q_mask = is_q[:, None] & (dims < D)[None, :]
        k_mask = is_k[:, None] & (dims < D)[None, :]
        gain = _gains(q_gains, k_gains, dims, q_mask, k_mask)
        other_gain = _gains(q_gains, k_gains, partner, q_mask, k_mask)
        value = tl.where(is_v[:, None], x, _normalized(wide, gain, total, D, eps, KIND))
        y = tl.where(is_v[:, None], y, _normalized(y.to(tl.float32), other_gain, total, D, eps, KIND))
    if ROTATES:
        turned = _turned(value, y, cos, sin, tl.load(positions + token), num_positions, dims, R)
        value = tl.where(is_v[:, None], value, turned.to(value.dtype))
    stays = inside & is_q[:, None]
    if WRITES:
        slot = tl.load(slots + token).to(tl.int64)
        goes = inside & (is_k | is_v)[:, None] & (slot >= 0)
        kvh = tl.where(is_v, head - HQ - KVH, head - HQ)
        place = (slot // BS) * (2 * KVH * BS * D) + (slot % BS) * D
        at = place + tl.where(is_v, KVH * BS * D, 0) + kvh * (BS * D)
        tl.store(arena + at[:, None] + dims[None, :], value, mask=goes)
    else:
        stays = inside & (is_q | is_k)[:, None]
    tl.store(source + own, value, mask=stays)


@triton.jit(do_not_specialize=["slots"])
def write_kv_kernel(
    k, v, arena, slots, k_stride, v_stride,
    KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``Kernels.write_kv``. One program a token and head."""
    token = tl.program_id(0).to(tl.int64)
    kvh = tl.program_id(1)
    dims = tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    inside = (dims < D) & (slot >= 0)
    to = arena + (slot // BS) * (2 * KVH * BS * D) + kvh * (BS * D) + (slot % BS) * D + dims
    tl.store(to, tl.load(k + token * k_stride + kvh * D + dims, mask=inside), mask=inside)
    tl.store(to + KVH * BS * D, tl.load(v + token * v_stride + kvh * D + dims, mask=inside), mask=inside)


@triton.jit
def _activated(value, KIND: tl.constexpr):
    """The tanh of GELU goes by way of its exponential: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))."""
    if KIND == "silu":
        made = value / (1.0 + tl.exp(-value))
    elif KIND == "gelu_tanh":
        made = value / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    else:
        made = 0.5 * value * (1.0 + tl.erf(0.7071067811865476 * value))
    return made


@triton.jit
def activation_kernel(
    up, out, in_stride, out_stride, width,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``Kernels.activate``."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = up + row * in_stride
    if KIND == "swiglu_clamped":
        gate = tl.load(source + 2 * dims, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(source + 2 * dims + 1, mask=inside, other=0.0).to(tl.float32)
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)  # NaN stays
        value = tl.where(value > _LIMIT, _LIMIT, tl.where(value < -_LIMIT, -_LIMIT, value))
        made = (value + 1.0) * gate / (1.0 + tl.exp(-_ALPHA * gate))
    else:
        made = _activated(tl.load(source + dims, mask=inside, other=0.0).to(tl.float32), KIND)
        if IS_GATED:
            made *= tl.load(source + width + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + dims, made.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ids"])
def gather_kernel(table, ids, out, num_rows, width, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """See ``Kernels.gather_rows``. A row beyond the table is NaN, and so are its logits, so that it fails alone."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.load(ids + row)
    known = (index >= 0) & (index < num_rows)
    value = tl.load(table + index * width + dims, mask=(dims < width) & known, other=float("nan"))
    tl.store(out + row * out_stride + dims, value, mask=dims < width)


@triton.jit(do_not_specialize=["num_rows"])
def move_rows_kernel(sources, targets, num_rows, num_words, BLOCK: tl.constexpr):
    """Copy rows of four-byte words from address to address: of the card's memory, or of pinned memory of the host,
    where the lists of addresses (int64) may lie, too.

    Each program takes a part of a row, and then the part that lies as many on as there are programs: so a few of them
    move any number of rows. It asks for the addresses of its next part before it moves one, as they come from afar.
    """
    num_parts = tl.cdiv(num_words, BLOCK)
    last = num_rows * num_parts - 1
    first = tl.program_id(0)
    source, target = tl.load(sources + first // num_parts), tl.load(targets + first // num_parts)
    for part in range(first, last + 1, tl.num_programs(0)):
        following = tl.minimum(part + tl.num_programs(0), last) // num_parts
        next_source, next_target = tl.load(sources + following), tl.load(targets + following)
        words = (part % num_parts) * BLOCK + tl.arange(0, BLOCK)
        inside = words < num_words
        here = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + words
        there = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + words
        tl.store(there, tl.load(here, mask=inside, eviction_policy="evict_first"), mask=inside)
        source, target = next_source, next_target


@triton.jit
def argmax_parts_kernel(logits, best, at_best, stride, vocab, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """For each chunk of a row, the largest logit and its lowest index; NaN where a logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = part * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    value = tl.load(logits + row * stride + index, mask=inside, other=0.0).to(tl.float32)
    is_odd = tl.max((inside & ~(tl.abs(value) < float("inf"))).to(tl.int32), 0)
    value = tl.where(inside, value, float("-inf"))
    top = tl.max(value, 0)
    lowest = tl.min(tl.where(inside & (value == top), index, 2147483647), 0)
    tl.store(best + row * num_parts + part, tl.where(is_odd > 0, float("nan"), top))
    tl.store(at_best + row * num_parts + part, lowest)


@triton.jit
def argmax_kernel(best, at_best, out, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """See ``Kernels.argmax``, from the chunks' results."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    inside = parts < num_parts
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(best + row * num_parts + parts, mask=inside, other=float("-inf"))
    is_odd = tl.max((value != value).to(tl.int32), 0)
    value = tl.where(value != value, float("-inf"), value)
    index = tl.load(at_best + row * num_parts + parts, mask=inside, other=2147483647)
    lowest = tl.min(tl.where(value == tl.max(value, 0), index, 2147483647), 0)
    tl.store(out + row, tl.where(is_odd > 0, -1, lowest).to(tl.int64))
