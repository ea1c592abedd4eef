"""Room for workers on a Ray cluster: a placement group that outlives its driver, found again by its name.

A driver's own placement group ends with it, while the keepers in it live on: Ray would give their cores to others, and
the next driver's group, wherever Ray puts it, would be counted besides. So the group is *detached*, the next driver
adopts it by its name, and an actor (``room_warden``) gives it back where no driver comes. Where the group is gone with
its cluster (a head that returns without what it knew), the new one is put where the keepers are: a little of the
resource ``node:<ip>``, which each host has, goes into the bundle of each that lives.

A worker that begins later has a detached group of its own (*lone*), with one bundle. A plain actor would end with its
driver and its keeper would not: Ray would count the host as free, give its cores away, and let an autoscaler end it.
Ray takes no bundle out of a group. So where workers of the start may be given back, they have lone room, too.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from jettison.live.host import room_warden
from jettison.live.host.room_warden import RoomWarden, lone_name
from jettison.live.wire import placing as p

GRACE_S = 60.0
"""Without a driver the room is kept so long: one that has ended is followed in seconds. Less than a server waits for
room at its start (``engine.spawn_ray``), so that one after kill -9 finds what its predecessor had."""
RETURN_S = 30.0
"""How long hosts with living keepers may need to join a head that has returned; their nodes start in seconds. After
that room is reserved without them."""
_POLL_S = 0.5
_PIN = 0.001
"""Of a host's ``node:<ip>``, of which it has 1.0: the least that Ray counts is a ten-thousandth."""
_GIVE_BACK_S = 5.0
_WORDS = {"CPU": "core(s)", "GPU": "card(s)"}
WAITS_S = 5.0
"""Room that has not been found in so long may never be: that it is waited for is told. Less than ``GRACE_S``, as the
warden hears so often that there is a driver."""


