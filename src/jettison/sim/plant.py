"""What a modelled worker needs of the cluster around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from jettison.core import ports
from jettison.cost.hardware import HardwareProfile
from jettison.sim.executor import Executor
from jettison.sim.loop import EventLoop, Scheduled
from jettison.sim.transfers import Transfers
from jettison.types import ModelShape, ShardId, WorkerId

if TYPE_CHECKING:
    from jettison.sim.worker import SimWorker


class Plant(Protocol):
    """What a worker needs of the cluster around it."""

    loop: EventLoop
    executor: Executor
    transfers: Transfers
    profile: HardwareProfile
    shape: ModelShape
    has_copy_engine: bool
    """Swaps travel over the host link beside the steps."""

    @property
    def is_watched(self) -> bool:
        """Stages of groups of one are to be told of, too."""
        ...

    @property
    def shares_cores(self) -> bool:
        """A step takes longer while other workers compute."""
        ...

    def slowdown(self) -> float:
        """How many times as long a step takes that begins now as it does alone."""
        ...

    def report(self, worker: SimWorker, event: ports.Event, at_ns: int) -> Scheduled:
        """Send an event to the controller."""
        ...

    def worker(self, worker_id: WorkerId) -> SimWorker:
        """A peer."""
        ...

    def shared_copy(self, worker_id: WorkerId) -> set[ShardId]:
        """Shards that the worker's machine keeps in host memory for those that sleep."""
        ...

    def is_linked(self, a: WorkerId, b: WorkerId) -> bool:
        """Both live, and nothing has cut them from each other."""
        ...

    def note_stage(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage computes its part from the one time to the other."""
        ...

    def note_activation(self, delay_ns: int) -> None:
        """An activation was so long on its way."""
        ...
