"""The clients of batches beside a simulated load: each sends the next request as one of its own has ended, and all
together tell the engine what is due by when, as a server does of the batches that it stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jettison.core.ports import OfflineStored, StoredWork
from jettison.report.results import NOT_SENT, SENDERS_ENDED, TIME_WAS_UP, RequestRecord
from jettison.sim.cluster import SimulatedCluster
from jettison.types import NANOSECONDS
from jettison.workload.pool import OfflinePool

TELL_S = 0.5
"""Between two times that what is due is told: as often as by a server."""

Send = Callable[[RequestRecord, OfflinePool, int | None], None]
"""Called with a request, its batch, and when that is due in ns; None: at no time."""


class BatchClient:
    """Sends an offline pool's requests by as many senders as may be unfinished. A sender of which one is refused, or
    cannot ever be served, sends no more, as live ones: an endless batch of such requests ends."""

    def __init__(
        self, pool: OfflinePool, indices: Iterator[int], window_s: float, turnaround_s: float, send: Send,
        name: str = "",
    ) -> None:
        """``indices``: of its records. ``window_s``: an endless pool is sent from until then. ``turnaround_s``: from an
        answer's leaving the engine to the next request's coming to it."""
        self.records: list[RequestRecord] = []
        self.name = name
        self._pool = pool
        self._indices = indices
        self._window_s = math.inf if pool.num_requests is not None else window_s
        self._turnaround_s = turnaround_s
        self._send = send
        window_s = math.inf if pool.completion_window_s is None else pool.completion_window_s
        self.due_s = pool.start_s + window_s
        """Infinite: it is due at no time."""
        self._lengths: Iterator[tuple[int, int]] = pool.lengths_drawn()
        self._left = (0, 0, 0)
        """Requests that have not ended, and tokens of their prompts and answers; kept where it is due at some time."""
        if math.isfinite(self.due_s):
            drawn = list(self._lengths)
            self._left = len(drawn), sum(given for given, _ in drawn), sum(wanted for _, wanted in drawn)
            self._lengths = iter(drawn)
        self._indices_sent: set[int] = set()
        self._num_senders = pool.unfinished or pool.num_requests or 0
        self._num_open = 0
        self._is_closed = False

    def start(self, cluster: SimulatedCluster) -> None:
        """Send the first requests at the pool's time."""
        cluster.expect_arrival(round(self._pool.start_s * NANOSECONDS), lambda: self._fill(cluster))
        if math.isfinite(self._window_s):
            cluster.expect_arrival(round(self._window_s * NANOSECONDS), self._close)

    @property
    def due_ns(self) -> int | None:
        """None: at no time."""
        return round(self.due_s * NANOSECONDS) if math.isfinite(self.due_s) else None

    @property
    def is_over(self) -> bool:
        """Nothing more is sent; of a batch with an end all have ended, of an endless one those under way do not
        count."""
        return self._is_closed and (not self._num_open or self._pool.num_requests is None)

    @property
    def num_unfinished(self) -> int:
        """Sent and not ended."""
        return self._num_open

    def has(self, record: RequestRecord) -> bool:
        """Whether it has sent this request."""
        return record.index in self._indices_sent

    def stored(self, now_ns: int) -> StoredWork | None:
        """What is left of it; None before it begins, when it has ended, and where it is due at no time."""
        num, prompt, output = self._left
        if self.due_ns is None or not num or now_ns < round(self._pool.start_s * NANOSECONDS) or self.is_over:
            return None
        return StoredWork(self.due_ns, num, prompt, output, self._pool.tenant, self.name)

    def document(self) -> dict[str, Any]:
        """What came of a batch that is due at some time."""
        ended = [r for r in self.records if r.status == "completed" and r.finished_s is not None]
        within = sum(r.finished_s is not None and r.finished_s <= self.due_s for r in ended)
        return {
            "name": self.name, "tenant": self._pool.tenant, "start_s": self._pool.start_s, "due_s": self.due_s,
            "requests": self._pool.num_requests, "within": within, "late": (self._pool.num_requests or 0) - within,
            "ended_s": max((r.finished_s for r in ended if r.finished_s is not None), default=None),
        }

    def on_end(self, record: RequestRecord, cluster: SimulatedCluster) -> None:
        """One of its requests has ended."""
        self._num_open -= 1
        num, prompt, output = self._left
        self._left = num - 1, prompt - record.input_tokens, output - record.wanted_tokens
        if record.status != "completed":
            self._num_senders -= 1
            self._is_closed |= not self._num_senders
        elif not self._is_closed:
            at_s = cluster.loop.now_ns / NANOSECONDS + self._turnaround_s
            cluster.expect_arrival(round(at_s * NANOSECONDS), lambda: self._fill(cluster))

    def close(self, now_s: float) -> None:
        """The run is over: of a batch with an end, what is open or was never sent has failed."""
        if self._pool.num_requests is None:
            return
        for record in self.records:
            if record.finished_s is None:
                record.error, record.finished_s = TIME_WAS_UP, now_s
        why = NOT_SENT if self._num_senders else SENDERS_ENDED
        for drawn in self._lengths:
            index = next(self._indices)
            self.records.append(RequestRecord(index, self._pool.start_s, *drawn, is_offline=True, error=why))
            self._indices_sent.add(index)
        self._num_open = 0

    def _close(self) -> None:
        self._is_closed = True

    def _fill(self, cluster: SimulatedCluster) -> None:
        now_s = cluster.loop.now_ns / NANOSECONDS
        while not self._is_closed and self._num_open < self._num_senders:
            drawn = next(self._lengths, None)
            if drawn is None:
                self._close()
                return
            record = RequestRecord(next(self._indices), now_s, *drawn, is_offline=True)
            self.records.append(record)
            self._indices_sent.add(record.index)
            self._num_open += 1
            self._send(record, self._pool, self.due_ns)


