"""Watch a server while it is being loaded: ``/metrics`` as time series, ``/jettison/events`` as a log.

Works with any server that exports vLLM's metric names, and tolerates a server without metrics. The tables below and
``docs/results.md`` list the kept metrics and their names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from jettison.report.classes import TOKEN_SERIES
from jettison.report.results import SeriesPoint

GAUGE_SERIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "queue",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
"""vLLM's gauges under the names that every tool here uses; summed over engines, usage averaged."""

COUNTER_EVENTS = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_queue_time_seconds_sum": "queue_seconds",
}
"""Totals of vLLM's: the growth of each during the run is a figure under ``events``, beside all of our own counters."""

_OWN = "jettison:"
_SKIPPED_SUFFIXES = ("_bucket", "_sum", "_count", "_created", "_info")


def parse_metrics(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Split a scrape into (gauges by series name, totals by event name).

    Our own metrics keep their name without the prefix (and without a counter's ``_total``) and get their labels
    appended: ``jettison:worker_memory_bytes{worker="0",use="kv"}`` becomes ``worker_memory_bytes/kv/0`` (label
    values in the order of the label names). Lines of other families, and histograms, are never parsed.
    """
    gauges: dict[str, float] = {}
    totals: dict[str, float] = {}
    averaged: dict[str, list[float]] = {}
    for name, labels, value, is_counter in _samples(line for line in text.splitlines() if _is_wanted(line)):
        if name in COUNTER_EVENTS:
            totals[COUNTER_EVENTS[name]] = totals.get(COUNTER_EVENTS[name], 0.0) + value
        elif name == "vllm:kv_cache_usage_perc":
            averaged.setdefault(GAUGE_SERIES[name], []).append(value)
        elif name in GAUGE_SERIES:
            gauges[GAUGE_SERIES[name]] = gauges.get(GAUGE_SERIES[name], 0.0) + value
        elif name.startswith(_OWN):
            own = name.removeprefix(_OWN)
            values = [labels[key] for key in sorted(labels) if key != "model_name"]
            if is_counter:
                totals["/".join([own.removesuffix("_total"), *values])] = value
            else:
                gauges["/".join([own, *values])] = value
    gauges.update({name: sum(values) / len(values) for name, values in averaged.items()})
    return gauges, totals


def _is_wanted(line: str) -> bool:
    if line.startswith("# TYPE "):
        return line.startswith(f"# TYPE {_OWN}") and line.endswith((" counter", " gauge"))
    name = line.split("{", 1)[0].split(" ", 1)[0]
    if name in COUNTER_EVENTS:
        return True
    return (name.startswith(_OWN) or name in GAUGE_SERIES) and not name.endswith(_SKIPPED_SUFFIXES)


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, str], float, bool]]:
    """(name, labels, value, whether it is a counter) of each line."""
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), float(sample.value), family.type == "counter"


class ServerObserver:
    """Polls ``/metrics`` every ``interval_s`` between ``start()`` and ``close()``; both idempotent.

    ``clock`` gives seconds since the run's time zero.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, clock: Callable[[], float], *, interval_s: float = 0.5,
        counts_tokens: bool = False,
    ) -> None:
        """``counts_tokens``: also record first-time tokens by class as series."""
        self.series: dict[str, list[SeriesPoint]] = {}
        self.num_failed_polls = 0
        self._session, self._url, self._clock, self._interval_s = session, url.rstrip("/"), clock, interval_s
        self._counted = TOKEN_SERIES if counts_tokens else ()
        self._first_totals: dict[str, float] | None = None
        self._last_totals: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take a first sample and go on in the background."""
        if self._task is None:
            await self._poll()
            if self.num_failed_polls:
                return  # a server without metrics is not asked again and again
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Take a last sample and stop."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._poll()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._poll()

    async def _poll(self) -> None:
        try:
            async with self._session.get(f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(total=5)) as response:
                if response.status != 200:
                    self.num_failed_polls += 1
                    return
                gauges, totals = parse_metrics(await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError):  # ValueError: a malformed line
            self.num_failed_polls += 1
            return
        now_s = self._clock()
        gauges |= {name: totals[name] for name in self._counted if name in totals}
        for name, value in gauges.items():
            self.series.setdefault(name, []).append((now_s, value))
        if self._first_totals is None:
            self._first_totals = totals
        self._last_totals = totals

    async def events(self) -> dict[str, Any]:
        """Counts from the growth of totals, and the engine's own log if there is one.

        ``GET /jettison/events`` answers ``{"now_s": t, "events": [{"t": s, "kind": ..., ...}]}`` on the engine's clock.
        The log is moved to the run's clock, without events from before the run.
        """
        first = self._first_totals or {}
        counts: dict[str, Any] = {name: value - first.get(name, 0.0) for name, value in self._last_totals.items()}
        for name, value in counts.items():
            counts[name] = int(value) if value == int(value) else value
        log = await self._fetch_log()
        return counts | ({"log": log} if log is not None else {})

    async def deployment(self) -> dict[str, Any] | None:
        """The server's deployment document (``GET /jettison/deployment``); None where it has none."""
        body = await self._fetch("/jettison/deployment")
        return body if isinstance(body, dict) and "format" in body else None

    async def _fetch_log(self) -> list[dict[str, Any]] | None:
        body = await self._fetch("/jettison/events")
        return shift_log(body, self._clock())

    async def _fetch(self, path: str) -> Any:
        """A JSON document; None where there is none."""
        try:
            async with self._session.get(self._url + path, timeout=aiohttp.ClientTimeout(total=10)) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None


def shift_log(body: Any, now_s: float) -> list[dict[str, Any]] | None:
    """The engine's log on the run's clock, from time 0 on; None when ``body`` has another form."""
    if not isinstance(body, dict) or not isinstance(body.get("now_s"), int | float) or isinstance(body["now_s"], bool):
        return None
    offset_s = now_s - body["now_s"]
    log = []
    for event in body.get("events") or []:
        if isinstance(event, dict) and isinstance(event.get("t"), int | float) and isinstance(event.get("kind"), str):
            at_s = event["t"] + offset_s
            if at_s >= 0:
                log.append({**event, "t": round(at_s, 6)})
    return log
