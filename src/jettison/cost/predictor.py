"""The step time predictor, one for all groups, stages and policies.

Pure: times come in as integer nanoseconds, no clock is read. The terms come from a cost model (``cost.model``),
profiled or nominal; ``cost.stepfit`` corrects them by observed steps.

Observations are only noted; the next question folds them in, in order of time and group. So a group may report its
steps late, and a run of decode steps at once: every question first has the groups report their outstanding steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jettison.cost.hardware import USUAL_BESIDE
from jettison.cost.model import CostModel
from jettison.cost.stepfit import Launches, StepFit, Terms, product
from jettison.cost.stepnotes import StepNotes, Totals
from jettison.cost.stepwork import LONE_STEP, NOTHING, Measure, Part, StepWork, last_stage_of, period_of, step_of
from jettison.types import NANOSECONDS, GroupId

MAX_KNOWN_TERMS = 4096
"""Sizes of steps for which computed terms are cached."""

USUAL_STAGE_S = 4e-4
"""Seconds that a stage takes beyond its share of a lone step, assumed without a profile: of a worker that is a process
on a host's cores, its turn and a message."""

UNEVEN = 1.19
"""By what a period is longer than a profile says, until one has been seen: profiled microbatches are all alike."""

EFFICIENCY_BOUNDS = (0.3, 1.0)
"""Bounds of a pipeline's efficiency: a value outside of them means that the prediction for one instance is wrong."""

STAGE_LEARNING = 0.2
"""Learning rate for stages, lower than for steps: a disturbance ends with its stage and does not delay the next one."""

PRICES_EVERY = 16
"""Noted stage times after which chunks get new prices."""

USUAL_COPY_BYTES_PER_S = 4e9
"""Rate between device and host assumed without a profile: the starting point of learning."""

LEAST_TOKEN_S = 1e-12
"""Least cost of a token: prices are divided by it."""

ModelTerms = tuple[float, float, float, float, float]
"""Seconds by the cost model: fixed, all tokens, one pair, one token of KV, all rows."""

LONG_CHUNK = 4096
"""Tokens of a chunk beyond every model's roofline knee: the marginal cost of a token there is its price in any
chunk."""


class ChunkPrices(NamedTuple):
    """The cost that chunks add to a microbatch (``policy.lookahead.ChunkCost``): additive, so that cuts can be
    compared."""

    fixed_cost: float
    """The fixed cost of a microbatch (gamma: kernel launches, one pass over the weights)."""
    token: float
    pair: float
    kv_token: float
    row: float

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        """The cost that a chunk behind ``num_context`` tokens adds, without the fixed part.

        A prompt's chunk is not charged for its row, so that a prompt costs the same however it is cut.
        """
        if num_tokens <= 0:
            return 0.0
        if num_tokens == 1:
            return self.row + self.token + (self.pair + self.kv_token) * num_context
        num_pairs = num_context * num_tokens + (num_tokens * num_tokens + num_tokens) / 2
        return self.token * num_tokens + self.pair * num_pairs


UNKNOWN_PRICES = ChunkPrices(0.0, 1.0, 0.0, 0.0, 0.0)
"""Prices while nothing is known: a token costs 1, everything else 0."""


def nominal_cost(num_layers: int) -> CostModel:
    """The proportions of a step's terms for a model without a profile; the seconds mean nothing.

    A hundred tokens, ten rows, 10,000 tokens of KV or 100,000 pairs cost about as much as a step's fixed part.
    """
    per_layer = 1e-3 / num_layers
    return CostModel(
        num_layers, pair_layer_s=1e-5 * per_layer, kv_token_layer_s=1e-4 * per_layer, token_layer_s=1e-2 * per_layer,
        layer_s=per_layer, step_s=0.0, entry_s=0.0, entry_token_s=0.0, head_s=0.0, sample_s=1e-4,
    )


