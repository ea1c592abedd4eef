"""How many instances offline work is worth to be kept awake for it, where it has no deadline. Pure.

An instance costs its price each second that it is awake, and a token of a batch brings its price. A further instance
takes a part of the requests: each of them has fewer beside it and is answered sooner, but the less there is for each
instance, the fewer tokens it does a second. So instances are worth it up to where the next one would do less than it
costs. An operator without prices names a floor: tokens a second that are to be done as long as there is work.

Only instances that no online request uses are counted: the others are awake for their online requests, and what they do
beside these costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.policy.deadlines import NEARLY


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrices:
    """What offline work without a deadline is worth, in any unit of money. By default nothing: it is done in what
    online requests leave, and keeps no instance awake."""

    device_second: float = 1.0
    """Price of a second in which an instance is awake."""
    batch_token: float = 0.0
    """Price that a prompt or output token of a batch brings."""
    floor_tokens_per_s: float = 0.0
    """Tokens a second that are to be done while there is work, whatever that costs."""

    @property
    def are_there(self) -> bool:
        """Whether offline work may keep an instance awake, or wake one."""
        return self.batch_token > 0.0 or self.floor_tokens_per_s > 0.0


class Backlog(NamedTuple):
    """Offline requests, and how fast instances without online requests do them."""

    num_requests: float
    num_busy: int
    """Instances with online requests, which have their part of them."""
    prompt_tokens: float
    """Of a request, as a mean; tokens in the prefix cache are not known of."""
    output_tokens: float
    most_each: int
    """Requests that an instance runs at once."""
    prompt_token_s: float
    """Seconds for each token of a prompt."""
    decode_s: Callable[[float], float]
    """Seconds of a step in which so many requests get a token each."""
    busy_tokens_per_s: float = 0.0
    """What instances with online requests do beside them."""
    num_tokens: float = 0.0
    """Left to do, of all offline requests."""

    def tokens_per_s(self, num_instances: int) -> float:
        """What so many instances without online requests do together, requests being shared out evenly over all."""
        if num_instances <= 0 or self.num_requests <= 0.0:
            return 0.0
        each = min(self.num_requests / (num_instances + self.num_busy), self.most_each)
        together = max(1.0, each)  # less than one: it has one for that part of the time
        # While each of its requests is served once, an instance computes the prompts of all of them.
        took_s = together * self.prompt_tokens * self.prompt_token_s + self.output_tokens * self.decode_s(together)
        return num_instances * each * (self.prompt_tokens + self.output_tokens) / took_s if took_s else 0.0


def num_worth(backlog: Backlog, prices: BatchPrices, most: int, factor: float = 1.0) -> int:
    """How many instances without online requests, up to ``most``, are to be awake for this work: as many as its price
    pays for, or as its floor takes, whichever is more. For a floor none that does less than ``NEARLY`` of what the
    first does. ``factor``: on the tokens that an instance is taken to do for its price, and on the floor."""
    done = [0.0]
    num_paid = num_for_floor = 0
    is_paid, needed = prices.batch_token > 0.0, factor * prices.floor_tokens_per_s - backlog.busy_tokens_per_s
    is_below = needed > 0.0
    for num in range(1, most + 1):
        if not is_paid and not is_below:
            break
        done.append(backlog.tokens_per_s(num))
        more = done[num] - done[num - 1]
        is_paid = is_paid and factor * more * prices.batch_token >= prices.device_second
        is_below = is_below and done[num - 1] < needed and more > NEARLY * done[1]
        num_paid, num_for_floor = (num if is_paid else num_paid), (num if is_below else num_for_floor)
    return max(num_paid, num_for_floor)


def num_to_wake(backlog: Backlog, prices: BatchPrices, num_awake: int, wakes_s: Sequence[float]) -> int:
    """How many of the sleepers, whose wakes take ``wakes_s`` seconds, are to be woken beside ``num_awake`` instances
    without online requests. What is woken for its price has to earn what its wake costs before the work is done."""
    wanted = num_worth(backlog, prices, num_awake + len(wakes_s))
    floor = num_worth(backlog, BatchPrices(floor_tokens_per_s=prices.floor_tokens_per_s), num_awake + len(wakes_s))
    while wanted > max(num_awake, floor):
        done = backlog.tokens_per_s(wanted)
        lasts_s = backlog.num_tokens / max(1e-9, done + backlog.busy_tokens_per_s)
        more = done - backlog.tokens_per_s(wanted - 1)
        gain_per_s = more * prices.batch_token - prices.device_second
        if gain_per_s * lasts_s >= prices.device_second * wakes_s[wanted - num_awake - 1]:
            break
        wanted -= 1
    return max(0, wanted - num_awake)
