"""When workers fall asleep by themselves: views for ``policy.dozing``, and orders. The rung ``wake`` asks on ticks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from jettison.core.ladder.prompts import num_for_arrivals
from jettison.core.ladder.rung import Means
from jettison.core.ports import Action
from jettison.core.serving.group import Group
from jettison.cost.stepwork import StepWork
from jettison.policy.dozing import IdleGroup, OfflineWork, choose_sleepers, misses_deadline, next_patience
from jettison.types import NANOSECONDS, GroupId, WorkerId

LEVEL = 2
"""Of sleep: those who stay awake have all parameters, or nobody goes."""


class Dozing:
    """Remembers since when each group has had no online request."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self._empty_since_ns: dict[GroupId, int] = {}
        self._calm_since_ns = 0
        """Since when there has been no pressure."""
        self._has_begun = False
        self._patience = 1
        """For so many times ``--sleep-after-s`` the need must have been gone."""
        self._slept_since_ns: dict[WorkerId, int] = {}
        """Those that were put to sleep here."""

    @property
    def _after_s(self) -> float:
        return self._patience * self._state.params.awake.after_s

    def note_woken(self, worker_id: WorkerId, now_ns: int) -> None:
        """One was needed again: where it had slept for a moment only, the next one is put to sleep later."""
        if (since_ns := self._slept_since_ns.pop(worker_id, None)) is not None:
            slept_s = (now_ns - since_ns) / NANOSECONDS
            self._patience = next_patience(self._patience, slept_s, self._state.params.awake.after_s)

    @property
    def awaits_tick(self) -> bool:
        """Somebody may fall asleep although nothing but time has passed."""
        awake = self._state.params.awake
        if not self._has_begun and awake.max_awake is not None:
            return True
        return awake.falls_asleep and bool(self._empty_since_ns) and len(self._serving()) > awake.min_awake

    def note_changed(self, now_ns: int) -> None:
        """At the end of an event, of the groups that it has touched."""
        for group in self._state.changed_groups():
            if group.queues.waiting or group.queues.serves_online:
                self._empty_since_ns.pop(group.group_id, None)
            else:
                self._empty_since_ns.setdefault(group.group_id, now_ns)

    def _serving(self) -> list[WorkerId]:
        """Workers that serve, and are to go on."""
        leaving = set(self._means.sleepers.leaving)
        return [w for w, groups in self._state.groups_of.items() if groups and w not in leaving]

    # --- orders -----------------------------------------------------------------------------------------------

    def advance(self, why_pressed: Callable[[], str | None], now_ns: int) -> list[Action]:
        """On a tick: put to sleep who may, one after the other. ``why_pressed``: why nobody may; None: who may may."""
        awake, actions = self._state.params.awake, list[Action]()
        if not self._has_begun:
            self._has_begun = True
            surplus = len(self._serving()) - (awake.max_awake or math.inf)
            while surplus > 0 and (order := self._sleep(self._serving()[-1], "--max-awake", now_ns)):
                actions += order
                surplus -= 1
        if not awake.falls_asleep:
            return actions
        if why_pressed() is not None:
            self._calm_since_ns = now_ns
            return actions
        for group_id in self._choose(now_ns):
            (worker_id,) = self._state.groups[group_id].worker_ids
            if order := self._sleep(worker_id, f"no online request for {self._after_s:g} s", now_ns):
                self._slept_since_ns[worker_id] = now_ns
                actions += order
        return actions

    def _choose(self, now_ns: int) -> list[GroupId]:
        state, awake, serving = self._state, self._state.params.awake, self._serving()
        if len(serving) <= awake.min_awake:
            return []
        self._empty_since_ns = {g: ns for g, ns in self._empty_since_ns.items() if g in state.groups}
        idle: list[IdleGroup] = []
        for group in state.groups.values():
            if not self._may_leave(group):
                continue
            since_ns = max(self._empty_since_ns.setdefault(group.group_id, now_ns), self._calm_since_ns)
            idle.append(IdleGroup(group.group_id, (now_ns - since_ns) / NANOSECONDS))
        chosen = choose_sleepers(idle, len(serving), awake.min_awake, self._after_s, self._means.ask_closed())
        if chosen:
            staying = [g for g in state.groups.values() if g.group_id not in chosen]
            num_least = num_for_arrivals(state, self._means.loads, staying)
            chosen = chosen[: max(0, len(serving) - num_least)]
        while chosen and misses_deadline(self._offline_work(now_ns), len(serving) - len(chosen)):
            chosen.pop()
        return chosen

    def _may_leave(self, group: Group) -> bool:
        queues = group.queues
        if len(group.stages) > 1 or queues.waiting or queues.serves_online or self._means.moves.is_moving(group):
            return False
        return not set(self._means.migrations.worker_ids) & set(group.worker_ids)

    def _sleep(self, worker_id: WorkerId, reason: str, now_ns: int) -> list[Action]:
        """Nothing where it cannot go now."""
        if self._means.sleepers.why_not([worker_id], LEVEL) is not None:
            return []
        self._state.catch_up_all()  # what it hands on is dealt out by what others hold
        return self._means.sleepers.sleep([worker_id], LEVEL, now_ns, reason)

    # --- offline work -----------------------------------------------------------------------------------------

    def _offline_work(self, now_ns: int) -> list[OfflineWork]:
        """Accepted offline requests that have a deadline, and what is stored and has yet to be accepted."""
        found: list[OfflineWork] = []
        num_accepted: Counter[int] = Counter()
        for state in self._state.requests.values():
            due_ns = state.request.deadline_ns
            if state.is_offline and due_ns is not None:
                num_accepted[due_ns] += 1
                work_s = self._work_s(
                    state.num_tokens, state.num_tokens - state.num_computed, state.num_output,
                    state.request.params.max_tokens,
                )
                found.append(OfflineWork((due_ns - now_ns) / NANOSECONDS, work_s))
        for work in self._state.stored_offline:
            num_left = work.num_requests - num_accepted[work.deadline_ns]
            num_accepted[work.deadline_ns] = max(0, -num_left)  # of other work that is due at the same time
            if num_left > 0:
                prompt, longest = work.num_prompt_tokens / work.num_requests, work.max_output_tokens / work.num_requests
                work_s = num_left * self._work_s(prompt, prompt, 0, longest)
                found.append(OfflineWork((work.deadline_ns - now_ns) / NANOSECONDS, work_s))
        return found

    def _work_s(self, num_tokens: float, num_to_compute: float, num_output: int, longest: float) -> float:
        """Seconds of one instance that is full of such requests; infinite while nothing is known of steps."""
        limits, predictor = self._state.limits, self._state.predictor
        profile, traffic = self._state.params.profile, self._means.loads.offline_traffic
        expected = min(longest, traffic.mean_output_tokens) if traffic.num_ended else longest
        num_more = max(1.0, expected - num_output)
        _, least_blocks = self._state.alive_workers()
        fitting = int(least_blocks * limits.block_size / (num_tokens + num_more))
        batch = max(1, min(limits.max_num_seqs, (profile and profile.batch_limit(1)) or limits.max_num_seqs, fitting))
        step_s = predictor.predict_s(StepWork.decodes(batch, round(batch * num_tokens)))
        prefill = predictor.prefill_tokens_per_s(limits.max_num_batched_tokens)
        if step_s is None or not prefill:
            return math.inf
        return max(0, num_to_compute) / prefill + num_more * step_s / batch
