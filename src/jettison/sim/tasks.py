"""The entries of a modelled worker's control stream: parts of steps, and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jettison.core import ports
from jettison.core.controlstream import ABANDONED, Failure, Kind
from jettison.cost.stepwork import StepWork
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

    def of_others(self) -> StepLoad | None:
        """What the rows are that the step does not shed; None where there are none."""
        rows = self.step.rows[: self.step.sheds_from]
        work = StepWork.of((row.num_tokens, row.context_len) for row in rows)
        return StepLoad.of(work, [row.samples for row in rows].count(True)) if rows else None

    def keep(self, num_layers: int) -> Failure | None:
        """The first stage keeps the rows that may be shed. The verdict where there are no others: nothing is kept if
        nothing has been computed."""
        others = self.of_others()
        if others is None and not num_layers:
            return ABANDONED
        self.kept_layers = num_layers
        if others is None:
            return Failure.of_kept(num_layers)
        self.load = others
        return None


class Leg(NamedTuple):
    """Layers of a stage that a step computes with the same rows: from the ``begin``-th to before the ``end``-th."""

    load: StepLoad
    begin: int
    end: int


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
    legs: tuple[Leg, ...] = ()
    """What it computes, once it has begun."""

    def begin(self) -> Failure | None:
        """Lay out its legs. Rows that were shed join the others at their layer, and are kept again where they may go
        no further; the verdict of the latter where there are no others."""
        run, num_layers = self.run, len(self.run.step.stages[self.index].layers)
        resumes = run.step.resumes
        if self.index or resumes is None:
            self.legs = (Leg(run.load, 0, num_layers),)
            return None
        first, end, whole, others = resumes.num_layers, num_layers, run.load, run.of_others()
        if resumes.most_layers is not None:
            end = min(num_layers, first + resumes.most_layers)
        verdict = run.keep(end) if end < num_layers else None
        legs = [(others, 0, first), (whole, first, end), (others, end, num_layers)]
        self.legs = tuple(Leg(load, lo, hi) for load, lo, hi in legs if load is not None and lo < hi)
        return verdict

    def shed(self, layer: int) -> Failure | None:
        """Keep the rows that may be shed before a layer, and go on with the others; the verdict where there are
        none."""
        resumes, others = self.run.step.resumes, self.run.of_others()
        # Those that have not joined the others yet are kept where they are.
        verdict = self.run.keep(layer if resumes is None else max(layer, resumes.num_layers))
        num_layers = len(self.run.step.stages[self.index].layers)
        before = [Leg(load, lo, min(hi, layer)) for load, lo, hi in self.legs if lo < layer]
        rest = [] if others is None or layer >= num_layers else [Leg(others, layer, num_layers)]
        self.legs = (*before, *rest)
        return verdict

    def why_lost(self, kept: tuple[int, int] | None) -> Failure | None:
        """The failure of a step whose rows the first stage does not keep; ``kept``: the step whose rows it does, and
        the layers that these have behind them."""
        resumes = None if self.index else self.run.step.resumes
        if resumes is None or resumes[:2] == kept:
            return None
        return Failure(f"the rows of step {resumes.step_id} are not kept here", recompute=True)

    def kept_after(self, kept: tuple[int, int] | None) -> tuple[int, int] | None:
        """What the worker keeps once it is laid out, or has shed rows; ``kept``: before that."""
        num_layers, step = self.run.kept_layers, self.run.step
        if self.index or not self.legs or (num_layers is None and step.resumes is None):
            return kept
        return None if num_layers is None else (step.step_id, num_layers)

    def stage_ns(self, executor: Executor, worker_id: WorkerId, num_layers: int, layer: int | None = None) -> int:
        """Nanoseconds until the ``layer``-th is next (None: to its end), undisturbed, of a model of ``num_layers``."""
        took_ns, layers = 0, self.run.step.stages[self.index].layers
        for number, (load, begin, end) in enumerate(self.legs):
            end = end if layer is None else min(end, layer)
            if end <= begin:
                break
            shape = StageShape(
                end - begin, layers.lo == 0 and begin == 0, layers.hi == num_layers and end == len(layers)
            )
            load = load._replace(hides_host=True) if number else load  # the host's work is the step's, once
            took_ns += executor.stage_ns(worker_id, self.number, load, shape)
        return took_ns

    @property
    def previous(self) -> WorkerId | None:
        """The worker that it waits for the output of; None on a first stage."""
        return self.run.step.stages[self.index - 1].worker_id if self.index else None

    def heeds(self, step_id: int) -> bool:
        """Whether it gives up where the flag names this step."""
        return self.run.step.step_id == step_id and not self.index and self.run.step.safepoint_layers > 0

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

    def next_safepoint(
        self, executor: Executor, worker_id: WorkerId, num_layers: int, now_ns: int
    ) -> tuple[int, int] | None:
        """When the step looks at the flag next, now included, and the layer that is next then; None: it does not look
        again. ``num_layers``: of the model."""
        task, step = self.task, self.task.run.step
        resumes = step.resumes
        last = len(step.stages[0].layers)
        if resumes is not None and resumes.most_layers is not None:
            last = min(last, resumes.num_layers + resumes.most_layers)
        joined = 0 if resumes is None else resumes.num_layers
        begin = joined if not step.sheds_from else 0
        # Looks are counted from the layer at which rows join the others.
        looks = [*range(begin, joined, step.safepoint_layers), *range(joined, last, step.safepoint_layers)]
        for layer in looks:
            took_ns = task.stage_ns(executor, worker_id, num_layers, layer) * task.slowness if layer > begin else 0
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
    if isinstance(command, ports.SendKV) and command.is_settled:
        return Kind.SETTLED_TRANSFER
    if isinstance(command, ports.ApplyLayout) and command.gives_back:
        return Kind.GIVE_BACK
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
