"""Is a group overloaded in a way that more KV memory cures? (design 5.1, KunServe v3 section 4.1)

Pure. Overload means: requests wait, the head of the queue waits *for memory*, and the time until enough blocks come
free is longer than the time the compute backlog would take anyway. The last clause keeps the system from paying for a
pipeline where the queue waits for compute (code completion: 2,000 tokens in, 28 out). Steps that are full of prompts
although the head is kept out speak against a drop, too: a queue that waits for memory alone leaves the steps to the
decodes. And a pipeline must be able to keep up with the traffic, or fall behind by less than the wait: near the compute
limit its bubbles turn a short wait into an endless queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jettison.policy.computeload import pipeline_loss
from jettison.types import GroupId

COMPUTE_BINDS = "compute binds"
CANNOT_KEEP_UP = "a pipeline could not keep up"
GAIN_TOO_SMALL = "predicted gain too small"

LEAST_ADMITTED_SHARE = 0.1
"""Bound of ``admitted_share``: answers many times as long as their prompts make a wait longer, not endless, as some of
them end early."""


class GroupLoad(NamedTuple):
    """One group's pressure, in blocks and seconds."""

    group_id: GroupId
    capacity_blocks: int
    used_blocks: int
    """Held by requests; cached blocks count as free."""
    head_need_blocks: int
    """Blocks that the head of the queue needs to be admitted, watermark included."""
    queue_need_blocks: int
    """Blocks that all waiting requests need."""
    num_waiting: int
    head_blocked_by_memory: bool
    head_blocked_s: float
    """How long the head has been blocked by memory without a break."""
    freed_blocks_per_s: float | None
    """Blocks that come free in the near future; None = not known yet."""
    queued_prefill_tokens: int
    prefill_tokens_per_s: float | None
    """What the step-time model predicts for full prefill steps; None = not known yet."""
    demand_blocks_per_s: float | None = None
    """Blocks that arriving prompts and growing requests ask for, each counted once; None = not known yet."""
    released_blocks_per_s: float | None = None
    """Blocks that ending requests give back; None = not known yet."""
    arriving_tokens_per_s: float | None = None
    """Online prompt tokens that arrive at this group, a second; None = not known yet."""
    prefill_fill: float = 0.0
    """Share of the token budget that online prompts took in the last steps."""
    foreseen_s: float = 0.0
    """How long ``foreseen_missing_blocks`` has been above 0 without a break."""
    merged_compute_load: float | None = None
    """Share of its compute that a merged group would need for the present traffic (``policy.computeload``); None = not
    known yet."""
    separate_compute_load: float | None = None
    """The same for the instances as they are."""
    surge: float | None = None
    """What arrives lately (a second) over what usually does (ten); None = not known yet."""
    unfinished_prefill_tokens: int = 0
    """Part of ``queued_prefill_tokens`` that running requests still have to compute: these wait for no memory."""
    admitted_share: float = 1.0
    """Share of the blocks that a request gives back with which it was admitted; it took the others as it grew. In a
    burst memory stays full, and running requests take their growth out of all that comes free before the queue gets
    any."""
    admitted_blocks_per_s: float | None = None
    """Blocks that the queue was given lately, a second; None = not known, or memory has not kept it out all the
    while."""
    mean_stay_s: float = 0.0
    """How long requests stay, as far as seen; 0 while nothing is known."""
    is_yielding: bool = False
    """The group empties its memory in order to split: a longer pipeline is no answer to the queue that it keeps out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadParams:
    """When a drop is worth it."""

    min_blocked_s: float = 0.05
    """Grace: a head blocked for less may be served by the next ending request."""
    min_chance_blocked_s: float = 0.2
    """The same where no burst begins. The wait of a queue that arose by chance is predicted several times too long, and
    a merged group stays for seconds. So, as in the ski-rental problem, a drop waits about as long as the wait may
    cost."""
    horizon_s: float = 0.0
    """How far ahead memory is foreseen to run out (KunServe v1 section 4.3); 0 = only the present counts."""
    min_foreseen_s: float = 0.15
    """How long a shortage has to be foreseen before it counts."""
    burst_ratio: float = 1.5
    """Demand over release from which a rise is a burst, and not the noise of a busy hour."""
    min_gain_s: float = 0.4
    """Predicted wait that must be saved."""
    surge_gain_s: float = 0.2
    """The same where a burst begins, at ``min_surge``; less where more arrives: the wait will be longer than the
    present queue suggests, and grows as fast as requests arrive."""
    min_surge: float = 1.7
    """Arrivals over the usual ones that make a burst."""
    min_gain_ratio: float = 2.0
    """Least predicted memory wait over the predicted compute time of the requests that wait for memory."""
    min_overloaded_s: float = 0.03
    """How long the verdict must be for a drop, without a break, before the drop is made: near a threshold verdicts
    change at every step."""
    max_prefill_fill: float = 0.3
    """Largest share of steps that prompts may take. A queue that waits for memory alone leaves steps to the decodes:
    where prompts fill them, compute binds."""
    min_seen_s: float = 1.0
    """How long memory has to have kept the head out before that counts for more than predictions of compute."""
    max_compute_load: float = 0.8
    """A merged group has to catch up after the burst. Where the traffic would need a larger share of its compute than
    this, and more than of separate instances, a drop has to be worth the time that the group falls behind
    (``merging_costs_s``)."""
    max_surge_compute_load: float = 1.0
    """The same in a burst: the measured traffic includes the burst, which passes."""
    least_merged_s: float = 20.0
    """How long a merged group is expected to stay at least; else as long as its requests do."""
    max_loss: float = 0.25
    """Largest share of the throughput of separate instances that a pipeline which cannot keep up may cost, whatever the
    wait."""
    pipeline_efficiency: float = 0.85
    """Throughput of a pipeline against as many separate instances, until one is measured (``cost.predictor``)."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """The verdict with its inputs, for the event log."""

    overloaded: bool
    load: float
    """(used + head's need) / capacity, in blocks."""
    memory_wait_s: float
    compute_wait_s: float
    reason: str
    merged_compute_load: float | None = None
    separate_compute_load: float | None = None
    gain_s: float = 0.0
    """Seconds of waiting that the last waiting request would be spared."""
    prefill_fill: float = 0.0
    """Share of the steps that prompts took."""

    @property
    def declines(self) -> bool:
        """Memory binds, and still there is no drop."""
        return not self.overloaded and self.reason in (COMPUTE_BINDS, CANNOT_KEEP_UP)

    @property
    def refuses(self) -> bool:
        """There will be no drop as things are. A verdict that it is only too early is no refusal."""
        return self.declines or (not self.overloaded and self.reason == GAIN_TOO_SMALL)

    def as_fields(self) -> dict[str, object]:
        """For the event log."""
        return {
            "reason": self.reason,
            "load": self.load,
            "memory_wait_s": self.memory_wait_s,
            "compute_wait_s": self.compute_wait_s,
            "merged_compute_load": self.merged_compute_load,
            "separate_compute_load": self.separate_compute_load,
            "prefill_fill": self.prefill_fill,
        }


def assess_overload(load: GroupLoad, params: OverloadParams) -> Assessment:
    """Decide for one group. 95 % used without a queue is healthy."""
    pressure = (load.used_blocks + load.head_need_blocks) / max(1, load.capacity_blocks)
    memory_wait_s, compute_wait_s = _memory_wait_s(load, params), _compute_wait_s(load)
    is_seen = load.head_blocked_s >= params.min_seen_s
    ahead_s = compute_wait_s * share_ahead_of_last(load) if is_seen else compute_wait_s

    def verdict(overloaded: bool, reason: str) -> Assessment:
        return Assessment(
            overloaded, pressure, memory_wait_s, compute_wait_s, reason,
            load.merged_compute_load, load.separate_compute_load, memory_wait_s - ahead_s, load.prefill_fill,
        )

    if (foreseen_s := _foreseen_wait_s(load, params, compute_wait_s)) is not None:
        memory_wait_s = foreseen_s
        return verdict(True, "memory will bind")
    blocked_s = load.head_blocked_s if load.head_blocked_by_memory else None
    reason = why_queue_is_no_reason(
        load.num_waiting, load.used_blocks, load.head_need_blocks, load.capacity_blocks, blocked_s, params
    )
    if reason is not None:
        return verdict(False, reason)
    if load.head_need_blocks > load.capacity_blocks:
        return verdict(True, "the head of the queue fits into no group as it is")
    if memory_wait_s - ahead_s < least_gain_s(load, params):
        return verdict(False, GAIN_TOO_SMALL)
    if load.head_blocked_s < params.min_chance_blocked_s and not is_burst(load, params, if_unknown=True):
        return verdict(False, "a queue of chance, blocked for too short a time")
    # What running requests have yet to prefill is computed whatever the queue waits for.
    waiting_share = 1.0 - load.unfinished_prefill_tokens / max(1, load.queued_prefill_tokens)
    compute_outweighs = memory_wait_s < params.min_gain_ratio * compute_wait_s * waiting_share
    if (compute_outweighs and not is_seen) or load.prefill_fill > params.max_prefill_fill:
        return verdict(False, COMPUTE_BINDS)
    if cannot_keep_up(load, params) and memory_wait_s <= merging_costs_s(load, params):
        return verdict(False, CANNOT_KEEP_UP)
    return verdict(True, "memory binds")


def _memory_wait_s(load: GroupLoad, params: OverloadParams) -> float:
    """Seconds until the whole queue has its memory."""
    missing = load.used_blocks + load.queue_need_blocks - load.capacity_blocks
    if load.freed_blocks_per_s is None or load.freed_blocks_per_s <= 0.0:
        predicted_s = math.inf if missing > 0 else 0.0
    else:
        predicted_s = max(0, missing) / load.freed_blocks_per_s
        if is_burst(load, params, if_unknown=False):
            predicted_s /= max(load.admitted_share, LEAST_ADMITTED_SHARE)
    if load.admitted_blocks_per_s is None:
        return predicted_s
    # Seen, and not predicted: while memory is full, running requests grow by as much as comes free.
    seen_s = load.queue_need_blocks / load.admitted_blocks_per_s if load.admitted_blocks_per_s > 0.0 else math.inf
    return max(predicted_s, seen_s)


def _compute_wait_s(load: GroupLoad) -> float:
    """Seconds until the whole queue has been prefilled; 0 where no rate is known."""
    if load.prefill_tokens_per_s is None or load.prefill_tokens_per_s <= 0.0:
        return 0.0
    return load.queued_prefill_tokens / load.prefill_tokens_per_s


def _foreseen_wait_s(load: GroupLoad, params: OverloadParams, compute_wait_s: float) -> float | None:
    """How long the requests that will lack memory one horizon from now would wait for it, seen before there is a queue.
    None where that is no reason to drop."""
    missing_soon = foreseen_missing_blocks(load, params)
    if missing_soon <= 0 or load.foreseen_s < params.min_foreseen_s:
        return None
    release = expected_release_per_s(load)
    missing_s = missing_soon / release if release else math.inf
    # What arrives until then has to be computed, too: a burst of long prompts binds both.
    compute_soon_s = max(0.0, compute_wait_s + arriving_compute_s(load, params) - params.horizon_s)
    binds = (
        missing_s - compute_soon_s >= params.surge_gain_s
        and missing_s >= params.min_gain_ratio * compute_soon_s
        and load.prefill_fill <= params.max_prefill_fill
        and not (cannot_keep_up(load, params) and missing_s <= merging_costs_s(load, params))
    )
    return missing_s if binds else None


def share_ahead_of_last(load: GroupLoad) -> float:
    """Of the prefill that waits, the share that comes before the last waiting request's own.

    That request computes its own prompt after it has got its memory, whatever it waits for; the prompt is taken to be
    of mean length.
    """
    if not load.queued_prefill_tokens or not load.num_waiting:
        return 1.0
    of_waiting = load.queued_prefill_tokens - load.unfinished_prefill_tokens
    return 1.0 - of_waiting / load.num_waiting / load.queued_prefill_tokens


def is_burst(load: GroupLoad, params: OverloadParams, *, if_unknown: bool) -> bool:
    """Whether much more has arrived lately than usually does."""
    return if_unknown if load.surge is None else load.surge >= params.min_surge


def least_gain_s(load: GroupLoad, params: OverloadParams) -> float:
    """Least wait that a drop must save. Less in a burst, which goes on for longer than it has lasted; a queue that
    arose by chance passes."""
    if not is_burst(load, params, if_unknown=True):
        return params.min_gain_s
    return min(params.surge_gain_s, params.min_gain_s) * params.min_surge / (load.surge or params.min_surge)


def why_queue_is_no_reason(
    num_waiting: int, used_blocks: int, head_need_blocks: int, capacity_blocks: int, blocked_s: float | None,
    params: OverloadParams,
) -> str | None:
    """Why the queue as it is cannot make the group overloaded; None if it can.

    ``blocked_s``: how long memory has kept the head out; None while it does not. Asked first, and of many groups: it
    needs none of the rates and predictions that the rest of a ``GroupLoad`` is made from.
    """
    if num_waiting == 0:
        return "nothing waits"
    if blocked_s is None or used_blocks + head_need_blocks <= max(1, capacity_blocks):
        return "memory does not bind"
    return "blocked for too short a time" if blocked_s < params.min_blocked_s else None


def foreseen_missing_blocks(load: GroupLoad, params: OverloadParams) -> float:
    """Blocks that will be missing in ``horizon_s`` if demand and release go on as they do; 0 outside a burst.

    High usage alone is no reason: usage must be on its way beyond the capacity. Where nothing has been released of late
    (answers take longer than the window of the rates), requests must arrive, and more than there is room for.
    """
    demand, released = load.demand_blocks_per_s, expected_release_per_s(load)
    if params.horizon_s <= 0.0 or not demand or released is None or demand < params.burst_ratio * released:
        return 0.0
    if not load.released_blocks_per_s:
        if not load.arriving_tokens_per_s:
            return 0.0
        # While no stay is known, what comes free is net of growth: this leaves arrivals.
        demand += min(0.0, load.freed_blocks_per_s or 0.0)
    wanted = load.used_blocks + load.queue_need_blocks + (demand - released) * params.horizon_s
    return max(0.0, wanted - load.capacity_blocks)


def expected_release_per_s(load: GroupLoad) -> float | None:
    """Blocks a second that ending requests give back. Where none has ended of late, the rate at which held blocks are
    foreseen to come free, as far as a stay is known (else 0). None while no rate is known.
    """
    if load.released_blocks_per_s is None or load.released_blocks_per_s > 0.0:
        return load.released_blocks_per_s
    return max(0.0, load.freed_blocks_per_s or 0.0)


def arriving_compute_s(load: GroupLoad, params: OverloadParams) -> float:
    """Seconds of prefill that arrive within the horizon; 0 while the rate is unknown."""
    if not load.prefill_tokens_per_s or load.arriving_tokens_per_s is None:
        return 0.0
    return load.arriving_tokens_per_s * params.horizon_s / load.prefill_tokens_per_s


def cannot_keep_up(load: GroupLoad, params: OverloadParams) -> bool:
    """Whether a merged group would need too large a share of its compute, and more than separate instances do.

    It may need no more: with little memory, small batches may cost separate instances as much as bubbles cost a
    pipeline.
    """
    merged, separate = load.merged_compute_load, load.separate_compute_load
    return merged is not None and merged > _most_compute(load, params) and (separate is None or merged > separate)


def merging_costs_s(load: GroupLoad, params: OverloadParams) -> float:
    """Seconds that a pipeline which cannot keep up falls behind while it lasts, that is, until its requests have left.

    A queue grows by the part of the compute load that is above what can be served, not by its excess over another load:
    where separate instances have compute to spare, a pipeline may use that up. A pipeline is meant for a burst, and the
    burst passes while its requests leave; where it does not, ``policy.restore`` yields. Infinite where the loss is too
    much, or not known, and for a group that yields.
    """
    merged, separate = load.merged_compute_load, load.separate_compute_load
    if not merged or separate is None or load.is_yielding:
        return math.inf
    if pipeline_loss(merged, separate) > params.max_loss:
        return math.inf
    most = _most_compute(load, params)
    return (merged - max(most, separate)) * max(params.least_merged_s, load.mean_stay_s)


def _most_compute(load: GroupLoad, params: OverloadParams) -> float:
    """Compute load that a merged group may have and still keep up."""
    is_surge = is_burst(load, params, if_unknown=False)
    return params.max_surge_compute_load if is_surge else params.max_compute_load
