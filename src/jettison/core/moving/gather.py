"""Gathering the shards that workers have mapped and not filled: from peers, then from the model folder.

    wanted --a worker has it--> pulled from there --did not arrive--> from the next holder ... --none is left--.
       '--no worker has it--------------------------------------------------------------------------------------> loaded

The nearest holders are asked first, and of these the move's members: their links are the group's own. Any other serving
holder is asked before the folder; it may change its layout meanwhile, which ends the transfer incomplete, and the next
holder is asked. Each worker reads from the folder (or the operating system's page cache) one shard after the other, so
that a move that is called off waits for one at most. The caller handles a shard that the folder does not give either: a
move fails, a recovery (``core.moving.recovering``) begins anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from jettison.core.pending import CallAnswer, Owner, PendingCall, PendingTransfer, TransferPurpose
from jettison.core.ports import Action, CallFailed, CancelTransfer, LoadShard, SendShard, TransferEnded
from jettison.core.state import ClusterState
from jettison.types import ShardId, TransferId, WorkerId


class Gather:
    """Fetches shards that workers have mapped and not filled: those of one restore, of one merge's pulls, or of one
    attempt at filling a survivor of a death or of a failed drop."""

    def __init__(
        self, cluster: ClusterState, owner: Owner, members: tuple[WorkerId, ...], *, loads_first: bool = False
    ) -> None:
        """``loads_first``: no peer is asked; for a caller that begins anew where loading fails."""
        self._cluster = cluster
        self._owner = owner
        self._members = members
        self._asks_peers = not loads_first
        self.failure: str | None = None
        """Why a load has failed, the last one; see ``take_failure``."""
        self._is_called_off = False
        self.transfers: dict[TransferId, SendShard] = {}
        """Transfers under way."""
        self.loads: dict[int, LoadShard] = {}
        """Loads under way, by call id: one a worker."""
        self._to_load: defaultdict[WorkerId, deque[ShardId]] = defaultdict(deque)
        """Shards to load behind the load under way."""
        self._asked: defaultdict[tuple[WorkerId, ShardId], set[WorkerId]] = defaultdict(set)
        """(worker that lacks a shard, shard) -> workers that were asked for it."""
        self._num_asked: Counter[WorkerId] = Counter()
        self.num_bytes = 0
        """Bytes that have come from peers."""

    @property
    def is_idle(self) -> bool:
        """Whether no transfer and no load is under way."""
        return not self.transfers and not self.loads

    def fetch_all(self, worker_id: WorkerId) -> list[Action]:
        """Begin to fetch every shard that a worker has mapped and not filled; return the actions, none where it lacks
        none."""
        missing = sorted(self._cluster.workers[worker_id].unfilled)
        return [a for shard in missing for a in self.fetch(worker_id, shard)]

    def fetch(self, worker_id: WorkerId, shard: ShardId, source: WorkerId | None = None) -> list[Action]:
        """Begin to fetch one shard that a worker has mapped and not filled, from ``source``, else from the next holder,
        else from the model folder. Returns the action; none where a load of the worker is under way, as it waits for
        that."""
        if source is None and self._asks_peers:
            source = self._next_holder(worker_id, shard)
        if source is not None:
            self._asked[worker_id, shard].add(source)
            self._num_asked[source] += 1
            book = self._cluster.book
            transfer = SendShard(book.next_transfer_id, source, worker_id, shard)
            book.open_transfer(transfer, self._owner, self, TransferPurpose.PARAMETERS)
            self.transfers[transfer.transfer_id] = transfer
            return [transfer]
        if any(load.worker_id == worker_id for load in self.loads.values()):
            self._to_load[worker_id].append(shard)
            return []
        return [self._load(worker_id, shard)]

    def call_off(self) -> list[Action]:
        """Begin nothing more; return the actions that cancel the transfers under way. A load under way ends.
        Idempotent."""
        if self._is_called_off:
            return []
        self._is_called_off = True
        self._to_load.clear()
        return [CancelTransfer(transfer.src, transfer.transfer_id) for transfer in self.transfers.values()]

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a transfer, and count its bytes. A shard that did not arrive is fetched from elsewhere,
        unless the gathering is called off. Returns the actions."""
        transfer = self.transfers.pop(event.transfer_id)
        self.num_bytes += event.num_bytes
        self._cluster.counters.pulled_bytes += event.num_bytes
        if event.complete:
            self._cluster.workers[transfer.dst].unfilled.discard(transfer.shard)
            return []
        return [] if self._is_called_off else self.fetch(transfer.dst, transfer.shard)

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Take the end of a load, or its failure, which ``take_failure`` tells. Returns the worker's next load, if one
        waits."""
        load = self.loads.pop(event.call_id)
        if isinstance(event, CallFailed):
            self.failure = f"worker {load.worker_id} could not load {load.shard}: {event.message}"
            return []
        self._cluster.workers[load.worker_id].unfilled.discard(load.shard)
        waiting = self._to_load[load.worker_id]
        return [self._load(load.worker_id, waiting.popleft())] if waiting else []

    def take_failure(self) -> str | None:
        """Why a load has failed, the last one since this was asked before; None: none has."""
        failure, self.failure = self.failure, None
        return failure

    # --- asking -----------------------------------------------------------------------------------------------

    def _next_holder(self, worker_id: WorkerId, shard: ShardId) -> WorkerId | None:
        """The worker that is asked next for a shard: one that has it, keeps it, and was not asked for it yet. None:
        there is none."""
        asked = self._asked[worker_id, shard]
        holders = [
            w.worker_id for w in self._cluster.workers.values()
            if w.can_serve and w.worker_id != worker_id and w.worker_id not in asked
            and shard in w.layout.shards and shard not in w.unfilled and not w.num_relayouts_open
        ]
        return self._cluster.advice.choose_holder(holders, worker_id, self._members, self._num_asked)

    def _load(self, worker_id: WorkerId, shard: ShardId) -> LoadShard:
        """Begin to load a shard from the worker's model folder; return the call."""
        book = self._cluster.book
        load = LoadShard(worker_id, book.next_call_id, shard)
        book.open_call(load, self._owner, self)
        self.loads[load.call_id] = load
        return load
