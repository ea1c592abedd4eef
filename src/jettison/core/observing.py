"""Who watches a run: told what the core's actions came to, live and simulated alike; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from jettison.core.cluster import ClusterCore
from jettison.core.ports import Emit, Record, RunStep, Transfer, TransferEnded
from jettison.types import GroupId, WorkerId

GroupGauges = Mapping[str, float]


class RunObserver(Protocol):
    """Called by the driver that carries out actions, in the order in which things happen."""

    def step_issued(self, step: RunStep) -> None:
        """A microbatch goes to its stages."""
        ...

    def stage_done(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage has computed its part; times of the worker's own clock."""
        ...

    def step_ended(self, step_id: int) -> None:
        """The step is over or has failed; after its last stage."""
        ...

    def transfer_begun(self, transfer: Transfer) -> None:
        """KV, a shard or a swap is to be moved."""
        ...

    def transfer_ended(self, ended: TransferEnded, now_ns: int) -> None:
        """The one end of a transfer."""
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


def group_gauges(core: ClusterCore) -> Iterator[tuple[GroupId, GroupGauges]]:
    """Requests that wait and run, KV blocks held and there, of each group."""
    for group_id, group in core.groups.items():
        yield group_id, {
            "waiting": len(group.queues.waiting), "running": group.queues.num_served,
            "kv_blocks": group.blocks.num_used, "kv_capacity": group.blocks.capacity,
        }
