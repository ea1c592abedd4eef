"""Engines whose keepers Ray has placed: what Ray's own deaths cost (nothing that runs), and what is left afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_engines import answers, drawn_prompts, engine_of, expected_answers
from ray_cluster import HAS_RAY, WHY_NOT, AutoscaledHead, FixedHead, RayHead

from jettison.device.model.create import create_model
from jettison.errors import JettisonError, UserError
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.engine.spawn_ray import RayPlacer, ray_spawner, room_of
from jettison.live.wire.host_orders import KeeperPost
from jettison.live.wire.placing import Room
from longrun import LONG
from waiting import PATIENCE_S, until

needs_ray = pytest.mark.skipif(not HAS_RAY, reason=WHY_NOT)
in_the_long_run = pytest.mark.skipif(not LONG, reason="in the long run: JETTISON_LONG=1; it waits for Ray")
pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "model"
    create_model(folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2)
    return folder


@pytest.fixture
def head() -> Iterator[RayHead]:
    head = RayHead()
    yield head
    head.close()


def placer_of(engine: Engine) -> RayPlacer:
    assert engine._crew is not None
    spawner = engine._crew._spawner
    assert isinstance(spawner, FarSpawner)
    placer = spawner._placer
    assert isinstance(placer, RayPlacer)
    return placer


@needs_ray
async def test_ray_is_started_for_its_user_and_ends_with_the_engine(folder: Path) -> None:
    """By its process ids: another Ray on this machine would live on."""
    expected = await expected_answers(folder)
    engine = engine_of(folder, None, instances=2, launcher="ray", lease=30)
    try:
        await engine.start()
        pid = placer_of(engine).pid
        rays = psutil.Process(pid).children(recursive=True)
        assert any("raylet" in process.name() for process in rays)
        assert engine._crew is not None
        workers = [psutil.Process(pid) for pid in engine._crew.pids.values()]
        assert not {process.pid for process in workers} & {process.pid for process in rays}

        async def drop(engine: Engine) -> None:
            engine.orders.request_drop()
            await until(lambda: engine.snapshot().counters["drops"] == 1)

        assert await answers(engine, drawn_prompts(), drop) == expected
    finally:
        await engine.close()
    _, alive = psutil.wait_procs([*rays, *workers], timeout=30)
    assert not alive


@needs_ray
@in_the_long_run
async def test_ray_s_driver_and_head_may_die_while_tokens_flow(folder: Path, head: RayHead) -> None:
    expected = await expected_answers(folder)
    engine = engine_of(folder, None, instances=2, launcher="ray", ray_address=head.address, lease=30,
                       ray_placement="spread")  # fmt: skip

    async def driver_dies(engine: Engine) -> None:
        os.kill(placer_of(engine).pid or 0, signal.SIGKILL)
        await until(lambda: placer_of(engine).pid is None)

    async def keeper_dies(engine: Engine) -> None:
        """With a driver of its own again, the next life is placed."""
        worker = psutil.Process(engine._crew.pids[1])  # type: ignore[union-attr]
        worker.parent().parent().kill()  # type: ignore[union-attr]
        await until(lambda: not engine.core.state.workers[1].alive)

    async def head_dies(engine: Engine) -> None:
        for process in psutil.Process(head.pid).children(recursive=True):
            if process.name() in ("gcs_server", "raylet") or process.name().startswith("ray::"):
                process.kill()

    try:
        await engine.start()
        assert await answers(engine, drawn_prompts(), driver_dies) == expected
        assert all(w.alive for w in engine.core.state.workers.values()), "keepers are no children of Ray's"
        assert await answers(engine, drawn_prompts(), keeper_dies) == expected
        await until(lambda: engine.core.state.workers[1].alive)
        assert placer_of(engine).pid is not None
        assert await answers(engine, drawn_prompts(), head_dies) == expected
        assert all(w.alive for w in engine.core.state.workers.values())
        assert await answers(engine, drawn_prompts()) == expected
    finally:
        await engine.close()


def seen(head: RayHead, what: str) -> Any:
    """An expression's value, as a driver of another user sees it."""
    code = (
        "import ray, json, sys; from ray.util.placement_group import placement_group_table as table\n"
        f"ray.init(address=sys.argv[1], log_to_driver=False)\nprint(json.dumps({what}))"
    )
    said = subprocess.run((sys.executable, "-c", code, head.address), capture_output=True, text=True, check=True)
    return json.loads(said.stdout.splitlines()[-1])


