"""Copies beside steps in a live worker: on a thread and in turns, under layouts, cancellations, failures and ends."""

from __future__ import annotations

import select
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from worker_fakes import FakeDevice, make_step

from jettison.core import ports
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.worker.copies import CopyThread
from jettison.live.worker.loop import WorkerLoop
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

UNIT, NUM_LAYERS = 40, 4
PATIENCE_S = 60.0
"""Whatever takes this long has hung."""


class Worker:
    """One worker and what it says; ``threaded``: copies have a thread."""

    def __init__(self, threaded: bool) -> None:
        self.device = FakeDevice(0, NUM_LAYERS)
        self.events: list[m.Event] = []
        copier = CopyThread(clock_ns=lambda: 0) if threaded else None
        self.loop = WorkerLoop(
            0, self.device, {}, self.events.append, piece_bytes=UNIT, clock_ns=lambda: 0, copier=copier
        )
        self.copying = [0]
        """Copies under way, by id."""

    def deliver(self, *commands: m.Command) -> None:
        for command in commands:
            self.loop.deliver(codec.decode_command(codec.encode(command)))

    def run(self) -> list[m.Event]:
        """Until there is nothing to do but to wait for copies."""
        while self.loop.tick():
            pass
        return self.take()

    def finish(self, num_ends: int) -> list[m.Event]:
        """Until so many transfers have ended."""
        found = self.run()
        while sum(isinstance(event, ports.TransferEnded) for event in found) < num_ends:
            assert self.loop.copies_fd is not None, "a worker without a thread has nothing to wait for"
            assert select.select([self.loop.copies_fd], [], [], PATIENCE_S)[0], "no copy ends"
            found += self.run()
        return found

    def take(self) -> list[m.Event]:
        events, self.events[:] = list(self.events), []
        return events


@pytest.fixture(params=[True, False], ids=["thread", "turns"])
def worker(request):
    made = Worker(request.param)
    yield made
    made.loop.close()


@pytest.fixture
def threaded():
    made = Worker(True)
    yield made
    made.loop.close()


def out(transfer_id, blocks, slots, layers=(0, NUM_LAYERS)):
    return ports.SendKV(
        transfer_id, 0, 0, LayerRange(*layers), tuple(blocks), tuple(slots), to_host=True, beside_steps=True
    )


def back(transfer_id, slots, blocks, layers=(0, NUM_LAYERS)):
    return ports.SendKV(
        transfer_id, 0, 0, LayerRange(*layers), tuple(slots), tuple(blocks), from_host=True, beside_steps=True
    )


def step(step_id):
    return codec.step_command(make_step(step_id, [step_id], (0, NUM_LAYERS)))


def layout(call_id, version=0, layers=(0, NUM_LAYERS), copies=()):
    record = LayoutSpec(frozenset([f"layer:{i}" for i in range(*layers)]), LayerRange(*layers))
    return ports.ApplyLayout(0, call_id, record, 0, version, tuple(copies))


def ends(events):
    """(id, whether complete, bytes) of the transfers among them."""
    return [(e.transfer_id, e.complete, e.num_bytes) for e in events if isinstance(e, ports.TransferEnded)]


class Gate:
    """Lets so many pieces through; one that waits goes through when its copy is stopped."""

    def __init__(self, device: FakeDevice, num_pieces: int) -> None:
        self._changed = threading.Condition()
        self._left = num_pieces
        self.waits = threading.Event()
        """Set while a piece waits."""
        device.copy_gate = self._pass

    def _pass(self, copy) -> None:
        with self._changed:
            while self._left == 0 and not copy.stopped.is_set():
                self.waits.set()
                self._changed.wait(0.001)
            self.waits.clear()
            self._left = max(0, self._left - 1)

    def open(self) -> None:
        with self._changed:
            self._left = 1 << 30
            self._changed.notify_all()


# --- bytes --------------------------------------------------------------------------------------------------------


def test_blocks_go_out_and_come_back_elsewhere(worker):
    before = worker.device.kv[:, [5, 2]].copy()
    worker.deliver(out(1, [5, 2], [7, 0]))
    assert ends(worker.finish(1)) == [(1, True, 2 * NUM_LAYERS * UNIT)]
    worker.deliver(back(2, [7, 0], [9, 8], (1, 3)))
    assert ends(worker.finish(1)) == [(2, True, 2 * 2 * UNIT)]
    np.testing.assert_array_equal(worker.device.kv[1:3, [9, 8]], before[1:3])
    assert not (worker.device.kv[0, [9, 8]] == before[0]).all()


def test_an_empty_copy_ends_too_and_one_that_cannot_be_made_ends_incomplete(worker):
    worker.deliver(out(1, [], []), out(2, [1], [99]), out(3, [1], [2]))
    assert sorted(ends(worker.finish(3))) == [(1, True, 0), (2, False, 0), (3, True, NUM_LAYERS * UNIT)]


