"""Fast-forward: decode steps of a group between which nothing is decided are reported together.

For simulation. Most of a request's life is decode steps in which every running request of its group gets one token, and
nothing else happens. A driver in virtual time need not report them one by one: ``most_steps`` says how many steps, from
the one in flight on, the group would plan again with the same rows, whatever time the executor takes; ``advance``
commits so many of them at once. Afterwards the books are as if every step had been reported.

It is possible only while the cluster is quiet: no move, no recovery, no pipeline and no queue that memory blocks, for
those look at the clock or at other groups after each step. Before the core reads the books of a group in a quiet
cluster (to dispatch, to rebalance, on a tick) it calls ``ClusterState.catch_up``, which has to ``advance`` the
group to now. The core has all groups advanced before it asks how long a step takes, which is learned from all of their
steps: an event in a quiet cluster may be the first to swap. Before any event but arrivals, ticks and steps of other
groups the driver itself advances all groups. ``due_ns`` says when a policy looks at all groups after the next step.

Only the ids of steps may differ from a run in which every step is reported, and nothing keeps these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jettison.core.ladder.climb import Ladder
from jettison.core.ladder.hooks import Calm
from jettison.core.load.views import Loads
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.recovering import Recoveries
from jettison.core.ports import RunStep, StepRow
from jettison.core.serving.group import Group
from jettison.core.serving.repeating import repeat
from jettison.core.state import ClusterState
from jettison.policy.batching import BlockedBy
from jettison.types import GroupId


class FastForward:
    """The interface of ``ClusterCore`` for drivers in virtual time; only ``advance`` changes books."""

    def __init__(
        self, state: ClusterState, loads: Loads, moves: Moves, recoveries: Recoveries, migrations: Migrations,
        ladder: Ladder,
    ) -> None:
        self._state = state
        self._loads = loads
        self._moves = moves
        self._recoveries = recoveries
        self._migrations = migrations
        self._ladder = ladder

    @property
    def is_quiet(self) -> bool:
        """Whether no step of one group could decide about another: no move, recovery or migration is under way, no
        request is unplaced or distrusted, no group is a pipeline, memory blocks no queue's head, and no rung may decide
        at any moment."""
        return self._is_quiet(self._ladder.decides_nothing_before())

    def _is_quiet(self, calm: Calm) -> bool:
        """``is_quiet``, given the ladder's answer, so that ``most_steps`` asks the ladder only once."""
        return (
            self._moves.is_idle and self._recoveries.is_idle and self._migrations.is_idle
            and not self._state.unplaced and not self._state.distrusted and not self._state.pipelines
            and calm.until_ns != 0
            and not any(
                self._state.groups[g].head_blocked_by is BlockedBy.MEMORY for g in self._state.changes.queued
            )
        )  # fmt: skip

    @property
    def due_ns(self) -> int | None:
        """The time (ns) from which a rung may decide something after a step; 0: at any moment, None: never. The driver
        must report the first step that ends then or later by itself, with all groups caught up."""
        return self._ladder.decides_nothing_before().until_ns

    def most_steps(self, group_id: GroupId) -> int:
        """How many steps of a group, the one in flight included, may be reported together by ``advance``: as many as
        end no request and find free blocks, with blocks left for the further steps that rungs want room for.

        0 if the step in flight has to be reported by itself: the cluster is not quiet, another group uses the group's
        worker, or the group's next plan could be another one. The step after the last of these is in flight then and is
        reported as usual: it may end a request, or need a decision.
        """
        group, calm = self._state.groups[group_id], self._ladder.decides_nothing_before()
        if not self._is_quiet(calm) or self._shares_worker(group) or not _is_steady(group):
            return 0
        (flight,) = group.in_flight.values()
        most = _steps_left(flight.step.rows, self._state.limits.max_model_len)
        if most < 1:
            return 0
        (worker_id,) = group.worker_ids
        room = self._state.workers[worker_id].ledger.num_free
        size, tables = group.limits.block_size, group.blocks.ledgers[0].tables
        slots = [len(tables[row.state.request_id].ids) * size - row.context_len - 1 for row in flight.step.rows]
        if _growth_within(slots, most + calm.num_steps, size) <= room:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = _growth_within(slots, middle + calm.num_steps, size) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _shares_worker(self, group: Group) -> bool:
        """Whether another group uses a worker of this one: its blocks come from the same ledger."""
        return any(len(self._state.groups_of[w]) > 1 for w in group.worker_ids)

    def advance(self, group_id: GroupId, ends_ns: Sequence[int], token_id: int) -> RunStep:
        """Commit the step in flight and the following ones, which have ended at these times (ns, ascending) and in
        which every row got ``token_id``. They are at most as many as ``most_steps`` answered when the first one began.

        The predictor and the group's monitor learn of the steps. Where the group took blocks, rungs are told that it
        changed; it is not planned again for that. Returns the step that is in flight now, issued at the last of the
        times; it keeps the id of the previous one.
        """
        group = self._state.groups[group_id]
        (flight,) = group.in_flight.values()
        (worker_id,) = group.worker_ids
        times_ns = [flight.issued_ns, *ends_ns]
        self._loads.note_steps(group, flight.work, times_ns)
        self._state.next_step_id += len(ends_ns)
        # Its growth is no reason to plan the group again: it has a step in flight.
        ledgers = self._state.changes.ledgers
        was_changed = worker_id in ledgers
        fresh = group.counters.fresh
        num_before = fresh.num_offline
        step, grown = repeat(group, len(ends_ns), token_id, ends_ns[-1])
        fresh.note_step(num_before, ends_ns[-1])
        if not was_changed:
            ledgers.discard(worker_id)
        if grown:
            self._loads.monitor(group).note_growth(group, [ends_ns[number - 1] for number in grown])
            self._ladder.note_touched((group_id,))
        return step


