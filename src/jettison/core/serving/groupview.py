"""The part of a group that planning a step reads. ``Group`` implements it; the policies' views are made of this
alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from typing import Protocol

from jettison.core.serving.blocks import GroupBlocks
from jettison.core.serving.flights import InFlight
from jettison.core.serving.holds import Holder
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.queues import Queues
from jettison.core.serving.slices import Keeping
from jettison.memory.stages import StagePlan
from jettison.policy.batching import BatchLimits, BatchPlan, BlockedBy
from jettison.policy.lookahead import ChunkCost
from jettison.policy.slo import Pace
from jettison.policy.standing import Foreseen
from jettison.types import RequestId


class Planner(Protocol):
    """See ``StepPlanner``."""

    def limits(self) -> BatchLimits: ...
    def next_plan(self, now_ns: int) -> BatchPlan: ...


class GroupView(Protocol):
    """See ``Group``, which documents each. Planning changes none of it."""

    @property
    def stages(self) -> Sequence[StagePlan]: ...
    @property
    def limits(self) -> SchedulerLimits: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def blocks(self) -> GroupBlocks: ...
    @property
    def in_flight(self) -> dict[int, InFlight]: ...
    @property
    def version(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def absent(self) -> Collection[RequestId]: ...
    @property
    def sitting_out(self) -> Collection[RequestId]: ...
    @property
    def planner(self) -> Planner: ...
    @property
    def slices(self) -> Keeping: ...
    @property
    def holds_preemption(self) -> Set[Holder]: ...
    @property
    def pending_copies(self) -> tuple[int, int]: ...
    @property
    def longest_alone_s(self) -> float | None: ...
    @property
    def head_blocked_by(self) -> BlockedBy | None: ...
    @property
    def foreseen(self) -> Foreseen | None: ...
    @property
    def prices(self) -> Callable[[], ChunkCost]: ...
    @property
    def pace(self) -> Callable[[], Pace | None]: ...
