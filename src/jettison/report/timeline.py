"""A run as a time line that chrome://tracing and ui.perfetto.dev open: steps, transfers, moves, requests, queues.

One recorder for live and simulated runs: the core's driver reports to it each issued and each received event
(``Timeline`` is a ``core.observing.RunObserver``). It writes the Trace Event Format: complete events for the steps of a
stage, which computes one at a time, and nestable asynchronous events for overlapping spans.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jettison.core.ports import Emit, Record, RunStep, SendShard, Transfer, TransferEnded
from jettison.types import GroupId, LayerRange, TransferId, WorkerId

MAX_EVENTS = 400_000
"""Events kept by default: about 100 MB as text, which a viewer still opens. The oldest are dropped first."""

MAX_GROUPS_SHOWN = 32
"""Most groups with counters of their own; with more, counters are totals only."""

OFFLINE_PART = "offline_part"
"""Counter of the offline share of the tokens in the steps issued since the last tick, 0 to 1."""

_STAGES, _LINKS, _MOVES, _REQUESTS, _COUNTERS = range(1, 6)
_PROCESS_NAMES = {
    _STAGES: "stages", _LINKS: "transfers", _MOVES: "decisions and moves", _REQUESTS: "requests", _COUNTERS: "load",
}

_CHARTS = {
    "requests": ("waiting", "running"),
    "KV blocks": ("kv_blocks", "kv_capacity"),
    "offline requests": ("offline_waiting", "offline_running", "offline_hosted"),
    "offline KV blocks at the host": ("offline_host_blocks",),
    "offline part of the tokens": (OFFLINE_PART,),
}
"""Counters of each group and of all, by chart. Counters of offline work begin with the first offline work."""

_SPANS = {
    "drop": ("drop: decision to serving", "decision_to_serving_ms"),
    "exchange_done": ("drop: decision to the end of the exchange", "ms"),
    "split": ("restore: until the split", "ms"),
    "restore_done": ("restore", "ms"),
    "recovered": ("recovery", "ms"),
    "came_home": ("restore: the member that was left over", "ms"),
    "migrated": ("migration", "ms"),
    "asleep": ("going to sleep", "ms"),
    "woken": ("waking", "ms"),
    "offline_resumed": ("offline work paused", "ms"),
    "offline_goes_on": ("offline work stands still", "ms"),
}
"""Kind of a record that ends a move -> the move's name here, and the field with its duration."""


@dataclass(frozen=True, slots=True)
class _OpenStep:
    group_id: GroupId
    layers: Mapping[WorkerId, LayerRange]
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    num_offline_tokens: int
    num_pairs: int
    """Query-key pairs under the causal mask."""
    num_kv_tokens: int
    """Contexts and the step's own tokens."""
    num_samples: int


