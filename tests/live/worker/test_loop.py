"""The rules of ``WorkerLoop``, one by one, over deterministic links."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from worker_fakes import HIDDEN, FakeDevice, expected_token, fresh_bytes, make_step, step_done, tokens_of

from jettison.core import ports
from jettison.errors import ModelError, WorkerLostError
from jettison.live.engine.inprocess import InProcessCluster
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.worker.activations import OutgoingActivation
from jettison.live.worker.loop import MAX_GROUPS_KNOWN, WorkerLoop
from jettison.memory.layout import LayoutSpec
from jettison.transport.inproc import InProcessLink
from jettison.transport.link import FrameKind
from jettison.types import LayerRange


class Cluster(InProcessCluster):
    """Two or three fake workers and a list of everything they said."""

    def __init__(self, num_workers=2, piece_bytes=256, seed=None, **device):
        self.told: list[tuple[int, m.Event]] = []
        self.devices = {i: FakeDevice(i, **device) for i in range(num_workers)}
        super().__init__(
            self.devices, lambda worker, event: self.told.append((worker, event)), piece_bytes=piece_bytes, seed=seed,
            clock_ns=lambda: 0,
        )
        self.start()

    def steps(self, step_id, tokens, stages=((0, 0, 2), (1, 2, 4)), **more):
        """The commands of one pipelined step: (worker, command) in stage order."""
        commands = []
        for i, (worker, lo, hi) in enumerate(stages):
            prev = stages[i - 1][0] if i else None
            next_ = stages[i + 1][0] if i + 1 < len(stages) else None
            step = make_step(step_id, tokens, (lo, hi), prev, next_, **more)
            commands.append((worker, codec.step_command(step)))
        return commands

    def send_all(self, commands):
        for worker, command in commands:
            self.send(worker, command)

    def take(self):
        """Ends of links are left out: a test may give a worker another one."""
        return [event for _, event in self.take_with_workers() if not isinstance(event, ports.LinkLost)]

    def take_with_workers(self):
        told, self.told = self.told, []
        return told


def record(**more):
    return LayoutSpec(frozenset(["layer:0"]), LayerRange(0, 4), **more)


def names(events):
    return [type(event).__name__ for event in events]


def test_a_step_of_one_stage():
    cluster = Cluster(1)
    cluster.send(0, codec.step_command(make_step(7, [5, 6])))
    cluster.pump()
    assert cluster.take() == [step_done(0, 7, 6 * 3 + 4)]


def test_hidden_states_travel_in_chunks_through_three_stages():
    cluster = Cluster(3)
    tokens = list(range(7000))  # 7000 tokens x 24 x 8 bytes is more than one activation frame holds
    stages = ((0, 0, 1), (1, 1, 2), (2, 2, 4))
    cluster.send_all(cluster.steps(1, tokens, stages))
    cluster.pump()
    events = cluster.take()
    assert names(events) == ["StageDone", "StageDone", "StepDone"]
    assert tokens_of(events[-1]) == [expected_token(tokens, [(lo, hi) for _, lo, hi in stages])]


def test_an_activation_may_arrive_before_its_step():
    cluster = Cluster(2)
    (first, a), (second, b) = cluster.steps(1, [3])
    cluster.send(first, a)
    cluster.pump()
    assert names(cluster.take()) == ["StageDone"]
    cluster.send(second, b)
    cluster.pump()
    assert cluster.take() == [step_done(1, 1, expected_token([3], [(0, 2), (2, 4)]))]


def test_a_step_with_input_overtakes_one_without():
    cluster = Cluster(2)
    waiting = cluster.steps(1, [3])
    cluster.send(*waiting[1])
    cluster.send(1, codec.step_command(make_step(2, [4])))
    cluster.pump()
    assert [event.step_id for event in cluster.take()] == [2]
    cluster.send(*waiting[0])
    cluster.pump()
    assert [event.step_id for event in cluster.take()] == [1, 1]


@pytest.mark.parametrize(
    "barrier",
    [
        ports.OfferLayout(1, 9, record(), 0), ports.ApplyLayout(1, 9, record(), 0, 0, ()),
        ports.LoadShard(1, 9, "layer:0"), m.ReportMemory(9),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_barrier_waits_for_earlier_steps_and_only_apply_holds_later_ones(barrier):
    cluster = Cluster(2)
    waiting = cluster.steps(1, [3])
    cluster.send(*waiting[1])
    cluster.send(1, barrier)
    cluster.send(1, codec.step_command(make_step(2, [4])))
    cluster.pump()
    strict = isinstance(barrier, ports.ApplyLayout)
    assert names(cluster.take()) == ([] if strict else ["StepDone"])
    cluster.send(*waiting[0])
    cluster.pump()
    events = [event for event in cluster.take() if not (strict and isinstance(event, m.MemoryReported))]
    assert [getattr(event, "call_id", None) == 9 for event in events] == [False, False, True] + [False] * strict
    assert events[-1 if strict else 1].step_id == (2 if strict else 1)


def test_a_move_does_not_hold_later_steps_and_gets_a_turn_after_each():
    cluster = Cluster(2)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2, 3), (4, 5, 6)))
    for step_id in range(30):
        cluster.send(0, codec.step_command(make_step(step_id, [step_id])))
    cluster.pump()
    kinds = names(cluster.take())
    assert kinds.count("StepDone") == 30 and kinds.count("TransferEnded") == 1
    assert kinds.index("TransferEnded") < 20, "bulk starved behind steps"
    assert (cluster.devices[1].kv[:, 4:7] == cluster.devices[0].kv[:, 1:4]).all()


class Timed(FakeDevice):
    """Steps and pieces take (virtual) time; notes when each began and ended."""

    STEP_NS, PIECE_NS = 4_000, 150

    def __init__(self, clock, worker_id):
        super().__init__(worker_id)
        self.clock, self.steps, self.num_pieces_before = clock, [], []

    def run_step(self, step, hidden, port=None, gives_up=None):
        began = self.clock[0]
        self.clock[0] += self.STEP_NS
        self.steps.append((began, self.clock[0]))
        self.num_pieces_before.append(0)
        return super().run_step(step, hidden, port, gives_up)

    def kv_gather(self, layers, block_ids, out, **where):
        self.clock[0] += self.PIECE_NS
        self.num_pieces_before[-1] += 1
        return super().kv_gather(layers, block_ids, out)


def test_between_steps_bulk_takes_up_to_a_quarter_of_a_stages_time():
    clock = [0]
    device = Timed(clock, 0)
    here, there = InProcessLink.pair(0, 1, activation_bytes=1 << 10, bulk_bytes=1 << 16)
    loop = WorkerLoop(0, device, {1: here}, lambda event: None, 40, clock_ns=lambda: clock[0])
    for step_id in range(12):
        loop.deliver(codec.step_command(make_step(step_id, [step_id])))
    loop.tick()
    # It starts after the steps before it.
    loop.deliver(ports.SendKV(5, 0, 1, LayerRange(0, 4), tuple(range(1, 16)), tuple(range(16, 31))))
    for step_id in range(12, 40):
        loop.deliver(codec.step_command(make_step(step_id, [step_id])))
    while loop.tick():
        for frame in there.poll_frames():
            frame.release()
    gaps = [began - ended for (_, ended), (began, _) in zip(device.steps, device.steps[1:])]
    assert max(gaps) <= Timed.STEP_NS // 4 + Timed.PIECE_NS, "a step waited for more than bulk may take"
    sent = device.num_pieces_before[12:-1]
    assert sum(device.num_pieces_before) == 60
    assert max(sent) >= 3, "one piece a step: an exchange takes as many steps as it has pieces"


class Layered(FakeDevice):
    """A step has layers that take (virtual) time, and looks at its links between them."""

    NUM_LAYERS, LAYER_NS = 20, 1_000

    def __init__(self, clock, between):
        super().__init__(0, shard_num_bytes=6_000)
        self.clock, self.between = clock, between

    def run_step(self, step, hidden, port=None, gives_up=None):
        for _ in range(self.NUM_LAYERS):
            self.clock[0] += self.LAYER_NS
            if port is not None:
                port.poll()
            self.between()
        return super().run_step(step, hidden, port, gives_up)


def test_a_busy_worker_gives_parameters_between_layers_and_writes_nothing_there():
    """A link holds few pieces: between steps alone it would carry no more a step, whatever the step takes."""
    clock, num_drained, kv_written = [0], [], []
    here, there = InProcessLink.pair(0, 1, activation_bytes=1 << 10, bulk_bytes=400)

    def between():
        frames = list(there.poll_frames())
        num_drained[-1] += sum(frame.kind is FrameKind.SHARD_PIECE for frame in frames)
        for frame in frames:
            frame.release()
        kv_written.append((device.kv != kv).any())

    device = Layered(clock, between)
    kv = device.kv.copy()
    loop = WorkerLoop(0, device, {1: here}, lambda event: None, 100, clock_ns=lambda: clock[0])
    loop.deliver(ports.SendShard(6, 0, 1, "layer:2"))
    loop.deliver(ports.SendShard(7, 0, 1, "layer:3"))
    loop.tick()
    loop.tick()
    for step_id in range(4):
        loop.deliver(codec.step_command(make_step(step_id, [step_id])))
        num_drained.append(0)
        while loop.tick():
            pass
    assert sum(num_drained) >= 100, "as much in four steps as the link takes between layers"
    assert not any(kv_written), "memory that the step may read is not written while it runs"


class UnderWay:
    """A step of a device that computes by itself, until ``is_over`` says so."""

    may_be_followed = has_prepared = False

    def __init__(self, compute, is_over):
        self.compute, self.is_over, self.num_polls, self.num_waits = compute, is_over, 0, 0

    def poll(self):
        self.num_polls += 1
        return self.is_over()

    is_launched = True

    def wait(self, most_s):
        self.num_waits += 1

    def result(self):
        assert self.is_over()
        return self.compute()


def pieces_of_blocks(link, transfer_id, blocks, unit):
    """Send a whole transfer, a block of all layers a piece."""
    send = link.send_frame
    assert send(FrameKind.TRANSFER_BEGIN, transfer_id, struct.pack("<Q", 4 * len(blocks) * unit), 0, lambda out: None)
    for block in blocks:
        yield
        ids = np.array([block], dtype=np.int32).view(np.uint8)

        def fill(out, ids=ids):
            out[:-4], out[-4:] = 9, ids

        assert send(FrameKind.KV_PIECE, transfer_id, struct.pack("<iiI?", 0, 4, 1, False), 4 * unit + 4, fill)
    assert send(FrameKind.TRANSFER_END, transfer_id, struct.pack("<?", True), 0, lambda out: None)


@pytest.mark.parametrize("is_launched", [True, False])
def test_links_are_served_while_a_device_computes(is_launched):
    """Bulk has its turns once the step needs this thread no more, and none between that step and the next one."""
    here, there = InProcessLink.pair(0, 1, activation_bytes=1 << 10, bulk_bytes=1 << 10)
    events, started = [], []
    device = FakeDevice(0)
    device.computes_by_itself = True
    sending = pieces_of_blocks(there, 5, [7, 8], device.kv_block_bytes)

    def start_step(step, *arguments):
        def is_over():
            next(sending, None)
            return loop._inbox.ready(2) and started[-1].num_polls > 6

        started.append(UnderWay(lambda: device.run_step(step, *arguments), is_over))
        started[-1].is_launched = is_launched
        if step.step_id == 1:
            assert OutgoingActivation(2, np.zeros(HIDDEN * 8, dtype=np.uint8)).send(there)
        return started[-1]

    device.start_step = start_step
    loop = WorkerLoop(0, device, {1: here}, events.append, clock_ns=lambda: 0)
    turns, loop._peers.run_bulk_between_steps = [], lambda: turns.append(1)
    loop.deliver(codec.step_command(make_step(1, [5])))
    loop.tick()
    assert started[0].num_polls > 1, "what the next step waits for has come meanwhile"
    assert names(events) == (["TransferEnded", "StepDone"] if is_launched else ["StepDone"])
    assert bool((device.kv[:, [7, 8]] == 9).all()) == is_launched
    loop.deliver(codec.step_command(make_step(3, [5])))
    loop.tick()
    assert len(started) == 2 and turns == ([] if is_launched else [1])


def test_between_two_looks_at_a_step_other_threads_have_the_interpreter():
    """A loop that only polls delays each launch of a copying thread by milliseconds."""
    device, started, turns = FakeDevice(0), [], [True, True]
    device.ahead.turn = lambda: bool(turns) and turns.pop()

    def start_step(*arguments):
        started.append(UnderWay(lambda: device.run_step(*arguments), lambda: started[0].num_waits == 3))
        return started[-1]

    device.start_step = start_step
    loop = WorkerLoop(0, device, {}, [].append, clock_ns=lambda: 0)
    loop.deliver(codec.step_command(make_step(1, [5])))
    loop.tick()
    assert started[0].num_polls == 6, "it waits where there is nothing to do, and only there"


def test_a_stage_that_has_prepared_later_steps_says_so():
    """Once: the next step has prepared none."""
    events, started = [], []
    device = FakeDevice(0)

    def start_step(*arguments):
        started.append(UnderWay(lambda: device.run_step(*arguments), lambda: True))
        started[-1].has_prepared = len(started) == 1
        return started[-1]

    device.start_step = start_step
    loop = WorkerLoop(0, device, {}, events.append, clock_ns=lambda: 0)
    for step_id in (1, 2):
        loop.deliver(codec.step_command(make_step(step_id, [5])))
        loop.tick()
    assert [event.completed.has_prepared for event in events] == [True, False]
    first, second = InProcessLink.pair(0, 1, activation_bytes=1 << 12, bulk_bytes=1 << 12)
    loop, second = WorkerLoop(0, device, {1: first}, events.append, clock_ns=lambda: 0), second
    started.clear()
    for step_id in (3, 4):
        loop.deliver(codec.step_command(make_step(step_id, [5], (0, 2), next_=1)))
        loop.tick()
    assert [(event.step_id, event.has_prepared) for event in events[2:]] == [(3, True), (4, False)]


def test_a_step_is_not_left_running_where_serving_the_links_fails():
    events, started = [], []
    device = FakeDevice(0)

    def start_step(*arguments):
        started.append(UnderWay(lambda: device.run_step(*arguments), lambda: bool(failures)))
        return started[-1]

    failures = []

    def fail():
        failures.append(OSError("too many open files"))
        raise failures[-1]

    device.start_step = start_step
    loop = WorkerLoop(0, device, {}, events.append, clock_ns=lambda: 0)
    loop.deliver(codec.step_command(make_step(1, [5])))
    loop._peers.serve_urgent, serve_urgent = fail, loop._peers.serve_urgent
    loop._stream.begin(entry := loop._stream.next_entry())
    loop._run_step(entry)
    assert device.log == [("step", 1)], "it was waited for"
    assert names(events) == ["StepFailed"] and "too many open files" in events[0].message
    loop._peers.serve_urgent = serve_urgent
    loop.deliver(codec.step_command(make_step(2, [5])))
    loop.tick()
    assert names(events) == ["StepFailed", "StepDone"]


def test_pieces_between_layers_take_a_quarter_of_their_time():
    clock = [0]
    here, there = InProcessLink.pair(0, 1, activation_bytes=1 << 10, bulk_bytes=1 << 20)

    class Slow(Layered):
        def read_shard(self, shard, offset, out):
            clock[0] += 700  # a piece takes so long
            super().read_shard(shard, offset, out)

    spans = []

    def between():
        for frame in there.poll_frames():
            frame.release()

    device = Slow(clock, between)
    run_step = device.run_step

    def timed(*args):
        began = clock[0]
        result = run_step(*args)
        spans.append(clock[0] - began)
        return result

    device.run_step = timed
    loop = WorkerLoop(0, device, {1: here}, lambda event: None, 10, clock_ns=lambda: clock[0])
    loop.deliver(ports.SendShard(6, 0, 1, "layer:2"))
    loop.tick()
    for step_id in range(20):
        loop.deliver(codec.step_command(make_step(step_id, [step_id])))
    while loop.tick():
        pass
    alone = Layered.NUM_LAYERS * Layered.LAYER_NS
    assert max(spans) > alone, "pieces went between layers"
    assert max(spans) <= alone * 5 // 4 + 700


def test_a_shard_is_loaded_in_pieces_and_a_step_waits_for_one_of_them():
    cluster = Cluster(1)
    cluster.send(0, ports.LoadShard(0, 9, "layer:0"))
    for step_id in range(3):
        cluster.send(0, codec.step_command(make_step(step_id, [step_id])))
    cluster.send(0, ports.LoadShard(0, 10, "layer:1"))
    cluster.send(0, ports.OfferLayout(0, 11, record(), 0))
    cluster.send(0, m.ReportMemory(12))
    cluster.pump()
    what = [entry[0] for entry in cluster.devices[0].log]
    assert what[:7] == ["load", "piece", "step", "piece", "step", "piece", "step"]
    assert what[7:] == ["piece", "load", *["piece"] * 4, "offer"]
    said = [getattr(event, "call_id", None) for event in cluster.take()]
    assert [call for call in said if call is not None] == [9, 10, 11, 12]
    assert (cluster.devices[0].shards["layer:0"] == fresh_bytes(("disk", "layer:0"), 1000)).all()


def test_a_shard_is_kept_in_pieces_as_one_is_loaded():
    cluster = Cluster(1)
    cluster.send(0, ports.KeepShard(0, 9, "layer:0"))
    cluster.send(0, codec.step_command(make_step(0, [1])))
    cluster.send(0, ports.OfferLayout(0, 10, record(), 0))
    cluster.pump()
    assert [entry[0] for entry in cluster.devices[0].log] == ["keep", "step", "piece", "offer"]
    assert [event.call_id for event in cluster.take() if hasattr(event, "call_id")] == [9, 10]


def test_moves_and_fences_do_not_wait_for_a_load():
    cluster = Cluster(2)
    cluster.send(0, ports.LoadShard(0, 9, "layer:0"))
    cluster.pump(1)
    cluster.send(0, ports.SendShard(5, 0, 1, "layer:2"))
    cluster.send(0, ports.FenceWorker(0, 10, 7, 0))
    cluster.pump()
    events = cluster.take()
    assert names(events)[0] == "WorkerFenced"
    assert sorted(names(events)) == ["ShardLoaded", "TransferEnded", "WorkerFenced"]
    assert next(e for e in events if isinstance(e, ports.TransferEnded)).complete


def test_a_load_that_fails_on_the_way_is_told_and_the_next_command_runs():
    cluster = Cluster(1)
    device = cluster.devices[0]

    def breaks(shard):
        yield
        raise ModelError(f"{shard}: truncated")

    device.loading_shard_from_disk = breaks
    cluster.send(0, ports.LoadShard(0, 9, "layer:0"))
    cluster.send(0, ports.OfferLayout(0, 10, record(), 0))
    cluster.pump()
    failed, offered = cluster.take()
    assert failed == ports.CallFailed(0, 9, "ModelError: layer:0: truncated")
    assert offered.call_id == 10


def test_a_layout_without_a_shard_ends_what_was_being_sent_of_it():
    """Also where it is mapped again, empty, before the next piece."""
    cluster = Cluster(2, piece_bytes=100)
    cluster.send(0, ports.SendShard(5, 0, 1, "layer:2"))
    cluster.send(0, ports.SendShard(6, 0, 1, "layer:0"))
    cluster.pump(3)
    cluster.send(0, ports.ApplyLayout(0, 9, record(), 0, 0, ()))
    cluster.pump()
    ends = {e.transfer_id: e.complete for e in cluster.take() if isinstance(e, ports.TransferEnded)}
    assert ends == {5: False, 6: True}
    assert cluster.devices[1].filled == ["layer:0"]


@pytest.mark.parametrize("piece_bytes", [44, 100, 133, 1 << 20])
def test_kv_arrives_intact_whatever_the_piece(piece_bytes):
    cluster = Cluster(2, piece_bytes=piece_bytes)
    before = cluster.devices[1].kv.copy()
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(1, 4), (9, 2, 11, 0), (3, 15, 0, 7)))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(5, True, 3 * 4 * 40, 0)]
    assert (cluster.devices[1].kv[1:4, [3, 15, 0, 7]] == cluster.devices[0].kv[1:4, [9, 2, 11, 0]]).all()
    untouched = [b for b in range(16) if b not in (3, 15, 0, 7)]
    assert (cluster.devices[1].kv[:, untouched] == before[:, untouched]).all()
    assert (cluster.devices[1].kv[0] == before[0]).all()


def test_a_move_of_nothing_ends_complete():
    cluster = Cluster(2)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (), ()))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(5, True, 0, 0)]


def test_a_shard_arrives_intact_and_is_marked():
    cluster = Cluster(2)
    cluster.send(0, ports.SendShard(6, 0, 1, "layer:2"))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(6, True, 1000, 0)]
    assert (cluster.devices[1].shards["layer:2"] == cluster.devices[0].shards["layer:2"]).all()
    assert cluster.devices[1].filled == ["layer:2"]


def test_kv_goes_before_a_shard_that_was_first():
    cluster = Cluster(2)
    cluster.send(0, ports.SendShard(6, 0, 1, "layer:2"))
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1,), (1,)))
    cluster.pump()
    assert [event.transfer_id for event in cluster.take()] == [5, 6]


def test_cancel_in_the_middle_ends_incomplete():
    cluster = Cluster(2, piece_bytes=44)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2, 3), (1, 2, 3)))
    cluster.pump(max_ticks=4)
    cluster.send(0, ports.CancelTransfer(0, 5))
    cluster.pump()
    (ended,) = cluster.take()
    assert (ended.transfer_id, ended.complete) == (5, False)
    assert 0 < ended.num_bytes < 4 * 3 * 40


def test_cancel_before_the_start_ends_incomplete_even_behind_a_waiting_step():
    cluster = Cluster(2)
    cluster.send(*cluster.steps(1, [3], ((1, 0, 2), (0, 2, 4)))[1])  # worker 0 waits for worker 1
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1,), (1,)))
    cluster.send(0, ports.SendKV(6, 0, 1, LayerRange(0, 4), (), ()))
    cluster.send(0, ports.CancelTransfer(0, 5))
    cluster.send(0, ports.CancelTransfer(0, 6))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(5, False, 0, 0), ports.TransferEnded(6, False, 0, 0)]


def test_cancel_after_the_end_is_nothing():
    cluster = Cluster(2)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1,), (1,)))
    cluster.pump()
    cluster.send(0, ports.CancelTransfer(0, 5))
    cluster.pump()
    assert [event.complete for event in cluster.take()] == [True]


def test_a_shard_that_is_not_here_ends_incomplete_and_marks_nothing():
    cluster = Cluster(2)
    cluster.send(0, ports.SendShard(6, 0, 1, "layer:77"))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(6, False, 0, 0)]
    assert cluster.devices[1].filled == []


def test_block_ids_outside_the_arenas_never_reach_the_device():
    cluster = Cluster(2)
    before = cluster.devices[1].kv.copy()
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2), (3, 16)))
    cluster.send(0, ports.SendKV(6, 0, 1, LayerRange(0, 4), (1, 2), (-1, 3)))
    cluster.pump()
    assert [(event.transfer_id, event.complete) for event in cluster.take()] == [(5, False), (6, False)]
    assert (cluster.devices[1].kv == before).all()


def test_a_step_whose_flag_is_up_ends_as_abandoned():
    cluster = Cluster(1)
    cluster.abandon(0, 7)
    cluster.send(0, codec.step_command(make_step(7, [5, 6], safepoint_layers=2)))
    cluster.pump()
    assert cluster.take() == [ports.StepAbandoned(7)]


def test_a_flag_for_another_step_stops_none_and_a_step_without_safepoints_looks_at_none():
    cluster = Cluster(1)
    cluster.abandon(0, 7)
    cluster.send(0, codec.step_command(make_step(7, [5, 6])))
    cluster.send(0, codec.step_command(make_step(8, [5, 6], safepoint_layers=1)))
    cluster.pump()
    assert names(cluster.take()) == ["StepDone", "StepDone"]


def test_the_first_stage_gives_up_and_the_last_one_tells():
    cluster = Cluster(3)
    stages = ((0, 0, 1), (1, 1, 2), (2, 2, 4))
    for worker in (0, 1, 2):
        cluster.abandon(worker, 1)
    for step_id in (1, 2):
        cluster.send_all(cluster.steps(step_id, [3], stages, safepoint_layers=1))
    cluster.pump()
    ends = [event for event in cluster.take() if not isinstance(event, m.StageDone)]
    assert ends == [ports.StepAbandoned(1), step_done(2, 2, expected_token([3], [(0, 1), (1, 2), (2, 4)]))]
    assert ("step", 1) not in cluster.devices[1].log and ("step", 1) not in cluster.devices[2].log


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_follows_another_starts_behind_it_and_fails_with_it(fails):
    """Both are there before the first begins: nothing of the controller comes between."""
    cluster = Cluster(1)
    cluster.devices[0].poisoned = {1} if fails else set()
    first = expected_token([5, 6], [(0, 4)])
    for step in (make_step(1, [5, 6]), make_step(2, [-1], follows_step=1), make_step(3, [4])):
        cluster.send(0, codec.step_command(step))
    cluster.pump()
    one, two, three = cluster.take()
    assert three == step_done(0, 3, expected_token([4], [(0, 4)]))
    if not fails:
        assert (one, two) == (step_done(0, 1, first), step_done(0, 2, expected_token([first], [(0, 4)])))
        return
    assert isinstance(one, ports.StepFailed) and not one.recompute
    assert isinstance(two, ports.StepFailed) and two.recompute and two.lost_worker is None
    assert "step 1" in two.message


def test_a_stage_past_the_first_does_not_look():
    """The word is raised when the first stage has handed on: the step runs to its end."""
    cluster = Cluster(2)
    first, second = cluster.steps(1, [3], safepoint_layers=1)
    cluster.send(*first)
    cluster.pump()
    for worker in (0, 1):
        cluster.abandon(worker, 1)
    cluster.send(*second)
    cluster.pump()
    assert names(cluster.take()) == ["StageDone", "StepDone"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_stage_gives_one_step_failed_from_the_last_one(failing):
    cluster = Cluster(3)
    cluster.devices[failing].poisoned = {1}
    for step_id in (1, 2):
        cluster.send_all(cluster.steps(step_id, [3], ((0, 0, 1), (1, 1, 2), (2, 2, 4))))
    cluster.pump()
    ends = [(worker, event) for worker, event in cluster.take_with_workers() if not isinstance(event, m.StageDone)]
    assert [(type(event), worker, event.step_id) for worker, event in ends] == [
        (ports.StepFailed, 2, 1), (m.StepDone, 2, 2),
    ]
    assert "poisoned step 1" in ends[0][1].message


def test_a_device_that_has_failed_for_good_ends_its_worker():
    cluster = Cluster(1)

    def fails(*arguments):
        raise WorkerLostError("the card has failed")

    cluster.devices[0].start_step = fails
    cluster.send(0, codec.step_command(make_step(1, [3])))
    with pytest.raises(WorkerLostError, match="the card has failed"):
        cluster.pump()


def test_a_step_of_an_older_epoch_is_refused():
    cluster = Cluster(1)
    cluster.send(0, codec.step_command(make_step(1, [3], group_id=4, epoch=2)))
    cluster.send(0, codec.step_command(make_step(2, [3], group_id=4, epoch=1)))
    cluster.send(0, codec.step_command(make_step(3, [3], group_id=5, epoch=1)))
    cluster.pump()
    assert [(type(event), event.step_id) for event in cluster.take()] == [
        (m.StepDone, 1), (ports.StepFailed, 2), (m.StepDone, 3),
    ]


def test_epochs_are_remembered_of_the_groups_used_last():
    cluster = Cluster(1)
    for step_id in range(MAX_GROUPS_KNOWN + 50):
        cluster.send(0, codec.step_command(make_step(2 * step_id + 1, [3], group_id=0, epoch=2)))
        cluster.send(0, codec.step_command(make_step(2 * step_id + 2, [3], group_id=step_id + 1, epoch=step_id)))
        cluster.pump()
    assert len(cluster._loops[0]._epochs) == MAX_GROUPS_KNOWN
    cluster.take()
    cluster.send(0, codec.step_command(make_step(9000, [3], group_id=0, epoch=1)))
    cluster.pump()
    assert names(cluster.take()) == ["StepFailed"], "a group in use is not forgotten, however old"


def test_layout_errors_are_call_failed_with_their_class():
    cluster = Cluster(1)
    cluster.send(0, ports.ApplyLayout(0, 1, record(), 0, 3, ()))
    cluster.send(0, ports.LoadShard(0, 2, "layer:99"))
    cluster.send(0, ports.ApplyLayout(0, 3, record(), 0, 0, ((1, 2),)))
    cluster.pump()
    failed, load, _, applied = cluster.take()
    assert failed.call_id == 1 and failed.message.startswith("StalePlanError: ")
    assert load.call_id == 2 and load.message.startswith("StalePlanError: ")
    assert (applied.call_id, applied.result.version) == (3, 1)


def test_a_dead_link_ends_moves_and_steps_that_depended_on_it():
    cluster = Cluster(2, piece_bytes=44)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2, 3), (1, 2, 3)))
    cluster.pump(max_ticks=4)
    cluster.send(0, ports.SendKV(6, 0, 1, LayerRange(0, 4), (7,), (7,)))
    cluster.send(*cluster.steps(9, [3])[1])
    cluster.pump(max_ticks=2)
    assert cluster.take() == []
    cluster.link(0, 1).cut()
    cluster.pump()
    told = cluster.take_with_workers()
    names_told = sorted(names(event for _, event in told))
    assert names_told == ["LinkLost", "LinkLost", "StepFailed", "TransferEnded", "TransferEnded"]
    for worker in (0, 1):
        of_transfers = [e for w, e in told if w == worker and not isinstance(e, ports.StepFailed)]
        assert of_transfers[1:] == [ports.LinkLost(worker, 1 - worker, 0)], "behind the ends of transfers"
    transfers = {e.transfer_id: (worker, e.complete) for worker, e in told if isinstance(e, ports.TransferEnded)}
    assert transfers[5] == (1, False), "the destination tells of what it knows"
    assert transfers[6] == (0, False), "the source tells of what it never began"
    # Afterwards: no link, so transfers and steps over it end at once, and others run.
    cluster.send(0, ports.SendKV(8, 0, 1, LayerRange(0, 4), (7,), (7,)))
    cluster.send_all(cluster.steps(10, [3]))
    cluster.send(1, codec.step_command(make_step(11, [3])))
    cluster.pump()
    ends = [event for event in cluster.take() if not isinstance(event, m.StageDone)]
    assert sorted(names(ends)) == ["StepDone", "StepFailed", "TransferEnded"]


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_stage_that_never_had_a_link_to_the_next_one_tells_so_itself(poisoned):
    events, device = [], FakeDevice(0)
    device.poisoned = {1} if poisoned else set()
    loop = WorkerLoop(0, device, {}, events.append, clock_ns=lambda: 0)
    loop.deliver(codec.step_command(make_step(1, [5], (0, 2), next_=1)))
    loop.tick()
    [failed] = [event for event in events if isinstance(event, ports.StepFailed)]
    assert (failed.step_id, failed.lost_worker) == (1, None if poisoned else 1)
    assert ("poisoned" if poisoned else "no link to worker 1") in failed.message


def test_what_had_arrived_before_the_peer_died_counts():
    cluster = Cluster(2, piece_bytes=1 << 20)
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2, 3), (1, 2, 3)))
    loops = cluster._loops
    while loops[0].tick():
        pass
    assert list(loops) == [0, 1]
    assert loops[1]._peers.serve_urgent()
    cluster.link(0, 1).close()
    while loops[1].tick():
        pass
    assert [(event.transfer_id, event.complete) for event in cluster.take()] == [(5, True)]


def test_a_new_link_replaces_a_dead_one():
    cluster = Cluster(2)
    cluster.link(0, 1).cut()
    cluster.pump()
    forth, back = InProcessLink.pair(0, 1)
    cluster._loops[0].attach_link(1, forth)
    cluster._loops[1].attach_link(0, back)
    cluster.send_all(cluster.steps(1, [3]))
    cluster.pump()
    assert names(cluster.take()) == ["StageDone", "StepDone"]


def test_early_activations_are_bounded_and_the_dropped_step_is_told():
    cluster = Cluster(2)
    commands = [cluster.steps(step_id, [3]) for step_id in range(70)]
    for first, _ in commands:
        cluster.send(*first)
    cluster.pump()
    assert names(cluster.take()) == ["StageDone"] * 70
    for _, second in commands:
        cluster.send(*second)
    cluster.pump()
    events = cluster.take()
    assert [event.step_id for event in events if isinstance(event, ports.StepFailed)] == list(range(6))
    assert len(events) == 70


def test_nonsense_from_a_peer_costs_the_link_and_nothing_else():
    ours, theirs = InProcessLink.pair(0, 1)
    events: list[m.Event] = []
    loop = WorkerLoop(0, FakeDevice(), {1: ours}, events.append)
    theirs.send_frame(FrameKind.TRANSFER_BEGIN, 5, b"\0" * 8, 0, lambda out: None)
    theirs.send_frame(FrameKind.KV_PIECE, 4, b"\1", 3, lambda out: None)
    while loop.tick():
        pass
    assert loop.links == {} and not ours.is_open
    ended, lost = events
    assert (ended.transfer_id, ended.complete, lost) == (5, False, ports.LinkLost(0, 1, 0))
    loop.deliver(codec.step_command(make_step(1, [3])))
    assert loop.tick() and isinstance(events[-1], m.StepDone)


def test_stop_finishes_nothing():
    cluster = Cluster(1)
    cluster.send(0, codec.step_command(make_step(1, [3])))
    cluster.send(0, m.Stop())
    assert cluster.pump() == 0 and cluster.take() == []


def test_numbers_survive_the_read_only_payload():
    """A piece's payload may be read-only memory: writing it into the device must only read it."""
    cluster = Cluster(2)
    cluster.send(1, ports.SendKV(5, 1, 0, LayerRange(0, 1), (0,), (0,)))
    cluster.pump()
    assert np.array_equal(cluster.devices[0].kv[0, 0], cluster.devices[1].kv[0, 0])


