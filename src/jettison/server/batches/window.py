"""Completion windows: what a text such as ``24h`` means, and when a batch will be done at the rate seen so far. Pure.

Lengths are those of answers, not ``max_tokens``, which only bounds them. Rates are of one instance beside the online
requests that it has: a window is kept by all instances that are awake or can be woken (``policy.deadlines`` wakes whom
it takes). While nothing is known nothing is predicted, and no batch is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from jettison.live.engine.api import EngineSnapshot
from jettison.policy.deadlines import Supply
from jettison.server.batches.records import Batch, Status

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"(?:\d{1,9}[smhd])+")
MOST_S = 30 * 86400
"""The longest window: what is kept for a month is archived, not served."""

MEMORY_S = 120.0
"""How long a measurement counts: work measured so long ago weighs 1/e."""
LEAST_S = 3.0
"""Of work, before its rate is believed."""
MEAN_OF_LAST = 500
"""Answers."""

MOST_ONLINE = 0.9
"""Of an instance's time, what online requests are taken to need at most: a burst is not for ever."""

_NOTES = ("rate_tokens", "rate_instance_seconds", "mean_output_tokens", "num_answers")


def window_s(text: str) -> int:
    """Seconds of ``30m``, ``24h``, ``1h30m``, ``7d``. Raises ValueError."""
    if _WINDOW.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
        if 1 <= seconds <= MOST_S:
            return seconds
    raise ValueError(f"completion_window must be a time such as '24h', '30m' or '1h30m', of 1s to {MOST_S // 86400}d.")


