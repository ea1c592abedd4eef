"""Knowledge of load: monitors of groups and traffic, step times, and the views that policies decide by.

Nothing is decided here and nothing is started: the rungs of ``core.ladder`` read these views, ``core.cluster`` feeds
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jettison.core.load.answers import OfflineAnswers
from jettison.core.load.computeloads import ComputeLoads
from jettison.core.load.monitor import TRAFFIC_WINDOW_NS, GroupMonitor, Stays, TrafficMonitor
from jettison.core.load.outlook import Outlook
from jettison.core.load.samples import TickTimes
from jettison.core.ports import RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.stepwork import StepWork, last_stage_of, period_of, step_of
from jettison.memory.kvtransfers import MAX_PIECE_BYTES, MAX_PIECE_NS
from jettison.policy.exchange import ExchangeCosts, LinkId
from jettison.policy.links import Links
from jettison.policy.overload import Pressure, memory_binds, memory_will_bind
from jettison.policy.refusal import predicted_wait_s
from jettison.types import NANOSECONDS, GroupId, WorkerId


class Loads:
    """Everything that is measured of a cluster's load: the core feeds it with events, rungs read it."""

    def __init__(self, state: ClusterState) -> None:
        self.ticks = TickTimes()
        self.traffic = TrafficMonitor(self.ticks)
        """Traffic of online requests, by which policies decide."""
        self.offline_traffic = TrafficMonitor(self.ticks)
        self.offline_answers = OfflineAnswers()
        self._state = state
        self._monitors: dict[GroupId, GroupMonitor] = {}
        self.kept_out: set[GroupId] = set()
        """Groups whose queue memory has kept out since some event before this one."""
        self._num_dissolved = 0
        """Groups dissolved when monitors were last forgotten."""
        self.compute = ComputeLoads(state, self.traffic)
        self.outlook = Outlook(state, self.traffic)
        """What forecasts are made from."""
        self._waiting_since_ns: int | None = None
        """Since when online requests have waited without a break."""

    # --- feeding ----------------------------------------------------------------------------------------------

    def note_tick(self, now_ns: int) -> None:
        """Note a tick: it sees the totals that were noted before it (``core.load.samples``)."""
        self.ticks.add(now_ns)

    def note_ticks(self, times_ns: Sequence[int]) -> None:
        """Note several ticks, at these times, between which nothing has changed."""
        self.ticks.add_all(times_ns)

    def note_group(self, group: Group, now_ns: int) -> None:
        """Follow a group that an event has touched, at the event's end: its totals, and since when memory keeps its
        queue out. While it does, the group is in ``kept_out``."""
        monitor = self.monitor(group)
        monitor.note_blocked(group, now_ns)
        monitor.note_totals(group)
        if monitor.blocked_since_ns is None:
            self.kept_out.discard(group.group_id)
        else:
            self.kept_out.add(group.group_id)

    def note_waiting(self, waits: bool, now_ns: int) -> None:
        """Follow since when online requests have been waiting without a break; called at every event's end. ``waits``:
        one waits now, in a queue or without a group."""
        if not waits:
            self._waiting_since_ns = None
        elif self._waiting_since_ns is None:
            self._waiting_since_ns = now_ns

    def predicted_wait_s(self, now_ns: int) -> float:
        """Seconds that an online request that came now would wait, behind all waiting ones: their blocks, at the rate
        at which groups have admitted blocks since requests wait, or in the traffic's window if that is shorter. 0.0
        where none waits. Where none was admitted, as long as requests have waited already."""
        if self._waiting_since_ns is None:
            return 0.0
        state, waited_ns = self._state, now_ns - self._waiting_since_ns
        # Requests admitted before there was a queue came at their own rate, which says nothing of how fast a queue
        # moves.
        window_ns = min(TRAFFIC_WINDOW_NS, waited_ns)
        known = [self._monitors[g] for g in state.groups if g in self._monitors]  # asking must change nothing
        let_in_per_s = sum(monitor.let_in_per_s(window_ns) for monitor in known)
        unplaced = sum(-(-s.num_tokens // state.limits.block_size) for s in state.unplaced_online())
        queued = sum(state.groups[g].queues.queued_blocks() for g in state.changes.queued_online)
        return predicted_wait_s(queued + unplaced, let_in_per_s, waited_ns / NANOSECONDS)

    def note_totals(self, group: Group) -> None:
        """Note a group's totals alone, where a tick comes before the event that touched the group has been followed
        up."""
        self.monitor(group).note_totals(group)

    def _traffic_of(self, state: RequestState) -> TrafficMonitor:
        return self.offline_traffic if state.is_offline else self.traffic

    def note_accepted(self, state: RequestState) -> None:
        """Count a request that was accepted in its class's traffic; of an offline one, note whether it has a
        deadline."""
        self._traffic_of(state).note_arrival(state.num_prompt)
        if state.is_offline:
            self.offline_answers.note_accepted(state)

    def note_arrival(self, group: Group, state: RequestState) -> None:
        """Count the blocks of a new request's prompt, less the share that the prefix cache usually spares, as arrived
        in the group that it was dispatched to. Offline requests do not count. A request that
        changes its queue later is no new demand."""
        if state.is_offline:
            return
        fresh = group.limits.blocks_for(state.num_prompt) * (1.0 - self.traffic.prefix_hit_share)
        self.monitor(group).num_arrived_blocks += round(fresh)

    def note_first_token(self, state: RequestState) -> None:
        """Count the prompt of a request that has got its first token as computed, in its class's traffic."""
        self._traffic_of(state).note_prompt(state.num_prompt, state.num_cached)

    def note_end(self, group: Group, state: RequestState, now_ns: int) -> None:
        """Count a request that has produced its last token in its class's traffic: the length of its answer, the time
        since it was first scheduled and, if it has no output, its prompt. An offline answer also counts in its batch.
       """
        traffic = self._traffic_of(state)
        traffic.note_end(state.num_output)
        if state.is_offline:
            self.offline_answers.note_end(state)
        if not state.num_output:  # no token has shown that its prompt is computed
            traffic.note_prompt(state.num_prompt, state.num_cached)
        if state.first_scheduled_ns is not None:
            stay_s = (now_ns - state.first_scheduled_ns) / NANOSECONDS
            first, last = group.limits.blocks_for(state.num_prompt), group.limits.blocks_for(state.num_tokens)
            traffic.note_stay(first, last, stay_s)

    def note_cut_short(self, state: RequestState) -> None:
        """Count the tokens so far of a request that ends before its answer is complete as an answer. Nothing where it
        has none."""
        if state.num_output:
            self._traffic_of(state).note_end(state.num_output)
            if state.is_offline:
                self.offline_answers.note_end(state)

    def note_step(
        self, group: Group, step: RunStep, work: StepWork, issued_ns: int, compute_ns: int, now_ns: int
    ) -> None:
        """A step of the group has ended, of which its last stage has computed for ``compute_ns``. The predictor learns
        its time; the monitor learns when it ended.

        Of a pipeline, the predictor learns the step's way through all stages, the last stage's time and, if all stages
        have been busy since the step before ended, the time between both ends (the period).
        """
        monitor = self.monitor(group)
        since_ns, monitor.step_ended_ns = monitor.step_ended_ns, now_ns
        num_stages, observe = len(group.stages), self._state.predictor.observe
        if num_stages == 1:
            observe(work, (issued_ns, now_ns), group.group_id)
            return
        observe(work, (issued_ns, now_ns), group.group_id, step_of(num_stages))
        last_stage = last_stage_of(num_stages, len(group.stages[-1].layers))
        observe(work, (now_ns - compute_ns, now_ns), group.group_id, last_stage)
        if since_ns is not None and len(group.in_flight) >= num_stages and all(
            flight.issued_ns <= since_ns for flight in group.in_flight.values()
        ):
            observe(work, (since_ns, now_ns), group.group_id, period_of(num_stages))

    def note_untimed(self, group: Group) -> None:
        """A step of the group has ended whose time is not that of such steps: nothing is learned from it, nor from the
        time to the next end."""
        self.monitor(group).step_ended_ns = None

    def note_steps(self, group: Group, work: StepWork, times_ns: Sequence[int]) -> None:
        """Decode steps of a group of one stage have followed each other; the predictor and the monitor learn of all of
        them. The first, of this work, was issued at the first of the times (ns); each ended, and the next was issued,
        at the next time."""
        monitor = self.monitor(group)
        self._state.predictor.observe(work, times_ns, group.group_id)
        monitor.step_ended_ns = times_ns[-1]

    def note_settled(self, worker_ids: tuple[WorkerId, ...], now_ns: int, *, failed: bool = False) -> None:
        """A move that touched these workers has ended: their groups' dwell times begin. If the move ``failed``, the
        next dwell time is longer; if not, it has its usual length again."""
        touched = {g.group_id: g for w in worker_ids for g in self._state.groups_of[w]}
        for group in touched.values():
            monitor = self.monitor(group)
            monitor.settled_since_ns = now_ns
            monitor.num_failures = monitor.num_failures + 1 if failed else 0

    def forget_dissolved(self) -> None:
        """Drop the monitors of dissolved groups, which are no longer ``kept_out`` either. O(1) where no group was
        dissolved since the last call."""
        if self._num_dissolved != self._state.num_dissolved:
            self._num_dissolved = self._state.num_dissolved
            for group_id in [g for g in self._monitors if g not in self._state.groups]:
                del self._monitors[group_id]
            self.kept_out &= self._monitors.keys()

    # --- reading ----------------------------------------------------------------------------------------------

    def monitor(self, group: Group) -> GroupMonitor:
        """The monitor of a group; an empty one is made where the group has none."""
        found = self._monitors.get(group.group_id)
        if found is None:
            found = self._monitors[group.group_id] = GroupMonitor(self.ticks)
        return found

    def blocks_beside_step(self, group: Group, time_share: float) -> int | None:
        """How many blocks can be copied to or from the host so that a step like the group's last one (without one in
        flight, its next decodes) takes at most ``time_share`` longer, at most as many as a host pool holds. The step
        waits for the copies. None while too little is known."""
        return self.blocks_within(group, lambda step_s: (1.0 + time_share) * step_s)

    def blocks_within(
        self, group: Group, bound_s: Callable[[float], float], *, beside_steps: bool = False
    ) -> int | None:
        """How many blocks can be copied to or from the host so that a step like the group's last one (without one in
        flight, its next decodes) takes at most ``bound_s`` of its time without copies. At most as many as a host pool
        holds; None while too little is known.

        ``beside_steps``: copies run during the step, and no more than the link is known to carry in that time; else the
        step waits for them.
        """
        state, part = self._state, step_of(len(group.stages))
        last = next(reversed(group.in_flight.values()), None)
        work = self._microbatch(group) if last is None else last.work._replace(num_copied_bytes=0, num_beside_bytes=0)
        step_s = state.predictor.predict_s(work, part)
        if step_s is None:
            return None
        block_bytes = state.shape.num_layers * state.shape.block_bytes_per_layer(state.limits.block_size)
        kind, most = "num_copied_bytes", state.params.swap.num_host_slots
        if beside_steps:
            kind, most = "num_beside_bytes", self._most_beside(group, bound_s(step_s), most)
        return state.predictor.largest_batch(
            bound_s(step_s), most, lambda num_blocks: work._replace(**{kind: num_blocks * block_bytes}), part
        )

    def _most_beside(self, group: Group, seconds: float, most: int) -> int:
        """Blocks that the host links of all the group's workers carry in ``seconds``, at most ``most``; ``most`` where
        their rate is not known."""
        block_s = self.copied_beside_s(group, 1)
        return int(min(most, seconds / block_s)) if block_s > 0.0 else most

    def copied_beside_s(self, group: Group, num_blocks: int) -> float:
        """Seconds that copies of ``num_blocks`` beside steps take on the host link of the worker with most layers; 0.0
        without a profile, as the rate is not known."""
        state, profile = self._state, self._state.params.profile
        if profile is None:
            return 0.0
        layer_bytes = state.shape.block_bytes_per_layer(state.limits.block_size)
        largest = max(len(stage.layers) for stage in group.stages) * layer_bytes
        return num_blocks * largest / profile.copies_beside_bytes_per_s

    def copies_stall_s(self, group: Group, num_blocks: int, *, beside_steps: bool) -> float | None:
        """Seconds by which ``num_blocks`` copied to or from the host make the group's steps longer, all together. Steps
        wait for the copies, or run beside them. None while too little is known."""
        state, part = self._state, step_of(len(group.stages))
        work = self._microbatch(group)
        num_bytes = num_blocks * state.shape.num_layers * state.shape.block_bytes_per_layer(state.limits.block_size)
        kind = "num_beside_bytes" if beside_steps else "num_copied_bytes"
        without_s = state.predictor.predict_s(work, part)
        with_s = state.predictor.predict_s(work._replace(**{kind: num_bytes}), part)
        return None if without_s is None or with_s is None else with_s - without_s

    def has_settled_since(self, group: Group, since_ns: int) -> bool:
        """Whether a move of the group's workers has ended since then."""
        settled_ns = self.monitor(group).settled_since_ns
        return settled_ns is not None and settled_ns > since_ns

    def has_dwelled(self, group: Group, now_ns: int) -> bool:
        """Whether the group's last move ended long enough ago for the next drop; True where it had none."""
        monitor = self.monitor(group)
        since = monitor.settled_since_ns
        return since is None or now_ns - since >= monitor.patience(self._state.params.drop_dwell_s) * NANOSECONDS

    def memory_binds(self, group: Group, now_ns: int) -> bool:
        """Whether memory has kept the head of the group's queue out for long enough to count or, where settings look
        ahead, will within their horizon."""
        monitor, horizon_s = self.monitor(group), self._state.params.overload.horizon_s
        rates = monitor.rates() if horizon_s > 0.0 else None
        if rates is not None and memory_will_bind(
            group.blocks.num_used, rates.demanded, rates.released, group.blocks.capacity, horizon_s
        ):
            return True
        return memory_binds(
            len(group.queues.waiting), group.blocks.num_used, monitor.head_need_blocks(group), group.blocks.capacity,
            monitor.blocked_s(now_ns), self._state.params.overload,
        )

    def pressed(self) -> list[GroupId]:
        """Ids of the groups that memory may bind, in order: those whose queue it keeps out; where settings look ahead,
        all."""
        foresees = self._state.params.overload.horizon_s > 0.0
        return list(self._state.groups) if foresees else sorted(self.kept_out)

    def pressure(self, group: Group, now_ns: int) -> Pressure:
        """How hard memory presses on a group, and whether a drop was declined of late."""
        monitor = self.monitor(group)
        return Pressure(
            (group.blocks.num_used + monitor.head_need_blocks(group)) / max(1, group.blocks.capacity),
            monitor.memory_wait_s(group, now_ns, self.stays), monitor.refusal(now_ns),
        )

    @property
    def stays(self) -> Stays:
        """Mean seconds that a block of each class's requests has stayed of late; None for a class without an ended
        request."""
        return Stays(self.traffic.mean_stay_s, self.offline_traffic.mean_stay_s)

    def settled_s(self, group: Group, now_ns: int) -> float:
        """Seconds since the group's last move ended; 0.0 where it had none."""
        since = self.monitor(group).settled_since_ns
        return 0.0 if since is None else (now_ns - since) / NANOSECONDS

    def num_kept_waiting(self, group: Group) -> int:
        """Requests of a group that run in no step: those that wait, those that move, and online ones at the host."""
        queues = group.queues
        stored = sum(not s.is_offline for s in queues.stored.values())
        return len(queues.waiting) + len(queues.moving) + stored

    def recompute_block_s(self, group: Group) -> float | None:
        """Seconds to prefill the tokens of one block again, all members working; None: not known."""
        rate = self._recomputed_tokens_per_s(group, self._mean_tokens(group), 1)
        return None if not rate else self._state.limits.block_size / (rate * len(group.stages))

    def _recomputed_tokens_per_s(self, group: Group, num_tokens: int, num_stages: int) -> float | None:
        """Tokens a second at which requests of ``num_tokens`` are prefilled again on a group of ``num_stages`` stages;
        None while too little is known."""
        budget = self._state.limits.max_num_batched_tokens
        # A request longer than the budget is computed in chunks; on average half of the other tokens precede a chunk.
        return self._state.predictor.prefill_tokens_per_s(
            budget, num_stages=num_stages, prompt_tokens=num_tokens, num_context=max(0, num_tokens - budget) // 2
        )

    def _mean_tokens(self, group: Group) -> int:
        """Mean tokens with KV of the group's running and moving requests; at least 1."""
        num_requests = len(group.queues.running) + len(group.queues.moving)
        return max(1, group.blocks.num_used * self._state.limits.block_size // max(1, num_requests))

    def exchange_costs(self, group: Group) -> ExchangeCosts:
        """Prices of an exchange, as known so far: links as measured by ended transfers (before any: as profiled, or as
        measured at the start), computing tokens of the group's requests again and a decode step of it as predicted, and
        the profiled round trip of a link, at least the usual one."""
        num_stages, mean_tokens = len(group.stages), self._mean_tokens(group)
        params = self._state.params
        assumed, round_trip_s = params.profiled_link or (None, 0.0)
        machine = Links(params.machine_of).machine
        usual = ExchangeCosts()

        def recompute_s(num_tokens: int) -> float | None:
            rate = self._recomputed_tokens_per_s(group, min(num_tokens, mean_tokens), num_stages)
            return None if rate is None else num_tokens / rate

        def rate_of(link: LinkId) -> float | None:
            rate = self._state.link_rate(link).bytes_per_s or assumed
            return rate or params.networks.get((machine(link[0]), machine(link[1])))

        microbatch, shape = self._microbatch(group), self._state.shape
        return ExchangeCosts(
            rate_of,
            recompute_s,
            self._state.predictor.predict_s(microbatch, step_of(num_stages)),
            max(usual.round_trip_s, round_trip_s),
            microbatch.num_rows * 2 * shape.num_heads * shape.head_dim * shape.dtype_bytes,  # queries, and answers
            lambda link: min(MAX_PIECE_BYTES / (rate_of(link) or math.inf), MAX_PIECE_NS / NANOSECONDS) / 2,
        )

    def _microbatch(self, group: Group) -> StepWork:
        """The work of one decode microbatch: the group's running and moving requests, at least one, and their KV,
        divided among its stages."""
        num_stages = len(group.stages)
        rows = max(1, (len(group.queues.running) + len(group.queues.moving)) // num_stages)
        return StepWork.decodes(rows, group.blocks.num_used * self._state.limits.block_size // num_stages)
