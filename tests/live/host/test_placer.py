"""Ray's driver from within, without a cluster: what it says of errors, of a head that is gone, and of room that it
waits for."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from jettison.live.host import placer, ray_room
from jettison.live.host.placer import RayDriver, _in_short
from jettison.live.host.ray_room import RayRoom
from jettison.live.wire import placing as p
from jettison.live.wire.host_orders import KeeperPost
from waiting import PATIENCE_S

TRACE = (
    "\x1b[36mray::KeeperActor.start()\x1b[39m (pid=3, ip=10.0.0.2)\n"
    '  File "/opt/jettison/keeper_actor.py", line 32, in start\n'
    "    raise {name}({text!r})\n"
    "    ^^^^^^^^^^^^^^^^^^^^^^\n"
    "{name}: {text}\n"
)


class RayTaskErrorLike(Exception):
    """As Ray writes a task's error: where it was, its frames, and then what it was."""


@pytest.mark.parametrize(
    ("said", "in_short"),
    [
        (TRACE.format(name="OSError", text="the keeper has ended at once"),
         "ray::KeeperActor.start() (pid=3, ip=10.0.0.2); OSError: the keeper has ended at once"),
        ("The actor died because of an error raised in its creation task, " +
         TRACE.format(name="ModuleNotFoundError", text="No module named 'jettison'"),
         "The actor died because of an error raised in its creation task, ray::KeeperActor.start() (pid=3, "
         "ip=10.0.0.2); ModuleNotFoundError: No module named 'jettison'"),
        ("The actor died unexpectedly before finishing this task.\n\tclass_name: KeeperActor\n\tip: 10.0.0.2\n"
         "The actor is dead because its node has died.\n\n",
         "The actor died unexpectedly before finishing this task.; The actor is dead because its node has died."),
        ("it was given up meanwhile", "it was given up meanwhile"),
        ("\n  indented alone\n", "indented alone"),
        ("", ""),
    ],
)  # fmt: skip
def test_an_error_in_short_has_its_place_and_its_cause_and_no_colours(said: str, in_short: str) -> None:
    assert _in_short(RayTaskErrorLike(said)) == f"RayTaskErrorLike: {in_short}"


def test_ray_s_own_error_names_the_module_that_a_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    trace = f'Traceback (most recent call last):\n  File "actor.py", line 1, in start\n{TRACE.splitlines()[2]}\n'
    cause = ModuleNotFoundError("No module named 'jettison'")
    task = exceptions.RayTaskError(
        "start", f"{trace}ModuleNotFoundError: {cause}\n", cause, proctitle="ray::KeeperActor.start", pid=3,
        ip="10.0.0.2",
    )  # fmt: skip
    for error in (task, task.make_dual_exception_instance(), exceptions.ActorDiedError(task)):
        told = _in_short(error)
        assert "ray::KeeperActor.start() (pid=3, ip=10.0.0.2)" in told and "\x1b" not in told
        assert told.endswith("; ModuleNotFoundError: No module named 'jettison'")


async def test_that_the_head_of_its_own_has_died_is_told_before_the_driver_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end takes a while: Ray looks for that head."""
    here = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: here))
    monkeypatch.setattr(placer, "_why_away", lambda address: "refused")
    heard, said = os.pipe()
    driver = RayDriver(said)
    driver._is_ours = True
    await asyncio.wait_for(driver._attend(), PATIENCE_S)
    os.close(said)
    with os.fdopen(heard, "rb") as reader:
        assert msgspec.json.decode(reader.read() or b"null", type=p.PlacerEvent | None) == p.Head("refused")


OPENING = p.Open(
    address="10.0.0.1:6379", rooms=[p.Room(num_cpus=3, num_gpus=0, memory_bytes=0)] * 2, strategy="pack",
    timeout_s=120.0, name="room", num_reserved=1,
)  # fmt: skip
GIB = float(2**30)


class ActorError(Exception):
    """As Ray's ``RayActorError``, in what is asked of it."""

    actor_init_failed = False


class Group:
    """A placement group; it has room at the ``num_waits``-th wait (None: never)."""

    def __init__(self, num_waits: int | None, on_wait: Callable[[], None] = lambda: None) -> None:
        on_cores, on_card = {"CPU": 3.0, "memory": 1.5 * GIB}, {"CPU": 1.0, "GPU": 1.0}
        self.bundle_specs = [on_cores, on_card, on_cores]
        self.num_waits = num_waits
        self.limits_s: list[float] = []
        self._on_wait = on_wait

    def wait(self, limit_s: float) -> bool:
        self.limits_s.append(limit_s)
        self._on_wait()
        return len(self.limits_s) == self.num_waits


