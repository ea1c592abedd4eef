"""The life of one batch: validated, fed line by line, finalized; it continues from its state on disk.

No decision is made twice: after a restart the batch goes on from the last state written.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jettison.live.machine.environment import child_environment
from jettison.server.batches.check import ENDPOINT_OF, Job, Verdict
from jettison.server.batches.compute import Computer, Prepared
from jettison.server.batches.feeding import ResultWriter, Window
from jettison.server.batches.lines import Line, LineError, parse_line, read_lines
from jettison.server.batches.outcome import write_outcome
from jettison.server.batches.records import Batch, BatchError, Result, Status, StoredFile, error_line
from jettison.server.batches.settings import BatchSettings
from jettison.server.batches.store import Store
from jettison.server.batches.window import Forecast
from jettison.server.endpoint import GenerationEndpoint
from jettison.server.state import ServerState

logger = logging.getLogger(__name__)

MAX_CHECKS = 2
"""Most processes that check lines at one time, so that a small batch need not wait for a large one."""
MAX_ERRORS_SHOWN = 100
READ_AHEAD = 16
READ_AHEAD_BYTES = 256 << 10
"""Limits of lines that are read and parsed at one time, in a thread: their number, and their bytes (or one larger
line)."""
_VERDICT_BYTES = 64 << 20
TOO_LATE_TO_RUN = BatchError(
    code="batch_expired", message="The completion window ended while lines were being validated: ask for a longer one.")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that all runs of a server share."""

    state: ServerState
    settings: BatchSettings
    store: Store
    call: Callable[..., Any]
    """``await call(store.method, ...)`` runs a method in the store's thread."""
    window: Window
    results: ResultWriter
    computer: Computer
    forecast: Forecast
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CHECKS))
    finalizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class BatchRun:
    """Takes one batch to its end; ``end`` ends it early. If cancelled, it leaves the batch to the next start."""

    def __init__(self, batch: Batch, tools: Tools) -> None:
        self.batch = batch
        self._tools = tools
        self._ends_as: Status | None = None
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until the batch is over, or the server."""
        await self._until_ended(self._validate, Status.VALIDATING)
        await self._until_ended(self._feed, Status.IN_PROGRESS)
        await self._tools.results.flushed()
        await self._finish()

    def end(self, ends_as: Status) -> None:
        """Stop work on a cancelled or expired batch, and keep its results."""
        if self._ends_as is None:
            self._ends_as = ends_as
            if self._work is not None:
                self._work.cancel()

    async def _until_ended(self, work: Callable[[], Coroutine[Any, Any, None]], status: Status) -> None:
        if self.batch.status is not status or self._ends_as is not None:
            return
        self._work = asyncio.create_task(work(), name=f"jettison-{self.batch.id}")
        try:
            await asyncio.wait({self._work})
        except asyncio.CancelledError:  # the server ends
            self._work.cancel()
            await asyncio.wait({self._work})
            raise
        if not self._work.cancelled():
            self._work.result()

    async def _change(self, change: Callable[[Batch], Batch]) -> None:
        self.batch = await self._tools.call(self._tools.store.change, self.batch.seq, change)

    # --- validating

    async def _validate(self) -> None:
        async with self._tools.checking:
            await self._check_lines()

    async def _check_lines(self) -> None:
        errors: list[BatchError] = []
        async with aclosing(self._verdicts()) as verdicts:
            async for verdict in verdicts:
                errors += verdict.bad_lines[: MAX_ERRORS_SHOWN - len(errors)]
                for result in verdict.results:
                    await self._tools.results.put(self.batch.seq, result)
                if verdict.is_last:
                    await self._tools.results.flushed()
                    await self._judge(verdict, errors)
                    return
        raise RuntimeError("the check of a batch's lines ended without a verdict")

    async def _verdicts(self) -> AsyncGenerator[Verdict, None]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jettison.server.batches.check_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_VERDICT_BYTES,
            env=child_environment())
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(self._check_job()) + b"\n")
            process.stdin.close()
            while told := await process.stdout.readline():
                yield msgspec.json.decode(told, type=Verdict)
        finally:
            if process.returncode is None:
                process.kill()
            await _over(process)

    def _check_job(self) -> Job:
        info, settings = self._tools.state.engine.info, self._tools.state.settings
        return Job(
            path=str(self._tools.store.path_of(self.batch.input_file_id)), endpoint=self.batch.endpoint,
            tokenizer_dir=str(self._tools.settings.tokenizer_dir), byte_tokens=self._tools.settings.byte_tokens,
            model_names=settings.model_names,
            max_model_len=info.max_model_len, max_request_tokens=info.max_offline_tokens, vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids, max_line_bytes=settings.max_body_bytes,
            max_lines=self._tools.settings.max_lines, max_choices=settings.max_choices,
            default_chat_max_tokens=settings.default_chat_max_tokens,
            default_completion_max_tokens=settings.default_completion_max_tokens,
            max_stops=settings.max_stops, max_logprobs=settings.max_logprobs,
            sampling_defaults=settings.sampling_defaults, templates=settings.templates)

    async def _judge(self, verdict: Verdict, errors: list[BatchError]) -> None:
        sizes = {
            "num_lines": verdict.num_lines, "num_runnable": verdict.num_runnable,
            "num_prompt_tokens": verdict.num_prompt_tokens, "max_output_tokens": verdict.max_output_tokens,
        }  # fmt: skip
        failure, now_s = verdict.failure, time.time()
        if failure is None:
            judged = msgspec.structs.replace(self.batch, **sizes, num_failed=verdict.num_lines - verdict.num_runnable)
            others = await self._tools.call(self._tools.store.open_batches)
            if why := self._tools.forecast.why_infeasible(judged, others, now_s):
                failure = BatchError(code="completion_window_infeasible", message=why, param="completion_window")
        if failure is None:
            await self._change(
                lambda batch: batch.to(Status.IN_PROGRESS, int(now_s), **sizes)
                if batch.status is Status.VALIDATING else batch)  # else it was cancelled meanwhile
            return
        # Where the file as a whole is invalid, the errors of its lines only follow from that.
        shown = [failure] if failure.code == "invalid_file" else [failure, *errors]
        failed = self.batch.to(Status.FAILED, int(now_s), **sizes, errors=shown)
        self.batch = await self._tools.call(self._end_unless_cancelled, failed)
        if self.batch.status is Status.FAILED:
            logger.info("%s is %s: %s", failed.id, failed.status, failure.message)

    def _end_unless_cancelled(self, failed: Batch) -> Batch:
        """Runs in the store's thread, so that no cancellation comes in between."""
        store = self._tools.store
        now = store.batch(failed.owner, failed.id)
        if now is None or now.status is not Status.VALIDATING:
            return now or failed
        store.end(failed, [])
        return failed

    # --- in progress

    async def _feed(self) -> None:
        tools = self._tools
        endpoint = ENDPOINT_OF[self.batch.endpoint](tools.state, thread_chars=0, is_offline=True)
        done = await tools.call(tools.store.done_lines, self.batch.seq)
        lines = read_lines(tools.store.path_of(self.batch.input_file_id), tools.state.settings.max_body_bytes)

        def read_some() -> list[tuple[int, Line | Result]]:
            some: list[tuple[int, Line | Result]] = []
            num_bytes = 0
            for number, raw in lines:
                if number not in done:
                    some.append((number, self._parsed(number, raw)))
                    num_bytes += len(raw or b"")
                    if len(some) == READ_AHEAD or num_bytes >= READ_AHEAD_BYTES:
                        break
            return some

        async with asyncio.TaskGroup() as running:
            while some := await asyncio.to_thread(read_some):
                for number, line in some:
                    await self._feed_one(running, endpoint, number, line)

    def _parsed(self, number: int, raw: bytes | None) -> Line | Result:
        max_bytes = self._tools.state.settings.max_body_bytes
        try:
            return parse_line(raw, self.batch.endpoint, max_bytes)
        except LineError as error:  # the server may have been restarted with other limits
            return Result(number, True, error_line(error.custom_id, error.at(number)))

    async def _feed_one(
        self, running: asyncio.TaskGroup, endpoint: GenerationEndpoint, number: int, line: Line | Result
    ) -> None:
        tools, batch = self._tools, self.batch
        tenant = tools.state.keys.tenant_of(batch.owner)
        prepared = line if isinstance(line, Result) else await tools.computer.prepare(endpoint, number, line, tenant)
        if isinstance(prepared, Result):
            await tools.results.put(batch.seq, prepared)
            return
        assert isinstance(line, Line)
        num_places = prepared.num_choices
        await tools.window.take(batch.owner, batch.expires_at, batch.seq, num_places)
        running.create_task(self._compute(endpoint, number, line, prepared, num_places))

    async def _compute(
        self, endpoint: GenerationEndpoint, number: int, line: Line, prepared: Prepared, num_places: int
    ) -> None:
        tools, batch = self._tools, self.batch
        try:
            tenant = tools.state.keys.tenant_of(batch.owner)
            result = await tools.computer.compute(endpoint, number, line, prepared, tenant, batch.expires_at)
            if result is not None:
                await tools.results.put(batch.seq, result)
        finally:
            tools.window.give_back(batch.owner, num_places)

    # --- the end

    async def _finish(self) -> None:
        store, settings = self._tools.store, self._tools.state.settings
        await self._change(self._with_outcome_begun)
        ends_as, now_s = self._outcome(), int(time.time())
        if ends_as is None:
            return
        files: list[StoredFile] = []
        if Status.IN_PROGRESS in self.batch.reached_at:
            async with self._tools.finalizing:
                files = await asyncio.to_thread(
                    write_outcome, store, self.batch, ends_as, now_s, settings.max_body_bytes)
        ids = {file.is_of_errors: file.id for file in files}
        errors = self.batch.errors if ends_as is not Status.FAILED else [TOO_LATE_TO_RUN]
        over = self.batch.to(
            ends_as, now_s, output_file_id=ids.get(False), error_file_id=ids.get(True), errors=errors)
        await self._tools.call(store.end, over, files)
        self.batch = over
        logger.info("%s is %s", over.id, over.status)

    def _with_outcome_begun(self, batch: Batch) -> Batch:
        """Runs in the store's thread: takes the counts as they are, and ends the time in which the batch can be
        cancelled."""
        is_done = batch.num_done == batch.num_lines or self._is_late(batch)
        if batch.status is Status.IN_PROGRESS and is_done:
            return batch.to(Status.FINALIZING, int(time.time()))
        return batch

    def _is_late(self, batch: Batch) -> bool:
        return self._ends_as is Status.EXPIRED or time.time() >= batch.expires_at

    def _outcome(self) -> Status | None:
        """The final status of the batch; None where it is over already, or continues after the next start."""
        match self.batch.status:
            case Status.CANCELLING:
                return Status.CANCELLED
            case Status.FINALIZING:
                return Status.COMPLETED if self.batch.num_done == self.batch.num_lines else Status.EXPIRED
            case Status.VALIDATING if self._is_late(self.batch):
                return Status.FAILED
            case _:
                return None


async def _over(process: asyncio.subprocess.Process) -> None:
    """A process that was killed, or ends by itself, is over, and its pipes are closed. A cancellation counts once that
    is so: half-way it would leave both to the garbage collector."""
    ending, cancelled = asyncio.create_task(process.communicate()), None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
