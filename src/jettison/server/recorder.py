"""A trace of the server's own requests, for replay and simulation: arrivals and lengths, nothing else.

No text, no token, no id, no wall-clock time: an arrival is seconds since recording began, rounded. The only trace of
clients is which requests shared a key, where several are configured: keys are numbered as they appear. The event loop
appends a tuple; a thread writes, a few times a second. An error of the disk stops the recording and never the serving.
The file is in ``workload.traces``' own format and bounded in size: a recording is cut into numbered parts with
continuous times, and the last two are kept.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

from jettison import __version__
from jettison.errors import ConfigError
from jettison.types import NANOSECONDS
from jettison.workload.formats import CLASSES, OUR_COLUMNS, OUR_EXTRA_COLUMNS, PART, TENANT_COLUMN

logger = logging.getLogger(__name__)

ROUNDED_TO_S = 0.01
"""Resolution of arrivals: fine enough for bursts, too coarse to match a request with a line of another log."""
MAX_PENDING = 100_000
"""Most requests that wait to be written; further ones are counted and left out."""
WRITE_EVERY_S = 0.5
MIN_BYTES = 1 << 16

_ABOUT = (
    f"source: recorded by jettison {__version__}",
    f"note: arrivals in seconds since recording began, rounded to {ROUNDED_TO_S:g} s; rows as requests ended",
)

Ended = tuple[int, int, int, int, bool, int]
"""(arrival on the monotonic clock in ns, input, output and cached tokens, whether offline, number of the tenant)."""


class TraceRecorder:
    """Records between ``start`` and ``close``. ``path`` and the file before it (``path`` with ``.1`` behind) together
    never exceed ``max_bytes``."""

    def __init__(self, path: Path, max_bytes: int, *, tells_tenants: bool = False) -> None:
        self._path = path
        self._tells_tenants = tells_tenants
        self._number_of: dict[str, int] = {}
        """Numbers of tenants, in the order of their first request."""
        self._file_bytes = max(max_bytes, MIN_BYTES) // 2
        self._pending: deque[Ended] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: IO[bytes] | None = None
        self._num_bytes = 0
        self._num_parts = 0
        self._num_left_out = 0
        self._start_ns = 0

    @property
    def num_left_out(self) -> int:
        """Requests that ended but are in no file."""
        return self._num_left_out

    def start(self) -> None:
        """Open the file and begin; an existing file becomes the one before it. Idempotent. Raises ConfigError."""
        if self._thread is not None:
            return
        if self._path.suffix == ".gz":
            raise ConfigError(f"--record-trace {self._path}: a recording is not packed; name a .csv file")
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"--record-trace {self._path}: cannot be written: {error.strerror or error}") from None
        self._start_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._write_until_closed, name="jettison-record", daemon=True)
        self._thread.start()
        logger.info("recording arrivals and lengths of requests to %s", self._path)

    def record(
        self, arrival_ns: int, input_tokens: int, output_tokens: int, cached_tokens: int, is_offline: bool,
        tenant: str = "",
    ) -> None:
        """One request has ended. Called on the event loop; never blocks, never raises."""
        if len(self._pending) >= MAX_PENDING or self._file is None:
            self._num_left_out += 1
            return
        number = self._number_of.setdefault(tenant, len(self._number_of) + 1) if tenant else 0
        self._pending.append((arrival_ns, input_tokens, output_tokens, cached_tokens, is_offline, number))

    def close(self) -> None:
        """Write the waiting requests and close the file. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._num_left_out:
            logger.warning("%d requests are not in the recorded trace", self._num_left_out)
            self._num_left_out = 0

    # --- the writer's thread

    def _write_until_closed(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(WRITE_EVERY_S)
            try:
                self._write_pending()
            except OSError as error:
                logger.warning("recording to %s stops: %s", self._path, error.strerror or error)
                self._stop()
        self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        self._num_left_out += len(self._pending)
        self._pending.clear()

    def _write_pending(self) -> None:
        if self._file is None:
            return
        lines = []
        while self._pending:
            lines.append(self._line(self._pending.popleft()))
        if not lines:
            return
        for line in lines:
            if self._num_bytes + len(line) > self._file_bytes:
                self._file.close()
                self._open()
            self._file.write(line)
            self._num_bytes += len(line)
        self._file.flush()

    def _line(self, ended: Ended) -> bytes:
        arrival_ns, input_tokens, output_tokens, cached_tokens, is_offline, tenant = ended
        # A request that arrived before recording began counts, and so does one that ended without a token.
        arrival_s = max(0, arrival_ns - self._start_ns) / NANOSECONDS
        rounded_s = round(arrival_s / ROUNDED_TO_S) * ROUNDED_TO_S
        lengths = f"{max(1, input_tokens)},{max(1, output_tokens)},{min(cached_tokens, input_tokens)}"
        last = f",{tenant}" if self._tells_tenants else ""
        return f"{rounded_s:.2f},{lengths},{CLASSES[is_offline]}{last}\n".encode("ascii")

    def _open(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        # Readable by its owner alone: lengths and times reveal something about the clients.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._num_parts += 1
        about = (f"{PART}: {self._num_parts}", *_ABOUT)
        names = (*OUR_COLUMNS, *OUR_EXTRA_COLUMNS, *((TENANT_COLUMN,) if self._tells_tenants else ()))
        head = [*(f"# {line}" for line in about), ",".join(names), ""]
        self._num_bytes = self._file.write("\n".join(head).encode("ascii"))
