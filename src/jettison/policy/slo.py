"""What a step may take where offline work is to share it with online requests (ConServe sections 4.2 and 4.5).

Pure: objectives and predictions in, seconds and sizes out. What fills a step within them is ``policy.filling``'s.

- A step with offline tokens in it may take as long as the objective for the time between two tokens says, for what
  decodes and for what arrives meanwhile: TPOT here is every gap, not a request's mean.
- While an online request has no first token, it may take what is left of one TPOT since that request arrived: offline
  work, in the step that an arrival finds and in those that follow, costs it one TPOT in all.
- Where online requests hold much of the memory (``OfflineParams.fill_below``), what they take alone: a step that is
  filled lets them stay longer, so they hold more, and those that arrive in a burst would wait for blocks that none but
  online requests hold.
- Where nothing is online there is no limit in time: a batch is as large as saturates the device, and no larger, for
  what arrives meanwhile waits for it or has it given up.

The paper bounds a batch with decodes by TPOT alone, and one without by the whole TTFT objective, whatever its requests
have waited already. Then an online request that a burst has kept waiting has its last steps filled up, too: that is
what a 99th percentile shows.

While nothing is known of step times offline tokens get no place beside online ones: steps of either class alone teach
the predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import LONE_STEP, NOTHING, Part, StepWork, period_of
from jettison.policy.offline import TPOT_OVER_LONE_STEP, TTFT_OVER_TPOT, OfflineParams, SloParams

ERRORS_LEFT = 3.0
"""Mean errors of the predictor by which a step is planned shorter: objectives are judged by their 99th percentile,
which stands at about three where errors are normal."""

AHEAD_SHARE = 0.5
"""Of the objective for first tokens, what prompts ahead may take where fewer instances serve than could: the rest is
for what comes meanwhile, for decodes that become more, and for the time that a sleeper needs to wake."""

SATURATED = 0.95
"""Of the prompt tokens a second that the largest batch gets, what a batch of offline requests alone is to get."""

LONE_DECODE = StepWork.decodes(1, 0)

NO_COPIES = (0, 0)

Chunk = tuple[int, int]
"""(tokens, tokens before them) of one request in a step."""


class Pace(NamedTuple):
    """By what a group's steps are judged."""

    offline: OfflineParams
    predictor: StepTimePredictor

    def objectives(self) -> Objectives:
        """As they are known now."""
        return objectives(self.offline.slo, self.predictor)

    @property
    def bounds_online(self) -> bool:
        """Steps of online requests alone keep to the TPOT objective, too: someone has named it. With offline requests
        refused that is the same step budget for online work alone; by priority alone there is none."""
        return self.offline.slo.tpot_s is not None and (self.offline.slo_aware or not self.offline.serves)


class Objectives(NamedTuple):
    """Latencies that offline work leaves to online requests, in seconds; None: not known yet."""

    ttft_s: float | None
    tpot_s: float | None


UNKNOWN_OBJECTIVES = Objectives(None, None)


def objectives(slo: SloParams, predictor: StepTimePredictor) -> Objectives:
    """What was asked for; what was not, from the decode step of one request."""
    tpot_s = slo.tpot_s
    if tpot_s is None:
        lone_s = predictor.predict_s(LONE_DECODE)
        tpot_s = None if lone_s is None else TPOT_OVER_LONE_STEP * lone_s
    ttft_s = slo.ttft_s
    if ttft_s is None and tpot_s is not None:
        ttft_s = TTFT_OVER_TPOT * tpot_s
    return Objectives(ttft_s, tpot_s)


def within_tokens(chunks: Sequence[Chunk], num_tokens: int) -> list[Chunk]:
    """The first ``num_tokens`` tokens of chunks; the last one may be cut."""
    taken: list[Chunk] = []
    for num, context in chunks:
        if num_tokens <= 0:
            break
        taken.append((min(num, num_tokens), context))
        num_tokens -= num
    return taken


