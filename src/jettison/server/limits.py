"""Bounds on the memory and work that clients cause: bodies while they are read, requests before they are queued, side
work.

Side work (tokenizer requests: /tokenize, /detokenize, /v1/messages/count_tokens) has limits of its own: it never takes
a place in the queue of generating requests, a flood of it costs generation two threads and a quarter of the bytes for
bodies at most, and where there are several tenants, none takes more of its places and bytes than it leaves.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from jettison.errors import KeyLimitError, OverCapacityError
from jettison.live.engine.api import EngineClient
from jettison.policy.refusal import predicted_end_s, retry_after_ms, why_never_in_share, why_over_share
from jettison.server.bodies import CLOSE, body_too_large, discard_body
from jettison.server.errors import ApiError, bad_request
from jettison.server.settings import ServerSettings

MEAN_OF_LAST = 10
"""A tenant's mean request time is over about so many of its last requests."""


class Admission:
    """Counts requests from the moment they arrive, and the bytes of their bodies until they are submitted."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.num_active = 0
        """Generating HTTP requests, from arrival to the last byte of their answer."""
        self.num_arriving = 0
        """Requests of these that have come with their bodies and are not submitted to the engine yet. One whose body
        is on its way does not count: a client that never sends it would take a place of the queue from every key."""
        self.side = SideWork(self, settings)
        self._shares: defaultdict[str, Share] = defaultdict(Share)
        """Shares by tenant; as many as there are keys."""
        self._num_buffered_bytes = 0

    @property
    def num_choices(self) -> int:
        """Places that requests hold, of all tenants."""
        return sum(share.num_choices for share in self._shares.values())

    @property
    def num_side_jobs(self) -> int:
        """Tokenizer requests in the server."""
        return self.side.num_jobs.total()

    @contextmanager
    def arrival(self, tenant: str) -> Iterator[Arrival]:
        """Count one request in, as one choice at first. Raises KeyLimitError when the tenant's share is used up.
        However the request ends, its places are given back once, here.
        """
        arrival = self.arrival_of(tenant)
        arrival.claim(1)
        try:
            self.num_active += 1
            try:
                yield arrival
            finally:
                arrival.submitted()
                self.num_active -= 1
        finally:
            arrival.give_back()

    @contextmanager
    def returned(self, tenant: str, num_choices: int) -> Iterator[Arrival]:
        """Count in a request that another process let in and that has been accepted: no limit is held against it."""
        arrival = self.arrival_of(tenant)
        arrival.take(num_choices)
        arrival.accepted()
        self.num_active += 1
        try:
            yield arrival
        finally:
            arrival.submitted()  # its body may have come here
            self.num_active -= 1
            arrival.give_back()

    def arrival_of(self, tenant: str) -> Arrival:
        """A new one."""
        return Arrival(self, self._settings, tenant)

    def share(self, tenant: str) -> Share:
        """The places of a tenant's requests."""
        return self._shares[tenant]

    def check_queue(self, tenant: str) -> None:
        """Raises OverCapacityError where the queue takes no other request of this tenant."""
        self._engine.check_queue(tenant, self.num_arriving)

    def hold(self, num_bytes: int) -> None:
        """Count buffered bytes in. Raises OverCapacityError."""
        if self._num_buffered_bytes + num_bytes > self._settings.max_buffered_bytes:
            raise OverCapacityError("Too many request bodies are being read; retry later.")
        self._num_buffered_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count buffered bytes out."""
        self._num_buffered_bytes -= num_bytes


class SideWork:
    """Counts tokenizer requests, and the bytes of their bodies, by tenant."""

    def __init__(self, admission: Admission, settings: ServerSettings) -> None:
        self._admission = admission
        self._settings = settings
        self._turn = asyncio.Semaphore(settings.max_running_side_jobs)
        self.num_jobs: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        """Of bodies that are buffered."""

    @asynccontextmanager
    async def job(self, tenant: str, *, reads_chats: bool = False) -> AsyncIterator[SideJob]:
        """Count one tokenizer request in. ``reads_chats``: its body may be as long as that of the chat whose tokens it
        counts. Raises OverCapacityError when there are too many already."""
        why = "tokenizer requests are being worked on; retry later."
        if self.num_jobs.total() >= self._settings.max_side_jobs:
            raise OverCapacityError(f"{self.num_jobs.total()} {why}")
        if _is_over_share(self.num_jobs, tenant, 1, self._settings.max_side_jobs):
            raise KeyLimitError(f"{self.num_jobs[tenant]} of this key's {why}")
        job = SideJob(self, self._settings, self._turn, tenant, reads_chats)
        self.num_jobs[tenant] += 1
        try:
            yield job
        finally:
            job.release()
            _count_out(self.num_jobs, tenant, 1)

    def hold(self, tenant: str, num_bytes: int, num_held: int) -> None:
        """Count buffered bytes of a body in, of which ``num_held`` are counted. Raises OverCapacityError."""
        most = self._settings.max_side_buffered_bytes
        is_alone = self.num_bytes.total() == num_held
        if not is_alone and self.num_bytes.total() + num_bytes > most:
            raise OverCapacityError("Too many bodies of tokenizer requests are being read; retry later.")
        if not is_alone and _is_over_share(self.num_bytes, tenant, num_bytes, most):
            raise KeyLimitError("Too many bodies of this key's tokenizer requests are being read; retry later.")
        self._admission.hold(num_bytes)
        self.num_bytes[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        """Count buffered bytes out."""
        self._admission.release(num_bytes)
        _count_out(self.num_bytes, tenant, num_bytes)


def _is_over_share(held: Counter[str], tenant: str, num_more: int, most: int) -> bool:
    """Whether a tenant, one of several, that holds some would hold more than it leaves free: one of them alone gets a
    half, two a third each, and a newcomer always finds room."""
    return bool(tenant and held[tenant]) and held[tenant] + num_more > most - held.total() - num_more


def _count_out(held: Counter[str], tenant: str, number: int) -> None:
    held[tenant] -= number
    if not held[tenant]:
        del held[tenant]


class _Body(ABC):
    """One request's body, counted until ``release``."""

    def __init__(self, settings: ServerSettings, max_bytes: int) -> None:
        self._settings = settings
        self._max_bytes = max_bytes
        self._num_held_bytes = 0

    def release(self) -> None:
        """Count the body out, as it is no longer needed. Idempotent."""
        self._release(self._num_held_bytes)
        self._num_held_bytes = 0

    @abstractmethod
    def _hold(self, num_bytes: int) -> None:
        """Count bytes in. Raises OverCapacityError."""

    @abstractmethod
    def _release(self, num_bytes: int) -> None:
        """Count bytes out."""

    async def read_body(self, receive: Receive) -> bytes:
        """The whole body; its limit is enforced while it arrives. Raises ApiError, OverCapacityError."""
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
                    self._hold(len(chunk))
                    self._num_held_bytes += len(chunk)
                    chunks.append(chunk)
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            message_text = f"The request body did not arrive within {settings.body_timeout_s:g} s."
            raise ApiError(408, message_text, code="request_timeout", headers=CLOSE) from None


