"""What a step may take where offline work is to share it with online requests (ConServe sections 4.2 and 4.5).

Pure: objectives and predictions in, seconds and sizes out. What fills a step within them is ``policy.filling``'s.

- A step with an online decode in it may take as long as the objective for the time between two tokens says: TPOT here
  is every gap, not a request's mean.
- A step with online prompts only, or while some wait, what is left until the first of them is due: at most one TPOT,
  for what arrives meanwhile waits for the step.
- Where online requests hold much of the memory, what they take alone: a step that is filled lets them stay longer, so
  they hold more, and those that arrive in a burst would wait for blocks that none but online requests hold.
- Where nothing is online there is no limit but the largest batch.

The paper bounds a batch without decodes by the whole TTFT objective, whatever its requests have waited already, and
offline work in it by nothing else.

While nothing is known of step times offline tokens get no place beside online ones: steps of either class alone teach
the predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import LONE_STEP, Part, StepWork, period_of, step_of
from jettison.policy.offline import TPOT_OVER_LONE_STEP, TTFT_OVER_TPOT, OfflineParams, SloParams
from jettison.types import NANOSECONDS

FILLED_BELOW = 0.35
"""Of a group's blocks, held by online requests: from there on their steps are not filled. Filled ones take several
times as long; without that the same requests held a fraction of it, so a burst finds the rest soon."""

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

    def left_s(self, arrival_ns: int, now_ns: int) -> float | None:
        """How long after now the first token of a request is due; negative where it is late."""
        return None if self.ttft_s is None else self.ttft_s - (now_ns - arrival_ns) / NANOSECONDS


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


def next_batch_s(
    predictor: StepTimePredictor, online: Iterable[Chunk], filler: Iterable[Chunk] = (), *, max_num_tokens: int,
    num_stages: int = 1, num_copied_bytes: int = 0,
) -> float | None:
    """Seconds from the issue to the end of the next step; None while too little is known.

    It holds these chunks in the order of service, decodes before prompts, ``online`` before ``filler``, as far as the
    token budget reaches. ``num_copied_bytes``: what its workers copy before it.
    """
    chunks = within_tokens([*_decodes_first(online), *_decodes_first(filler)], max_num_tokens)
    return predictor.predict_s(StepWork.of(chunks, num_copied_bytes), step_of(num_stages))


def _decodes_first(chunks: Iterable[Chunk]) -> list[Chunk]:
    return sorted(chunks, key=lambda chunk: chunk[0] > 1)  # stable


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
    if num_stages == 1:
        return StepBudget(predictor, seconds, LONE_STEP, copies)
    seconds = None if seconds is None else seconds / num_stages
    return StepBudget(predictor, seconds, period_of(num_stages), copies)


def filler_s(
    objectives: Objectives, *, online_share: float, decodes_online: bool, least_left_s: Callable[[], float | None]
) -> float:
    """Seconds that a step with offline tokens may take while there are online requests.

    ``online_share``: of the group's blocks, that online requests hold; ``decodes_online``: one of them gets a token
    from it that is not its first; ``least_left_s``: until the earliest first token is due of those in the step or
    waiting, None without any.
    """
    if objectives.tpot_s is None or online_share > FILLED_BELOW:
        return 0.0
    left_s = None if decodes_online else least_left_s()
    return objectives.tpot_s if left_s is None else min(max(0.0, left_s), objectives.tpot_s)