class StepBudget(NamedTuple):
    """What one step may take."""

    predictor: StepTimePredictor | None
    """None: there is no limit."""
    seconds: float | None
    """Of ``part``; None: as long as it likes."""
    part: Part = LONE_STEP
    copies: tuple[int, int] = NO_COPIES
    """Bytes that the step waits for, and that are copied beside it, whatever is in it."""

    def keeps(self, work: StepWork) -> bool | None:
        """Whether such a step keeps to it; None while too little is known."""
        if self.seconds is None or self.predictor is None:
            return True
        took_s = self.predictor.predict_s(self._with_copies(work), self.part)
        return None if took_s is None else took_s <= self.seconds

    def largest(self, most: int, work_of: Callable[[int], StepWork]) -> int:
        """The largest size up to ``most`` whose work keeps to it; 0 where none does, or nothing is known."""
        if self.seconds is None or self.predictor is None or most <= 0:
            return max(0, most)
        work = (lambda size: self._with_copies(work_of(size))) if any(self.copies) else work_of
        return self.predictor.largest_batch(self.seconds, most, work, self.part) or 0

    def _with_copies(self, work: StepWork) -> StepWork:
        num_copied_bytes, num_beside_bytes = self.copies
        return work._replace(num_copied_bytes=num_copied_bytes, num_beside_bytes=num_beside_bytes)


NO_LIMIT = StepBudget(None, None)


def step_budget(
    predictor: StepTimePredictor, seconds: float | None, num_stages: int, copies: tuple[int, int] = NO_COPIES
) -> StepBudget:
    """What a microbatch may take if a token's way through the group is to take ``seconds``.

    In a pipeline as many microbatches as stages are under way, and a token comes out once they all have passed.
    """
    if seconds is not None:
        seconds /= num_stages * (1.0 + ERRORS_LEFT * predictor.error)
    return StepBudget(predictor, seconds, _own_part(num_stages), copies)


def _own_part(num_stages: int) -> Part:
    """What passes from one microbatch to the next."""
    return LONE_STEP if num_stages == 1 else period_of(num_stages)


def prompt_tokens_per_s(
    pace: Pace, most_tokens: int, decodes: StepWork = NOTHING, num_stages: int = 1
) -> float | None:
    """Tokens of prompts a second beside the decodes of one microbatch, in steps of at most ``most_tokens`` that keep to
    the TPOT objective where online requests alone do (``Pace.bounds_online``). 0: the decodes leave no time for any.
    None while nothing is known of steps."""
    predictor = pace.predictor
    unbounded = predictor.prefill_tokens_per_s(most_tokens, decodes, num_stages)
    if unbounded is None or not pace.bounds_online or not decodes.num_tokens:
        return unbounded
    budget = step_budget(predictor, pace.offline.slo.tpot_s, num_stages)
    num_tokens = budget.largest(max(1, most_tokens - decodes.num_tokens), decodes.with_prompts)
    return predictor.prefill_tokens_per_s(decodes.num_tokens + num_tokens, decodes, num_stages) if num_tokens else 0.0


def filler_s(objectives: Objectives, longest_wait_s: Callable[[], float | None]) -> float:
    """Seconds that a step with offline tokens may take while there are online requests.

    ``longest_wait_s``: how long the oldest of them has waited that has no first token yet; None without any.
    """
    if objectives.tpot_s is None:
        return 0.0
    waited_s = longest_wait_s()
    if waited_s is None:
        return objectives.tpot_s
    due_s = objectives.tpot_s if objectives.ttft_s is None else min(objectives.ttft_s, objectives.tpot_s)
    return max(0.0, due_s - waited_s)


def saturating_tokens(predictor: StepTimePredictor, most: int, num_stages: int) -> int:
    """Prompt tokens, up to ``most``, of the smallest microbatch with ``SATURATED`` of the rate of the largest one; all
    while nothing is known. What attention adds is left out: it does not saturate."""
    taking = predictor.taking(_own_part(num_stages))

    def took_s(num_tokens: int) -> float:
        return 0.0 if taking is None else taking(StepWork(1, num_tokens, 0, 0))

    least_rate = SATURATED * most / most_s if (most_s := took_s(most)) else 0.0
    low, high = (0 if least_rate else most - 1), most  # high saturates, low does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle >= least_rate * took_s(middle) else (middle, high)
    return high