class Warden:
    """Its methods are called as an actor's; ``fails``: with this."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.num_attends = 0
        self.attend = SimpleNamespace(remote=self._attend)
        self._fails = fails

    def _attend(self) -> bool:
        self.num_attends += 1
        if self._fails is not None:
            raise self._fails
        return True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray, in what is asked of it: two hosts live."""
    ray = SimpleNamespace(
        nodes=lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}],
        available_resources=lambda: {"CPU": 4.0, "memory": 20 * GIB, "object_store_memory": 1e8},
        get=lambda answer, timeout=None: answer, init=lambda **options: None, remote=lambda actor: actor,
        exceptions=SimpleNamespace(RayActorError=ActorError),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
    )  # fmt: skip
    group = SimpleNamespace(get_placement_group=None, placement_group=None, placement_group_table=None)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: (group, index))
    for name, module in (("", ray), (".util.placement_group", group), (".util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, f"ray{name}", module)
    monkeypatch.setattr(placer, "_why_away", lambda address: None)
    return ray


WAITED_FOR = (
    "asked for: 2 x (3 core(s), 1.5 GiB of memory), 1 x (1 core(s), 1 card(s)); "
    "free on 2 host(s) in all: 4 core(s), 0 card(s), 20 GiB of memory"
)


def test_room_is_waited_for_in_turns_in_which_the_warden_hears_of_the_driver_and_the_controller_why(
    ray: SimpleNamespace,
) -> None:
    """The warden would give back what is waited for longer than its grace."""
    told: list[str] = []
    room, group = RayRoom(OPENING, told.append), Group(4)
    room._warden = Warden()
    assert room._why_none([group]) is None
    assert told == [WAITED_FOR] * 3 and room._warden.num_attends == 3
    assert all(0 < limit_s <= ray_room.WAITS_S < ray_room.GRACE_S for limit_s in group.limits_s)


def test_once_it_has_been_waited_for_long_enough_a_line_says_what_was_wanted_and_what_is_free(
    ray: SimpleNamespace,
) -> None:
    room, group = RayRoom(OPENING), Group(None)
    assert room._why_none([group], until_s=0.0) == f"in 120 s Ray has found no room; {WAITED_FOR}"
    assert group.limits_s == [1], "Ray drops fractions of a second, and looks for none of a part"


def test_a_warden_that_cannot_be_made_is_waited_for_by_none(ray: SimpleNamespace) -> None:
    """As where the host lacks Jettison: the next one could not be made either."""
    error = ActorError()
    error.actor_init_failed = True
    room = RayRoom(OPENING)
    room._warden = warden = Warden(error)
    with pytest.raises(ActorError):
        room._adopted()
    assert warden.num_attends == 1


def opened(reserve: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> p.Opened | p.NoRoom:
    monkeypatch.setattr(placer, "RayRoom", lambda command, on_wait: SimpleNamespace(reserve=reserve))
    return RayDriver(2).open(OPENING)


def test_what_ray_raises_where_room_is_reserved_is_why_there_is_none(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RayTaskErrorLike(TRACE.format(name="ModuleNotFoundError", text="No module named 'jettison'"))

    answer = opened(fails, monkeypatch)
    assert isinstance(answer, p.NoRoom) and answer.why.startswith("Ray cannot reserve room: RayTaskErrorLike: ")
    assert answer.why.endswith("ModuleNotFoundError: No module named 'jettison'") and "\n" not in answer.why
    assert opened(lambda: None, monkeypatch) == p.Opened("10.0.0.1")


def test_why_ray_cannot_join_is_told_with_its_cause_as_of_a_token_that_is_wrong(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = "Failed to connect to GCS. Last error: Traceback:\n  File 1\nAuthenticationError: token is wrong\n"

    def init(**options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(cause)

    ray.init = init
    assert opened(lambda: None, monkeypatch) == p.NoRoom(
        "no Ray cluster at 10.0.0.1:6379: Failed to connect to Ray cluster: AuthenticationError: token is wrong")


async def placed(group: Group, driver: RayDriver, said: int, heard: int) -> list[p.PlacerEvent]:
    """What the driver tells of a worker that has no room in common."""
    post = KeeperPost(number=1, life=0, address="tcp:10.0.0.1:1", token_hex="00", lease_s=2.0, authority_pem="")
    await driver._place(p.Place(post))
    os.close(said)
    with os.fdopen(heard, "rb") as reader:
        return [msgspec.json.decode(line, type=p.PlacerEvent) for line in reader]


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_worker_that_waits_for_room_is_told_of_unless_it_has_been_given_up_meanwhile(
    ray: SimpleNamespace, is_given_up: bool
) -> None:
    async def answer(said: Any) -> Any:
        return said

    actor = SimpleNamespace(
        start=SimpleNamespace(remote=lambda post: answer(b"00")), ip=SimpleNamespace(remote=lambda: answer("10.0.0.3"))
    )
    asked: list[dict[str, Any]] = []

    def options(**told: Any) -> SimpleNamespace:
        asked.append(told)
        return SimpleNamespace(remote=lambda: actor)

    ray.remote = lambda kind: SimpleNamespace(options=options)
    heard, said = os.pipe()
    driver = RayDriver(said)
    group = Group(None, driver._actors.clear if is_given_up else lambda: None)
    driver._rooms, driver._num_reserved = OPENING.rooms, OPENING.num_reserved
    driver._room = RayRoom(OPENING)
    driver._room.lone = lambda number: group  # type: ignore[method-assign]
    told = await placed(group, driver, said, heard)
    if is_given_up:
        assert told == [p.Over(1, 0, "LookupError: it was given up meanwhile")]
    else:
        assert told == [p.Waits(WAITED_FOR, 1), p.Requested(1, 0, "00", "10.0.0.3")]
        assert asked[0]["runtime_env"]["env_vars"] == {"RAY_worker_niceness": "0"}, "it gives way to nothing there"
