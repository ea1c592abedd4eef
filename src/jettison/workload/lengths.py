"""Lengths of prompts and answers: distributions from the statistics that papers publish of their data sets.

A curve passes exactly through published percentiles; between them it is bent until its mean is the published one as
well. Where only a mean is published, the shape comes from another set or is assumed. Which is which, per set, is in
:data:`LENGTHS` and in docs/workloads.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.rows import MAX_TOKENS, Counts, Floats

Points = tuple[tuple[float, float], ...]
"""(share of the requests, tokens), both ascending, from share 0 to share 1."""

_MEAN_STEPS = 1 << 14


class LengthModel(Protocol):
    """Draws lengths in tokens."""

    def draw(
        self, prompt_rng: np.random.Generator, output_rng: np.random.Generator, num_requests: int
    ) -> tuple[Counts, Counts]:
        """(input tokens, output tokens) of ``num_requests``, all at least 1."""
        ...

    def describe(self) -> str:
        """One line for the workload's notes."""
        ...


def _tokens(values: Floats, floor: float, cap: float) -> Counts:
    return np.clip(np.rint(values), floor, cap).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts: ``median``, ``sigma`` of the logarithm, clipped to [``floor``, ``cap``]."""

    median: float
    sigma: float
    cap: int
    floor: int = 1

    def __post_init__(self) -> None:
        if self.cap > MAX_TOKENS:
            raise ConfigError(f"lengths: a cap of {self.cap} tokens, at most {MAX_TOKENS} are possible")

    @classmethod
    def from_mean(cls, median: float, mean: float, cap: int) -> Lengths:
        """The log-normal with this median and mean: mean = median * exp(sigma^2 / 2)."""
        return cls(median=median, sigma=math.sqrt(2.0 * math.log(mean / median)), cap=cap)

    def draw(self, rng: np.random.Generator, num_requests: int) -> Counts:
        """Independent draws."""
        return _tokens(self.median * np.exp(self.sigma * rng.standard_normal(num_requests)), self.floor, self.cap)


@dataclass(frozen=True, slots=True)
class LogNormalPair:
    """Log-normal inputs and outputs, independent of each other."""

    prompt: Lengths
    output: Lengths

    def draw(
        self, prompt_rng: np.random.Generator, output_rng: np.random.Generator, num_requests: int
    ) -> tuple[Counts, Counts]:
        return self.prompt.draw(prompt_rng, num_requests), self.output.draw(output_rng, num_requests)

    def describe(self) -> str:
        return (
            f"log-normal lengths: prompt median {self.prompt.median:g} (sigma {self.prompt.sigma:.3g}), "
            f"output median {self.output.median:g} (sigma {self.output.sigma:.3g})"
        )


@dataclass(frozen=True, slots=True)
class QuantileCurve:
    """Tokens by rank: through ``points``, straight or bent between two of them, cut off at ``cap``.

    ``lean`` is where the mean of each piece lies between its ends: in the middle for straight ones, nearer to the lower
    end for t^n and to the upper one for 1 - (1 - t)^n.
    """

    points: Points
    lean: float = 0.5
    cap: float = math.inf

    def __post_init__(self) -> None:
        shares, tokens = zip(*self.points, strict=True)
        if len(shares) < 2 or (shares[0], shares[-1]) != (0.0, 1.0) or not all(np.diff(shares) > 0):
            raise ValueError("shares must rise from 0 to 1")
        if min(tokens) < 1 or not all(np.diff(tokens) >= 0) or not 0 < self.lean < 1:
            raise ValueError("tokens must not fall, and be 1 at least; the lean must be in (0, 1)")

    def at(self, shares: Floats) -> Floats:
        """Tokens at these ranks in [0, 1]."""
        knots, tokens = (np.array(column) for column in zip(*self.points, strict=True))
        piece = np.clip(np.searchsorted(knots, shares, side="right") - 1, 0, len(knots) - 2)
        inside = (shares - knots[piece]) / (knots[piece + 1] - knots[piece])
        if self.lean <= 0.5:
            risen = inside ** (1.0 / self.lean - 1.0)
        else:
            risen = 1.0 - (1.0 - inside) ** (self.lean / (1.0 - self.lean))
        values = tokens[piece] + (tokens[piece + 1] - tokens[piece]) * risen
        return np.minimum(values, self.cap)

    @property
    def mean(self) -> float:
        """Mean of the curve, before rounding to whole tokens."""
        return float(self.at((np.arange(_MEAN_STEPS) + 0.5) / _MEAN_STEPS).mean())


def through(points: Points, mean: float) -> QuantileCurve:
    """The curve through all points that has this mean. Raises ValueError where there is none."""
    shares, tokens = (np.array(column) for column in zip(*points, strict=True))
    low = float(np.sum(np.diff(shares) * tokens[:-1]))
    room = float(np.sum(np.diff(shares) * np.diff(tokens)))
    if not low < mean < low + room:
        raise ValueError(f"a mean of {mean:g} does not go with these percentiles: {low:g} to {low + room:g}")
    return QuantileCurve(points, lean=(mean - low) / room)


def scaled(points: Points, mean: float, cap: float = math.inf) -> QuantileCurve:
    """The curve of ``points`` stretched to this mean, measured after cutting off at ``cap``."""
    if not 1.0 < mean < cap:
        raise ValueError(f"a mean of {mean:g} is not between 1 and the cap {cap:g}")

    def stretched(factor: float) -> Points:
        return tuple((share, max(1.0, tokens * factor)) for share, tokens in points)

    low, high = 0.0, 1.0
    while _straight_mean(stretched(high), cap) < mean:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _straight_mean(stretched(middle), cap) < mean else (low, middle)
    return QuantileCurve(stretched(high), cap=cap)


def _straight_mean(points: Points, cap: float) -> float:
    """Mean of the straight curve through ``points``, cut off at ``cap``."""
    total = 0.0
    for (start, low), (end, high) in pairwise(points):
        over = 0.0 if high <= cap else 1.0 if low >= cap else (high - cap) / (high - low)
        below = (low + min(high, cap)) / 2
        total += (end - start) * (over * cap + (1.0 - over) * below if over else below)
    return total


@dataclass(frozen=True, slots=True)
class PublishedLengths:
    """A data set's lengths. Inputs and outputs are joined by rank (a Gaussian copula)."""

    name: str
    inputs: QuantileCurve
    outputs: QuantileCurve
    rank_correlation: float
    """Spearman's rank correlation of input and output; 0 where it is not known."""
    source: str
    matched: str
    """Description for people: the matched statistics, and the assumptions."""
    max_total_tokens: float = math.inf
    """Inputs are cut so that input and output fit, as the source's users did."""
    scale: float = 1.0
    """Factor on all lengths."""

    def draw(
        self, prompt_rng: np.random.Generator, output_rng: np.random.Generator, num_requests: int
    ) -> tuple[Counts, Counts]:
        first, second = _joined_ranks(prompt_rng, output_rng, num_requests, self.rank_correlation)
        outputs = _tokens(self.outputs.at(second) * self.scale, 1, MAX_TOKENS)
        most = np.inf if math.isinf(self.max_total_tokens) else self.max_total_tokens * self.scale - outputs
        return _tokens(np.minimum(self.inputs.at(first) * self.scale, most), 1, MAX_TOKENS), outputs

    def describe(self) -> str:
        return f"lengths: {self.name} ({self.source}; {self.matched})"