class RayRoom:
    """The room of one server's workers. Its driver is connected; all but ``attend`` may block."""

    def __init__(self, command: p.Open, on_wait: Callable[[str], None] = lambda why: None) -> None:
        """``on_wait``: told what is waited for, again and again."""
        self._command = command
        self._on_wait = on_wait
        self._lone = range(command.num_reserved, len(command.rooms))
        self._warden_name = f"{command.name}-warden"
        self._warden: Any = None
        self.group: Any = None
        """The placement group, once it is found or made; a bundle for each worker that has a reserved room. None: all
        are lone."""

    def reserve(self) -> str | None:
        """Adopt the room, or make it; returns why there is none. Raises what Ray does."""
        from ray.util.placement_group import placement_group

        if self._command.address is None:  # a cluster that ends with this driver
            self.group = placement_group(self._bundles({}), strategy=self._command.strategy.upper())
            return self._why_none([self.group])
        self._hire()
        self.group = self._adopted()
        missing = self._give_back_stale()
        makes_group = self.group is None and self._command.num_reserved > 0
        homes = self._homes() if makes_group or missing else {}
        why_none = None
        if makes_group:  # one that is adopted may have lost a host: Ray looks for room for it by itself
            self.group = placement_group(
                self._bundles(homes), strategy=self._command.strategy.upper(), name=self._command.name,
                lifetime="detached",
            )  # fmt: skip
            why_none = self._why_none([self.group])
        for number in missing:
            if number in homes:
                self._reserve_lone(number, homes[number])
        return self._begin() if self._command.num_begun else why_none

    def _begin(self) -> str | None:
        """Lone room for those of the start, by the strategy: Ray chooses in one group, which is given up for theirs.
        What another takes there in between is found elsewhere."""
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        numbers, until_s = range(self._command.num_begun), time.monotonic() + self._command.timeout_s
        together = placement_group(
            [bundle(self._command.rooms[number], None) for number in numbers], strategy=self._command.strategy.upper()
        )
        why_none = self._why_none([together], until_s)
        nodes = placement_group_table(together)["bundles_to_node_id"]
        remove_placement_group(together)
        if why_none is not None:
            return why_none
        return self._why_none([self._reserve_lone(number, None, nodes[number]) for number in numbers], until_s)

    def lone(self, number: int) -> Any:
        """The group of a worker that has no room in the common one: the one there is, or a new one, for which Ray may
        still look for room. Raises what Ray does."""
        from ray.util.placement_group import get_placement_group

        name = lone_name(self._command.name, number)
        if name in room_warden.names_reserved(self._command.name):
            return get_placement_group(name)
        return self._reserve_lone(number, None)

    def give_back_lone(self, number: int) -> None:
        """Idempotent."""
        with contextlib.suppress(Exception):  # Ray may be gone; the next driver looks for what is left
            room_warden.remove(lone_name(self._command.name, number))

    def is_known(self) -> bool:
        """The head has this room. False: it is another one than the driver has joined. Raises what Ray does."""
        import ray
        from ray.util.placement_group import placement_group_table

        if self.group is None:
            ray.get_actor(self._warden_name)
            return True
        return placement_group_table(self.group).get("state", "REMOVED") != "REMOVED"

    async def attend(self) -> bool:
        """Say that there is a driver; the head answers. False: it comes too late, and the room is being given back."""
        if self._warden is None:
            return True
        try:
            return bool(await self._warden.attend.remote())
        except Exception:  # noqa: BLE001 - Ray raises what it likes; its host may be gone
            self._hire()
            return True

    def give_back(self) -> None:
        """In a while at most; the warden has it where Ray does not answer."""
        if self._warden is None:
            return
        giving = threading.Thread(target=self._give_back, daemon=True)
        giving.start()
        giving.join(_GIVE_BACK_S)

    def _give_back(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray may be gone
            room_warden.give_back(self._command.name)
            ray.kill(self._warden)

    def _give_back_stale(self) -> list[int]:
        """Lone room that no living keeper has: its worker was given up while there was no driver. Returns the numbers
        of workers that live and have none."""
        reserved = set(room_warden.names_reserved(self._command.name))
        missing = []
        for number in self._lone:
            is_there = lone_name(self._command.name, number) in reserved
            if number in self._command.homes:
                if not is_there:
                    missing.append(number)
            elif is_there:
                self.give_back_lone(number)
        return missing

    def _reserve_lone(self, number: int, home: str | None, node_id: str | None = None) -> Any:
        """``node_id``: there, if it has room. Else Ray takes the host that has most room."""
        from ray.util.placement_group import placement_group

        return placement_group(
            [bundle(self._command.rooms[number], home)], strategy="STRICT_PACK", _soft_target_node_id=node_id,
            name=lone_name(self._command.name, number), lifetime="detached",
        )  # fmt: skip

    def _hire(self) -> None:
        import ray

        self._warden = ray.remote(RoomWarden).options(
            name=self._warden_name, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1,
            max_concurrency=2,
        ).remote(self._command.name, GRACE_S)  # fmt: skip

    def _adopted(self) -> Any:
        """What an earlier driver has reserved; None: there is none, or its warden has just given it back."""
        import ray
        from ray.util.placement_group import get_placement_group, placement_group_table

        try:
            in_time = ray.get(self._warden.attend.remote())
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # and would again
                raise
            in_time = False
        if not in_time:
            self._hire_anew()
        try:
            group = get_placement_group(self._command.name)
        except ValueError:
            return None
        return None if placement_group_table(group).get("state") == "REMOVED" else group

    def _hire_anew(self) -> None:
        """Once the warden that was too late has ended."""
        import ray

        until_s = time.monotonic() + self._command.timeout_s
        while time.monotonic() < until_s:
            time.sleep(_POLL_S)
            with contextlib.suppress(ray.exceptions.RayActorError, ValueError):
                self._hire()
                if ray.get(self._warden.attend.remote()):
                    return

    def _homes(self) -> Mapping[int, str]:
        """Where living keepers are, of hosts that Ray knows; waits for the others a while."""
        import ray

        wanted = self._command.homes
        until_s = time.monotonic() + RETURN_S
        while True:
            known = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            if known.issuperset(wanted.values()) or time.monotonic() >= until_s:
                return {number: ip for number, ip in wanted.items() if ip in known}
            time.sleep(_POLL_S)

    def _bundles(self, homes: Mapping[int, str]) -> list[dict[str, float]]:
        reserved = self._command.rooms[: self._command.num_reserved]
        return [bundle(room, homes.get(number)) for number, room in enumerate(reserved)]

    def _why_none(self, groups: Sequence[Any], until_s: float | None = None) -> str | None:
        until_s = time.monotonic() + self._command.timeout_s if until_s is None else until_s
        for group in groups:
            while (why := why_no_room(group, min(WAITS_S, until_s - time.monotonic()))) is not None:
                if time.monotonic() >= until_s:
                    return f"in {self._command.timeout_s:g} s Ray has found no room; {why}"
                self._on_wait(why)
                self._say_present()
        return None

    def _say_present(self) -> None:
        """The warden gives back what no driver attends to, also what is still being looked for."""
        import ray

        if self._warden is not None:
            with contextlib.suppress(Exception):  # its host may be gone
                ray.get(self._warden.attend.remote(), timeout=WAITS_S)


def why_no_room(group: Any, limit_s: float) -> str | None:
    """What the group asks for beside what is free in the whole cluster; None: it has room. Waits for that so long.
    Raises what Ray does, also where the group is given back meanwhile."""
    import ray

    if group.wait(max(1, math.ceil(limit_s))):  # it drops fractions
        return None
    asked = Counter(_amounts(each) for each in group.bundle_specs)
    wanted = ", ".join(f"{count} x ({each})" for each, count in asked.items())
    hosts = [node for node in ray.nodes() if node["Alive"]]
    free = dict.fromkeys(chain(*group.bundle_specs), 0.0) | ray.available_resources()  # where all is taken, it has none
    return f"asked for: {wanted}; free on {len(hosts)} host(s) in all: {_amounts(free)}"


def _amounts(resources: Mapping[str, float]) -> str:
    """In an operator's words."""
    told = [f"{resources[name]:g} {word}" for name, word in _WORDS.items() if name in resources]
    if "memory" in resources:
        told.append(f"{round(resources['memory'] / 2**30, 2):g} GiB of memory")
    return ", ".join(told) or "nothing"


def bundle(room: p.Room, home: str | None) -> dict[str, float]:
    """What Ray is to reserve for a worker; ``home``: on the host of this address."""
    wanted = {"CPU": room.num_cpus, "GPU": room.num_gpus, "memory": room.memory_bytes}
    found = {name: float(amount) for name, amount in wanted.items() if amount}
    return found if home is None else found | {f"node:{home}": _PIN}
