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
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from jettison.server.compile_process import Compiled, Job, Setting
from jettison.server.errors import ApiError, bad_request
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
_KEPT_BYTES = 256
"""What an entry of the cache takes beside its text."""


class GrammarCompiler:
    """Of one server, for one tokenizer. The child is started with the first constraint."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = dict(special_tokens)
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._num_cached_bytes = 0
        self._under_way: dict[bytes, asyncio.Future[Compiled]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._child: _Child | None = None
        self._lock = threading.Lock()

    async def compiled(self, constraint: Constraint) -> str:
        """The grammar's text. Raises ApiError 400 that names the constraint's field and says why in one line."""
        num_bytes = len(constraint.text.encode())
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
        """On a thread that waits for the child; requests with the same constraint wait for one compilation."""
        under_way = self._under_way.get(key)
        if under_way is not None:
            return await asyncio.shield(under_way)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiling")
        loop = asyncio.get_running_loop()
        made = self._under_way[key] = asyncio.ensure_future(loop.run_in_executor(self._thread, self._ask, constraint))
        try:
            found = await asyncio.shield(made)
        finally:
            self._under_way.pop(key, None)
        self._keep(key, found)
        return found

    def _keep(self, key: bytes, found: Compiled) -> None:
        if key in self._cache:
            return
        self._cache[key] = found
        self._num_cached_bytes += _size(found)
        while self._num_cached_bytes > MAX_CACHE_BYTES:
            _, old = self._cache.popitem(last=False)
            self._num_cached_bytes -= _size(old)

    def _ask(self, constraint: Constraint) -> Compiled:
        """Have the child compile. On the compiler's own thread."""
        with self._lock:
            if self._child is not None and self._child.has_ended:  # while it had nothing to do
                self._child.close()
                self._child = None
            if self._child is None:
                self._child = _Child(self._special_tokens)
            job = Job(kind=constraint.kind, text=constraint.text, white_space=constraint.whitespace_pattern)
            try:
                return self._child.ask(job)
            except (OSError, TimeoutError, msgspec.DecodeError) as error:
                self._child.close()
                late = isinstance(error, TimeoutError) or self._child.ended_by == signal.SIGPROF
                self._child = None
                logger.warning("a %s constraint was given up: %s", constraint.kind, error)
                bound = f"{MAX_COMPILE_S} s" if late else f"the {MAX_MEMORY_BYTES >> 20} MiB that there are for one"
                return Compiled(error=f"compiling it takes more than {bound}")

    def close(self) -> None:
        """End the child. Idempotent; a later constraint starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.close()


class _Child:
    """The process, and one question at a time."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """Starts it, and waits until it has what it needs. Raises OSError, TimeoutError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jettison.server.compile_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
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
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
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


def _key(constraint: Constraint) -> bytes:
    parts = constraint.kind, constraint.whitespace_pattern, constraint.text
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def _size(compiled: Compiled) -> int:
    return _KEPT_BYTES + 4 * len(compiled.grammar) + len(compiled.error or "")


def _refused(constraint: Constraint, why: str) -> ApiError:
    return bad_request(f"{constraint.param}: {why}.", constraint.param, "invalid_grammar")
