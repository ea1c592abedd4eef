"""Which instances fall asleep by themselves (doze), and when (MELL section VI: an idle device is terminated). Pure.

An instance dozes only without pressure, when no online request has used it for a while and the packing (where there is
one) does not want it. Never do so many fall asleep that fewer than ``min_awake`` serve, or that the rest could not
compute the prompts that arrive: a packing does not count these. Offline work keeps an instance awake only where the
others would miss one of its deadlines (``policy.deadlines``), or where it is worth it (``policy.batchworth``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from jettison.policy.slo import AHEAD_SHARE
from jettison.types import GroupId


class IdleGroup(NamedTuple):
    """An instance without online requests."""

    group_id: GroupId
    empty_s: float
    """Seconds since the last online request left, or since the instance began to serve."""


SHORT_SLEEP = 8
"""A sleep shorter than so many times ``--sleep-after-s`` did not pay."""

MOST_PATIENCE = 8
"""Most times ``--sleep-after-s`` that an instance whose need comes back must have been empty before it sleeps."""


WAKE_SHARE = 0.8
"""Share of the prompt tokens that awake instances can compute: where more arrives, their queues are about to grow.
Above ``AHEAD_SHARE``, by which instances stay awake: else chance would wake and put to sleep by turns."""


def num_for_prompts(arriving_tokens_per_s: float, rates: Sequence[float], share: float = AHEAD_SHARE) -> int:
    """How many instances it takes for arriving prompts to take ``share`` of the time that steps have for prompts.

    ``rates``: tokens of prompts a second that each of some instances computes beside its requests. ``share`` is the
    part of the TTFT objective that prompts ahead of a newcomer may take: what arrives within an objective is computed
    in that part of it. 0 where nothing is known of rates; one more than there are rates where decodes leave no time for
    prompts.
    """
    if not rates or not arriving_tokens_per_s:
        return 0
    each = share * fmean(rates)
    return math.ceil(arriving_tokens_per_s / each) if each else len(rates) + 1


def next_patience(patience: int, slept_s: float, after_s: float) -> int:
    """How many times ``--sleep-after-s`` an instance must be without requests before it sleeps, after one was woken
    that had slept for ``slept_s``: twice as long as before where that was short, half as long where it was not.

    So a need that comes back every ``p`` seconds, p at most ``MOST_PATIENCE`` times ``after_s``, puts no instance to
    sleep more than four times. The cost: an instance is awake for at most ``MOST_PATIENCE`` times ``after_s`` after the
    last need."""
    if slept_s < SHORT_SLEEP * after_s:
        return min(MOST_PATIENCE, 2 * patience)
    return max(1, patience // 2)


def choose_sleepers(
    idle: Sequence[IdleGroup], num_serving: int, min_awake: int, after_s: float, unwanted: Collection[GroupId] | None,
) -> list[GroupId]:
    """Groups that may sleep now, the longest empty first. ``unwanted``: groups that the packing does not want; None: it
    has no say."""
    may = [g for g in idle if g.empty_s >= after_s and (unwanted is None or g.group_id in unwanted)]
    may.sort(key=lambda g: (-g.empty_s, -g.group_id))
    return [g.group_id for g in may[: max(0, num_serving - min_awake)]]
