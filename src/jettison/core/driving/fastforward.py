"""Fast-forward: decode steps of a group between which nothing is decided, told of together.

For simulation. Most of a request's life is decode steps in which every running request of its group gets one token, and
nothing else happens. A driver in virtual time need not tell of them one by one: ``most_steps`` says how many
steps, from the one in flight on, the group would plan again with the same rows, whatever the executor takes for them;
``advance`` commits so many of them at once. The books are afterwards what they would be had every step been told of.

It is possible only while the cluster is quiet: no move, no recovery, no pipeline and no queue that memory blocks,
for those look at the clock or at other groups after each step. Before the core reads the books of a group in a quiet
cluster (to dispatch, to rebalance, on a tick) it calls ``ClusterState.catch_up``, which has to ``advance`` the group
to now. It has all groups advanced before it asks how long a step takes, which is learned from all of their steps: an
event in a quiet cluster may be the first to swap. Before any event but arrivals, ticks and steps of other groups the
driver does so by itself, for all groups.
``due_ns`` says when a policy looks at all groups after whatever step comes first.

What one step less told of does not change: ids of steps, which nothing keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.core.ladder.climb import Ladder
from jettison.core.load.views import Loads
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.recovering import Recoveries
from jettison.core.ports import RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.batching import BlockedBy
from jettison.types import GroupId


class FastForward:
    """What ``ClusterCore`` offers to drivers in virtual time; changes books in ``advance`` alone."""

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
        """Nothing goes on that a step of one group could decide about another."""
        return (
            self._moves.is_idle and self._recoveries.is_idle and self._migrations.is_idle
            and not self._state.unplaced and not self._state.distrusted and not self._state.pipelines
            and self._ladder.decides_nothing_before().until_ns != 0
            and not any(
                self._state.groups[g].head_blocked_by is BlockedBy.MEMORY for g in self._state.changes.queued
            )
        )  # fmt: skip

    @property
    def due_ns(self) -> int | None:
        """The first step that ends then or later must be told of by itself, with all groups caught up; None: never."""
        return self._ladder.decides_nothing_before().until_ns

    def most_steps(self, group_id: GroupId) -> int:
        """How many steps may be told of together, the one in flight included; 0 if it has to be told of by itself.

        The one after them is in flight then and is told of as usual: it may end a request, or need a decision.
        """
        group = self._state.groups[group_id]
        if not self.is_quiet or not _is_steady(group):
            return 0
        (flight,) = group.in_flight.values()
        most = min(_steps_left(row.state, self._state.limits.max_model_len) for row in flight.step.rows)
        (worker_id,) = group.worker_ids
        if most < 1 or self._shares_worker(group):
            return 0
        ahead = self._ladder.decides_nothing_before().num_steps
        room = self._state.workers[worker_id].ledger.num_free
        if _growth_within(group, most + ahead) <= room:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _growth_within(group, middle + ahead) <= room else (low, middle)
        return low

    def _shares_worker(self, group: Group) -> bool:
        """Another group's blocks come from the same ledger."""
        return any(len(self._state.groups_of[w]) > 1 for w in group.worker_ids)

    def advance(self, group_id: GroupId, ends_ns: Sequence[int], token_id: int) -> RunStep:
        """The step in flight and those after it have ended at these times; every row got ``token_id`` in each.

        At most ``most_steps`` of them, as it was at its beginning. Returns the step that is in flight now, issued
        at the last of the times; it keeps the id of the one that was.
        """
        group = self._state.groups[group_id]
        (flight,) = group.in_flight.values()
        (worker_id,) = group.worker_ids
        times_ns = [flight.issued_ns, *ends_ns]
        self._loads.note_steps(group, flight.work, times_ns)
        self._state.next_step_id += len(ends_ns)
        # That it has grown is no reason to ask the group anything: it has a step in flight.
        ledgers = self._state.changes.ledgers
        was_changed = worker_id in ledgers
        fresh = group.counters.fresh
        num_before = fresh.num_offline
        step, grown = group.repeat(len(ends_ns), token_id, ends_ns[-1])
        fresh.note_step(num_before, ends_ns[-1])
        if not was_changed:
            ledgers.discard(worker_id)
        if grown:
            self._loads.monitor(group).note_growth(group, [ends_ns[number - 1] for number in grown])
            self._ladder.note_touched((group_id,))
        return step


def _is_steady(group: Group) -> bool:
    """The step in flight decodes one token of every running request, and the next plan could do nothing else.

    A step with safepoints is told of by itself: how many the next one has is predicted from all that ended before it.
    """
    queues = group.queues
    if len(group.in_flight) != 1 or queues.has_waiting or queues.moving or queues.suspects or group.stranded:
        return False
    if group.paused or group.holds_preemption or group.blocks.landing or group.limits.enable_prefix_caching:
        return False
    if group.shares_steps:
        return False
    (flight,) = group.in_flight.values()
    rows = flight.step.rows
    if flight.step.safepoint_layers:
        return False
    return len(rows) == len(queues.running) and all(row.num_tokens == 1 and row.samples for row in rows)


def _steps_left(state: RequestState, max_model_len: int) -> int:
    """Steps, the one in flight included, after which a decoding request goes on all the same."""
    params = state.request.params
    is_plain = (
        state.first_token_ns is not None and state.is_settled and state.prompt_logprobs is None
        and params.ignore_eos and not params.stop_token_ids
    )  # fmt: skip
    if not is_plain:
        return 0
    return min(params.max_tokens - state.num_output, max_model_len - state.num_tokens) - 1


def _growth_within(group: Group, num_steps: int) -> int:
    """Blocks that the rows in flight will take while so many more steps of one token each are planned."""
    ledger, (flight,) = group.blocks.ledgers[0], group.in_flight.values()
    return sum(
        max(0, group.limits.blocks_for(row.context_len + 1 + num_steps) - ledger.num_blocks_of(row.state.request_id))
        for row in flight.step.rows
    )