class BatchClients:
    """All batches of a run."""

    def __init__(
        self, pools: Sequence[OfflinePool], indices: Iterator[int], window_s: float, turnaround_s: float, send: Send
    ) -> None:
        self._clients = [
            BatchClient(pool, indices, window_s, turnaround_s, send, f"batch {number}")
            for number, pool in enumerate(pools)
        ]
        self._told: tuple[StoredWork, ...] = ()

    def start(self, cluster: SimulatedCluster) -> None:
        """Send the first requests of each at its time."""
        for client in self._clients:
            client.start(cluster)
        if any(client.due_ns is not None for client in self._clients):
            cluster.expect_arrival(0, lambda: self._tell(cluster))

    @property
    def is_over(self) -> bool:
        """Of each ``BatchClient.is_over``."""
        return all(client.is_over for client in self._clients)

    def close(self, now_s: float) -> None:
        """The run is over."""
        for client in self._clients:
            client.close(now_s)

    @property
    def num_unfinished(self) -> int:
        """Sent and not ended."""
        return sum(client.num_unfinished for client in self._clients)

    @property
    def records(self) -> list[RequestRecord]:
        """Of all that were sent, as they were."""
        return sorted((r for client in self._clients for r in client.records), key=lambda r: r.index)

    def documents(self) -> list[dict[str, Any]]:
        """Of batches that are due at some time."""
        return [client.document() for client in self._clients if client.due_ns is not None]

    def on_end(self, record: RequestRecord, cluster: SimulatedCluster) -> None:
        """A request of some batch has ended."""
        next(client for client in self._clients if client.has(record)).on_end(record, cluster)

    def _tell(self, cluster: SimulatedCluster) -> None:
        """What is left of each batch, where that has changed; again after a while, until all are over."""
        now_ns = cluster.loop.now_ns
        works = tuple(work for client in self._clients if (work := client.stored(now_ns)) is not None)
        if works != self._told:
            self._told = works
            cluster.handle(OfflineStored(works))
        if any(client.due_ns is not None and not client.is_over for client in self._clients):
            cluster.expect_arrival(now_ns + round(TELL_S * NANOSECONDS), lambda: self._tell(cluster))