def shown_s(seconds: float) -> str:
    """``90`` -> ``1m30s``: a window that is at least as long."""
    left, parts = max(1, int(-(-seconds // 1))), []
    for unit in ("d", "h", "m", "s"):
        number, left = divmod(left, _UNITS[unit])
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)


class Rates(NamedTuple):
    """Tokens per second of one instance."""

    prompt: float
    output: float


class Capacity(NamedTuple):
    """Instances that serve, and sleepers that would."""

    num_awake: int = 1
    wakes_s: tuple[float, ...] = ()
    """What waking each takes."""

    def seconds_for(self, instance_s: float, *, wakes: bool) -> float:
        """Until so many seconds of an instance are done, with those that sleep or without; infinite where none serves
        and none is woken."""
        return Supply(self.num_awake, 1.0, self.wakes_s if wakes else ()).seconds_for(instance_s)


ONE = Capacity()


def capacity_of(snapshot: EngineSnapshot) -> Capacity:
    """Those that died come back; before the engine has workers there is one."""
    num_up = sum(worker.sleep in ("awake", "waking") for worker in snapshot.workers)
    return Capacity(num_up, snapshot.wakes_s) if num_up or snapshot.wakes_s else ONE


class Forecast:
    """What offline work takes, from what it took; ``profiled``, of an instance that does nothing else, is believed
    before anything was measured."""

    def __init__(
        self, profiled: Callable[[], Rates | None] = lambda: None, capacity: Callable[[], Capacity] = lambda: ONE
    ) -> None:
        self._profiled = profiled
        self._capacity = capacity
        self._online = (0.0, 0.0, 0.0)
        """Tokens of prompts and of answers, in so many seconds of instances."""
        self._tokens = 0.0
        self._seconds = 0.0
        self._mean_output: float | None = None
        self._num_answers = 0

    def notes(self) -> dict[str, float]:
        """What to keep over a restart."""
        values = (self._tokens, self._seconds, self._mean_output or 0.0, float(self._num_answers))
        return dict(zip(_NOTES, values, strict=True))

    def remember(self, notes: Mapping[str, float]) -> None:
        """What an earlier process knew."""
        self._tokens, self._seconds, mean, count = (notes.get(name, 0.0) for name in _NOTES)
        self._num_answers, self._mean_output = int(count), mean if count else None

    def note_work(self, num_tokens: int, seconds: float, num_instances: int = 1) -> None:
        """So many tokens, of prompts and answers, were computed by so many instances while there was more work than
        could be taken on.

        Of less work nothing follows: a few lines leave most of every step empty.
        """
        fade = max(0.0, 1.0 - seconds / MEMORY_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + seconds * num_instances

    def note_online(
        self, num_prompt_tokens: float, num_output_tokens: float, seconds: float, num_instances: int
    ) -> None:
        """What so many instances have computed of online requests."""
        fade = max(0.0, 1.0 - seconds / MEMORY_S)
        prompt, output, instance_s = self._online
        self._online = (
            prompt * fade + num_prompt_tokens, output * fade + num_output_tokens,
            instance_s * fade + seconds * num_instances,
        )  # fmt: skip

    def note_answer(self, num_tokens: int) -> None:
        """An answer's length."""
        self._num_answers = min(self._num_answers + 1, MEAN_OF_LAST)
        mean = self._mean_output or 0.0
        self._mean_output = mean + (num_tokens - mean) / self._num_answers

    @property
    def rates(self) -> Rates | None:
        """None while nothing is known. Measured, prompts and answers are one: their mixture of late."""
        if self._seconds >= LEAST_S and self._tokens > 0:
            return Rates(self._tokens / self._seconds, self._tokens / self._seconds)
        profiled = self._profiled()
        if profiled is None:
            return None
        left = 1.0 - self._online_share(profiled)
        return Rates(left * profiled.prompt, left * profiled.output)

    def _online_share(self, rates: Rates) -> float:
        """Of an instance's time, what online requests took of late."""
        prompt, output, instance_s = self._online
        if not instance_s:
            return 0.0
        return min(MOST_ONLINE, (prompt / rates.prompt + output / rates.output) / instance_s)

    def _instance_s_left(self, batch: Batch) -> float | None:
        """Seconds of one instance that a batch that was validated takes, alone; None while nothing is known."""
        rates = self.rates
        if batch.num_runnable == 0:
            return 0.0
        if self._mean_output is None or rates is None:
            return None
        output = min(float(batch.max_output_tokens), self._mean_output * batch.num_runnable)
        left = batch.num_left / batch.num_runnable
        return (batch.num_prompt_tokens / rates.prompt + output / rates.output) * left

    def seconds_to_end(self, batch: Batch, others: Iterable[Batch]) -> float | None:
        """Until a batch is done by all that are awake or can be woken: itself, what of its owner's is due before it,
        and of each other owner's work as much: they share the engine alike (``policy.order``). None while too little
        is known."""
        instance_s = self._instance_s_to_end(batch, others)
        return None if instance_s is None else self._capacity().seconds_for(instance_s, wakes=True)

    def seconds_expected(self, batch: Batch, others: Iterable[Batch], now_s: float) -> float | None:
        """Until it will be: those that are awake do it where they are in time, and sleepers are woken where they would
        not be, as few as keep its window. None while too little is known."""
        instance_s = self._instance_s_to_end(batch, others)
        if instance_s is None:
            return None
        capacity = self._capacity()
        soonest_s, latest_s = (capacity.seconds_for(instance_s, wakes=wakes) for wakes in (True, False))
        return min(max(soonest_s, batch.expires_at - now_s), latest_s)

    def _instance_s_to_end(self, batch: Batch, others: Iterable[Batch]) -> float | None:
        seconds_of: defaultdict[str, float] = defaultdict(float)
        for other in (batch, *(o for o in others if o.status is Status.IN_PROGRESS and o.seq != batch.seq)):
            if other.owner == batch.owner and (other.expires_at, other.seq) > (batch.expires_at, batch.seq):
                continue
            seconds = self._instance_s_left(other)
            if seconds is None:
                return None
            seconds_of[other.owner] += seconds
        return sum(min(seconds, seconds_of[batch.owner]) for seconds in seconds_of.values())

    def why_infeasible(self, batch: Batch, others: Iterable[Batch], now_s: float) -> str | None:
        """Why a validated batch cannot be done in its window, and when it could be; None where it can, or may."""
        seconds = self.seconds_to_end(batch, others)
        if seconds is None or now_s + seconds <= batch.expires_at:
            return None
        earliest = datetime.fromtimestamp(now_s + seconds, UTC).isoformat(timespec="seconds")
        needed = shown_s(now_s + seconds - batch.created_at)
        return (
            f"The batch cannot be completed within {batch.completion_window}: the earliest feasible time is "
            f"{earliest}; a completion_window of {needed} is enough."
        )
