"""Workers on other hosts: one keeper a worker, each a process that a ``Placer`` has put on some host.

Whatever places keepers only does that. Orders, beats and the cluster's secret go between this controller and the keeper
itself (``host_server``, ``host.far_keeper``), and whether a host is lost is said by its lease and by nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from jettison.errors import JettisonError
from jettison.live.engine.host_door import HostDoor
from jettison.live.engine.spawner import HostName
from jettison.live.host.heritage import Heritage
from jettison.live.host.keeper import Addresses, Adopted
from jettison.live.machine.identity import process_table
from jettison.live.wire import host_orders as h
from jettison.live.wire.heartbeat import Patience, why_hung
from jettison.live.wire.lease import LeaseTimes
from jettison.live.wire.stepflag import NO_STEP
from jettison.live.wire.worker_config import WorkerStart
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Identity
from jettison.transport.sockets import parse_address
from jettison.transport.tls import keeper_identity
from jettison.types import WorkerId

if TYPE_CHECKING:
    from jettison.transport.authority import Authority

log = logging.getLogger(__name__)

DEFAULT_LEASE_S = 2.0
JOIN_TIMEOUT_S = 4 * HANDSHAKE_TIMEOUT_S
"""From a keeper's certificate to its first word; its process is there and has loaded what it needs."""


class Placer(Protocol):
    """Puts keepers on hosts. A keeper's number is its worker's id. All calls on the crew's loop; none blocks it."""

    on_waits: Callable[[WorkerId, str], None]
    """Called where a keeper that is to be placed waits for room, with what it lacks."""

    @property
    def why_none(self) -> str | None:
        """Why no keeper can be placed now; None: one can, as far as is known."""

    async def able(self) -> None:
        """Returns once one can."""

    async def open(self) -> str:
        """Find room for all; returns the IP address of this host that all others reach. Raises OSError, UserError."""

    def reopen(self, homes: Mapping[tuple[int, int], str]) -> None:
        """In the place of ``open``, where an earlier controller has opened and keepers live. ``homes``: (number, life)
        -> the IP address of its host. Never blocks: what lives needs no placer."""

    async def place(self, post: h.KeeperPost) -> bytes:
        """Start the keeper on a host; returns its signing request. Raises OSError, JettisonError."""

    async def admit(self, post: h.KeeperPost, certificate_pem: str) -> None:
        """Bring it its certificate. Raises OSError, JettisonError."""

    async def ended(self, post: h.KeeperPost) -> None:
        """Returns when its process has ended, as far as that can be known. Raises OSError, JettisonError."""

    async def remove(self, post: h.KeeperPost) -> None:
        """End it, if it is there: it is not needed. Never raises."""

    async def close(self) -> None:
        """Give back what ``open`` has acquired, and every keeper. Idempotent."""


class FarHandle:
    """One life of a worker, from this end; see ``spawner.Handle``, which it is."""

    def __init__(self, keeper: _Keeper, order: int) -> None:
        self.pid = 0
        self.addresses = Addresses("", None)
        self.why_lost: str | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._keeper = keeper
        self._order = order
        self._located = asyncio.Event()
        self._ages_s: tuple[float, float] | None = None
        """As of the keeper's last beat since the worker was ready."""

    async def located(self) -> None:
        """See ``Handle``."""
        await self._located.wait()

    def kill(self) -> None:
        """See ``Handle``."""
        if self.ended.done():
            return
        if self._keeper.host is None:
            self._keeper.give_up("it was given up before it was placed")
        self._keeper.send(h.Kill(self._order))

    def abandon(self, step_id: int) -> None:
        """See ``Handle``."""
        if not self.ended.done():
            self._keeper.send(h.Abandon(self._order, step_id))

    def begin_beats(self, now_s: float) -> None:
        """See ``Handle``. The keeper counts, by its own clock."""
        self._ages_s = (0.0, 0.0)
        self._keeper.send(h.BeginBeats(self._order))

    def why_hung(self, now_s: float, away_s: float, patience: Patience) -> str | None:
        """See ``Handle``. The keeper's own silence is the lease's matter."""
        return None if self._ages_s is None or self.ended.done() else why_hung(*self._ages_s, patience)

    def hear(self, event: h.Spawned | h.Forked | h.Ended | h.HeartAges) -> None:
        """What the keeper tells of it."""
        if isinstance(event, h.HeartAges):
            if self._ages_s is not None:
                self._ages_s = event.silent_s, event.unit_s
        elif isinstance(event, h.Spawned):
            self.addresses = Addresses(event.near, event.far)
        elif isinstance(event, h.Forked):
            self.pid = event.pid if self._keeper.is_seen else 0
            self._located.set()
        else:
            self.end(event.returncode)

    def end(self, returncode: int, why_lost: str | None = None) -> None:
        """It has ended; ``why_lost``: with its keeper. Idempotent."""
        if not self.ended.done():
            self.why_lost = why_lost
            self._located.set()
            self.ended.set_result(returncode)


