"""Drops and restores as lines of the server's log: one when a move is decided, one when it is over.

Everything else about them is in the event log (``GET /jettison/events``, and the console).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Any

from jettison.core.cluster import ClusterCore
from jettison.core.ports import Record
from jettison.live.engine.api import LogPart
from jettison.types import LayerRange, WorkerId

log = logging.getLogger(__name__)

Logs = Sequence[deque[Record]]
"""Event logs, each in the order of time."""


def log_document(logs: Logs, start_ns: int, now_ns: int) -> dict[str, object]:
    """All records by time, in seconds since ``start_ns``: ``GET /jettison/events``."""
    records = merge(*logs, key=lambda record: record.time_ns)
    events = [{"t": (r.time_ns - start_ns) / 1e9, "kind": r.kind, **r.fields} for r in records]
    return {"now_s": (now_ns - start_ns) / 1e9, "events": events}


def newest_records(
    logs: Logs, after_ns: int, most: int, kinds: Container[str], until_ns: int | None = None
) -> LogPart:
    """The newest records of these kinds, later than ``after_ns`` and not later than ``until_ns`` (None: until now), at
    most ``most``. The time is O(records of that span)."""
    spans = [_span(each, after_ns, until_ns) for each in logs]
    found = [[record for record in span if record.kind in kinds] for span in spans]
    newest = list(islice(merge(*found, key=lambda record: record.time_ns, reverse=True), most))[::-1]
    is_kept = all(len(each) != each.maxlen or each[0].time_ns <= after_ns for each in logs)
    return LogPart(newest, sum(map(len, found)) - len(newest), is_kept)


def _span(records: deque[Record], after_ns: int, until_ns: int | None) -> Iterable[Record]:
    """Those later than ``after_ns`` and not later than ``until_ns``, newest first."""
    first = bisect_right(records, after_ns, key=lambda record: record.time_ns)
    end = len(records)
    if until_ns is not None:
        end = bisect_right(records, until_ns, key=lambda record: record.time_ns)
    return islice(reversed(records), len(records) - end, len(records) - min(first, end))


_PLAIN: Mapping[str, tuple[int, str, tuple[str, ...]]] = {
    "drop_failed": (logging.WARNING, "drop failed: workers %s serve on apart; reason: %s", ("workers", "reason")),
    "recovery_stuck": (logging.ERROR, "worker %s stays down: %s", ("worker", "reason")),
    "came_home": (logging.INFO, "worker %s, which a restore had left over, holds all layers", ("worker",)),
    "falling_asleep": (
        logging.INFO,
        "worker %s is put to sleep (level %s): %d requests go elsewhere or end first; reason: %s",
        ("worker", "level", "requests", "reason"),
    ),
    "wake_decided": (logging.INFO, "workers %s are woken; reason: %s", ("workers", "reason")),
    "stays_awake": (logging.INFO, "worker %s does not go to sleep; reason: %s", ("worker", "reason")),
    "asleep": (logging.INFO, "worker %s sleeps, after %.0f ms", ("worker", "ms")),
    "woken": (logging.INFO, "worker %s is awake again, after %.0f ms", ("worker", "ms")),
    "instance_asked": (logging.INFO, "a process for worker %s is asked for", ("worker",)),
    "instance_waits": (logging.WARNING, "worker %s waits for its process: %s", ("worker", "reason")),
    "instance_given_up": (logging.INFO, "worker %s gives its process back: %s", ("worker", "reason")),
    "instance_released": (logging.INFO, "worker %s gives its process back: %s", ("worker", "reason")),
    "restore_turned": (
        logging.INFO, "restore called off: group %s stays merged; reason: %s", ("group", "reason")),
}
"""Lines that need a record's fields and nothing else: level, format, fields."""


def log_move(record: Record, core: ClusterCore) -> None:
    """Log the record if it is a decision or an end. ``core`` is as it was left by the event that made the record."""
    fields: Mapping[str, Any] = record.fields
    match record.kind:
        case "drop_decided":
            merges = [m for m in core.merges if any(g.group_id == fields["group"] for g in m.sources)]
            members = "; ".join(_members((s.worker_id, s.layers) for s in m.stages) for m in merges)
            log.info(
                "drop decided for group %s: %s; frees %s where %s are missing; reason: %s",
                fields["group"], members or "none", _size(fields["freed_bytes"]), _size(fields["required_bytes"]),
                fields["reason"],
            )
        case "drop":
            log.info(
                "drop done: group %s of %s; %s went to KV in %.0f ms, %d blocks now",
                fields["group"], _members(zip(fields["workers"], fields["stages"], strict=True)),
                _size(fields["bytes_to_kv"]), fields["decision_to_serving_ms"], fields["capacity_blocks"],
            )
        case "queue_served":
            log.info(
                "first step with a queued request %.0f ms after the decision of workers %s to merge; the step in flight"
                " then took %.0f ms",
                fields["decision_to_first_queued_step_ms"], fields["workers"], fields["step_in_flight_ms"],
            )
        case "restore_begin":
            for restore in (r for r in core.restores if r.group.group_id == fields["group"]):
                log.info(
                    "restore decided for group %s: %s take the other layers back, %d shards fetched and %d still there;"
                    " reason: %s",
                    fields["group"], _members((s.worker_id, s.layers) for s in restore.group.stages),
                    fields["pulled_shards"], fields["intact_shards"], restore.reason,
                )
        case "restore_done":
            log.info(
                "restore done: the pipeline of workers %s is no more; %s of parameters and %s of KV sent, in %.0f ms",
                fields["workers"], _size(fields["pulled_bytes"]), _size(fields["returned_bytes"]), fields["ms"],
            )
        case "recovered" | "came_home" if fields.get("was_stuck"):
            log.warning("worker %s serves again", fields["worker"])
        case kind if kind in _PLAIN:
            level, line, names = _PLAIN[kind]
            log.log(level, line, *(fields[name] for name in names))


def _members(stages: Iterable[tuple[WorkerId, LayerRange | tuple[int, int]]]) -> str:
    return ", ".join(f"worker {worker} (layers {lo} to {hi - 1})" for worker, (lo, hi) in stages)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
