"""What a crew promises over any spawner: the local one, that of keepers on other hosts, and Ray's, with real processes;
and a pretending one, without."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from far_keepers import ProcessPlacer
from pretending import PretendingSpawner
from ray_cluster import HAS_RAY, WHY_NOT, RayHead

from jettison.core import ports
from jettison.device.model.hf_config import parse_config
from jettison.device.model.jsonfile import JsonObject
from jettison.device.step import StepInput
from jettison.errors import BudgetError, JettisonError, WorkerLostError
from jettison.live.engine import crew
from jettison.live.engine.crew import Crew
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.engine.spawn_ray import ray_spawner
from jettison.live.engine.spawner import machines_of
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerSpec
from jettison.transport.authority import Applicant
from jettison.transport.handshake import Identity
from jettison.transport.tls import name_of
from waiting import PATIENCE_S, until

CHILD = (sys.executable, str(Path(__file__).parent.parent / "worker" / "worker_child.py"))
MODEL = parse_config(JsonObject(Path("config.json"), {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 16, "max_position_embeddings": 64,
}))
"""Fake devices never look at it."""


def spec(worker_id, what):
    return WorkerSpec(
        worker_id=worker_id, model_dir=what, model=MODEL, dtype="float32", memory_bytes=1, block_size=16,
        page_bytes=4096, max_num_tokens=64, max_num_seqs=4, piece_bytes=256,
    )


class Stage:
    """A crew and what it told; ``fate``: what happens to one worker at its start, as ``<worker id>:<what>``."""

    def __init__(self, spawner, num_workers=2, fate="", **more):
        self.spawner = spawner
        self.told, self.exits, self.changed = [], [], asyncio.Event()
        self.crew = Crew([spec(i, fate) for i in range(num_workers)], spawner, self._event, self._exit, **more)

    def _event(self, worker, event):
        self.told.append((worker, event))
        self.changed.set()

    def _exit(self, worker, code):
        self.exits.append((worker, code))
        self.changed.set()

    async def until(self, holds):
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def handle(self, worker):
        return self.crew._lives[worker].handle

    async def answer(self, worker, call_id):
        self.crew.send(worker, m.ReportMemory(call_id))
        await self.until(lambda: any(w == worker and e.call_id == call_id for w, e in self.told))

    async def __aenter__(self):
        self.ready = await self.crew.start()
        return self

    async def __aexit__(self, *exc):
        await self.crew.close(5.0)
        assert self.crew.pids == {} and self.is_closed()


class LocalStage(Stage):
    def __init__(self, *arguments, **more):
        super().__init__(LocalSpawner(worker_command=CHILD), *arguments, **more)

    def is_closed(self):
        return not self.spawner.folder.path.exists()

    def die(self, worker):
        os.kill(self.crew.pids[worker], signal.SIGKILL)

    def hang(self, worker):
        os.kill(self.crew.pids[worker], signal.SIGSTOP)

    def wake(self, handle):
        os.kill(handle.pid, signal.SIGCONT)

    @contextmanager
    def refusing(self, monkeypatch):
        def refuse(*arguments, **options):
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe", refuse)
            yield


class FarStage(LocalStage):
    """Each worker on a host of its own; no process here is the worker's parent."""

    def __init__(self, *arguments, **more):
        Stage.__init__(self, FarSpawner(ProcessPlacer(), lease_s=60.0, worker_command=CHILD), *arguments, **more)

    def is_closed(self):
        placer = self.spawner._placer
        ended = {process.returncode for process in placer.processes.values()}
        return placer.is_closed and ended <= {0, 1}  # 1: the controller had gone before this keeper had joined

    def refusing(self, monkeypatch):
        pytest.skip("what another host refuses is an end of a life that has begun")


class RayStage(FarStage):
    """Keepers are placed by a Ray that there is; no worker is Ray's child, or this process'."""

    head: RayHead

    def __init__(self, num_workers=2, fate="", **more):
        specs = [spec(i, fate) for i in range(num_workers)]
        spawner = ray_spawner(
            specs, address=self.head.address, strategy="pack", lease_s=60.0, worker_command=CHILD,
            num_at_start=more.get("num_at_start"),
        )
        Stage.__init__(self, spawner, num_workers, fate, **more)

    def is_closed(self):
        return self.spawner._placer.pid is None


class PretendingStage(Stage):
    def __init__(self, num_workers=2, fate="", **more):
        worker, _, what = fate.partition(":")
        script = {"": "ready", "slow": "silent"}.get(what, what)
        super().__init__(PretendingSpawner({int(worker or 0): script}), num_workers, fate, **more)

    def is_closed(self):
        return self.spawner.is_closed

    def die(self, worker):
        self.handle(worker).kill()

    def hang(self, worker):
        self.handle(worker).hang()

    def wake(self, handle):
        handle.wake()

    @contextmanager
    def refusing(self, monkeypatch):
        self.spawner.refuses = True
        yield
        self.spawner.refuses = False


NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason=WHY_NOT)


@pytest.fixture(params=[pytest.param(LocalStage, marks=pytest.mark.live, id="local"),
                        pytest.param(FarStage, marks=pytest.mark.live, id="far"),
                        pytest.param(RayStage, marks=[pytest.mark.live, NEEDS_RAY], id="ray"),
                        pytest.param(PretendingStage, id="pretending")])
def stage(request):
    if request.param is RayStage:
        request.getfixturevalue("ray_head")
    return request.param


@pytest.fixture(scope="module")
def ray_head():
    RayStage.head = head = RayHead()
    yield head
    head.close()


async def test_workers_start_once_and_are_told_apart(stage):
    async with stage(3) as now:
        assert [ready.worker_id for ready in now.ready] == [0, 1, 2] == list(now.crew.pids)
        assert {w: now.handle(w).pid for w in range(3)} == now.crew.pids
        assert [now.crew.life(w) for w in range(3)] == [0, 0, 0]
        if stage is not PretendingStage:  # also where Ray has begun them
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in now.crew.pids.values()} == {own}
        await now.answer(2, 7)
        assert [worker for worker, _ in now.told] == [2]
        with pytest.raises(JettisonError, match="started before"):
            await now.crew.start()
        assert now.exits == []


async def test_every_worker_has_one_host_and_hosts_have_numbers(stage):
    async with stage(3) as now:
        spawner = now.spawner
        names = [spawner.host_of(worker) for worker in range(3)]
        assert set(names) <= set(spawner.hosts()) and list(spawner.hosts()) == list(spawner.hosts())
        machines = machines_of(range(3), spawner)
        assert all((machines[a] == machines[b]) == (names[a] == names[b]) for a in range(3) for b in range(3))
        assert spawner.spans_hosts or len(set(names)) == 1


@pytest.mark.parametrize(("fate", "error", "says", "timeout_s"), [
    ("0:budget", BudgetError, "4096 bytes are needed", 60.0),
    ("1:crash", WorkerLostError, "code 7", 60.0),
    ("1:slow", WorkerLostError, r"1\] were not ready in 1 s", 1.0),
])  # fmt: skip
async def test_a_failed_start_says_why_and_leaves_nothing(stage, fate, error, says, timeout_s):
    now = stage(2, fate, start_timeout_s=timeout_s)
    with pytest.raises(error, match=says):
        await now.crew.start()
    assert now.crew.pids == {} and now.is_closed() and now.exits == []
    assert all(now.handle(worker).ended.done() for worker in range(2))


async def test_an_end_is_told_once_after_the_last_event(stage):
    async with stage() as now:
        await now.answer(0, 1)
        handle = now.handle(0)
        now.die(0)
        await now.until(lambda: now.exits)
        assert now.exits == [(0, -signal.SIGKILL)] and handle.ended.result() == -signal.SIGKILL
        assert list(now.crew.pids) == [1]
        now.crew.declare_lost(0, "again")
        now.crew.send(0, m.ReportMemory(2))
        now.crew.abandon(0, 3)
        await now.answer(1, 3)
        assert len(now.exits) == 1, "what is done to an ended worker is nothing"


async def test_a_lost_worker_is_started_again_as_its_next_life(stage):
    async with stage() as now:
        for life in (1, 2):
            old = now.handle(0)
            now.die(0)
            await now.until(lambda life=life: len(now.exits) == life)
            ready = await now.crew.restart(0)
            assert ready.worker_id == 0 and now.crew.life(0) == life and now.crew.pids[0] == ready.pid != old.pid
            await now.answer(0, life)
        assert now.crew.life(1) == 0 and len(now.exits) == 2


async def test_a_host_that_refuses_a_start_may_be_asked_again(stage, monkeypatch):
    async with stage() as now:
        now.die(0)
        await now.until(lambda: now.exits)
        with now.refusing(monkeypatch):
            for _ in range(2):
                with pytest.raises(OSError, match="Cannot allocate"):
                    await now.crew.restart(0)
        await now.crew.restart(0)
        assert now.crew.life(0) == 1, "a life that never began does not count"
        await now.answer(0, 1)


async def test_a_worker_given_up_while_it_starts_again_is_a_failed_start(stage):
    async with stage() as now:
        now.die(0)
        await now.until(lambda: now.exits)
        restart = asyncio.create_task(now.crew.restart(0))
        while now.crew.life(0) == 0:
            await asyncio.sleep(0)
        now.crew.declare_lost(0, "injected")
        with pytest.raises(WorkerLostError, match="given up while it was starting"):
            await asyncio.wait_for(restart, PATIENCE_S)
        assert len(now.exits) == 1, "the caller that waits for the start was told, and no other"
        await now.crew.restart(0)
        assert now.crew.life(0) == 2
        await now.answer(0, 1)


