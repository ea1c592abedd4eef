"""The cost of a step from its shape: KunServe v3 eq. 1 to 3, and the terms that eq. 1 leaves to "other".

Pure arithmetic over fitted coefficients; no measuring (``live.profile.measure``), no fitting (``cost.fit``), no files.

Of one stage that runs k layers over a microbatch of n chunks with T tokens in all, S of which are sampled from:

    k * alpha * sum(p c + (c^2 + c) / 2)    attention: query-key pairs                 (eq. 1, prefix and self)
    k * kappa * sum(p + c)                  KV of each chunk, read once: the decode memory term
    k * beta  * max(T', weight_tokens)      projections; below ``weight_tokens`` reading the weights takes longer
    k * layer + step                        calls of kernels, the same for any batch
    entry + T * entry_token                 the embedding, on the first stage
    head + max(S', head_tokens) * sample    final norm, head and sampling, on the last stage where S > 0

The first four lines, but for ``step``, are the layers' time on their device. Where a host launches the kernels of a
layer one by one, the layer takes at least ``launch_layer``, as the two work at the same time: max(device, launches).

T' and S' are rounded up to whole ``row_tile``s: a matrix product works on so many rows at a time, full or not.

Written as eq. 1 to 3: a chunk costs ``alpha pairs + kappa (p + c) + beta c + gamma``, and a microbatch the sum of its
chunks less ``(n - 1) gamma``: weights are read and kernels called once. Rounding and the two ``max`` (rooflines) matter
in small batches only, and act on the microbatch, not on its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ChunkShape(NamedTuple):
    """The tokens of one request in one microbatch. A decode has one token."""

    num_context: int
    """p: tokens of the request that are in the KV cache already."""
    num_tokens: int
    """c: tokens that this step computes."""

    @property
    def num_pairs(self) -> float:
        """Query-key pairs under the causal mask: p c + (c^2 + c) / 2."""
        return self.num_context * self.num_tokens + (self.num_tokens * self.num_tokens + self.num_tokens) / 2


class StepShape(NamedTuple):
    """One microbatch on one stage."""

    chunks: tuple[ChunkShape, ...]
    num_layers: int
    is_first: bool = True
    """Whether the stage looks tokens up in the embedding."""
    num_samples: int = 0
    """Rows that go through the head and are sampled; 0 on all but the last stage."""

    @property
    def num_tokens(self) -> int:
        """T: tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_kv_tokens(self) -> int:
        """Cached tokens in all chunks' contexts."""
        return sum(chunk.num_context for chunk in self.chunks)


class StepPredictor(Protocol):
    """Anything that predicts steps: the model, or a simpler one that it is compared with."""

    def step_cost_s(self, shape: StepShape) -> float:
        """Predicted seconds of one step."""
        ...


