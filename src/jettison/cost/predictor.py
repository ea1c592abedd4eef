"""The one predictor of step times: of every group, every stage, and every policy that asks how long something takes.

Pure: times come in as integer nanoseconds, no clock is read. Terms come from a cost model (``cost.model``), profiled or
nominal; how they are bent by what is observed is ``cost.stepfit``'s.

Observations are only noted; the next question has them folded in, in order of time and group. So groups may tell of
their steps late, as long as they do before that question, and a run of decode steps is told of at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from jettison.cost.model import CostModel
from jettison.cost.stepfit import StepFit, Terms
from jettison.cost.stepwork import LONE_STEP, NOTHING, Measure, Part, StepWork, last_stage_of, period_of, step_of
from jettison.types import NANOSECONDS, GroupId

MEMORY_STEPS = 1024
"""Older observations weigh less than a hundredth of a new one (``stepfit.FORGETTING`` to this power)."""
MAX_NOTED = 8 * MEMORY_STEPS
"""Observations that are kept before the oldest are let go."""

EFFICIENCY_BOUNDS = (0.3, 1.0)
"""Outside of them the prediction for one instance is wrong, not the pipeline."""

STAGE_LEARNING = 0.2
"""Less than of steps: what disturbs a stage passes with it, and does not hold up the next one."""

LEAST_TOKEN_S = 1e-12
"""Tokens must cost something, or nothing could be divided."""

LONG_CHUNK = 4096
"""Tokens beyond every model's roofline knee: what one more costs there is what a token costs in any chunk."""


Totals = tuple[int, int, int, int, int]
"""``StepWork``, which is one: plain tuples are cheaper to note."""

Run = tuple[Sequence[int], GroupId, Part, Totals]
"""Steps with the same rows, one after the other, usually one: when the first began and when each ended (the next began
then), their group, what the times are of, and the work of the first. Each attends to its tokens more than the one
before."""


class ChunkPrices(NamedTuple):
    """What chunks add to a microbatch (``policy.lookahead.ChunkCost``): additive, so that cuts can be compared."""

    fixed_cost: float
    """What a microbatch costs whatever is in it (gamma: kernels' starts, one pass over the weights)."""
    token: float
    pair: float
    kv_token: float
    row: float

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        """What a chunk behind ``num_context`` tokens adds; the fixed part is left out.

        Prompts pay nothing for being a row of their own: one costs the same however it is cut.
        """
        if num_tokens <= 0:
            return 0.0
        if num_tokens == 1:
            return self.row + self.token + (self.pair + self.kv_token) * num_context
        num_pairs = num_context * num_tokens + (num_tokens * num_tokens + num_tokens) / 2
        return self.token * num_tokens + self.pair * num_pairs


UNKNOWN_PRICES = ChunkPrices(0.0, 1.0, 0.0, 0.0, 0.0)
"""While nothing is known, a token costs 1 and nothing else does."""


def nominal_cost(num_layers: int) -> CostModel:
    """Proportions of the terms of a step of a model without a profile; its seconds mean nothing.

    A hundred tokens, ten rows, 10,000 tokens of KV or 100,000 pairs cost about as much as a step's fixed part.
    """
    per_layer = 1e-3 / num_layers
    return CostModel(
        num_layers, pair_layer_s=1e-5 * per_layer, kv_token_layer_s=1e-4 * per_layer, token_layer_s=1e-2 * per_layer,
        layer_s=per_layer, step_s=0.0, entry_s=0.0, entry_token_s=0.0, head_s=0.0, sample_s=1e-4,
    )


