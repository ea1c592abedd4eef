"""How long a step may take that offline work shares with online requests (ConServe sections 4.2 and 4.5).

Pure: objectives and predictions in, seconds and sizes out. ``policy.filling`` fills steps within them.

- A step with offline tokens in it takes no longer than the knee of tokens a second over step time (``knee_s``), and
  never longer than the TPOT objective, for the sake of decodes and of requests that arrive meanwhile. TPOT here is
  every gap between two tokens, not a request's mean.
- While an online request has no first token, such a step may take what is left of one TPOT since that request arrived.
  So offline work costs the request one TPOT in all, in the step under way at its arrival and in the following ones
  together.
- Where online requests are foreseen to lack memory (``policy.onlineneed``), their steps are not filled: then they end
  sooner, and hold less.
- Where no request is online there is no limit in time. A batch is large enough to saturate the device and no larger, as
  an arrival meanwhile waits for the step or has it given up.

Of the other rules that can be chosen (``OfflineParams.fill``), "objective" fills to the TPOT objective in place of the
knee: requests then stay for several times as long, and as many more of them are resident. "paper" is the paper's own: a
batch with decodes is bounded by TPOT alone, one without by the whole TTFT objective, whatever its requests have waited
already and however much memory they hold. Then the last steps before the first token of an online request that a burst
has kept waiting are filled up, too, and a 99th percentile shows that.

While step times are not known, offline tokens get no place beside online ones: steps of either class alone teach the
predictor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import LONE_STEP, NOTHING, Part, StepWork, period_of
from jettison.policy.offline import TPOT_OVER_LONE_STEP, TTFT_OVER_TPOT, OfflineParams, SloParams

ERRORS_LEFT = 3.0
"""Number of mean errors of the predictor by which a step is planned shorter: objectives are judged by their 99th
percentile, which lies at about three mean errors where errors are normal."""

AHEAD_SHARE = 0.5
"""Share of the TTFT objective that prompts ahead may take where fewer instances serve than could. The rest is for
requests that come meanwhile, for decodes that become more, and for the time that a sleeper needs to wake."""

SATURATED = 0.95
"""Share of the largest batch's prompt tokens a second that a batch of offline requests alone is to reach."""

LONE_DECODE = StepWork.decodes(1, 0)

NO_COPIES = (0, 0)

Chunk = tuple[int, int]
"""(tokens, tokens before them) of one request in a step."""


class Pace(NamedTuple):
    """Parameters and predictor by which a group's steps are bounded."""

    offline: OfflineParams
    predictor: StepTimePredictor

    def objectives(self) -> Objectives:
        """The objectives as known now."""
        return objectives(self.offline.slo, self.predictor)

    @property
    def bounds_online(self) -> bool:
        """Whether steps of online requests alone keep to the TPOT objective, too: only where a flag names it. They do
        also where offline requests are refused; with ``--offline priority`` no step is bounded."""
        return self.offline.slo.tpot_s is not None and (self.offline.slo_aware or not self.offline.serves)


class Objectives(NamedTuple):
    """Latencies that offline work leaves to online requests, in seconds; None: not known yet."""

    ttft_s: float | None
    tpot_s: float | None


UNKNOWN_OBJECTIVES = Objectives(None, None)


def objectives(slo: SloParams, predictor: StepTimePredictor) -> Objectives:
    """The objectives that flags name; others are worked out from the decode step of one request."""
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
    """How long one step may take."""

    predictor: StepTimePredictor | None
    """None: there is no limit."""
    seconds: float | None
    """Seconds that ``part`` may take; None: no bound."""
    part: Part = LONE_STEP
    copies: tuple[int, int] = NO_COPIES
    """(bytes that the step waits for, bytes copied beside it), whatever is in it."""

    def keeps(self, work: StepWork) -> bool | None:
        """Whether a step with this work keeps to the budget; None while too little is known."""
        if self.seconds is None or self.predictor is None:
            return True
        took_s = self.predictor.predict_s(self._with_copies(work), self.part)
        return None if took_s is None else took_s <= self.seconds

    def largest(self, most: int, work_of: Callable[[int], StepWork]) -> int:
        """The largest size up to ``most`` whose work keeps to the budget; 0 where no size does, or step times are not
        known."""
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
    """The budget of a microbatch if a token's way through the group is to take ``seconds``.

    In a pipeline as many microbatches are under way as there are stages, and a request's next token comes once all have
    passed.
    """
    if seconds is not None:
        seconds /= num_stages * (1.0 + ERRORS_LEFT * predictor.error)
    return StepBudget(predictor, seconds, _own_part(num_stages), copies)


