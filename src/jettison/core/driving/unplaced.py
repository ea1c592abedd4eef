"""Unplaced requests (without a group), queues that a new group should share, and the largest request that could ever
run.

The choice of a group is passed in by the cluster core; ``core.moving.recovering`` knows which workers are dead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from jettison.core.changes import WaitsFor
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.core.state import ClusterState
from jettison.memory.stages import StagePlan, stage_bytes
from jettison.policy.merge import MergeCandidate, plan_ranges
from jettison.policy.order import in_service_order
from jettison.policy.refusal import why_too_long
from jettison.types import NANOSECONDS, FinishReason, RequestId, WorkerId


class Unplaced:
    """The requests without a group, and the room that one request can have. ``place`` queues a request in some group
    and takes it out of ``unplaced``, or returns False: there is no group."""

    def __init__(self, cluster: ClusterState, place: Callable[[RequestState], bool]) -> None:
        self._cluster = cluster
        self._place = place
        self._since_ns: dict[RequestId, int] = {}
        """Since when each unplaced request has been without a group."""
        self.waits_for: WaitsFor = (cluster.unplaced, self._since_ns)
        self._room_tokens: int | None = None
        """Tokens that memory has for one request; None while no worker is gone for good and all have a process."""
        self._home_tokens = 0
        """Tokens that one instance has for a request: the bound for an offline one, as no groups merge for it."""

    def advance(self, now_ns: int) -> list[Action]:
        """Queue unplaced requests, in the order of service, until there is no group for one. End with an error the
        requests that have now been unplaced for ``max_outage_s`` without a break. Returns the actions of these ends."""
        waiting = self._cluster.unplaced
        for state in in_service_order(waiting.values(), self._cluster.limits.scheduling_policy):
            if not self._place(state):
                break
        # Each request waits for its own time, from its arrival or its group's end on: an outage may outlast many of
        # them.
        since_ns = {i: self._since_ns.get(i, now_ns) for i in waiting}
        self._since_ns.clear()
        self._since_ns |= since_ns
        longest_ns = self._cluster.params.faults.max_outage_s * NANOSECONDS
        late = [s for s in waiting.values() if now_ns - self._since_ns[s.request_id] >= longest_ns]
        message = "no worker could take the request in time"
        return [
            action for state in sorted(late, key=lambda s: s.order)
            for action in self._cluster.end(state, FinishReason.ERROR, now_ns, error=message)
        ]

    def note_room(self, num_blocks: int, num_home_blocks: int) -> None:
        """Note that one request can have ``num_blocks`` now, and ``num_home_blocks`` while nothing merges, which bounds
        offline requests. Online requests are bounded only while some worker is gone for good, or has no process."""
        is_whole = not any(w.is_gone or not w.is_provisioned for w in self._cluster.workers.values())
        self._room_tokens = None if is_whole else num_blocks * self._cluster.limits.block_size
        self._home_tokens = num_home_blocks * self._cluster.limits.block_size

    def cut_to_room(self, state: RequestState) -> str | None:
        """Cut a request's default length to the noted room; return why the request can never be held, None if it can.
        An online request is neither cut nor refused while no worker is gone for good and all have a process."""
        room = self._home_tokens if state.is_offline else self._room_tokens
        if room is None:
            return None
        state.cut_default_length(room)
        return self._why_too_long(state, room)

    def why_too_large(self, state: RequestState, num_blocks: int, num_home_blocks: int) -> str | None:
        """Why ``num_blocks`` (for an offline request ``num_home_blocks``, of one instance) could never hold the
        request; None where they could. Nothing is cut."""
        room = (num_home_blocks if state.is_offline else num_blocks) * self._cluster.limits.block_size
        return self._why_too_long(state, room)

    def _why_too_long(self, state: RequestState, room: int) -> str | None:
        longest = self._cluster.limits.max_model_len
        # An answer without a given length is not ended for the length that it may grow to, nor for one beyond the
        # context.
        num_more = min(state.num_tokens_to_hold, longest) - state.num_prompt
        return why_too_long(state.num_prompt, num_more, longest, room)

    def share_queues(self) -> None:
        """Dispatch the waiting requests of all groups anew, in the order of service: a new group has been formed.
        Requests that are ending, and requests of groups whose steps are held, stay where they are."""
        groups = self._cluster.groups
        queued = [groups[g] for g in sorted(self._cluster.changes.queued)]
        queues = [g.queues for g in queued if not g.paused]
        waiting = [s for q in queues for s in (*q.waiting, *q.waiting_offline) if s.ending is None]
        for state in waiting:
            groups[state.group_id].queues.take_out(state)
        for state in in_service_order(waiting, self._cluster.limits.scheduling_policy):
            self._place(state)


def max_request_blocks(
    cluster: ClusterState, homes: Iterable[tuple[StagePlan, ...]], *, may_merge: bool,
    without: Collection[WorkerId] = (),
) -> int:
    """Blocks that one request could ever get: those of the poorest undropped member (any member may be given the
    request) or, where ``may_merge`` and that is more, of the tightest stage when all members merge, each with its own
    capacity.

    Dead workers count unless they are gone for good: requests can wait for them. So do sleeping workers, as a request
    that needs them wakes them; workers without a process do not, since a place for one may not be found, nor do the
    workers ``without``. Where no home with a process is left for good, a process will be asked for: then the poorest
    home without one counts, by itself. A home of several (a static pipeline) that has lost a member is not formed
    again. 0 where no home is left.
    """
    shape, workers_of = cluster.shape, cluster.workers
    left = [home for home in homes if not any(workers_of[s.worker_id].is_gone for s in home)]
    provisioned = [home for home in left if all(workers_of[s.worker_id].is_provisioned for s in home)]
    whole = [home for home in provisioned or left if not any(s.worker_id in without for s in home)]
    workers = [workers_of[s.worker_id] for home in whole for s in home]
    if not workers:
        return 0
    least = min(w.full_blocks for w in workers)
    if not (may_merge and provisioned):
        return least
    workers.sort(key=lambda w: w.full_blocks)  # of more workers than layers, the poorest may be the ones that merge
    budgets = {w.worker_id: cluster.member_budget_bytes(w) for w in workers[: shape.num_layers]}
    everyone = [MergeCandidate(w, (w,), (shape.all_layers,), 0.0, 0, (budget,)) for w, budget in budgets.items()]
    stages = plan_ranges(everyone, shape)
    assert stages is not None, "as many layers as members can be split"
    layer_block_bytes = shape.block_bytes_per_layer(cluster.limits.block_size)
    merged = min(
        # Members that were merged in another order may run a layer more, and pages do not divide evenly.
        (budgets[s.worker_id] - stage_bytes(s.layers, shape)) // ((len(s.layers) + 1) * layer_block_bytes)
        for s in stages
    )
    return max(least, merged)
