"""How much a client may make us hold: bodies while they are read, requests before they are queued, side work.

Side work (/tokenize, /detokenize) has limits of its own: it never takes a place in the queue of generating requests,
and a flood of it costs generation two threads at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from jettison.errors import KeyLimitError, OverCapacityError
from jettison.live.api import EngineClient
from jettison.server.errors import ApiError
from jettison.server.settings import ServerSettings

DISCARD_LIMIT_BYTES = 32 << 20
DISCARD_LIMIT_S = 2.0

CLOSE = {"connection": "close"}


def body_too_large(max_bytes: int) -> ApiError:
    """413. The connection is closed: what follows on it is the rest of the body."""
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large", headers=CLOSE)


async def discard_body(receive: Receive) -> None:
    """Read on for a moment without keeping anything, so that an honest client hears the answer to its large body."""
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_LIMIT_S):
            while num_bytes < DISCARD_LIMIT_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


class Admission:
    """Counts requests from the moment they arrive, and the bytes of their bodies until they are submitted."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.num_active = 0
        """Generating HTTP requests, from arrival to the last byte of their answer."""
        self.num_arriving = 0
        """Those not submitted to the engine yet."""
        self.num_unstarted = 0
        """Engine requests that have produced nothing yet: at least as many as wait in its queues."""
        self.num_side_jobs = 0
        """Tokenizer requests in the house."""
        self._num_active_of: Counter[str] = Counter()
        self._side_turn = asyncio.Semaphore(settings.max_running_side_jobs)
        self._num_buffered_bytes = 0

    @contextmanager
    def arrival(self, tenant: str) -> Iterator[Arrival]:
        """Count one request in. Raises OverCapacityError when the queue is full already, or KeyLimitError when the
        tenant's share is used.
        """
        limit = self._settings.max_active_reqs_per_key
        if limit is not None and self._num_active_of[tenant] >= limit:
            raise KeyLimitError(f"This key has {limit} requests under way, its limit; retry later.")
        self._check_queue()
        arrival = Arrival(self, self._settings)
        self._num_active_of[tenant] += 1
        self.num_active += 1
        self.num_arriving += 1
        try:
            yield arrival
        finally:
            arrival.submitted()
            self.num_active -= 1
            self._num_active_of[tenant] -= 1

    @asynccontextmanager
    async def side_job(self) -> AsyncIterator[SideJob]:
        """Count one tokenizer request in. Raises OverCapacityError when there are too many already."""
        if self.num_side_jobs >= self._settings.max_side_jobs:
            raise OverCapacityError(f"{self.num_side_jobs} tokenizer requests are being worked on; retry later.")
        self.num_side_jobs += 1
        job = SideJob(self, self._settings, self._side_turn)
        try:
            yield job
        finally:
            job.release()
            self.num_side_jobs -= 1

    def _check_queue(self) -> None:
        limit = self._settings.max_num_queued_reqs
        if limit is None or self.num_arriving + self.num_unstarted < limit:
            return  # the snapshot is only taken when the queue could be full
        num_waiting = sum(group.num_waiting for group in self._engine.snapshot().groups)
        if self.num_arriving + num_waiting >= limit:
            raise OverCapacityError(f"The queue is full ({limit} requests wait); retry later.")

    def hold(self, num_bytes: int) -> None:
        """Count buffered bytes in. Raises OverCapacityError."""
        if self._num_buffered_bytes + num_bytes > self._settings.max_buffered_bytes:
            raise OverCapacityError("Too many request bodies are being read; retry later.")
        self._num_buffered_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count buffered bytes out."""
        self._num_buffered_bytes -= num_bytes


class _Body:
    """One request's body, counted until ``release``."""

    def __init__(self, admission: Admission, settings: ServerSettings, max_bytes: int) -> None:
        self._admission = admission
        self._settings = settings
        self._max_bytes = max_bytes
        self._num_held_bytes = 0

    def release(self) -> None:
        """It is needed no longer. Idempotent."""
        self._admission.release(self._num_held_bytes)
        self._num_held_bytes = 0

    async def read_body(self, receive: Receive) -> bytes:
        """The whole body, its limit enforced while it comes. Raises ApiError, OverCapacityError."""
        chunks: list[bytes] = []
        num_bytes = 0
        settings = self._settings
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "The client went away.", code="client_disconnected")
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    if num_bytes > self._max_bytes:
                        chunks.clear()
                        if message.get("more_body"):
                            await discard_body(receive)
                        raise body_too_large(self._max_bytes)
                    self._admission.hold(len(chunk))
                    self._num_held_bytes += len(chunk)
                    chunks.append(chunk)
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            message_text = f"The request body did not arrive within {settings.body_timeout_s:g} s."
            raise ApiError(408, message_text, code="request_timeout", headers=CLOSE) from None


class Arrival(_Body):
    """One generating request on its way from the socket to the engine."""

    def __init__(self, admission: Admission, settings: ServerSettings) -> None:
        super().__init__(admission, settings, settings.max_body_bytes)
        self._is_arriving = True

    def submitted(self) -> None:
        """The engine has it, or it was refused. Idempotent."""
        if self._is_arriving:
            self._is_arriving = False
            self._admission.num_arriving -= 1
            self.release()


class SideJob(_Body):
    """One tokenizer request."""

    def __init__(self, admission: Admission, settings: ServerSettings, turn: asyncio.Semaphore) -> None:
        super().__init__(admission, settings, min(settings.max_body_bytes, settings.max_side_body_bytes))
        self.turn = turn
        """Held while it works, not while its body comes in."""
