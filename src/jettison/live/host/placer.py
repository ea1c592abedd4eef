"""The Ray driver: a small process of its own, which places keepers on a Ray cluster and watches them.

    python -P -m jettison.live.host.placer

Never the controller itself: when Ray's head is gone for a minute, Ray ends the driver's process. Then nothing new can
be placed; keepers are no children of Ray's (``far_keeper --detach``) and live on by their leases, and the room that
they are in stays reserved for the next driver (``ray_room``). Ray restarts nothing: what a death means is the crew's
matter. ``wire.placing`` goes over standard input and output; the process ends with either, and when a head that was
away is back, as that may be another one.

Ray's object store is kept small, as nothing goes through it; its memory monitor is off, as it kills actors on hosts
that are full, and workers fill theirs. Ray carries pickles: of ours bytes and a class by its module's name
(``host.keeper_actor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Coroutine
from typing import Any, BinaryIO

import msgspec

from jettison.live.host.keeper_actor import KeeperActor
from jettison.live.host.ray_room import WAITS_S, RayRoom, why_no_room
from jettison.live.host.room_warden import why_away as _why_away
from jettison.live.machine.endings import die_with
from jettison.live.wire import placing as p

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes is 75 MiB."""
_ENVIRONMENT = {"env_vars": {"RAY_worker_niceness": "0"}}
"""Of the process that begins a keeper: Ray would make it, and with it all instances there, give way to any other
process of their host."""
_BEAT_S = 2.0
"""Between two looks at the head: what asks for the server's health hears soon, at the price of one connection."""
_TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Ray colours what it says of an error."""


class RayDriver:
    """One cluster's keepers. On one asyncio loop once ``open`` has returned."""

    def __init__(self, said: int) -> None:
        """``said``: a descriptor for what is told to the controller."""
        self._said = said
        self._rooms: list[p.Room] = []
        self._room: RayRoom | None = None
        self._is_ours = False
        """The cluster was started here."""
        self._actors: dict[int, tuple[int, Any]] = {}
        """Number -> the present life, and its actor; None: its room is being looked for."""
        self._lone_turn = asyncio.Lock()
        """Lone room comes and goes in the order of commands: a life's is not given back once the next one has it."""
        self._why_away: str | None = None
        """As of the last look: why the head does not answer."""
        self._num_reserved = 0
        """Rooms that are reserved together, the first ones; each other one is lone (``RayRoom.lone``)."""
        self._gives_back = False
        """The controller has said so."""

    def open(self, command: p.Open) -> p.Opened | p.NoRoom:
        """Join the cluster and reserve room. Blocks."""
        why_away = _why_away(command.address or "")
        if why_away is not None:  # Ray tries for minutes
            return p.NoRoom(f"no Ray cluster at {command.address}: {why_away}")
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        rooms = self._rooms = command.rooms
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "jettison"}
        self._is_ours = command.address is None
        if self._is_ours:
            options |= {
                "address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES,
                # One machine has what its user says that it has.
                "num_cpus": max(os.cpu_count() or 1, sum(room.num_cpus for room in rooms)),
                "_memory": max(1, sum(room.memory_bytes for room in rooms)),
            }  # fmt: skip
        else:
            options["address"] = command.address
        try:
            ray.init(**options)
        except Exception as error:  # noqa: BLE001 - Ray raises what it likes
            return p.NoRoom(f"no Ray cluster at {command.address or 'this machine'}: {_with_cause(error)}")
        self._num_reserved = command.num_reserved
        self._room = RayRoom(command, lambda why: self.tell(p.Waits(why)))
        try:
            why_none = self._room.reserve()
        except Exception as error:  # noqa: BLE001 - Ray raises what it likes
            why_none = f"Ray cannot reserve room: {_in_short(error)}"
        if why_none is not None:
            return p.NoRoom(why_none)
        return p.Opened(ray.util.get_node_ip_address())

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Obey until the controller is gone; then the room is given back where that was told, and kept for the next
        one otherwise. Or until the head has been away and is back."""
        obeying, attending = asyncio.create_task(self._obey(reader)), asyncio.create_task(self._attend())
        done, _ = await asyncio.wait((obeying, attending), return_when=asyncio.FIRST_COMPLETED)
        for task in (obeying, attending):
            task.cancel()
        if obeying in done and self._gives_back and self._why_away is None:
            self.give_back()

    def give_back(self) -> None:
        """What is reserved, in a cluster that goes on."""
        if self._room is not None:
            self._room.give_back()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=p.PlacerCommand)
            if isinstance(command, p.GiveBack):
                self._gives_back = True
            elif (doing := self._doing(command)) is not None:
                task = asyncio.create_task(doing)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()

    def _doing(self, command: p.PlacerCommand) -> Coroutine[None, None, None] | None:
        match command:
            case p.Place():
                return self._place(command)
            case p.Admit():
                return self._admit(command)
            case p.Remove():
                return self._remove(command.number, command.life)
            case p.Ping():
                return self._answer()
        return None

    async def _answer(self) -> None:
        """Only where Ray answers, and knows the room: else this driver is of no use, and the controller ends it."""
        with contextlib.suppress(Exception):  # Ray raises what it likes
            if self._room is not None and await asyncio.to_thread(self._room.is_known):
                self.tell(p.Pong())

    async def _attend(self) -> None:
        """Returns when the head was away and is back, or has ended for good, or the room is lost."""
        import ray

        address = ray.get_runtime_context().gcs_address
        while True:
            why_away = await asyncio.to_thread(_why_away, address)
            if why_away is None and self._why_away is not None:
                return
            if why_away is not None and self._why_away is None:
                self.tell(p.Head(why_away))
            self._why_away = why_away
            if why_away is not None and self._is_ours:
                return  # the head that was started here is not coming back
            if why_away is None and self._room is not None and not await self._room.attend():
                return
            await asyncio.sleep(_BEAT_S)

    def close(self) -> None:
        """A cluster that was started here ends, by its process ids. In another, what this process has there ends with
        it, but for the room."""
        if self._is_ours:
            import ray

            ray.shutdown()

    def tell(self, event: p.PlacerEvent) -> None:
        """Nothing where the controller is gone."""
        with contextlib.suppress(OSError):
            os.write(self._said, msgspec.json.encode(event) + b"\n")

    async def _place(self, command: p.Place) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        number, life = command.post.number, command.post.life
        self._end_actor(number)
        self._actors[number] = life, None
        room = self._rooms[number]
        try:
            group, index = await self._bundle_of(number)
            is_lone = number >= self._num_reserved
            why_waits = await asyncio.to_thread(why_no_room, group, WAITS_S) if is_lone else None
            if self._actors.get(number) != (life, None):
                raise LookupError("it was given up meanwhile")
            if why_waits is not None:
                self.tell(p.Waits(why_waits, number))
            actor = ray.remote(KeeperActor).options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                num_cpus=room.num_cpus, num_gpus=room.num_gpus, memory=room.memory_bytes or None,
                max_restarts=0, max_task_retries=0, runtime_env=_ENVIRONMENT,
            ).remote()  # fmt: skip
            self._actors[number] = life, actor
            request = await actor.start.remote(msgspec.json.encode(command.post))
            ip = await actor.ip.remote()
        except Exception as error:  # noqa: BLE001 - Ray raises what it likes
            self.tell(p.Over(number, life, _in_short(error)))
            return
        self.tell(p.Requested(number, life, request.decode(), ip))

    async def _bundle_of(self, number: int) -> tuple[Any, int]:
        """The worker's placement group, and its index there."""
        assert self._room is not None, "not open"
        if number < self._num_reserved:
            return self._room.group, number
        async with self._lone_turn:
            return await asyncio.to_thread(self._room.lone, number), 0

    async def _admit(self, command: p.Admit) -> None:
        number, life = command.number, command.life
        present, actor = self._actors.get(number, (-1, None))
        if present != life or actor is None:
            return
        why = None
        try:
            await actor.admit.remote(command.certificate_pem)
            await actor.run.remote()
        except Exception as error:  # noqa: BLE001 - Ray raises what it likes
            why = _in_short(error)
        if why is None:
            await self._remove(number, life)
        elif self._actors.get(number, (-1, None))[0] == life:
            self._end_actor(number)  # the keeper may live on: lone room is its own until the controller gives it up
        self.tell(p.Over(number, life, why))

    async def _remove(self, number: int, life: int) -> None:
        """Its room is free again, also of a life that an earlier driver has placed. A keeper that has not been admitted
        ends with its actor."""
        if self._actors.get(number, (life, None))[0] != life:
            return
        self._end_actor(number)
        if number >= self._num_reserved and self._room is not None:
            async with self._lone_turn:
                if number not in self._actors:  # else the next life has come, which takes the room over
                    await asyncio.to_thread(self._room.give_back_lone, number)

    def _end_actor(self, number: int) -> None:
        import ray

        _, actor = self._actors.pop(number, (-1, None))
        if actor is not None:
            with contextlib.suppress(Exception):  # Ray may be gone
                ray.kill(actor)


