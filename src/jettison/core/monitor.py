"""Rates and dwell times that the overload and restore policies need; fed by the cluster core, time as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.group import GroupCore
from jettison.cost.steptime import StepTimeModel
from jettison.policy.batching import BlockedBy
from jettison.policy.computeload import Traffic
from jettison.policy.overload import GroupLoad
from jettison.types import NANOSECONDS

WINDOW_NS = 2 * NANOSECONDS
"""Rates are means over about this long: several ending requests, and short against a burst."""


MAX_DOUBLINGS = 7
"""Of the dwell time of a group whose moves fail."""

NUM_FILLS = 8
"""Steps over which the prompts' share of the token budget is averaged: a burst's beginning has to show."""

LEAST_FILL = 1e-3
"""Less of the token budget is nothing."""

NUM_STAYS = 50
"""How many ended requests the mean stay remembers: it has to follow the load's own step times."""

NUM_PROMPTS = 300
"""How many prompts the share of cached tokens remembers: sessions come and go."""

EPISODE_NS = NANOSECONDS // 2
"""Verdicts of overload that are further apart belong to different bursts."""

NEWS_INTERVAL_NS = 5 * NANOSECONDS
"""Between two entries of the event log that say that nothing was done."""

TRAFFIC_WINDOW_NS = 10 * NANOSECONDS
"""What arrives is averaged over longer than a burst: a merged group has to catch up afterwards, not during it."""


@dataclass(slots=True)
class RateMeter:
    """Change of a total per second over the last window."""

    samples: list[tuple[int, float]] = field(default_factory=list)
    window_ns: int = WINDOW_NS

    def add(self, now_ns: int, total: float) -> None:
        """Note the total at a time; times must not decrease."""
        self.samples.append((now_ns, total))
        while len(self.samples) > 2 and self.samples[1][0] <= now_ns - self.window_ns:
            self.samples.pop(0)

    def per_s(self) -> float | None:
        """Rate over the window; None until a quarter of it has been seen."""
        if len(self.samples) < 2:
            return None
        (t0, v0), (t1, v1) = self.samples[0], self.samples[-1]
        if t1 - t0 < self.window_ns // 4:
            return None
        return (v1 - v0) * NANOSECONDS / (t1 - t0)