@pytest.mark.parametrize("kill_hung", [True, False])
async def test_a_hung_worker_is_given_up_and_heard_no_more(stage, kill_hung):
    async with stage(patience=Patience(3.0, 300.0)) as now:
        now.crew.kill_hung = kill_hung
        old = now.handle(0)
        now.hang(0)
        now.crew.send(0, m.ReportMemory(1))
        await now.until(lambda: now.exits)
        assert now.exits == [(0, -signal.SIGKILL)] and list(now.crew.pids) == [1]
        assert "silent for" in now.crew.why_over(0)
        if not kill_hung:
            assert not old.ended.done()
            now.wake(old)
        assert await asyncio.wait_for(asyncio.shield(old.ended), PATIENCE_S) == (-signal.SIGKILL if kill_hung else 0)
        await now.crew.restart(0)
        await now.answer(0, 2)
        assert [event.call_id for _, event in now.told] == [2], "the old life's answer counts nowhere"
        assert len(now.exits) == 1


async def test_a_step_is_given_up_where_its_word_says_so(stage):
    async with stage(1) as now:
        def send(step_id):
            now.crew.send(0, codec.step_command(StepInput(
                step_id=step_id, layer_lo=0, layer_hi=4, token_ids=np.array([5], np.int32),
                query_lens=np.ones(1, np.int32), context_lens=np.zeros(1, np.int32),
                block_tables=np.zeros((1, 2), np.int32), sample_rows=np.zeros(1, np.int32), safepoint_layers=1,
            )))
        now.crew.abandon(0, 2)
        send(1)
        await now.until(lambda: now.told)
        assert (type(now.told[0][1]), now.told[0][1].step_id) == (m.StepDone, 1), "not the one that is named"
        for step_id in range(2, 100):  # to another host the word may take longer than the step itself
            now.crew.abandon(0, step_id)
            await asyncio.sleep(0.001 * (step_id - 2))
            send(step_id)
            await now.until(lambda step_id=step_id: len(now.told) == step_id)
            if isinstance(now.told[-1][1], ports.StepAbandoned):
                break
        assert now.told[-1] == (0, ports.StepAbandoned(step_id))


async def test_close_ends_all_and_a_hung_worker_too(stage):
    now = stage(2, patience=Patience(0.0, 0.0))
    await now.crew.start()
    handles = [now.handle(worker) for worker in range(2)]
    now.hang(1)
    for _ in range(2):
        await now.crew.close(0.5)
    assert [handle.ended.result() for handle in handles] == [0, -signal.SIGKILL]
    assert now.exits == [] and now.is_closed(), "an end that was asked for is no event"


async def test_workers_of_a_host_meet_near_and_others_far_and_hear_of_ends():
    async with PretendingStage(3) as now:
        for worker in range(3):
            await now.answer(worker, 1)
        known = [now.handle(worker).commands[0].peers for worker in range(3)]
        assert [[peer.address for peer in peers] for peers in known] == [
            ["near:1.0", "far:2.0"], ["near:0.0", "far:2.0"], ["far:0.0", "far:1.0"],
        ]
        now.die(0)
        await now.until(lambda: now.exits)
        await now.crew.restart(0)
        for worker in range(3):
            await now.answer(worker, 2)
        assert now.handle(0).commands[0] == m.KnowPeers(known[0])
        for worker, address in ((1, "near:0.1"), (2, "far:0.1")):
            assert now.handle(worker).commands[2:-1] == [
                m.ForgetPeer(0, 0), m.KnowPeers([m.PeerAddress(0, 1, address)])
            ]


async def test_what_a_person_can_mend_is_the_root_cause():
    """A worker that dies makes others fail; here one of them had a reason of its own."""
    spawner = PretendingSpawner({0: "crash", 1: "budget"})
    with pytest.raises(BudgetError):
        await Stage(spawner).crew.start()


async def test_copies_of_the_parameters_are_emptied_on_all_hosts():
    async with PretendingStage() as now:
        now.crew.empty_shared_copies()
        assert now.spawner.num_emptied == 1


# --- hosts


async def test_each_life_gets_one_certificate_of_its_name_where_there_are_several_hosts():
    async with PretendingStage(3) as now:
        await now.answer(2, 1)
        papers = [now.handle(worker).certificates for worker in range(3)]
        assert [len(given) for given in papers] == [1, 1, 1] and len({given[0].authority for given in papers}) == 1
        now.die(2)
        await now.until(lambda: now.exits)
        await now.crew.restart(2)
        await now.answer(2, 2)
        (renewed,) = now.handle(2).certificates
        names = [x509.load_pem_x509_certificate(given.certificate).subject.rfc4514_string()
                 for given in (papers[0][0], papers[2][0], renewed)]  # fmt: skip
        assert names == [f"CN={name_of(Identity(*life))}" for life in ((0, 0), (2, 0), (2, 1))]
        assert len({now.handle(worker).start.token_hex for worker in range(3)}) == 3