def _is_steady(group: Group) -> bool:
    """Whether the step in flight is the group's only one and decodes one token of every running request, and the next
    plan could do nothing else: no request waits, moves, is a suspect or is stranded; no hold and no incoming KV binds
    the group; prefixes are not cached, it keeps no slice, and the step's time does not bound its content.

    A step with safepoints is reported by itself: how many the next one has is predicted from all steps that ended
    before. So is every step where groups plan ahead: two are under way then, each begins when the other ends, and one
    that was late would have to be told apart from one that was not.
    """
    queues = group.queues
    if len(group.in_flight) != 1 or queues.has_waiting or queues.moving or queues.suspects or group.stranded:
        return False
    if group.paused or group.holds_preemption or group.blocks.landing or group.limits.enable_prefix_caching:
        return False
    if group.shares_steps or group.limits.steps_ahead or group.slices.kept is not None:
        return False
    (flight,) = group.in_flight.values()
    rows = flight.step.rows
    if flight.step.safepoint_layers:
        return False
    if len(rows) != len(queues.running) or flight.work.num_tokens != len(rows):
        return False
    return all(row.samples for row in rows)


def _steps_left(rows: Iterable[StepRow], max_model_len: int) -> int:
    """How many steps, the one in flight included, leave all of these decoding requests running. 0 where one of them has
    no first token, is held, wants logprobs of its prompt, or could end at an end-of-sequence or stop token."""
    most = max_model_len
    for state, *_ in rows:
        params = state.request.params
        is_plain = (
            state.first_token_ns is not None and not state.holds and state.prompt_logprobs is None
            and params.ignore_eos and not params.stop_token_ids
        )  # fmt: skip
        if not is_plain:
            return 0
        left = params.max_tokens - state.num_tokens + state.num_prompt
        if left < most:
            most = left
        if max_model_len - state.num_tokens < most:
            most = max_model_len - state.num_tokens
    return most - 1


def _growth_within(slots: Sequence[int], num_steps: int, block_size: int) -> int:
    """Blocks that rows take while ``num_steps`` more steps of one token each are planned. ``slots``: for each row, the
    free token slots of its blocks behind the step in flight."""
    return sum([-((held - num_steps) // block_size) for held in slots if held < num_steps])
