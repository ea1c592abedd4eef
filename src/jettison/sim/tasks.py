"""The entries of a modelled worker's control stream: parts of steps, and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jettison.core import ports
from jettison.core.controlstream import ABANDONED, Failure, Kind
from jettison.core.serving.flights import work_of
from jettison.sim.executor import Executor, StageShape, StepLoad
from jettison.sim.loop import Scheduled
from jettison.types import NANOSECONDS, SampledToken, WorkerId

LOAD_PIECE_BYTES = 2 << 20
"""Bytes read from the model folder between two steps."""

TOKEN = SampledToken(0)
"""The token that every simulated row samples."""


class FarRows(NamedTuple):
    """Attention of a stage's rows over KV at a peer, of one range of layers."""

    src: WorkerId
    num_layers: int
    num_kv_tokens: int
    """KV tokens of all rows."""
    num_rows: int


@dataclass(slots=True, eq=False)
class StepRun:
    """A step as its stages need it: totals, read when it was issued."""

    step: ports.RunStep
    load: StepLoad
    far: Mapping[WorkerId, list[FarRows]]
    """By the worker of the stage that asks."""
    high_blocks: Mapping[WorkerId, int]
    """1 + the highest block that a stage touches, where that matters."""
    kept_layers: int | None = None
    """Layers of the first stage behind which it has kept rows: ``load`` is what the others are."""

    @property
    def num_resumed(self) -> int:
        """Layers of the first stage that the rows had behind them when the step was issued."""
        return 0 if self.step.resumes is None else self.step.resumes.num_layers

    def keep(self, num_layers: int) -> Failure | None:
        """The first stage keeps the rows that may be shed. The verdict where there are no others: nothing is kept if
        nothing has been computed."""
        first = self.step.sheds_from
        if not first and not num_layers:
            return ABANDONED
        self.kept_layers, rows = num_layers, self.step.rows[:first]
        if not rows:
            return Failure.of_kept(num_layers)
        self.load = StepLoad.of(work_of(rows), [row.samples for row in rows].count(True))
        return None


@dataclass(slots=True, eq=False)
class StageTask:
    """One stage's part of a step."""

    run: StepRun
    index: int
    has_input: bool
    number: int = 0
    """The number of the step among its worker's steps, once it has begun."""
    slowness: float = 1.0
    """Its time over its undisturbed time."""

    @property
    def previous(self) -> WorkerId | None:
        """The worker that it waits for the output of; None on a first stage."""
        return self.run.step.stages[self.index - 1].worker_id if self.index else None

    def heeds(self, step_id: int) -> bool:
        """Whether it gives up where the flag names this step."""
        return self.run.step.step_id == step_id and not self.index and self.run.step.safepoint_layers > 0

    def part(self, num_layers: int, begin: int = 0, end: int | None = None) -> StageShape:
        """Its layers from the ``begin``-th to before the ``end``-th (None: to its end), of a model of
        ``num_layers``."""
        layers = self.run.step.stages[self.index].layers
        stop = len(layers) if end is None else end
        return StageShape(
            stop - begin, layers.lo == 0 and not begin, layers.hi == num_layers and stop == len(layers)
        )

    @property
    def begins_at(self) -> int:
        """Layers of its stage that its rows have behind them."""
        return 0 if self.index else self.run.num_resumed

    @property
    def is_last(self) -> bool:
        """It is the last stage, which samples and reports."""
        return self.index == len(self.run.step.stages) - 1


@dataclass(slots=True)
class Running:
    """The step that a worker computes."""

    task: StageTask
    end: Scheduled
    end_ns: int
    start_ns: int = 0
    reported_ns: int = 0
    """When the worker's last report before its end arrives."""

    def next_safepoint(self, executor: Executor, worker_id: WorkerId, now_ns: int) -> tuple[int, int] | None:
        """When the step looks at the flag next, now included, and the layer that is next then; None: it does not look
        again."""
        task, run = self.task, self.task.run
        if run.kept_layers is not None:
            return None
        begin = task.begins_at
        for layer in range(begin, len(run.step.stages[0].layers), run.step.safepoint_layers):
            stage = StageShape(layer - begin, not begin, False)
            took_ns = executor.stage_ns(worker_id, task.number, run.load, stage) * task.slowness if layer > begin else 0
            at_ns = self.start_ns + round(took_ns)
            if at_ns >= now_ns:
                return (at_ns, layer) if at_ns < self.end_ns else None
        return None


def ended_early(
    step_id: int, failure: Failure, took_ns: int = 0
) -> ports.StepFailed | ports.StepAbandoned | ports.StepCompleted:
    """The last stage's report of a step that was not computed to its end."""
    if failure.kept_layers is not None:
        return ports.StepCompleted(step_id, [], {}, took_ns, failure.kept_layers)
    if failure.abandoned:
        return ports.StepAbandoned(step_id)
    return ports.StepFailed(step_id, failure.message, failure.lost_worker, failure.recompute)


Command = (
    ports.OfferLayout | ports.ApplyLayout | ports.SendKV | ports.SendShard | ports.LoadShard | ports.KeepShard
    | ports.FenceWorker
)  # fmt: skip


KINDS: dict[type, Kind] = {
    ports.OfferLayout: Kind.OFFER_LAYOUT, ports.ApplyLayout: Kind.APPLY_LAYOUT, ports.SendKV: Kind.TRANSFER,
    ports.SendShard: Kind.TRANSFER, ports.LoadShard: Kind.LOAD, ports.KeepShard: Kind.LOAD,
    ports.FenceWorker: Kind.FENCE,
}  # fmt: skip


def kind_of(command: Command) -> Kind:
    """The kind of a command in the control stream."""
    if isinstance(command, ports.SendKV) and command.src == command.dst:
        if command.beside_steps:
            return Kind.COPY_OUT_BESIDE if command.to_host else Kind.COPY_IN_BESIDE
        return Kind.COPY
    return KINDS[type(command)]


@dataclass(slots=True, eq=False)
class ShardLoading:
    """A shard on its way from the model folder, or to or from the machine's copy."""

    command: ports.LoadShard | ports.KeepShard
    left_ns: int
    piece_ns: int

    @classmethod
    def begin(cls, command: ports.LoadShard | ports.KeepShard, num_bytes: int, took_s: float) -> ShardLoading:
        """``took_s``: its time with nothing else to do."""
        took_ns = max(1, round(took_s * NANOSECONDS))
        return cls(command, took_ns, -(-took_ns * LOAD_PIECE_BYTES // max(1, num_bytes)))

    def take_piece(self) -> int:
        """Take the next piece; returns its time."""
        took_ns = min(self.piece_ns, self.left_ns)
        self.left_ns -= took_ns
        return took_ns
