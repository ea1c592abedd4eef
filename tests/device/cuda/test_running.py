"""A step under way: how far the host runs ahead, where it may be given up, and that no poll waits."""

from __future__ import annotations

import numpy as np
import pytest
from cardbackend import RowKernels, card_runner

from jettison.device.cuda import running
from jettison.device.cuda.running import AHEAD, CudaStep, Launches, Safepoints, wait_for
from jettison.device.step import StepInput
from jettison.errors import WorkerLostError
from jettison.types import LayerRange

LAYERS = LayerRange(3, 11)


class SlowCard:
    """Ends nothing by itself: ``num_over`` of the recorded points are reached."""

    def __init__(self) -> None:
        self.num_recorded = self.num_over = self.num_under_way = 0

    def begin_step(self) -> None:
        self.num_under_way += 1

    def end_step(self) -> None:
        self.num_under_way -= 1

    def record(self) -> SlowEvent:
        self.num_recorded += 1
        return SlowEvent(self, self.num_recorded)

    def synchronize(self) -> None:
        self.num_over = self.num_recorded


class SlowEvent:
    def __init__(self, card: SlowCard, number: int) -> None:
        self._card, self._number = card, number

    def done(self) -> bool:
        return self._card.num_over >= self._number

    def synchronize(self) -> None:
        self._card.num_over = max(self._card.num_over, self._number)


class Steps:
    """A step on such a card, and what it has launched."""

    def __init__(self, safepoints: Safepoints | None = None, between=None, fails_at: int | None = None,
                 captures_at: int | None = None) -> None:
        self.card, self.log = SlowCard(), []
        self._fails_at = fails_at
        self.num_captures, self.captures_at = 0, captures_at
        launches = Launches(LAYERS, self._layer, self._tail, lambda: self.num_captures)
        self.running = CudaStep(self.card, launches, safepoints, between)

    def _layer(self, layer: int) -> None:
        if layer == self._fails_at:
            raise IndexError("no such block")
        self.log.append(layer)
        self.num_captures += layer == self.captures_at

    def _tail(self):
        self.log.append("tail")
        return lambda: "made"


def never() -> bool:
    return False


def test_without_safepoints_all_is_launched_as_it_is_polled_and_none_waits() -> None:
    steps = Steps()
    assert steps.log == [3, 4], "the first layers are launched at the start"
    for _ in range(20):
        assert not steps.running.poll()
    assert steps.log == [*LAYERS.layers(), "tail"] and steps.card.num_recorded == 1
    assert steps.card.num_under_way == 1
    steps.card.synchronize()
    assert steps.running.poll() and steps.running.poll() and steps.running.result() == "made"
    assert steps.card.num_under_way == 0