@pytest.mark.parametrize("script", ["forger", "greedy"])
async def test_a_certificate_is_signed_for_the_token_of_a_life_and_once(script):
    now = PretendingStage(3, f"1:{script}")
    with pytest.raises(WorkerLostError, match="no certificate: its token is none of its life, or has been used"):
        await now.crew.start()
    assert len(now.handle(1).certificates) <= (script == "greedy") and now.is_closed()


async def test_another_that_asks_for_a_certificate_hurts_no_worker():
    """It has the secret, and no certificate: this one of a life that has one, with any token."""
    async with PretendingStage(3) as now:
        token = bytes.fromhex(now.handle(1).start.token_hex)
        request = Applicant(Identity(1, 0)).request
        for wanted in (b"x" * 32, token):
            assert now.crew._certify(1, m.CertificateWanted(1, wanted, request)) is None
        assert now.crew._certify(7, m.CertificateWanted(7, token, request)) is None
        await now.answer(1, 1)
        assert now.exits == []


@pytest.mark.live
async def test_workers_of_one_host_need_no_certificate():
    async with LocalStage(2) as now:
        assert now.crew._authority is None and now.crew._lives[0].token is None


async def test_one_that_does_not_begin_with_the_others_comes_later_goes_untold_and_comes_again(stage):
    async with stage(3, num_at_start=2) as now:
        assert [ready.worker_id for ready in now.ready] == [0, 1] == list(now.crew.pids)
        for life in (1, 2):
            ready = await now.crew.restart(2)
            assert (ready.worker_id, now.crew.life(2)) == (2, life)
            await now.answer(2, life)
            await now.answer(0, 10 + life)
            handle = now.handle(2)
            now.crew.retire(2)
            assert list(now.crew.pids) == [0, 1]
            async with asyncio.timeout(PATIENCE_S):
                await handle.ended
        await now.answer(1, 20)
        assert now.exits == []


async def test_the_place_of_a_retired_worker_is_given_back_once_it_has_ended():
    async with PretendingStage(2, num_at_start=1) as now:
        now.crew.retire(1)  # it was never started
        await now.crew.restart(1)
        assert now.handle(1).start.spec.starts_empty and not now.handle(0).start.spec.starts_empty
        now.crew.retire(1)
        assert now.spawner.released == []
        async with asyncio.timeout(PATIENCE_S):
            await now.handle(1).ended
            while now.spawner.released != [1]:
                await asyncio.sleep(0)
        await now.answer(0, 1)
        forgotten = [c for c in now.handle(0).commands if isinstance(c, m.ForgetPeer)]
        assert [(c.worker_id, c.life) for c in forgotten] == [(1, 1)]


async def test_a_start_that_takes_too_long_is_one_that_failed_and_may_be_tried_again(monkeypatch):
    async with PretendingStage(2) as now:
        now.die(0)
        await now.until(lambda: now.exits)
        now.spawner.scripts[0] = "silent"
        with monkeypatch.context() as patch:
            patch.setattr(crew, "RESTART_TIMEOUT_S", 0.02)
            with pytest.raises(WorkerLostError, match="was not ready in"):
                await now.crew.restart(0)
        assert now.handle(0).ended.done() and list(now.crew.pids) == [1]
        now.spawner.scripts[0] = "ready"
        assert (await now.crew.restart(0)).worker_id == 0
        await now.answer(0, 1)


async def test_one_that_ends_while_others_still_start_ends_the_start():
    now = PretendingStage(2, "1:slow", start_timeout_s=10 * PATIENCE_S)
    starts = asyncio.create_task(now.crew.start())
    lives = now.crew._lives
    await until(lambda: 0 in lives and lives[0].started.done())
    now.die(0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkerLostError, match="worker 0 ended with code -9 before all were ready"):
            await starts
    assert now.exits == [] and now.is_closed()


async def test_one_that_ends_right_after_it_was_taken_over_is_forgotten(caplog):
    async with PretendingStage(2) as now:
        now.die(0)
        left = now.crew._those_up(now.ready, may_lack=True)
        assert [event.worker_id for event in left] == [1] and list(now.crew.pids) == [1]
        await until(lambda: not now.crew._server.is_connected(0))
        await asyncio.sleep(0)
        assert now.exits == [] and not caplog.records, "nothing of it is told, and nothing is looked up in vain"