GRAPH_ROWS = 256
"""Rows of the largest step of which graphs are captured: ``device.cuda.rows.MOST_ROWS``."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Fitted coefficients, all >= 0; seconds, and per layer where the name says so.

    ``num_layers`` is the whole model's, which ``num_layers=None`` stands for below.
    """

    num_layers: int
    pair_layer_s: float
    """alpha: one query-key pair of one layer."""
    kv_token_layer_s: float
    """kappa: one token of KV of one layer, read once by a chunk."""
    token_layer_s: float
    """beta: one token through one layer's projections."""
    layer_s: float
    """One layer's kernel calls, whatever the batch."""
    step_s: float
    """Fixed cost of one stage's step, whatever the batch."""
    entry_s: float
    """Fixed cost of the first stage, beyond ``step_s``."""
    entry_token_s: float
    """One token's look-up in the embedding."""
    head_s: float
    """Head and sampling, whatever the number of rows."""
    sample_s: float
    """One row through the head and the sampler."""
    weight_tokens: int = 1
    """A layer takes as long for a smaller batch as for this many tokens: it has to read its weights all the same."""
    head_tokens: int = 1
    """The same for the head."""
    row_tile: int = 1
    """Rows that a matrix product takes at a time."""
    launch_layer_s: float = 0.0
    """The host's time to launch one layer's kernels, which the layer takes at least where it is launched so
    (``is_launched``). 0 where the host itself computes."""
    graph_tokens: int = 0
    """Steps of at most so many tokens are captured, and decodes are anyhow, of at most ``GRAPH_ROWS`` rows: then no
    layer waits for launches."""

    def __post_init__(self) -> None:
        names = (*COEFFICIENTS, "launch_layer_s")
        bad = [name for name in names if not 0.0 <= getattr(self, name) < float("inf")]
        if bad:
            raise ValueError(f"coefficients must be finite and >= 0: {', '.join(bad)}")
        if min(self.num_layers, self.weight_tokens, self.head_tokens, self.row_tile) < 1:
            raise ValueError("num_layers, weight_tokens, head_tokens and row_tile must be >= 1")
        if self.graph_tokens < 0:
            raise ValueError("graph_tokens must be >= 0")

    # --- eq. 1 to 3 -------------------------------------------------------------------------------------------

    def gamma_s(self, num_layers: int | None = None, *, is_first: bool = True) -> float:
        """gamma of eq. 1: the fixed cost of a microbatch, however many chunks it has."""
        layers = self.num_layers if num_layers is None else num_layers
        return layers * self.layer_s + self.step_s + (self.entry_s if is_first else 0.0)

    def batch_cost_s(
        self,
        chunks: Sequence[ChunkShape],
        num_layers: int | None = None,
        *,
        is_first: bool = True,
        is_last: bool = True,
        num_samples: int | None = None,
    ) -> float:
        """Eq. 3, with the head and the extra cost of small batches: one microbatch on one stage.

        ``num_samples`` of the chunks are sampled from on the last stage (None = all of them). An empty microbatch
        costs nothing.
        """
        layers = self.num_layers if num_layers is None else num_layers
        samples = 0 if not is_last else len(chunks) if num_samples is None else num_samples
        return self._batch_s(chunks, layers, is_first, samples)

    def step_cost_s(self, shape: StepShape) -> float:
        """``batch_cost_s`` of a shape."""
        return self._batch_s(shape.chunks, shape.num_layers, shape.is_first, shape.num_samples)

    # --- terms ------------------------------------------------------------------------------------------------

    def _work_s(self, num_tokens: int, num_pairs: float, num_kv_tokens: int, layers: int, is_first: bool) -> float:
        """Seconds of the terms that grow with the tokens."""
        per_layer = (
            self.pair_layer_s * num_pairs + self.kv_token_layer_s * num_kv_tokens + self.token_layer_s * num_tokens
        )
        return layers * per_layer + (self.entry_token_s * num_tokens if is_first else 0.0)

    def totals_cost_s(
        self, num_tokens: int, num_pairs: float, num_kv_tokens: int, num_layers: int | None = None, *,
        is_first: bool = True, num_samples: int = 0, has_chunks: bool | None = None, num_rows: int | None = None,
    ) -> float:
        """``batch_cost_s`` of a microbatch given by its totals.

        ``num_pairs``: query-key pairs of all chunks; ``num_kv_tokens``: their contexts and own tokens. ``has_chunks``,
        ``num_rows``: see ``launch_excess_s``.
        """
        layers = self.num_layers if num_layers is None else num_layers
        if num_tokens == 0:
            return 0.0
        seconds = self._work_s(num_tokens, num_pairs, num_kv_tokens, layers, is_first)
        seconds += self.gamma_s(layers, is_first=is_first)
        seconds += layers * self.token_layer_s * (self._layer_rows(num_tokens) - num_tokens)
        if num_samples:
            seconds += self.head_s + self.sample_s * self._head_rows(num_samples)
        if self.launch_layer_s:
            seconds += self.launch_excess_s(
                num_tokens, num_pairs, num_kv_tokens, layers, has_chunks=has_chunks, num_rows=num_rows
            )
        return seconds

    def launch_excess_s(
        self, num_tokens: int, num_pairs: float, num_kv_tokens: int, num_layers: int | None = None, *,
        has_chunks: bool | None = None, num_rows: int | None = None,
    ) -> float:
        """Seconds by which launching the layers takes longer than their work; the totals are those of
        ``totals_cost_s``. ``has_chunks``: whether a row has two tokens or more (None: as it has, its pairs are more
        than its KV). ``num_rows``: chunks (None: of decodes as many as tokens, else few)."""
        layers = self.num_layers if num_layers is None else num_layers
        if not self.launch_layer_s:
            return 0.0
        if has_chunks is None:
            has_chunks = num_pairs > num_kv_tokens
        if num_rows is None:
            num_rows = 1 if has_chunks else num_tokens
        if not self.is_launched(num_tokens, num_rows, has_chunks=has_chunks):
            return 0.0
        work_s = self._work_s(num_tokens, num_pairs, num_kv_tokens, 1, False) + self.layer_s
        work_s += self.token_layer_s * (self._layer_rows(num_tokens) - num_tokens)
        return layers * max(0.0, self.launch_layer_s - work_s)

    def is_launched(self, num_tokens: int, num_rows: int, *, has_chunks: bool) -> bool:
        """Whether such a step's layers are launched kernel by kernel: no graph is captured of it."""
        return num_rows > GRAPH_ROWS or (has_chunks and num_tokens > self.graph_tokens)

    def layer_parts_s(self, num_tokens: int, num_layers: int) -> tuple[float, float]:
        """The layers' parts of the first two of ``terms_s``."""
        return num_layers * self.layer_s, num_layers * self.token_layer_s * self._layer_rows(num_tokens)

    def terms_s(
        self, num_tokens: int, num_pairs: float, num_kv_tokens: int, num_layers: int | None = None, *,
        is_first: bool = True, num_samples: int = 0,
    ) -> tuple[float, float, float, float, float]:
        """``totals_cost_s`` but for ``launch_excess_s`` in its parts: fixed, by tokens, by pairs, by KV, by sampled
        rows."""
        layers = self.num_layers if num_layers is None else num_layers
        if num_tokens == 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        fixed = layers * self.layer_s + self.step_s + (self.entry_s if is_first else 0.0)
        tokens = self._work_s(num_tokens, 0.0, 0, layers, is_first)
        tokens += layers * self.token_layer_s * (self._layer_rows(num_tokens) - num_tokens)
        samples = 0.0
        if num_samples:
            fixed += self.head_s
            samples = self.sample_s * self._head_rows(num_samples)
        return (
            fixed, tokens, layers * self.pair_layer_s * num_pairs, layers * self.kv_token_layer_s * num_kv_tokens,
            samples,
        )

    def _layer_rows(self, num_tokens: int) -> float:
        """Tokens that a layer's products are charged for, rounding and roofline included; at least ``num_tokens``."""
        return _rows(num_tokens, self.row_tile, self.weight_tokens)

    def _head_rows(self, num_samples: int) -> float:
        """The same for the head."""
        return _rows(num_samples, self.row_tile, self.head_tokens)

    def _batch_s(self, chunks: Iterable[ChunkShape], layers: int, is_first: bool, samples: int) -> float:
        num_rows, num_tokens, num_pairs, num_kv_tokens = 0, 0, 0.0, 0
        for chunk in chunks:
            num_rows += 1
            num_tokens += chunk.num_tokens
            num_pairs += chunk.num_pairs
            num_kv_tokens += chunk.num_context + chunk.num_tokens
        return self.totals_cost_s(
            num_tokens, num_pairs, num_kv_tokens, layers, is_first=is_first, num_samples=samples, num_rows=num_rows
        )