class StepTimePredictor:
    """Predicts every ``Part`` of the steps of all groups, learns from all of them."""

    def __init__(
        self, num_layers: int, cost: CostModel | None = None, *,
        efficiency: Callable[[int], float] = lambda num_stages: 1.0, copy_bytes_per_s: float | None = None,
    ) -> None:
        """``cost``: as profiled; None: nothing is predicted before ``MIN_OBSERVATIONS`` steps.

        ``efficiency``: throughput of a pipeline of so many stages over that of as many instances, until one has been
        seen. ``copy_bytes_per_s``: how fast bytes are copied beside a step; until such steps have been seen, it waits
        for them all. None: copies cost nothing, and nothing is learned of them.
        """
        self._cost = cost or nominal_cost(num_layers)
        self._fit = StepFit(is_profiled=cost is not None)
        self._stage_fit = StepFit(is_profiled=cost is not None, learning=STAGE_LEARNING)
        """Of what a stage computes: there is no waiting in it, for other workers or for the controller."""
        self._efficiency = efficiency
        self._copied_byte_s = 1.0 / copy_bytes_per_s if copy_bytes_per_s else 0.0
        self._runs: list[Run] = []
        self._num_noted = 0
        self._most_noted = MAX_NOTED
        self._prices: dict[Part, ChunkPrices] = {}
        """Good until something is folded in."""

    # --- learning ---------------------------------------------------------------------------------------------

    def observe(
        self, work: StepWork, times_ns: Sequence[int], group_id: GroupId = 0, part: Part = LONE_STEP
    ) -> None:
        """Add steps of a group that followed each other (``Run``)."""
        self._note((times_ns, group_id, part, work))

    def observe_run(self, num_rows: int, num_kv_tokens: int, times_ns: Sequence[int], group_id: GroupId) -> None:
        """Add decode steps of a group of one stage that followed each other, a token for each row in every one."""
        self._note((times_ns, group_id, LONE_STEP, (num_rows, num_rows, num_kv_tokens + num_rows, num_kv_tokens, 0)))

    def _note(self, run: Run) -> None:
        self._runs.append(run)
        self._num_noted += len(run[0]) - 1
        if self._num_noted > self._most_noted:
            self._forget()

    def _forget(self) -> None:
        """Let runs go that are older than enough others."""
        self._runs.sort(key=lambda run: -run[0][0])
        starts = [-run[0][0] for run in self._runs]
        later = [0, *accumulate(len(run[0]) - 1 for run in self._runs)]
        self._runs = [run for run in self._runs if later[bisect_left(starts, -run[0][-1])] < MEMORY_STEPS]
        self._num_noted = sum(len(run[0]) - 1 for run in self._runs)
        # Runs of many groups at once all stay: then the next look comes when they are as many again.
        self._most_noted = max(MAX_NOTED, 2 * self._num_noted)

    def _fold(self) -> None:
        """Fold in what was noted, in order of end and group; as noted where both are equal."""
        steps: list[tuple[int, GroupId, int, int, Part, Totals]] = []
        for times_ns, group_id, part, work in self._runs:
            begin_ns = times_ns[0]
            for number in range(1, len(times_ns)):
                end_ns = times_ns[number]
                steps.append((end_ns, group_id, begin_ns, number - 1, part, work))
                begin_ns = end_ns
        if len(steps) > 1:
            steps.sort(key=lambda step: step[:2])
            del steps[:-MEMORY_STEPS]
        steps_fit, stage_fit, terms_of = self._fit, self._stage_fit, self._terms
        for end_ns, _, begin_ns, number, part, (rows, tokens, pairs, kv_tokens, copied) in steps:
            grown = number * tokens
            terms = terms_of((rows, tokens, pairs + grown, kv_tokens + grown, copied), part)
            fit = stage_fit if part.measure is Measure.STAGE else steps_fit
            fit.observe(part[:2], terms, (end_ns - begin_ns) / NANOSECONDS)
        self._runs.clear()
        self._num_noted = 0
        self._prices.clear()

    def _coefficients(self, part: Part) -> Terms | None:
        """With all that was noted in them; of a stage by whole steps, until there are stages to go by."""
        if self._runs:
            self._fold()
        if part.measure is Measure.STAGE and self._stage_fit.is_known:
            return self._stage_fit.coefficients(part[:2])
        return self._fit.coefficients(part[:2])

    def _terms(self, work: Totals, part: Part) -> Terms:
        """Seconds by the cost model."""
        num_rows, num_tokens, num_pairs, num_kv_tokens, num_copied_bytes = work
        cost, num_stages = self._cost, part.num_stages
        layers = part.num_layers
        if layers is None:
            layers = max(1, cost.num_layers // num_stages) if part.measure is Measure.STAGE else cost.num_layers
        fixed, tokens, pairs, kv, rows = cost.terms_s(
            num_tokens, num_pairs, num_kv_tokens + num_tokens, layers,
            is_first=part.is_first, num_samples=num_rows if part.is_last else 0,
        )
        copied = num_copied_bytes * self._copied_byte_s
        if part.measure is Measure.STEP and num_stages > 1:
            fixed += (num_stages - 1) * cost.step_s
        elif part.measure is Measure.PERIOD:
            share = 1.0 / (num_stages * self._efficiency(num_stages))
            return fixed * share, tokens * share, pairs * share, kv * share, rows * share, copied
        return fixed, tokens, pairs, kv, rows, copied

    # --- predicting -------------------------------------------------------------------------------------------

    def predict_s(self, work: StepWork, part: Part = LONE_STEP) -> float | None:
        """Seconds of such a step, or of a part of it; an empty microbatch takes none. None while too little is known.

        Never less for more rows, tokens, pairs, KV tokens or bytes.
        """
        coefficients = self._coefficients(part)
        if coefficients is None:
            return None
        return _product(coefficients, self._terms(work, part))

    def largest_batch(
        self, seconds: float, most: int, work_of: Callable[[int], StepWork], part: Part = LONE_STEP
    ) -> int | None:
        """The largest size up to ``most`` whose work takes at most ``seconds``; 0 where none does, None while unknown.

        ``work_of``: the work of a batch of a size, in whatever it grows; its totals never shrink as the size grows.
        """
        coefficients = self._coefficients(part)
        if coefficients is None:
            return None
        low, high = 0, most + 1  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if _product(coefficients, self._terms(work_of(middle), part)) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def prefill_tokens_per_s(
        self, max_num_tokens: int, decodes: StepWork = NOTHING, num_stages: int = 1, *,
        prompt_tokens: int | None = None, num_context: int = 0,
    ) -> float | None:
        """Prefill rate when every step is filled up to the token budget beside the decodes of one microbatch.

        A step's time is its way through all stages, and as many steps as stages are under way at once (Little's law).
        ``prompt_tokens``: of a prompt, where several share a step (None: one fills it); ``num_context``: computed
        before, of each.
        """
        num_tokens = max(1, max_num_tokens - decodes.num_tokens)
        seconds = self.predict_s(decodes.with_prompts(num_tokens, prompt_tokens, num_context), step_of(num_stages))
        return None if not seconds else num_stages * num_tokens / seconds

    def is_pipeline_measured(self, num_stages: int) -> bool:
        """Whether a busy pipeline of so many stages has been seen."""
        if self._runs:
            self._fold()
        return self._fit.is_observed(period_of(num_stages)[:2])

    def pipeline_efficiency(self, work: StepWork, num_stages: int) -> float:
        """Throughput of a pipeline over that of as many instances with microbatches like this; within bounds."""
        if num_stages == 1:
            return 1.0
        alone_s, period_s = self.predict_s(work), self.predict_s(work, period_of(num_stages))
        if not alone_s or not period_s or not self.is_pipeline_measured(num_stages):
            return self._efficiency(num_stages)
        low, high = EFFICIENCY_BOUNDS
        return min(max(alone_s / (num_stages * period_s), low), high)

    def chunk_prices(self, num_stages: int, num_layers: int | None = None) -> ChunkPrices:
        """Of the last stage of such a pipeline, with ``num_layers`` (None: an equal share)."""
        part = last_stage_of(num_stages, num_layers)
        coefficients = self._coefficients(part)
        if coefficients is None:
            return UNKNOWN_PRICES
        found = self._prices.get(part)
        if found is None:
            fixed, token, pair, kv, row, _ = coefficients
            terms = self._terms(StepWork(LONG_CHUNK, LONG_CHUNK, LONG_CHUNK, 0), part)
            token_s, pair_s, kv_s, row_s = (
                c * term / LONG_CHUNK for c, term in zip((token, pair, kv, row), terms[1:5], strict=True)
            )
            found = self._prices[part] = ChunkPrices(
                fixed * terms[0], max(token_s + kv_s, LEAST_TOKEN_S), pair_s, kv_s, row_s
            )
        return found


def _product(coefficients: Terms, terms: Terms) -> float:
    fixed, token, pair, kv, row, copied = coefficients
    x0, x1, x2, x3, x4, x5 = terms
    return fixed * x0 + token * x1 + pair * x2 + kv * x3 + row * x4 + copied * x5
