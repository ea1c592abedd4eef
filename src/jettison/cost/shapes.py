"""The steps that a profile runs: a grid to fit to, and random shapes to judge the fit by. No shape is in both.

Pure: limits and a seed in, shapes out. ``live.profile.step_timer`` runs them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jettison.cost.model import ChunkShape, StepShape


class ShapeKind(StrEnum):
    """The kind of step that a shape represents."""

    PREFILL = "prefill"
    PREFIX = "prefill with prefix"
    DECODE = "decode"
    MIX = "mixed batch"
    STAGE = "part of the layers"


class ProfileShape(NamedTuple):
    """One step to run."""

    kind: ShapeKind
    shape: StepShape


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """Limits of the steps that the device can run."""

    num_layers: int
    max_num_tokens: int
    """Tokens of one step."""
    max_num_seqs: int
    max_context: int
    """Tokens of one request, its own chunk included."""
    max_kv_tokens: int
    """Tokens of KV of all requests of a step, each rounded up to whole blocks."""
    block_size: int = 16

    def allow(self, shape: StepShape) -> bool:
        """Whether the device can run the shape."""
        lengths = [chunk.num_context + chunk.num_tokens for chunk in shape.chunks]
        blocks = sum(-(-length // self.block_size) for length in lengths)
        return (
            0 < shape.num_tokens <= self.max_num_tokens
            and len(lengths) <= self.max_num_seqs
            and max(lengths) <= self.max_context
            and blocks * self.block_size <= self.max_kv_tokens
            and 0 < shape.num_layers <= self.num_layers
        )


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The shapes to run; the model is never fitted to ``held_out``."""

    fitted: tuple[ProfileShape, ...]
    held_out: tuple[ProfileShape, ...]
    batches: tuple[BatchShape, ...]
    """Shapes of ``fitted`` that are decode batches on the slowest stage of a pipeline."""
    besides: tuple[BesideShape, ...] = ()
    """Shapes of ``fitted`` that are decode batches with a chunk of a prompt beside them."""


class BatchShape(NamedTuple):
    """A decode batch on the last stage (the one with the head) of a pipeline of equal stages."""

    num_stages: int
    batch_size: int
    num_context: int
    shape: StepShape


class BesideShape(NamedTuple):
    """Decodes of the whole model, and a chunk of a prompt beside them."""

    batch_size: int
    num_tokens: int
    """Tokens of the chunk; 0: no chunk."""
    shape: StepShape


def beside_shape(batch_size: int, num_tokens: int, num_context: int, num_layers: int) -> StepShape:
    """``batch_size`` decodes with ``num_context`` cached tokens each, and a chunk with as many cached tokens."""
    chunks = (ChunkShape(num_context, 1),) * batch_size
    if num_tokens:
        chunks += (ChunkShape(num_context, num_tokens),)
    return StepShape(chunks, num_layers, True, batch_size)