def test_a_swap_waits_for_earlier_steps_and_comes_back_whole():
    cluster = Cluster(1)
    device = cluster.devices[0]
    before = device.kv.copy()
    cluster.send(0, codec.step_command(make_step(1, [3])))
    cluster.send(0, ports.SendKV(7, 0, 0, LayerRange(0, 4), (2, 5), (1, 0), to_host=True))
    cluster.pump()
    assert device.log == [("step", 1), ("copy_to_host", [2, 5])]
    assert cluster.take()[1:] == [ports.TransferEnded(7, True, 4 * 2 * device.kv_block_bytes, 0)]
    device.kv[:] = 0
    cluster.send(0, ports.SendKV(8, 0, 0, LayerRange(0, 4), (1, 0), (9, 3), from_host=True))
    cluster.pump()
    assert names(cluster.take()) == ["TransferEnded"]
    assert (device.kv[:, [9, 3]] == before[:, [2, 5]]).all()


def test_a_swap_that_cannot_be_copied_ends_incomplete_and_the_worker_lives():
    cluster = Cluster(1)
    cluster.send(0, ports.SendKV(7, 0, 0, LayerRange(0, 4), (2,), (99,), to_host=True))
    cluster.send(0, codec.step_command(make_step(1, [3])))
    cluster.pump()
    assert cluster.take() == [ports.TransferEnded(7, False, 0, 0), step_done(0, 1, 3 * 3 + 4)]

