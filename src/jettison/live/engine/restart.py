"""Starting dead workers again: after a pause that grows, at most so often, one at a time. New ones are started so, too.

One at a time, so that a host short of memory or of descriptors is asked for one process after the other. A new worker
may have to wait for a place, so it has a turn of its own: no dead one waits behind it. It never stays down: where its
restarts are spent, it waits until the window has forgotten one. Nothing here knows what a worker does, or what the core
makes of its return.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from jettison.errors import JettisonError
from jettison.live.wire import messages as m
from jettison.types import WorkerId

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
"""Pauses grow from the first to this over the restarts that a worker has."""


@dataclass(slots=True)
class RestartBudget:
    """How often one worker may be started again. Pure: time is an argument."""

    max_restarts: int
    window_s: float
    _at_s: list[float] = field(default_factory=list)

    def next_pause_s(self, now_s: float) -> float | None:
        """Spend one restart and say how long to wait before it; None when all of the window's are spent."""
        self._at_s = [at for at in self._at_s if now_s - at < self.window_s]
        num_recent = len(self._at_s)
        if num_recent >= self.max_restarts:
            return None
        self._at_s.append(now_s)
        share = num_recent / max(1, self.max_restarts - 1)
        return float(FIRST_PAUSE_S * (MAX_PAUSE_S / FIRST_PAUSE_S) ** share)

    def frees_in_s(self, now_s: float) -> float:
        """Seconds until the window forgets the first restart; the whole window where none is allowed at all."""
        return max(0.0, min(self._at_s, default=now_s) + self.window_s - now_s)


async def at_once(worker_id: WorkerId) -> None:
    """A start can always be tried."""


class Restarter:
    """Brings dead workers back. All calls on one asyncio loop.

    ``start`` runs one new life to its WorkerReady, or raises: whatever it raises (a worker's own error, or OSError of
    a machine that is out of memory or descriptors just now) is a failed attempt. ``on_joined`` is called in the same
    moment, so that no end of the new life can overtake it; ``on_gone`` when a worker stays down; ``on_waits`` when a
    new one (``start_new``) could not be started, with the reason. ``able`` returns once a start can be tried at all:
    waiting for that costs no attempt, and holds up no other worker.
    """

    def __init__(
        self,
        start: Callable[[WorkerId], Awaitable[m.WorkerReady]],
        on_joined: Callable[[m.WorkerReady], None],
        on_gone: Callable[[WorkerId], None],
        on_waits: Callable[[WorkerId, str], None] = lambda worker_id, reason: None,
        *,
        max_restarts: int,
        window_s: float,
        able: Callable[[WorkerId], Awaitable[None]] = at_once,
    ) -> None:
        self._start = start
        self._able = able
        self._on_joined = on_joined
        self._on_gone = on_gone
        self._on_waits = on_waits
        self._limits = (max_restarts, window_s)
        self._why_down: dict[WorkerId, str] = {}
        self._budgets: dict[WorkerId, RestartBudget] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that were called off and have not ended."""
        self._turn, self._new_turn = asyncio.Lock(), asyncio.Lock()

    @property
    def why_down(self) -> Mapping[WorkerId, str]:
        """Why each worker is down that is to be there: what its process ended of, its last start failed of,
        or the present one waits for."""
        return self._why_down

    def worker_lost(self, worker_id: WorkerId, why: str) -> None:
        """A worker is dead: ``why``. A second call while it is being brought back changes nothing."""
        if worker_id not in self._tasks:
            self._why_down[worker_id] = why
            self._tasks[worker_id] = asyncio.create_task(self._bring_back(worker_id), name=f"restart-{worker_id}")

    def note_waits(self, worker_id: WorkerId, why: str) -> None:
        """A life that has begun waits for a place on a host; nothing where the worker is not one that is down."""
        if worker_id in self._why_down:
            self._why_down[worker_id] = why

    def start_new(self, worker_id: WorkerId) -> None:
        """Start a worker that has no process and is wanted, and try until it is there or ``call_off`` is called."""
        assert worker_id not in self._tasks, "it is being started"
        self._tasks[worker_id] = asyncio.create_task(self._bring_new(worker_id), name=f"start-{worker_id}")

    def call_off(self, worker_id: WorkerId) -> None:
        """Start a worker no more; nothing where none is being started. What was begun of it ends soon."""
        self._why_down.pop(worker_id, None)
        if (task := self._tasks.pop(worker_id, None)) is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    async def close(self) -> None:
        """Give up on everything that is under way. Idempotent."""
        for worker_id in list(self._tasks):
            self.call_off(worker_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _bring_back(self, worker_id: WorkerId) -> None:
        ready = await self._started_again(worker_id)
        del self._tasks[worker_id]
        if ready is not None:
            self._why_down.pop(worker_id, None)
            self._on_joined(ready)
            return
        log.error("worker %d was started %d times in %.0f s and stays down", worker_id, *self._limits)
        self._on_gone(worker_id)

    async def _bring_new(self, worker_id: WorkerId) -> None:
        budget = self._budgets.setdefault(worker_id, RestartBudget(*self._limits))
        await self._able(worker_id)
        while (ready := await self._attempt(worker_id, self._new_turn, self._on_waits)) is None:
            while (pause_s := budget.next_pause_s(time.monotonic())) is None:
                await asyncio.sleep(budget.frees_in_s(time.monotonic()))
            await asyncio.sleep(pause_s)
            await self._able(worker_id)
        del self._tasks[worker_id]
        self._on_joined(ready)

    async def _started_again(self, worker_id: WorkerId) -> m.WorkerReady | None:
        """The new life that came up, after as many attempts as the budget has; None when it has no more."""
        budget = self._budgets.setdefault(worker_id, RestartBudget(*self._limits))
        while True:
            await self._able(worker_id)
            pause_s = budget.next_pause_s(time.monotonic())
            if pause_s is None:
                return None
            await asyncio.sleep(pause_s)
            if (ready := await self._attempt(worker_id, self._turn, self._note_failed)) is not None:
                return ready

    def _note_failed(self, worker_id: WorkerId, reason: str) -> None:
        self._why_down[worker_id] = f"it could not be started: {reason}"

    async def _attempt(
        self, worker_id: WorkerId, turn: asyncio.Lock, on_failed: Callable[[WorkerId, str], None]
    ) -> m.WorkerReady | None:
        """One start; None where it failed, of which ``on_failed`` is told the reason."""
        try:
            async with turn:
                return await self._start(worker_id)
        except Exception as error:
            is_known = isinstance(error, JettisonError)
            log.error("worker %d could not be started: %s", worker_id, error, exc_info=not is_known)
            on_failed(worker_id, str(error) or type(error).__name__)
            return None