def test_a_piece_that_fails_ends_its_copy_and_the_worker_lives(worker):
    def fail(copy):
        raise OSError("no such page")

    worker.device.copy_gate = fail
    worker.deliver(out(1, [1], [2]))
    assert ends(worker.finish(1)) == [(1, False, 0)]
    worker.device.copy_gate = lambda copy: None
    worker.deliver(out(2, [1], [2]), step(3))
    assert {type(event) for event in worker.finish(1)} == {ports.TransferEnded, m.StepDone}


# --- beside steps -------------------------------------------------------------------------------------------------


def test_steps_run_while_a_copy_does(threaded):
    """The copy is in the middle when the steps begin, and when they have ended."""
    gate = Gate(threaded.device, 3)
    threaded.deliver(out(1, [1, 2], [0, 1]))
    threaded.run()
    assert gate.waits.wait(PATIENCE_S)
    threaded.deliver(step(2), step(3))
    assert [event.step_id for event in threaded.run()] == [2, 3]
    assert threaded.device.copying
    gate.open()
    assert ends(threaded.finish(1)) == [(1, True, 8 * UNIT)]


def test_a_copy_goes_on_inside_a_step(threaded):
    """The step does not end before it has seen pieces being copied."""
    seen = []
    first_two, in_step = threading.Semaphore(0), threading.Event()

    def gate(copy):
        if copy.copied_bytes >= 2 * UNIT:
            in_step.wait(PATIENCE_S)
        first_two.release()

    run_step = threaded.device.run_step

    def run_and_watch(*arguments):
        in_step.set()
        seen.append(all(first_two.acquire(timeout=PATIENCE_S) for _ in range(8)))
        return run_step(*arguments)

    threaded.device.copy_gate, threaded.device.run_step = gate, run_and_watch
    threaded.deliver(out(1, [1, 2], [0, 1]), step(2))
    events = threaded.finish(1)
    assert seen == [True] and {type(event) for event in events} == {m.StepDone, ports.TransferEnded}


def test_without_a_thread_pieces_are_copied_between_steps():
    worker = Worker(threaded=False)
    worker.deliver(out(1, [1, 2], [0, 1]), *(step(i) for i in range(2, 8)))
    kinds = [type(event) for event in worker.run()]
    assert kinds.index(ports.TransferEnded) > 2 and kinds.count(m.StepDone) == 6


def test_a_copy_that_writes_blocks_waits_for_the_steps_before_it(worker):
    before = worker.device.kv[:, 3].copy()
    order = []
    run_step = worker.device.run_step

    def run(one, *more):
        order.append((worker.device.kv[:, 3] == before).all())
        return run_step(one, *more)

    worker.device.run_step = run
    worker.device.host[:, 1] = 7
    worker.deliver(step(1), step(2), back(3, [1], [3]))
    worker.finish(1)
    assert order == [True, True] and (worker.device.kv[:, 3] == 7).all()


# --- layouts, cancellations, ends ---------------------------------------------------------------------------------


def test_a_layout_waits_for_one_piece_and_what_is_still_there_goes_on(threaded):
    gate = Gate(threaded.device, 2)
    threaded.deliver(out(1, [9, 2], [0, 1]), out(2, [3], [2], (0, 2)), out(3, [4], [3], (1, 4)))
    threaded.run()
    assert gate.waits.wait(PATIENCE_S)
    threaded.deliver(layout(4))
    told = [type(event) for event in threaded.run()]
    assert told == [m.MemoryReported, ports.LayoutApplied], "they have come although the copy is held up"
    assert gate.waits.wait(PATIENCE_S)
    threaded.deliver(layout(5, 1, (0, 2), [(3, 11)]))
    first, third = ends(threaded.run())
    assert first[:2] == (1, False) and first[2] >= 4 * UNIT and third == (3, False, 0)
    gate.open()
    assert ends(threaded.finish(1)) == [(2, True, 2 * UNIT)]
    np.testing.assert_array_equal(threaded.device.host[:2, 2], threaded.device.kv[:2, 11])


def test_a_cancelled_copy_ends_at_its_next_piece_and_others_go_on(threaded):
    gate = Gate(threaded.device, 3)
    threaded.deliver(out(1, [1, 2], [0, 1]), out(2, [3], [2]), out(3, [4], [3]))
    threaded.run()
    assert gate.waits.wait(PATIENCE_S)
    threaded.deliver(ports.CancelTransfer(0, 2))
    assert ends(threaded.take()) == [(2, False, 0)], "it need not wait for the first"
    assert gate.waits.wait(PATIENCE_S)
    threaded.deliver(ports.CancelTransfer(0, 1), ports.CancelTransfer(0, 1), ports.CancelTransfer(0, 99))
    (one,) = ends(threaded.take())
    assert one[:2] == (1, False) and 3 * UNIT < one[2] < 8 * UNIT
    gate.open()
    assert ends(threaded.finish(1)) == [(3, True, NUM_LAYERS * UNIT)]