# --- fences


def test_a_fence_ends_what_waits_for_the_lost_worker_and_is_answered_after_it():
    cluster = Cluster(2)
    (_, _), (second, b) = cluster.steps(1, [3])
    cluster.send(second, b)
    cluster.send(1, ports.FenceWorker(1, 9, 0, 0))
    cluster.pump()
    failed, fenced = cluster.take()
    assert (failed.step_id, failed.lost_worker) == (1, 0) and fenced == ports.WorkerFenced(1, 9)
    assert not cluster.link(1, 0).is_open


def test_a_loss_travels_through_later_stages_with_the_name_of_the_lost():
    cluster = Cluster(3)
    commands = cluster.steps(1, [3], ((0, 0, 1), (1, 1, 2), (2, 2, 4)))
    cluster.send_all(commands[1:])
    cluster.send(1, ports.FenceWorker(1, 9, 0, 0))
    cluster.pump()
    worker, failed = next(told for told in cluster.take_with_workers() if isinstance(told[1], ports.StepFailed))
    assert (worker, failed.lost_worker) == (2, 0)


def test_a_fence_waits_for_steps_that_still_have_an_input_to_come():
    cluster = Cluster(3)
    (first, a), (second, b) = cluster.steps(1, [3], ((0, 0, 2), (1, 2, 4)))
    cluster.send(second, b)
    cluster.send(1, ports.FenceWorker(1, 9, 2, 0))
    cluster.pump()
    assert cluster.take() == []
    cluster.send(first, a)
    cluster.pump()
    assert names(cluster.take()) == ["StageDone", "StepDone", "WorkerFenced"]


