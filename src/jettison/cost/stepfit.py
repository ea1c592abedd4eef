"""Coefficients of step times, learned from all groups at once. Pure arithmetic in plain floats.

A step's time is a sum of terms (fixed costs, tokens, pairs, KV, rows, bytes copied before it and beside it), each in a
cost model's seconds. The fit corrects them in two ways:

- ``shared`` coefficients, one a term, for all that is observed: least squares that forget, weighted by one over the
  time (between absolute and relative error), a step that is far off counting less (Huber). None is below 0, and where
  steps do not tell terms apart, the cost model's proportions decide.
- ``deviations`` of each kind of time (a number of stages, a stage, a pipeline's period): factors on the terms that
  follow the last few dozen steps by normalized least mean squares (Nagumo and Noda 1967). An error goes to the terms in
  the proportion in which they make up the step, and deviations fade towards what is shared. Once lone instances have
  been seen, a pipeline has their deviations and what it takes *beyond* them, a time that is the same for a small step
  and a large one: it does the same work, with hops and with fixed costs of more stages. Its last steps before a restore
  are small ones; deviations of its own would say of a large step what those have taught of small ones, until the next
  drop. What it takes beyond is a mean of its last steps, in the cost model's seconds: it is asked for minutes later,
  when the shared coefficients are others.

Copies have two coefficients of their own, one for copies that a step waits for and one for copies beside it. Only steps
with such copies teach them: these steps are few and copies are a small part of them, so that deviations would give
copies hardly any of the error.

Where a host launches the layers' kernels, a step's layers take at least as long as that (``Launches``). That bound is
outside of the sum, with a factor of its own, so that more work never makes a step shorter: a step that waits for
launches by the present coefficients teaches that factor alone, and no other step does.

Shared coefficients learn the cost of a token for this model on this machine, from every group. Deviations learn how the
present minute and a number of stages change it. Shared coefficients learn from times with the deviations subtracted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

FORGETTING = 0.995
"""Share of the shared sums kept at each step: they remember about 200 steps."""
FADING = 0.998
"""Share of the deviations kept at each step."""
LEARNING = 0.3
"""Share of a step's error that the deviations take on, by default."""
CLIP = 0.2
"""Largest error of a step that counts in full, as a share of its predicted time."""
REMEMBERED = 0.98
"""Share of the error sums kept at each step: ``error`` is about the last 50 steps."""
DEVIATIONS = (-0.8, 4.0)
"""Bounds of the deviations: beyond them a step was disturbed, or the model is another."""

MIN_OBSERVATIONS = 8
"""Steps before anything is fitted."""
REFIT_EVERY = 8, 32
"""Steps between two fits: up to step ``EARLY``, and after it."""
EARLY = 64
NOISE = 0.1
"""Rough variance of a step's relative error, which the cost model's proportions are weighed against."""
DOUBT_PROFILED, DOUBT_NOMINAL = 1.0, 10.0
"""Standard deviation of a coefficient relative to the level of all: for a measured cost model, and for a nominal
one."""

NUM_FITTED = 5
"""Terms with shared coefficients and deviations; two more (bytes copied before, beside) have coefficients of their
own."""
COPIES, BESIDE = (0.2, 100.0), (0.02, 100.0)
"""Bounds of the two factors of copies. They are above 0, as free copies would let a step carry any number of bytes."""
BEYOND = (0.0, 100.0)
"""Bounds of what a pipeline takes beyond lone instances, over the cost model's fixed term: it is never faster."""
OWN_TRUST = NOISE / DOUBT_NOMINAL**2
"""Weight of where such a factor starts. It is low even for a measured rate of copies, which was not measured with
scattered blocks."""

Kind = tuple[str, int]
"""The measure and the number of stages of a time (``cost.stepwork.Part``)."""

Terms = tuple[float, float, float, float, float, float, float]
"""Seconds by a cost model: fixed, tokens, pairs, KV, rows, bytes copied before the step, and beside it."""


class Launches(NamedTuple):
    """Of a step whose layers take at least the time of their launches, by a cost model: in seconds."""

    launch_s: float
    """The launches of its layers."""
    fixed_s: float
    """Of the step's fixed term, the layers' part."""
    tokens_s: float
    """Of its term of tokens."""

    def excess_s(self, factor: float, coefficients: Terms, terms: Terms) -> float:
        """By how much launches, ``factor`` times as long, take longer than the layers' work; pairs and KV are the
        layers' altogether."""
        fixed, token, pair, kv, *_ = coefficients
        work_s = fixed * self.fixed_s + token * self.tokens_s + pair * terms[2] + kv * terms[3]
        return max(0.0, factor * self.launch_s - work_s)


