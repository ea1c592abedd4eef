"""The clients of a simulated cluster: they send at their times and note when tokens come, like ``workload.client``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from jettison.core import ports
from jettison.report.results import NOT_SENT, TIME_WAS_UP, RequestRecord, Summary
from jettison.sim.cluster import SimulatedCluster
from jettison.simulate.batch_clients import BatchClients
from jettison.types import NANOSECONDS, FinishReason, Request, RequestId, SamplingParams, ServiceClass
from jettison.workload.pool import OfflinePool
from jettison.workload.rows import TraceRow, as_columns

_STATUS = {FinishReason.CANCELLED: "cancelled", FinishReason.ERROR: "failed"}

_BINS_PER_DECADE = 200
_LEAST_GAP_S = 1e-6


@dataclass(frozen=True, slots=True)
class Edge:
    """What lies between a client and the engine: HTTP, tokenizer, network. Constants, measured elsewhere."""

    request_s: float = 0.0
    """From the client's sending to the engine's accepting."""
    response_s: float = 0.0
    """From a token's being sampled to the client's seeing it."""


class GapHistogram:
    """Inter-token gaps of runs too large to keep each: logarithmic bins of 1.2 %, exact mean and maximum."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Add ``count`` of one."""
        at = round(math.log10(max(gap_s, _LEAST_GAP_S)) * _BINS_PER_DECADE)
        self._counts[at] = self._counts.get(at, 0) + count
        self._max_s = max(self._max_s, gap_s)
        self._sum_s += gap_s * count

    def add_each(self, gaps_s: Sequence[float]) -> None:
        """Add all of these; requests of one step mostly have equal ones."""
        for gap_s, num in Counter(gaps_s).items():
            self.add(gap_s, num)

    def add_all(self, gaps_s: npt.NDArray[np.float64], count: int) -> None:
        """Add ``count`` of each of these gaps."""
        if len(gaps_s):
            at = np.rint(np.log10(np.maximum(gaps_s, _LEAST_GAP_S)) * _BINS_PER_DECADE).astype(np.int64)
            lowest = int(at.min())
            for offset, num in enumerate(np.bincount(at - lowest).tolist()):
                if num:
                    self._counts[lowest + offset] = self._counts.get(lowest + offset, 0) + num * count
            self._sum_s += float(gaps_s.sum()) * count
            self._max_s = max(self._max_s, float(gaps_s.max()))

    def share_within(self, limit_s: float) -> float | None:
        """Part of the gaps that are no longer, to the width of a bin."""
        total = sum(self._counts.values())
        last = math.log10(max(limit_s, _LEAST_GAP_S)) * _BINS_PER_DECADE
        return sum(count for at, count in self._counts.items() if at <= last) / total if total else None

    def summary(self) -> Summary:
        """Percentiles at the middle of their bins."""
        if not self._counts:
            return Summary()
        bins = sorted(self._counts)
        ends = np.cumsum([self._counts[b] for b in bins])
        total = int(ends[-1])
        at = [bins[int(np.searchsorted(ends, q * (total - 1), side="right"))] for q in (0.5, 0.9, 0.99)]
        p50, p90, p99 = (min(10.0 ** (b / _BINS_PER_DECADE), self._max_s) for b in at)
        return Summary(self._sum_s / total, p50, p90, p99, self._max_s, total)


