"""Checkpoints: KV of running requests copied to host pools beside steps, so that a victim's blocks are free at once.

    runs --copy--> CHECKPOINT --freed--> STORED --brought back--> CHECKPOINT      (the phases of ``core.moving.store``)

Rule 1. Only sealed blocks are copied: full and computed ones, of a running request with all of its KV in its group's
        arenas. A checkpoint is a prefix of them; what is beyond is computed again.
Rule 2. A piece holds what it reads and what it writes under a name of its own, in the worker's ledger and in its pool,
        until it has ended. So no move waits for a piece: the request may be freed, preempted, moved or ended meanwhile,
        and the blocks and slots of the piece come free when it ends.
Rule 3. A checkpoint reaches as far as its slots are written in the pools of all stages. Blocks with the same content
        are copied once. Where the copy of a shared block has failed, every checkpoint with that block ends before it.
Rule 4. A freed request keeps the blocks whose pieces are under way, too: it comes back when those have ended, and is
        computed again where one has failed.
Rule 5. A checkpoint is kept when its request changes groups: its pools have all layers. It grows only while it is in
        the pools of the group's own workers; when the request has twice as much, it is given up for a new one.

Which requests, how many blocks and when is decided in ``core.ladder.harvest``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from jettison.core.moving.allowances import Allowances
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.moving.store import CheckpointStore
from jettison.core.pending import PendingTransfer, TransferPurpose
from jettison.core.ports import Action, SendKV, TransferEnded
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import changed
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.stages import StagePlan
from jettison.types import GroupId, RequestId, TransferId, WorkerId


@dataclass(frozen=True, slots=True)
class _Piece:
    """A copy under way to one host pool, of one stage's layers."""

    worker_id: WorkerId
    name: RequestId
    """The name under which it holds blocks and slots."""
    group_id: GroupId
    num_blocks: int
    is_first_stage: bool


