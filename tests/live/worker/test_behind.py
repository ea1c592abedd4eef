"""Steps that are started behind the one that is computed, on a device that computes by itself."""

from __future__ import annotations

import numpy as np
import pytest
from worker_fakes import FakeDevice, make_step

from jettison.core import ports
from jettison.errors import WorkerLostError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.worker.loop import WorkerLoop

POLLS_A_STEP = 6


class Step:
    """Launched at its second poll; computed, after those before it, at its sixth."""

    has_prepared = False

    def __init__(self, device: Device, step, hidden) -> None:
        self._device, self._step, self._hidden = device, step, hidden
        self.num_polls = 0
        self._result = self._error = None
        self._is_over = False

    @property
    def is_launched(self) -> bool:
        return self.num_polls >= 2

    @property
    def may_be_followed(self) -> bool:
        return self.is_launched and not self._is_over

    def wait(self, most_s: float) -> None:
        assert not self._is_over

    def poll(self) -> bool:
        self.num_polls += 1
        if not self._is_over and self.num_polls >= POLLS_A_STEP and self._device.under_way[0] is self:
            self._device.under_way.pop(0)
            self._is_over = True
            self._device.told.append(("over", self._step.step_id))
            try:
                self._result = self._device.run_step(self._step, self._hidden)
            except Exception as error:  # noqa: BLE001
                self._error = error
        return self._is_over

    def result(self):
        while not self.poll():
            pass
        if self._error is not None:
            raise self._error
        return self._result


class Device(FakeDevice):
    """Computes one step after the other, by itself."""

    def __init__(self) -> None:
        super().__init__(0)
        self.told, self.under_way = [], []
        self.refused: set[int] = set()

    def start_step(self, step, hidden, port=None, gives_up=None):
        if step.step_id in self.refused:
            raise IndexError("no such block")
        self.told.append(("started", step.step_id))
        self.under_way.append(Step(self, step, hidden))
        return self.under_way[-1]


class Worker:
    """A loop over such a device. Commands of ``coming`` are received inside a step only."""

    def __init__(self) -> None:
        self.device, self.events, self.coming = Device(), [], []
        self.loop = WorkerLoop(0, self.device, {}, self.events.append, receive=self._receive, clock_ns=lambda: 0)

    def _receive(self):
        coming, self.coming = self.coming, []
        return coming

    def run(self, *commands) -> list[str]:
        for command in commands:
            self.loop.deliver(command)
        while self.loop.tick():
            pass
        return [f"{type(event).__name__} {_number(event)}" for event in self.events]


def _number(event) -> int:
    completed = getattr(event, "completed", event)
    return getattr(completed, "step_id", getattr(completed, "call_id", 0))


def a_step(step_id: int, tokens=(3,), follows_step: int | None = None, **more):
    step = make_step(step_id, list(tokens), **more)
    step.follows_step = follows_step
    return codec.step_command(step)


def test_the_next_step_is_started_when_the_one_before_it_is_all_launched():
    worker = Worker()
    assert worker.run(a_step(1), a_step(2, [-1], 1), a_step(3, [-1], 2)) == [f"StepDone {i}" for i in (1, 2, 3)]
    assert worker.device.told == [
        ("started", 1), ("started", 2), ("over", 1), ("started", 3), ("over", 2), ("over", 3),
    ]  # fmt: skip
    alone = Worker()
    alone.run(a_step(1))
    alone.run(a_step(2, [-1], 1))
    alone.run(a_step(3, [-1], 2))
    assert alone.events == worker.events, "the same tokens, one after the other"


def test_a_step_that_comes_while_one_is_computed_is_started():
    worker = Worker()
    worker.coming = [a_step(2, [-1], 1), m.Stop()]
    worker.run(a_step(1))
    assert worker.device.told == [("started", 1), ("started", 2), ("over", 1)] and worker.loop.stopped
    worker.loop.close()
    assert worker.device.told[-1] == ("over", 2), "nothing is computed after the end"


@pytest.mark.parametrize("command", [m.ReportMemory(7), ports.FenceWorker(0, 7, 1, 0)])
def test_no_command_is_overtaken(command):
    worker = Worker()
    worker.device.memory_report = lambda: None
    told = worker.run(a_step(1), command, a_step(2))
    assert told[0].startswith("StepDone") and len(told) == 3
    assert worker.device.told == [("started", 1), ("over", 1), ("started", 2), ("over", 2)]


@pytest.mark.parametrize(
    "more", [{"safepoint_layers": 1}, {"next_worker": 1}], ids=["may be given up", "has a next stage"]
)
def test_a_step_that_needs_more_than_the_device_waits(more):
    worker = Worker()
    step = make_step(2, [3])
    for name, value in more.items():
        setattr(step, name, value)
    worker.run(a_step(1), codec.step_command(step))
    assert worker.device.told[:3] == [("started", 1), ("over", 1), ("started", 2)]


def test_held_steps_are_not_started():
    worker = Worker()
    worker.loop.deliver(a_step(1))
    start_step = worker.device.start_step

    def held(*arguments):
        worker.loop.hold_steps(True)
        return start_step(*arguments)

    worker.device.start_step = held
    worker.run(a_step(2))
    assert worker.device.told == [("started", 1), ("over", 1)]
    worker.loop.hold_steps(False)
    assert worker.run() == ["StepDone 1", "StepDone 2"]


def test_what_cannot_be_started_fails_by_itself():
    worker = Worker()
    worker.device.refused = {2}
    assert worker.run(a_step(1), a_step(2), a_step(3)) == ["StepDone 1", "StepFailed 2", "StepDone 3"]


def test_a_step_behind_one_that_fails_runs_again():
    worker = Worker()
    worker.device.poisoned = {1}
    assert worker.run(a_step(1), a_step(2, [-1], 1), a_step(3)) == ["StepFailed 1", "StepFailed 2", "StepDone 3"]
    assert worker.events[1].recompute and not worker.events[0].recompute


def test_a_device_that_is_lost_at_a_start_ends_its_worker():
    worker = Worker()
    start_step = worker.device.start_step

    def start(step, *arguments):
        if step.step_id == 2:
            raise WorkerLostError("the card has failed")
        return start_step(step, *arguments)

    worker.device.start_step = start
    with pytest.raises(WorkerLostError):
        worker.run(a_step(1), a_step(2))


def test_words_that_cannot_be_read_inside_a_step_end_the_worker():
    worker = Worker()

    def receive():
        raise codec.CodecError("nonsense")

    worker.loop._behind._receive = receive
    with pytest.raises(WorkerLostError, match="nonsense"):
        worker.run(a_step(1))


def test_bulk_gets_its_turn_between_the_two(monkeypatch):
    worker = Worker()
    turns: list[int] = []
    monkeypatch.setattr(
        worker.loop._peers, "run_bulk_between_steps", lambda: bool(turns.append(len(worker.device.under_way)))
    )
    worker.run(a_step(1), a_step(2), a_step(3))
    assert turns == [1, 1, 0]
    assert np.all(worker.device.kv == FakeDevice(0).kv)