class _Keeper:
    """One life of a keeper, from this end."""

    def __init__(self, post: h.KeeperPost, server: HostDoor) -> None:
        self.post = post
        self.host: HostName | None = None
        """Once it has joined."""
        self.is_seen = False
        """Its process ids are this process's, too."""
        self.is_over = False
        self.handles: dict[int, FarHandle] = {}
        self.bringing: asyncio.Task[None] | None = None
        """What brings it and waits for its end."""
        self._server = server
        self._waiting: list[h.HostCommand] = []
        """Until it has joined."""

    def send(self, command: h.HostCommand) -> None:
        """Never blocks."""
        if self.host is not None:
            self._server.send(self.post.identity, command)
        elif not self.is_over:
            self._waiting.append(command)

    def join(self, event: h.Joined) -> None:
        """It is there."""
        self.host, self.is_seen = event.host, event.processes == process_table()
        for command in self._waiting:
            self.send(command)
        self._waiting.clear()

    def give_up(self, why: str) -> None:
        """It is lost, and its workers with it, or it is not to come any more. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        self._server.dismiss(self.post.identity)
        self._waiting.clear()
        if self.bringing is not None and self.bringing is not asyncio.current_task():
            self.bringing.cancel()
        for handle in list(self.handles.values()):
            handle.end(-signal.SIGKILL, why)
        self.handles.clear()


class FarSpawner:
    """A ``Spawner`` over keepers that ``placer`` puts on hosts. ``worker_command``: see ``Keeper`` (tests)."""

    spans_hosts = True

    def __init__(
        self, placer: Placer, *, lease_s: float = DEFAULT_LEASE_S, worker_command: Sequence[str] | None = None,
        heritage: Heritage | None = None,
    ) -> None:
        """``heritage``: what outlives this process, and keepers with it."""
        self._placer = placer
        self._lease_s = lease_s
        self._heritage = heritage
        self._worker_command = None if worker_command is None else tuple(worker_command)
        self._server = HostDoor(lease_s, self._on_word, self._on_door_end)
        self._authority: Authority | None = None
        self._address = ""
        self._keepers: dict[WorkerId, _Keeper] = {}
        """The present life of each."""
        self._num_lives: dict[WorkerId, int] = {}
        self._num_orders = 0
        self._opening = asyncio.Lock()
        self._reopens_s = 0.0
        """By the loop's clock: from when on a lost process that takes keepers may have a successor."""
        self._found: list[tuple[_Keeper, list[h.KeptWorker]]] = []
        """What has outlived an earlier controller."""
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each life of a keeper, until it has ended."""
        self._is_closed = False

    async def open(self, authority: Authority | None) -> str:
        """See ``Spawner.open``."""
        assert authority is not None, "hosts are spanned"
        self._authority = authority
        found = None if self._heritage is None else await self._server.find(self._heritage)
        if found is None:
            ip = await self._placer.open()
            self._address = await self._server.start(
                f"tcp:{ip}:0", authority.papers_for(CONTROLLER), self._heritage)
            return f"tcp:{ip}:0"
        self._address, self._num_lives = found.address, dict(found.lives)
        self._num_orders = max((worker.order for kept in found.keepers for worker in kept.workers), default=0)
        last = {kept.number: kept for kept in sorted(found.keepers, key=lambda each: each.life)}
        for kept in found.keepers:
            if kept is not last[kept.number]:
                self._server.dismiss(keeper_identity(kept.number, kept.life))
        self._found = [(self._take(kept, authority), kept.workers) for kept in last.values()]
        self._placer.reopen({(kept.number, kept.life): kept.joined.ip for kept in last.values()})
        return f"tcp:{parse_address(self._address)[1]}:0"

    async def close(self) -> None:
        """See ``Spawner.close``."""
        if self._is_closed:
            return
        self._is_closed = True
        for keeper in self._keepers.values():
            keeper.give_up("the cluster ends")
        await self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._placer.close()

    async def adopt(self, num_threads: int) -> Sequence[Adopted[FarHandle]]:
        """See ``Spawner.adopt``: by their keepers, whose leases have been granted on."""
        adopted = []
        for keeper, workers in self._found:
            for worker in workers:
                if keeper.is_over:  # since then
                    continue
                if not worker.pid:  # a start that has come to nothing
                    keeper.send(h.Kill(worker.order))
                    continue
                handle = keeper.handles[worker.order] = FarHandle(keeper, worker.order)
                handle.hear(h.Spawned(worker.order, worker.near, worker.far))
                handle.hear(h.Forked(worker.order, worker.pid))
                handle.abandon(NO_STEP)  # the numbers of steps begin again
                adopted.append(Adopted(keeper.post.number, worker.life, worker.spec_digest, handle))
        return adopted

    def spawn(self, start: WorkerStart) -> FarHandle:
        """See ``Spawner.spawn``: what a host refuses is an end of the life, which has begun by then."""
        keeper = self._keeper_of(start.spec.worker_id)
        self._num_orders += 1
        order = self._num_orders
        handle = keeper.handles[order] = FarHandle(keeper, order)
        # The worker looks at the lease with each beat of its heart.
        beat_s = min(start.beat_interval_s, LeaseTimes.of(self._lease_s).beat_s)
        keeper.send(h.Spawn(order, msgspec.structs.replace(start, shares_clock=False, beat_interval_s=beat_s)))
        return handle

    def release(self, worker: WorkerId) -> None:
        """See ``Spawner.release``: its keeper ends, and with it what the placer has reserved."""
        if (keeper := self._keepers.get(worker)) is not None:
            keeper.give_up("it is not needed any more")

    def hosts(self) -> Sequence[HostName]:
        """See ``Spawner.hosts``: those that have a keeper by now."""
        return sorted({keeper.host for keeper in self._keepers.values() if keeper.host is not None})

    def host_of(self, worker: WorkerId) -> HostName:
        """See ``Spawner.host_of``."""
        host = self._keepers[worker].host
        assert host is not None, "it has not started"
        return host

    def troubles(self) -> Sequence[str]:
        """See ``Spawner.troubles``."""
        why = self._placer.why_none
        return () if why is None else (why,)

    def tell_waits(self, on_waits: Callable[[WorkerId, str], None]) -> None:
        """See ``Spawner.tell_waits``."""
        self._placer.on_waits = on_waits

    async def able(self, worker: WorkerId) -> None:
        """See ``Spawner.able``."""
        keeper = self._keepers.get(worker)
        if keeper is None or keeper.is_over:
            await self._placer.able()

    def empty_shared_copies(self) -> None:
        """See ``Spawner.empty_shared_copies``."""
        for keeper in self._keepers.values():
            keeper.send(h.EmptyCopy())

    # --- keepers

    def _keeper_of(self, worker: WorkerId) -> _Keeper:
        """The one that there is, or the next life of it."""
        keeper = self._keepers.get(worker)
        if keeper is not None and not keeper.is_over:
            return keeper
        assert self._authority is not None, "not open"
        life = self._num_lives[worker] = self._num_lives.get(worker, -1) + 1
        keeper = self._keepers[worker] = _Keeper(self._post(worker, life, self._authority), self._server)
        self._attend(keeper, self._bring(keeper, self._authority))
        return keeper

    def _post(self, number: int, life: int, authority: Authority) -> h.KeeperPost:
        return h.KeeperPost(
            number=number, life=life, address=self._address, token_hex=secrets.token_hex(32),
            authority_pem=authority.certificate.decode(), lease_s=self._lease_s,
            log_level=logging.getLevelName(log.getEffectiveLevel()), worker_command=self._worker_command,
        )  # fmt: skip

    def _attend(self, keeper: _Keeper, bringing: Coroutine[None, None, None]) -> None:
        task = keeper.bringing = asyncio.create_task(bringing, name=f"keeper-{keeper.post.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, kept: h.KeptKeeper, authority: Authority) -> _Keeper:
        """One that has outlived the controller that has brought it."""
        keeper = self._keepers[kept.number] = _Keeper(self._post(kept.number, kept.life, authority), self._server)
        keeper.join(kept.joined)
        self._attend(keeper, self._until_given_up(keeper.post))
        return keeper

    async def _until_given_up(self, post: h.KeeperPost) -> None:
        """Only its lease tells of it."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._remove(post)

    async def _bring(self, keeper: _Keeper, authority: Authority) -> None:
        """Have a keeper placed and let in; then wait for its end, of which its connection mostly tells first. Cancelled
        where it is given up meanwhile."""
        post, late = keeper.post, None
        try:
            await self._open_door(authority)
            request = await self._placer.place(post)
            certificate = authority.sign(request, post.identity)
            self._server.expect(post)
            await self._placer.admit(post, certificate.decode())
            late = asyncio.get_running_loop().call_later(JOIN_TIMEOUT_S, self._not_joined, keeper)
            await self._until_ended(keeper)
            keeper.give_up("its keeper has ended")
        except asyncio.CancelledError:
            await self._remove(post)
            raise
        except Exception as error:  # whatever it is, no keeper comes of it, and what waits for one must hear that
            is_known = isinstance(error, OSError | JettisonError)
            log.error("no keeper for worker %d: %s", post.number, error, exc_info=not is_known)
            keeper.give_up(f"its keeper: {error}")
            await self._remove(post)
        finally:
            if late is not None:
                late.cancel()

    async def _until_ended(self, keeper: _Keeper) -> None:
        """Where nothing tells of a keeper that has joined any more, its lease does: this is cancelled then."""
        try:
            await self._placer.ended(keeper.post)
        except Exception as error:
            if keeper.host is None:
                raise
            number = keeper.post.number
            log.warning("nothing tells of the keeper of worker %d any more but its lease: %s", number, error)
            await asyncio.Event().wait()

    async def _open_door(self, authority: Authority) -> None:
        """Where what takes keepers has ended, start it again, once no lease that it has granted lasts. Raises OSError,
        JettisonError."""
        async with self._opening:
            if self._server.is_open:
                return
            await asyncio.sleep(self._reopens_s - asyncio.get_running_loop().time())
            await self._server.start(self._address, authority.papers_for(CONTROLLER), self._heritage)
            log.warning("keepers are taken again at %s", self._address)

    async def _remove(self, post: h.KeeperPost) -> None:
        try:
            await self._placer.remove(post)
        except Exception as error:  # noqa: BLE001 - it is gone, or ends by its lease
            log.warning("the keeper of worker %d is not removed: %s", post.number, error)

    def _not_joined(self, keeper: _Keeper) -> None:
        if keeper.host is None:
            log.error("no keeper for worker %d: it has not joined in %g s", keeper.post.number, JOIN_TIMEOUT_S)
            keeper.give_up(f"its keeper has not joined in {JOIN_TIMEOUT_S:g} s")

    def _on_door_end(self) -> None:
        log.error("the process that takes keepers has ended, and every keeper with it; another starts with the next")
        self._reopens_s = asyncio.get_running_loop().time() + self._lease_s
        for keeper in list(self._keepers.values()):
            keeper.give_up("the process that takes keepers has ended")

    def _on_word(self, identity: Identity, word: h.HostEvent | h.Lost) -> None:
        keeper = next((each for each in self._keepers.values() if each.post.identity == identity), None)
        if keeper is None or keeper.is_over:
            return
        match word:
            case h.Joined():
                keeper.join(word)
            case h.Lost():
                log.error("the keeper of worker %d is lost: %s", keeper.post.number, word.why)
                keeper.give_up(word.why)
            case h.Beat():
                for ages in word.hearts:
                    if ages.order in keeper.handles:
                        keeper.handles[ages.order].hear(ages)
            case h.Spawned() | h.Forked() | h.Ended():
                if word.order in keeper.handles:
                    handle = keeper.handles[word.order]
                    if isinstance(word, h.Ended):
                        del keeper.handles[word.order]
                    handle.hear(word)
