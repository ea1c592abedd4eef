"""The lines of batches in the core at one time, a bounded and fairly shared window; and results on their way to disk.

On the event loop. Knows neither HTTP nor SQL.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jettison.server.batches.records import Result

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.25
RETRY_S = 2.0
"""Delay after a failed write."""
MAX_UNWRITTEN = 1_000
"""Most results that wait for the disk; beyond it no further lines are fed."""


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    deadline_s: float
    seq: int
    num_places: int
    granted: asyncio.Future[None]


class Window:
    """Places for choices in the core. The owner with the fewest places is next, with its batch that is due first. So
    the core can choose among lines of every owner, and the deadlines of an owner's own lines are kept."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._held: Counter[str] = Counter()
        self._waiters: list[_Waiter] = []

    @property
    def num_held(self) -> int:
        """Places in use."""
        return self._held.total()

    @property
    def is_wanted(self) -> bool:
        """Whether lines wait for a place, because there is more work than fits."""
        return bool(self._waiters)

    async def take(self, owner: str, deadline_s: float, seq: int, num_places: int) -> None:
        """Wait for ``num_places`` places. A line that needs more places than exist gets all of them, alone."""
        waiter = _Waiter(owner, deadline_s, seq, num_places, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._grant()
            else:
                self.give_back(owner, num_places)
            raise

    def give_back(self, owner: str, num_places: int) -> None:
        """Give back the places of a finished line."""
        self._held[owner] -= num_places
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    def _grant(self) -> None:
        # A cancelled line waits here until its task runs: places given back before that in the same turn of the loop
        # must not go to it.
        self._waiters = [waiter for waiter in self._waiters if not waiter.granted.done()]
        while self._waiters:
            first = min(self._waiters, key=lambda w: (self._held[w.owner], w.deadline_s, w.seq))
            num_held = self.num_held
            if num_held and num_held + first.num_places > self._num_places:
                return
            self._waiters.remove(first)
            self._held[first.owner] += first.num_places
            first.granted.set_result(None)


class ResultWriter:
    """Takes results one by one, and writes many in each transaction. ``start`` and ``close`` are idempotent."""

    def __init__(self, write: Callable[[Sequence[tuple[int, Result]]], Awaitable[None]]) -> None:
        self._write = write
        self._unwritten: list[tuple[int, Result]] = []
        self._wanted = asyncio.Event()
        self._written = asyncio.Condition()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write results."""
        if self._task is None:
            self._task = asyncio.create_task(self._write_on(), name="jettison-batch-results")

    async def close(self) -> None:
        """Write the waiting results in one attempt; where it fails, their lines are computed again after the next
        start."""
        self._closing.set()
        self._wanted.set()
        if self._task is not None:
            await self._task

    async def put(self, seq: int, result: Result) -> None:
        """Take one; waits while the disk is far behind."""
        async with self._written:
            await self._written.wait_for(lambda: len(self._unwritten) < MAX_UNWRITTEN or self._closing.is_set())
        self._unwritten.append((seq, result))
        self._wanted.set()

    async def flushed(self) -> None:
        """Wait until all results put so far are on disk."""
        async with self._written:
            await self._written.wait_for(lambda: not self._unwritten)

    async def _write_on(self) -> None:
        while True:
            await self._wanted.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), FLUSH_EVERY_S)
            self._wanted.clear()
            taken = tuple(self._unwritten)
            try:
                if taken:
                    await self._write(taken)
            except sqlite3.Error as error:
                logger.error("results of batches cannot be written, and wait: %s", error)
                if self._closing.is_set():
                    return
                await asyncio.sleep(RETRY_S)
                self._wanted.set()
                continue
            async with self._written:
                del self._unwritten[: len(taken)]
                self._written.notify_all()
            if self._closing.is_set() and not self._unwritten:
                return
            if self._unwritten:
                self._wanted.set()
