"""Offline work by its deadlines, and how much of it instances do: views for ``policy.deadlines``.

The rung ``wake`` asks which workers to wake for it, and which can be spared before they are put to sleep. Nothing is
decided here.

Work is priced in seconds of an instance whose steps are as full as such requests can make them. What instances really
do of it beside online requests is measured, in those that have more of it than they can take on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jettison.core.ladder.rung import Means
from jettison.core.ports import StoredWork
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.virtualtokens import BatchKey, key_of
from jettison.cost.stepwork import StepWork
from jettison.policy.deadlines import Demand, Seen, Supply, expected_tokens, share_of
from jettison.types import NANOSECONDS, GroupId

LOOK_S = 0.5
"""Seconds between two looks."""

MEMORIES_S = (20.0, 600.0)
"""Seconds after which work that was seen weighs 1/e: of the last moments, and of a time in which a chat comes and
goes."""

ASSUMED = 0.9
"""Share of the time that online requests leave which offline work is taken to get, before any has been seen."""


class _Look(NamedTuple):
    """What was seen of one group at one look: offline tokens computed so far, and whether offline requests wait
    there."""

    tokens: tuple[int, int]
    """Prompt and answer tokens of offline requests, computed for the first time."""
    has_more: bool


@dataclass(slots=True)
class _Batch:
    """Sums over the unfinished offline requests of one tenant and one deadline; ``stored_``: over those not accepted
    yet."""

    name: str = ""
    num: int = 0
    num_waiting: int = 0
    """Requests without a token yet."""
    has_queued: bool = False
    """Whether some request waits in a queue."""
    tokens: int = 0
    to_compute: int = 0
    asked: int = 0
    """Answer tokens, at most, as clients have asked for them ..."""
    longest: int = 0
    """... and as the context has room for them."""
    outputs: list[tuple[int, int]] = field(default_factory=list)
    """(tokens so far, most tokens) of each answer that has begun."""
    waiting_longest: int = 0
    longest_one: int = 0
    stored_num: int = 0
    stored_prompt: int = 0
    stored_longest: int = 0

    def add(self, state: RequestState, max_model_len: int) -> None:
        """Add an accepted request, whose answer has at most as many tokens as the context leaves it."""
        self.asked += state.request.params.max_tokens
        longest = max(1, min(state.request.params.max_tokens, max_model_len - state.num_prompt))
        self.num += 1
        self.has_queued |= state.phase is Phase.WAITING
        self.tokens += state.num_tokens
        self.to_compute += max(0, state.num_tokens - state.num_computed)
        self.longest += longest
        self.longest_one = max(self.longest_one, longest)
        if state.num_output:
            self.outputs.append((state.num_output, longest))
        else:
            self.num_waiting += 1
            self.waiting_longest += longest


class Extent(NamedTuple):
    """How much there is of one batch: its requests, a mean one of them as a whole, and what is left of all."""

    num_requests: float
    prompt_tokens: float
    output_tokens: float
    num_tokens: float
    """Of prompts and answers, still to compute."""


class _Left(NamedTuple):
    """What is left of one batch, in tokens."""

    num: float
    """Requests, those that are stored among them."""
    prompt_tokens: float
    output_tokens: float
    held: float
    """Tokens so far, of a mean request."""
    expected: float
    """Tokens of a mean answer."""
    is_to_begin: bool
    """Some request has no token yet."""
    longest_answer: float
    """Most tokens that one answer still gets."""

class _Priced(NamedTuple):
    """A batch's demand in seconds of an instance, with the tokens and seconds of its answers."""

    demand: Demand
    output_tokens: float
    output_s: float


