"""How much more KV online requests take within a short time, in steps of some length. Pure.

Filled steps take longer, so requests stay for longer while others come (Little's law): what a few seconds bring is the
memory that has to be there. It comes free at once from offline requests, which are evicted, and from online ones only
when they end. So steps are filled as long as this growth finds room beside what online requests hold; and a sleeper is
woken where what is open will be full by the time that it serves.
"""

from __future__ import annotations

import math
from itertools import chain

from jettison.policy.forecast import Arrivals, Load

NEARLY_ALWAYS = 2.33
"""Standard deviations of arrivals that are reckoned with where no request is to wait: 99 times of 100, no more come."""


def stay_s(arrivals: Arrivals, turn_s: float) -> float:
    """Seconds that a request with a mean answer stays."""
    lengths = arrivals.output_tokens
    return (1.0 + (sum(lengths) / len(lengths) if lengths else 0.0)) * turn_s


def most_growth_tokens(load: Load, turn_s: float, ahead_s: float, deviations: float = 0.0) -> float:
    """Most tokens of KV that online requests hold at any time in the next ``ahead_s`` seconds, over what running ones
    hold now; at least 0, and at least what waiting ones need. Each decoding request gets a token every ``turn_s``
    seconds, until its answer ends; arrivals are let in as they come, as many as expected and so many standard
    ``deviations`` (of a Poisson process) more."""
    queued = float(sum(seen.num_tokens for seen in load.waiting))
    ends = [(seen.left_output, seen.num_tokens) for seen in chain(load.running, load.waiting)]
    num_turns, num_left, ended, most = ahead_s / turn_s, len(ends), 0.0, queued
    for turn, num_tokens in sorted([*ends, (load.arrivals.lately_for_s / turn_s, 0), (num_turns, 0)]):
        if turn > num_turns:
            break
        held = queued - ended + num_left * turn + arrived_tokens(load.arrivals, turn * turn_s, turn_s, deviations)
        most = max(most, held)
        if num_tokens:  # else no request ends: a burst does, or the time
            ended += num_tokens
            num_left -= 1
    return most


def arrived_tokens(arrivals: Arrivals, until_s: float, turn_s: float, deviations: float = 0.0) -> float:
    """KV of the requests that have come by then and have not ended, as each does after a mean answer: their prompts,
    and half of the tokens that the first of them has got."""
    stays_s = stay_s(arrivals, turn_s)
    num = _num_arrived(arrivals, until_s) - _num_arrived(arrivals, until_s - stays_s)
    num += deviations * math.sqrt(max(0.0, num))
    return num * (arrivals.prompt_tokens + min(until_s, stays_s - turn_s) / turn_s / 2.0)


def _num_arrived(arrivals: Arrivals, until_s: float) -> float:
    """Requests that come until then; none before now."""
    lately_s = max(0.0, min(until_s, arrivals.lately_for_s))
    return arrivals.lately_per_s * lately_s + arrivals.usually_per_s * max(0.0, until_s - lately_s)
