"""Hosts that are cut off, stopped or gone, over real processes: who is lost with whom, what ends by itself, and that no
token is lost or wrong."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from far_keepers import ProcessPlacer
from host_engines import answers, drawn_prompts, engine_of, expected_answers
from test_crew import CHILD, FarStage, Stage

from jettison.device.model.create import create_model
from jettison.errors import ModelError, WorkerLostError
from jettison.live.engine import spawn_far
from jettison.live.engine.engine import Engine
from jettison.live.engine.sleep_orders import SleepOrders
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.wire.heartbeat import Patience
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.live

LEASE_S = 5.0
"""More than a busy machine keeps a process waiting; no test looks at how long it takes."""


class HostsStage(FarStage):
    """Workers 0 and 1 on one host, worker 2 on another; nothing but leases tells of what is stopped."""

    def __init__(self, num_workers=3, fate=""):
        placer = ProcessPlacer(host_of=lambda worker: "left" if worker < 2 else "right")
        spawner = FarSpawner(placer, lease_s=LEASE_S, worker_command=CHILD)
        Stage.__init__(self, spawner, num_workers, fate, patience=Patience(0.0, 0.0))

    def is_closed(self):
        return self.spawner._placer.is_closed

    def stop(self, worker, what=signal.SIGSTOP, life=0):
        """The worker's keeper with all that it has started."""
        os.killpg(self.spawner._placer.processes[worker, life].pid, what)


async def gone(pidfd):
    assert (await asyncio.to_thread(select.select, [pidfd], [], [], PATIENCE_S))[0]
    os.close(pidfd)


async def test_a_host_s_workers_are_lost_together_with_one_cause_and_start_again_elsewhere(caplog):
    async with HostsStage() as now:
        pids = dict(now.crew.pids)
        old = [os.pidfd_open(pids[worker]) for worker in (0, 1)]
        for worker in (0, 1):
            now.stop(worker)
        await now.until(lambda: len(now.exits) == 2)
        assert sorted(now.exits) == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)] and list(now.crew.pids) == [2]
        causes = {record.args[1] for record in caplog.records if "is given up" in record.msg}
        assert len(causes) == 1 and next(iter(causes)).startswith("host left is lost: no word of it for ")
        for worker in (0, 1):
            await now.crew.restart(worker)
            await now.answer(worker, 7)
        for worker in (0, 1):
            now.stop(worker, signal.SIGCONT)
        for pidfd in old:
            await gone(pidfd)
        await now.answer(2, 8)
        assert now.crew.life(2) == 0 and len(now.exits) == 2, "what wakes up is heard no more"


async def test_a_stopped_keeper_s_worker_ends_by_itself():
    async with HostsStage() as now:
        worker = os.pidfd_open(now.crew.pids[0])
        now.spawner._placer.signal(0, signal.SIGSTOP)
        await gone(worker)
        await now.until(lambda: now.exits)
        assert [each for each, _ in now.exits] == [0], "its neighbour's keeper lives"
        await now.answer(1, 1)
        now.spawner._placer.signal(0, signal.SIGCONT)


async def test_a_keeper_that_dies_takes_its_worker_along_and_another_is_placed():
    async with HostsStage() as now:
        worker = os.pidfd_open(now.crew.pids[2])
        now.spawner._placer.signal(2, signal.SIGKILL)
        await now.until(lambda: now.exits)
        await gone(worker)
        await now.crew.restart(2)
        assert now.crew.life(2) == 1 and sorted(now.spawner._placer.processes) == [(0, 0), (1, 0), (2, 0), (2, 1)]
        await now.answer(2, 1)


async def test_a_controller_that_stands_still_loses_no_host():
    """As in a collection of garbage, which holds every thread, on a machine that is busy."""
    async with HostsStage() as now:
        time.sleep(1.5 * LEASE_S)  # noqa: ASYNC251
        for worker in range(3):
            await now.answer(worker, worker)
        assert now.exits == []


async def test_the_process_that_takes_keepers_starts_again_with_the_next_worker_a_lease_later(caplog):
    async with HostsStage() as now:
        now.spawner._server._process.kill()
        await now.until(lambda: len(now.exits) == 3)
        assert {record.args[1] for record in caplog.records if "is given up" in record.msg} == {
            "the process that takes keepers has ended"}  # fmt: skip
        loop = asyncio.get_running_loop()
        for worker in range(3):
            await now.crew.restart(worker)
            assert loop.time() >= now.spawner._reopens_s, "by then no keeper of before has a lease"
            await now.answer(worker, worker)


