"""What a chunk adds to a microbatch, learned while serving: KunServe v3 eq. 1 to 3 with the terms of decode steps.

Pure. Seconds of one stage for one microbatch are fitted as

    fixed + token * (tokens) + pair * (attention pairs of prefill chunks)
          + decode_kv * (KV tokens that decodes read) + row * (chunks)

by recursive least squares with forgetting, every coefficient at least 0. A prefill chunk of c tokens behind a prefix of
p has p c + (c^2 + c) / 2 pairs, so the cost of a prefix is what a token-count model misses. A profile fitted off-line
takes this fit's place where there is one; this one needs none and follows the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jettison.cost.model import CostModel

_SCALES = (1.0, 1e2, 1e5, 1e4, 1e1)
"""Makes the features of usual steps of one order of magnitude: fixed, tokens, pairs, decode KV, rows."""

MIN_OBSERVATIONS = 12
REFIT_EVERY = 16, 128
"""Steps between two fits at first, and after a while: a fit takes as long as the rest of a step's planning."""


class OnlineChunkCost:
    """Costs of chunks in seconds once enough steps were seen, or from a profile; in tokens before.

    Has the shape of ``policy.lookahead.ChunkCost``.
    """

    def __init__(
        self, prior: CostModel | None = None, num_layers: int | None = None, forgetting: float = 0.998
    ) -> None:
        """``prior`` answers for a stage of ``num_layers`` (None = all) until the fit is determined."""
        self._forgetting = forgetting
        self._normal = [0.0] * 15
        """Upper half of sum(x x^T), row by row: matrices of five cost more as arrays than the step's own plan."""
        self._moment = [0.0] * 5
        self._num_observations = 0
        self._fitted_at = 0
        self._token = 1.0
        self._pair = self._decode_kv = self._row = 0.0
        self._fixed = 0.0
        if prior is not None:
            layers = prior.num_layers if num_layers is None else num_layers
            self._fixed = prior.gamma_s(layers)
            self._pair = layers * prior.pair_layer_s
            self._token = layers * (prior.token_layer_s + prior.kv_token_layer_s) + prior.entry_token_s
            self._decode_kv = layers * (prior.pair_layer_s + prior.kv_token_layer_s)

    @property
    def is_fitted(self) -> bool:
        """Whether costs are seconds of this machine; before, a token costs 1 and nothing else does."""
        return self._fitted_at > 0

    @property
    def fixed_cost(self) -> float:
        """What a microbatch costs whatever is in it (gamma: kernels' starts, one pass over the weights)."""
        return self._fixed

    @property
    def token_cost(self) -> float:
        """What a token costs beside attention (beta); above 0."""
        return self._token

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        """What a chunk behind ``num_context`` tokens adds to a microbatch; the fixed part is left out."""
        if num_tokens <= 0:
            return 0.0
        if num_tokens == 1:
            return self._row + self._token + self._decode_kv * num_context
        # Without the row's share: a prompt costs the same however it is cut, so that cuts can be compared.
        num_pairs = num_context * num_tokens + (num_tokens * num_tokens + num_tokens) / 2
        return self._token * num_tokens + self._pair * num_pairs

    def observe(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Add one microbatch of (tokens, context) chunks that took a stage ``seconds``."""
        tokens = pairs = decode_kv = rows = 0
        for num_tokens, num_context in chunks:
            rows += 1
            tokens += num_tokens
            if num_tokens == 1:
                decode_kv += num_context
            else:
                pairs += num_context * num_tokens + (num_tokens * num_tokens + num_tokens) // 2
        x = [value / scale for value, scale in zip((1, tokens, pairs, decode_kv, rows), _SCALES, strict=True)]
        # Weighted by 1 / seconds: what matters is the relative error, of short microbatches as of long ones.
        weight = 1.0 / max(seconds, 1e-9) ** 2
        keep = self._forgetting
        products = (a * b for i, a in enumerate(x) for b in x[i:])
        self._normal = [keep * old + weight * new for old, new in zip(self._normal, products, strict=True)]
        self._moment = [keep * old + weight * new * seconds for old, new in zip(self._moment, x, strict=True)]
        self._num_observations += 1
        soonest, latest = REFIT_EVERY
        interval = min(max(soonest, self._fitted_at // 2), latest) if self._fitted_at else MIN_OBSERVATIONS
        if self._num_observations - self._fitted_at >= interval:
            self._fit()

    def _fit(self) -> None:
        found = _non_negative_fit(self._normal, self._moment)
        if found is None or found[1] <= 0.0:
            return  # tokens must cost something, or nothing could be divided
        self._fitted_at = self._num_observations
        fixed, token, pair, decode_kv, row = (value / scale for value, scale in zip(found, _SCALES, strict=True))
        self._fixed, self._token, self._pair, self._decode_kv, self._row = fixed, token, pair, decode_kv, row


def _non_negative_fit(triangle: Sequence[float], moment: Sequence[float]) -> list[float] | None:
    """The best solution of ``normal @ x = moment`` with x >= 0 and the token term present: 16 small systems.

    ``triangle``: the upper one of ``normal``, row by row. In plain floats: what a linear algebra library makes of so
    ill-conditioned a system depends on the processor, and decisions would with it.
    """
    size = len(moment)
    normal = [[0.0] * size for _ in range(size)]
    for (i, j), value in zip(itertools.combinations_with_replacement(range(size), 2), triangle, strict=True):
        normal[i][j] = normal[j][i] = value
    ridge = 1e-9 * sum(normal[i][i] for i in range(size)) + 1e-300
    best: list[float] | None = None
    best_loss = 0.0
    others = [i for i in range(size) if i != 1]
    for count in range(len(others) + 1):
        for subset in itertools.combinations(others, count):
            active = sorted((1, *subset))
            part = [[normal[i][j] + (ridge if i == j else 0.0) for j in active] for i in active]
            solved = _solve(part, [moment[i] for i in active])
            if min(solved) < 0.0:
                continue
            # At its solution the quadratic form is the negative of this product.
            loss = -sum(x * moment[i] for x, i in zip(solved, active, strict=True))
            if best is None or loss < best_loss:
                best, best_loss = [0.0] * size, loss
                for x, i in zip(solved, active, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a symmetric positive definite system, which needs no pivots. Changes its arguments."""
    size = len(right)
    for k in range(size):
        row = matrix[k]
        for i in range(k + 1, size):
            factor = matrix[i][k] / row[k]
            if factor:
                other = matrix[i]
                for j in range(k, size):
                    other[j] -= factor * row[j]
                right[i] -= factor * right[k]
    found = [0.0] * size
    for k in reversed(range(size)):
        rest = sum(matrix[k][j] * found[j] for j in range(k + 1, size))
        found[k] = (right[k] - rest) / matrix[k][k]
    return found
