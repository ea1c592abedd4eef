"""Completion windows: parses a text such as ``24h``, and predicts the end of a batch at the observed rate. Pure.

Lengths are those of answers, not ``max_tokens``, which only bounds them. Rates are of one instance beside its online
requests. All instances that are awake or can be woken serve a window (``policy.deadlines`` wakes as many as needed).
Without observations nothing is predicted, and no batch is refused.
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
"""The longest window: a batch of more than a month would be archived, not served."""

MEMORY_S = 120.0
"""Memory of measurements: one so long ago weighs 1/e."""
LEAST_S = 3.0
"""Least seconds of observed work before its rate is used."""
GOOD_MEMORY_S = 1200.0
"""Memory of the best rate, in seconds in which tokens came: a standstill does not shorten it."""
MEAN_OF_LAST = 500
"""Answers over which lengths are averaged."""

MOST_ONLINE = 0.9
"""Largest share of an instance's time assumed for online requests, because no burst lasts for ever. The rest is the
least share of a good rate that is predicted after a standstill, as that lasts no longer."""

_NOTES = ("rate_tokens", "rate_instance_seconds", "good_tokens_per_instance_second", "mean_output_tokens",
          "num_answers")  # fmt: skip


def window_s(text: str) -> int:
    """Seconds of ``30m``, ``24h``, ``1h30m``, ``7d``. Raises ValueError."""
    if _WINDOW.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
        if 1 <= seconds <= MOST_S:
            return seconds
    raise ValueError(f"completion_window must be a time such as '24h', '30m' or '1h30m', of 1s to {MOST_S // 86400}d.")


def shown_s(seconds: float) -> str:
    """``90`` -> ``1m30s``: the text of a window at least as long."""
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
    """Instances that serve, and sleepers that can be woken."""

    num_awake: int = 1
    wakes_s: tuple[float, ...] = ()
    """Seconds to wake each sleeper."""

    def seconds_for(self, instance_s: float, *, wakes: bool) -> float:
        """Seconds until ``instance_s`` seconds of one instance's work are done, with or without waking sleepers;
        infinite where no instance serves or is woken."""
        return Supply(self.num_awake, 1.0, self.wakes_s if wakes else ()).seconds_for(instance_s)


ONE = Capacity()


def capacity_of(snapshot: EngineSnapshot) -> Capacity:
    """The capacity in a snapshot. Dead instances count, as they come back; an engine without workers yet counts as one
    instance."""
    num_up = sum(worker.sleep in ("awake", "waking") for worker in snapshot.workers)
    return Capacity(num_up, snapshot.wakes_s) if num_up or snapshot.wakes_s else ONE


class Forecast:
    """Predicts the time of offline work from the work done. ``profiled``, the rates of an otherwise idle instance, is
    used before any measurement."""

    def __init__(
        self, profiled: Callable[[], Rates | None] = lambda: None, capacity: Callable[[], Capacity] = lambda: ONE
    ) -> None:
        self._profiled = profiled
        self._capacity = capacity
        self._online = (0.0, 0.0, 0.0)
        """Online tokens of prompts and of answers, and the instance-seconds that they were computed in."""
        self._tokens = 0.0
        self._seconds = 0.0
        self._good_tokens_per_s = 0.0
        """The best measured rate of an instance, fading to the present one; 0: none is measured yet."""
        self._mean_output: float | None = None
        self._num_answers = 0

    def notes(self) -> dict[str, float]:
        """The values to keep over a restart."""
        values = (self._tokens, self._seconds, self._good_tokens_per_s, self._mean_output or 0.0,
                  float(self._num_answers))  # fmt: skip
        return dict(zip(_NOTES, values, strict=True))

    def remember(self, notes: Mapping[str, float]) -> None:
        """Take over the values of an earlier process."""
        values = (notes.get(name, 0.0) for name in _NOTES)
        self._tokens, self._seconds, self._good_tokens_per_s, mean, count = values
        self._num_answers, self._mean_output = int(count), mean if count else None

    def note_work(self, num_tokens: int, seconds: float, num_instances: int = 1) -> None:
        """Note offline tokens, of prompts and answers, that instances computed while there was more work than fits.

        Less work gives no rate, as a few lines leave most of every step empty. Time before the first token gives none
        either.
        """
        if not num_tokens and not self._tokens:
            return
        fade = max(0.0, 1.0 - seconds / MEMORY_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + seconds * num_instances
        if num_tokens and self._seconds >= LEAST_S:
            good = self._good_tokens_per_s * max(0.0, 1.0 - seconds / GOOD_MEMORY_S)
            self._good_tokens_per_s = max(self._tokens / self._seconds, good)

    def note_online(
        self, num_prompt_tokens: float, num_output_tokens: float, seconds: float, num_instances: int
    ) -> None:
        """Note the tokens of online requests that instances have computed."""
        fade = max(0.0, 1.0 - seconds / MEMORY_S)
        prompt, output, instance_s = self._online
        self._online = (
            prompt * fade + num_prompt_tokens, output * fade + num_output_tokens,
            instance_s * fade + seconds * num_instances,
        )  # fmt: skip

    def note_answer(self, num_tokens: int) -> None:
        """Note an answer's length."""
        self._num_answers = min(self._num_answers + 1, MEAN_OF_LAST)
        mean = self._mean_output or 0.0
        self._mean_output = mean + (num_tokens - mean) / self._num_answers

    @property
    def rates(self) -> Rates | None:
        """The rates; None while nothing is known. Measured rates do not tell prompts from answers: both are the recent
        mixture's. They fall no lower by a standstill than online requests would bring them."""
        if self._good_tokens_per_s:
            measured = max(self._tokens / self._seconds, (1.0 - MOST_ONLINE) * self._good_tokens_per_s)
            return Rates(measured, measured)
        profiled = self._profiled()
        if profiled is None:
            return None
        left = 1.0 - self._online_share(profiled)
        return Rates(left * profiled.prompt, left * profiled.output)

    def _online_share(self, rates: Rates) -> float:
        """Share of an instance's time that online requests took recently."""
        prompt, output, instance_s = self._online
        if not instance_s:
            return 0.0
        return min(MOST_ONLINE, (prompt / rates.prompt + output / rates.output) / instance_s)

    def _instance_s_left(self, batch: Batch) -> float | None:
        """Seconds of one instance that a validated batch still takes, alone; None while nothing is known."""
        rates = self.rates
        if batch.num_runnable == 0:
            return 0.0
        if self._mean_output is None or rates is None:
            return None
        output = min(float(batch.max_output_tokens), self._mean_output * batch.num_runnable)
        left = batch.num_left / batch.num_runnable
        return (batch.num_prompt_tokens / rates.prompt + output / rates.output) * left

    def seconds_to_end(self, batch: Batch, others: Iterable[Batch]) -> float | None:
        """Seconds until a batch is done by all instances that are awake or can be woken. Its work counts, its owner's
        work that is due before it, and up to as much work of each other owner, as owners share the engine equally
        (``policy.order``). None while too little is known."""
        instance_s = self._instance_s_to_end(batch, others)
        return None if instance_s is None else self._capacity().seconds_for(instance_s, wakes=True)

    def seconds_expected(self, batch: Batch, others: Iterable[Batch], now_s: float) -> float | None:
        """Expected seconds to its end. The awake instances compute it if they meet its window; else as few sleepers as
        needed are woken. None while too little is known."""
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
        """Why a validated batch cannot be done in its window, and when it could be, unless no window is long enough;
        None where it can, or too little is known."""
        seconds = self.seconds_to_end(batch, others)
        if seconds is None or now_s + seconds <= batch.expires_at:
            return None
        cannot = f"The batch cannot be completed within {batch.completion_window}"
        needed_s = now_s + seconds - batch.created_at
        if needed_s > MOST_S:
            return f"{cannot}, nor within {shown_s(MOST_S)}, the longest completion_window: split it."
        earliest = datetime.fromtimestamp(now_s + seconds, UTC).isoformat(timespec="seconds")
        return (
            f"{cannot}: the earliest feasible time is {earliest}; a completion_window of {shown_s(needed_s)} is enough."
        )