def _own_part(num_stages: int) -> Part:
    """The part of step time that passes from one microbatch to the next."""
    return LONE_STEP if num_stages == 1 else period_of(num_stages)


def prompt_step_tokens(pace: Pace, most_tokens: int, decodes: StepWork = NOTHING, num_stages: int = 1) -> int:
    """Tokens of prompts in a step of at most ``most_tokens`` beside these decodes, if prompts are not lacking; at least
    1 where the step keeps to no objective, else 0 where the decodes leave no time."""
    most = max(1, most_tokens - decodes.num_tokens)
    if not pace.bounds_online or not decodes.num_tokens:
        return most
    return step_budget(pace.predictor, pace.offline.slo.tpot_s, num_stages).largest(most, decodes.with_prompts)


def prompt_tokens_per_s(
    pace: Pace, most_tokens: int, decodes: StepWork = NOTHING, num_stages: int = 1
) -> float | None:
    """Tokens of prompts a second beside the decodes of one microbatch, in steps of at most ``most_tokens`` that keep to
    the TPOT objective where online requests alone do (``Pace.bounds_online``). 0: the decodes leave no time for
    prompts. None while step times are not known."""
    predictor = pace.predictor
    unbounded = predictor.prefill_tokens_per_s(most_tokens, decodes, num_stages)
    if unbounded is None or not pace.bounds_online or not decodes.num_tokens:
        return unbounded
    num_tokens = prompt_step_tokens(pace, most_tokens, decodes, num_stages)
    return predictor.prefill_tokens_per_s(decodes.num_tokens + num_tokens, decodes, num_stages) if num_tokens else 0.0


class Own(NamedTuple):
    """Times in seconds from which the knee of a step follows."""

    lone_s: float
    """A decode of one request."""
    online_s: float
    """The step's online part by itself."""


def filler_s(
    objectives: Objectives, longest_wait_s: Callable[[], float | None], own: Own | None = None
) -> float:
    """Seconds that a step with offline tokens may take while there are online requests.

    ``longest_wait_s``: how long the oldest online request without a first token has waited; None where there is none.
    ``own``: where steps are filled to the knee. That of the whole step counts while a request waits for its first
    token, so a step that saturates the device by its prompts is not filled; else that of the offline tokens, so these
    always get something beside decodes.
    """
    if objectives.tpot_s is None:
        return 0.0
    waited_s = longest_wait_s()
    most_s = objectives.tpot_s
    if own is not None:
        most_s = knee_s(own.lone_s if waited_s is not None else max(own), objectives.tpot_s)
    if waited_s is None:
        return most_s
    due_s = objectives.tpot_s if objectives.ttft_s is None else min(objectives.ttft_s, objectives.tpot_s)
    return max(0.0, min(most_s, due_s - waited_s))


def papers_filler_s(objectives: Objectives, *, has_decodes: bool) -> float:
    """The same by the paper's rule: TPOT where there are decodes, else TTFT."""
    seconds = objectives.tpot_s if has_decodes else objectives.ttft_s
    return seconds or 0.0


def knee_s(least_s: float, longest_s: float) -> float:
    """The time of a step from which on more tokens cost more than they bring, of steps up to ``longest_s``.

    A step takes ``least_s`` without them, and a time for each. So tokens a second grow with a step's time t as
    1 - least_s / t. The knee of that curve is where it is farthest above its chord: where its slope is that of the line
    from the shortest step to the longest one. That is the geometric mean of both.
    """
    return min(longest_s, math.sqrt(least_s * longest_s))


def saturating_tokens(predictor: StepTimePredictor, most: int, num_stages: int) -> int:
    """Prompt tokens, up to ``most``, of the smallest microbatch that reaches the share ``SATURATED`` of the largest
    one's rate; ``most`` while step times are not known. Attention's time is left out: it does not saturate."""
    taking = predictor.taking(_own_part(num_stages))

    def took_s(num_tokens: int) -> float:
        return 0.0 if taking is None else taking(StepWork(1, num_tokens, 0, 0))

    least_rate = SATURATED * most / most_s if (most_s := took_s(most)) else 0.0
    low, high = (0 if least_rate else most - 1), most  # high saturates, low does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle >= least_rate * took_s(middle) else (middle, high)
    return high