def nodes(head: RayHead) -> set[str]:
    """Those that live."""
    return set(seen(head, "[node['NodeID'] for node in ray.nodes() if node['Alive']]"))


def nodes_of_rooms(head: RayHead) -> list[str]:
    """Of each bundle that is reserved."""
    created = "(g for g in table().values() if g['state'] == 'CREATED')"
    return list(seen(head, f"[node for g in {created} for node in g['bundles_to_node_id'].values()]"))


def counted(head: RayHead) -> tuple[float, list[str]]:
    """Cores that Ray counts as free, and the states of its placement groups."""
    states = "[g['state'] for g in table().values() if g['state'] != 'REMOVED']"
    free, groups = seen(head, f"[ray.available_resources().get('CPU', 0.0), {states}]")
    return free, groups


@needs_ray
@in_the_long_run
async def test_a_driver_after_another_adopts_its_room_and_a_server_that_ends_gives_it_back(folder: Path) -> None:
    """There is room for two workers and no more: what is counted twice would leave none."""
    head = RayHead(num_cpus=2)
    engine = engine_of(folder, None, instances=2, launcher="ray", ray_address=head.address, lease=30)
    try:
        await engine.start()
        assert counted(head) == (0.0, ["CREATED"])
        placer = placer_of(engine)
        before = placer.pid
        os.kill(before or 0, signal.SIGKILL)
        await until(lambda: placer.why_none is not None)
        assert engine.snapshot().troubles == (placer.why_none,)
        assert counted(head) == (0.0, ["CREATED"]), "what runs is counted while there is no driver"
        await until(lambda: placer.why_none is None)
        assert placer.pid != before and engine.snapshot().troubles == ()
        assert counted(head) == (0.0, ["CREATED"])
        worker = psutil.Process(engine._crew.pids[1])  # type: ignore[union-attr]
        worker.parent().parent().kill()  # type: ignore[union-attr]
        await until(lambda: not engine.core.state.workers[1].alive)
        await until(lambda: engine.core.state.workers[1].alive)
        assert counted(head) == (0.0, ["CREATED"])
    finally:
        await engine.close()
    try:
        await until(lambda: counted(head) == (2.0, []))
    finally:
        head.close()


@needs_ray
@in_the_long_run
async def test_a_head_that_returns_without_what_it_knew_counts_once_what_has_lived_on(folder: Path) -> None:
    expected = await expected_answers(folder)
    head = FixedHead(num_cpus=2)
    engine = engine_of(folder, None, instances=2, launcher="ray", ray_address=head.address, lease=30)

    async def head_dies(engine: Engine) -> None:
        head.kill()
        await until(lambda: placer_of(engine).why_none is not None)
        assert engine.snapshot().troubles == (placer_of(engine).why_none,)

    try:
        await engine.start()
        assert await answers(engine, drawn_prompts(), head_dies) == expected
        assert all(w.alive for w in engine.core.state.workers.values())
        head.start()
        await until(lambda: placer_of(engine).why_none is None)
        assert counted(head) == (0.0, ["CREATED"]) and engine.snapshot().troubles == ()
        worker = psutil.Process(engine._crew.pids[1])  # type: ignore[union-attr]
        worker.parent().parent().kill()  # type: ignore[union-attr]
        await until(lambda: not engine.core.state.workers[1].alive)
        await until(lambda: engine.core.state.workers[1].alive)
        assert counted(head) == (0.0, ["CREATED"])
        assert await answers(engine, drawn_prompts()) == expected
    finally:
        await engine.close()
        head.close()


class Server:
    """A placer of two workers, of which one has room from the start and the other is scaled out, and their keepers."""

    def __init__(self, head: RayHead, num_cpus: int = 1) -> None:
        """``num_cpus``: of the one that is scaled out."""
        self.rooms = [Room(num_cpus=n, num_gpus=0, memory_bytes=0) for n in (1, num_cpus)]
        self.placer = RayPlacer(self.rooms, head.address, "spread", num_reserved=1, name="scaled-out")

    def post(self, number: int, life: int = 0) -> KeeperPost:
        return KeeperPost(number=number, life=life, address="tcp:127.0.0.1:1", token_hex="00", lease_s=30.0,
                          authority_pem="")  # fmt: skip

    async def loses_its_driver(self) -> None:
        os.kill(self.placer.pid or 0, signal.SIGKILL)
        await until(lambda: self.placer.why_none is not None)


