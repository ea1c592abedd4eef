"""The client of a batch beside a simulated load: it sends the next request as one of its own has ended."""

from __future__ import annotations

import math
from collections.abc import Callable

from jettison.report.results import RequestRecord
from jettison.sim.cluster import SimulatedCluster
from jettison.types import NANOSECONDS
from jettison.workload.pool import OfflinePool

Send = Callable[[RequestRecord], None]


class BatchClient:
    """Sends an offline pool's requests. One that is refused, or cannot ever be served, is the last."""

    def __init__(self, pool: OfflinePool, first_index: int, window_s: float, turnaround_s: float, send: Send) -> None:
        """``window_s``: an endless pool is sent from until then. ``turnaround_s``: from an answer's leaving the engine
        to the next request's coming to it."""
        self.records: list[RequestRecord] = []
        self._pool = pool
        self._first_index = first_index
        self._window_s = math.inf if pool.num_requests is not None else window_s
        self._turnaround_s = turnaround_s
        self._send = send
        self._lengths = pool.lengths_drawn()
        self._num_open = 0
        self._is_closed = False

    def start(self, cluster: SimulatedCluster) -> None:
        """Send the first requests at the pool's time."""
        cluster.expect_arrival(round(self._pool.start_s * NANOSECONDS), lambda: self._fill(cluster))
        if math.isfinite(self._window_s):
            cluster.expect_arrival(round(self._window_s * NANOSECONDS), self._close)

    @property
    def is_over(self) -> bool:
        """Nothing more is sent; of a batch with an end all have ended, of an endless one those under way do not
        count."""
        return self._is_closed and (not self._num_open or self._pool.num_requests is None)

    @property
    def num_unfinished(self) -> int:
        """Sent and not ended."""
        return self._num_open

    def on_end(self, record: RequestRecord, cluster: SimulatedCluster) -> None:
        """One of its requests has ended."""
        self._num_open -= 1
        if record.status != "completed":
            self._is_closed = True
        elif not self._is_closed:
            at_s = cluster.loop.now_ns / NANOSECONDS + self._turnaround_s
            cluster.expect_arrival(round(at_s * NANOSECONDS), lambda: self._fill(cluster))

    def _close(self) -> None:
        self._is_closed = True

    def _fill(self, cluster: SimulatedCluster) -> None:
        now_s = cluster.loop.now_ns / NANOSECONDS
        while not self._is_closed and self._num_open < (self._pool.unfinished or math.inf):
            drawn = next(self._lengths, None)
            if drawn is None:
                self._close()
                return
            record = RequestRecord(self._first_index + len(self.records), now_s, *drawn, is_offline=True)
            self.records.append(record)
            self._num_open += 1
            self._send(record)
