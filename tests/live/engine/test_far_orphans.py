"""Workers on other hosts that outlive their controller: their keepers' leases are granted on, and the next controller
finds them. Real processes with fake devices."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from far_keepers import ProcessPlacer
from host_engines import engine_of
from test_crew import CHILD, Stage

from jettison.device.model.create import create_model
from jettison.device.model.identity import WeightsIdentity
from jettison.live.engine import link_classes
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.host.heritage import Heritage, control_path
from jettison.live.wire import messages as m
from jettison.live.wire.heartbeat import Patience
from jettison.server.parent.kept import unix_listener
from jettison.transport.authority import Authority
from jettison.transport.succession import Signer
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.live

LEASE_S = 5.0
"""More than a busy machine keeps a process waiting; no test looks at how long it takes."""
SECRET = b"s" * 32
WEIGHTS = WeightsIdentity({}, b"norm", "config", {})


class Parent:
    """What it keeps."""

    def __init__(self, folder):
        self.folder, self.signer, self.authority, self.epoch = folder, Signer(), Authority(), 0
        self.pid = os.getpid()
        self.orphan_timeout_s = PATIENCE_S
        self.control = unix_listener(control_path(folder))
        self.far_control = None
        self.networks_fd = os.memfd_create("test")

    def heritage(self, signer=None):
        self.epoch += 1

        def keep(listener):
            self.far_control = listener.dup()

        return Heritage(
            folder=self.folder, control=self.control, secret=SECRET, epoch=self.epoch,
            signature=(signer or self.signer).sign(SECRET, self.epoch), public_key=self.signer.public,
            orphan_timeout_s=self.orphan_timeout_s, parent_pid=self.pid, door=None, keep_door=lambda door: None,
            authority=self.authority, far_control=None if self.far_control is None else self.far_control.dup(),
            keep_far_control=keep, networks_fd=self.networks_fd)

    def close(self):
        os.close(self.networks_fd)
        for each in (self.control, self.far_control):
            if each is not None:
                each.close()


@pytest.fixture
def parent():
    with tempfile.TemporaryDirectory(prefix="far-orphans-") as folder:
        made = Parent(Path(folder))
        yield made
        made.close()


@pytest.fixture
async def placers():
    """Of all controllers: their keepers are children of this process."""
    made = []
    yield made
    for each in made:
        await each.close()


class Controller(Stage):
    """One; ``die`` leaves what a process that is killed leaves."""

    def __init__(self, parent, placers, num_workers=2, signer=None):
        heritage = parent.heritage(signer)
        placers.append(ProcessPlacer(host_of=lambda worker: f"host-{worker}"))
        spawner = FarSpawner(placers[-1], lease_s=LEASE_S, worker_command=CHILD, heritage=heritage)
        super().__init__(spawner, num_workers, patience=Patience(0.0, 0.0), heritage=heritage)

    async def start(self):
        async with asyncio.timeout(PATIENCE_S):
            self.ready = await self.crew.start()
        for worker in self.crew.pids:
            self.crew.send(worker, m.AdoptWeights(WEIGHTS))
        return self

    async def die(self):
        await killed(self.crew, self.spawner)

    async def leave(self):
        """Of one that has not started."""
        await self.spawner._server.close()
        self.spawner._heritage.far_control.close()


async def killed(crew, spawner):
    door, tasks = spawner._server, list(spawner._tasks)
    for task in (crew._listening, door._listening, *tasks):
        task.cancel()
    await asyncio.gather(*tasks, door._listening, return_exceptions=True)
    crew._server.close()
    door._writer.transport.abort()


def ends_of(pids):
    return [os.pidfd_open(pid) for pid in pids]


async def gone(pidfds):
    for pidfd in pidfds:
        assert (await asyncio.to_thread(select.select, [pidfd], [], [], PATIENCE_S))[0]
        os.close(pidfd)


async def test_they_go_on_with_the_next_controller_and_the_one_after_it(parent, placers):
    first = await Controller(parent, placers).start()
    await first.answer(0, 1)
    pids = dict(first.crew.pids)
    ends = ends_of(pids.values())
    await first.die()
    await asyncio.sleep(1.5 * LEASE_S)
    for number in (1, 2):
        now = await Controller(parent, placers).start()
        assert now.crew.pids == pids and now.spawner.hosts() == ["host-0", "host-1"]
        assert [(event.kept is not None, event.weights) for event in now.ready] == [(True, WEIGHTS)] * 2
        assert placers[number].homes == {(0, 0): "127.0.0.1", (1, 0): "127.0.0.1"} and not placers[number].processes
        for worker in range(2):
            await now.answer(worker, 10 + worker)
        if number == 1:
            await now.die()
    await now.crew.close(5.0)
    await gone(ends)
    assert sorted(placers[2].removed) == [(0, 0), (1, 0)]


async def test_one_that_has_died_meanwhile_starts_on_its_keeper_and_without_that_on_another(parent, placers):
    first = await Controller(parent, placers, 3).start()
    await first.answer(0, 1)
    pids = dict(first.crew.pids)
    ends = ends_of([pids[1], pids[2]])
    await first.die()
    os.kill(pids[1], signal.SIGKILL)
    placers[0].signal(2, signal.SIGKILL)
    await gone(ends)
    second = await Controller(parent, placers, 3).start()
    assert second.crew.pids == {0: pids[0]}
    assert set(placers[1].homes) == {(0, 0), (1, 0)}, "a place that is taken, by a keeper without a worker, too"
    assert [(await second.crew.restart(worker)).kept for worker in (1, 2)] == [None, None]
    assert [second.crew.life(worker) for worker in range(3)] == [0, 1001, 1001], "above those of the first controller"
    assert sorted(placers[1].processes) == [(2, 1)], "the second one's keeper lives; a later life of the third's"
    for worker in range(3):
        await second.answer(worker, 10 + worker)
    assert not second.exits
    await second.crew.close(5.0)


async def test_a_keeper_is_lost_and_placed_again_as_before(parent, placers):
    first = await Controller(parent, placers).start()
    await first.die()
    second = await Controller(parent, placers).start()
    placers[0].signal(1, signal.SIGKILL)
    await second.until(lambda: second.exits)
    assert [worker for worker, _ in second.exits] == [1] and placers[1].removed == [(1, 0)]
    await second.crew.restart(1)
    assert sorted(placers[1].processes) == [(1, 1)] and second.crew.life(1) == 1
    await second.answer(1, 1)
    await second.crew.close(5.0)


async def test_a_controller_that_the_parent_has_not_signed_gets_none_of_them(parent, placers):
    first = await Controller(parent, placers).start()
    await first.answer(0, 1)
    pids = dict(first.crew.pids)
    await first.die()
    false = Controller(parent, placers, signer=Signer())
    assert await false.spawner._server.find(false.spawner._heritage) is None
    await false.leave()
    second = await Controller(parent, placers).start()
    assert second.crew.pids == pids
    late = Controller(parent, placers)  # of a higher epoch, while the second lives: it has its turn after that
    asking = asyncio.create_task(late.spawner._server.find(late.spawner._heritage))
    for call_id in range(5):
        await second.answer(1, call_id)
    assert not asking.done()
    await second.crew.close(5.0)
    assert await asyncio.wait_for(asking, PATIENCE_S) is None, "the second has ended in order"
    await late.leave()


async def test_without_a_controller_in_time_they_end(parent, placers):
    parent.orphan_timeout_s = 0.2
    first = await Controller(parent, placers).start()
    ends = ends_of(first.crew.pids.values())
    await first.die()
    await gone(ends)


async def test_they_end_with_the_parent(parent, placers):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    parent.pid, parent.orphan_timeout_s = process.pid, 10 * PATIENCE_S
    first = await Controller(parent, placers).start()
    ends = ends_of(first.crew.pids.values())
    await first.die()
    process.kill()
    await process.wait()
    await gone(ends)


# --- with a model


async def test_what_was_measured_between_hosts_outlives_the_controller(parent, placers, tmp_path, monkeypatch):
    monkeypatch.setattr(link_classes, "PATIENCE_S", PATIENCE_S)
    folder = tmp_path / "model"
    create_model(folder, arch="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, max_position_embeddings=128)

    def controller(names):
        placers.append(ProcessPlacer(host_of=lambda worker: names[worker]))
        heritage = parent.heritage()
        spawner = FarSpawner(placers[-1], lease_s=LEASE_S, heritage=heritage)
        return engine_of(folder, spawner, heritage, instances=3, worker_heartbeat_timeout=0, worker_step_timeout=0)

    first = controller("abc")
    await first.start()
    measured = first.core.params.networks
    assert len(measured) == 6 and set(first.core.params.machine_of.values()) == {0, 1, 2}
    ends = ends_of([first._crew.pids[0]])
    first._ticker.cancel()
    await first._restarter.close()
    await killed(first._crew, first._spawner)
    placers[0].signal(0, signal.SIGKILL)  # a host's number is another one while the first one is away
    await gone(ends)
    second = controller("abc")
    try:
        await second.start()
        kept = {machine: second._spawner.hosts().index("abc"[machine]) for machine in (1, 2)}
        assert all(second.core.params.networks[kept[a], kept[b]] == measured[a, b] for a, b in ((1, 2), (2, 1)))
        await until(lambda: all(w.alive for w in second.core.state.workers.values()))
        assert len(second.core.params.networks) == 6
        assert sorted(second.core.params.networks.values()) == sorted(measured.values())
    finally:
        await second.close()


async def test_a_keeper_without_a_worker_goes_where_the_next_controller_starts_none_there(parent, placers, tmp_path):
    """It would hold its place for ever."""
    folder = tmp_path / "model"
    create_model(folder, arch="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, max_position_embeddings=128)

    def controller(instances):
        placers.append(ProcessPlacer())
        heritage = parent.heritage()
        spawner = FarSpawner(placers[-1], lease_s=LEASE_S, heritage=heritage)
        return engine_of(folder, spawner, heritage, instances=instances, min_instances=1, max_instances=2,
                         worker_heartbeat_timeout=0, worker_step_timeout=0)  # fmt: skip

    first = controller(2)
    await first.start()
    pids = dict(first._crew.pids)
    ends = ends_of([pids[1]])
    first._ticker.cancel()
    await first._restarter.close()
    await killed(first._crew, first._spawner)
    os.kill(pids[1], signal.SIGKILL)
    await gone(ends)
    second = controller(1)
    try:
        await second.start()
        assert second._crew.pids == {0: pids[0]}
        await until(lambda: placers[1].removed)
        assert placers[1].removed == [(1, 0)]
        await asyncio.wait_for(placers[0].processes[1, 0].wait(), PATIENCE_S)
    finally:
        await second.close()
