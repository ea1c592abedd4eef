"""Compiles constraints before their requests reach the engine: apart from the server, and each of them once.

A child process compiles (``compile_process``). What takes it more than a second or its memory, or ends it, is refused;
the next constraint gets a new one. A front end apart from the engine takes this along as it is: what travels to the
engine is the grammar's text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive

from jettison.live.machine.environment import child_environment
from jettison.server.compile_jobs import Compiled, Job, Setting
from jettison.server.errors import ApiError, bad_request, retry_headers
from jettison.server.structured import Constraint

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 18
"""Of a constraint: schemas of agents with a hundred tools have half of that."""
MAX_COMPILE_S = 0.8
"""Of the processor, for one constraint: with what its answer takes well under a second, and the same on a machine that
is busy."""
MAX_WAIT_S = 30.0
"""For the answer, however busy the machine is."""
MAX_START_S = 30.0
MAX_MEMORY_BYTES = 48 << 20
"""Beyond what a fresh child has; with what that has, under 64 MiB more than before."""
MAX_CACHE_BYTES = 16 << 20
MAX_WAITING, MAX_OF_A_TENANT = 256, 64
"""Constraints that wait for the child, of all tenants, and of one where there are several; another one is asked to
come again."""
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose request is being prepared: tenants take turns at the child, so that one with constraints that take long does
not make the others wait for all of them."""
RECEIVE: ContextVar[Receive | None] = ContextVar("receive", default=None)
"""ASGI's ``receive`` of that request, whose body is read: a request whose client leaves waits no longer. None: the
client cannot leave."""
_KEPT_BYTES = 256
"""What an entry of the cache takes beside its text."""


_OWN_ENDS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, 0)
"""What ends a child by its constraint: its time is up, or its memory or stack. (0: it has given up itself.) Any other
signal came from outside."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A constraint that is compiled, or waits for it in the queue of each tenant that asks for it."""

    key: bytes
    constraint: Constraint
    made: asyncio.Future[Compiled]
    num_asking: Counter[str] = field(default_factory=Counter)
    """Requests that wait for it, by tenant."""
    has_begun: bool = False


class GrammarCompiler:
    """Of one server, for one tokenizer. The child is started with the first constraint."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = dict(special_tokens)
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._num_cached_bytes = 0
        self._under_way: dict[bytes, _Waiting] = {}
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """What waits, by tenant, never empty; the tenant whose turn is next is the first. What several tenants ask for
        is in the queue of each, and goes with the first turn of any."""
        self._running: asyncio.Future[Compiled] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._child: _Child | None = None
        self._lock = threading.Lock()

    async def compiled(self, constraint: Constraint) -> str:
        """The grammar's text. Raises ApiError 400 that names the constraint's field and says why in one line, and 503
        where the compiling process cannot be had or asked now."""
        num_bytes = len(constraint.text.encode()) + len((constraint.whitespace_pattern or "").encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise _refused(constraint, f"it has {num_bytes} bytes, and may have {MAX_TEXT_BYTES}")
        key = _key(constraint)
        found = self._cache.get(key)
        if found is None:
            found = await self._compile(key, constraint)
        else:
            self._cache.move_to_end(key)
        if found.error is not None:
            raise _refused(constraint, found.error)
        return found.grammar

    async def _compile(self, key: bytes, constraint: Constraint) -> Compiled:
        """In its tenant's turn; requests with the same constraint wait for one compilation."""
        tenant = TENANT.get()
        waiting = self._under_way.get(key)
        if waiting is None or not (waiting.has_begun or tenant in waiting.num_asking):
            num_queued = len(self._queues.get(tenant, ()))
            is_full = waiting is None and len(self._under_way) >= MAX_WAITING
            if is_full or (tenant and num_queued >= MAX_OF_A_TENANT):
                raise _not_now("Too many constraints wait to be compiled.")
        if waiting is None:
            waiting = _Waiting(key, constraint, asyncio.get_running_loop().create_future())
            self._under_way[key] = waiting
            waiting.made.add_done_callback(partial(self._end, waiting))
        if not (waiting.has_begun or tenant in waiting.num_asking):
            self._queues.setdefault(tenant, deque()).append(waiting)
        waiting.num_asking[tenant] += 1
        self._begin_next()
        try:
            return await _unless_client_leaves(waiting.made)
        finally:
            waiting.num_asking[tenant] -= 1
            if not waiting.num_asking[tenant]:
                self._leave(waiting, tenant)

    def _leave(self, waiting: _Waiting, tenant: str) -> None:
        """No request of this tenant waits for it any more. What none waits for is not begun."""
        del waiting.num_asking[tenant]
        if waiting.has_begun:
            return
        self._take_out(waiting, tenant)
        if not waiting.num_asking:
            self._forget(waiting)
            if _is_under_way(waiting.made):
                waiting.made.cancel()

    def _take_out(self, waiting: _Waiting, tenant: str) -> None:
        queue = self._queues.get(tenant, deque())
        if waiting in queue:  # else the compiler was closed meanwhile
            queue.remove(waiting)
            if not queue:
                del self._queues[tenant]

    def _forget(self, waiting: _Waiting) -> None:
        """Later requests with this constraint do not join it."""
        if self._under_way.get(waiting.key) is waiting:
            del self._under_way[waiting.key]

    def _begin_next(self) -> None:
        """Have the thread compile for the tenant whose turn it is, unless it does already."""
        if _is_under_way(self._running):
            return
        while self._queues:
            tenant = next(iter(self._queues))
            self._queues.move_to_end(tenant)
            waiting = self._queues[tenant][0]
            waiting.has_begun = True
            for asking in waiting.num_asking:
                self._take_out(waiting, asking)
            if _is_under_way(waiting.made):
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiling")
                loop = asyncio.get_running_loop()
                self._running = asyncio.ensure_future(loop.run_in_executor(self._thread, self._ask, waiting.constraint))
                self._running.add_done_callback(partial(self._hand_over, waiting.made))
                return

    def _hand_over(self, made: asyncio.Future[Compiled], running: asyncio.Future[Compiled]) -> None:
        if running.cancelled() or made.done():
            made.cancel()
        elif (error := running.exception()) is not None:
            made.set_exception(error)
        else:
            made.set_result(running.result())
        self._begin_next()

    def _end(self, waiting: _Waiting, made: asyncio.Future[Compiled]) -> None:
        """Keep what has been found, also where the client that asked for it has gone."""
        self._forget(waiting)
        if not made.cancelled() and made.exception() is None:
            self._keep(waiting.key, made.result())

    def _keep(self, key: bytes, found: Compiled) -> None:
        if key in self._cache:
            return
        self._cache[key] = found
        self._num_cached_bytes += _size(found)
        while self._num_cached_bytes > MAX_CACHE_BYTES:
            _, old = self._cache.popitem(last=False)
            self._num_cached_bytes -= _size(old)

    def _ask(self, constraint: Constraint) -> Compiled:
        """Have the child compile. On the compiler's own thread. Raises ApiError 503 where it could not, for a reason
        that may not be the constraint's."""
        with self._lock:
            if self._child is not None and self._child.has_ended:  # while it had nothing to do
                self._child.close()
                self._child = None
            if self._child is None:
                self._child = self._started()
            job = Job(kind=constraint.kind, text=constraint.text, white_space=constraint.whitespace_pattern)
            try:
                return self._child.ask(job)
            except (OSError, TimeoutError, msgspec.DecodeError) as error:
                by_itself = self._child.has_ended
                ended_by = self._child.ended_by
                self._child.close()
                self._child = None
                logger.warning("a %s constraint was given up: %s", constraint.kind, error)
                if not by_itself or ended_by not in _OWN_ENDS:
                    raise _not_now("The constraint could not be compiled now.") from None
                is_late = ended_by == signal.SIGPROF
                bound = f"{MAX_COMPILE_S} s" if is_late else f"the {MAX_MEMORY_BYTES >> 20} MiB that there are for one"
                return Compiled(error=f"compiling it takes more than {bound}")

    def _started(self) -> _Child:
        try:
            return _Child(self._special_tokens)
        except (OSError, TimeoutError) as error:
            logger.error("the compiling process cannot be started: %s", error)
            raise _not_now("The constraint could not be compiled now.") from None

    def close(self) -> None:
        """End the child. Idempotent; a later constraint starts a new one."""
        left = [waiting for queue in self._queues.values() for waiting in queue]
        self._queues.clear()
        for waiting in left:
            if _is_under_way(waiting.made):
                waiting.made.cancel()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.close()


