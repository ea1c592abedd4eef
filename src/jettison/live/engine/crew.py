"""The workers of a cluster: starts them, introduces them, watches them, starts them again, ends them.

How a process comes to be is a ``Spawner``'s (``engine.spawner``). Here are the control channels, the lives, the hearts,
and what is told of an end: once, after the worker's last event. All calls on one asyncio loop.

A worker that is silent or stuck for too long (``live.wire.heartbeat``) is declared lost: its connection is closed, it
is killed, and the engine hears of it as of one that has ended. Should it wake up all the same (without ``kill_hung``,
or a process that cannot be killed yet), no end hears it: its links are fenced, its life is over; it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from jettison import errors
from jettison.errors import JettisonError, LinkDownError, UserError, WorkerLostError
from jettison.live.engine.life import Life
from jettison.live.engine.spawner import Handle, Spawner
from jettison.live.host.heritage import Heritage
from jettison.live.machine.address_space import shortage_hint
from jettison.live.wire import messages as m
from jettison.live.wire.channel import ControlServer
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerSpec, WorkerStart, digest_of
from jettison.transport.handshake import CONTROLLER, Identity
from jettison.transport.tls import control_context
from jettison.types import WorkerId

if TYPE_CHECKING:
    from jettison.transport.authority import Authority

log = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 300.0
"""How long a restarted worker may take to load; it holds up the restart of others."""

TAKE_OVER_S = 20.0
"""How long a worker that has outlived a controller may take to answer the next one: it hears nothing while it computes
a step. One that is later is started again and filled by its peers."""

PATIENCE = Patience(1.5, 300.0)

_LONELY_S = 1.0
"""How long a worker may take to end once its control connection has."""

_STOP_S = 5.0
"""How long a worker may take to end that is told to stop, before it is killed."""

OnEvent = Callable[[WorkerId, m.Event], None]
OnExit = Callable[[WorkerId, int], None]


class Crew:
    """Workers, any two of which may open a link.

    ``on_event`` gets every event but the start's; ``on_exit`` is called once for a worker that ends before ``close``,
    after its last event.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        spawner: Spawner,
        on_event: OnEvent,
        on_exit: OnExit,
        *,
        num_at_start: int | None = None,
        start_timeout_s: float = 600.0,
        patience: Patience = PATIENCE,
        heritage: Heritage | None = None,
    ) -> None:
        """``num_at_start``: so many of the workers begin with ``start``, the first ones; None: all. Others begin with
        ``restart``. ``heritage``: what workers find that outlive this process, where there is another behind it."""
        self._num_at_start = len(specs) if num_at_start is None else num_at_start
        self._specs = {spec.worker_id: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("two workers of one id")
        self._spawner = spawner
        self._on_event = on_event
        self._on_exit = on_exit
        self._start_timeout_s = start_timeout_s
        self._patience = patience
        self.kill_hung = True
        """Whether a worker that is given up is killed. Tests leave it alive, to see what it does when it wakes up."""
        self._heritage = heritage
        self._secret = secrets.token_bytes(32) if heritage is None else heritage.secret
        self._server = ControlServer(self._secret, self._on_worker_event, self._on_connection_end, self._certify)
        self._server.on_proven = self._on_proven
        self._authority: Authority | None = None
        """Where workers are on several hosts."""
        self._control_address: str | None = None
        self._lives: dict[WorkerId, Life] = {}
        """The present one of each worker."""
        self._old: list[Life] = []
        """Lives that were replaced and may not have ended yet."""
        self._has_begun = False
        """``start`` is over."""
        self._closing = False
        self._listening: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Process ids of the workers that live."""
        return {worker: life.handle.pid for worker, life in self._lives.items() if life.is_up}

    @property
    def troubles(self) -> Sequence[str]:
        """See ``Spawner.troubles``."""
        return self._spawner.troubles()

    def life(self, worker: WorkerId) -> int:
        """Which life of a worker is the present one."""
        return self._lives[worker].number

    def why_over(self, worker: WorkerId) -> str:
        """Why the present life of a worker is over, once ``on_exit`` has told that it is."""
        return self._lives[worker].why_over

    @property
    def _first_life(self) -> int:
        """Number of the lives that begin with ``start``: above those of earlier controllers, fewer than 1,000 each."""
        return 0 if self._heritage is None else 1000 * (self._heritage.epoch - 1)

    async def start(self) -> list[m.WorkerReady]:
        """Start the workers that begin now, wait until each is loaded, and tell each where the others are. Where some
        have outlived an earlier controller, they are taken over, and none is started: ``restart`` is for the others.

        Raises the worker's own UserError (ModelError, BudgetError, ...), else WorkerLostError; then nothing is
        left running. A crew starts once.
        """
        if self._control_address is not None:
            raise JettisonError("this crew was started before")
        try:
            await self._listen()
            async with asyncio.timeout(self._start_timeout_s):
                kept = [] if self._heritage is None else await self._taken_over(self._heritage)
                for worker in [] if kept else list(self._specs)[: self._num_at_start]:
                    self._spawn(worker, self._first_life, is_empty=False)
                ready = list(await asyncio.gather(*(life.started for life in self._lives.values())))
                await asyncio.gather(*(life.handle.located() for life in self._lives.values()))
            ready = self._those_up(ready, may_lack=bool(kept))
            self._has_begun = True
            for worker, life in self._lives.items():
                self._introduce(worker, [peer for peer in self._lives if peer != worker])
                life.is_known = True
            self._listening = asyncio.create_task(self._listen_to_hearts(), name="jettison-hearts")
            return ready
        except TimeoutError:
            await self.close(0.0)
            waiting = [w for w, life in self._lives.items() if life.started.cancelled() or not life.started.done()]
            raise WorkerLostError(f"workers {waiting} were not ready in {self._start_timeout_s:.0f} s") from None
        except JettisonError as error:
            await self.close(0.0)
            raise self._root_cause(error) from None
        except BaseException:
            await self.close(0.0)
            raise

    def _those_up(self, ready: Sequence[m.WorkerReady], *, may_lack: bool) -> list[m.WorkerReady]:
        """What the workers say that have not ended since. Where others may be enough (``may_lack``), the rest are
        forgotten; else raises WorkerLostError, as where none is left."""
        for worker in [w for w, life in self._lives.items() if not life.is_up]:
            if not may_lack or len(self._lives) == 1:
                raise WorkerLostError(f"worker {worker} ended as soon as it was ready{shortage_hint()}")
            self._old.append(self._lives.pop(worker))
            self._abandon(worker, self._old[-1])
        return [event for event in ready if event.worker_id in self._lives]

    async def _listen(self) -> None:
        """Raises OSError, UserError."""
        tls = None
        if self._spawner.spans_hosts:
            from jettison.transport.authority import Authority  # brings cryptography

            self._authority = (self._heritage and self._heritage.authority) or Authority()
            tls = control_context(self._authority.papers_for(CONTROLLER))
        address = await self._spawner.open(self._authority)
        if self._heritage is not None:
            await self._adopt()
        listener = None if self._heritage is None else self._heritage.listener_at(address)
        self._control_address = await self._server.start(address, tls, listener)

    async def _adopt(self) -> None:
        """Expect the workers that have outlived an earlier controller; those of another device are ended. Raises
        OSError."""
        num_threads = next(iter(self._specs.values())).num_threads
        found = sorted(await self._spawner.adopt(num_threads), key=lambda each: each.life, reverse=True)
        for worker, number, digest, handle in found:
            if worker in self._lives or worker not in self._specs or digest != digest_of(self._specs[worker]):
                handle.kill()
                continue
            self._server.expect(worker, number)
            self._enter(worker, number, handle, None).is_orphan = True

    async def _taken_over(self, heritage: Heritage) -> list[WorkerId]:
        """Workers that have outlived an earlier controller and obey this one now; those that do not answer in time are
        ended."""
        lives = dict(self._lives)
        if lives:
            await asyncio.wait([life.started for life in lives.values()], timeout=TAKE_OVER_S)
        kept = [w for w, life in lives.items() if life.is_up and life.has_weights]
        late = {worker: life for worker, life in lives.items() if worker not in kept}
        for worker, life in late.items():
            log.error("worker %d does not answer the controller of epoch %d and is ended", worker, heritage.epoch)
            self._old.append(self._lives.pop(worker))  # others may be enough
            self._abandon(worker, life)
        if late:
            await asyncio.wait([life.handle.ended for life in late.values()])
        if lives:
            log.info("%d of %d workers are taken over", len(kept), len(self._specs))
        return kept

    def _on_proven(self, worker: WorkerId) -> None:
        """The first word to a worker that obeys another controller yet."""
        life = self._lives.get(worker)
        if life is not None and life.is_orphan and self._heritage is not None:
            self._server.send(worker, m.TakeOver(self._heritage.epoch, self._heritage.signature))

    async def restart(self, worker: WorkerId) -> m.WorkerReady:
        """Start a worker that is lost, retired or was never started, empty, and tell all that live. Raises as ``start``
        does; then nothing of it is left.

        Raises OSError where its host has no process, descriptor or address for it; it may be tried again. Each worker
        one at a time. When this returns, the new life has not ended, and ``on_exit`` will tell if it does.
        """
        before, number = self._lives.get(worker), self._first_life + 1
        if before is not None:
            assert before.reported, "only a worker that is over is started again"
            number = before.number + 1
            if before.is_retired and not before.handle.ended.done():  # its memory is not there twice
                await asyncio.wait([before.handle.ended])
        life = self._spawn(worker, number, is_empty=True)
        if before is not None:
            self._old.append(before)
        try:
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                ready = await asyncio.shield(life.started)  # which tells of its end in any case
                await life.handle.located()
            if not life.is_up:
                raise WorkerLostError(f"worker {worker} ended as soon as it was ready")
            others = [w for w, other in self._lives.items() if w != worker and other.is_up and other.is_known]
            self._introduce(worker, others)
            life.is_known = True
            for other in others:
                self._introduce(other, [worker])
            return ready
        except TimeoutError:
            raise WorkerLostError(f"worker {worker} was not ready in {RESTART_TIMEOUT_S:.0f} s") from None
        finally:
            if not life.is_known:
                self._abandon(worker, life)

    def _abandon(self, worker: WorkerId, life: Life) -> None:
        """End a life that is to be told of no more."""
        life.reported = True
        self._server.hang_up(worker)
        life.handle.kill()

    def retire(self, worker: WorkerId) -> None:
        """End a worker that has handed everything on, or whose start was called off, and give its place back once it
        has ended. ``on_exit`` tells nothing of it. Nothing where it was never started."""
        life = self._lives.get(worker)
        if life is None or self._closing:
            return
        life.is_retired = True
        if not life.reported:
            self._part(worker, life)
            self._server.send(worker, m.Stop())
            asyncio.get_running_loop().call_later(_STOP_S, life.handle.kill)

        def give_back(_: asyncio.Future[int]) -> None:
            if self._lives[worker] is life and not self._closing:
                self._spawner.release(worker)

        life.handle.ended.add_done_callback(give_back)

    def declare_lost(self, worker: WorkerId, why: str) -> None:
        """Give a worker up: hear nothing of it any more, kill it, and tell ``on_exit``. Idempotent.

        Of one that is still starting, the caller that waits for its start is told instead.
        """
        life = self._lives[worker]
        if life.reported or self._closing:
            return
        log.error("worker %d is given up: %s", worker, why)
        life.why_given_up = why
        self._part(worker, life)
        self._server.hang_up(worker)
        if self.kill_hung:
            life.handle.kill()
        if life.started.done():
            self._tell_exit(worker, life, -signal.SIGKILL)
        else:
            life.started.set_exception(
                WorkerLostError(f"worker {worker} was given up while it was starting: {why}")
            )

    def send(self, worker: WorkerId, command: m.Command) -> None:
        """Queue a command; never blocks. To a worker that is gone it is dropped: ``on_exit`` tells."""
        self._server.send(worker, command)

    def abandon(self, worker: WorkerId, step_id: int) -> None:
        """Have a worker give a step up at its next safepoint. It need not read any message for it; never blocks."""
        self._lives[worker].handle.abandon(step_id)

    def empty_shared_copies(self) -> None:
        """As after a restart of the hosts: nothing is left in their copies of the parameters (tests)."""
        self._spawner.empty_shared_copies()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop all workers, kill those that need longer than ``timeout_s``, remove every trace. Idempotent."""
        self._closing = True
        if self._listening is not None:
            self._listening.cancel()
        for worker in self._lives:
            self._server.send(worker, m.Stop())
        lives = [*self._old, *self._lives.values()]
        for life in lives:
            if life.reported:
                life.handle.kill()
        if lives:
            await asyncio.wait([life.handle.ended for life in lives], timeout=timeout_s)
            for worker, life in self._lives.items():
                if not life.handle.ended.done():
                    if timeout_s > 0:  # else it was given none: a failed start is no fault of this worker
                        log.warning("worker %d did not stop in time and is killed", worker)
                    life.handle.kill()
            await asyncio.wait([life.handle.ended for life in lives])
        self._server.close()
        for life in self._lives.values():
            if not life.started.cancel() and not life.started.cancelled():
                life.started.exception()  # seen: it was raised by start, or another one was
        await self._spawner.close()

    # --- starting

    def _spawn(self, worker: WorkerId, number: int, *, is_empty: bool) -> Life:
        assert self._control_address is not None, "not started"
        heritage = self._heritage
        self._server.expect(worker, number)
        token = None if self._authority is None else secrets.token_bytes(32)
        start = WorkerStart(
            spec=msgspec.structs.replace(self._specs[worker], starts_empty=is_empty),
            secret_hex=self._secret.hex(),
            epoch=number,
            control_address=self._control_address,
            beat_interval_s=self._patience.beat_interval_s,
            log_level=logging.getLevelName(log.getEffectiveLevel()),
            token_hex=None if token is None else token.hex(),
            authority_pem=(
                self._authority.certificate.decode()
                if self._authority is not None and self._control_address.startswith("tcp:") else None
            ),
            orphan_timeout_s=0.0 if heritage is None else heritage.orphan_timeout_s,
            controller_epoch=0 if heritage is None else heritage.epoch,
            parent_key_hex="" if heritage is None else heritage.public_key.hex(),
        )
        return self._enter(worker, number, self._spawner.spawn(start), token)

    def _enter(self, worker: WorkerId, number: int, handle: Handle, token: bytes | None) -> Life:
        """From now on this is the worker's present life."""
        life = self._lives[worker] = Life(handle, number, asyncio.get_running_loop().create_future(), token)
        handle.ended.add_done_callback(lambda _: self._on_process_end(worker, life))
        return life

    def _introduce(self, worker: WorkerId, peers: Sequence[WorkerId]) -> None:
        """Tell a worker where peers are: through shared memory on its own host, over the network elsewhere."""
        known = []
        for peer in peers:
            life, host = self._lives[peer], self._spawner.host_of(peer)
            addresses = life.handle.addresses
            address = addresses.near if host == self._spawner.host_of(worker) else addresses.far
            if address is not None:
                known.append(m.PeerAddress(peer, life.number, address))
        self.send(worker, m.KnowPeers(known))

    def _part(self, worker: WorkerId, life: Life) -> None:
        """A life is over: no peer waits any more for a link to it. A peer that has a link learns it from there."""
        life.reported = True
        for peer in self._lives:
            if peer != worker and not self._closing:
                self.send(peer, m.ForgetPeer(worker, life.number))

    def _root_cause(self, error: JettisonError) -> JettisonError:
        """What a person can mend goes before the links that broke because of it."""
        started = [life.started for life in self._lives.values()]
        failed = [future.exception() for future in started if future.done() and not future.cancelled()]
        return next((other for other in failed if isinstance(other, UserError)), error)

    # --- watching

    def _certify(self, worker: WorkerId, event: m.CertificateWanted) -> m.Certificate | None:
        """Sign a worker's key, once in its life and for its own name; None: not this one. That hurts no worker, as the
        one that asks here has shown the secret and nothing of its own."""
        try:
            return self._signed(worker, event)
        except LinkDownError as error:
            log.error("what calls itself worker %d gets no certificate: %s", worker, error)
            return None

    def _signed(self, worker: WorkerId, event: m.CertificateWanted) -> m.Certificate:
        """Raises LinkDownError."""
        life = self._lives.get(worker)
        token = None if life is None else life.token
        if self._authority is None or token is None or not secrets.compare_digest(token, event.token):
            raise LinkDownError("its token is none of its life, or has been used")
        assert life is not None
        life.token = None
        certificate = self._authority.sign(event.request, Identity(worker, life.number))
        return m.Certificate(certificate, self._authority.certificate)

    def _on_worker_event(self, worker: WorkerId, event: m.Event) -> None:
        if isinstance(event, m.CertificateWanted):
            try:
                self.send(worker, self._signed(worker, event))
            except LinkDownError as error:
                self.declare_lost(worker, f"it gets no certificate: {error}")
            return
        life = self._lives[worker]
        if not isinstance(event, m.WorkerReady | m.WorkerStartFailed):
            if not self._closing and not life.reported:
                self._on_event(worker, event)
            return
        if life.started.done():
            log.error("worker %d reports its start again", worker)
        elif isinstance(event, m.WorkerReady):
            life.handle.begin_beats(time.monotonic())
            life.started.set_result(event)
        else:
            life.started.set_exception(_start_error(event))

    def _on_connection_end(self, worker: WorkerId) -> None:
        """A worker that lives on without its control connection is of no use."""
        life = self._lives[worker]
        if not life.handle.ended.done() and not self._closing:
            asyncio.get_running_loop().call_later(_LONELY_S, life.handle.kill)
        self._report_exit(worker, life)

    def _on_process_end(self, worker: WorkerId, life: Life) -> None:
        why_lost = life.handle.why_lost
        if why_lost is not None and not life.reported and life is self._lives[worker]:
            self.declare_lost(worker, why_lost)
        self._report_exit(worker, life)

    def _report_exit(self, worker: WorkerId, life: Life) -> None:
        """Tell of an exit once both the process and its connection are over: its last events come first."""
        if not life.handle.ended.done() or life.reported or self._server.is_connected(worker):
            return
        self._part(worker, life)
        returncode = life.handle.ended.result()
        if not life.started.done():
            life.started.set_exception(WorkerLostError(
                f"worker {worker} ended with code {returncode} while it was starting{shortage_hint()}"
            ))
        elif not self._closing:
            self._tell_exit(worker, life, returncode)

    def _tell_exit(self, worker: WorkerId, life: Life, returncode: int) -> None:
        """Of one that was ready. While others still start it ends their start; one that was there before this
        controller is only missing then."""
        if self._has_begun:
            self._on_exit(worker, returncode)
        elif not life.is_orphan:
            for other in self._lives.values():
                if not other.started.done():
                    other.started.set_exception(WorkerLostError(
                        f"worker {worker} ended with code {returncode} before all were ready{shortage_hint()}"))

    async def _listen_to_hearts(self) -> None:
        """Declare workers lost that are silent or stuck. The crew's own absences are no worker's fault."""
        pause_s = self._patience.beat_interval_s
        looked_s = time.monotonic()
        while any(self._patience):
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            away_s = now_s - looked_s - pause_s
            looked_s = now_s
            for worker, life in list(self._lives.items()):
                if life.reported or not life.started.done():
                    continue
                why = life.handle.why_hung(now_s, away_s if away_s > pause_s else 0.0, self._patience)
                if why is not None:
                    self.declare_lost(worker, why)


def _start_error(event: m.WorkerStartFailed) -> JettisonError:
    """The error that the worker met, as its own class where that is one of ours."""
    kind = getattr(errors, event.error_type, None)
    if not (isinstance(kind, type) and issubclass(kind, JettisonError)):
        kind = UserError if event.user_error else JettisonError
    return kind(event.message)