def _joined_ranks(
    first_rng: np.random.Generator, second_rng: np.random.Generator, count: int, rank_correlation: float
) -> tuple[Floats, Floats]:
    """Pairs of uniform ranks with this Spearman correlation."""
    if rank_correlation == 0.0:
        return first_rng.random(count), second_rng.random(count)
    linear = 2.0 * math.sin(math.pi * rank_correlation / 6.0)
    first, own = first_rng.standard_normal(count), second_rng.standard_normal(count)
    second = linear * first + math.sqrt(1.0 - linear * linear) * own
    return _normal_cdf(first), _normal_cdf(second)


def _normal_cdf(values: Floats) -> Floats:
    erf = np.fromiter(map(math.erf, (values / math.sqrt(2.0)).tolist()), dtype=np.float64, count=len(values))
    return np.asarray(0.5 * (1.0 + erf))


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistogram:
    """Lengths by probability: ``tokens`` ascending, ``probabilities`` summing to 1."""

    tokens: Counts
    probabilities: Floats

    def draw(self, rng: np.random.Generator, num_requests: int) -> Counts:
        """Independent draws."""
        cumulative = np.cumsum(self.probabilities)
        chosen = np.searchsorted(cumulative / cumulative[-1], rng.random(num_requests), side="right")
        return self.tokens[np.minimum(chosen, len(self.tokens) - 1)]


def _points(low: float, high: float, **percentiles: float) -> Points:
    """``_points(1, 99, p50=20)``: from the smallest to the largest through percentiles."""
    inner = tuple((float(name[1:]) / 100.0, value) for name, value in percentiles.items())
    return ((0.0, low), *inner, (1.0, high))


def _log_normal(sigma: float) -> Points:
    shares = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
    inner = tuple((share, 100.0 * math.exp(sigma * NormalDist().inv_cdf(share))) for share in shares)
    return ((0.0, inner[0][1] / 2), *inner, (1.0, inner[-1][1] * 2))


_BURSTGPT_IN = _points(9, 2126, p50=400, p80=1146, p95=1804, p99=2009)
_BURSTGPT_OUT = _points(2, 2019, p50=249, p80=462, p95=715, p99=1161)
_SHAREGPT_IN = _points(1, 4096, p5=24, p10=48, p25=367, p50=1165, p75=2316, p80=2618, p90=3289, p95=3684, p99=4011)
_SHAREGPT_OUT = _points(2, 1024, p5=41, p10=78, p25=220, p50=414, p75=623, p80=679, p90=827, p95=918, p99=998)
_LONGBENCH_IN = _points(315, 16384, p5=965, p10=1354, p25=2018, p50=4181, p75=8872, p80=10364, p90=13655, p95=16383)
_LONGBENCH_OUT = _points(88, 1457, p5=174, p10=208, p25=277, p50=401, p75=731, p80=750, p90=838, p95=893, p99=1207)
_LMSYS_OUT = _points(1, 2890, p5=3, p25=28, p50=89, p75=187, p90=271, p95=323, p99=438)