class _Child:
    """The process, and one question at a time."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """Starts it, and waits until it has what it needs. Raises OSError, TimeoutError."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jettison.server.compile_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env=child_environment(),
        )  # fmt: skip
        setting = Setting(
            special_tokens=dict(special_tokens), memory_bytes=MAX_MEMORY_BYTES, cpu_s=MAX_COMPILE_S)
        try:
            self._line(msgspec.json.encode(setting), MAX_START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, job: Job) -> Compiled:
        """Its answer. Raises OSError where it has ended, TimeoutError where it takes too long."""
        return msgspec.json.decode(self._line(msgspec.json.encode(job), MAX_WAIT_S), type=Compiled)

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self._process.poll() is not None

    @property
    def ended_by(self) -> int:
        """The signal that ended it; 0: none has."""
        return -min(0, self._process.returncode or 0)

    def _line(self, data: bytes, most_s: float) -> bytes:
        """Send a line, and wait for one."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        end_s = time.monotonic() + most_s
        view = memoryview(data + b"\n")
        while view:
            view = view[process.stdin.write(view) :]
        answer = b""
        while not answer.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not _can_be_read(process.stdout.fileno(), left_s):
                raise TimeoutError(f"no answer in {most_s} s")
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                raise OSError(f"the compiling process has ended ({process.wait()})")
            answer += piece
        return answer[:-1]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with self._process:
            pass


async def _unless_client_leaves(made: asyncio.Future[Compiled]) -> Compiled:
    """What is made. Raises ApiError 499 where the client that asks for it leaves before."""
    receive = RECEIVE.get()
    if receive is None:
        return await asyncio.shield(made)
    leaving = asyncio.ensure_future(_client_left(receive))
    try:
        both: set[asyncio.Future[Any]] = {made, leaving}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        leaving.result()
        raise ApiError(499, "The client went away.", code="client_disconnected")
    finally:
        leaving.cancel()


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_under_way(future: asyncio.Future[Compiled] | None) -> bool:
    """Whether it will end: one of a loop that is closed does not."""
    return future is not None and not future.done() and not future.get_loop().is_closed()


def _can_be_read(descriptor: int, most_s: float) -> bool:
    """Also where it is beyond the 1,024 that ``select`` knows."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(most_s))


def _not_now(why: str) -> ApiError:
    return ApiError(503, why, code="not_ready", headers=retry_headers(1000))


def _key(constraint: Constraint) -> bytes:
    parts = constraint.kind, constraint.whitespace_pattern, constraint.text
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def _size(compiled: Compiled) -> int:
    return _KEPT_BYTES + 4 * len(compiled.grammar) + len(compiled.error or "")


def _refused(constraint: Constraint, why: str) -> ApiError:
    return bad_request(f"{constraint.param}: {why}.", constraint.param, "invalid_grammar")