class Clients:
    """All clients of one run."""

    def __init__(
        self, rows: Sequence[TraceRow], edge: Edge, make_prompt: Callable[[int, int], tuple[int, ...]], *,
        keeps_gaps: bool, max_request_tokens: int, on_end: Callable[[int], None] | None = None,
        pools: Sequence[OfflinePool] = (), window_s: float = 0.0,
    ) -> None:
        """``make_prompt(index, num_tokens)`` gives token ids. Without ``keeps_gaps`` gaps go into ``gaps``, those of
        offline requests into ``offline_gaps``. ``pools``: batches beside them; endless ones until ``window_s``."""
        self.records = [
            RequestRecord(i, row.arrival_s, row.input_tokens, row.output_tokens, is_offline=row.is_offline)
            for i, row in enumerate(rows)
        ]
        self._tenants = as_columns(rows).tenant
        self.gaps = GapHistogram()
        self.offline_gaps = GapHistogram()
        self.num_ended = 0
        self.most_open = 0
        self._edge = edge
        self._make_prompt = make_prompt
        self._keeps_gaps = keeps_gaps
        self._max_request_tokens = max_request_tokens
        self._on_end = on_end
        self._open: dict[RequestId, RequestRecord] = {}
        self._last_s: dict[RequestId, float] = {}
        self._next = 0
        self._cluster: SimulatedCluster | None = None
        self._batches = BatchClients(
            pools, count(len(self.records)), window_s, edge.response_s + edge.request_s,
            lambda record, pool, due_ns: self._ask(record, pool.tenant, due_ns),
        )

    def start(self, cluster: SimulatedCluster) -> None:
        """Send every request at its time. One event ahead at a time, so that a long workload needs no heap of it."""
        self._cluster = cluster
        self._await_next(cluster)
        self._batches.start(cluster)

    @property
    def all_ended(self) -> bool:
        """Every request was sent and has come to its end; of an endless batch no more is sent."""
        return self.num_ended == len(self.records) and self._batches.is_over

    @property
    def all_records(self) -> list[RequestRecord]:
        """Those of the load, and of a batch beside it; but what an endless one had under way when the run ended."""
        ended = (r for r in self._batches.records if r.finished_s is not None or r.error is not None)
        return [*self.records, *ended]

    @property
    def num_unfinished(self) -> int:
        """Of batches without end, when the run ended."""
        return self._batches.num_unfinished

    def batch_documents(self) -> list[dict[str, Any]]:
        """What came of each batch with a completion window."""
        return self._batches.documents()

    def close(self, now_s: float) -> None:
        """The run is over: what is open has failed."""
        for record in self._open.values():
            if self._is_of_batch(record):
                continue
            record.error = TIME_WAS_UP
            record.finished_s = now_s
        for record in self.records[self._next :]:
            record.error = NOT_SENT
        self._batches.close(now_s)

    def on_emit(self, emit: ports.Emit, now_ns: int) -> None:
        """The last token of a request, or its end without one, has left the engine."""
        record = self._open.get(emit.request_id)
        if record is None:
            return
        seen_s = now_ns / NANOSECONDS + self._edge.response_s
        for _ in emit.tokens:
            self._note_token(emit.request_id, record, seen_s)
        if emit.finish_reason is not None:
            record.finished_s = seen_s
            record.status = _STATUS.get(emit.finish_reason, "completed")  # type: ignore[assignment]
            record.error = emit.error
            self._end(emit.request_id, record)

    def on_tokens(self, request_ids: Sequence[RequestId], ends_ns: npt.NDArray[np.int64]) -> None:
        """Each of these requests has got a token at each of these times. Where there are several times, all requests
        have got tokens before."""
        seen_s = ends_ns / NANOSECONDS + self._edge.response_s
        if len(seen_s) == 1:
            self._on_step(request_ids, float(seen_s[0]))
            return
        first_s, last_s, later_gaps_s = float(seen_s[0]), float(seen_s[-1]), np.diff(seen_s)
        listed = later_gaps_s.tolist() if self._keeps_gaps else []
        longest_later_s, num_steps = float(later_gaps_s.max()), len(seen_s)
        online_s: list[float] = []
        offline_s: list[float] = []
        for request_id in request_ids:
            record = self._open[request_id]
            record.output_tokens += num_steps
            gap_s = first_s - self._last_s[request_id]
            self._last_s[request_id] = last_s
            if self._keeps_gaps:
                record.gaps_s.append(gap_s)
                record.gaps_s += listed
                continue
            (offline_s if record.is_offline else online_s).append(gap_s)
            longest_s = gap_s if gap_s > longest_later_s else longest_later_s
            if record.longest_gap_s is None or longest_s > record.longest_gap_s:
                record.longest_gap_s = longest_s
        if not self._keeps_gaps:
            for histogram, firsts_s in ((self.gaps, online_s), (self.offline_gaps, offline_s)):
                if firsts_s:
                    histogram.add_each(firsts_s)
                    histogram.add_all(later_gaps_s, len(firsts_s))

    def _on_step(self, request_ids: Sequence[RequestId], seen_s: float) -> None:
        records, last_s = self._open, self._last_s
        online_s: list[float] = []
        offline_s: list[float] = []
        for request_id in request_ids:
            record = records.get(request_id)
            if record is None:
                continue
            if self._keeps_gaps or record.first_s is None:
                self._note_token(request_id, record, seen_s)
                continue
            record.output_tokens += 1
            gap_s = seen_s - last_s[request_id]
            last_s[request_id] = seen_s
            (offline_s if record.is_offline else online_s).append(gap_s)
            if record.longest_gap_s is None or gap_s > record.longest_gap_s:
                record.longest_gap_s = max(0.0, gap_s)
        self.gaps.add_each(online_s)
        if offline_s:
            self.offline_gaps.add_each(offline_s)

    def _add_gap(self, record: RequestRecord, gap_s: float) -> None:
        if self._keeps_gaps:
            record.gaps_s.append(gap_s)
            return
        (self.offline_gaps if record.is_offline else self.gaps).add(gap_s)
        if record.longest_gap_s is None or gap_s > record.longest_gap_s:
            record.longest_gap_s = max(0.0, gap_s)

    def _is_of_batch(self, record: RequestRecord) -> bool:
        return record.index >= len(self.records)

    def _note_token(self, request_id: RequestId, record: RequestRecord, seen_s: float) -> None:
        record.output_tokens += 1
        if record.first_s is None:
            record.first_s = seen_s
        else:
            self._add_gap(record, seen_s - self._last_s[request_id])
        self._last_s[request_id] = seen_s

    def _end(self, request_id: RequestId, record: RequestRecord) -> None:
        del self._open[request_id]
        self._last_s.pop(request_id, None)
        self._count_end(record)

    def _count_end(self, record: RequestRecord) -> None:
        if self._is_of_batch(record):
            assert self._cluster is not None
            self._batches.on_end(record, self._cluster)
            return
        self.num_ended += 1
        if self._on_end is not None:
            self._on_end(self.num_ended)

    def _await_next(self, cluster: SimulatedCluster) -> None:
        if self._next < len(self.records):
            at_s = self.records[self._next].scheduled_s + self._edge.request_s
            cluster.expect_arrival(round(at_s * NANOSECONDS), lambda: self._send(cluster))

    def _send(self, cluster: SimulatedCluster) -> None:
        record = self.records[self._next]
        self._next += 1
        self._await_next(cluster)
        self._ask(record, "" if self._tenants is None else str(self._tenants[record.index]))

    def _refuse(self, record: RequestRecord, why: str) -> None:
        record.error = why
        record.finished_s = record.scheduled_s
        self._count_end(record)

    def _ask(self, record: RequestRecord, tenant: str, due_ns: int | None = None) -> None:
        cluster = self._cluster
        assert cluster is not None
        record.sent_s = record.scheduled_s
        why = None if record.is_offline else _why_refuse(cluster, tenant)
        if why is not None:
            record.status = "rejected"
            self._refuse(record, why)
            return
        wanted = record.input_tokens + record.wanted_tokens
        if wanted > self._max_request_tokens:
            self._refuse(
                record, f"{wanted} tokens exceed what one request may hold ({self._max_request_tokens} tokens)"
            )
            return
        request_id = f"r{record.index}"
        self._open[request_id] = record
        self.most_open = max(self.most_open, len(self._open))
        params = SamplingParams(max_tokens=record.wanted_tokens, temperature=0.0, ignore_eos=True)
        prompt = self._make_prompt(record.index, record.input_tokens)
        service_class = ServiceClass.OFFLINE if record.is_offline else ServiceClass.ONLINE
        cluster.arrive_now(Request(
            request_id, prompt, params, cluster.loop.now_ns, tenant=tenant, service_class=service_class,
            deadline_ns=due_ns,
        ))


def _why_refuse(cluster: SimulatedCluster, tenant: str) -> str | None:
    """Why a tenant's online request is refused in this moment; None: it may arrive."""
    limit = cluster.setup.max_num_queued_reqs
    if limit is None:
        return None
    cluster.stop_fast_forwards(including_now=False)  # a client's event comes before steps that end at the same time
    refusal = cluster.core.ladder.why_refuse(tenant, limit, 0, cluster.loop.now_ns)
    return None if refusal is None else refusal.message
