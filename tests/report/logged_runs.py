"""Runs with an event log, made by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jettison.report.results import RequestRecord, RunResult, build_run

ASSESSED = {"reason": "memory", "load": 1.2, "memory_wait_s": 3.0, "compute_wait_s": 0.5}

MERGES = [{"groups": [0, 1], "stages": [{"worker": 1, "layers": [0, 3]}, {"worker": 0, "layers": [3, 6]}]}]

LOG: list[dict[str, Any]] = [
    {"t": 1.0, "kind": "drop_declined", "group": 0, **ASSESSED, "reason": "compute binds"},
    {"t": 5.0, "kind": "drop_decided", "group": 0, "required_bytes": 900, "freed_bytes": 1000, "sufficient": True,
     "overloaded_groups": [0], "pulled_shards": 0, "throughput_cost": None, "merges": MERGES, **ASSESSED},
    {"t": 5.01, "kind": "drop", "workers": [0, 1], "group": 2, "bytes_to_kv": 1 << 20, "remap_ms": 2.0,
     "decision_to_serving_ms": 10.0, "stalled": 3, "waiting": 4, "map_calls": 9, "capacity_blocks": 50, "stages": []},
    {"t": 5.02, "kind": "queue_served", "workers": [0, 1], "queued": 4, "decision_to_first_queued_step_ms": 20.0,
     "step_in_flight_ms": 8.0, "steps_between": 1},
    {"t": 5.5, "kind": "exchange_done", "group": 2, "bytes": 77, "requests": {}, "ms": 500.0, "capacity_blocks": 50},
    {"t": 9.0, "kind": "restore_begin", "group": 2, "workers": [0, 1], "pulled_shards": 1},
    {"t": 9.2, "kind": "restore_turned", "group": 2, "reason": "memory"},
    {"t": 11.0, "kind": "restore_begin", "group": 2, "workers": [0, 1], "pulled_shards": 1},
    {"t": 12.0, "kind": "restore_done", "workers": [0, 1], "pulled_bytes": 5, "returned_bytes": 6, "ms": 1000.0},
]  # fmt: skip
"""A drop that is declined once, then made, and after a vain attempt taken back."""


def declined(at_s: float, reason: str = "a pipeline could not keep up", group: int = 0) -> dict[str, Any]:
    return {"t": at_s, "kind": "drop_declined", "group": group, **ASSESSED, "reason": reason}


def run(
    name: str = "drop", log: Sequence[dict[str, Any]] = tuple(LOG), late: Collection[int] = (), *,
    unanswered: Collection[int] = (), num_requests: int = 20, **parts: Any,
) -> RunResult:
    """One request a second, first tokens after 0.1 s; those in ``late`` after 4 s, ``unanswered`` ones fail at once."""
    records = []
    for index in range(num_requests):
        first_s = index + (4.0 if index in late else 0.1)
        if index in unanswered:
            records.append(RequestRecord(index, float(index), 10, 2, "failed", index))
        else:
            times = (index, first_s, first_s + 1)
            records.append(RequestRecord(index, float(index), 10, 2, "completed", *times, 2, [1.0]))
    found = build_run(name, records, **parts)
    found.events["log"] = list(log)
    return found
