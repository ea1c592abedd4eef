"""Observers of a run, live or simulated: they are called with the outcome of the core's actions, and decide nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jettison.core.residence import hosted_tokens
from jettison.types import GroupId, TransferId, WorkerId

if TYPE_CHECKING:
    from jettison.core.cluster import ClusterCore
    from jettison.core.ports import Emit, Record, RunStep, Transfer, TransferEnded
    from jettison.core.serving.group import Group

GroupGauges = Mapping[str, float]


class RunObserver(Protocol):
    """Called by the driver that carries out actions, in the order of events."""

    def step_issued(self, step: RunStep) -> None:
        """A microbatch goes to its stages."""
        ...

    def stage_done(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage has computed its part; times of the worker's own clock."""
        ...

    def step_ended(self, step_id: int) -> None:
        """The step is over or has failed; after its last stage."""
        ...

    def transfer_begun(self, transfer: Transfer, now_ns: int) -> None:
        """KV, a shard or a swap is to be moved."""
        ...

    def transfer_ended(self, ended: TransferEnded, now_ns: int) -> None:
        """The end of a transfer that a worker tells of."""
        ...

    def transfers_left(self, under_way: Collection[TransferId], now_ns: int) -> None:
        """After each event, those under way: any other one that was begun and of which no worker has told, the core has
        ended itself."""
        ...

    def recorded(self, record: Record) -> None:
        """A decision or a milestone."""
        ...

    def emitted(self, emit: Emit) -> None:
        """A request has got tokens, or its end."""
        ...

    def looked(self, loads: Iterable[tuple[GroupId, GroupGauges]], now_ns: int) -> None:
        """Gauges of every group, at every tick: see ``group_gauges``."""
        ...


def transfers_under_way(core: ClusterCore) -> Collection[TransferId]:
    """Those that have begun, and that nothing has ended."""
    return core.state.book.transfers.keys()


def devices_wanted(core: ClusterCore) -> int:
    """Workers that the ladder wants awake now, including those that it asks for from outside: an autoscaler's
    target."""
    state = core.state
    kv_bytes = max((w.full_blocks for w in state.workers.values()), default=1)
    kv_bytes *= state.shape.num_layers * state.shape.block_bytes_per_layer(state.limits.block_size)
    return core.sleepers.num_awake() + -(-core.ladder.missing_bytes // max(1, kv_bytes))


def group_gauges(core: ClusterCore) -> Iterator[tuple[GroupId, GroupGauges]]:
    """Of each group: requests that wait and run, KV blocks held, and capacity in blocks."""
    for group_id, group in core.groups.items():
        yield group_id, {
            "waiting": len(group.queues.waiting), "running": group.queues.num_served,
            "kv_blocks": group.blocks.num_used, "kv_capacity": group.blocks.capacity,
        } | offline_gauges(group)._asdict()


class OfflineGauges(NamedTuple):
    """Offline requests of one group, now."""

    offline_waiting: int = 0
    offline_running: int = 0
    offline_hosted: int = 0
    """Requests with KV in host pools, or on its way back; they do not run."""
    offline_checkpointed: int = 0
    """Running requests with a copy of at least one block in host pools."""
    offline_host_blocks: int = 0
    """Whole KV blocks of all of them in host pools. A block that several requests share counts with each; all stages'
    parts of a block count once."""
    offline_blocks: int = 0
    """KV blocks of the group that they hold, each once, whichever of them share it."""


NO_OFFLINE = OfflineGauges()

NO_GROUP = -1
"""In place of a group's id, for a worker that is in no group."""


def offline_gauges(group: Group) -> OfflineGauges:
    """O(the offline requests that are not waiting, and their blocks where any is shared); O(1) where there are
    none."""
    queues, size = group.queues, group.limits.block_size
    if not (queues.has_offline or queues.stored or queues.moving):
        return NO_OFFLINE
    copied = [hosted_tokens(s.residences) for s in queues.running_offline()]
    away = [s for s in chain(queues.moving.values(), queues.stored.values()) if s.is_offline]
    hosted = [num for s in away if (num := hosted_tokens(s.residences))]
    return OfflineGauges(
        len(queues.waiting_offline), len(copied), len(hosted), sum(num >= size for num in copied),
        sum(num // size for num in chain(copied, hosted)),
        group.blocks.num_distinct(s.request_id for s in queues.holding_offline()),
    )
