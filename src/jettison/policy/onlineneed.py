"""How much more KV online requests take within a short time, if their steps are filled with offline work. Pure.

Filled steps take longer, so requests stay for longer while others come (Little's law): what a few seconds bring is the
memory that has to be there. It comes free at once from offline requests, which are evicted, and from online ones only
when they end. So steps are filled as long as this growth finds room beside what online requests hold.
"""

from __future__ import annotations

from itertools import chain

from jettison.policy.forecast import Arrivals, Load


def most_growth_tokens(load: Load, turn_s: float, ahead_s: float) -> float:
    """Most tokens of KV that online requests hold at any time in the next ``ahead_s`` seconds, over what running ones
    hold now; at least 0, and at least what waiting ones need. Each decoding request gets a token every ``turn_s``
    seconds, until its answer ends; arrivals are let in as they come."""
    ends = sorted((seen.left_output, seen.num_tokens) for seen in chain(load.running, load.waiting))
    queued = float(sum(seen.num_tokens for seen in load.waiting))
    num_turns = ahead_s / turn_s
    most, ended, num_left = queued, 0.0, len(ends)
    for left, num_tokens in ends:
        if left >= num_turns:
            break
        most = max(most, queued - ended + num_left * left + _arrived_tokens(load.arrivals, left * turn_s, turn_s))
        ended += num_tokens
        num_left -= 1
    at_end = queued - ended + num_left * num_turns + _arrived_tokens(load.arrivals, ahead_s, turn_s)
    return max(most, at_end)


def _arrived_tokens(arrivals: Arrivals, until_s: float, turn_s: float) -> float:
    """KV of the requests that have come by then: their prompts, and half of the tokens that the first of them has got
    by then, at most a mean answer. None of them has ended."""
    lately_s = min(until_s, arrivals.lately_for_s)
    num = arrivals.lately_per_s * lately_s + arrivals.usually_per_s * (until_s - lately_s)
    lengths = arrivals.output_tokens
    answer = sum(lengths) / len(lengths) if lengths else 0.0
    return num * (arrivals.prompt_tokens + min(until_s / turn_s / 2.0, answer))
