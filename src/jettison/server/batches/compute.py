"""One line through the engine, from its body to its result. A line that is cut off by the server's end has none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from starlette.types import Message

from jettison.errors import NotReadyError, OverCapacityError
from jettison.live.engine.api import TokenEvent
from jettison.server.batches.lines import Line
from jettison.server.batches.patience import AGAIN_S, prepared_patiently
from jettison.server.batches.records import BatchError, Result, error_line, new_id, output_line
from jettison.server.choice import Delta
from jettison.server.compiling import TENANT
from jettison.server.endpoint import GenerationEndpoint, WireAnswer
from jettison.server.errors import ApiError, as_api_error
from jettison.server.generation import Job
from jettison.server.prompts import Prompt
from jettison.server.sampling import GenerationPlan
from jettison.server.state import ServerState
from jettison.types import NANOSECONDS

MAX_ATTEMPTS = 3
"""Most attempts at a line that fails while the engine can serve."""


class Prepared:
    """A line ready to be submitted."""

    def __init__(self, plan: GenerationPlan, prompts: list[Prompt], answer: WireAnswer) -> None:
        self.plan, self.prompts, self.answer = plan, prompts, answer

    @property
    def num_choices(self) -> int:
        """Places that the line takes in the window."""
        return len(self.prompts) * self.plan.num_samples


class Computer:
    """Computes lines as offline requests; reports tokens to ``note_tokens`` as they come, and lengths to
    ``note_answer``."""

    def __init__(
        self, state: ServerState, note_tokens: Callable[[int], None], note_answer: Callable[[int], None]
    ) -> None:
        self._state = state
        self._note_tokens = note_tokens
        self._note_answer = note_answer
        self._clock_ns = time.monotonic_ns() - time.time_ns()
        """Monotonic minus wall clock, read once, so that all lines of a batch have the same deadline to the nanosecond;
        else their deadlines would order them."""

    async def prepare(
        self, endpoint: GenerationEndpoint, number: int, line: Line, tenant: str
    ) -> Prepared | Result:
        """Check a line again and prepare it, as the server may have been restarted with another model. A result: the
        line cannot run."""
        TENANT.set(tenant)
        try:
            plan, prompts, answer = await prepared_patiently(endpoint, line.body)
            return Prepared(replace(plan, wants_offline=True), prompts, answer)
        except Exception as error:  # noqa: BLE001  # as in ``compute``
            return _failed(number, line.custom_id, as_api_error(error))

    async def compute(
        self, endpoint: GenerationEndpoint, number: int, line: Line, prepared: Prepared, tenant: str, expires_at: int
    ) -> Result | None:
        """The line's result; None where the server ends first. Cancelling this task cancels the line's requests."""
        num_failed = 0
        while True:
            try:
                return await self._attempt(endpoint, number, line, prepared, tenant, expires_at)
            except NotReadyError:
                return None
            except OverCapacityError as error:
                await asyncio.sleep(error.retry_after_ms / 1e3)
            except Exception as error:  # noqa: BLE001  # as_api_error logs what is not expected
                if self._state.status != "ready":
                    return None
                told = as_api_error(error)
                num_failed += self._can_serve  # an outage is not the line's fault
                if told.status < 500 or num_failed == MAX_ATTEMPTS:
                    return _failed(number, line.custom_id, told)
                await asyncio.sleep(AGAIN_S)
            again = await self.prepare(endpoint, number, line, tenant)  # a new answer: the old one has collected text
            if isinstance(again, Result):
                return again
            prepared = again

    def deadline_ns(self, expires_at: int) -> int:
        """The deadline on the engine's clock, from a second of the wall clock."""
        return expires_at * NANOSECONDS + self._clock_ns

    @property
    def _can_serve(self) -> bool:
        """Whether there is a group of workers."""
        return bool(self._state.engine.snapshot().groups)

    async def _attempt(
        self, endpoint: GenerationEndpoint, number: int, line: Line, prepared: Prepared, tenant: str, expires_at: int
    ) -> Result:
        deadline_ns = self.deadline_ns(expires_at)
        generation = endpoint.generation(prepared.plan, prepared.prompts, time.monotonic_ns(), tenant, deadline_ns)
        generation.names = (prepared.answer.id, line.custom_id)

        async def keep(job: Job, event: TokenEvent, delta: Delta) -> None:
            is_first = job.num_events == 0 and job.is_first_sample
            self._note_tokens(len(delta.token_ids) + (len(job.prompt.token_ids) if is_first else 0))
            prepared.answer.collect(job, event, delta)

        self._state.lines.add(generation)
        try:
            generation.submit()
            await generation.run(_silence, keep)
        finally:
            self._state.lines.discard(generation)
        self._note_answer(generation.num_output_tokens)
        answer = await prepared.answer.encoded(generation)
        return Result(number, False, output_line(line.custom_id, new_id("req_"), answer))


def _failed(number: int, custom_id: str, error: ApiError) -> Result:
    told = BatchError(code=error.code or "server_error", message=error.message, line=number, param=error.param)
    return Result(number, True, error_line(custom_id, told, error.status, error.body))


async def _silence() -> Message:
    """ASGI's ``receive`` of a client that never leaves."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
