"""Rates and dwell times for the overload and restore policies; fed by the cluster core, time as an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jettison.core.load.samples import TickTimes, Totals, per_s
from jettison.core.serving.group import Group
from jettison.policy.batching import BlockedBy
from jettison.policy.overload import memory_wait_s
from jettison.policy.steadystate import Traffic
from jettison.types import NANOSECONDS

WINDOW_S = 2
WINDOW_NS = WINDOW_S * NANOSECONDS
"""Rates are means over about this long: several ending requests, and short against a burst."""

WINDOW_SPAN = 1.25
"""The window may begin a tick earlier than that, and end a tick ago: as far back as this many times its length."""

MAX_DOUBLINGS = 7
"""Most doublings of the dwell time of a group whose moves fail."""

NUM_STAYS = 50
"""How many ended requests the mean stay remembers: it has to follow the load's own step times."""

NUM_ANSWERS = 64
"""How many answers' lengths are remembered one by one, for forecasts."""

NUM_PROMPTS = 300
"""How many prompts the share of cached tokens remembers: sessions come and go."""

REFUSED_NS = NANOSECONDS // 2
"""How long it counts that a drop was declined: a few looks."""

NEWS_INTERVAL_NS = 5 * NANOSECONDS
"""Least time between two entries of the event log that say that nothing was done."""

SURGE_WINDOW_NS = NANOSECONDS
"""The window in which a burst has to show: it holds a few requests, or chance would be taken for a burst."""

TRAFFIC_WINDOW_NS = 10 * NANOSECONDS
"""Arrivals are averaged over longer than a burst: a merged group has to catch up afterwards, not during it."""

USUAL_WINDOW_NS = 40 * NANOSECONDS
"""What is usual shows over several times as long as a burst: within one it would be half of what is seen."""