_K1 = "KunServe v1 Table 2"
_K3 = "KunServe v3 section 5.1"
_ALL = "mean, P50, P80, P95, P99 of both"
_TURNS = "WildChat's Table 1: tokens a turn"

_SETS = (
    PublishedLengths(
        "burstgpt", through(_BURSTGPT_IN, 603), through(_BURSTGPT_OUT, 289), 0.28, _K1,
        f"{_ALL}; least and largest, and the rank correlation, of the trace's first 383 answered requests",
    ),
    PublishedLengths(
        "burstgpt-v3", scaled(_BURSTGPT_IN, 642), scaled(_BURSTGPT_OUT, 262), 0.28, _K3,
        "both means; the shape is v1's, another window of the trace",
    ),
    PublishedLengths(
        "azure-conv", through(_points(2, 4096, p50=998, p80=1159, p95=4080, p99=4096), 1013),
        through(_points(12, 1000, p50=202, p80=411, p95=451, p99=585), 247), 0.27, _K1,
        f"{_ALL}; the rest of the trace's first 1,000 rows, which these are",
    ),
    PublishedLengths(
        "azure-conv-2023",
        through(_points(2, 14050, p5=181, p10=207, p25=396, p50=1020, p75=1189, p90=2734, p95=4083, p99=4142), 1154.7),
        through(_points(7, 1000, p5=41, p10=54, p25=85, p50=129, p75=395, p90=424, p95=451, p99=601), 211.1), 0.07,
        "Azure 2023 conversation trace, all 19,366 rows", "means, P5 to P99, largest, rank correlation",
    ),
    PublishedLengths(
        "azure-code-2023",
        through(_points(3, 7437, p5=75, p10=147, p25=578, p50=1469, p75=2744, p90=5188, p95=7303, p99=7436), 2047.8),
        through(_points(6, 1899, p5=6, p10=7, p25=9, p50=13, p75=24, p90=55, p95=90, p99=251), 27.9), -0.02,
        "Azure 2023 code trace, all 8,819 rows", "means, P5 to P99, largest, rank correlation",
    ),
    PublishedLengths(
        "agieval", through(_points(10, 700, p50=128, p80=556, p95=619, p99=651), 237),
        through(_points(100, 800, p50=363, p80=450, p95=578, p99=698), 390), 0.0, f"{_K1} (AGIEval-CoT)",
        f"{_ALL}; least and largest are assumed, and that input and output are independent",
    ),
    PublishedLengths(
        "sharegpt", scaled(_SHAREGPT_IN, 1660, cap=4096), scaled(_SHAREGPT_OUT, 373), 0.06, _K3,
        "both means, inputs up to 4,096; shape and rank correlation of Sarathi-Serve's ShareGPT lengths up to 4,096",
    ),
    PublishedLengths(
        "longbench", through(_LONGBENCH_IN, 5900), through(_LONGBENCH_OUT, 499), 0.77, _K3,
        "both means, inputs up to 16,384; shape and rank correlation of gov_report and multi_news (LongBench's own "
        "word counts, 1.22 tokens a word of input, 1.27 of output)",
    ),
    PublishedLengths(
        "lmsys", scaled(_log_normal(1.5), 69.8), scaled(_LMSYS_OUT, 215.7), 0.0, _TURNS,
        "both means; outputs have the shape of 40,395 answers' word counts; inputs are assumed log-normal (sigma 1.5), "
        "and independent",
    ),
    PublishedLengths(
        "wildchat", scaled(_log_normal(1.5), 295.6), scaled(_log_normal(1.0), 441.3), 0.0, _TURNS,
        "both means; log-normal shapes (sigma 1.5 and 1.0) and independence are assumed",
    ),
)  # fmt: skip


def _times_ten(lengths: PublishedLengths) -> PublishedLengths:
    return PublishedLengths(
        f"{lengths.name}-x10", lengths.inputs, lengths.outputs, lengths.rank_correlation, lengths.source,
        f"{lengths.matched}; all lengths times ten, as MELL does", lengths.max_total_tokens, 10.0,
    )  # fmt: skip


LENGTHS: dict[str, PublishedLengths] = {
    found.name: found for found in (*_SETS, *(_times_ten(s) for s in _SETS if s.name in ("lmsys", "wildchat")))
}
"""Sets of lengths by name."""


def published_lengths(name: str) -> PublishedLengths:
    """The set of this name; ConfigError lists the known ones."""
    if name not in LENGTHS:
        raise ConfigError(f"unknown lengths {name!r}; known: {', '.join(LENGTHS)}")
    return LENGTHS[name]