def test_pieces_of_a_lost_worker_are_not_written_after_the_fence():
    cluster = Cluster(2)
    before = cluster.devices[1].kv.copy()
    cluster.send(0, ports.SendKV(1, 0, 1, LayerRange(0, 4), (1, 2), (3, 4)))
    loops = cluster._loops
    for _ in range(40):  # everything is sent, and received up to its turn
        loops[0].tick()
    cluster.send(1, ports.FenceWorker(1, 9, 0, 0))
    while loops[1].tick():
        pass
    assert ports.WorkerFenced(1, 9) in cluster.take()
    assert (cluster.devices[1].kv == before).all()


def test_what_was_to_be_sent_to_a_lost_worker_does_not_reach_its_next_life():
    """It waits behind a step for longer than the restart takes: the blocks are others' by then."""
    cluster = Cluster(3)
    (first, a), (second, b) = cluster.steps(1, [3], ((2, 0, 2), (0, 2, 4)))
    cluster.send(second, b)
    cluster.send(0, ports.SendKV(1, 0, 1, LayerRange(0, 4), (1, 2), (3, 4)))
    cluster.send(0, ports.SendShard(2, 0, 1, "layer:0"))
    cluster.send(0, ports.SendShard(3, 0, 2, "layer:1"))
    cluster.pump()
    here, new = InProcessLink.pair(0, 1, activation_bytes=1 << 20, bulk_bytes=1 << 20)
    cluster._loops[0].attach_link(1, here, life=1)
    cluster.send(0, ports.FenceWorker(0, 9, 1, 0))
    cluster.send(first, a)
    cluster.pump()
    assert sorted(names(cluster.take())) == ["StageDone", "StepDone", "TransferEnded", "WorkerFenced"]
    assert here.is_open and not list(new.poll_frames())
    cluster.send(0, ports.SendShard(4, 0, 1, "layer:0"))
    cluster.pump()
    assert list(new.poll_frames()), "what is ordered behind the fence goes to the next life"