@dataclass(slots=True)
class TrafficMonitor:
    """Arrivals of one class at the whole cluster, how long its answers are, and how long its requests stay."""

    ticks: TickTimes = field(default_factory=TickTimes)
    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_ended: int = 0
    mean_output_tokens: float = 0.0
    """Mean of about the last 200 answers."""
    answers: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_ANSWERS))
    """Output tokens of the last ended requests."""
    num_stays: int = 0
    mean_stay_s: float | None = None
    """How long a block stays with a request, over the last ended ones: block-seconds over blocks given back (a block
    taken late has not stayed long). None until a request has ended."""
    num_prompts: int = 0
    _mean_prompt_tokens: float = 0.0
    _mean_cached_tokens: float = 0.0
    _mean_blocks: float = 0.0
    _mean_block_s: float = 0.0
    _totals: Totals = field(init=False)
    """Requests and prompt tokens that have arrived."""

    def __post_init__(self) -> None:
        self._totals = Totals(self.ticks, self.num_arrived, self.num_prompt_tokens)

    def note_arrival(self, num_prompt_tokens: int) -> None:
        """Count a request that was accepted, and its prompt's tokens."""
        self.num_arrived += 1
        self.num_prompt_tokens += num_prompt_tokens
        self._totals.note(self.num_arrived, self.num_prompt_tokens)

    def note_end(self, num_output_tokens: int) -> None:
        """Count a request that has ended, and take its output tokens into the mean over about the last 200 answers."""
        self.num_ended += 1
        self.answers.append(num_output_tokens)
        self.mean_output_tokens += (num_output_tokens - self.mean_output_tokens) / min(self.num_ended, 200)

    def note_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Take a computed prompt into the recent means: its tokens, and how many of these were in the prefix cache."""
        self.num_prompts += 1
        weight = 1.0 / min(self.num_prompts, NUM_PROMPTS)
        self._mean_prompt_tokens += (num_tokens - self._mean_prompt_tokens) * weight
        self._mean_cached_tokens += (num_cached_tokens - self._mean_cached_tokens) * weight

    @property
    def prefix_hit_share(self) -> float:
        """Share of prompt tokens that the prefix cache has spared, over the last few hundred prompts; 0.0 before the
        first."""
        return self._mean_cached_tokens / self._mean_prompt_tokens if self.num_prompts else 0.0

    def note_stay(self, num_first_blocks: int, num_blocks: int, stay_s: float) -> None:
        """Take a request that has given ``num_blocks`` back, ``stay_s`` after it was first scheduled with
        ``num_first_blocks``, into the mean stay of a block over about the last ``NUM_STAYS``."""
        self.num_stays += 1
        weight = 1.0 / min(self.num_stays, NUM_STAYS)
        self._mean_blocks += (num_blocks - self._mean_blocks) * weight
        self._mean_block_s += ((num_first_blocks + num_blocks) / 2 * stay_s - self._mean_block_s) * weight
        self.mean_stay_s = self._mean_block_s / self._mean_blocks

    def traffic(self) -> Traffic | None:
        """Requests a second over ``TRAFFIC_WINDOW_NS``, with their mean prompt tokens (less the share that the prefix
        cache spares) and the mean output tokens of recent answers. None while too few ticks have been seen, no request
        has arrived in that time, or none has ever ended."""
        changes = self._totals.changes(TRAFFIC_WINDOW_NS)
        if changes is None or not self.num_ended:
            return None
        (num_arrived, num_prompt_tokens), duration_ns = changes
        if not num_arrived:
            return None
        arrived_per_s, prompt_per_s = per_s(num_arrived, duration_ns), per_s(num_prompt_tokens, duration_ns)
        prompt_tokens = prompt_per_s / arrived_per_s * (1.0 - self.prefix_hit_share)
        return Traffic(arrived_per_s, prompt_tokens, self.mean_output_tokens)

    def rates(self) -> tuple[float, float, float, float]:
        """Requests a second lately, as the mean of the last seconds that are like the last one; usually, as the mean of
        the middle half of ``USUAL_WINDOW_NS``, so that a burst in it does not count; for how many seconds they have
        come as lately; and mean prompt tokens, less the share that the prefix cache spares. Zeros where none has
        come."""
        whole = self._totals.changes(TRAFFIC_WINDOW_NS)
        if whole is None or not whole[0][0]:
            return 0.0, 0.0, 0.0, 0.0
        seconds: list[float] = []
        before, before_ns = 0, 0
        for window_ns in range(SURGE_WINDOW_NS, USUAL_WINDOW_NS + 1, SURGE_WINDOW_NS):
            changes = self._totals.changes(window_ns)
            if changes is None or changes[1] <= before_ns:
                break
            (num_arrived, _), duration_ns = changes
            seconds.append(per_s(num_arrived - before, duration_ns - before_ns))
            before, before_ns = num_arrived, duration_ns
        middle = sorted(seconds)[len(seconds) // 4 : len(seconds) - len(seconds) // 4]
        prompt = whole[0][1] / whole[0][0] * (1.0 - self.prefix_hit_share)
        last, usually = seconds[0], sum(middle) / len(middle)
        # Seconds are like the last one as far as they differ less from it than it differs from what is usual.
        most = abs(last - usually)
        unlike = (i for i, rate in enumerate(seconds) if abs(rate - last) > min(most, abs(rate - usually)))
        lasted = max(1, next(unlike, len(seconds)))
        return sum(seconds[:lasted]) / lasted, usually, float(lasted), prompt


class BlockRates(NamedTuple):
    """Blocks a second, as means over the last window."""

    freed: float
    """Given back by ended requests, less the blocks that running ones took beyond their admission."""
    released: float
    """Given back by ended requests."""
    arrived: float
    """Need of the online prompts that were dispatched to the group."""
    demanded: float
    """``arrived``, and the blocks that running requests took beyond their admission."""
    used: float
    """Change of the blocks that are held."""
    let_in: float
    """Need of the online requests that were admitted, less that of requests that were preempted and wait again."""


class Stays(NamedTuple):
    """How long, in seconds, a block stays with requests of each class of late; None until one has ended."""

    online_s: float | None = None
    offline_s: float | None = None


UNKNOWN_STAYS = Stays()


def _stay_of_used(group: Group, stays: Stays, now_ns: int) -> float | None:
    """Mean stay, in seconds, of a block that the group holds: of its online requests or, where offline ones run, over
    the blocks of both classes. A class's stay is that of ended requests (an unknown offline one is taken as the online
    one) or the mean age of its running ones, whichever is longer. None while no online stay is known."""
    if not stays.online_s:
        return None
    # A burst of answers longer than the ended ones shows in the age of running requests.
    online_s = max(stays.online_s, group.queues.mean_age_s(now_ns) or 0.0)
    offline_age_s = group.queues.mean_age_s(now_ns, is_offline=True)
    if offline_age_s is None:
        return online_s
    offline_s, used = max(stays.offline_s or stays.online_s, offline_age_s), group.blocks.num_used
    offline = group.blocks.num_used_by(s.request_id for s in group.queues.running_offline())
    offline = min(offline, used)  # a shared prefix block is counted with each request that has it
    return used / ((used - offline) / online_s + offline / offline_s)


@dataclass(slots=True)
class GroupMonitor:
    """What is remembered of one group: its rates, and since when what has been the case."""

    ticks: TickTimes = field(default_factory=TickTimes)
    num_arrived_blocks: int = 0
    """Need of the online prompts that were dispatched to this group."""
    blocked_since_ns: int | None = None
    settled_since_ns: int | None = None
    """End of its last move (also while the next one is under way); None = no move yet."""
    step_ended_ns: int | None = None
    """When a step of it last ended."""
    num_failures: int = 0
    """Moves in a row that failed: each doubles the time to the next attempt."""
    _unrelieved_tick: int | None = None
    """Number of the tick that comes after the last plan that could not relieve the group."""
    _last_news_ns: int | None = None
    _refused: tuple[int, str] | None = None
    """When and why a drop was declined last."""
    _totals: Totals | None = None
    """Blocks freed, grown, arrived, held and let in, since they were first noted."""

    def patience(self, dwell_s: float) -> float:
        """Seconds that the group waits between two moves: ``dwell_s``, doubled for each move in a row that failed, at
        most ``MAX_DOUBLINGS`` times."""
        return dwell_s * 2.0 ** min(self.num_failures, MAX_DOUBLINGS)

    def is_news(self, now_ns: int) -> bool:
        """Whether a decision not to act should be recorded again: at most once in ``NEWS_INTERVAL_NS``. The answer True
        counts as a record made now."""
        news = self._last_news_ns is None or now_ns - self._last_news_ns >= NEWS_INTERVAL_NS
        if news:
            self._last_news_ns = now_ns
        return news

    def note_totals(self, group: Group) -> None:
        """Note the group's present totals of blocks, for its rates; called after every event that touched it, so that
        the next tick sees them."""
        counters = group.counters
        totals = (
            counters.num_freed_blocks, counters.num_grown_blocks, self.num_arrived_blocks, group.blocks.num_used,
            counters.num_queue_blocks,
        )  # fmt: skip
        if self._totals is None:
            self._totals = Totals(self.ticks, *totals)
        else:
            self._totals.note(*totals)

    def note_growth(self, group: Group, times_ns: Sequence[int]) -> None:
        """Note the totals again after steps that were reported together. The group's last blocks were taken one by one
        at these times (ns), and each tick since then sees those taken before it. Nothing before the first
        ``note_totals``."""
        counters, late = group.counters, len(times_ns)
        if self._totals is None:
            return
        for index, time_ns in enumerate(times_ns, 1):
            missing = late - index
            self._totals.note_since(
                self.ticks.number_at(time_ns), counters.num_freed_blocks, counters.num_grown_blocks - missing,
                self.num_arrived_blocks, group.blocks.num_used - missing, counters.num_queue_blocks,
            )

    def rates(self) -> BlockRates | None:
        """Rates over the last ``WINDOW_NS``, as the last tick saw them; None while too little has been seen."""
        changes = None if self._totals is None else self._totals.changes(WINDOW_NS)
        if changes is None:
            return None
        (freed, grown, arrived, used, let_in), duration_ns = changes
        blocks = (freed - grown, freed, arrived, arrived + grown, used, let_in)
        return BlockRates(*(per_s(change, duration_ns) for change in blocks))

    def let_in_per_s(self, window_ns: int) -> float:
        """Blocks a second of online requests that were admitted, less those of preempted ones, a mean over the last
        ``window_ns``; 0.0 while too little has been seen."""
        changes = None if self._totals is None else self._totals.changes(window_ns)
        return 0.0 if changes is None else per_s(changes[0][-1], changes[1])

    def note_refused(self, why: str, now_ns: int) -> None:
        """Note that a drop for this group was declined."""
        self._refused = now_ns, why

    def refusal(self, now_ns: int) -> str | None:
        """Why a drop for this group was declined of late; None: none was."""
        if self._refused is None or now_ns - self._refused[0] > REFUSED_NS:
            return None
        return self._refused[1]

    def note_unrelieved(self) -> None:
        """Note that no plan relieves the group: until the next tick another plan would come to the same
        (``awaits_tick``)."""
        self._unrelieved_tick = self.ticks.num_ticks

    @property
    def awaits_tick(self) -> bool:
        """Whether a plan since the last tick has found nothing that relieves the group."""
        return self._unrelieved_tick == self.ticks.num_ticks

    def note_blocked(self, group: Group, now_ns: int) -> None:
        """Follow since when memory has kept the head of the online queue out without a break."""
        if group.queues.waiting and group.head_blocked_by is BlockedBy.MEMORY:
            if self.blocked_since_ns is None:
                self.blocked_since_ns = now_ns
        else:
            self.blocked_since_ns = None

    def _freed_per_s(
        self, group: Group, rates: BlockRates | None, stays: Stays, now_ns: int
    ) -> float | None:
        """Blocks a second that come free in the near future: as measured, net of growth, or as the present load will
        give back, whichever is more. Where blocks stay longer than the traffic's window, as ended requests gave back in
        that window, within bounds. None while neither is known.

        The measured rate is a mean over seconds. At the start of a burst it still reflects the calm before, and would
        make a wait of a few steps look long. Blocks held now come free within about one mean stay (Little's law).
        Growth is not taken off there: growth without room preempts the newest request, and does not keep the queue
        waiting.
        """
        mean_stay_s = _stay_of_used(group, stays, now_ns)
        if not mean_stay_s:
            return None if rates is None else rates.freed
        expected = group.blocks.num_used / mean_stay_s
        if mean_stay_s > TRAFFIC_WINDOW_NS / NANOSECONDS:
            # Requests that came since the window began have most of their stay ahead. Requests that came a stay ago
            # leave now, at the rate seen during the window: slower, where a burst has begun since or slows answers
            # down. One request at least is foreseen to end in such a window.
            least = group.blocks.num_used / max(1, len(group.queues.running)) * NANOSECONDS / TRAFFIC_WINDOW_NS
            return min(max(self._released_per_s(expected), least), expected)
        return expected if rates is None else max(rates.freed, expected)

    def _released_per_s(self, expected_per_s: float) -> float:
        """Blocks a second given back by ended requests, a mean over the window of the traffic; the part of the window
        that was not seen (of a new group) counts as expected."""
        changes = None if self._totals is None else self._totals.changes(TRAFFIC_WINDOW_NS)
        if changes is None:
            return expected_per_s
        (freed, *_), duration_ns = changes
        unseen_ns = max(0, TRAFFIC_WINDOW_NS - duration_ns)
        return (freed * NANOSECONDS + expected_per_s * unseen_ns) / (duration_ns + unseen_ns)

    def head_need_blocks(self, group: Group) -> int:
        """Blocks that the head of the online queue needs to be admitted, watermark included, whatever is cached; 0 when
        no online request waits."""
        head = group.queues.waiting.head
        return 0 if head is None else group.limits.blocks_for(head.num_tokens) + group.blocks.watermark

    def blocked_s(self, now_ns: int) -> float | None:
        """How long, in seconds, memory has kept the head of the online queue out without a break; None while it does
        not."""
        return None if self.blocked_since_ns is None else (now_ns - self.blocked_since_ns) / NANOSECONDS

    def memory_wait_s(self, group: Group, now_ns: int, stays: Stays = UNKNOWN_STAYS) -> float:
        """Seconds until the group's whole online queue has its memory, as things are. ``stays``: how long requests of
        each class have stayed of late."""
        rates, queued = self.rates(), group.queues.queued_blocks()
        missing = group.blocks.num_used + queued - group.blocks.capacity
        freed = self._freed_per_s(group, rates, stays, now_ns)
        return memory_wait_s(missing, freed, queued, self._admitted_per_s(group, rates, self.blocked_s(now_ns)))

    def _admitted_per_s(self, group: Group, rates: BlockRates | None, blocked_s: float | None) -> float | None:
        """Blocks a second that the queue was given while memory kept its head out over the whole window; at least as if
        its head were admitted within one window. None where memory did not keep it out so long, or no rates are
        known."""
        if rates is None or blocked_s is None or blocked_s < WINDOW_SPAN * WINDOW_S:
            return None
        return max(rates.let_in, self.head_need_blocks(group) / WINDOW_S)