def _in_short(error: Exception) -> str:
    """In one line: Ray says first where it was, then the frames, which are indented, and last what it was."""
    telling = _telling(error)
    return f"{type(error).__name__}: " + "; ".join(dict.fromkeys((telling[0], telling[-1])))


def _with_cause(error: Exception) -> str:
    """Of a head that does not take this host's token, Ray says so in the cause alone."""
    return str(error) if error.__cause__ is None else f"{error}: {_telling(error.__cause__)[-1]}"


def _telling(error: BaseException) -> list[str]:
    """Lines without frames; one at least."""
    lines = [line for line in _TERMINAL_ESCAPE.sub("", str(error)).splitlines() if line.strip()]
    return [line.strip() for line in lines if not line[0].isspace()] or [*map(str.strip, lines[:1])] or [""]


async def _serve(driver: RayDriver, said: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), said)
    await driver.serve(reader)


def main() -> None:
    """The process."""
    die_with(os.getppid())  # also while Ray keeps it waiting
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's; the controller needs it to drain
    said = os.dup(1)
    os.dup2(2, 1)  # Ray may print
    driver = RayDriver(said)
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows is read by the loop
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    answer = driver.open(msgspec.json.decode(line, type=p.Open))
    try:
        driver.tell(answer)
        if isinstance(answer, p.NoRoom):
            driver.give_back()
        else:
            asyncio.run(_serve(driver, os.fdopen(0, "rb", buffering=0)))
    finally:
        driver.close()
    os._exit(0)  # without the goodbyes of a Ray that may be gone


if __name__ == "__main__":
    main()
