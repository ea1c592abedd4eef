"""Real worker processes with fake devices that outlive their controller: what may take them over, what they bring."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest
from test_processes import CHILD, is_alive, pipeline_step, spec
from worker_fakes import expected_token, tokens_of

from jettison.device.model.identity import WeightsIdentity
from jettison.errors import LinkDownError
from jettison.live.engine import spawn_local
from jettison.live.engine.crew import Crew
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.host import forkserver, keeper
from jettison.live.host.forkserver import ForkServers
from jettison.live.host.heritage import Heritage, control_path
from jettison.live.wire import messages as m
from jettison.live.wire.fork_orders import AdoptWorkers
from jettison.live.wire.worker_config import WorkerSpec, WorkerStart, digest_of
from jettison.live.worker.orphan import Orphan
from jettison.server.parent.kept import unix_listener
from jettison.transport.dialling import Dialling
from jettison.transport.handshake import Identity, Purpose, secret_under
from jettison.transport.succession import Signer, check_signed
from jettison.transport.tls import Credentials
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.live

WEIGHTS = WeightsIdentity({}, b"norm", "config", {})
SECRET = b"s" * 32


class Parent:
    """What it keeps."""

    def __init__(self, folder, orphan_timeout_s=PATIENCE_S):
        self.folder, self.signer, self.epoch, self.door = folder, Signer(), 0, None
        self.control = unix_listener(control_path(folder))
        self.orphan_timeout_s = orphan_timeout_s
        self.servers = []
        """Fork servers of all controllers."""

    def heritage(self, signer=None):
        self.epoch += 1

        def keep(door):
            self.door = door.dup()

        return Heritage(
            folder=self.folder, control=self.control.dup(), secret=SECRET, epoch=self.epoch,
            signature=(signer or self.signer).sign(SECRET, self.epoch), public_key=self.signer.public,
            orphan_timeout_s=self.orphan_timeout_s, parent_pid=os.getpid(),
            door=None if self.door is None else self.door.dup(), keep_door=keep)

    def close(self):
        self.control.close()
        if self.door is not None:
            self.door.close()
        for servers in self.servers:
            for each in servers._servers.values():
                each.close()


@pytest.fixture
def parent():
    with tempfile.TemporaryDirectory(prefix="orphans-") as folder:
        made = Parent(Path(folder))
        yield made
        made.close()


class Controller:
    """One; ``die`` leaves what a process that is killed leaves."""

    def __init__(self, parent, monkeypatch, num_workers=2, signer=None, num_at_start=None):
        heritage, servers = parent.heritage(signer), ForkServers()
        parent.servers.append(servers)
        for module in (spawn_local, keeper, forkserver):
            monkeypatch.setattr(module, "FORK_SERVERS", servers)
        self.told, self.exits, self.changed = [], [], asyncio.Event()
        self.spawner = LocalSpawner(worker_command=CHILD, heritage=heritage)
        self.crew = Crew(
            [spec(i) for i in range(num_workers)], self.spawner, self._event, self._exit, heritage=heritage,
            num_at_start=num_at_start)

    def _event(self, worker, event):
        self.told.append(event)
        self.changed.set()

    def _exit(self, worker, code):
        self.exits.append(worker)
        self.changed.set()

    async def start(self):
        self.ready = await self.crew.start()
        for worker in self.crew.pids:
            self.crew.send(worker, m.AdoptWeights(WEIGHTS))
        return self

    async def answers(self, step_id, tokens):
        for worker, command in pipeline_step(step_id, tokens):
            self.crew.send(worker, command)
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(event, m.StepDone) and event.step_id == step_id for event in self.told):
                self.changed.clear()
                await self.changed.wait()
        done = next(e for e in self.told if isinstance(e, m.StepDone) and e.step_id == step_id)
        assert tokens_of(done) == [expected_token(tokens, [(0, 2), (2, 4)])]

    def die(self):
        if self.crew._listening is not None:
            self.crew._listening.cancel()
        self.crew._server.close()
        for each in self.spawner._keepers.values():
            for line in each._lines.values():
                line._loop.remove_reader(line._sock)
                line._sock.close()


async def test_workers_that_outlive_their_controller_go_on_with_the_next_one(parent, monkeypatch):
    first = await Controller(parent, monkeypatch).start()
    await first.answers(1, [5])
    pids = first.crew.pids
    first.die()
    second = await Controller(parent, monkeypatch).start()
    assert second.crew.pids == pids
    assert [(event.kept is not None, event.weights) for event in second.ready] == [(True, WEIGHTS)] * 2
    await second.answers(1, [6, 7])  # over links that are opened anew
    second.die()
    third = await Controller(parent, monkeypatch).start()
    assert third.crew.pids == pids
    await third.crew.close(5.0)
    assert not any(map(is_alive, pids.values()))


async def test_one_that_has_died_meanwhile_can_be_started_empty_and_one_that_hangs_as_well(parent, monkeypatch):
    monkeypatch.setattr("jettison.live.engine.crew.TAKE_OVER_S", 5.0)
    first = await Controller(parent, monkeypatch, 3).start()
    await first.answers(1, [5])
    pids = first.crew.pids
    first.die()
    os.kill(pids[1], signal.SIGKILL)
    await until(lambda: not is_alive(pids[1]))
    os.kill(pids[2], signal.SIGSTOP)
    second = await Controller(parent, monkeypatch, 3).start()
    assert second.crew.pids == {0: pids[0]} and not is_alive(pids[2])
    assert [event.kept is not None for event in second.ready] == [True]
    assert [(await second.crew.restart(worker)).kept for worker in (1, 2)] == [None, None]
    assert [second.crew.life(worker) for worker in range(3)] == [0, 1001, 1001]
    await second.answers(1, [6, 7])
    await second.crew.close(5.0)


async def test_one_that_hangs_and_is_more_than_begin_is_not_there_until_it_is_asked_for(parent, monkeypatch):
    """Three have outlived a controller that had started one of them as its load grew."""
    monkeypatch.setattr("jettison.live.engine.crew.TAKE_OVER_S", 5.0)
    first = await Controller(parent, monkeypatch, 3).start()
    pids = first.crew.pids
    first.die()
    os.kill(pids[0], signal.SIGSTOP)
    second = Controller(parent, monkeypatch, 3, num_at_start=2)
    async with asyncio.timeout(PATIENCE_S):
        await second.start()
    assert second.crew.pids == {worker: pids[worker] for worker in (1, 2)}
    assert [event.worker_id for event in second.ready] == [1, 2] and not is_alive(pids[0])
    assert (await second.crew.restart(0)).worker_id == 0
    assert second.crew.pids.keys() == {0, 1, 2} and not second.exits
    await second.crew.close(5.0)


async def test_orphans_whose_adopter_has_gone_before_it_hears_of_them_are_still_there_for_the_next_one(
        parent, monkeypatch):
    first = await Controller(parent, monkeypatch).start()
    pids = first.crew.pids
    first.die()
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        line.send(msgspec.json.encode(AdoptWorkers()))
        line.close()
        socket.send_fds(parent.door, [b"line"], [theirs.fileno()])
    second = await Controller(parent, monkeypatch).start()
    assert second.crew.pids == pids
    await second.crew.close(5.0)


async def test_a_peer_that_obeys_the_controller_before_is_hung_up_on_and_linked_once_it_obeys_this_one(
        parent, monkeypatch):
    """Worker 0 is taken over while worker 1, in a long step, has not seen that its controller has ended."""
    first = await Controller(parent, monkeypatch).start()
    where = first.crew._lives[0].handle.addresses.near
    first.die()
    late = Dialling(where, Credentials(secret_under(SECRET, parent.epoch), Identity(1, 0)), Purpose.LINK)
    assert late.advance() is None
    second = await Controller(parent, monkeypatch).start()

    def is_refused():
        try:
            assert late.advance() is None, "it was let in"
        except (LinkDownError, OSError):
            return True
        return False

    await until(is_refused)
    late.sock.close()
    await second.answers(1, [6, 7])
    await second.crew.close(5.0)


async def test_a_higher_epoch_without_the_parents_signature_is_refused(parent, monkeypatch):
    monkeypatch.setattr("jettison.live.engine.crew.TAKE_OVER_S", 0.5)
    first = await Controller(parent, monkeypatch).start()
    await first.answers(1, [5])
    pids = first.crew.pids
    first.die()
    # It knows the secret and has the sockets, and another key: it gets no worker's word, only their ends.
    second = await Controller(parent, monkeypatch, signer=Signer()).start()
    assert not set(pids.values()) & set(second.crew.pids.values())
    assert all(event.kept is None for event in second.ready)
    await second.crew.close(5.0)


async def test_without_a_controller_in_time_workers_end(parent, monkeypatch):
    parent.orphan_timeout_s = 0.2
    first = await Controller(parent, monkeypatch).start()
    pids = first.crew.pids
    first.die()
    await until(lambda: not any(map(is_alive, pids.values())))


def orphan(signer, epoch=3):
    start = WorkerStart(
        spec=spec(0), secret_hex=SECRET.hex(), epoch=0, control_address="unix:/nowhere", beat_interval_s=1.0,
        orphan_timeout_s=1.0, controller_epoch=epoch, parent_key_hex=signer.public.hex())
    return Orphan(start, Credentials(SECRET, Identity(0, 0)))


def test_only_a_higher_epoch_that_the_parent_has_signed_for_this_cluster_may_take_over():
    signer, other = Signer(), Signer()
    worker = orphan(signer)
    for command in (
        m.TakeOver(3, signer.sign(SECRET, 3)),  # the present one's
        m.TakeOver(2, signer.sign(SECRET, 2)),  # an older one's, replayed
        m.TakeOver(5, signer.sign(SECRET, 4)),  # of another epoch
        m.TakeOver(4, other.sign(SECRET, 4)),
        m.TakeOver(4, signer.sign(b"t" * 32, 4)),  # of another cluster
        m.TakeOver(4, b""),
        m.Stop(),
    ):
        with pytest.raises(LinkDownError):
            worker.check(command)
    worker.check(m.TakeOver(4, signer.sign(SECRET, 4)))
    with pytest.raises(LinkDownError):
        worker.check(m.TakeOver(4, signer.sign(SECRET, 4)))
    worker.check(m.TakeOver(7, signer.sign(SECRET, 7)))
    with pytest.raises(LinkDownError):
        check_signed(b"no key", SECRET, 4, signer.sign(SECRET, 4))


def test_a_device_has_one_digest_whichever_life_it_is_and_however_it_has_travelled():
    device = spec(3)
    travelled = msgspec.json.decode(msgspec.json.encode(device), type=WorkerSpec)
    later = msgspec.structs.replace(device, starts_empty=True, shared_copy_fd=9)
    assert len({digest_of(each) for each in (device, travelled, later)}) == 1
    assert digest_of(device) != digest_of(msgspec.structs.replace(device, memory_bytes=2))