def test_a_wait_leaves_the_interpreter_to_others_only_where_nothing_is_to_be_launched(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(running.time, "sleep", slept.append)
    steps = Steps()
    for _ in range(len(LAYERS) - AHEAD):
        steps.running.wait(1.0)
        assert not slept, "layers are left to launch"
        steps.running.poll()
    steps.running.wait(0.5)
    assert slept == [0.5]
    steps = Steps(Safepoints(never, 1))
    steps.running.wait(0.25)
    assert slept == [0.5, 0.25], "the host is as far ahead as it may be"


@pytest.mark.parametrize("between", [None, lambda: None])
def test_the_host_is_two_layers_ahead_at_most(between) -> None:
    steps = Steps(Safepoints(never, 1) if between is None else None, between)
    for num_over in range(len(LAYERS)):
        steps.card.num_over = num_over
        for _ in range(3):
            assert not steps.running.poll()
        assert [each for each in steps.log if each != "tail"] == [*LAYERS.layers()][: AHEAD + num_over]
    steps.card.synchronize()
    assert steps.running.poll() and steps.running.result() == "made"


def test_it_is_given_up_within_two_layers_and_each_safepoint_asks_once() -> None:
    asked: list[int] = []
    wanted = [False]

    def gives_up() -> bool:
        asked.append(len(asked))
        return wanted[0]

    steps = Steps(Safepoints(gives_up, 2))
    for _ in range(5):
        steps.running.poll()
    assert steps.log == [3, 4] and len(asked) == 1, "the safepoint before layer 5 waits for layer 3"
    wanted[0] = True
    steps.card.num_over = 1
    steps.running.poll()
    assert steps.log == [3, 4] and len(asked) == 2
    assert not steps.running.poll(), "layer 4 is still under way"
    steps.card.synchronize()
    assert steps.running.poll() and steps.running.result() is None and len(asked) == 2


def test_peers_are_answered_between_layers() -> None:
    answered: list[int] = []
    steps = Steps(between=lambda: answered.append(1))
    assert steps.running.result() == "made"
    assert len(answered) == len(LAYERS) - 1


@pytest.mark.parametrize("layer", [3, 7])
def test_what_fails_is_raised_where_the_result_is_asked_for(layer: int) -> None:
    steps = Steps(fails_at=layer)
    while not steps.running.poll():
        pass
    assert steps.log == list(range(3, layer))
    with pytest.raises(IndexError, match="no such block"):
        steps.running.result()
    assert steps.card.num_under_way == 0


def behind(first: Steps, **more) -> Steps:
    """A step that is started behind another, on its card."""
    second = Steps.__new__(Steps)
    second.card, second.log, second._fails_at = first.card, [], more.get("fails_at")
    second.num_captures, second.captures_at = 0, more.get("captures_at")
    # Of one runner: the captures of both are one count.
    launches = Launches(LAYERS, second._layer, second._tail, lambda: first.num_captures + second.num_captures)
    second.running = CudaStep(first.card, launches, None, None, first.running)
    return second


@pytest.mark.parametrize("captures_at", [LAYERS.lo, LAYERS.lo + 1, LAYERS.hi - 1])
def test_a_step_that_captured_says_so_and_the_one_behind_it_does_not(captures_at: int) -> None:
    plain, first = Steps(), Steps(captures_at=captures_at)
    assert plain.running.result() == "made" and not plain.running.has_prepared
    while first.log[-1] != "tail":
        first.running.poll()
    for second in (behind(first), behind(first, captures_at=captures_at)):
        assert second.running.result() == first.running.result() == "made"
        assert first.running.has_prepared and second.running.has_prepared == (second.captures_at is not None)


def test_a_step_may_be_followed_once_all_of_it_is_launched() -> None:
    first = Steps()
    assert not first.running.may_be_followed
    while first.log[-1] != "tail":
        first.running.poll()
    assert first.running.may_be_followed
    second = behind(first)
    while second.log[-1] != "tail":
        assert not second.running.poll()
    assert first.card.num_under_way == 2 and not first.running.is_over
    first.card.num_over = 1
    assert not second.running.poll() and first.running.is_over and first.card.num_under_way == 1
    first.card.num_over = 2
    assert second.running.poll() and second.running.result() == first.running.result() == "made"
    assert not second.running.may_be_followed, "it is over"


@pytest.mark.parametrize(
    "bounded", [Steps(Safepoints(never, 1)), Steps(between=lambda: None)], ids=["safepoints", "peers"]
)
def test_what_may_be_given_up_is_not_followed(bounded: Steps) -> None:
    while bounded.log[-1] != "tail":
        bounded.card.synchronize()
        bounded.running.poll()
        assert not bounded.running.may_be_followed


def test_one_that_fails_behind_another_ends_after_it() -> None:
    first = Steps()
    while not first.running.may_be_followed:
        first.running.poll()
    second = behind(first, fails_at=4)
    assert second.running.is_over and first.running.is_over and first.card.num_under_way == 0
    assert first.running.result() == "made"
    with pytest.raises(IndexError):
        second.running.result()


def test_a_card_that_has_failed_takes_its_worker_with_it() -> None:
    steps = Steps()

    class Failed:
        def done(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

        synchronize = done

    steps.card.record = Failed
    with pytest.raises(WorkerLostError, match=r"the card has failed: CUDA error: an illegal .* encountered$"):
        steps.running.result()
    with pytest.raises(WorkerLostError):
        wait_for(Failed())


@pytest.mark.parametrize("layer", [LAYERS.lo, LAYERS.lo + AHEAD])
def test_a_card_that_fails_during_a_launch_takes_its_worker_with_it(monkeypatch, layer: int) -> None:
    def failed(*_) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SlowCard, "synchronize", failed)
    steps = Steps(fails_at=layer)
    with pytest.raises(WorkerLostError, match="the card has failed: CUDA error: an illegal"):
        steps.running.result()
    assert steps.card.num_under_way == 0


def test_a_card_that_failed_between_steps_takes_its_worker_with_it(tiny_models, new_runner, monkeypatch) -> None:
    runner = new_runner(tiny_models["qwen2"], kernels=RowKernels("pretended"), build=card_runner)
    step = StepInput(
        step_id=1, layer_lo=0, layer_hi=4, token_ids=np.array([5], dtype=np.int32),
        query_lens=np.array([1], dtype=np.int32), context_lens=np.array([0], dtype=np.int32),
        block_tables=np.array([[0]], dtype=np.int32), sample_rows=np.array([0], dtype=np.int32),
    )  # fmt: skip
    assert runner.start_step(step, None).result().tokens

    def failed(*_) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner._card, "copy_in", failed)
    with pytest.raises(RuntimeError, match="CUDA error"):  # of that step alone, as the card goes on
        runner.start_step(step, None)
    monkeypatch.setattr(runner._card, "synchronize", failed)
    with pytest.raises(WorkerLostError, match="the card has failed: CUDA error: an illegal"):
        runner.start_step(step, None)
