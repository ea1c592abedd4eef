"""Swapping: KV of preempted requests goes to the host and comes back (the ``swap`` baseline, after InferCept).

    OUT      not scheduled; its blocks are copied to the host pool, piece by piece; all of them stay its own
    STORED   only the host pool has its KV; its device blocks are free
    IN       has blocks again; the pieces travel back
    (over)   it runs on; or, when a piece failed, it is recomputed

Rule 1. A step carries at most the budget's blocks, both directions together, victims before returners. The allowance is
        renewed with every step issued, and where no step is in flight. Pieces follow the step in the worker's stream:
        they are copied while the controller takes the step's tokens and plans the next.
Rule 2. Blocks are given back, and a request is scheduled again, only when the copy has ended. A victim has no step in
        flight, so nothing writes what is being read; sealed blocks that it shares may be read by others meanwhile.
Rule 3. While somebody of a group is on the way nobody of it is recomputed: what is missing is about to be there, or who
        returns is about to be one who may leave again.
Rule 4. Newcomers leave room for who has been swapped out: those who were admitted first run first.

Who goes and who returns is ``policy.swapping``'s decision; the pool's book is ``memory.hostpool``.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from jettison.core.group import GroupCore
from jettison.core.ports import Action, MoveEnded, SwapIn, SwapOut
from jettison.core.relief import Abandoned, Relief
from jettison.core.request import NOWHERE, Phase, RequestState
from jettison.core.state import ClusterState
from jettison.memory.hostpool import HostPool
from jettison.policy.order import in_service_order
from jettison.policy.swapping import (
    StoredRow,
    SwapParams,
    SwapRow,
    choose_swap_ins,
    choose_swap_outs,
    swap_budget,
)
from jettison.types import NANOSECONDS, GroupId, MoveId, RequestId, WorkerId

_SMOOTHING = 0.2
"""Weight of the newest measurement in the two means that the budget is made from."""


class SwapPhase(StrEnum):
    """See the module's table."""

    OUT = "out"
    STORED = "stored"
    IN = "in"


@dataclass(slots=True, eq=False)
class _Swap:
    """One request on its way to the host or back."""

    state: RequestState
    group: GroupCore
    num_blocks: int
    """Blocks with content: so many slots."""
    phase: SwapPhase = SwapPhase.OUT
    num_sent: int = 0
    """Leading blocks whose piece has been issued, in this direction."""
    failed: bool = False


@dataclass(slots=True)
class _Allowance:
    """What a group may still send with the step that it has issued last."""

    num_steps: int = -1
    """The group's step count when it was renewed."""
    left: int = 0