def product(coefficients: Terms, terms: Terms) -> float:
    """Seconds of a step that waits for no launches."""
    fixed, token, pair, kv, row, copied, beside = coefficients
    x0, x1, x2, x3, x4, x5, x6 = terms
    return fixed * x0 + token * x1 + pair * x2 + kv * x3 + row * x4 + copied * x5 + beside * x6


class OwnFactor:
    """The factor of a term that steps of one kind alone have: seconds that it adds to them, over the cost model's
    seconds for it. Least squares of relative errors, which forget."""

    __slots__ = ("_bounds", "_moment", "_normal", "_start", "value")

    def __init__(self, start: float, bounds: tuple[float, float]) -> None:
        self.value = self._start = start
        self._bounds = bounds
        self._normal = self._moment = 0.0

    def learn(self, share: float, error: float) -> bool:
        """Learn from a step with such a term; whether the factor is within its bounds.

        ``share``: the cost model's seconds for the term, over the step's predicted time; ``error``: the error of that
        prediction, over the predicted time."""
        self._normal = FORGETTING * self._normal + share * share
        self._moment = FORGETTING * self._moment + share * (self.value * share + error)
        low, high = self._bounds
        found = (self._moment + OWN_TRUST * self._start) / (self._normal + OWN_TRUST)
        self.value = min(max(found, low), high)
        if found != self.value:  # what a bound keeps out is no debt that later steps have to pay
            self._moment = self.value * (self._normal + OWN_TRUST) - OWN_TRUST * self._start
        return found == self.value


