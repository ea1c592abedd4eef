"""All files and batches of one server: opened with the server, processed while it is ready, and left in their state
when it drains.

Runs on the event loop; all access to the database happens in one thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from jettison.core.ports import StoredWork
from jettison.errors import NotReadyError
from jettison.server.batches.compute import Computer
from jettison.server.batches.feeding import ResultWriter, Window
from jettison.server.batches.records import OVER, Batch, Result, Status
from jettison.server.batches.run import BatchRun, Tools
from jettison.server.batches.settings import BatchSettings
from jettison.server.batches.store import Store
from jettison.server.batches.window import Forecast, capacity_of
from jettison.server.quiet_log import Seldom
from jettison.server.state import ServerState

logger = logging.getLogger(__name__)

TICK_S = 0.5
NOTE_EVERY_S = 30.0
AGAIN_S = 5.0
"""Delay after an unforeseen error of a batch (a full disk, a killed check)."""

CANCELLABLE = (Status.VALIDATING, Status.IN_PROGRESS)

T = TypeVar("T")


class BatchService:
    """``start`` opens the folder and continues its batches; ``stop`` ends the work, ``close`` the rest. All
    idempotent."""

    def __init__(self, state: ServerState, settings: BatchSettings) -> None:
        self.settings = settings
        self.store = Store(settings.folder)
        self._state = state
        self._seldom = Seldom(logger)
        self._is_open = False
        self._is_stopping = False
        self._thread: ThreadPoolExecutor | None = None
        self._opening = asyncio.Lock()
        self._runs: dict[int, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_new_tokens = 0
        self._open_batches: list[Batch] = []
        """Open batches, as of the last look."""
        self._forecast = Forecast(settings.profiled, lambda: capacity_of(state.engine.snapshot()))
        self._online = (0.0, 0.0)
        """Tokens of prompts and of answers that the engine had computed for online requests at the last look."""
        self._results = ResultWriter(self._write_results)
        self._window = Window(settings.window)
        self._computer = computer = Computer(state, self._note_tokens, self._forecast.note_answer)
        self._told: tuple[StoredWork, ...] = ()
        """The work to come, as last reported to the engine."""
        self._tools = Tools(
            state, settings, self.store, self.call, self._window, self._results, computer, self._forecast)

    # --- life

    async def start(self) -> None:
        """Raises ConfigError where the folder cannot be used."""
        if self.settings.is_made_at_once or self.settings.folder.exists():
            await self.open()

    async def open(self) -> None:
        """Make the folder, if it is missing, and continue its batches. Raises ConfigError."""
        async with self._opening:
            if self._is_open or self._is_stopping:
                return
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="jettison-batches")
            await self.call(self.store.open)
            self._is_open = True
            self._forecast.remember(await self.call(self.store.notes))
            self._results.start()
            self._spawn(self._tick())
            batches = await self.call(self.store.open_batches)
            if not self._state.settings.serves_offline:
                batches = self._without_lines_to_compute(batches)
            for batch in batches:
                logger.info("going on with %s: %s, %d of %d lines done",
                            batch.id, batch.status, batch.num_done, batch.num_lines)
                self.take_up(batch)

    def _without_lines_to_compute(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches that only have to be ended; logs the number of the others, which stay as they are."""
        num_waiting = sum(batch.status in CANCELLABLE for batch in batches)
        if num_waiting:
            logger.warning("%d batches in %s have lines to compute, and stay as they are: --offline is none",
                           num_waiting, self.settings.folder)
        return [batch for batch in batches if batch.status not in CANCELLABLE]

    async def stop(self) -> None:
        """Stop feeding lines, and cancel running ones: they are computed again after the next start."""
        self._is_stopping = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._results.close()
        if self._is_open:
            with suppress(sqlite3.Error):  # a full disk must not keep the server from ending
                await self.call(self.store.note, self._forecast.notes())

    async def close(self) -> None:
        """Release the folder."""
        await self.stop()
        if self._is_open:
            self._is_open = False
            await self.call(self.store.close)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    @property
    def is_open(self) -> bool:
        """Whether the folder is open."""
        return self._is_open

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in the store's thread. Raises NotReadyError when that has ended."""
        if self._thread is None:
            raise NotReadyError("The server is shutting down; retry elsewhere or later.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*arguments))

    # --- batches

    def take_up(self, batch: Batch) -> None:
        """Work on a batch until it is over."""
        if not self._is_stopping:
            self._spawn(self._work_on(batch))

    async def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch that is validated or in progress. Others are returned unchanged."""
        was_working = True

        def cancelling(now: Batch) -> Batch:
            nonlocal was_working
            was_working = now.status not in CANCELLABLE or self._state.settings.serves_offline
            return now.to(Status.CANCELLING, int(time.time())) if now.status in CANCELLABLE else now

        batch = await self.call(self.store.change, batch.seq, cancelling)
        if batch.status is Status.CANCELLING:
            if batch.seq in self._runs:
                self._runs[batch.seq].end(Status.CANCELLED)
            elif not was_working:
                self.take_up(batch)
        return batch

    def estimated_completion_at(self, batch: Batch) -> int | None:
        """Predicted end, in seconds of the wall clock; None for a batch that is over or not validated yet, and while
        too little is known."""
        seconds = self.seconds_left(batch)
        return None if seconds is None else int(time.time() + seconds) + 1

    def seconds_left(self, batch: Batch) -> float | None:
        """Predicted seconds from now to the end, None as for ``estimated_completion_at``."""
        if batch.status is not Status.IN_PROGRESS or not self._state.settings.serves_offline:
            return None
        return self._forecast.seconds_expected(batch, self._open_batches, time.time())

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work_on(self, batch: Batch) -> None:
        while batch.status not in OVER:
            await self._until_ready()
            batch = await self.call(self.store.known_batch, batch.seq)  # it may have been cancelled meanwhile
            run = self._runs[batch.seq] = BatchRun(batch, self._tools)
            try:
                await run.run()
            except NotReadyError:
                pass
            except Exception:
                logger.exception("%s could not go on, and is tried again", batch.id)
            finally:
                del self._runs[batch.seq]
            batch = run.batch
            if batch.status not in OVER:
                await asyncio.sleep(AGAIN_S)
        while await self.call(self.store.purge, batch.seq):
            pass

    async def _until_ready(self) -> None:
        while self._state.status != "ready":
            await asyncio.sleep(TICK_S)

    # --- what is measured

    def _note_tokens(self, num_tokens: int) -> None:
        self._num_new_tokens += num_tokens

    async def _tick(self) -> None:
        last_s, noted_s = time.monotonic(), time.monotonic()
        while True:
            was_full = self._window.is_wanted
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._note_what_was_done(now_s - last_s, is_full=was_full and self._window.is_wanted)
            last_s = now_s
            for run in tuple(self._runs.values()):
                if time.time() >= run.batch.expires_at:
                    run.end(Status.EXPIRED)
            try:
                if self._runs or self._open_batches:
                    self._open_batches = await self.call(self.store.open_batches)
                    self._tell_stored()
                if now_s - noted_s >= NOTE_EVERY_S:
                    noted_s = now_s
                    await self.call(self.store.note, self._forecast.notes())
            except sqlite3.Error as error:
                self._seldom.warning("batches cannot be looked at: %s", error)

    def _note_what_was_done(self, seconds: float, *, is_full: bool) -> None:
        """Note the computed tokens: offline ones while there is more work than fits (``is_full``), and online ones."""
        snapshot = self._state.engine.snapshot()
        num_awake = sum(worker.alive and worker.sleep == "awake" for worker in snapshot.workers)
        if is_full and (num_awake or self._num_new_tokens):  # an outage says nothing of an instance
            self._forecast.note_work(self._num_new_tokens, seconds, max(1, num_awake))
        self._num_new_tokens = 0
        before = self._online
        prompt, output = self._online = (
            snapshot.counters.get("online_prompt_tokens", 0.0), snapshot.counters.get("online_output_tokens", 0.0))
        self._forecast.note_online(prompt - before[0], output - before[1], seconds, max(1, num_awake))

    def _tell_stored(self) -> None:
        """Report the batches' remaining work and deadlines to the engine; lines that wait for a place in the window
        count, too. While the engine loads, batches of an earlier start are open already, but the engine takes no
        reports."""
        serves = self._state.settings.serves_offline
        works = tuple(
            StoredWork(
                self._computer.deadline_ns(b.expires_at), b.num_left,
                b.num_prompt_tokens * b.num_left // b.num_runnable,
                b.max_output_tokens * b.num_left // b.num_runnable,
                self._state.keys.tenant_of(b.owner), b.id,
            )
            for b in self._open_batches if serves and b.status is Status.IN_PROGRESS and b.num_left
        )
        if works != self._told and self._state.status == "ready":
            self._told = works
            self._state.engine.note_stored(works)

    async def _write_results(self, results: Sequence[tuple[int, Result]]) -> None:
        await self.call(self.store.add_results, results)

