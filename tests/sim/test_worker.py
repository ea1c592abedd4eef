"""What a modelled worker makes of its control stream. The rules of order by themselves: ``core/test_controlstream``."""

from __future__ import annotations

import pytest
from scenarios import PAGE_BYTES, make_setup, make_shape

from jettison.core import ports
from jettison.core.controlstream import Failure
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import StagePlan
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.executor import StepLoad
from jettison.sim.tasks import LOAD_PIECE_BYTES, Command, StepRun
from jettison.types import LayerRange, layer_shard

APART = (StagePlan(1, LayerRange(0, 4)),)
BEHIND = (StagePlan(0, LayerRange(0, 2)), StagePlan(1, LayerRange(2, 4)))
"""Worker 1 has the second stage."""


class Alone:
    """Worker 1 of two, given commands in place of the core's, and what it tells."""

    def __init__(self, shard_bytes: int = 40 * PAGE_BYTES) -> None:
        self.told: list[ports.Event] = []
        shape = make_shape(shard_bytes=shard_bytes)
        self.cluster = SimulatedCluster(make_setup("recompute", num_workers=2, shape=shape))
        self.worker = self.cluster.workers[1]

        def report(worker: object, event: ports.Event, at_ns: int) -> object:
            return self.cluster.loop.at(at_ns, lambda: self.told.append(event))

        self.cluster.report = report  # type: ignore[method-assign, assignment]

    def step(self, step_id: int, stages: tuple[StagePlan, ...] = APART, *, epoch: int = 0) -> StepRun:
        run = StepRun(ports.RunStep(step_id, 3, epoch, stages, ()), StepLoad(1, 1, 1, 1), {}, {})
        self.worker.deliver_step(run, len(stages) - 1, self.cluster.loop.now_ns)
        return run

    def command(self, command: Command) -> None:
        self.worker.deliver(command, self.cluster.loop.now_ns)

    def take(self) -> list[ports.Event]:
        self.cluster.loop.run()
        told, self.told[:] = list(self.told), []
        return told

    def take_ids(self) -> list[int]:
        """Of steps and calls, in the order of their ends."""
        ids = [getattr(event, "step_id", getattr(event, "call_id", None)) for event in self.take()]
        return [each for each in ids if each is not None]


def test_a_step_of_an_older_epoch_is_refused() -> None:
    alone = Alone()
    for step_id, epoch in enumerate((2, 1, 2)):
        alone.step(step_id, epoch=epoch)
    told = alone.take()
    assert {type(event) for event in told} == {ports.StepCompleted, ports.StepFailed}
    assert [event for event in told if isinstance(event, ports.StepFailed)] == [
        ports.StepFailed(1, "step of epoch 1 of group 3, which is at epoch 2")
    ]
    alone.worker.die()
    alone.worker.rise()
    alone.worker.filled.update(alone.worker.memory.shards)
    alone.step(9, epoch=0)
    assert isinstance(alone.take()[0], ports.StepCompleted), "a new life knows no group"


def test_a_step_overtakes_one_that_waits_and_a_fence_does_not() -> None:
    alone = Alone()
    waiting = alone.step(1, BEHIND)
    alone.command(ports.FenceWorker(1, 2, 0, 0))
    alone.step(3)
    assert alone.take_ids() == [3]
    alone.worker.take_input(waiting, None)
    assert alone.take_ids() == [1, 2]


@pytest.mark.parametrize("late", [None, Failure("the stage before has failed")])
def test_what_comes_of_a_link_after_its_loss_is_not_used(late: Failure | None) -> None:
    """A fence is answered behind the step that the loss has ended."""
    alone = Alone()
    waiting = alone.step(1, BEHIND)
    alone.command(ports.FenceWorker(1, 2, 0, 0))
    alone.worker.lose_link(0)
    alone.worker.take_input(waiting, late)
    assert alone.take() == [ports.StepFailed(1, *Failure.of_lost_input(0)[:3]), ports.WorkerFenced(1, 2)]


def test_what_the_stage_before_says_goes_before_a_refusal() -> None:
    alone = Alone()
    alone.step(1, epoch=2)
    stale = alone.step(2, BEHIND, epoch=1)
    assert alone.take_ids() == [1], "it waits for its input all the same"
    alone.worker.take_input(stale, Failure("poisoned"))
    assert alone.take() == [ports.StepFailed(2, "poisoned")]


def test_a_step_waits_for_one_piece_of_a_load_and_layouts_for_all_of_it() -> None:
    alone = Alone(shard_bytes=4 * LOAD_PIECE_BYTES)
    alone.worker.filled.discard(layer_shard(0))
    alone.command(ports.LoadShard(1, 1, layer_shard(0)))
    alone.command(ports.LoadShard(1, 2, "layer:99"))
    alone.command(ports.OfferLayout(1, 3, LayoutSpec(frozenset(alone.worker.memory.shards), LayerRange(0, 4)), 0))
    alone.worker.take_input(alone.step(4, BEHIND), None)
    told = alone.take()
    assert [type(event) for event in told] == [
        ports.StepCompleted, ports.ShardLoaded, ports.CallFailed, ports.LayoutOffered,
    ]
    assert layer_shard(0) in alone.worker.filled