def test_a_late_piece_is_dropped_in_one_line(caplog):
    """Its transfer was called off for a layout that has taken its layers away."""
    cluster = Cluster(2)
    before, device = cluster.devices[1].kv.copy(), cluster.devices[1]

    def scatter(layers, block_ids, data, *, to_host=False):
        raise IndexError("layer 2: a block between 3 and 4 is not mapped")

    device.kv_scatter = scatter
    cluster.send(0, ports.SendKV(5, 0, 1, LayerRange(0, 4), (1, 2), (3, 4)))
    cluster.pump()
    assert [(event.transfer_id, event.complete) for event in cluster.take()] == [(5, False)]
    (told,) = caplog.records
    assert (told.levelname, told.exc_info) == ("WARNING", None) and "layer 2" in told.getMessage()
    assert (device.kv == before).all()


def test_a_fence_for_an_old_life_leaves_the_new_link_alone():
    cluster = Cluster(2)
    old = cluster.link(1, 0)
    _, new = InProcessLink.pair(0, 1, activation_bytes=1 << 20, bulk_bytes=1 << 20)
    cluster._loops[1].attach_link(0, new, life=1)
    assert not old.is_open
    cluster.send(1, ports.FenceWorker(1, 9, 0, 0))
    cluster.pump()
    assert cluster.take() == [ports.WorkerFenced(1, 9)] and new.is_open
    cluster.send(1, ports.FenceWorker(1, 10, 0, 1))
    cluster.pump()
    assert not new.is_open
