"""The plant: the interface of the cluster that a modelled worker uses."""

from __future__ import annotations

from typing import Protocol

from jettison.core import ports
from jettison.core.controlstream import Failure
from jettison.cost.hardware import HardwareProfile
from jettison.sim.executor import Executor
from jettison.sim.loop import EventLoop, Scheduled
from jettison.sim.tasks import StepRun
from jettison.sim.transfers import TransferEnd, Transfers
from jettison.types import ModelShape, ShardId, WorkerId


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
