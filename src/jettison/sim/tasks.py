"""What stands in a modelled worker's control stream: parts of steps, and commands. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jettison.core import ports
from jettison.sim.executor import StepLoad
from jettison.types import SampledToken, WorkerId

TOKEN = SampledToken(0)
"""What every simulated row samples."""


class Failure(NamedTuple):
    """Why a stage's part of a step did not happen."""

    message: str
    lost_worker: WorkerId | None = None
    recompute: bool = False


class FarRows(NamedTuple):
    """Attention of a stage's rows over KV at a peer, of one range of layers."""

    src: WorkerId
    num_layers: int
    num_kv_tokens: int
    """Of all rows."""
    num_rows: int


@dataclass(slots=True, eq=False)
class StepRun:
    """A step as its stages need it: totals, read when it was issued."""

    step: ports.RunStep
    load: StepLoad
    far: Mapping[WorkerId, list[FarRows]]
    """By the worker whose stage asks."""
    high_blocks: Mapping[WorkerId, int]
    """1 + the highest block that a stage touches, where that matters."""


@dataclass(slots=True, eq=False)
class StageTask:
    """One stage's part of a step, in the control stream."""

    run: StepRun
    index: int
    arrives_ns: int
    has_input: bool
    failure: Failure | None = None

    @property
    def previous(self) -> WorkerId | None:
        """Whose output it waits for."""
        return self.run.step.stages[self.index - 1].worker_id if self.index else None

    @property
    def is_last(self) -> bool:
        """It samples, and tells."""
        return self.index == len(self.run.step.stages) - 1


Command = (
    ports.OfferLayout | ports.ApplyLayout | ports.SendKV | ports.SendShard | ports.SwapOut | ports.SwapIn
    | ports.LoadShard | ports.FenceWorker
)  # fmt: skip


@dataclass(slots=True, eq=False)
class CommandEntry:
    """A command in the control stream."""

    command: Command
    arrives_ns: int