@needs_ray
@in_the_long_run
async def test_what_has_been_scaled_out_is_counted_without_a_driver_and_given_back_when_it_is_not_needed() -> None:
    """A keeper lives on without its driver: Ray must not give its cores away meanwhile."""
    head = RayHead(num_cpus=2)
    server = Server(head)
    placer = server.placer
    try:
        await placer.open()
        await placer.place(server.post(0))
        assert counted(head) == (1.0, ["CREATED"])
        await placer.place(server.post(1))
        assert counted(head) == (0.0, ["CREATED"] * 2)
        await server.loses_its_driver()
        assert counted(head) == (0.0, ["CREATED"] * 2), "what runs is counted while there is no driver"
        await until(lambda: placer.why_none is None)
        assert counted(head) == (0.0, ["CREATED"] * 2), "and once, with the next driver"
        await placer.remove(server.post(1))
        await until(lambda: counted(head) == (1.0, ["CREATED"]))
        await placer.place(server.post(1, 1))
        assert counted(head) == (0.0, ["CREATED"] * 2)
        await server.loses_its_driver()
        await placer.remove(server.post(1, 1))
        await until(lambda: placer.why_none is None)
        assert counted(head) == (1.0, ["CREATED"]), "what was given up meanwhile has no room"
        await placer.place(server.post(1, 2))
    finally:
        await placer.close()
    try:
        await until(lambda: counted(head) == (2.0, []))
    finally:
        head.close()


@needs_ray
@in_the_long_run
async def test_that_a_worker_more_waits_for_room_is_told_and_it_may_be_given_up_meanwhile() -> None:
    head = RayHead(num_cpus=1)
    server = Server(head)
    placer, told = server.placer, []
    placer.on_waits = lambda number, why: told.append((number, why))
    try:
        await placer.open()
        placing = asyncio.create_task(placer.place(server.post(1)))
        await until(lambda: bool(told))
        ((number, why),) = told
        assert number == 1 and "asked for: 1 x (1 core(s)); free on 1 host(s) in all: " in why
        await placer.remove(server.post(1))
        with pytest.raises(JettisonError, match="it is not needed"):
            await placing
        await until(lambda: counted(head) == (0.0, ["CREATED"]))
        await placer.place(server.post(0))
    finally:
        await placer.close()
        head.close()


@needs_ray
@in_the_long_run
async def test_workers_of_the_start_that_may_go_are_placed_together_and_give_their_room_back_alone() -> None:
    """The one that stays is any of them."""
    head = FixedHead(num_cpus=4)
    head.add_node(4)
    server = Server(head)
    try:
        await until(lambda: len(nodes(head)) == 2)
        for strategy, num_hosts in (("spread", 2), ("pack", 1)):
            server.placer = placer = RayPlacer(
                server.rooms, head.address, strategy, num_reserved=2, gives_back=True, name=f"elastic-{strategy}"
            )  # fmt: skip
            await placer.open()
            assert len(set(nodes_of_rooms(head))) == num_hosts
            assert counted(head) == (6.0, ["CREATED"] * 2)
            if strategy == "spread":
                await placer.close()
                await until(lambda: counted(head) == (8.0, []))
        for number in range(2):
            await placer.place(server.post(number))
        assert counted(head) == (6.0, ["CREATED"] * 2), "they are in what was reserved"
        await placer.remove(server.post(0))
        await until(lambda: counted(head) == (7.0, ["CREATED"]))
        await server.loses_its_driver()
        await until(lambda: placer.why_none is None)
        assert counted(head) == (7.0, ["CREATED"]), "what was given back is not reserved again"
        await placer.place(server.post(0, 1))
        assert counted(head) == (6.0, ["CREATED"] * 2)
    finally:
        await server.placer.close()
    try:
        await until(lambda: counted(head) == (8.0, []))
    finally:
        head.close()


@needs_ray
@in_the_long_run
async def test_a_head_that_returns_without_what_it_knew_counts_what_has_been_scaled_out_where_it_lives() -> None:
    head = FixedHead(num_cpus=2)
    server = Server(head)
    placer = server.placer
    try:
        await placer.open()
        await placer.place(server.post(1))
        head.kill()
        await until(lambda: placer.why_none is not None)
        head.start()
        await until(lambda: placer.why_none is None)
        await until(lambda: counted(head) == (0.0, ["CREATED"] * 2))
    finally:
        await placer.close()
        head.close()