class Arrival(_Body):
    """One generating request on its way from the socket to the engine."""

    def __init__(self, admission: Admission, settings: ServerSettings, tenant: str) -> None:
        super().__init__(settings, settings.max_body_bytes)
        self._admission = admission
        self._tenant = tenant
        self._limit = settings.max_active_reqs_per_key
        self._share = admission.share(tenant)
        self._num_choices = 0
        """Places of its tenant that the request holds."""
        self._why_full: OverCapacityError | None = None
        """The error, if the queue of online requests was full when it was last looked at."""
        self._is_arriving = False
        self._is_accepted = False

    def _hold(self, num_bytes: int) -> None:
        self._admission.hold(num_bytes)

    def _release(self, num_bytes: int) -> None:
        self._admission.release(num_bytes)

    def look(self) -> None:
        """Note whether the queue is full."""
        self._why_full = None
        try:
            self._admission.check_queue(self._tenant)
        except OverCapacityError as error:
            self._why_full = error

    def come(self) -> None:
        """Its body has come: count the request as on its way to the queue, unless the queue is full. Idempotent."""
        if self._is_arriving:
            return
        self.look()
        if self._why_full is None:
            self._is_arriving = True
            self._admission.num_arriving += 1

    @property
    def num_beside(self) -> int:
        """Other generating requests in the server."""
        return self._admission.num_active - 1

    async def let_in(self) -> None:
        """Returns once it may be read; at once where the limits are this process's. Raises KeyLimitError,
        NotReadyError."""

    async def claimed(self, num_choices: int, param: str) -> None:
        """``claim``, wherever the limits are."""
        self.claim(num_choices, param)

    def check_queue(self, *, is_offline: bool) -> None:
        """Raises OverCapacityError for an online request if the queue was full. Offline requests always queue; the
        limits of keys and of connections bound their number."""
        if self._why_full is not None and not is_offline:
            raise self._why_full

    def claim(self, num_choices: int, param: str = "n") -> None:
        """Take places for all of its ``num_choices`` choices that have none yet, all or none. Raises KeyLimitError, and
        ApiError 400 that names ``param`` where they could never fit.
        """
        why_never = why_never_in_share(num_choices, self._limit)
        if why_never is not None:
            raise bad_request(why_never, param)
        share, now_s = self._share, time.monotonic()
        why_not = why_over_share(share.num_choices - self._num_choices, num_choices, self._limit)
        if why_not is not None:
            raise KeyLimitError(why_not, retry_after_ms(share.predicted_end_s(now_s, besides=self)))
        self.take(num_choices)

    def take(self, num_choices: int) -> None:
        """Have places for so many choices."""
        self._share.num_choices += num_choices - self._num_choices
        self._share.arrived_s.setdefault(self, time.monotonic())
        self._num_choices = num_choices

    def give_back(self) -> None:
        """Give its places back, as it is over. Idempotent."""
        self._share.num_choices -= self._num_choices
        self._num_choices = 0
        arrived_s = self._share.arrived_s.pop(self, None)
        if arrived_s is not None and self._is_accepted:
            self._share.note_took(time.monotonic() - arrived_s)

    def accepted(self) -> None:
        """The engine has accepted it."""
        self._is_accepted = True
        self.submitted()

    def submitted(self) -> None:
        """The engine has accepted or refused it. Idempotent."""
        if self._is_arriving:
            self._is_arriving = False
            self._admission.num_arriving -= 1
        self.release()