@dataclass(slots=True)
class TrafficMonitor:
    """What arrives at the whole cluster, and how long its answers are."""

    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_ended: int = 0
    mean_output_tokens: float = 0.0
    """Of the last few hundred answers."""
    num_stays: int = 0
    mean_stay_s: float | None = None
    """How long a block stays with a request, over the last ended ones; None until one has ended."""
    num_prompts: int = 0
    _mean_prompt_tokens: float = 0.0
    _mean_cached_tokens: float = 0.0
    _mean_blocks: float = 0.0
    _mean_block_s: float = 0.0
    _arrived: RateMeter = field(default_factory=lambda: RateMeter(window_ns=TRAFFIC_WINDOW_NS))
    _prompt: RateMeter = field(default_factory=lambda: RateMeter(window_ns=TRAFFIC_WINDOW_NS))

    def note_arrival(self, num_prompt_tokens: int) -> None:
        """A request was accepted."""
        self.num_arrived += 1
        self.num_prompt_tokens += num_prompt_tokens

    def note_end(self, num_output_tokens: int) -> None:
        """A request has produced all that it will."""
        self.num_ended += 1
        self.mean_output_tokens += (num_output_tokens - self.mean_output_tokens) / min(self.num_ended, 200)

    def note_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt has been computed; so many of its tokens were in the prefix cache."""
        self.num_prompts += 1
        weight = 1.0 / min(self.num_prompts, NUM_PROMPTS)
        self._mean_prompt_tokens += (num_tokens - self._mean_prompt_tokens) * weight
        self._mean_cached_tokens += (num_cached_tokens - self._mean_cached_tokens) * weight

    @property
    def prefix_hit_share(self) -> float:
        """Share of prompt tokens that the prefix cache has spared, over the last few hundred prompts."""
        return self._mean_cached_tokens / self._mean_prompt_tokens if self.num_prompts else 0.0

    def note_stay(self, num_blocks: int, stay_s: float) -> None:
        """A request has given its blocks back, so long after it was first scheduled."""
        self.num_stays += 1
        weight = 1.0 / min(self.num_stays, NUM_STAYS)
        self._mean_blocks += (num_blocks - self._mean_blocks) * weight
        self._mean_block_s += (num_blocks * stay_s - self._mean_block_s) * weight
        self.mean_stay_s = self._mean_block_s / self._mean_blocks

    def look(self, now_ns: int) -> None:
        """Take a sample (every tick)."""
        self._arrived.add(now_ns, self.num_arrived)
        self._prompt.add(now_ns, self.num_prompt_tokens)

    def traffic(self) -> Traffic | None:
        """The last seconds; None while too little has been seen."""
        per_s, prompt_per_s = self._arrived.per_s(), self._prompt.per_s()
        if not per_s or prompt_per_s is None or not self.num_ended:
            return None
        return Traffic(per_s, prompt_per_s / per_s * (1.0 - self.prefix_hit_share), self.mean_output_tokens)


@dataclass(slots=True)
class GroupMonitor:
    """What is remembered of one group between two looks at it."""

    freed: RateMeter = field(default_factory=RateMeter)
    """Blocks of ended requests less those that running ones took beyond their admission."""
    released: RateMeter = field(default_factory=RateMeter)
    demanded: RateMeter = field(default_factory=RateMeter)
    arrived: RateMeter = field(default_factory=RateMeter)
    num_arrived_blocks: int = 0
    """Of the prompts that were dispatched to this group."""
    foreseen_since_ns: int | None = None
    drowning_since_ns: int | None = None
    overloaded_since_ns: int | None = None
    overloaded_seen_ns: int | None = None
    used: RateMeter = field(default_factory=RateMeter)
    blocked_since_ns: int | None = None
    settled_since_ns: int | None = None
    """End of its last move (also while the next one is under way); None = no move yet."""
    step_ended_ns: int | None = None
    """When a step of it last ended."""
    prefill_fill: float = 0.0
    """Share of the token budget that prompts took in the last steps."""
    num_failures: int = 0
    """Moves in a row that failed: each doubles the time to the next attempt."""
    _last_news_ns: int | None = None

    def note_drowning(self, drowns: bool, now_ns: int) -> float:
        """Follow for how long compute has bound a pipeline; in seconds."""
        if not drowns:
            self.drowning_since_ns = None
        elif self.drowning_since_ns is None:
            self.drowning_since_ns = now_ns
        return 0.0 if self.drowning_since_ns is None else (now_ns - self.drowning_since_ns) / NANOSECONDS

    def note_fill(self, share: float) -> None:
        """A step has ended in which prompts took this share of the token budget."""
        fill = self.prefill_fill + (share - self.prefill_fill) / NUM_FILLS
        self.prefill_fill = fill if fill >= LEAST_FILL else 0.0

    def note_decodes(self, num_steps: int) -> None:
        """So many steps have ended in which nobody had a prompt to compute."""
        for _ in range(num_steps):
            if self.prefill_fill == 0.0:
                break
            self.note_fill(0.0)

    def patience(self, dwell_s: float) -> float:
        """Time to the next move, given what the last ones came to."""
        return dwell_s * 2.0 ** min(self.num_failures, MAX_DOUBLINGS)

    def is_news(self, now_ns: int) -> bool:
        """Whether a decision not to act should be told again: not more often than every few seconds."""
        news = self._last_news_ns is None or now_ns - self._last_news_ns >= NEWS_INTERVAL_NS
        if news:
            self._last_news_ns = now_ns
        return news

    def look(self, group: GroupCore, now_ns: int) -> None:
        """Take a sample (every tick)."""
        self.freed.add(now_ns, group.counters.num_freed_blocks - group.counters.num_grown_blocks)
        self.used.add(now_ns, group.used_blocks)
        self.released.add(now_ns, group.counters.num_freed_blocks)
        self.arrived.add(now_ns, self.num_arrived_blocks)
        self.demanded.add(now_ns, self.num_arrived_blocks + group.counters.num_grown_blocks)

    def note_verdict(self, overloaded: bool, declines: bool, now_ns: int) -> float:
        """Follow for how long the group has been overloaded without a verdict against a drop; in seconds.

        That nothing waits for memory just now is no such verdict: each request that ends lets the next one in.
        """
        if declines or (self.overloaded_seen_ns is not None and now_ns - self.overloaded_seen_ns > EPISODE_NS):
            self.overloaded_since_ns = None
        if overloaded:
            self.overloaded_seen_ns = now_ns
            if self.overloaded_since_ns is None:
                self.overloaded_since_ns = now_ns
        return 0.0 if self.overloaded_since_ns is None else (now_ns - self.overloaded_since_ns) / NANOSECONDS

    def note_foreseen(self, missing_blocks: float, now_ns: int) -> float:
        """Follow for how long memory has been foreseen to run out; in seconds."""
        if missing_blocks <= 0.0:
            self.foreseen_since_ns = None
        elif self.foreseen_since_ns is None:
            self.foreseen_since_ns = now_ns
        return 0.0 if self.foreseen_since_ns is None else (now_ns - self.foreseen_since_ns) / NANOSECONDS

    def note_blocked(self, group: GroupCore, now_ns: int) -> None:
        """Follow whether the head of the queue is blocked by memory without a break."""
        if group.waiting and group.head_blocked_by is BlockedBy.MEMORY:
            if self.blocked_since_ns is None:
                self.blocked_since_ns = now_ns
        else:
            self.blocked_since_ns = None

    def _freed_per_s(self, group: GroupCore, mean_stay_s: float | None, now_ns: int) -> float | None:
        """Blocks that come free in the near future, net of growth: as measured, or as the present load will give back.

        The measured rate is a mean over seconds. At the start of a burst it still knows the calm before it, and would
        call a wait of a few steps a long one; what is held now comes free within about one mean stay (Little's law).
        """
        measured = self.freed.per_s()
        if not mean_stay_s:
            return measured
        # A burst of longer answers than those that have ended shows in the age of what runs.
        ages_s = [
            (now_ns - s.first_scheduled_ns) / NANOSECONDS
            for s in group.running.values() if s.first_scheduled_ns is not None
        ]
        mean_stay_s = max(mean_stay_s, sum(ages_s) / len(ages_s)) if ages_s else mean_stay_s
        demanded, arrived = self.demanded.per_s(), self.arrived.per_s()
        grown = 0.0 if demanded is None or arrived is None else demanded - arrived
        expected = group.used_blocks / mean_stay_s - grown
        return expected if measured is None else max(measured, expected)

    def load(
        self, group: GroupCore, steptime: StepTimeModel, now_ns: int, mean_stay_s: float | None = None
    ) -> GroupLoad:
        """The group as the overload policy sees it."""
        head_blocks = group.blocks_for(len(group.waiting[0].tokens)) if group.waiting else 0
        unfinished = sum(
            ready for s in group.running.values() if (ready := len(s.tokens) - s.num_computed) > 1
        )
        queued = group.queued_tokens() + unfinished
        kv_tokens = group.used_blocks * group.limits.block_size
        since = self.blocked_since_ns
        return GroupLoad(
            group.group_id,
            group.capacity_blocks,
            group.used_blocks,
            head_blocks + group.watermark_blocks() if group.waiting else 0,
            group.queued_blocks(),
            len(group.waiting),
            since is not None,
            0.0 if since is None else (now_ns - since) / NANOSECONDS,
            self._freed_per_s(group, mean_stay_s, now_ns),
            queued,
            steptime.prefill_tokens_per_s(group.limits.max_num_batched_tokens, len(group.running), kv_tokens),
            self.demanded.per_s(),
            self.released.per_s(),
            None if (arrived := self.arrived.per_s()) is None else arrived * group.limits.block_size,
            prefill_fill=self.prefill_fill,
        )