@needs_ray
@in_the_long_run
async def test_an_autoscaler_starts_a_host_for_a_worker_that_none_has_room_for_and_ends_it_behind_the_worker() -> None:
    head = AutoscaledHead(num_cpus=1, more_cpus=2)
    server = Server(head, num_cpus=2)
    placer = server.placer
    try:
        await placer.open()
        await placer.place(server.post(0))
        first = nodes(head)
        assert len(first) == 1 and counted(head) == (0.0, ["CREATED"])
        await placer.place(server.post(1))
        assert len(nodes(head)) == 2 and set(nodes_of_rooms(head)) == nodes(head)
        assert counted(head) == (0.0, ["CREATED"] * 2)
        await placer.remove(server.post(1))
        await until(lambda: nodes(head) == first)
        assert counted(head) == (0.0, ["CREATED"])
    finally:
        await placer.close()
        head.close()


@needs_ray
@in_the_long_run
def test_a_server_that_is_killed_gives_its_room_back_after_a_while(head: RayHead) -> None:
    """With its driver, which cannot do that any more."""
    code = (
        "import sys, time\n"
        "from jettison.live.host import ray_room, placer\n"
        "from jettison.live.wire import placing as p\n"
        "ray_room.GRACE_S = 2.0\n"
        "room = p.Room(num_cpus=3, num_gpus=0, memory_bytes=0)\n"
        "opening = p.Open(address=sys.argv[1], rooms=[room] * 2, strategy='pack', timeout_s=30.0, name='left-behind',"
        " num_reserved=1)\n"
        "driver = placer.RayDriver(2)\n"
        "opened = driver.open(opening)\n"
        "assert driver._room.lone(1).wait(30)\n"
        "print(opened, flush=True); time.sleep(1000)"
    )
    driver = subprocess.Popen((sys.executable, "-c", code, head.address), stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert "Opened" in driver.stdout.readline()
    finally:
        driver.kill()
        driver.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while counted(head) != (16.0, []):
        assert time.monotonic() < deadline_s


@needs_ray
async def test_where_there_is_no_room_a_start_says_what_is_wanted_and_what_is_free(head: RayHead) -> None:
    placer = RayPlacer([Room(num_cpus=500, num_gpus=0, memory_bytes=0)], head.address, "pack", room_timeout_s=1.0)
    wanted = r"in 1 s Ray has found no room; asked for: 1 x \(500 core\(s\)\); free on 1 host\(s\) in all: 16 core"
    with pytest.raises(UserError, match=wanted):
        await placer.open()
    await placer.close()


@needs_ray
@in_the_long_run
def test_room_is_waited_for_longer_than_it_is_kept_without_a_driver(head: RayHead) -> None:
    """Its warden hears meanwhile that there is one."""
    code = (
        "import sys\n"
        "from jettison.live.host import ray_room, placer\n"
        "from jettison.live.wire import placing as p\n"
        "ray_room.GRACE_S, ray_room.WAITS_S = 4.0, 1.0\n"
        "room = p.Room(num_cpus=500, num_gpus=0, memory_bytes=0)\n"
        "opening = p.Open(address=sys.argv[1], rooms=[room], strategy='pack', timeout_s=9.0, name='none',"
        " num_reserved=1)\n"
        "print(placer.RayDriver(2).open(opening).why, flush=True)"
    )
    said = subprocess.run((sys.executable, "-c", code, head.address), capture_output=True, text=True, check=True)
    assert said.stdout.startswith("in 9 s Ray has found no room; asked for: 1 x (500 core(s)); free on ")
    assert '{"type":"waits","why":"asked for: 1 x (500 core(s)); ' in said.stderr


async def test_a_cluster_that_is_not_there_is_told_of() -> None:
    placer = RayPlacer([Room(num_cpus=1, num_gpus=0, memory_bytes=0)], "127.0.0.1:1", "pack")
    with pytest.raises(UserError, match=r"no Ray cluster at 127\.0\.0\.1:1: "):
        await placer.open()
    await placer.close()


def test_without_ray_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jettison\[ray\]'"):
        ray_spawner([], address=None, strategy="pack", lease_s=2.0)


def test_a_worker_takes_cores_and_memory_or_a_card(folder: Path) -> None:
    from jettison.config import EngineConfig
    from jettison.live.engine.assembly import assemble

    (spec,) = assemble(EngineConfig.resolve(model=str(folder), memory="64MiB", num_threads=3)).worker_specs
    assert room_of(spec) == Room(num_cpus=3, num_gpus=0, memory_bytes=(64 << 20) + spec.host_bytes)
