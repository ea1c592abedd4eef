"""Questions and answers between worker loops: cut to frames, refused when stale, failed cleanly without a peer."""

from __future__ import annotations

import numpy as np
import pytest
from worker_fakes import FakeDevice, make_step

from jettison.core import ports
from jettison.device.step import RemoteKV
from jettison.live.engine.inprocess import InProcessCluster
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.transport.link import FrameKind


class AskingDevice(FakeDevice):
    """Sums, for each query, the ids of the blocks it attends to, at the workers that hold them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[int, int]] = []
        self.refuses = False
        self.has_windows = False
        self.got: list[np.ndarray] = []
        self.before_collect = lambda: None

    def attend(self, layer, block_ids, rows, q, positions=None):
        if self.refuses:
            raise IndexError("block 3 is not mapped")
        self.asked.append((layer, len(rows)))
        sums = np.array([block_ids[r].sum() for r in rows], dtype=np.int64) + 1000 * layer
        if positions is not None:
            assert positions.dtype == np.int32
            sums += 10**6 * positions
        return (sums + q.view(np.int64)).view(np.uint8)

    def run_step(self, step, hidden, port=None, gives_up=None):
        if step.remote:
            port.begin(step)
            for layer in range(step.layer_lo, step.layer_hi):
                entries = np.repeat(np.arange(len(step.remote), dtype=np.int32), step.query_lens)
                workers = sorted({e.worker for e in step.remote})
                chosen = [np.array([i for i in entries if step.remote[i].worker == w], dtype=np.int32) for w in workers]
                for worker, mine in zip(workers, chosen, strict=True):
                    positions = np.arange(len(mine), dtype=np.int32) + 7 if self.has_windows and layer % 2 else None
                    port.ask(layer, worker, mine, np.arange(len(mine), dtype=np.int64).view(np.uint8), positions)
                self.before_collect()
                answers = port.collect()
                for mine, pieces in zip(chosen, answers, strict=True):
                    got = np.concatenate([data.view(np.int64) for _, data in pieces])
                    expected = [sum(step.remote[i].block_ids) + 1000 * layer + n for n, i in enumerate(mine)]
                    if self.has_windows and layer % 2:
                        expected = [at + 10**6 * (n + 7) for n, at in enumerate(expected)]
                    assert got.tolist() == expected
                    assert sum(count for count, _ in pieces) == len(mine)
                self.got += answers
                port.poll()
        return super().run_step(step, hidden, port, gives_up)


class Cluster(InProcessCluster):
    def __init__(self, num_workers=2, activation_bytes=1 << 16):
        self.events: list[m.Event] = []
        self.devices = {i: AskingDevice(i) for i in range(num_workers)}
        super().__init__(
            self.devices, lambda worker, event: self.events.append(event), activation_bytes=activation_bytes,
            clock_ns=lambda: 0,
        )
        self.start()


def asking_step(workers=(1,), num_tokens=5, num_blocks=4, step_id=3):
    step = make_step(step_id, list(range(1, num_tokens + 1)))
    rows = len(workers)
    step.query_lens = np.full(rows, num_tokens // rows, dtype=np.int32)
    step.context_lens = np.full(rows, 64, dtype=np.int32)
    step.token_ids = np.arange(1, 1 + num_tokens // rows * rows, dtype=np.int32)
    step.block_tables = np.zeros((rows, 8), dtype=np.int32)
    step.remote = [RemoteKV(i, w, 0, 4, 16, list(range(i, i + num_blocks))) for i, w in enumerate(workers)]
    return step


def run(cluster, step):
    cluster.send(0, codec.step_command(step))
    cluster.pump()
    return cluster.events


def test_the_codec_carries_what_lies_elsewhere():
    step = asking_step((1, 2))
    assert codec.decode_step(codec.encode_step(step)).remote == step.remote


@pytest.mark.parametrize("workers", [(1,), (1, 2, 1), (2, 1)])
def test_every_query_gets_the_answer_over_its_own_blocks(workers):
    cluster = Cluster(3)
    events = run(cluster, asking_step(workers, num_tokens=6))
    assert [type(e) for e in events] == [m.StepDone]
    assert len(cluster.devices[0].got) == 4 * len(set(workers))


def test_long_questions_and_tables_are_cut_into_frames():
    cluster = Cluster(2, activation_bytes=128)
    events = run(cluster, asking_step((1, 1, 1), num_tokens=60, num_blocks=20))
    assert [type(e) for e in events] == [m.StepDone]
    assert len(cluster.devices[1].asked) > 4


@pytest.mark.parametrize("activation_bytes", [128, 1 << 16])
def test_layers_with_a_window_send_positions_and_others_do_not(activation_bytes):
    cluster = Cluster(3, activation_bytes=activation_bytes)
    cluster.devices[0].has_windows = True
    events = run(cluster, asking_step((1, 2, 1), num_tokens=60))
    assert [type(e) for e in events] == [m.StepDone]


def test_a_refusal_fails_the_step_so_that_it_is_computed_again():
    cluster = Cluster(2)
    cluster.devices[1].refuses = True
    (event,) = run(cluster, asking_step())
    assert isinstance(event, ports.StepFailed) and event.recompute and "not mapped" in event.message
    cluster.devices[1].refuses = False
    assert isinstance(run(cluster, asking_step(step_id=4))[-1], m.StepDone), "and the next one is not disturbed"


def test_a_link_that_breaks_meanwhile_fails_the_step_so_that_it_is_computed_again():
    cluster = Cluster(2)
    cluster.devices[0].before_collect = lambda: cluster.link(0, 1).cut()
    events = run(cluster, asking_step())
    (failed,) = [e for e in events if isinstance(e, ports.StepFailed)]
    assert failed.recompute and "link to worker 1" in failed.message


def test_without_a_link_the_step_fails_at_once():
    cluster = Cluster(2)
    (event,) = run(cluster, asking_step((7,)))
    assert isinstance(event, ports.StepFailed) and event.recompute and "no link to worker 7" in event.message


def test_a_question_that_is_none_costs_the_link():
    cluster = Cluster(2)
    assert cluster.link(0, 1).send_frame(FrameKind.ATTEND, 0, b"nonsense", 0, lambda out: None)
    cluster.pump()
    assert not cluster.link(1, 0).is_open