def plan_shapes(limits: ShapeLimits, *, seed: int = 0, quick: bool = False) -> ShapePlan:
    """The grid within the limits, and half as many random shapes. ``quick`` takes about a third of both."""
    batches = tuple(b for b in _batches(limits, quick) if limits.allow(b.shape))
    besides = tuple(b for b in _besides(limits, quick) if limits.allow(b.shape))
    grid = [ProfileShape(ShapeKind.STAGE, b.shape) for b in batches] + list(_grid(limits, quick))
    grid += [ProfileShape(ShapeKind.MIX if b.num_tokens else ShapeKind.DECODE, b.shape) for b in besides]
    fitted = tuple({item.shape: item for item in grid if limits.allow(item.shape)}.values())
    taken = {item.shape for item in fitted}
    rng = random.Random(seed)
    held_out: list[ProfileShape] = []
    kinds = list(ShapeKind)
    wanted = max(len(kinds), len(fitted) // 2)
    for attempt in range(100 * wanted):
        if len(held_out) == wanted:
            break
        item = _draw(kinds[attempt % len(kinds)], limits, rng)
        if item is not None and limits.allow(item.shape) and item.shape not in taken:
            held_out.append(item)
            taken.add(item.shape)
    return ShapePlan(fitted, tuple(held_out), batches, besides)


def _whole(limits: ShapeLimits, chunks: Iterable[tuple[int, int]], num_samples: int | None = None) -> StepShape:
    made = tuple(ChunkShape(*chunk) for chunk in chunks)
    return StepShape(made, limits.num_layers, True, len(made) if num_samples is None else num_samples)


def _grid(limits: ShapeLimits, quick: bool) -> Iterable[ProfileShape]:
    most, context = limits.max_num_tokens, limits.max_context
    lengths = [most >> shift for shift in range(most.bit_length())]  # halving down to 1
    for length in lengths[:: 2 if quick else 1]:
        yield ProfileShape(ShapeKind.PREFILL, _whole(limits, [(0, length)]))
    for length in lengths[1 :: 3 if quick else 2]:
        for prefix in (context // 8, context // 2, context - length)[:: 2 if quick else 1]:
            yield ProfileShape(ShapeKind.PREFIX, _whole(limits, [(prefix, length)]))
    yield ProfileShape(ShapeKind.PREFILL, _whole(limits, [(0, most)], num_samples=0))
    for batch in (1, 4, 16, 64) if quick else (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128):
        for prefix in (1, context // 3) if quick else (1, context // 16, context // 4, context // 2):
            yield ProfileShape(ShapeKind.DECODE, _whole(limits, [(prefix, 1)] * batch))
    for num_decodes, prefix, length in ((4, context // 4, most // 2), (16, context // 8, most // 4)):
        decodes = [(prefix, 1)] * num_decodes
        yield ProfileShape(ShapeKind.MIX, _whole(limits, [*decodes, (0, length)]))
        yield ProfileShape(ShapeKind.MIX, _whole(limits, [*decodes, (context // 4, length)], num_decodes))
        yield ProfileShape(ShapeKind.MIX, _whole(limits, [(prefix, most // 8)] * 4))
    for layers in sorted({1, max(1, limits.num_layers // 2), max(1, limits.num_layers // 4)}):
        if layers < limits.num_layers:
            for length in (1, most // 16, most // 2):
                yield ProfileShape(ShapeKind.STAGE, StepShape((ChunkShape(0, length),), layers, True, 0))
            yield ProfileShape(ShapeKind.STAGE, StepShape((ChunkShape(context // 4, most // 4),), layers, False, 1))
            yield ProfileShape(ShapeKind.STAGE, StepShape((ChunkShape(context // 4, 1),) * 16, layers, True, 0))


def _batches(limits: ShapeLimits, quick: bool) -> Iterable[BatchShape]:
    context = max(1, limits.max_context // 8)
    for num_stages in (1, 2) if quick else (1, 2, 4):
        layers = -(-limits.num_layers // num_stages)
        if num_stages > limits.num_layers:
            continue
        for batch in (1, 8, 32) if quick else (1, 4, 8, 16, 32, 64):
            shape = StepShape((ChunkShape(context, 1),) * batch, layers, num_stages == 1, batch)
            yield BatchShape(num_stages, batch, context, shape)


def _besides(limits: ShapeLimits, quick: bool) -> Iterable[BesideShape]:
    context = max(1, limits.max_context // 8)
    for batch in (4, 16) if quick else (1, 8, 32):
        for num_tokens in (0, 16, 64) if quick else (0, 16, 48, 128):
            yield BesideShape(batch, num_tokens, beside_shape(batch, num_tokens, context, limits.num_layers))


def _draw(kind: ShapeKind, limits: ShapeLimits, rng: random.Random) -> ProfileShape | None:
    """A random shape such as serving makes, with sizes uniform in their logarithm; None where the model has too few
    layers for its kind."""

    def size(most: int) -> int:
        return round(math.exp(math.log(max(1, most)) * rng.random()))

    most, context = limits.max_num_tokens, limits.max_context
    if kind is ShapeKind.PREFILL:
        return ProfileShape(kind, _whole(limits, [(0, size(most))] * rng.choice((1, 1, 2, 3))))
    if kind is ShapeKind.PREFIX:
        length = size(most)
        return ProfileShape(kind, _whole(limits, [(size(context - length), length)]))
    decodes = [(size(context - 1), 1) for _ in range(size(min(128, limits.max_num_seqs)))]
    if kind is ShapeKind.DECODE:
        return ProfileShape(kind, _whole(limits, decodes))
    if kind is ShapeKind.MIX:
        length = size(most - len(decodes))
        prefix = rng.choice((0, size(context - length)))
        samples = len(decodes) + rng.choice((0, 1))
        return ProfileShape(kind, _whole(limits, [*decodes, (prefix, length)], samples))
    if limits.num_layers < 2:
        return None
    chunks = tuple(ChunkShape(*chunk) for chunk in rng.choice((decodes, [(size(context // 2), size(most // 2))])))
    layers, is_first = rng.randint(1, limits.num_layers - 1), rng.random() < 0.5
    return ProfileShape(kind, StepShape(chunks, layers, is_first, 0 if is_first else len(chunks)))