class Swapping(Relief):
    """All swaps of a cluster."""

    def __init__(self, cluster: ClusterState, params: SwapParams) -> None:
        self._cluster = cluster
        self._params = params
        self.pools = {w: HostPool(params.num_host_slots) for w in cluster.workers}
        self._swaps: dict[RequestId, _Swap] = {}
        self._by_group: dict[GroupId, dict[RequestId, _Swap]] = {}
        """The same by group; groups without a swap are not there."""
        self._put_off: set[GroupId] = set()
        """Groups that were touched while a move used their workers."""
        self._piece_blocks: dict[int, int] = {}
        """Move -> blocks that it carries."""
        self._allowances: dict[GroupId, _Allowance] = {}
        self._step_s: dict[GroupId, float] = {}
        self._block_copy_s: float | None = None

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Nobody has been swapped out."""
        return not self._swaps

    @property
    def steps_ahead(self) -> int:
        """Victims are chosen before the blocks are missing."""
        return self._params.ahead_steps + 1

    @property
    def awaits_tick(self) -> bool:
        """A swap is under way, or a group has not been looked at yet."""
        return bool(self._swaps or self._put_off)

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers of groups with a swap."""
        return tuple(sorted({w for swap in self._swaps.values() for w in swap.group.worker_ids}))

    def owed_blocks(self, group: GroupCore) -> int:
        """What stored requests will take again."""
        return sum(
            self._blocks_to_return(swap) for swap in self._of(group) if swap.phase is SwapPhase.STORED
        )

    def _of(self, group: GroupCore, *phases: SwapPhase) -> list[_Swap]:
        swaps = self._by_group.get(group.group_id)
        return [s for s in swaps.values() if not phases or s.phase in phases] if swaps else []

    def _blocks_to_return(self, swap: _Swap) -> int:
        return swap.group.blocks_for(swap.state.num_tokens)

    # --- events -----------------------------------------------------------------------------------------------

    def note_step(self, group: GroupCore, seconds: float) -> None:
        """Part of the budget: what a step takes."""
        self._step_s[group.group_id] = _smoothed(self._step_s.get(group.group_id), seconds)

    def note_steps(self, group: GroupCore, times_ns: Sequence[int]) -> None:
        """The same, one after the other."""
        for begin_ns, end_ns in pairwise(times_ns):
            self.note_step(group, (end_ns - begin_ns) / NANOSECONDS)

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of a piece."""
        num_blocks = self._piece_blocks.pop(event.move_id, None)
        if num_blocks is None:
            return None
        state = self._cluster.end_move(event.move_id)
        swap = self._swaps[state.request_id]
        swap.failed |= not event.complete
        if event.complete:
            self._block_copy_s = _smoothed(self._block_copy_s, event.duration_ns / NANOSECONDS / num_blocks)
        if state.moves:
            return []
        if state.ending is not None:
            self._forget(swap)
            self._cluster.reap(state)
        elif swap.failed:
            self._forget(swap)
            swap.group.preempt(state)
        elif swap.num_sent == swap.num_blocks:
            self._copied(swap)
        return []

    def cancel(self, state: RequestState) -> list[Action]:
        """Forget a request that no piece of is on its way; the others are forgotten when their piece has ended."""
        swap = self._swaps.get(state.request_id)
        if swap is not None and not state.moves:
            self._forget(swap)
        return []

    def abandon(self, broken: Sequence[GroupCore]) -> Abandoned:
        """Swapped requests of broken groups start again. Later pieces into their slots follow those under way."""
        pieces: set[MoveId] = set()
        for swap in [s for s in self._swaps.values() if s.group in broken]:
            pieces |= swap.state.moves
            self._forget(swap)
        for move_id in pieces:
            del self._piece_blocks[move_id]
        return Abandoned(pieces, [])

    def _copied(self, swap: _Swap) -> None:
        """Every piece of one direction has arrived."""
        state, group = swap.state, swap.group
        if swap.phase is SwapPhase.IN:
            self._forget(swap)
            state.num_sealed = 0  # its blocks are new ones, not yet findable
            group.resume(state)
            self._cluster.counters.swapped_in_blocks += swap.num_blocks
            return
        for ledger in group.ledgers:
            ledger.release(state.request_id)
        state.kv_at = NOWHERE
        swap.phase, swap.num_sent = SwapPhase.STORED, 0
        self._cluster.counters.swapped_out_blocks += swap.num_blocks

    def _forget(self, swap: _Swap) -> None:
        request_id, group_id = swap.state.request_id, swap.group.group_id
        del self._swaps[request_id], self._by_group[group_id][request_id]
        if not self._by_group[group_id]:
            del self._by_group[group_id]
        for worker_id in swap.group.worker_ids:
            self.pools[worker_id].release(request_id)
        swap.group.touch()

    # --- deciding ---------------------------------------------------------------------------------------------

    def before_steps(self, busy: Set[WorkerId], now_ns: int) -> list[Action]:
        """For each touched group that may plan a step: who leaves, who returns."""
        groups = self._cluster.groups
        asked = {g.group_id for g in self._cluster.changed_groups()} | self._put_off
        self._put_off = set()
        for group in [groups[g] for g in sorted(asked) if g in groups]:
            if not busy.isdisjoint(group.worker_ids):
                self._put_off.add(group.group_id)
                continue
            if not group.paused and len(group.in_flight) < len(group.stages):
                self._swap_out(group)
                if not self._of(group, SwapPhase.OUT):
                    self._swap_in(group)
            self._keep_room(group)
        return []

    def _growth(self, state: RequestState, group: GroupCore) -> int:
        ahead = state.num_tokens + self._params.ahead_steps
        most = min(ahead, state.num_prompt + state.request.params.max_tokens, self._cluster.limits.max_model_len)
        return max(0, group.blocks_for(most) - group.ledgers[0].num_blocks_of(state.request_id))

    def _growth_of_running(self, group: GroupCore) -> int:
        return sum(self._growth(s, group) for s in group.running.values() if s.ending is None)

    def _swap_out(self, group: GroupCore) -> None:
        growth, free = self._growth_of_running(group), _num_free(group)
        leaving = sum(_reclaimable(s.state, group) for s in self._of(group, SwapPhase.OUT))
        if growth <= free + leaving:
            return
        rows = [
            SwapRow(s.request_id, _reclaimable(s, group), group.blocks_for(s.num_computed), self._growth(s, group))
            for s in reversed(group.running.values())
            if s.num_pending == 0 and not s.paused and s.ending is None and not s.moves
        ]
        slots = min(self.pools[w].num_free for w in group.worker_ids)
        for request_id in choose_swap_outs(
            rows, growth_blocks=growth, num_free_blocks=free, num_leaving_blocks=leaving, num_free_slots=slots
        ):
            state = group.running[request_id]
            swap = _Swap(state, group, group.blocks_for(state.num_computed))
            self._swaps[request_id] = swap
            self._by_group.setdefault(group.group_id, {})[request_id] = swap
            for worker_id in group.worker_ids:
                self.pools[worker_id].hold(request_id, swap.num_blocks)
            group.take_out(state)
            state.phase = Phase.MOVING
            group.moving[request_id] = state
            group.counters.num_preemptions += 1
            state.num_preemptions += 1

    def _swap_in(self, group: GroupCore) -> None:
        stored = {s.state.request_id: s for s in self._of(group, SwapPhase.STORED)}
        if not stored:
            return
        in_order = in_service_order((s.state for s in stored.values()), group.limits.scheduling_policy)
        rows = [StoredRow(s.request_id, self._blocks_to_return(stored[s.request_id])) for s in in_order]
        for request_id in choose_swap_ins(
            rows,
            growth_blocks=self._growth_of_running(group),
            num_free_blocks=_num_free(group),
            watermark_blocks=group.watermark_blocks(),
            num_running=len(group.running) + len(self._of(group, SwapPhase.IN)),
            max_num_seqs=group.max_running,
        ):
            swap = self._swaps[request_id]
            swap.phase = SwapPhase.IN
            for ledger in group.ledgers:
                ledger.allocate(request_id, self._blocks_to_return(swap))

    def _keep_room(self, group: GroupCore) -> None:
        """Rules 3 and 4."""
        group.holds_preemption = bool(self._of(group, SwapPhase.OUT, SwapPhase.IN))
        owed = sum(self._blocks_to_return(s) for s in self._of(group, SwapPhase.OUT, SwapPhase.STORED))
        group.reserve_landing(dict.fromkeys(group.worker_ids, owed) if owed else {})

    # --- sending ----------------------------------------------------------------------------------------------

    def after_steps(self, now_ns: int) -> list[Action]:
        """Issue pieces within each group's allowance."""
        actions: list[Action] = []
        for group in [self._cluster.groups[g] for g in sorted(self._by_group)]:
            travelling = self._of(group, SwapPhase.OUT, SwapPhase.IN)
            if not travelling:
                continue
            allowance = self._allowance(group, travelling)
            for swap in sorted(travelling, key=lambda s: s.phase is SwapPhase.IN):
                num_blocks = min(allowance.left, swap.num_blocks - swap.num_sent)
                if num_blocks > 0 and swap.state.ending is None and not swap.failed:
                    actions += self._send(swap, num_blocks)
                    allowance.left -= num_blocks
        return actions

    def _allowance(self, group: GroupCore, travelling: list[_Swap]) -> _Allowance:
        allowance = self._allowances.setdefault(group.group_id, _Allowance())
        nothing_to_hide_behind = not group.in_flight and not any(s.state.moves for s in travelling)
        if allowance.num_steps != group.counters.num_steps or nothing_to_hide_behind:
            allowance.num_steps = group.counters.num_steps
            allowance.left = swap_budget(self._params, self._step_s.get(group.group_id), self._block_copy_s)
        return allowance

    def _send(self, swap: _Swap, num_blocks: int) -> list[Action]:
        state, part = swap.state, slice(swap.num_sent, swap.num_sent + num_blocks)
        swap.num_sent += num_blocks
        make = SwapOut if swap.phase is SwapPhase.OUT else SwapIn
        actions: list[Action] = []
        for stage in swap.group.stages:
            blocks = tuple(self._cluster.workers[stage.worker_id].ledger.table(state.request_id).ids[part])
            slots = self.pools[stage.worker_id].slots(state.request_id)[part]
            move_id = self._cluster.new_move()
            self._cluster.own_move(move_id, state)
            self._piece_blocks[move_id] = num_blocks
            piece = make(stage.worker_id, move_id, stage.layers, blocks, slots)
            self._cluster.open_moves[move_id] = piece
            actions.append(piece)
        return actions

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The pools' books, and that exactly the swapped requests hold slots."""
        for worker_id, pool in self.pools.items():
            pool.check()
            here = {r for r, s in self._swaps.items() if worker_id in s.group.worker_ids}
            assert set(pool.holders()) == here, f"host slots of worker {worker_id}: {pool.holders()}, swaps {here}"
        for swap in self._swaps.values():
            state = swap.state
            assert state.phase is Phase.MOVING and state.num_pending == 0, state
            assert self._by_group[swap.group.group_id][state.request_id] is swap
            for ledger in swap.group.ledgers:
                assert ledger.has(state.request_id) != (swap.phase is SwapPhase.STORED), (state, swap.phase)


def _num_free(group: GroupCore) -> int:
    """Allocatable blocks of the tightest stage, those kept for returning requests included."""
    return min(ledger.num_free for ledger in group.ledgers)


def _reclaimable(state: RequestState, group: GroupCore) -> int:
    return min(ledger.num_exclusive_blocks(state.request_id) for ledger in group.ledgers)


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