class Share:
    """The requests of one tenant under way."""

    def __init__(self) -> None:
        self.num_choices = 0
        self.arrived_s: dict[Arrival, float] = {}
        """Arrival of each of its requests on the monotonic clock, in order."""
        self._mean_s: float | None = None
        """Mean time of its last requests."""

    def note_took(self, seconds: float) -> None:
        """Note the time of a finished request."""
        self._mean_s = seconds if self._mean_s is None else self._mean_s + (seconds - self._mean_s) / MEAN_OF_LAST

    def predicted_end_s(self, now_s: float, besides: Arrival) -> float:
        """Predicted seconds until its earliest request ends, without ``besides``."""
        earliest_s = next((at_s for arrival, at_s in self.arrived_s.items() if arrival is not besides), now_s)
        return predicted_end_s(now_s - earliest_s, self._mean_s)


class SideJob(_Body):
    """One tokenizer request."""

    def __init__(
        self, work: SideWork, settings: ServerSettings, turn: asyncio.Semaphore, tenant: str, reads_chats: bool
    ) -> None:
        most = settings.max_body_bytes
        super().__init__(settings, most if reads_chats else min(most, settings.max_side_body_bytes))
        self._work = work
        self._tenant = tenant
        self.turn = turn
        """Held while it works, not while its body arrives."""

    def _hold(self, num_bytes: int) -> None:
        self._work.hold(self._tenant, num_bytes, self._num_held_bytes)

    def _release(self, num_bytes: int) -> None:
        self._work.release(self._tenant, num_bytes)
