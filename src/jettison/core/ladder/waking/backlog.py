"""Offline work by its price: views for ``policy.batchworth`` of the requests that instances without online requests
could do, and of what the other instances do of them.

The rung ``wake`` asks how many sleepers are to be woken for it, and which instances are kept awake before they are put
to sleep. Nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jettison.core.ladder.rung import Means
from jettison.core.ladder.waking.duework import LOOK_S, MEMORIES_S, DueWork
from jettison.core.serving.group import Group
from jettison.cost.stepwork import LONE_STEP, StepWork
from jettison.policy.batchworth import Backlog, BatchPrices
from jettison.types import NANOSECONDS, GroupId


class PricedWork:
    """Views of all offline work, for its price. It remembers what busy instances have done of it."""

    def __init__(self, means: Means, due_work: DueWork) -> None:
        self._means = means
        self._state = means.state
        self._due_work = due_work
        self._looked_ns: int | None = None
        self._done: dict[GroupId, int] = {}
        """By group with online requests: tokens of offline ones, at the last look."""
        self._busy_per_s: float | None = None
        """What all of them do together, as a mean over the last moments; None: not known yet."""
        self._view: Backlog | None = None

    @property
    def prices(self) -> BatchPrices:
        """What offline work is worth."""
        return self._state.params.awake.prices

    @property
    def is_there(self) -> bool:
        """Whether there is offline work, and it has a price or a floor. Cheap."""
        if not self.prices.are_there:
            return False
        state = self._state
        if state.stored_offline or state.changes.harvesting or any(s.is_offline for s in state.unplaced.values()):
            return True
        return any(state.groups[g].queues.waiting_offline for g in state.changes.queued)

    def idle(self) -> list[Group]:
        """The groups without online requests that take new requests."""
        return [g for g in self._means.moves.serving_groups() if not (g.queues.waiting or g.queues.serves_online)]

    def view(self, now_ns: int) -> Backlog | None:
        """The work as it was at the last look, at most ``LOOK_S`` ago; None while too little is known."""
        if not self.is_there:
            return None
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_S * NANOSECONDS:
            self._note_busy(now_ns)
            self._view = self._look()
        return self._view

    def _note_busy(self, now_ns: int) -> None:
        """Follow what instances with online requests do. Those that had none at one of two looks do not count."""
        before, before_ns = self._done, self._looked_ns
        busy = [g for g in self._means.moves.serving_groups() if g.queues.waiting or g.queues.serves_online]
        self._done, self._looked_ns = {g.group_id: self._tokens_of(g) for g in busy}, now_ns
        if before_ns is None or now_ns - before_ns > 4 * LOOK_S * NANOSECONDS:
            self._busy_per_s = None  # a look long ago says nothing of what there was to do meanwhile
            return
        took_s = (now_ns - before_ns) / NANOSECONDS
        rate = sum(num - before[g] for g, num in self._done.items() if g in before) / took_s
        kept = 0.0 if self._busy_per_s is None else math.exp(-took_s / MEMORIES_S[0])
        self._busy_per_s = kept * (self._busy_per_s or 0.0) + (1.0 - kept) * rate

    def _tokens_of(self, group: Group) -> int:
        self._state.catch_up(group.group_id)
        fresh = group.counters.fresh
        return fresh.offline_prompt + fresh.offline_output

    def _look(self) -> Backlog | None:
        limits, predictor = self._state.limits, self._state.predictor
        prefill, step_s = predictor.prefill_tokens_per_s(limits.max_num_batched_tokens), predictor.taking(LONE_STEP)
        extents = self._due_work.extents()
        num = sum(extent.num_requests for extent in extents)
        if not prefill or step_s is None or self._busy_per_s is None or not num:
            return None
        prompt = sum(extent.num_requests * extent.prompt_tokens for extent in extents) / num
        output = sum(extent.num_requests * extent.output_tokens for extent in extents) / num

        def decode_s(each: float) -> float:
            return step_s(StepWork.decodes(math.ceil(each), round(each * (prompt + output / 2.0))))

        return Backlog(
            num, len(self._done), prompt, output, self._due_work.batch_size(prompt + output), 1.0 / prefill, decode_s,
            self._busy_per_s, sum(extent.num_tokens for extent in extents),
        )


def as_fields(backlog: Backlog, prices: BatchPrices, num: int) -> dict[str, object]:
    """A decision that ``num`` instances are to be awake for this work, and its inputs, for the event log."""
    fields: dict[str, object] = {
        "instances_worth": num, "offline_requests": round(backlog.num_requests),
        "busy_tokens_per_s": backlog.busy_tokens_per_s, "tokens_per_s": backlog.tokens_per_s(num),
        "next_tokens_per_s": backlog.tokens_per_s(num + 1) - backlog.tokens_per_s(num),
        "price_device_second": prices.device_second, "price_batch_token": prices.batch_token,
    }  # fmt: skip
    if prices.floor_tokens_per_s:
        fields["batch_floor"] = prices.floor_tokens_per_s
    return fields


def woken_fields(backlog: Backlog, prices: BatchPrices, num_awake: int, wakes_s: Sequence[float]) -> dict[str, object]:
    """The same where sleepers are woken beside ``num_awake`` instances, which takes so many seconds each."""
    fields = as_fields(backlog, prices, num_awake + len(wakes_s))
    more = backlog.tokens_per_s(num_awake + len(wakes_s)) - backlog.tokens_per_s(num_awake)
    return fields | {"instances_awake": num_awake, "gained_tokens_per_s": more}
