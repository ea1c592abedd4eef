"""The plant: the interface of the cluster that a modelled worker uses, and the times that lie between two workers."""

from __future__ import annotations

from typing import Protocol

from jettison.core import ports
from jettison.core.controlstream import Failure
from jettison.cost.hardware import HardwareProfile
from jettison.sim.executor import Executor
from jettison.sim.loop import EventLoop, Scheduled
from jettison.sim.tasks import FarRows, StepRun
from jettison.sim.transfers import TransferEnd, Transfers
from jettison.types import NANOSECONDS, ModelShape, ShardId, WorkerId


class Peer(Protocol):
    """Another worker, as a modelled worker uses it."""

    life: int
    """Counts its restarts: nothing sent to one life reaches the next."""

    def take_input(self, run: StepRun, failure: Failure | None) -> None:
        """The input of a stage arrives, or word that the stage before it has failed."""
        ...

    def land(self, transfer: ports.SendKV | ports.SendShard, end: TransferEnd) -> None:
        """The last byte of a transfer has arrived, or its sender has given it up."""
        ...


class Plant(Protocol):
    """The cluster, as a modelled worker uses it."""

    loop: EventLoop
    executor: Executor
    transfers: Transfers
    profile: HardwareProfile
    shape: ModelShape
    has_copy_engine: bool
    """Swaps travel over the host link beside the steps."""

    @property
    def is_watched(self) -> bool:
        """Stages of groups of one stage are to be reported, too."""
        ...

    @property
    def shares_cores(self) -> bool:
        """A step takes longer while other workers compute."""
        ...

    def slowdown(self) -> float:
        """The time of a step that begins now over its time alone."""
        ...

    def report(self, worker_id: WorkerId, event: ports.Event, at_ns: int) -> Scheduled:
        """A worker sends an event to the controller."""
        ...

    def worker(self, worker_id: WorkerId) -> Peer:
        """A worker by its id."""
        ...

    def shared_copy(self, worker_id: WorkerId) -> set[ShardId]:
        """Shards that the worker's machine keeps in host memory for sleepers."""
        ...

    def is_linked(self, a: WorkerId, b: WorkerId) -> bool:
        """Both workers live, and the link between them is not cut."""
        ...

    def note_stage(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage computes its part from ``started_ns`` to ``ended_ns``."""
        ...

    def note_activation(self, delay_ns: int) -> None:
        """An activation was on its way for ``delay_ns``."""
        ...


def far_ns(plant: Plant, here: WorkerId, far: FarRows) -> int:
    """Nanoseconds of remote attention in a stage at ``here``: each layer sends queries and waits, both ways behind the
    piece on the wire, and for the peer's attention."""
    shape, there, transfers = plant.shape, far.src, plant.transfers
    query_bytes = far.num_rows * shape.num_heads * shape.head_dim * shape.dtype_bytes
    link = transfers.network.topology.link(here, there)
    # The answer has a sum a head beside its values.
    num_bytes = 2 * query_bytes + far.num_rows * shape.num_heads * shape.dtype_bytes
    layer_ns = 2 * link.latency_ns + round(num_bytes / link.bytes_per_s * NANOSECONDS)
    layer_ns += transfers.piece_wait_ns(here, there) + transfers.piece_wait_ns(there, here)
    layer_ns += plant.executor.attention_ns(far.num_kv_tokens, far.num_rows)
    return far.num_layers * layer_ns