class Checkpoints:
    """The copies of running requests' KV in a cluster: it makes them, and keeps them where a request gives its blocks
    up."""

    def __init__(self, cluster: ClusterState, store: CheckpointStore) -> None:
        self._cluster = cluster
        self._store = store
        self._pieces: dict[TransferId, _Piece] = {}
        self._allowances = Allowances(cluster)

    # --- reading ----------------------------------------------------------------------------------------------

    def num_copied_blocks(self, state: RequestState, group: Group) -> int:
        """Leading sealed blocks of a request that are copied, or on their way; 0 without a checkpoint; all sealed ones,
        where the checkpoint is kept as it is (rule 5)."""
        entry = self._store.entry(state)
        if entry is None:
            return 0
        num_sealed, num_copied = self._num_sealed(state), self._num_slots(entry)
        if num_copied < num_sealed <= 2 * num_copied and not _is_in_pools_of(entry, group.stages):
            return num_sealed
        return min(num_copied, num_sealed)

    def num_lacking_blocks(self, state: RequestState) -> int:
        """Sealed blocks of a request that it would compute again if it were freed now: they are neither copied nor on
        their way."""
        return self._num_sealed(state) - self._num_kept(state)

    def _num_kept(self, state: RequestState) -> int:
        """Leading sealed blocks of a request that stay in host pools when it is freed: those that are copied, and those
        on their way, which are held until they are."""
        entry = self._store.entry(state)
        return 0 if entry is None else min(self._num_slots(entry), self._num_sealed(state))

    def num_written_blocks(self, state: RequestState) -> int:
        """Leading blocks of a running request that have been copied; 0 without a checkpoint."""
        entry = self._store.entry(state)
        if entry is None or entry.phase is not HostedPhase.CHECKPOINT:
            return 0
        self.refresh(entry)
        return (entry.pools.num_tokens or 0) // self._cluster.limits.block_size

    def _num_sealed(self, state: RequestState) -> int:
        """Full computed blocks of the request."""
        return state.num_computed // self._cluster.limits.block_size

    def _num_slots(self, entry: HostedKV) -> int:
        """Slots that the request of an entry has in each host pool."""
        return self._store.pools[next(iter(entry.pools.places)).worker_id].num_blocks_of(entry.state.request_id)

    # --- copying ----------------------------------------------------------------------------------------------

    def send(
        self, group: Group, decided: Iterable[tuple[RequestId, int]], budget_blocks: Callable[[Group], int]
    ) -> list[Action]:
        """Issue pieces beside the steps just issued, within the group's allowance: first of requests that come back,
        then of the copies decided on. Returns the actions."""
        coming = self._store.of(group, HostedPhase.IN)
        chosen = [(s, n) for r, n in decided if (s := group.queues.running.get(r)) is not None and is_copyable(s)]
        if not coming and not chosen:
            return []
        num_under_way = self._num_under_way(group)
        is_copying = bool(num_under_way) or any(entry.state.transfers for entry in coming)
        allowance = self._allowances.of(group, budget_blocks, is_copying=is_copying)
        actions: list[Action] = []
        for entry in coming:
            num_blocks, pieces = self._store.send_some(entry, allowance.left)
            allowance.left -= num_blocks
            actions += pieces
        for state, num_blocks in chosen:
            room = min(num_blocks, allowance.left - num_under_way)
            if room > 0:
                pieces = self._copy(state, group, room)
                allowance.left -= room if pieces else 0
                actions += pieces
        return actions

    def _num_under_way(self, group: Group) -> int:
        """Blocks of the group under way: each has a piece in every stage, and the stages' links carry them at the same
        time."""
        by_worker = dict.fromkeys(group.worker_ids, 0)
        for piece in self._pieces.values():
            if piece.group_id == group.group_id:
                by_worker[piece.worker_id] += piece.num_blocks
        return max(by_worker.values())

    def _copy(self, state: RequestState, group: Group, most_blocks: int) -> list[Action]:
        """Copy the next sealed blocks of a request, at most ``most_blocks``; return the actions. Blocks that the pools
        have already, from other requests, do not count."""
        entry = self._store.entry(state)
        if entry is not None and not _is_in_pools_of(entry, group.stages):
            self._store.forget(entry)
            entry = None
        if entry is None:
            entry = self._store.open(state, HostedPhase.CHECKPOINT)
            state.residences = changed(state.residences, None, entry.pools)
        # Blocks that every stage's pool has already cost nothing; only what is missing somewhere uses up the allowance.
        first, end = self._num_slots(entry), self._num_sealed(state)
        pools = {s: self._store.pools[s.worker_id] for s in group.stages}
        contents = {s: self._contents(state, s, first, end) for s in pools}
        num_known = min(pool.num_known(contents[s]) for s, pool in pools.items())
        for stage, pool in pools.items():
            pool.extend(state.request_id, contents[stage][:num_known])
        num_new = self._make_room(state, group, min(most_blocks, end - first - num_known))
        actions: list[Action] = []
        for stage, pool in pools.items():
            new = pool.extend(state.request_id, contents[stage][num_known : num_known + num_new])
            actions += self._send(state, group, stage, new) if new else []
        if not num_known + num_new and not first:
            self._store.forget(entry)
        else:
            self.refresh(entry)
        return actions

    def _contents(self, state: RequestState, stage: StagePlan, first: int, end: int) -> list[Hashable | None]:
        """The names of the contents of blocks ``first`` to ``end`` in the layers of a stage; None where a block has no
        hash."""
        hashes = state.hashes[first:end]
        known: list[Hashable | None] = [(block_hash, stage.layers) for block_hash in hashes]
        return known + [None] * (end - first - len(known))

    def _send(self, state: RequestState, group: Group, stage: StagePlan, new: Sequence[int]) -> list[Action]:
        """Issue the copy of these blocks from one stage to its host pool; return it."""
        worker_id, book = stage.worker_id, self._cluster.book
        worker, pool = self._cluster.workers[worker_id], self._store.pools[worker_id]
        ids, held = worker.ledger.table(state.request_id).ids, pool.slots(state.request_id)
        blocks, slots = [ids[i] for i in new], [held[i] for i in new]
        name = f"{state.request_id}\0copy{book.next_transfer_id}"
        worker.ledger.adopt_prefix(name, blocks)
        pool.adopt(name, slots)
        worker.copying.add(name)
        sent = SendKV(
            book.next_transfer_id, worker_id, worker_id, stage.layers, tuple(blocks), tuple(slots), to_host=True,
            beside_steps=True,
        )
        self._cluster.send_kv(
            state, sent, owner=self, waiter=self, purpose=TransferPurpose.HOST, reserves=False
        )
        is_first = worker_id == group.worker_ids[0]
        self._pieces[sent.transfer_id] = _Piece(worker_id, name, group.group_id, len(blocks), is_first)
        return [self._store.noted(sent, group)]

    # --- room in the pools ------------------------------------------------------------------------------------

    def _make_room(self, state: RequestState, group: Group, num_blocks: int) -> int:
        """Free ``num_blocks`` slots in each pool of the group, or as many as possible, and return how many are free of
        them. Checkpoints of later victims go, the last victims first.

        Checkpoints of offline requests go first, the oldest request's first; those of online requests go last, and
        never for an offline one.
        """
        pools = [self._store.pools[w] for w in group.worker_ids]
        num_free = min(pool.num_free for pool in pools)
        if num_free >= num_blocks:
            return num_blocks
        workers = set(group.worker_ids)
        going = [e for e in self._store.checkpoints() if e.state is not state and workers & set(e.pools.worker_ids)]
        for entry in sorted(going, key=lambda e: (not e.state.is_offline, _age(e.state))):
            if num_free >= num_blocks:
                break
            is_later = entry.state.is_offline > state.is_offline or _age(entry.state) < _age(state)
            if is_later and entry.state.is_offline >= state.is_offline:
                self._store.forget(entry)
                self._cluster.counters.checkpoints_dropped += 1
                num_free = min(pool.num_free for pool in pools)
        return min(num_blocks, num_free)

    # --- freeing ----------------------------------------------------------------------------------------------

    def kept_tokens(self, state: RequestState) -> int:
        """Keep what host pools have of a request that gives its blocks up now; return how many of its leading tokens
        that is, 0: none."""
        entry, counters = self._store.entry(state), self._cluster.counters
        num_blocks = 0
        if entry is not None and entry.phase is HostedPhase.CHECKPOINT:
            num_blocks = 0 if state.recompute else self._num_kept(state)
            if not num_blocks:
                self._store.forget(entry)
        if entry is None or not num_blocks:
            counters.offline_discards += state.is_offline and state.num_computed > 0
            return 0
        num_tokens = num_blocks * self._cluster.limits.block_size
        entry.phase, entry.num_blocks = HostedPhase.STORED, num_blocks
        self._set_reach(entry, num_blocks)
        for worker_id in entry.pools.worker_ids:
            self._store.pools[worker_id].truncate(state.request_id, num_blocks)
        entry.awaits_pieces = not self._is_written(entry)
        counters.checkpoint_frees += 1
        counters.freed_recomputed_tokens += state.num_computed - num_tokens
        return num_tokens

    def _is_written(self, entry: HostedKV) -> bool:
        """Whether every slot of an entry is written."""
        pools = (self._store.pools[w] for w in entry.pools.worker_ids)
        return all(pool.num_written(entry.state.request_id) >= entry.num_blocks for pool in pools)

    def refresh(self, entry: HostedKV) -> None:
        """Note how far an entry's checkpoint reaches by now (rule 3)."""
        state, size = entry.state, self._cluster.limits.block_size
        known = (entry.pools.num_tokens or 0) // size
        pools = (self._store.pools[w] for w in entry.pools.worker_ids)
        written = min(pool.num_written(state.request_id, known) for pool in pools)
        # A request that went to another group as tokens may have less there than its last piece has copied.
        self._set_reach(entry, min(written, state.num_computed // size))

    def _set_reach(self, entry: HostedKV, num_blocks: int) -> None:
        """Note that an entry's checkpoint has ``num_blocks`` leading blocks."""
        num_tokens, before = num_blocks * self._cluster.limits.block_size, entry.pools
        if num_tokens != before.num_tokens:
            entry.pools = before.at(num_tokens)
            entry.state.residences = changed(entry.state.residences, before, entry.pools)

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a piece: its blocks and slots are free, or its request's alone. Where it failed, checkpoints
        are cut before it. Returns no actions."""
        piece = self._pieces.pop(event.transfer_id)
        worker, pool = self._cluster.workers[piece.worker_id], self._store.pools[piece.worker_id]
        worker.copying.discard(piece.name)
        worker.give_up(piece.name)  # a dead worker's ledger is empty
        slots = pool.slots(piece.name)
        if event.complete:
            pool.note_written(slots)
            self._cluster.counters.checkpointed_bytes += pending.num_bytes
            self._cluster.counters.checkpointed_blocks += piece.num_blocks if piece.is_first_stage else 0
        pool.release(piece.name)
        if not event.complete:
            self._cut(piece.worker_id, set(slots))
        if (group := self._cluster.groups.get(piece.group_id)) is not None:
            group.note_copied(event.transfer_id)
            group.touch()
        entry = self._store.entry_named(piece.name.partition("\0")[0])
        if entry is not None and entry.phase is HostedPhase.CHECKPOINT:
            self.refresh(entry)
        for entry in self._store.awaiting():
            if self._is_written(entry):
                entry.awaits_pieces = False
                self._cluster.touch(entry.state)
        return []

    def _cut(self, worker_id: WorkerId, lost: set[int]) -> None:
        """Cut every checkpoint before its first slot among those ``lost``, which were not written; a freed request that
        waits for one of them is computed again."""
        concerned = [*self._store.checkpoints(), *self._store.awaiting()]
        for entry in [e for e in concerned if worker_id in e.pools.worker_ids]:
            slots = self._store.pools[worker_id].slots(entry.state.request_id)
            first = next((i for i, slot in enumerate(slots) if slot in lost), None)
            if first is None:
                continue
            if entry.awaits_pieces:
                self._store.give_up(entry.state, Preemption.COPY_FAILED)
                continue
            for other in entry.pools.worker_ids:
                self._store.pools[other].truncate(entry.state.request_id, first)

    def go_on(self, now_ns: int) -> list[Action]:
        """Begin nothing when a piece has ended."""
        return []

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Pieces hold what they should, and checkpoints reach no further than what is written. Raises AssertionError
        otherwise."""
        assert self._pieces.keys() <= self._cluster.book.transfers.keys()
        for worker in self._cluster.workers.values():
            names = {piece.name for piece in self._pieces.values() if piece.worker_id == worker.worker_id}
            assert worker.copying == names, f"worker {worker.worker_id}: {worker.copying}, pieces {names}"
        size = self._cluster.limits.block_size
        for entry in self._store.checkpoints():
            request_id, pools = entry.state.request_id, [self._store.pools[w] for w in entry.pools.worker_ids]
            assert len({pool.num_blocks_of(request_id) for pool in pools}) == 1, f"{entry} is uneven"
            num_blocks = (entry.pools.num_tokens or 0) // size
            assert all(pool.num_written(request_id) >= num_blocks for pool in pools), f"{entry} has gaps"


def is_copyable(state: RequestState) -> bool:
    """Whether a request runs and no move touches it, so that all of its KV is in its group's arenas (rule 1)."""
    return state.phase is Phase.RUNNING and state.is_settled


def _is_in_pools_of(entry: HostedKV, stages: Sequence[StagePlan]) -> bool:
    """Whether a checkpoint is in exactly the pools of these stages' workers, with the same layers."""
    places = entry.pools.places
    return len(places) == len(stages) and all(
        place.worker_id == stage.worker_id and layers == stage.layers
        for (place, layers), stage in zip(places.items(), stages, strict=True)
    )


def _age(state: RequestState) -> tuple[int, tuple[int, int, int]]:
    """A sort key that is lower for older requests, which are the later victims."""
    return state.first_scheduled_ns or 0, state.order