COEFFICIENTS = (
    "pair_layer_s", "kv_token_layer_s", "token_layer_s", "layer_s", "step_s", "entry_s", "entry_token_s", "head_s",
    "sample_s",
)  # fmt: skip
"""The fields of ``CostModel`` that are fitted by least squares, in the order of ``features``."""


def _rows(num_rows: int, row_tile: int, least: int) -> int:
    """Rows that a product is charged for: whole tiles, and at least ``least``."""
    return max(-(-num_rows // row_tile) * row_tile, least)


def features(shape: StepShape, weight_tokens: int, head_tokens: int, row_tile: int) -> tuple[float, ...]:
    """The factor of each coefficient in a step: where no layer waits for launches, ``step_cost_s`` is their dot product
    with COEFFICIENTS."""
    layers, num_tokens, first = shape.num_layers, shape.num_tokens, float(shape.is_first)
    return (
        layers * sum(chunk.num_pairs for chunk in shape.chunks),
        layers * float(shape.num_kv_tokens + num_tokens),
        layers * float(_rows(num_tokens, row_tile, weight_tokens)),
        float(layers),
        1.0,
        first,
        first * num_tokens,
        float(shape.num_samples > 0),
        float(_rows(shape.num_samples, row_tile, head_tokens)) if shape.num_samples else 0.0,
    )


@dataclass(frozen=True, slots=True)
class NoPrefixModel:
    """Self-attention without prefix-attention, as in DistServe (KunServe v3 §4.3): cached tokens cost nothing."""

    cost: CostModel

    def step_cost_s(self, shape: StepShape) -> float:
        """As if no chunk had a context."""
        return self.cost.step_cost_s(without_prefix(shape))


def without_prefix(shape: StepShape) -> StepShape:
    """The same chunks at the start of their requests."""
    return shape._replace(chunks=tuple(chunk._replace(num_context=0) for chunk in shape.chunks))