class Timeline:
    """Collects the events of a run; ``write`` may be called at any time. All times are nanoseconds of one clock.

    ``max_events`` bounds the memory: beyond it the oldest events are dropped, and the document holds their number.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._num_events = 0
        self._steps: dict[int, _OpenStep] = {}
        self._transfers: dict[TransferId, tuple[Transfer, int]] = {}
        """Under way, and when each was ordered."""
        self._issued: dict[GroupId, list[int]] = {}
        """Offline tokens, and all tokens, in each group's steps since the last tick."""
        self._has_offline = False
        self._workers: set[WorkerId] = set()

    # --- RunObserver ------------------------------------------------------------------------------------------

    def step_issued(self, step: RunStep) -> None:
        """A microbatch goes to its stages."""
        rows = step.rows
        num_prompt = sum(row.num_tokens for row in rows if row.num_tokens > 1 or not row.samples)
        num_offline = sum(row.num_tokens for row in rows if row.state.is_offline)
        self._has_offline = self._has_offline or num_offline > 0
        issued = self._issued.setdefault(step.group_id, [0, 0])
        issued[0] += num_offline
        issued[1] += sum(row.num_tokens for row in rows)
        self._steps[step.step_id] = _OpenStep(
            step.group_id, {s.worker_id: s.layers for s in step.stages}, len(rows),
            sum(row.num_tokens for row in rows), num_prompt, num_offline,
            sum(row.num_tokens * (2 * row.context_len + row.num_tokens + 1) for row in rows) // 2,
            sum(row.context_len + row.num_tokens for row in rows), sum(row.samples for row in rows),
        )  # fmt: skip

    def stage_done(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage has computed its part of a step."""
        step = self._steps.get(step_id)
        if step is None:
            return
        self._workers.add(worker_id)
        layers = step.layers.get(worker_id)
        self._add({
            "name": "prefill" if step.num_prompt_tokens else "decode", "cat": "step", "ph": "X",
            "ts": started_ns / 1e3, "dur": (ended_ns - started_ns) / 1e3, "pid": _STAGES, "tid": worker_id,
            "args": {
                "step": step_id, "group": step.group_id, "requests": step.num_requests, "tokens": step.num_tokens,
                "prompt_tokens": step.num_prompt_tokens,
                "offline_tokens": step.num_offline_tokens, "pairs": step.num_pairs, "kv_tokens": step.num_kv_tokens,
                "samples": step.num_samples, "layers": None if layers is None else list(layers),
            },
        })

    def step_ended(self, step_id: int) -> None:
        """The step has ended or failed, after its last stage."""
        self._steps.pop(step_id, None)

    def transfer_begun(self, transfer: Transfer, now_ns: int) -> None:
        """Bytes are to be moved; the time at which they began to move comes with their end."""
        self._transfers[transfer.transfer_id] = transfer, now_ns

    def transfer_ended(self, ended: TransferEnded, now_ns: int) -> None:
        """A transfer has ended."""
        transfer, _ = self._transfers.pop(ended.transfer_id, (None, 0))
        if transfer is None:
            return
        src, dst = transfer.src, transfer.dst
        what: dict[str, Any] = {"bytes": ended.num_bytes, "complete": ended.complete}
        if isinstance(transfer, SendShard):
            name = f"{transfer.shard} {src} > {dst}"
        else:
            ends = f"{'host of ' * transfer.from_host}{src} > {'host of ' * transfer.to_host}{dst}"
            name = f"{'urgent KV' if transfer.urgent else 'KV'} {ends}"
            what |= {"blocks": len(transfer.src_blocks), "layers": list(transfer.layers)}
        self._span(_LINKS, "transfer", name, ended.transfer_id, now_ns - ended.duration_ns, now_ns, what)

    def transfers_left(self, under_way: Collection[TransferId], now_ns: int) -> None:
        """The core has ended those that are not under way: incomplete, with a bar from their order."""
        if len(self._transfers) == len(under_way):  # the core knows of all that have begun
            return
        for transfer_id, (_, ordered_ns) in list(self._transfers.items()):
            if transfer_id not in under_way:
                self.transfer_ended(TransferEnded(transfer_id, False, 0, now_ns - ordered_ns), now_ns)

    def recorded(self, record: Record) -> None:
        """The core has recorded a decision or a milestone."""
        args = {key: _plain(value) for key, value in record.fields.items()}
        self._add({
            "name": record.kind, "cat": "decision", "ph": "i", "s": "g", "ts": record.time_ns / 1e3, "pid": _MOVES,
            "tid": 0, "args": args,
        })
        if record.kind == "worker_lost":  # the dead worker will not report the end of its steps
            lost = set(record.fields["groups"])  # type: ignore[call-overload]
            self._steps = {i: step for i, step in self._steps.items() if step.group_id not in lost}
        if record.kind in _SPANS:
            name, field = _SPANS[record.kind]
            if (duration_ms := args.get(field)) is not None:
                began_ns = record.time_ns - round(float(duration_ms) * 1e6)
                self._span(_MOVES, "move", name, self._num_events, began_ns, record.time_ns, args)

    def emitted(self, emit: Emit) -> None:
        """A request has got tokens; with its last it becomes a row of the time line."""
        state = emit.state
        if emit.finish_reason is None or state is None or state.finished_ns is None:
            return
        name, began_ns, ended_ns = str(state.request_id), state.request.arrival_ns, state.finished_ns
        marks = [began_ns, state.first_scheduled_ns, state.first_token_ns, ended_ns]
        self._span(_REQUESTS, "request", name, name, began_ns, ended_ns, {
            "prompt_tokens": state.num_prompt, "output_tokens": state.num_output, "cached_tokens": state.num_cached,
            "preemptions": state.num_preemptions, "end": str(emit.finish_reason), "group": state.group_id,
        })
        for phase, since, until in zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False):
            if since is not None and until is not None and until > since:
                self._span(_REQUESTS, "request", phase, name, since, until, {})

    def looked(self, loads: Iterable[tuple[GroupId, Mapping[str, float]]], now_ns: int) -> None:
        """Gauges of every group (``core.observing.group_gauges``), every tick."""
        issued, self._issued = self._issued, {}
        shown = [(group, {**gauges, OFFLINE_PART: _part(issued.get(group, [0, 0]))}) for group, gauges in loads]
        total: dict[str, float] = {}
        for _, gauges in shown:
            for name, value in gauges.items():
                total[name] = total.get(name, 0.0) + value
        total[OFFLINE_PART] = _part([sum(each) for each in zip(*issued.values(), strict=True)] or [0, 0])
        self._counters("cluster", total, now_ns)
        if 1 < len(shown) <= MAX_GROUPS_SHOWN:
            for group, gauges in shown:
                self._counters(f"group {group}", gauges, now_ns)

    # --- document ---------------------------------------------------------------------------------------------

    @property
    def num_forgotten(self) -> int:
        """Number of dropped events."""
        return self._num_events - len(self._events)

    def document(self) -> dict[str, Any]:
        """The trace; times in it are microseconds from its first event."""
        events = sorted(self._events, key=lambda event: event["ts"])
        first_us = events[0]["ts"] if events else 0.0
        rows = [*self._names(), *({**event, "ts": round(event["ts"] - first_us, 3)} for event in events)]
        return {
            "traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"first_ns": round(first_us * 1e3), "forgotten_events": self.num_forgotten},
        }

    def write(self, path: Path) -> None:
        """Write the document; compressed where the name ends in ``.gz`` (viewers open both)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(self.document(), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def write_or_tell(self, path: Path, logger: logging.Logger) -> None:
        """The same at the end of a server, which no trouble with the disk makes another end."""
        try:
            self.write(path)
        except OSError as error:
            logger.error("cannot write the time line: %s", error)

    def _names(self) -> Iterator[dict[str, Any]]:
        for pid, name in _PROCESS_NAMES.items():
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for worker in sorted(self._workers):
            args = {"name": f"worker {worker}"}
            yield {"name": "thread_name", "ph": "M", "pid": _STAGES, "tid": worker, "args": args}

    def _counters(self, name: str, gauges: Mapping[str, float], now_ns: int) -> None:
        for chart, keys in _CHARTS.items():
            values = {key: gauges[key] for key in keys if key in gauges}
            if values and (self._has_offline or not chart.startswith("offline")):
                self._add({
                    "name": f"{name}: {chart}", "ph": "C", "ts": now_ns / 1e3, "pid": _COUNTERS, "tid": 0,
                    "args": values,
                })

    def _span(
        self, pid: int, category: str, name: str, key: int | str, began_ns: int, ended_ns: int, args: Mapping[str, Any]
    ) -> None:
        shared = {"name": name, "cat": category, "id": str(key), "pid": pid, "tid": 0}
        self._add({**shared, "ph": "b", "ts": began_ns / 1e3, "args": dict(args)})
        self._add({**shared, "ph": "e", "ts": ended_ns / 1e3})

    def _add(self, event: dict[str, Any]) -> None:
        self._num_events += 1
        self._events.append(event)


def _part(issued: Sequence[int]) -> float:
    num_offline, num_tokens = issued
    return num_offline / num_tokens if num_tokens else 0.0


def _plain(value: object) -> Any:
    """The value as a type of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)