async def test_a_keeper_that_never_joins_is_given_up(monkeypatch):
    monkeypatch.setattr(spawn_far, "JOIN_TIMEOUT_S", 0.05)
    now = HostsStage(1)
    now.spawner._placer.admit = now.spawner._placer.place_nothing
    with pytest.raises(WorkerLostError, match="its keeper has not joined in"):
        await asyncio.wait_for(now.crew.start(), PATIENCE_S)
    assert (0, 0) in now.spawner._placer.removed


async def test_whatever_error_a_placer_meets_ends_the_start():
    now = HostsStage(1)
    now.spawner._placer.fails = KeyError("a mistake")
    with pytest.raises(WorkerLostError, match="a mistake"):
        await asyncio.wait_for(now.crew.start(), PATIENCE_S)
    assert (0, 0) in now.spawner._placer.removed


async def test_a_worker_that_starts_again_has_the_keeper_that_is_there():
    async with HostsStage() as now:
        now.die(0)
        await now.until(lambda: now.exits)
        await now.crew.restart(0)
        await now.answer(0, 1)
        assert len(now.spawner._placer.processes) == 3


async def test_where_no_host_is_found_a_start_fails_and_says_so(caplog):
    now = HostsStage(2)
    now.spawner._placer.fails = OSError(5, "the network is down")
    with pytest.raises(WorkerLostError, match="the network is down"):
        await now.crew.start()
    assert now.is_closed()


async def test_a_start_may_be_given_up_before_a_host_is_found():
    async with HostsStage() as now:
        now.die(0)
        now.spawner._placer.signal(0, signal.SIGKILL)
        await now.until(lambda: now.exits)
        while not now.spawner._keepers[0].is_over:
            await asyncio.sleep(0.001)
        restart = asyncio.create_task(now.crew.restart(0))
        while now.crew.life(0) == 0:
            await asyncio.sleep(0)
        now.crew.declare_lost(0, "injected")
        with pytest.raises(WorkerLostError, match="injected"):
            await asyncio.wait_for(restart, PATIENCE_S)
        assert now.handle(0).ended.done()
        await now.crew.restart(0)
        await now.answer(0, 1)


# --- with a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far") / "model"
    create_model(folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2)
    return folder


