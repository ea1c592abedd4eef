"""Random histories of three workers: one end per step and per transfer, bytes intact, order kept."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise, permutations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule
from worker_fakes import FakeDevice, expected_token, make_step, tokens_of

from jettison.core import ports
from jettison.live.engine.inprocess import InProcessCluster
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

NUM_WORKERS, NUM_LAYERS, NUM_BLOCKS, UNIT = 3, 4, 12, 40
worker_ids = st.integers(0, NUM_WORKERS - 1)


class Workers(RuleBasedStateMachine):
    """Blocks 0 to 5 are only read by transfers, 6 to 11 only written, each by at most one: so bytes are exact. Steps
    run on the loop's thread, or on devices that compute by themselves, beside which links have their turns."""

    transfers = Bundle("transfers")

    @initialize(seed=st.none() | st.integers(0, 2**32 - 1), piece_bytes=st.sampled_from([44, 130, 4096]),
                may_cut=st.sampled_from([False, False, True]), computes_by_itself=st.booleans())
    def start(self, seed, piece_bytes, may_cut, computes_by_itself):
        self.may_cut = may_cut
        self.devices = {
            i: FakeDevice(i, NUM_LAYERS, NUM_BLOCKS, UNIT, shard_num_bytes=300) for i in range(NUM_WORKERS)
        }
        for device in self.devices.values():
            device.computes_by_itself = computes_by_itself
        self.told: list[tuple[int, m.Event]] = []
        self.cluster = InProcessCluster(
            self.devices, lambda worker, event: self.told.append((worker, event)), piece_bytes=piece_bytes, seed=seed,
            activation_bytes=500, clock_ns=lambda: 0,
        )
        self.cluster.start()
        self.next_id = 1
        self.steps: dict[int, tuple[list[int], list[tuple[int, int]], int]] = {}
        self.armed: dict[int, int] = {}
        """Step -> its first worker."""
        self.asked: set[int] = set()
        """Steps that were to be given up."""
        self.loaded: set[tuple[int, str]] = set()
        """Worker and shard that was read from the folder."""
        self.kv_transfers: dict[int, ports.SendKV] = {}
        self.sources: dict[int, int] = {}
        self.shard_transfers: dict[int, tuple[int, ports.SendShard]] = {}
        self.calls: set[int] = set()
        self.reports: set[int] = set()
        """Those that asked for nothing but the memory's state, which layouts tell of, too."""
        self.free = {i: set(range(6, NUM_BLOCKS)) for i in range(NUM_WORKERS)}
        self.sent: dict[int, list[tuple]] = {i: [] for i in range(NUM_WORKERS)}
        self.on_the_way: dict[int, deque[m.Command]] = {i: deque() for i in range(NUM_WORKERS)}
        self.cancelled: set[int] = set()
        self.severed: set[frozenset[int]] = set()

    def take_id(self):
        self.next_id += 1
        return self.next_id

    def send(self, worker, command, mark):
        """Put a command on its way; ``deliver`` lets it arrive, each worker's in order."""
        self.sent[worker].append(mark)
        self.on_the_way[worker].append(command)

    @rule(order=st.permutations(range(NUM_WORKERS)), num_stages=st.integers(1, 3), length=st.integers(1, 40),
          failing=st.none() | st.integers(0, 2), every=st.sampled_from([0, 1, 2, 9]))
    def pipelined_step(self, order, num_stages, length, failing, every):
        step_id = self.take_id()
        if failing is not None and failing < num_stages:
            self.devices[order[failing]].poisoned.add(step_id)
        tokens = [step_id * 3 + i for i in range(length)]
        bounds = np.linspace(0, NUM_LAYERS, num_stages + 1).astype(int)
        stages = [(int(lo), int(hi)) for lo, hi in pairwise(bounds)]
        self.steps[step_id] = (tokens, stages, order[num_stages - 1])
        if every:
            self.armed[step_id] = order[0]
        for i, layers in enumerate(stages):
            prev = order[i - 1] if i else None
            next_ = order[i + 1] if i + 1 < num_stages else None
            step = make_step(step_id, tokens, layers, prev, next_, safepoint_layers=every)
            self.send(order[i], codec.step_command(step), ("step", step_id))

    @precondition(lambda self: self.steps)
    @rule(worker=worker_ids, back=st.integers(1, 4))
    def abandon(self, worker, back):
        """Of some step, at any worker: only an armed one's first stage gives it up, if it has not run yet."""
        step_id = list(self.steps)[-min(back, len(self.steps))]
        if self.armed.get(step_id, worker) == worker:
            self.asked.add(step_id)
        self.cluster.abandon(worker, step_id)

    @rule(worker=worker_ids, count=st.integers(1, 4), ticks=st.integers(0, 12))
    def deliver(self, worker, count, ticks):
        for _ in range(min(count, len(self.on_the_way[worker]))):
            self.cluster.send(worker, self.on_the_way[worker].popleft())
        self.cluster.pump(max_ticks=ticks)

    @rule(target=transfers, src=worker_ids, dst=worker_ids, blocks=st.lists(st.integers(0, 5), unique=True, max_size=5),
          layers=st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda pair: pair[0] < pair[1]))
    def kv_move(self, src, dst, blocks, layers):
        if src == dst:  # a copy inside one worker is no transfer: test_loop has those
            dst = (src + 1) % NUM_WORKERS
        targets = sorted(self.free[dst])[: len(blocks)]
        if len(targets) < len(blocks):
            blocks = targets = []
        self.free[dst] -= set(targets)
        transfer = ports.SendKV(self.take_id(), src, dst, LayerRange(*layers), tuple(blocks), tuple(targets))
        self.kv_transfers[transfer.transfer_id] = transfer
        self.sources[transfer.transfer_id] = src
        self.send(src, transfer, ("transfer", transfer.transfer_id))
        return transfer.transfer_id

    @rule(target=transfers, src=worker_ids, dst=worker_ids, layer=st.integers(0, 3))
    def shard_move(self, src, dst, layer):
        shard = f"layer:{layer}"
        if (dst, shard) in self.loaded or self.is_filling(dst, shard):
            return multiple()  # a shard is filled from one source at a time
        transfer = ports.SendShard(self.take_id(), src, dst, shard)
        self.shard_transfers[transfer.transfer_id] = (src, transfer)
        self.sources[transfer.transfer_id] = src
        self.send(src, transfer, ("transfer", transfer.transfer_id))
        return transfer.transfer_id

    def is_filling(self, dst, shard):
        """Whether a transfer of the shard to this worker has not been told of as ended."""
        ended = self.ended()
        return any(
            transfer.dst == dst and transfer.shard == shard and transfer_id not in ended
            for transfer_id, (_, transfer) in self.shard_transfers.items()
        )

    @rule(transfer_id=transfers)
    def cancel(self, transfer_id):
        self.cancelled.add(transfer_id)
        self.on_the_way[self.sources[transfer_id]].append(ports.CancelTransfer(self.sources[transfer_id], transfer_id))

    @rule(worker=worker_ids, stale=st.booleans())
    def apply_layout(self, worker, stale):
        call_id = self.take_id()
        version = self.devices[worker].layout_version - stale
        record = LayoutSpec(frozenset([f"layer:{i}" for i in range(NUM_LAYERS)]), LayerRange(0, NUM_LAYERS))
        self.calls.add(call_id)
        self.send(worker, ports.ApplyLayout(worker, call_id, record, call_id, version, ()), ("apply", call_id))

    @rule(worker=worker_ids)
    def report(self, worker):
        call_id = self.take_id()
        self.calls.add(call_id)
        self.reports.add(call_id)
        self.send(worker, m.ReportMemory(call_id), ("report", call_id))

    @rule(worker=worker_ids, layer=st.integers(0, NUM_LAYERS))
    def load(self, worker, layer):
        if any(t.shard == f"layer:{layer}" and t.dst == worker for _, t in self.shard_transfers.values()):
            return  # a shard comes from a peer or from the folder, never from both at once
        self.loaded.add((worker, f"layer:{layer}"))
        call_id = self.take_id()
        self.calls.add(call_id)
        self.on_the_way[worker].append(ports.LoadShard(worker, call_id, f"layer:{layer}"))  # the last one is not mapped

    @precondition(lambda self: self.may_cut and not self.severed)
    @rule(a=worker_ids, b=worker_ids)
    def cut(self, a, b):
        if a != b:
            self.severed.add(frozenset((a, b)))
            self.cluster.link(a, b).cut()

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        while any(self.on_the_way.values()):
            for worker in range(NUM_WORKERS):
                self.deliver(worker, 2, 5)
        self.cluster.pump()
        ends, parted = Counter(), set()
        for worker, event in self.told:
            match event:
                case m.StepDone() | ports.StepFailed() | ports.StepAbandoned():
                    ends["step", event.step_id] += 1
                    self.check_step(worker, event)
                case ports.TransferEnded():
                    ends["transfer", event.transfer_id] += 1
                    self.check_complete(worker, event)
                    assert not event.complete or (self.sources[event.transfer_id], worker) not in parted
                case ports.LinkLost():
                    ends["link", worker, event.peer] += 1
                    parted.add((event.peer, worker))
                case ports.LayoutApplied() | ports.CallFailed() | ports.ShardLoaded():
                    ends["call", event.call_id] += 1
                case m.MemoryReported() if event.call_id in self.reports:
                    ends["call", event.call_id] += 1
        expected = {("step", i) for i in self.steps} | {("call", i) for i in self.calls}
        told = {("transfer", i) for i in [*self.kv_transfers, *self.shard_transfers]}
        expected |= {("link", *ends) for pair in self.severed for ends in permutations(pair)}
        for what, transfer_id in told - set(ends):
            # A cut loses what was on the way: a transfer may be known to neither end. Then both ends of the link tell.
            transfer = self.kv_transfers.get(transfer_id) or self.shard_transfers[transfer_id][1]
            assert frozenset((transfer.src, transfer.dst)) in self.severed, (what, transfer_id)
        assert expected <= set(ends) <= expected | told
        assert set(ends.values()) <= {1}
        self.check_kv()
        self.check_shards()
        self.check_order()

    def check_step(self, worker, event):
        tokens, stages, last = self.steps[event.step_id]
        assert worker == last, "the last stage tells"
        if isinstance(event, m.StepDone):
            assert tokens_of(event) == [expected_token(tokens, stages)]
        if isinstance(event, ports.StepAbandoned):
            assert event.step_id in self.asked and event.step_id in self.armed
            return
        poisoned = any(event.step_id in device.poisoned for device in self.devices.values())
        assert poisoned == isinstance(event, ports.StepFailed) or self.severed

    def check_complete(self, worker, event):
        if worker == self.sources[event.transfer_id]:
            assert not event.complete, "a source only tells of what could not begin"
        elif not self.severed and event.transfer_id not in self.cancelled:
            assert event.complete

    def ended(self):
        return {event.transfer_id: event for _, event in self.told if isinstance(event, ports.TransferEnded)}

    def check_kv(self):
        fresh = {i: FakeDevice(i, NUM_LAYERS, NUM_BLOCKS, UNIT).kv for i in range(NUM_WORKERS)}
        touched = {i: np.zeros((NUM_LAYERS, NUM_BLOCKS), bool) for i in range(NUM_WORKERS)}
        for transfer in self.kv_transfers.values():
            layers = slice(*transfer.layers)
            touched[transfer.dst][layers, transfer.dst_blocks] = True
            event = self.ended().get(transfer.transfer_id)
            if event is None or not event.complete:
                continue
            source = fresh[self.sources[transfer.transfer_id]][layers, transfer.src_blocks]
            assert event.num_bytes == source.size
            assert (self.devices[transfer.dst].kv[layers, transfer.dst_blocks] == source).all()
        for i, device in self.devices.items():
            assert (device.kv[~touched[i]] == fresh[i][~touched[i]]).all(), "a block that no transfer names was written"

    def check_shards(self):
        marked = {i: Counter(device.filled) for i, device in self.devices.items()}
        for transfer_id, (_, transfer) in self.shard_transfers.items():
            event = self.ended().get(transfer_id)
            if event is not None and event.complete:
                assert event.num_bytes == 300
                marked[transfer.dst][transfer.shard] -= 1
        assert all(count == 0 for counts in marked.values() for count in counts.values())

    def check_order(self):
        """Rules 2 and 3 on what each device saw: an applied layout parts earlier steps from later ones."""
        for worker, device in self.devices.items():
            position = {mark: i for i, mark in enumerate(device.log)}
            for i, mark in enumerate(self.sent[worker]):
                if mark[0] != "apply":
                    continue
                at = position[mark]
                for other in self.sent[worker][:i]:
                    assert position.get(other, -1) < at
                for other in self.sent[worker][i + 1 :]:
                    assert position.get(other, len(device.log)) > at


Workers.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestWorkers = Workers.TestCase