class DueWork:
    """Views of offline work with deadlines, and of the instances that do it. It remembers what instances have done."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self._seen = tuple(Seen() for _ in MEMORIES_S)
        self._looks: dict[GroupId, _Look] = {}
        self._looked_ns: int | None = None
        self._told: tuple[StoredWork, ...] = ()
        self._num_ended_then: dict[BatchKey, int] = {}
        """By batch: answers ended when stored work was told last; what has ended since is no longer to be done."""
        self.keys: list[BatchKey] = []
        """Batches of the demands that were viewed last, in their order ..."""
        self.waits: list[bool] = []
        """... and whether some request of each waits in a queue."""

    @property
    def is_there(self) -> bool:
        """Whether offline work may be due at some time: work is stored, or accepted work has deadlines. Cheap."""
        state = self._state
        if state.stored_offline:
            return True
        return self._means.loads.offline_answers.has_deadlines and bool(state.changes.harvesting or state.unplaced)

    # --- what is done -----------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> None:
        """Follow how much offline work instances do: every half second, on ticks while something is due. Only groups
        that had more work than they could take on, then and now, count."""
        before_ns, before = self._looked_ns, self._looks
        if before_ns is not None and now_ns - before_ns < LOOK_S * NANOSECONDS:
            return
        self._looked_ns = now_ns
        self._looks = {g.group_id: self._look_at(g) for g in self._means.moves.serving_groups()}
        if before_ns is None or now_ns - before_ns > 4 * LOOK_S * NANOSECONDS:
            return  # a look long ago says nothing of what there was to do meanwhile
        took_s = (now_ns - before_ns) / NANOSECONDS
        prompt = output = num = 0
        for group_id, look in self._looks.items():
            last = before.get(group_id)
            if last is not None and last.has_more and look.has_more:
                prompt += look.tokens[0] - last.tokens[0]
                output += look.tokens[1] - last.tokens[1]
                num += len(self._state.groups[group_id].stages)
        if num:
            self._seen = tuple(
                Seen(p + prompt, o + output, s + num * took_s)
                for (p, o, s) in (
                    seen.faded(math.exp(-took_s / memory_s))
                    for seen, memory_s in zip(self._seen, MEMORIES_S, strict=True)
                )
            )

    def _look_at(self, group: Group) -> _Look:
        """What is to be seen of a group now: its offline tokens of prompts and answers, and whether offline requests
        wait."""
        self._state.catch_up(group.group_id)
        fresh, queues = group.counters.fresh, group.queues
        return _Look((fresh.offline_prompt, fresh.offline_output), bool(queues.waiting_offline))

    # --- what is to be done -----------------------------------------------------------------------------------

    def views(self, coming_s: Sequence[float], now_ns: int) -> tuple[list[Demand], Supply] | None:
        """All offline work, by tenant and deadline, and the instances that do it now or in ``coming_s`` seconds. No
        work where no deadline is ahead; None where one is and nothing is known of steps."""
        batches = self._batches()
        self.keys, self.waits = list(batches), [batch.has_queued for batch in batches.values()]
        if not any(due_ns is not None and due_ns > now_ns for _, due_ns in batches):
            return [], Supply(0)
        priced = [self._price(key, batch, now_ns) for key, batch in batches.items()]
        known = [each for each in priced if each is not None]
        if len(known) < len(priced):
            return None
        prefill = self._state.predictor.prefill_tokens_per_s(self._state.limits.max_num_batched_tokens)
        tokens, seconds = sum(p.output_tokens for p in known), sum(p.output_s for p in known)
        if not prefill or not tokens:
            return None
        num_now = sum(len(g.stages) for g in self._means.moves.serving_groups())
        prices = 1.0 / prefill, seconds / tokens
        all_online = self._online_s(*prices)
        online = min(1.0, all_online / max(1, num_now))
        share = share_of(self._seen, *prices, ASSUMED * (1.0 - online))
        # A sleeper that wakes takes its part of what is online off the instances that serve; how evenly is not known.
        coming_share = (share + min(1.0, share + online)) / 2.0
        return [each.demand for each in known], Supply(num_now, share, tuple(coming_s), coming_share, all_online)

    def _online_s(self, prompt_token_s: float, output_token_s: float) -> float:
        """Seconds of an instance that the online requests of one second take, at these prices of tokens; 0 while no
        traffic is known."""
        traffic = self._means.loads.traffic.traffic()
        if traffic is None:
            return 0.0
        each_s = traffic.prompt_tokens * prompt_token_s + traffic.output_tokens * output_token_s
        return traffic.requests_per_s * each_s

    def _batches(self) -> dict[BatchKey, _Batch]:
        """Sums of unfinished offline requests by tenant and deadline: of those accepted, and of stored ones that have
        yet to be."""
        found: dict[BatchKey, _Batch] = {}
        self._state.catch_up_all()
        for state in self._state.requests.values():
            if state.is_offline and not state.is_finished:
                key = key_of(state)
                if (batch := found.get(key)) is None:
                    batch = found[key] = _Batch()
                batch.add(state, self._state.limits.max_model_len)
        if self._told is not self._state.stored_offline:
            self._told, answers = self._state.stored_offline, self._means.loads.offline_answers
            keys = {(work.tenant, work.deadline_ns) for work in self._told}
            self._num_ended_then = {key: answers.of_batch(key)[0] for key in keys}
        for work in self._state.stored_offline:
            batch = found.setdefault((work.tenant, work.deadline_ns), _Batch())
            batch.name = batch.name or work.name
            batch.stored_num += work.num_requests
            batch.stored_prompt += work.num_prompt_tokens
            batch.stored_longest += work.max_output_tokens
        return found

    def extents(self) -> list[Extent]:
        """How much there is of each batch, whether it has a deadline or not; those without requests left out."""
        found: list[Extent] = []
        for key, batch in self._batches().items():
            left = self._left_of(key, batch)
            if left.num:
                prompt = left.held - sum(tokens for tokens, _ in batch.outputs) / left.num
                num_tokens = left.prompt_tokens + left.output_tokens
                found.append(Extent(left.num, prompt, left.expected, num_tokens))
        return found

    def _left_of(self, key: BatchKey, batch: _Batch) -> _Left:
        """What is left of a batch, as far as answers of its kind say."""
        # What is stored is told by lines; a line may have several answers: so they are counted by what they may have.
        longest = batch.longest / batch.num if batch.num else batch.stored_longest / max(1, batch.stored_num)
        answers = self._means.loads.offline_answers
        asked_each = batch.asked / batch.num if batch.num else longest
        num_since = answers.of_batch(key)[0] - self._num_ended_then.get(key, 0)
        taken = batch.asked + num_since * asked_each
        left = max(0.0, 1.0 - taken / batch.stored_longest) if batch.stored_longest else 0.0
        num_left = left * batch.stored_longest / asked_each if asked_each else 0.0
        begun = [float(tokens) for tokens, _ in batch.outputs]
        expected = expected_tokens(*answers.of_batch(key), begun, answers.usual_tokens(longest), max(1.0, longest))
        waiting = min(batch.num_waiting * expected, float(max(batch.waiting_longest, batch.num_waiting)))
        running = [max(1.0, min(most, expected) - tokens) for tokens, most in batch.outputs]
        num = batch.num + num_left
        held = (batch.tokens + left * batch.stored_prompt) / num if num else 0.0
        is_to_begin = num_left > 0.0 or batch.num_waiting > 0
        last = max(expected, answers.usual_tokens(max(longest, batch.longest_one))) if is_to_begin else 0.0
        left_of_begun = (max(expected, answers.usual_tokens(most)) - tokens for tokens, most in batch.outputs)
        return _Left(
            num, batch.to_compute + left * batch.stored_prompt, waiting + sum(running) + num_left * expected, held,
            expected, is_to_begin, max(last, *left_of_begun, 1.0),
        )

    def _price(self, key: BatchKey, batch: _Batch, now_ns: int) -> _Priced | None:
        """The demand of a batch in seconds of an instance; None while nothing is known of steps."""
        left = self._left_of(key, batch)
        size, context = self.batch_size(left.held + left.expected), left.held + left.longest_answer / 2.0
        predict_s, limits = self._state.predictor.predict_s, self._state.limits
        full_s = predict_s(StepWork.decodes(size, round(size * context)))
        lone_s = predict_s(StepWork.decodes(1, round(context)))
        prefill = self._state.predictor.prefill_tokens_per_s(limits.max_num_batched_tokens)
        if full_s is None or lone_s is None or not prefill:
            return None
        output_s = left.output_tokens * full_s / size
        prompt_s = left.held / prefill if left.is_to_begin else 0.0
        _, due_ns = key
        prompts_s = left.prompt_tokens / prefill
        demand = Demand(
            None if due_ns is None else (due_ns - now_ns) / NANOSECONDS, prompts_s + output_s, prompts_s,
            prompt_s + left.longest_answer * lone_s, prompt_s + left.longest_answer * full_s, left.num / size, key[0],
            batch.name,
        )
        return _Priced(demand, left.output_tokens, output_s)

    def batch_size(self, num_tokens: float) -> int:
        """How many requests of so many tokens one instance runs at once; at least 1."""
        limits, profile = self._state.limits, self._state.params.profile
        _, least_blocks = self._state.alive_workers()
        fitting = int(least_blocks * limits.block_size / max(1.0, num_tokens))
        most = (profile and profile.batch_limit(1)) or limits.max_num_seqs
        return max(1, min(limits.max_num_seqs, most, fitting))
