"""What becomes of some instances and their requests in the next seconds, under one arrangement or another (design 5.4).

Pure: a coarse fluid model, for *staying as they are* and for each alternative that a rung offers. It plays requests one
by one, in the order of service, over turns: in one turn each decoding request gets a token, and prompts get what the
token budget leaves. A turn takes what the step time predictor says. Turns of a short while are taken at once.

The result is in one currency, **request-seconds**: each second that a request is in the system counts once, each second
without its first token ``first_token_weight`` times. What an alternative saves is the difference to staying; what no
alternative changes cancels out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from jettison.cost.stepwork import StepWork

FIRST_TOKEN = 2.0
"""Weight of a second in which a client waits for its first token, over one in which it reads, where no objective says
more."""


def first_token_weight(ttft_s: float | None, tpot_s: float | None, answer_tokens: float) -> float:
    """The weight under an operator's objectives; None: there is none. All of the wait that they allow counts as much as
    reading an answer of ``answer_tokens`` as slowly as they allow: slower words within an objective are what the
    operator gives for first tokens within one (KunServe v3, section 5.2)."""
    if ttft_s is None or tpot_s is None:
        return FIRST_TOKEN
    return max(FIRST_TOKEN, answer_tokens * tpot_s / ttft_s)

MOST_PLAYED = 400
"""Requests that are played one by one; of more, each stands for several."""

NUM_PIECES = 250
"""Pieces of the horizon, each of which is played at once. What ends within a piece leaves its memory unused until the
next one, and real instances give it away at their next step: long pieces would make memory look scarcer than it is."""


class Seen(NamedTuple):
    """A request as it is now."""

    num_tokens: int
    """Prompt and output so far."""
    left_prompt: int
    """Tokens that are to be computed before its next token; 1 or less: it decodes."""
    left_output: float
    """Tokens that it is still expected to produce; at least 1."""
    has_first_token: bool = True


class Arrivals(NamedTuple):
    """Requests that are expected to come."""

    lately_per_s: float
    usually_per_s: float
    lately_for_s: float
    """How long they are expected to come as lately; then they come as usual."""
    prompt_tokens: float
    """Mean, less what the prefix cache spares."""
    output_tokens: Sequence[float]
    """Lengths of answers, equally likely, in the order in which they come."""

    def times(self, until_s: float) -> list[float]:
        """When they come, evenly spaced: each once a whole request has come at the rate of its time."""
        found: list[float] = []
        at_s, part = 0.0, 0.0  # part: of the next request
        for rate, end_s in ((self.lately_per_s, min(self.lately_for_s, until_s)), (self.usually_per_s, until_s)):
            while rate > 0.0 and (next_s := at_s + (1.0 - part) / rate) <= end_s:
                found.append(next_s)
                at_s, part = next_s, 0.0
            part += rate * (end_s - at_s)
            at_s = end_s
        return found


class Load(NamedTuple):
    """The requests of the instances that a question is about."""

    running: Sequence[Seen]
    waiting: Sequence[Seen]
    """In the order of service."""
    arrivals: Arrivals
    beyond_tokens: float = 0.0
    """KV that a request holds beyond its own tokens: what its last block has left, on average."""
    first_token_weight: float = FIRST_TOKEN
    """Of a second without the first token, over one with it."""


TurnTime = Callable[[float, float, float], float]
"""Seconds of a turn with so many decoding requests, tokens of KV that they attend to, and prompt tokens."""


class Arrangement(NamedTuple):
    """Some instances, as separate groups or as one pipeline, from some time on."""

    capacity_tokens: float
    """KV of all of them together."""
    turn_s: TurnTime
    prompt_budget: float
    """Most prompt tokens of a turn."""
    max_running: int
    starts_s: float = 0.0


class Plan(NamedTuple):
    """An alternative: an arrangement, and the one that follows."""

    first: Arrangement
    then: Arrangement | None = None
    """Comes as soon as all requests fit into ``fits_share`` of its memory, at its ``starts_s`` at the earliest."""
    fits_share: float = 1.0
    is_capped: bool = False
    """No request is admitted into memory that ``then`` has not got."""
    joined: Sequence[Arrangement] = ()
    """Arrangements that come one after the other, each at its ``starts_s``, whatever requests hold: they take nothing
    away. Not beside ``then``."""


class Forecast(NamedTuple):
    """What an alternative comes to."""

    cost_request_s: float
    """Request-seconds, those without a first token ``first_token_weight`` times."""
    waiting_s: float
    """Request-seconds without a first token."""
    longest_wait_s: float
    """Of one request that waits now or comes."""
    returns_s: float | None = None
    """When the second arrangement comes; None: not within the horizon."""
    by_second: tuple[float, ...] = ()
    """Cost up to the end of each second of the horizon."""
    first_token_weight: float = FIRST_TOKEN

    def cost_until(self, seconds: float) -> float:
        """Cost of the first seconds, at most of the horizon."""
        whole = int(seconds)
        if whole >= len(self.by_second):
            return self.by_second[-1] if self.by_second else 0.0
        before = self.by_second[whole - 1] if whole else 0.0
        return before + (seconds - whole) * (self.by_second[whole] - before)


class _Play:
    """One forecast under way."""

    def __init__(self, load: Load, plan: Plan, horizon_s: float) -> None:
        self.plan, self.now = plan, plan.first
        self.until_s = horizon_s
        self.t = 0.0
        self.tau = 0.0
        """Turns so far: decoding requests have got a token in each."""
        self.ends: list[tuple[float, float, int]] = []
        """Of decoding requests: turn of the last token, tokens then, a number."""
        self.held = 0.0
        """Tokens of KV that requests hold or have reserved."""
        self.prefilling: deque[list[float]] = deque()
        """[left prompt, tokens, left output, has first token] of admitted requests."""
        self.waiting: deque[tuple[float, float, float, bool, float]] = deque()
        """(tokens, prompt to be computed, left output, has first token, since when it waits)."""
        self.num_waiting_first = 0
        self.first_token_weight = load.first_token_weight
        self.cost = self.without_first = self.longest = 0.0
        self.returns_s: float | None = None
        self.by_second: list[float] = []
        self.horizon_s = horizon_s
        self.number = 0
        self.num_joined = 0
        self.beyond = load.beyond_tokens
        for seen in load.running:
            self.held += seen.num_tokens + self.beyond
            if seen.left_prompt > 1:
                self.prefilling.append([seen.left_prompt, seen.num_tokens, seen.left_output, seen.has_first_token, 0.0])
                self.num_waiting_first += not seen.has_first_token
            else:
                self._decode(seen.num_tokens, seen.left_output)
        for seen in load.waiting:
            self.waiting.append((seen.num_tokens, seen.left_prompt, seen.left_output, seen.has_first_token, 0.0))
            self.num_waiting_first += not seen.has_first_token
        arrivals = load.arrivals
        self.arrivals, self.lengths = arrivals.times(horizon_s), arrivals.output_tokens or (1.0,)
        self.prompt = arrivals.prompt_tokens
        self.arrived = 0

    def _decode(self, tokens: float, left: float) -> None:
        self.number += 1
        heapq.heappush(self.ends, (self.tau + left, tokens + left, self.number))

    # --- events -----------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self.arrived < len(self.arrivals) and self.arrivals[self.arrived] <= self.t:
            length = self.lengths[self.arrived % len(self.lengths)]
            at_s = self.arrivals[self.arrived]
            self.waiting.append((self.prompt, self.prompt, length, False, at_s))
            self.arrived += 1
            self.num_waiting_first += 1
            self._count(self.first_token_weight * (self.t - at_s))
            self.without_first += self.t - at_s

    def _change(self) -> None:
        """Those arrangements come that are due, and the second one where it may."""
        while self.num_joined < len(self.plan.joined) and self.plan.joined[self.num_joined].starts_s <= self.t:
            self.now = self.plan.joined[self.num_joined]
            self.num_joined += 1
        then = self.plan.then
        if then is None or self.returns_s is not None or self.t < then.starts_s:
            return
        if self.held <= self.plan.fits_share * then.capacity_tokens and (self.plan.is_capped or not self.waiting):
            self.now, self.returns_s = then, self.t

    def _admit(self) -> None:
        capacity = self.now.capacity_tokens
        if self.plan.is_capped and self.returns_s is None and self.plan.then is not None:
            capacity = min(capacity, self.plan.fits_share * self.plan.then.capacity_tokens)
        while self.waiting:
            tokens, prompt, left, has_first, since_s = self.waiting[0]
            running = len(self.ends) + len(self.prefilling)
            if running >= self.now.max_running or (self.held + tokens + self.beyond > capacity and running):
                return
            self.waiting.popleft()
            self.held += tokens + self.beyond
            self.prefilling.append([max(1.0, prompt), tokens, left, has_first, since_s])

    def _preempt(self) -> None:
        """Memory is full: the request that came last gives its blocks back and waits again."""
        while self.held >= self.now.capacity_tokens and len(self.ends) > 1:
            last = max(self.ends, key=itemgetter(2))
            self.ends.remove(last)
            heapq.heapify(self.ends)
            end, tokens, _ = last
            left = end - self.tau
            self.held -= tokens - left + self.beyond
            self.waiting.appendleft((tokens - left, tokens - left, max(1.0, left), True, self.t))

    # --- time -------------------------------------------------------------------------------------------------

    def _count(self, cost: float) -> None:
        self.cost += cost

    def _pass(self, seconds: float) -> None:
        present = len(self.ends) + len(self.prefilling) + len(self.waiting)
        rate = present + (self.first_token_weight - 1.0) * self.num_waiting_first
        while len(self.by_second) < self.horizon_s and len(self.by_second) + 1 <= self.t + seconds:
            self.by_second.append(self.cost + (len(self.by_second) + 1 - self.t) * rate)
        self.cost += seconds * rate
        self.without_first += seconds * self.num_waiting_first
        self.t += seconds

    def _next_s(self) -> float:
        """When something comes to instances that are idle."""
        return min(self.until_s, self.arrivals[self.arrived]) if self.arrived < len(self.arrivals) else self.until_s

    def _turns(self) -> None:
        """The turns of a short while."""
        now, num_decodes = self.now, len(self.ends)
        budget = max(1.0, now.prompt_budget - num_decodes)
        left = 0.0
        for each in self.prefilling:
            left += each[0]
            if left >= budget:
                break
        chunk = min(left, budget)
        turn_s = now.turn_s(num_decodes, self.held, chunk)
        turns = max(1.0, min(self.horizon_s / NUM_PIECES, self.until_s - self.t) // turn_s)
        if left < budget:  # the prompts are all computed in one turn
            turns = 1.0 if left else turns
        self._pass(turns * turn_s)
        self.tau += turns
        self.held += turns * num_decodes
        self._compute(chunk * turns)
        while self.ends and self.ends[0][0] <= self.tau:
            end, tokens, _ = heapq.heappop(self.ends)
            late = self.tau - end
            self.held -= tokens + late + self.beyond
            self._count(-late * turn_s)

    def _compute(self, tokens: float) -> None:
        """So many tokens of prompts have been computed, in order."""
        while self.prefilling and tokens >= self.prefilling[0][0]:
            left_prompt, held, left, has_first, since_s = self.prefilling.popleft()
            tokens -= left_prompt
            if not has_first:
                self.num_waiting_first -= 1
                self.longest = max(self.longest, self.t - since_s)
            self._decode(held, left)
        if self.prefilling:
            self.prefilling[0][0] -= tokens

    def play(self) -> Forecast:
        """To the horizon; what is left then is served without further arrivals, at most as long again."""
        for until_s in (self.horizon_s, 2.0 * self.horizon_s):
            self.until_s = until_s
            while self.t < until_s:
                self._arrive()
                self._change()
                self._admit()
                if not self.ends and not self.prefilling:
                    if not self.waiting and self.arrived >= len(self.arrivals):
                        break
                    self._pass(max(1e-3, self._next_s() - self.t))
                    continue
                self._preempt()
                self._turns()
        for waiting in self.waiting:
            if not waiting[3]:
                self.longest = max(self.longest, self.t - waiting[4])
        self.by_second += [self.cost] * (int(self.horizon_s) - len(self.by_second))
        # A request that ended within a while was counted to the end of that, and taken off again.
        seconds = tuple(accumulate(self.by_second, max))
        return Forecast(
            self.cost, self.without_first, self.longest, self.returns_s, seconds, self.first_token_weight
        )


def forecast(load: Load, plan: Plan, horizon_s: float) -> Forecast:
    """Play an alternative for ``horizon_s``, and what is left then for as long again, without new arrivals.

    Of many requests each one played stands for several alike, so that a forecast takes milliseconds.
    """
    arrivals = load.arrivals
    most = len(load.running) + len(load.waiting) + arrivals.usually_per_s * horizon_s
    most += (arrivals.lately_per_s - arrivals.usually_per_s) * arrivals.lately_for_s
    grain = math.ceil(most / MOST_PLAYED)
    if grain > 1:
        load, plan = _thinned(load, grain), _shrunk(plan, grain)
    found = _Play(load, plan, horizon_s).play()
    return found._replace(
        cost_request_s=grain * found.cost_request_s, waiting_s=grain * found.waiting_s,
        by_second=tuple(grain * cost for cost in found.by_second),
    )


def _thinned(load: Load, grain: int) -> Load:
    """Every ``grain``-th request."""
    arrivals = load.arrivals._replace(
        lately_per_s=load.arrivals.lately_per_s / grain, usually_per_s=load.arrivals.usually_per_s / grain
    )
    running = load.running
    if 0 < len(running) < grain:  # one stands for all
        num = len(running)
        whole = Seen(
            math.ceil(sum(seen.num_tokens for seen in running) / grain),
            math.ceil(sum(seen.left_prompt for seen in running) / grain),
            sum(seen.left_output for seen in running) / num, all(seen.has_first_token for seen in running),
        )
        return load._replace(running=[whole], waiting=load.waiting[::grain], arrivals=arrivals)
    by_length = sorted(range(len(running)), key=lambda i: (running[i].left_output, running[i].num_tokens))
    chosen = sorted(by_length[grain // 2 :: grain])
    return load._replace(
        running=[running[i] for i in chosen], waiting=load.waiting[::grain], arrivals=arrivals  # no queue vanishes
    )


def _shrunk(plan: Plan, grain: int) -> Plan:
    """A part of the memory and of the places of a plan's arrangements; turns take as long as with all requests."""

    def part(of: Arrangement) -> Arrangement:
        turn_s = of.turn_s
        return of._replace(
            capacity_tokens=of.capacity_tokens / grain, prompt_budget=of.prompt_budget / grain,
            max_running=max(1, of.max_running // grain),
            turn_s=lambda rows, kv, prompt: turn_s(grain * rows, grain * kv, grain * prompt),
        )

    then = None if plan.then is None else part(plan.then)
    return plan._replace(first=part(plan.first), then=then, joined=[part(each) for each in plan.joined])


StepTime = Callable[[StepWork], float]
"""Seconds of a step's work."""


class Timed(NamedTuple):
    """Groups of so many stages, and what their steps take."""

    num_instances: int
    num_stages: int
    step: StepTime
    """Seconds of a microbatch on its way through all stages."""
    period: StepTime
    """Seconds from one microbatch to the next in a busy pipeline; of an instance, its step's."""

    def turn_s(self, work: StepWork) -> float:
        """Seconds in which each of its requests gets a token, with such a microbatch in each stage."""
        return max(self.step(work), self.num_stages * self.period(work)) if self.num_stages > 1 else self.step(work)


def turn_time(parts: Sequence[Timed]) -> TurnTime:
    """The time of a turn of instances that serve as groups of some lengths.

    Each instance has its share of the requests in a step; a pipeline has as many microbatches as stages, and all of
    them have had their turn after as many periods, and never before one way through all stages. Where some groups are
    longer than others, the mean of their rates counts.
    """
    num_instances = sum(part.num_instances for part in parts)

    def seconds(num_decodes: float, num_kv_tokens: float, num_prompt_tokens: float) -> float:
        # Whole steps: a fraction of a request computes as one.
        rows, kv = math.ceil(num_decodes / num_instances), int(num_kv_tokens / num_instances)
        work = StepWork.decodes(rows, kv).with_prompt(math.ceil(num_prompt_tokens / num_instances))
        if len(parts) == 1:
            return parts[0].turn_s(work)
        return num_instances / sum(part.num_instances / part.turn_s(work) for part in parts)

    return seconds
