"""Workers on the hosts of a Ray cluster: Ray finds room for their keepers, and does no more (``host.placer``)."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from jettison.device.spec import HOST
from jettison.errors import JettisonError, UserError
from jettison.live.engine.host_door import ended
from jettison.live.engine.spawn_far import FarSpawner
from jettison.live.host.heritage import Heritage
from jettison.live.host.keeper import worker_environment
from jettison.live.machine.environment import RAY_TOKEN_VARIABLE
from jettison.live.wire import placing as p
from jettison.live.wire.host_orders import KeeperPost
from jettison.live.wire.worker_config import WorkerSpec

log = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 120.0
"""An autoscaler may have to start machines first."""
PLACE_TIMEOUT_S = 90.0
"""Of one keeper, in room that has been found: a process of Ray's starts in seconds. But Ray takes a cut host's room
elsewhere only once it has noticed, 64.7 s after the cut as measured. Without its head Ray says nothing, and the restart
of another worker may wait."""
PONG_TIMEOUT_S = 10.0
"""For a driver that has not placed a keeper in time to say that its cluster is there."""
_JOIN_TIMEOUT_S = 60.0
"""Of Ray's own start, beside the search for room."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
"""Before another driver is started where one has ended: doubled with each that does not join, up to this."""
_CLOSE_TIMEOUT_S = 30.0
_COMMAND = (sys.executable, "-P", "-m", "jettison.live.host.placer")
_SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
"""Of Ray, where the user's environment says nothing else."""