class StepFit:
    """Observations in, coefficients out; the order of observations counts."""

    def __init__(self, *, is_profiled: bool, learning: float = LEARNING) -> None:
        """``is_profiled``: the terms are seconds of this model on this machine; else only their proportions carry
        information, and little of it. ``learning``: share of a step's error that the deviations take on."""
        self._learning = learning
        self._trust = NOISE / (DOUBT_PROFILED if is_profiled else DOUBT_NOMINAL) ** 2
        """The weight of the cost model's proportions, in steps."""
        self._shared: Sequence[float] | None = (1.0,) * NUM_FITTED if is_profiled else None
        self._normal = [0.0] * 15
        """Upper half of sum(w x x^T), row by row."""
        self._moment = [0.0] * NUM_FITTED
        self._weight = 0.0
        """Steps that the sums remember."""
        self._num_observations = 0
        self._deviations: dict[Kind, list[float]] = {}
        self._beyond: dict[Kind, OwnFactor] = {}
        """Of pipelines that have been seen since lone instances were: what a step takes beyond the same work of a lone
        instance, over the cost model's fixed term."""
        self._launches: dict[Kind, float] = {}
        self._newest_launches = 1.0
        """The factor that was learned last: the same host launches the layers of all kinds."""
        self._copies, self._beside = OwnFactor(1.0, COPIES), OwnFactor(1.0, BESIDE)
        self._off_s = self._predicted_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there are coefficients for this machine."""
        return self._shared is not None

    @property
    def error(self) -> float:
        """Mean absolute error of recent steps as a share of their predicted time. Long steps count more, and no error
        counts for more than ``CLIP``."""
        return self._off_s / self._predicted_s if self._predicted_s > 0.0 else 0.0

    @property
    def observed(self) -> Collection[Kind]:
        """Kinds with an observed time."""
        return self._deviations.keys() | self._beyond.keys()

    def coefficients(self, kind: Kind) -> Terms | None:
        """The factor of each term; all >= 0. None while too little is known."""
        if self._shared is None:
            return None
        fixed, token, pair, kv, row = self._shared
        copied, beside = self._copies.value, self._beside.value
        dev = self._deviations_of(kind)
        if dev is None:
            return fixed, token, pair, kv, row, copied, beside
        (d0, d1, d2, d3, d4), beyond = dev, self._beyond_of(kind)
        return (
            fixed * (1.0 + d0) + beyond, token * (1.0 + d1), pair * (1.0 + d2), kv * (1.0 + d3), row * (1.0 + d4),
            copied, beside,
        )

    @property
    def _alone(self) -> list[float] | None:
        """Deviations of lone instances: a pipeline that has not been seen meets the same minute as they do. Without
        them it would look faster than they in each minute in which all are slow."""
        return next((dev for (_, num_stages), dev in self._deviations.items() if num_stages == 1), None)

    def _deviations_of(self, kind: Kind) -> Sequence[float] | None:
        """None: none have been learned that apply to it."""
        return self._deviations.get(kind) or self._alone

    def _beyond_of(self, kind: Kind) -> float:
        return self._beyond[kind].value if kind in self._beyond else 0.0

    def _begin(self, kind: Kind) -> Sequence[float]:
        """Enter a kind whose time is observed, if it is new; its deviations."""
        alone = self._alone
        if kind[1] > 1 and alone is not None:
            if kind not in self._beyond:
                self._deviations.pop(kind, None)
                self._beyond[kind] = OwnFactor(0.0, BEYOND)
        elif kind not in self._deviations:
            self._deviations[kind] = list(alone or (0.0,) * NUM_FITTED)
        dev = self._deviations_of(kind)
        assert dev is not None, "it has been entered"
        return dev

    def launches_factor(self, kind: Kind) -> float:
        """The factor of the time of launches; above 0."""
        return self._launches.get(kind, self._newest_launches)

    def observe(self, kind: Kind, terms: Terms, seconds: float, launches: Launches | None = None) -> None:
        """Learn from one time of a kind. Times that are not above 0 are ignored. ``launches``: of a step whose layers
        are launched kernel by kernel."""
        if seconds <= 0.0 or (launches is not None and self._waited(kind, terms, seconds, launches)):
            return
        x0, x1, x2, x3, x4, x5, x6 = terms
        dev = self._begin(kind)
        weight, told_s = 1.0 / seconds, seconds
        if self._shared is not None:
            t0, t1, t2, t3, t4 = self._shared
            c0, c1, c2, c3, c4 = t0 * x0, t1 * x1, t2 * x2, t3 * x3, t4 * x4
            d0, d1, d2, d3, d4 = dev
            base_s = c0 + c1 + c2 + c3 + c4
            deviation_s = d0 * c0 + d1 * c1 + d2 * c2 + d3 * c3 + d4 * c4
            deviation_s += self._copies.value * x5 + self._beside.value * x6 + self._beyond_of(kind) * x0
            if base_s > 0.0:
                predicted_s = base_s + deviation_s
                most_s = CLIP * predicted_s
                error_s = min(max(seconds - predicted_s, -most_s), most_s)
                if kind in self._beyond:
                    self._learn_beyond(kind, x0 / predicted_s, error_s / predicted_s)
                else:
                    self._learn(kind, dev, (c0, c1, c2, c3, c4), x5 * x5 + x6 * x6, error_s)
                if x5 > 0.0:
                    self._copies.learn(x5 / predicted_s, error_s / predicted_s)
                if x6 > 0.0:
                    self._beside.learn(x6 / predicted_s, error_s / predicted_s)
                told_s = max(seconds - deviation_s, 0.1 * seconds)
                # The error is judged with the deviations applied, so that a lasting error of the shared fit is not
                # taken for a row of outliers.
                off_s = abs(seconds - predicted_s)
                self._off_s = REMEMBERED * self._off_s + min(off_s, most_s)
                self._predicted_s = REMEMBERED * self._predicted_s + predicted_s
                weight = (1.0 if off_s <= most_s else most_s / off_s) / predicted_s
        self._add(x0, x1, x2, x3, x4, weight, told_s)

    def _learn(
        self, kind: Kind, dev: Sequence[float], parts: Sequence[float], copied_squared: float, error_s: float
    ) -> None:
        """Take a share of a step's error on. ``parts``: seconds of its terms by the shared coefficients."""
        low, high = DEVIATIONS
        gain = self._learning * error_s / (sum(part * part for part in parts) + copied_squared)
        self._deviations[kind] = [
            min(max(FADING * (d + gain * part), low), high) for d, part in zip(dev, parts, strict=True)]

    def _learn_beyond(self, kind: Kind, share: float, error: float) -> None:
        """Learn from a pipeline's step (``OwnFactor.learn``). Where it is faster than lone instances with the same
        work, the minute has changed, for them too."""
        alone = self._alone
        assert alone is not None and self._shared is not None, "pipelines are beyond lone instances"
        if not self._beyond[kind].learn(share, error) and error < 0.0 and self._shared[0] * share > 0.0:
            alone[0] = max(alone[0] + self._learning * error / (self._shared[0] * share), DEVIATIONS[0])

    def _waited(self, kind: Kind, terms: Terms, seconds: float, launches: Launches) -> bool:
        """Whether the step waited for launches, by the present coefficients: then they are what it teaches."""
        coefficients = self.coefficients(kind)
        if coefficients is None:
            return False
        factor = self.launches_factor(kind)
        excess_s = launches.excess_s(factor, coefficients, terms)
        if excess_s <= 0.0:
            return False
        if kind not in self.observed:
            self._begin(kind)
        predicted_s = product(coefficients, terms) + excess_s
        most_s = CLIP * predicted_s
        error_s = min(max(seconds - predicted_s, -most_s), most_s)
        launch_s, copied, beside = factor * launches.launch_s, terms[5], terms[6]
        gain = self._learning * error_s / (launch_s * launch_s + copied * copied + beside * beside)
        low, high = DEVIATIONS
        self._launches[kind] = self._newest_launches = min(max(factor * (1.0 + gain * launch_s), 1.0 + low), 1.0 + high)
        if copied > 0.0:
            self._copies.learn(copied / predicted_s, error_s / predicted_s)
        if beside > 0.0:
            self._beside.learn(beside / predicted_s, error_s / predicted_s)
        self._off_s = REMEMBERED * self._off_s + min(abs(seconds - predicted_s), most_s)
        self._predicted_s = REMEMBERED * self._predicted_s + predicted_s
        return True

    def _add(self, x0: float, x1: float, x2: float, x3: float, x4: float, weight: float, seconds: float) -> None:
        n, keep = self._normal, FORGETTING
        w0, w1, w2, w3, w4 = weight * x0, weight * x1, weight * x2, weight * x3, weight * x4
        self._normal = [
            keep * n[0] + w0 * x0, keep * n[1] + w0 * x1, keep * n[2] + w0 * x2, keep * n[3] + w0 * x3,
            keep * n[4] + w0 * x4, keep * n[5] + w1 * x1, keep * n[6] + w1 * x2, keep * n[7] + w1 * x3,
            keep * n[8] + w1 * x4, keep * n[9] + w2 * x2, keep * n[10] + w2 * x3, keep * n[11] + w2 * x4,
            keep * n[12] + w3 * x3, keep * n[13] + w3 * x4, keep * n[14] + w4 * x4,
        ]  # fmt: skip
        m0, m1, m2, m3, m4 = self._moment
        self._moment = [
            keep * m0 + w0 * seconds, keep * m1 + w1 * seconds, keep * m2 + w2 * seconds, keep * m3 + w3 * seconds,
            keep * m4 + w4 * seconds,
        ]
        self._weight = keep * self._weight + 1.0
        self._num_observations += 1
        number = self._num_observations
        if number % REFIT_EVERY[number > EARLY] == 0 and number >= MIN_OBSERVATIONS:
            self._solve()

    def _solve(self) -> None:
        """Weighted least squares with coefficients >= 0, each drawn slightly towards the common level."""
        size, upper = NUM_FITTED, iter(self._normal)
        matrix = [[0.0] * size for _ in range(size)]
        for i in range(size):
            for j in range(i, size):
                matrix[i][j] = matrix[j][i] = next(upper)
        total = sum(map(sum, matrix))
        level = sum(self._moment) / total if total > 0.0 else 1.0
        moment = list(self._moment)
        drawn = self._trust * total / self._weight if total > 0.0 else 1.0
        for i in range(size):
            matrix[i][i] += drawn
            moment[i] += drawn * level
        self._shared = tuple(non_negative(matrix, moment))


def non_negative(matrix: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """x of ``matrix @ x = moment``; unknowns that come out below 0 are set to 0, the most negative first.

    In plain floats: the result of a linear algebra library for an ill-conditioned system depends on the processor, and
    so would decisions. ``matrix``: symmetric, positive definite.
    """
    active = list(range(len(moment)))
    found = [0.0] * len(moment)
    while active:
        solved = _gauss([[matrix[i][j] for j in active] for i in active], [moment[i] for i in active])
        least = min(solved)
        if least >= 0.0:
            for i, x in zip(active, solved, strict=True):
                found[i] = x
            break
        del active[solved.index(least)]
    return found


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
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