class StepTimePredictor:
    """Predicts every ``Part`` of the steps of all groups, and learns from all of them."""

    def __init__(
        self, num_layers: int, cost: CostModel | None = None, *,
        added_stage_s: Callable[[int], float] | None = None, copy_bytes_per_s: float | None = None,
        beside_byte_s: float | None = None, catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """``cost``: the profiled cost model; None: nothing is predicted before ``MIN_OBSERVATIONS`` steps.

        ``added_stage_s``: seconds that a stage of a pipeline of so many stages takes beyond its share of a lone step,
        used until such a pipeline has been observed (None: ``USUAL_STAGE_S``). A hop costs a small step as much as a
        large one. ``copy_bytes_per_s``: the rate of copies between two steps (None:
        ``USUAL_COPY_BYTES_PER_S``); until such steps have been observed, a step waits for all of their bytes.
        ``beside_byte_s``: seconds that a byte copied beside a step adds to it (None: ``USUAL_BESIDE`` of its copy
        time). ``catch_up``: makes the groups report all steps that have ended (``observe``); called before each answer
        that depends on them.
        """
        self._cost = cost or nominal_cost(num_layers)
        self._fit = StepFit(is_profiled=cost is not None)
        self._stage_fit = StepFit(is_profiled=cost is not None, learning=STAGE_LEARNING)
        """The fit of stages' compute times, which contain no waiting for other workers or for the controller."""
        self._added_stage_s = added_stage_s or (lambda num_stages: USUAL_STAGE_S)
        self._uneven = 1.0 if cost is None else UNEVEN  # the usual time is that of pipelines that served
        self._catch_up = catch_up
        self._copied_byte_s = 1.0 / (copy_bytes_per_s or USUAL_COPY_BYTES_PER_S)
        self._beside_byte_s = USUAL_BESIDE * self._copied_byte_s if beside_byte_s is None else beside_byte_s
        self._notes, self._stage_notes = StepNotes(), StepNotes()
        self._known_terms: dict[tuple[int, int, Part], ModelTerms] = {}
        """A cache by (rows, tokens, part): most steps are decodes of as many rows as the one before."""
        self._prices: dict[tuple[int, int | None], ChunkPrices] = {}
        """Prices by stages and layers, as computed when they were first asked for."""

    # --- learning ---------------------------------------------------------------------------------------------

    def observe(
        self, work: StepWork, times_ns: Sequence[int], group_id: GroupId = 0, part: Part = LONE_STEP
    ) -> None:
        """Add consecutive steps of a group with the same rows, usually one.

        ``times_ns``: the begin of the first step, then the end of each, which is the begin of the next. ``work``: the
        work of the first. Each step attends to more KV than the one before, by that one's tokens; only the first has
        copies.
        """
        notes = self._stage_notes if part.measure is Measure.STAGE else self._notes
        notes.add(times_ns, group_id, part, work)

    def _steps(self) -> StepFit:
        """The fit of whole steps, with all ended steps folded in."""
        self._catch_up()
        if self._notes:
            self._fold(self._notes, self._fit)
        return self._fit

    def _stages(self) -> StepFit:
        """The fit of stages; the fit of whole steps, until the fit of stages is known."""
        self._catch_up()
        if self._stage_notes:
            self._fold(self._stage_notes, self._stage_fit)
            self._prices.clear()
        return self._stage_fit if self._stage_fit.is_known else self._steps()

    def _fold(self, notes: StepNotes, fit: StepFit) -> None:
        for part, work, took_ns in notes.take():
            fit.observe(part[:2], self._terms(work, part), took_ns / NANOSECONDS, self._launches(work, part))

    def _fit_of(self, part: Part) -> StepFit:
        return self._stages() if part.measure is Measure.STAGE else self._steps()

    def _terms(self, work: Totals, part: Part) -> Terms:
        """The seconds of each term by the cost model."""
        num_rows, num_tokens, num_pairs, num_kv_tokens, num_copied_bytes, num_beside_bytes = work
        fixed, tokens, pair_s, kv_token_s, rows = self._model_terms(num_rows, num_tokens, part)
        return (
            fixed, tokens, pair_s * num_pairs, kv_token_s * (num_kv_tokens + num_tokens), rows,
            self._copied_s(num_copied_bytes, part) if num_copied_bytes else 0.0,
            self._beside_s(num_beside_bytes, part) if num_beside_bytes else 0.0,
        )

    def _launches(self, work: Totals, part: Part) -> Launches | None:
        """None: a graph runs the layers, or the host computes them."""
        cost, (num_rows, num_tokens, *_) = self._cost, work
        if not cost.launch_layer_s or not cost.is_launched(num_tokens, num_rows, has_chunks=num_tokens > num_rows):
            return None
        layers = self._layers(part)
        launch_s, (fixed_s, tokens_s) = layers * cost.launch_layer_s, cost.layer_parts_s(num_tokens, layers)
        if part.measure is Measure.PERIOD:
            share = 1.0 / part.num_stages
            return Launches(launch_s * share, fixed_s * share, tokens_s * share)
        return Launches(launch_s, fixed_s, tokens_s)

    def _layers(self, part: Part) -> int:
        """Layers in a part."""
        if part.num_layers is not None:
            return part.num_layers
        num_layers = self._cost.num_layers
        return max(1, num_layers // part.num_stages) if part.measure is Measure.STAGE else num_layers

    def _copied_s(self, num_copied_bytes: int, part: Part) -> float:
        """Seconds of copies that a step waits for. All its stages copy at the same time, and no stage computes
        meanwhile."""
        if part.measure is Measure.STAGE:
            return 0.0
        seconds = num_copied_bytes * self._copied_byte_s
        return seconds / part.num_stages if part.measure is Measure.PERIOD else seconds

    def _beside_s(self, num_beside_bytes: int, part: Part) -> float:
        """Seconds that copies beside a step add to it: each stage is slowed by the copies beside it."""
        seconds = num_beside_bytes * self._beside_byte_s
        return seconds if part.measure is Measure.STEP else seconds / part.num_stages

    def _model_terms(self, num_rows: int, num_tokens: int, part: Part) -> ModelTerms:
        """Seconds of a step with so many rows and tokens by the cost model; for pairs and KV, the seconds of one of
        each."""
        key = num_rows, num_tokens, part
        known = self._known_terms.get(key)
        if known is None:
            if len(self._known_terms) >= MAX_KNOWN_TERMS:
                self._known_terms.clear()
            known = self._known_terms[key] = self._compute_terms(num_rows, num_tokens, part)
        return known

    def _compute_terms(self, num_rows: int, num_tokens: int, part: Part) -> ModelTerms:
        cost, num_stages, layers = self._cost, part.num_stages, self._layers(part)
        fixed, tokens, pair_s, kv_token_s, rows = cost.terms_s(
            num_tokens, 1, 1, layers, is_first=part.is_first, num_samples=num_rows if part.is_last else 0
        )
        if part.measure is Measure.STEP and num_stages > 1:
            fixed += (num_stages - 1) * cost.step_s
        elif part.measure is Measure.PERIOD:
            share = 1.0 / num_stages
            return fixed * share, tokens * share, pair_s * share, kv_token_s * share, rows * share
        return fixed, tokens, pair_s, kv_token_s, rows

    # --- predicting -------------------------------------------------------------------------------------------

    def predict_s(self, work: StepWork, part: Part = LONE_STEP) -> float | None:
        """Seconds of such a step, or of a part of it; an empty microbatch takes none. None while too little is known.

        Monotonic: never less for more tokens, pairs, KV tokens or bytes, nor for more rows with their tokens.
        """
        taking = self.taking(part)
        return None if taking is None else taking(work)

    def taking(self, part: Part = LONE_STEP) -> Callable[[StepWork], float] | None:
        """``predict_s`` for many works with the present coefficients; callers must not keep it. None while too little
        is known."""
        fit = self._fit_of(part)
        coefficients = fit.coefficients(part[:2])
        if coefficients is None:
            return None
        uneven, added_s = self._unseen(part, fit)
        if uneven != 1.0:
            c0, c1, c2, c3, c4, copied, beside = coefficients
            coefficients = uneven * c0, uneven * c1, uneven * c2, uneven * c3, uneven * c4, copied, beside
        if not self._cost.launch_layer_s and not added_s:
            return lambda work: product(coefficients, self._terms(work, part))
        factor = uneven * fit.launches_factor(part[:2])

        def seconds(work: StepWork) -> float:
            terms, launches = self._terms(work, part), self._launches(work, part)
            excess_s = 0.0 if launches is None else launches.excess_s(factor, coefficients, terms)
            return product(coefficients, terms) + excess_s + (added_s if work.num_tokens else 0.0)

        return seconds

    def _unseen(self, part: Part, fit: StepFit) -> tuple[float, float]:
        """By what a pipeline's period is longer than its share of a lone step, where none has been seen: a factor, and
        seconds."""
        if part.measure is not Measure.PERIOD or part.num_stages == 1 or part[:2] in fit.observed:
            return 1.0, 0.0
        return self._uneven, self._added_stage_s(part.num_stages)

    def decoding(self, part: Part = LONE_STEP) -> Callable[[int, int], float] | None:
        """The same for ``StepWork.decodes``, as a function of (rows, KV tokens)."""
        fit = self._fit_of(part)
        coefficients = fit.coefficients(part[:2])
        if coefficients is None:
            return None
        if self._cost.launch_layer_s:
            taking = self.taking(part)
            assert taking is not None, "the coefficients are known"
            return lambda num_rows, num_kv_tokens: taking(StepWork.decodes(num_rows, num_kv_tokens))
        uneven, added_s = self._unseen(part, fit)
        fixed, token, pair, kv, row, *_ = (uneven * each for each in coefficients)
        terms_of: dict[int, tuple[float, float, float, float]] = {}
        """By rows: the seconds that do not depend on KV, of one pair, of one token of KV, and of the rows."""

        def seconds(num_rows: int, num_kv_tokens: int) -> float:
            terms = terms_of.get(num_rows)
            if terms is None:
                x0, x1, x2, x3, x4 = self._model_terms(num_rows, num_rows, part)
                terms = terms_of[num_rows] = fixed * x0 + token * x1, x2, x3, row * x4 + (added_s if num_rows else 0.0)
            first, pair_s, kv_token_s, last = terms
            num_pairs = num_kv_tokens + num_rows
            return first + pair * (pair_s * num_pairs) + kv * (kv_token_s * num_pairs) + last

        return seconds

    @property
    def error(self) -> float:
        """Mean absolute error of recent whole steps, as a share of their predicted time."""
        return self._steps().error

    def largest_batch(
        self, seconds: float, most: int, work_of: Callable[[int], StepWork], part: Part = LONE_STEP
    ) -> int | None:
        """The largest size up to ``most`` at which the work takes at most ``seconds``; 0 where none does, None while
        too little is known.

        ``work_of``: the work of a batch of a given size, in any unit of size; its totals must not shrink as the size
        grows. Where a host launches layers, the first token of a chunk runs as a decode does and the second one brings
        all launches: where only the first fits, nothing does, as a token a step is no way to read a prompt.
        """
        taking = self.taking(part)
        if taking is None:
            return None
        low, high = 0, most + 1  # low fits, high does not
        middle = most  # often all of it fits
        while high - low > 1:
            if taking(work_of(middle)) <= seconds:
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        if low == 1 < most and self._launches(work_of(1), part) is None and self._launches(work_of(2), part):
            return 0
        return low

    def prefill_tokens_beside(
        self, decodes: StepWork, seconds: float, most: int, part: Part = LONE_STEP
    ) -> int | None:
        """Tokens of a prompt, from its start, that a step may take beside these decodes and still last at most
        ``seconds``; at most ``most``. None while too little is known."""
        return self.largest_batch(seconds, most, decodes.with_prompt, part)

    def prefill_tokens_per_s(
        self, max_num_tokens: int, decodes: StepWork = NOTHING, num_stages: int = 1, *,
        prompt_tokens: int | None = None, num_context: int = 0,
    ) -> float | None:
        """Prefill rate, tokens a second, when every step is filled up to the token budget beside the decodes of one
        microbatch.

        A step's time is its way through all stages, and as many steps as stages are under way at once (Little's law).
        ``prompt_tokens``: tokens of each prompt, where several share a step (None: one fills it); ``num_context``:
        tokens of each prompt that were computed before.
        """
        num_tokens = max(1, max_num_tokens - decodes.num_tokens)
        seconds = self.predict_s(decodes.with_prompts(num_tokens, prompt_tokens, num_context), step_of(num_stages))
        return None if not seconds else num_stages * num_tokens / seconds

    @property
    def knows_stages(self) -> bool:
        """Whether a stage's own time is known: profiled, or seen. Whole steps do not tell it: each decoding row is a
        token of every layer and a sample of the last stage, and which of both takes the time they do not say."""
        self._stages()
        return self._stage_fit.is_known

    @property
    def measured_pipelines(self) -> list[int]:
        """Numbers of stages of the busy pipelines that have been seen."""
        return sorted(num_stages for measure, num_stages in self._steps().observed if measure is Measure.PERIOD)

    def pipeline_efficiency(self, work: StepWork, num_stages: int) -> float:
        """Throughput of a pipeline over that of as many instances with microbatches like this; within bounds."""
        if num_stages == 1:
            return 1.0
        alone_s, period_s = self.predict_s(work), self.predict_s(work, period_of(num_stages))
        if not alone_s or not period_s:
            return 1.0
        low, high = EFFICIENCY_BOUNDS
        return min(max(alone_s / (num_stages * period_s), low), high)

    def chunk_prices(self, num_stages: int, num_layers: int | None = None) -> ChunkPrices:
        """Prices on the last stage of such a pipeline, with ``num_layers`` (None: an equal share). Every step asks for
        them, so they are cached and may be a few steps old."""
        found = self._prices.get((num_stages, num_layers))
        if found is None or len(self._stage_notes) >= PRICES_EVERY:
            part = last_stage_of(num_stages, num_layers)
            coefficients = self._fit_of(part).coefficients(part[:2])
            if coefficients is None:
                return UNKNOWN_PRICES
            found = self._prices[num_stages, num_layers] = self._prices_by(coefficients, part)
        return found

    def _prices_by(self, coefficients: Terms, part: Part) -> ChunkPrices:
        fixed, token, pair, kv, row, *_ = coefficients
        fixed_s, tokens_s, pair_s, kv_token_s, rows_s = self._model_terms(LONG_CHUNK, LONG_CHUNK, part)
        kv_s = kv * kv_token_s
        return ChunkPrices(
            fixed * fixed_s, max(token * (tokens_s / LONG_CHUNK) + kv_s, LEAST_TOKEN_S), pair * pair_s, kv_s,
            row * (rows_s / LONG_CHUNK),
        )