def ray_spawner(
    specs: Sequence[WorkerSpec], *, address: str | None, strategy: p.Strategy, lease_s: float,
    num_at_start: int | None = None, num_kept: int | None = None, worker_command: Sequence[str] | None = None,
    heritage: Heritage | None = None,
) -> FarSpawner:
    """A spawner for these workers, of which the first ``num_at_start`` (None: all) have room reserved from the start.
    ``address``: of a cluster that there is; None: one is started on this machine. ``num_kept``: so many at least have
    a process; below ``num_at_start``, any of those may give its room back.
    ``worker_command``, ``heritage``: see ``FarSpawner``. Raises UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--launcher ray needs Ray: pip install 'jettison[ray]'")
    num_reserved = len(specs) if num_at_start is None else num_at_start
    key = secrets.token_bytes(32) if heritage is None else heritage.secret  # later controllers find the room by it
    placer = RayPlacer(
        [room_of(spec) for spec in specs], address, strategy, num_reserved=num_reserved,
        gives_back=num_kept is not None and num_kept < num_reserved,
        name=f"jettison-{hashlib.sha256(b'room' + key).hexdigest()[:16]}",
    )
    return FarSpawner(placer, lease_s=lease_s, worker_command=worker_command, heritage=heritage)


def room_of(spec: WorkerSpec) -> p.Room:
    """What a worker takes: a card and a core to feed it, or cores and memory of the host."""
    if spec.back_end == HOST:
        return p.Room(num_cpus=spec.num_threads, num_gpus=0, memory_bytes=spec.memory_bytes + spec.host_bytes)
    return p.Room(num_cpus=1, num_gpus=1, memory_bytes=spec.host_bytes)


class RayPlacer:
    """A ``Placer`` over the process that is Ray's driver. That one may end while keepers live on; then another one is
    started, again and again until it joins."""

    def __init__(
        self, rooms: Sequence[p.Room], address: str | None, strategy: p.Strategy,
        room_timeout_s: float = ROOM_TIMEOUT_S, *, num_reserved: int | None = None, gives_back: bool = False,
        name: str = "jettison",
    ) -> None:
        """``num_reserved``: so many of the rooms, the first ones, are reserved together at the start; None: all. Room
        for others is asked for when they are placed, which tells an autoscaler of them. ``gives_back``: each of the
        first ones may be given back alone, too. ``name``: of the room, in the whole cluster."""
        num_first = len(rooms) if num_reserved is None else num_reserved
        are_lone = gives_back and address is not None  # a cluster of its own has room for all
        self._opening = p.Open(
            address=address, rooms=list(rooms), strategy=strategy, timeout_s=room_timeout_s, name=name,
            num_reserved=0 if are_lone else num_first, num_begun=num_first if are_lone else 0,
        )
        self._token = secrets.token_hex(32)
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._requests: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._ends: dict[tuple[int, int], asyncio.Future[str | None]] = {}
        self._homes: dict[tuple[int, int], str] = {}
        """(number, life) -> its host's address, of keepers that have not ended."""
        self._why: str | None = None
        """Why nothing can be placed now."""
        self.on_waits: Callable[[int, str], None] = lambda number, why: None
        self._waits: dict[int, str] = {}
        """By worker: why it waits for room, of those that have been waited for."""
        self._able = asyncio.Event()
        self._pong = asyncio.Event()
        self._is_reopening = False
        """An earlier controller's room is looked for, and no driver has joined yet."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of Ray's driver, while it is there."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def why_none(self) -> str | None:
        """See ``Placer``."""
        return None if self._why is None else f"nothing new can be placed on Ray's hosts: {self._why}"

    async def able(self) -> None:
        """See ``Placer``."""
        await self._able.wait()

    async def open(self) -> str:
        """See ``Placer``."""
        async with self._turn:
            ip = await self._start()
        log.info("joined Ray's cluster at %s as host %s", self._opening.address or "this machine", ip)
        return ip

    def reopen(self, homes: Mapping[tuple[int, int], str]) -> None:
        """See ``Placer``."""
        self._homes, self._is_reopening = dict(homes), True
        self._opening = msgspec.structs.replace(self._opening, num_begun=0)
        self._rejoining = asyncio.create_task(
            self._rejoin("its driver has ended with the controller before"), name="jettison-rejoin")

    async def place(self, post: KeeperPost) -> bytes:
        """See ``Placer``."""
        if self._is_reopening:  # the controller waits for workers that have not outlived the one before
            with suppress(TimeoutError):
                await asyncio.wait_for(self._able.wait(), PLACE_TIMEOUT_S)
        if (why_none := self.why_none) is not None:
            raise JettisonError(why_none)
        key, loop = (post.number, post.life), asyncio.get_running_loop()
        self._requests[key], self._ends[key] = loop.create_future(), loop.create_future()
        request = self._requests[key]
        self._waits.pop(post.number, None)
        await self._tell(p.Place(post))
        has_room = post.number < self._opening.num_reserved
        timeout_s = PLACE_TIMEOUT_S if has_room else self._opening.timeout_s
        try:
            return await asyncio.wait_for(request, timeout_s)
        except TimeoutError:
            await self._end_if_silent()
            why = f": {self._waits[post.number]}" if post.number in self._waits else ""
            raise JettisonError(f"Ray has not placed it in {timeout_s:g} s{why}") from None

    async def admit(self, post: KeeperPost, certificate_pem: str) -> None:
        """See ``Placer``."""
        await self._tell(p.Admit(post.number, post.life, certificate_pem))

    async def ended(self, post: KeeperPost) -> None:
        """See ``Placer``."""
        end = self._ends.get((post.number, post.life))
        why = "its end was told before" if end is None else await end
        if why is not None:
            raise JettisonError(f"Ray does not watch it any more: {why}")

    async def remove(self, post: KeeperPost) -> None:
        """See ``Placer``."""
        self._over((post.number, post.life), "it is not needed")
        self._homes.pop((post.number, post.life), None)
        if self.pid is not None:
            with suppress(OSError):  # it has just ended
                await self._tell(p.Remove(post.number, post.life))

    async def close(self) -> None:
        """See ``Placer``."""
        self._is_closed = True
        if self._rejoining is not None:
            self._rejoining.cancel()
            await asyncio.gather(self._rejoining, return_exceptions=True)
        if self._process is None:
            return
        if self.pid is not None:
            with suppress(OSError):  # it has just ended
                await self._tell(p.GiveBack())
        await _end(self._process)
        if self._listening is not None:
            await self._listening
        self._process = None

    async def _start(self) -> str:
        """Start the driver. Raises OSError, UserError; then, and where this is cancelled, none is left."""
        env = {**_SETTINGS, **worker_environment(1)}
        if self._opening.address is None:
            env |= {"RAY_AUTH_MODE": "token", RAY_TOKEN_VARIABLE: self._token}
        elif RAY_TOKEN_VARIABLE in os.environ:  # no other process of a server has it
            env[RAY_TOKEN_VARIABLE] = os.environ[RAY_TOKEN_VARIABLE]
        self._process = process = await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        assert process.stdout is not None
        limit_s = self._opening.timeout_s + _JOIN_TIMEOUT_S
        homes = {number: ip for (number, _), ip in self._homes.items()}
        try:
            async with asyncio.timeout(limit_s):
                await self._tell(msgspec.structs.replace(self._opening, homes=homes))
                answer = await self._answer(process.stdout)
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise UserError(f"Ray has not started in {limit_s:g} s") from None
            raise
        if not isinstance(answer, p.Opened):
            await _end(process)
            raise UserError(answer.why if isinstance(answer, p.NoRoom) else f"Ray's driver says {answer}")
        self._why, self._is_reopening = None, False
        self._opening = msgspec.structs.replace(self._opening, num_begun=0)  # a later driver keeps what lives
        self._able.set()
        self._listening = asyncio.create_task(self._listen(process.stdout), name="jettison-placer")
        return answer.ip

    async def _answer(self, said: asyncio.StreamReader) -> p.PlacerEvent:
        """The driver's, once room is reserved or cannot be."""
        is_told = False
        while line := await said.readline():
            event = msgspec.json.decode(line, type=p.PlacerEvent)
            if not isinstance(event, p.Waits):
                return event
            self._why = f"there is no room yet; {event.why}"
            if not is_told:
                log.warning("waiting for room on Ray's hosts: %s", event.why)
            is_told = True
        return p.NoRoom("Ray's driver has ended")

    async def _rejoin(self, why: str) -> None:
        """Start another driver, until one has joined."""
        pause_s = FIRST_PAUSE_S
        while True:
            self._cannot_place(why)
            await asyncio.sleep(pause_s)
            try:
                async with self._turn:
                    await self._start()
            except (OSError, UserError) as error:
                why, pause_s = str(error), min(2 * pause_s, MAX_PAUSE_S)
            else:
                log.warning("Ray is joined again; keepers can be placed")
                return

    async def _end_if_silent(self) -> None:
        """A driver that lives and has its cluster places others: Ray only has no room now for the one. Else what it is
        connected to may be no more, and another driver looks for itself."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._pong.clear()
        try:
            async with asyncio.timeout(PONG_TIMEOUT_S):
                await self._tell(p.Ping())
                await self._pong.wait()
        except (OSError, TimeoutError):
            if process.returncode is None:
                process.kill()

    def _cannot_place(self, why: str) -> None:
        is_new, self._why = self._why is None, why
        if is_new:
            log.error("%s; what serves, serves on", self.why_none)
        self._able.clear()
        for request in self._requests.values():
            _fail(request, self.why_none or why)

    async def _tell(self, command: p.PlacerCommand) -> None:
        """Raises OSError."""
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            raise ConnectionError("Ray's driver is not there")
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        await self._process.stdin.drain()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            event = msgspec.json.decode(line, type=p.PlacerEvent)
            if isinstance(event, p.Requested):
                key = event.number, event.life
                request = self._requests.get(key)
                if request is not None and not request.done():  # else it has been given up
                    log.info("instance %d starts on host %s", event.number, event.ip)
                    self._homes[key] = event.ip
                    request.set_result(bytes.fromhex(event.request_hex))
            elif isinstance(event, p.Over):
                self._over((event.number, event.life), event.why)
            elif isinstance(event, p.Waits) and event.number is not None:
                log.warning("instance %d waits for room on Ray's hosts: %s", event.number, event.why)
                self._waits[event.number] = event.why
                self.on_waits(event.number, f"there is no room on Ray's hosts yet; {event.why}")
            elif isinstance(event, p.Head):
                self._cannot_place(f"its head does not answer: {event.why_away}")
            elif isinstance(event, p.Pong):
                self._pong.set()
        for key in list(self._ends):
            self._over(key, "Ray's driver has ended")
        if not self._is_closed:
            self._rejoining = asyncio.create_task(
                self._rejoin(self._why or "its driver has ended"), name="jettison-rejoin"
            )

    def _over(self, key: tuple[int, int], why: str | None) -> None:
        """Nothing where this has been told of it, or it has been removed."""
        request, end = self._requests.pop(key, None), self._ends.pop(key, None)
        if request is None or end is None:
            return
        _fail(request, f"Ray has not placed it: {why or 'it has ended at once'}")
        if why is None:
            self._homes.pop(key, None)
        _set(end, why)


async def _end(driver: asyncio.subprocess.Process) -> None:
    """Tell it that it is not needed, and kill it where it does not end."""
    assert driver.stdin is not None
    driver.stdin.close()
    await ended(driver, "Ray's driver", _CLOSE_TIMEOUT_S)


def _set(future: asyncio.Future, value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[bytes], why: str) -> None:
    if not future.done():
        future.set_exception(JettisonError(why))
        future.exception()  # seen: its caller may be gone
