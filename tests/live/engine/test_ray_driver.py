"""Ray's driver as a process that does not answer, ends, or loses its head: what waits for it has a limit, another one
is started, what lives is told to it, and none is left. Needs no Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from jettison.errors import JettisonError, UserError
from jettison.live.engine import spawn_ray
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.host.keeper import worker_environment
from jettison.live.wire import placing as p
from jettison.live.wire.host_orders import KeeperPost
from waiting import PATIENCE_S, until

ROOMS = [p.Room(num_cpus=1, num_gpus=0, memory_bytes=0)] * 2


def post(number=0, life=0):
    return KeeperPost(number=number, life=life, address="tcp:10.0.0.1:1", token_hex="00", lease_s=2.0, authority_pem="")


@pytest.fixture
def placer(monkeypatch):
    monkeypatch.setattr(spawn_ray, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(1000)"))
    return spawn_ray.RayPlacer(ROOMS, "nowhere:1", "pack", room_timeout_s=0.0)


@pytest.mark.parametrize(("address", "gets_it"), [("nowhere:1", True), (None, False)])
async def test_the_driver_alone_has_the_token_of_the_user_s_cluster(monkeypatch, tmp_path, address, gets_it):
    told = tmp_path / "token"
    program = f"import os; open({str(told)!r}, 'w').write(os.environ['RAY_AUTH_TOKEN'])"
    monkeypatch.setattr(spawn_ray, "_COMMAND", (sys.executable, "-c", program))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    placer = spawn_ray.RayPlacer(ROOMS, address, "pack", room_timeout_s=0.0)
    with pytest.raises((UserError, OSError)):
        await asyncio.wait_for(placer.open(), PATIENCE_S)
    await placer.close()
    await until(told.exists)
    assert (told.read_text() == "the user's") == gets_it and told.read_text()
    assert "RAY_AUTH_TOKEN" not in worker_environment(1)


async def test_a_start_of_ray_has_a_limit(placer, monkeypatch):
    monkeypatch.setattr(spawn_ray, "_JOIN_TIMEOUT_S", 0.05)
    with pytest.raises(UserError, match=r"Ray has not started in 0\.05 s"):
        await asyncio.wait_for(placer.open(), PATIENCE_S)
    assert placer.pid is None
    await placer.close()


async def test_a_start_of_ray_that_is_given_up_leaves_no_driver(placer):
    opening = asyncio.create_task(placer.open())
    async with asyncio.timeout(PATIENCE_S):
        while (pid := placer.pid) is None:
            await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert placer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await placer.close()


class Driven:
    """A placer over a double, that has joined."""

    def __init__(self, folder):
        self.folder = folder
        self.placer = spawn_ray.RayPlacer(ROOMS, "nowhere:1", "pack")

    def openings(self):
        names = sorted(self.folder.glob("open-*"), key=lambda path: int(path.name.split("-")[1]))
        return [msgspec.json.decode(path.read_bytes(), type=p.Open) for path in names]

    async def joined(self, num):
        await until(lambda: len(self.openings()) == num and self.placer.why_none is None)

    def kill(self):
        os.kill(self.placer.pid, signal.SIGKILL)


@pytest.fixture
async def driven(tmp_path, monkeypatch):
    double = Path(__file__).with_name("driver_double.py")
    monkeypatch.setattr(spawn_ray, "_COMMAND", (sys.executable, str(double), str(tmp_path)))
    monkeypatch.setattr(spawn_ray, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(spawn_ray, "MAX_PAUSE_S", 0.1)
    now = Driven(tmp_path)
    await now.placer.open()
    yield now
    await now.placer.close()
    assert now.placer.pid is None


async def test_a_driver_after_another_adopts_its_room_and_hears_where_keepers_live(driven):
    await driven.placer.place(post(0))
    await driven.placer.place(post(1))
    await driven.placer.remove(post(1))
    driven.kill()
    await driven.joined(2)
    first, second = driven.openings()
    assert (first.name, first.homes, second.homes) == (second.name, {}, {0: "10.0.0.2"}) and first.name


async def test_behind_another_controller_it_joins_beside_and_what_has_died_meanwhile_waits_for_that(driven):
    driven.kill()
    await driven.joined(2)
    later = Driven(driven.folder)
    later.placer.reopen({(0, 3): "10.0.0.7"})
    placed = asyncio.create_task(later.placer.place(post(1)))
    await later.joined(3)
    assert await asyncio.wait_for(placed, PATIENCE_S) == b"\0"
    assert later.openings()[-1].homes == {0: "10.0.0.7"}
    assert not (later.folder / "given-back").exists(), "the room is the next controller's until one ends in order"
    await later.placer.close()
    assert later.placer.pid is None and (later.folder / "given-back").exists()


async def test_what_waits_for_a_place_hears_that_the_driver_has_ended_and_one_that_lives_is_unwatched(driven):
    await driven.placer.place(post(0))
    watching = asyncio.create_task(driven.placer.ended(post(0)))
    (driven.folder / "silent").touch()
    placing = asyncio.create_task(driven.placer.place(post(1)))
    await asyncio.sleep(0)
    driven.kill()
    with pytest.raises(JettisonError, match="Ray's driver has ended"):
        await asyncio.wait_for(placing, PATIENCE_S)
    with pytest.raises(JettisonError, match="does not watch it any more: Ray's driver has ended"):
        await asyncio.wait_for(watching, PATIENCE_S)


async def test_while_there_is_no_cluster_it_says_why_nothing_can_be_placed_and_what_can_wait_waits(driven):
    (driven.folder / "no-room").write_text("its head is off")
    driven.kill()
    await until(lambda: "its head is off" in (driven.placer.why_none or ""))
    with pytest.raises(JettisonError, match="nothing new can be placed on Ray's hosts: its head is off"):
        await driven.placer.place(post(0))
    able = asyncio.create_task(driven.placer.able())
    await asyncio.sleep(0)
    assert not able.done()
    (driven.folder / "no-room").unlink()
    await asyncio.wait_for(able, PATIENCE_S)
    assert await driven.placer.place(post(0)) == b"\0"


async def test_a_head_that_is_away_is_told_of_while_the_driver_lives_and_when_it_is_back_another_joins(driven):
    await driven.placer.place(post(0))
    pid = driven.placer.pid
    (driven.folder / "silent").touch()
    placing = asyncio.create_task(driven.placer.place(post(1)))
    (driven.folder / "away").write_text("refused")
    with pytest.raises(JettisonError, match="its head does not answer: refused"):
        await asyncio.wait_for(placing, PATIENCE_S)
    assert driven.placer.pid == pid and "does not answer: refused" in driven.placer.why_none
    (driven.folder / "away").unlink()
    await driven.joined(2)
    assert driven.placer.pid != pid and driven.openings()[1].homes == {0: "10.0.0.2"}


async def test_a_driver_that_does_not_place_and_does_not_answer_is_followed_by_another(driven, monkeypatch):
    monkeypatch.setattr(spawn_ray, "PLACE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(spawn_ray, "PONG_TIMEOUT_S", 0.2)
    for name in ("silent", "deaf"):
        (driven.folder / name).touch()
    with pytest.raises(JettisonError, match=r"not placed it in 0\.05 s"):
        await driven.placer.place(post(0))
    await driven.joined(2)


async def test_a_driver_that_answers_outlives_a_keeper_for_which_ray_has_no_room(driven, monkeypatch):
    """A cut host's room may be nowhere: the driver still places others, and watches those that live."""
    await driven.placer.place(post(1))
    watching = asyncio.create_task(driven.placer.ended(post(1)))
    monkeypatch.setattr(spawn_ray, "PLACE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(spawn_ray, "PONG_TIMEOUT_S", PATIENCE_S)
    pid = driven.placer.pid
    (driven.folder / "silent").touch()
    with pytest.raises(JettisonError, match=r"not placed it in 0\.05 s"):
        await driven.placer.place(post(0))
    assert (driven.folder / "pinged").exists()
    assert driven.placer.pid == pid and driven.placer.why_none is None and not watching.done()
    monkeypatch.setattr(spawn_ray, "PLACE_TIMEOUT_S", PATIENCE_S)
    (driven.folder / "silent").unlink()
    assert await driven.placer.place(post(0, 1)) == b"\0"
    watching.cancel()


def test_ray_has_time_to_notice_that_a_host_is_cut():
    """Measured with Ray 2.60."""
    assert spawn_ray.PLACE_TIMEOUT_S > 64.7


async def test_what_is_removed_before_it_is_admitted_is_forgotten(driven):
    await driven.placer.place(post(0))
    (driven.folder / "silent").touch()
    placing = asyncio.create_task(driven.placer.place(post(1)))
    await until(lambda: len(driven.placer._requests) == 2)
    for each in (post(0), post(1)):
        await driven.placer.remove(each)
    with pytest.raises(JettisonError, match="it is not needed"):
        await asyncio.wait_for(placing, PATIENCE_S)
    assert not driven.placer._requests and not driven.placer._ends and not driven.placer._homes
    await until((driven.folder / "removed-1-0").exists)
    (driven.folder / "silent").unlink()
    assert await driven.placer.place(post(1, 1)) == b"\0", "what the driver has said of them since is passed over"


async def test_a_spawner_says_so_and_keeps_only_those_waiting_that_need_a_keeper(driven):
    spawner = FarSpawner(driven.placer)
    assert spawner.troubles() == ()
    (driven.folder / "no-room").write_text("no head")
    driven.kill()
    await until(lambda: "no head" in (driven.placer.why_none or ""))
    assert spawner.troubles() == ("nothing new can be placed on Ray's hosts: no head",)
    able = asyncio.create_task(spawner.able(0))
    await asyncio.sleep(0)
    assert not able.done()
    (driven.folder / "no-room").unlink()
    await asyncio.wait_for(able, PATIENCE_S)
    assert spawner.troubles() == ()


async def test_a_start_that_waits_for_room_says_so_once_in_the_log_and_in_its_troubles_and_then_opens(driven, caplog):
    caplog.set_level(logging.INFO)
    later = Driven(driven.folder)
    (later.folder / "waits").write_text("asked for: 4 x (8 core(s))")
    opening = asyncio.create_task(later.placer.open())
    trouble = "nothing new can be placed on Ray's hosts: there is no room yet; asked for: 4 x (8 core(s))"
    await until(lambda: later.placer.why_none == trouble)
    assert not opening.done()
    (later.folder / "waits").unlink()
    assert await asyncio.wait_for(opening, PATIENCE_S) == "10.0.0.1" and later.placer.why_none is None
    assert caplog.messages == [
        "waiting for room on Ray's hosts: asked for: 4 x (8 core(s))",
        "joined Ray's cluster at nowhere:1 as host 10.0.0.1",
    ]
    await later.placer.close()


async def test_a_keeper_that_waits_for_room_is_told_of_with_why_and_the_log_says_where_one_starts(
    driven, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    told = []
    FarSpawner(driven.placer).tell_waits(lambda number, why: told.append((number, why)))
    (driven.folder / "waits").write_text("asked for: a card")
    await driven.placer.place(post(1))
    assert told == [(1, "there is no room on Ray's hosts yet; asked for: a card")]
    assert caplog.messages == [
        "instance 1 waits for room on Ray's hosts: asked for: a card", "instance 1 starts on host 10.0.0.3"]
    monkeypatch.setattr(spawn_ray, "PLACE_TIMEOUT_S", 1.0)
    (driven.folder / "silent").touch()
    with pytest.raises(JettisonError, match="has not placed it in 1 s: asked for: a card"):
        await driven.placer.place(post(0))


async def test_room_that_may_be_given_back_is_asked_for_once_and_a_cluster_of_its_own_gives_none(driven):
    elastic = Driven(driven.folder)
    elastic.placer = spawn_ray.RayPlacer(ROOMS, "nowhere:1", "pack", num_reserved=2, gives_back=True)
    await elastic.placer.open()
    elastic.kill()
    await elastic.joined(3)
    await elastic.placer.close()
    own = Driven(driven.folder)
    own.placer = spawn_ray.RayPlacer(ROOMS, None, "pack", num_reserved=2, gives_back=True)
    await own.placer.open()
    await own.placer.close()
    assert [(o.num_reserved, o.num_begun) for o in driven.openings()] == [(2, 0), (0, 2), (0, 0), (2, 0)]