def test_a_copy_that_has_not_begun_is_withdrawn(worker):
    worker.deliver(step(1), back(2, [0], [3]), out(3, [1], [1]), ports.CancelTransfer(0, 2), ports.CancelTransfer(0, 3))
    assert ends(worker.take()) == [(2, False, 0), (3, False, 0)]
    assert [type(event) for event in worker.run()] == [m.StepDone]


def test_the_end_of_a_worker_waits_for_one_piece(threaded):
    gate = Gate(threaded.device, 1)
    threaded.deliver(out(1, [1, 2], [0, 1]))
    threaded.run()
    assert gate.waits.wait(PATIENCE_S)
    threaded.loop.close()
    threaded.loop.close()
    assert not threaded.device.copying and threaded.take() == []
    assert not [t for t in threading.enumerate() if t.name == "copies beside steps" and t.is_alive()]


class Histories(RuleBasedStateMachine):
    """Any order of copies, steps, layouts and cancellations: one end each, and exact bytes in those that are complete.

    Blocks 0 to 7 are only read, 8 to 15 only written; a slot is used by one copy at a time.
    """

    @initialize(threaded=st.booleans())
    def start(self, threaded):
        self.worker = Worker(threaded)
        self.device = self.worker.device
        self.next_id = 0
        self.copies: dict[int, tuple] = {}
        self.free_slots, self.free_blocks = set(range(8)), set(range(8, 16))
        self.calls: set[int] = set()
        self.version = 0
        self.cancelled: set[int] = set()
        self.layers = (0, NUM_LAYERS)
        self.seen: list[m.Event] = []

    def take_id(self):
        self.next_id += 1
        return self.next_id

    @rule(blocks=st.lists(st.integers(0, 7), unique=True, max_size=3), lo=st.integers(0, 3), to_host=st.booleans())
    def copy(self, blocks, lo, to_host):
        slots = sorted(self.free_slots)[: len(blocks)]
        if len(slots) < len(blocks) or not self.layers[0] <= lo < self.layers[1]:
            return
        transfer_id, layers = self.take_id(), (lo, self.layers[1])
        if to_host:
            wanted = self.device.kv[slice(*layers), blocks].copy()
            self.worker.deliver(out(transfer_id, blocks, slots, layers))
        else:
            blocks = sorted(self.free_blocks)[: len(slots)]
            if len(blocks) < len(slots):
                return
            self.device.host[slice(*layers), slots] = transfer_id
            wanted = self.device.host[slice(*layers), slots].copy()
            self.free_blocks -= set(blocks)
            self.worker.deliver(back(transfer_id, slots, blocks, layers))
        self.free_slots -= set(slots)
        self.copies[transfer_id] = (layers, blocks, slots, to_host, wanted)

    @rule()
    def one_step(self):
        self.worker.deliver(step(self.take_id()))

    @rule(layers=st.sampled_from([(0, 4), (0, 4), (0, 2), (2, 4)]))
    def apply_layout(self, layers):
        call_id = self.take_id()
        self.calls.add(call_id)
        self.worker.deliver(layout(call_id, self.version, layers))
        self.version += 1
        self.layers = layers

    @rule(back=st.integers(0, 3))
    def cancel(self, back):
        self.cancelled.add(self.next_id - back)
        self.worker.deliver(ports.CancelTransfer(0, self.next_id - back))

    @rule(num_ticks=st.integers(1, 6))
    def work(self, num_ticks):
        for _ in range(num_ticks):
            self.worker.loop.tick()
        self.note()

    def note(self):
        self.note_all(self.worker.take())

    def note_all(self, events):
        for event in events:
            self.seen.append(event)
            if isinstance(event, ports.TransferEnded):
                layers, blocks, slots, to_host, wanted = self.copies[event.transfer_id]
                if event.complete:
                    held, ids = (self.device.host, slots) if to_host else (self.device.kv, blocks)
                    np.testing.assert_array_equal(held[slice(*layers), ids], wanted)
                else:
                    assert self.calls or event.transfer_id in self.cancelled
                self.free_slots |= set(slots)

    def teardown(self):
        if not hasattr(self, "worker"):
            return
        try:
            self.note()
            self.note_all(self.worker.finish(len(self.copies) - len(ends(self.seen))))
            assert sorted(each[0] for each in ends(self.seen)) == sorted(self.copies), "one end each"
            assert {e.call_id for e in self.seen if isinstance(e, ports.LayoutApplied)} == self.calls
        finally:
            self.worker.loop.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, deadline=None)