class Namespaces:
    """A host for each of ``names``, as a network namespace behind a bridge to this one. Needs root."""

    def __init__(self, names):
        self.tag = f"jt{os.getpid() % 10_000}"
        self.names = list(names)
        self.net = f"10.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"

    def ip_of(self, host):
        return f"{self.net}.{self.names.index(host) + 2}"

    def prefix(self, host):
        return ("ip", "netns", "exec", f"{self.tag}{host}")

    def cut(self, host):
        run("link", "set", f"{self.tag}{host}", "down")

    def __enter__(self):
        run("link", "add", f"{self.tag}br", "type", "bridge")
        run("addr", "add", f"{self.net}.1/24", "dev", f"{self.tag}br")
        run("link", "set", f"{self.tag}br", "up")
        for host in self.names:
            name = f"{self.tag}{host}"
            run("netns", "add", name)
            run("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("link", "set", name, "master", f"{self.tag}br", "up")
            run("-n", name, "addr", "add", f"{self.ip_of(host)}/24", "dev", "eth0")
            run("-n", name, "link", "set", "eth0", "up")
            run("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *exc):
        for host in self.names:
            subprocess.run(("ip", "netns", "del", f"{self.tag}{host}"), check=False)
        subprocess.run(("ip", "link", "del", f"{self.tag}br"), check=False)


def run(*words):
    subprocess.run(("ip", *words), check=True)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0:
        return False
    try:
        with Namespaces(["x"]):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@pytest.mark.parametrize("way", ["stopped", "cut"])
async def test_a_host_goes_silent_in_the_midst_of_a_drop_and_nothing_is_lost(
    folder: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two workers that have become one pipeline: half of every token is computed on the host that goes."""
    if way == "cut" and not can_make_namespaces():
        pytest.skip("network namespaces need root")
    expected = await expected_answers(folder)
    hosts = Namespaces(["0", "1"])
    if way == "cut":
        hosts.__enter__()
        placer = ProcessPlacer(ip_of=hosts.ip_of, own_ip=f"{hosts.net}.1", prefix=hosts.prefix)
        placer.tells_ends = False
    else:
        placer = ProcessPlacer()

    async def silence(engine: Engine) -> None:
        engine.orders.request_drop()
        await until(lambda: engine.snapshot().counters["drops"] == 1)
        if way == "cut":
            hosts.cut("1")
        else:
            os.killpg(placer.processes[1, 0].pid, signal.SIGSTOP)

    engine = engine_of(folder, FarSpawner(placer, lease_s=LEASE_S), instances=2, worker_heartbeat_timeout=0)
    try:
        await engine.start()
        assert len(set(engine.core.params.machine_of.values())) == 2
        assert await answers(engine, drawn_prompts(), silence) == expected
        assert engine.core.state.workers[0].alive
        keeper = placer.processes[1, 0]
        if way == "cut":  # its fence has fallen: there is no other way to hear of the host
            assert await asyncio.wait_for(keeper.wait(), PATIENCE_S) == 0
            assert "host 1 is lost: no word of it" in caplog.text
        else:
            await until(lambda: engine.core.state.workers[1].alive)
            assert await answers(engine, drawn_prompts()) == expected
            os.killpg(keeper.pid, signal.SIGCONT)
            await asyncio.wait_for(keeper.wait(), PATIENCE_S)
            assert await answers(engine, drawn_prompts()) == expected
    finally:
        await engine.close()
        if way == "cut":
            hosts.__exit__()


class BareHosts(FarSpawner):
    """Hosts of some workers have no folder of the model."""

    def __init__(self, placer: ProcessPlacer, bare: set[int]) -> None:
        super().__init__(placer, lease_s=LEASE_S)
        self.bare = bare

    def spawn(self, start):
        if start.spec.worker_id in self.bare:
            start = msgspec.structs.replace(
                start, spec=msgspec.structs.replace(start.spec, model_dir="/nonexistent/model")
            )
        return super().spawn(start)


async def test_a_host_without_the_folder_is_filled_from_its_peers_and_serves_alone(folder: Path) -> None:
    expected = await expected_answers(folder)
    placer = ProcessPlacer()
    engine = engine_of(folder, BareHosts(placer, {1}), instances=2)

    async def other_dies(engine: Engine) -> None:
        os.kill(engine._crew.pids[0], signal.SIGKILL)

    try:
        await engine.start()
        await until(lambda: len(engine.snapshot().groups) == 2)
        assert not engine.core.state.workers[1].unfilled
        assert await answers(engine, drawn_prompts(), other_dies) == expected
        await until(lambda: len(engine.snapshot().groups) == 2)
        assert await answers(engine, drawn_prompts()) == expected
        assert engine.snapshot().troubles == ()
    finally:
        await engine.close()


class WaitingPlacer(ProcessPlacer):
    """There is no room until ``has_room``."""

    def __init__(self):
        super().__init__()
        self.has_room = asyncio.Event()

    async def open(self):
        self.why_none = "no host has room"
        await self.has_room.wait()
        self.why_none = None
        return await super().open()

    async def place(self, post):
        if not self.has_room.is_set():
            self.on_waits(post.number, "no host has room")
            await self.has_room.wait()
        return await super().place(post)


async def test_that_a_start_or_an_instance_more_waits_for_room_is_told_with_why(folder: Path) -> None:
    placer = WaitingPlacer()
    engine = engine_of(folder, FarSpawner(placer, lease_s=LEASE_S), instances=1, max_instances=2)
    starting = asyncio.create_task(engine.start())
    try:
        await until(lambda: engine.snapshot().troubles == ("no host has room",))
        assert engine.state == "loading"
        placer.has_room.set()
        await starting
        assert engine.snapshot().troubles == ()
        placer.has_room.clear()
        SleepOrders(engine).wake(1)
        await until(lambda: engine.snapshot().waits == {1: "no host has room"})
        assert "instance_waits" in [record.kind for record in engine.event_log]
        placer.has_room.set()
        await until(lambda: len(engine.snapshot().groups) == 2)
        assert engine.snapshot().waits == {}
    finally:
        starting.cancel()
        await engine.close()


async def test_where_no_host_has_the_folder_the_start_says_so(folder: Path) -> None:
    engine = engine_of(folder, BareHosts(ProcessPlacer(), {0, 1}), instances=2)
    with pytest.raises(ModelError, match="no host that a worker runs on has this folder"):
        await engine.start()
    await engine.close()
