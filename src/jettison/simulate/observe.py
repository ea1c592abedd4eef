"""Gauges of a simulated cluster over time, under the names that ``workload.observe`` gives a live server's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jettison.core import ports
from jettison.core.observing import NO_GROUP, offline_gauges
from jettison.core.totals import counters
from jettison.report.classes import TOKEN_SERIES
from jettison.report.results import SeriesPoint
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.loop import LATE
from jettison.types import NANOSECONDS

MAX_WORKERS_SHOWN = 64
"""Of larger clusters only sums are kept."""

_USES = {"parameters": "parameter_bytes", "kv": "kv_bytes", "workspace": "workspace_bytes", "free": "free_bytes"}


class Observer:
    """Samples every ``interval_s`` of virtual time until told to stop."""

    def __init__(
        self, cluster: SimulatedCluster, interval_s: float, on_time: Callable[[float], None] | None = None, *,
        counts_tokens: bool = False,
    ) -> None:
        """``on_time``: told the virtual time of each sample, in seconds. ``counts_tokens``: first-time tokens by class
        and what offline requests do become series."""
        self.series: dict[str, list[SeriesPoint]] = {}
        self.log: list[dict[str, Any]] = []
        self._cluster = cluster
        self._interval_ns = round(interval_s * NANOSECONDS)
        self._on_time = on_time
        self._counts_tokens = counts_tokens
        self._is_on = True
        self._shows_workers = cluster.setup.num_workers <= MAX_WORKERS_SHOWN

    def start(self) -> None:
        """Take the first sample now."""
        self._sample()

    def stop(self) -> None:
        """Take a last sample."""
        if self._is_on:
            self._is_on = False
            self._take()

    def note_record(self, record: ports.Record) -> None:
        """Keep a decision of the core for the log; a wait without end is null there."""
        fields = {key: None if value == math.inf else value for key, value in record.fields.items()}
        self.log.append({"t": record.time_ns / NANOSECONDS, "kind": record.kind, **fields})

    def events(self) -> dict[str, Any]:
        """Counts by name, and the log."""
        cluster = self._cluster
        totals = counters(cluster.core)
        totals |= {"activations": cluster.num_activations, "activation_delay_seconds": cluster.activation_ns / 1e9}
        events: dict[str, Any] = {k: int(v) if v == int(v) else v for k, v in totals.items()}
        events["preemptions"] = events.pop("num_preemptions")
        for worker_id, times in sorted(cluster.bubbles.totals.items()):
            events[f"stage_busy_seconds/{worker_id}"] = times.busy_ns / NANOSECONDS
            events[f"stage_bubble_seconds/{worker_id}"] = times.bubble_ns / NANOSECONDS
        return events | {"log": self.log}

    def _sample(self) -> None:
        if self._is_on:
            self._take()
            if self._on_time is not None:
                self._on_time(self._cluster.loop.now_ns / NANOSECONDS)
            self._cluster.loop.after(self._interval_ns, self._sample, LATE)

    def _take(self) -> None:
        self._cluster.settle()
        core = self._cluster.core
        groups = core.groups.values()
        total = sum(g.blocks.capacity for g in groups)
        used = sum(g.blocks.num_used for g in groups)
        self._note("queue", core.num_waiting)
        self._note("running", sum(len(g.queues.running) + len(g.queues.moving) for g in groups))
        self._note("kv_usage", used / total if total else 0.0)
        self._note("groups", len(groups))
        self._note("kv_blocks_used", used)
        self._note("kv_blocks_total", total)
        if self._counts_tokens:
            totals = counters(core)
            for kind in TOKEN_SERIES:
                self._note(kind, totals[kind])
            self._note("checkpoint_lag_blocks", core.ladder.lag_blocks)
        if not self._shows_workers:
            return
        for group in groups:
            name = group.group_id
            self._note(f"kv_blocks_used/{name}", group.blocks.num_used)
            self._note(f"kv_blocks_total/{name}", group.blocks.capacity)
            self._note(f"kv_blocks_cached/{name}", max(ledger.num_cached for ledger in group.blocks.ledgers))
            self._note(f"group_requests_running/{name}", len(group.queues.running))
            self._note(f"group_requests_waiting/{name}", len(group.queues.waiting))
            self._note(f"group_requests_moving/{name}", len(group.queues.moving))
            self._note(f"group_size/{name}", len(group.stages))
            if self._counts_tokens:
                for gauge, value in offline_gauges(group)._asdict().items():
                    self._note(f"{gauge}/{name}", value)
        group_of = {stage.worker_id: g.group_id for g in groups for stage in g.stages}
        for worker_id, worker in self._cluster.workers.items():
            report = worker.memory.report()
            for use, key in _USES.items():
                self._note(f"worker_memory_bytes/{use}/{worker_id}", report[key])
            self._note(f"dropped_parameter_bytes/{worker_id}", report["dropped_parameter_bytes"])
            self._note(f"worker_alive/{worker_id}", worker.alive)
            self._note(f"worker_group/{worker_id}", group_of.get(worker_id, NO_GROUP))

    def _note(self, name: str, value: float) -> None:
        self.series.setdefault(name, []).append((self._cluster.loop.now_ns / NANOSECONDS, float(value)))
