"""Metrics under the names that vLLM's dashboards and gateways read, and our own under ``jettison:``.

One process owns all metrics; what front ends in processes of their own have told it is added at each scrape
(``fronts.desk``). Latencies are observed as they happen; gauges and totals of the engine are read from its snapshot at
each scrape, so that they cannot drift.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jettison.core.counters import HELP
from jettison.core.observing import NO_GROUP
from jettison.live.engine.api import EngineClient, EngineSnapshot, EngineState, RequestTimings
from jettison.live.engine.cards import CardUse
from jettison.server.attainment import Attainment

NANOSECONDS = 1_000_000_000

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
           80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_FINISH_REASONS = ("stop", "length", "abort", "error")
_SHED_REASONS = ("queue_full", "key_limit_reached", "tokenizer_busy", "loading", "draining", "failed")

_VLLM_NAMES = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""Totals that vLLM's dashboards know."""
_VLLM_COUNTERS = {name: (f"vllm:{name}", HELP[name]) for name in _VLLM_NAMES}
_OWN_COUNTERS = {name: text for name, text in HELP.items() if name not in _VLLM_NAMES} | {
    "activations": "Activations that travelled between stages.",
    "activation_delay_seconds": "Time that activations were on their way between stages.",
    "remote_attention_seconds": "Time that stages waited for attention at peers.",
    "expert_tokens": "Pairs of a token and an expert in sparse layers, in every eighth step.",
    "expert_tokens_at_busiest": "As many if every expert of a layer had what its busiest one had.",
}  # fmt: skip
"""Always exported, from zero on; totals of other names are exported when the engine reports them."""

_ATTAINMENT = {
    "slo_online_requests": "Online requests that were judged by the latency objectives.",
    "slo_online_requests_within": "Those whose first token and whose every gap kept the objectives.",
    "slo_online_gaps": "Gaps between tokens of online requests that were judged by the objective for them.",
    "slo_online_gaps_within": "Those that kept it.",
}

DESCRIBED_COUNTERS = frozenset(_VLLM_COUNTERS) | frozenset(_OWN_COUNTERS)
"""Totals of the engine with a help text."""

_OFFLINE_GAUGES = {
    "offline_waiting": "Offline requests waiting at the group.",
    "offline_running": "Offline requests running in the group.",
    "offline_hosted": "Offline requests with their KV in host memory, or on its way back.",
    "offline_checkpointed": "Running offline requests that have a copy of some of their KV in host memory.",
    "offline_host_blocks": "KV blocks of the group's offline requests that host memory has.",
    "offline_blocks": "KV blocks of the group that offline requests hold.",
}
"""Fields of ``core.observing.OfflineGauges``."""

_GAUGES = {
    "devices_needed": "Instances and pipelines that the packing takes for the online requests that there are.",
    "devices_used": "Instances and pipelines where online requests live.",
    "packing_owed": "Requests that live elsewhere than the packing wants, and are not on their way.",
    "packing_lost": "Instances and pipelines that requests take because moves were refused.",
    "devices_needed_for_deadlines": "Instances that batches with completion windows take to be done in time.",
    "packing_utilisation": "Part of the KV memory of instances in use that requests hold.",
    "instances_provisioned": "Instances that have a process.",
    "instances_wanted": "Those, and those whose process is being started.",
}
"""Gauges of rungs, exported while there are such rungs."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")


class Histogram:
    """Cumulative buckets with an observation cheap enough for every token (a bisection)."""

    __slots__ = ("_bounds", "_counts", "_sum", "help_text", "name")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket includes its upper bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def observed(self) -> tuple[tuple[int, ...], float]:
        """Counts of the buckets, and the sum."""
        return tuple(self._counts), self._sum

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count what another of the same bounds has ``observed``."""
        self._counts = [own + other for own, other in zip(self._counts, counts, strict=True)]
        self._sum += total

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def family(self, model_name: str) -> HistogramMetricFamily:
        """The histogram in the form of the exposition."""
        family = HistogramMetricFamily(self.name, self.help_text, labels=["model_name"])
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric([model_name], buckets, self._sum)
        return family


class Observed(msgspec.Struct, frozen=True):
    """All that one server, or one front end of it, has observed."""

    histograms: dict[str, tuple[tuple[int, ...], float]]
    finished: dict[str, int]
    sheds: dict[str, int]
    num_prompt_tokens: int
    num_generation_tokens: int
    attainment: tuple[int, int, int, int]

    def since(self, earlier: Observed) -> Observed:
        """What it has observed beyond an earlier state of its own."""
        histograms = {}
        for name, (counts, total) in self.histograms.items():
            earlier_counts, earlier_total = earlier.histograms[name]
            less = tuple(now - before for now, before in zip(counts, earlier_counts, strict=True))
            histograms[name] = less, total - earlier_total
        requests, requests_within, gaps, gaps_within = (
            now - before for now, before in zip(self.attainment, earlier.attainment, strict=True))
        return Observed(
            histograms,
            {reason: count - earlier.finished.get(reason, 0) for reason, count in self.finished.items()},
            {reason: count - earlier.sheds.get(reason, 0) for reason, count in self.sheds.items()},
            self.num_prompt_tokens - earlier.num_prompt_tokens,
            self.num_generation_tokens - earlier.num_generation_tokens,
            (requests, requests_within, gaps, gaps_within))


class ServerMetrics(Collector):
    """Observations of one server, and the engine's state at each scrape."""

    def __init__(
        self, engine: EngineClient, model_name: str, card_uses: Callable[[], list[CardUse]] | None = None
    ) -> None:
        self._engine = engine
        self._card_uses = card_uses
        self._model_name = model_name
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Gap between neighbouring tokens.", _TOKEN_S)
        self.tpot = Histogram("vllm:request_time_per_output_token_seconds", "Mean gap of one request.", _TOKEN_S)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Arrival to first scheduled.", _REQUEST_S)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "First scheduled to first token.", _REQUEST_S)
        self.decode = Histogram("vllm:request_decode_time_seconds", "First to last token.", _REQUEST_S)
        self.prompt_size = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_size = Histogram("vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self.attainment = Attainment()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        """Tokens in answers, as in ``usage.completion_tokens`` and vLLM's metric: the tokens that reached the front end
        before their request was over. A stop string's tokens count; tokens that the engine made after it do not."""
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._sheds = dict.fromkeys(_SHED_REASONS, 0)

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return (self.ttft, self.itl, self.tpot, self.e2e, self.queue, self.prefill, self.decode, self.prompt_size,
                self.output_size)

    def observed(self) -> Observed:
        """All so far."""
        kept = self.attainment
        return Observed(
            {each.name: each.observed for each in self._histograms}, dict(self._finished), dict(self._sheds),
            self.num_prompt_tokens, self.num_generation_tokens,
            (kept.num_requests, kept.num_requests_within, kept.num_gaps, kept.num_gaps_within))

    def add(self, other: Observed) -> None:
        """Count what another has observed, too."""
        for each in self._histograms:
            each.add(*other.histograms[each.name])
        for reason, count in other.finished.items():
            self._finished[reason] += count
        for reason, count in other.sheds.items():
            self._sheds[reason] = self._sheds.get(reason, 0) + count
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_generation_tokens += other.num_generation_tokens
        own, (requests, requests_within, gaps, gaps_within) = self.attainment, other.attainment
        own.num_requests += requests
        own.num_requests_within += requests_within
        own.num_gaps += gaps
        own.num_gaps_within += gaps_within

    def summed(self, others: Iterable[Observed]) -> ServerMetrics:
        """Itself and others together, as of now."""
        together = ServerMetrics(self._engine, self._model_name, self._card_uses)
        for each in (self.observed(), *others):
            together.add(each)
        return together

    def count_shed(self, reason: str) -> None:
        """A request was refused for lack of capacity or readiness: one of ``_SHED_REASONS``."""
        self._sheds[reason] = self._sheds.get(reason, 0) + 1

    def count_finished(self, reason: str, num_prompt: int, num_output: int, timings: RequestTimings | None) -> None:
        """One engine request ended: ``reason`` is stop, length, abort or error."""
        self._finished[reason] += 1
        self.prompt_size.observe(num_prompt)
        self.output_size.observe(num_output)
        if timings is None:
            return
        arrival, scheduled = timings.arrival_ns, timings.first_scheduled_ns
        first, last = timings.first_token_ns, timings.finished_ns
        if last is not None:
            self.e2e.observe((last - arrival) / NANOSECONDS)
        if scheduled is not None:
            self.queue.observe((scheduled - arrival) / NANOSECONDS)
        if scheduled is not None and first is not None:
            self.prefill.observe((first - scheduled) / NANOSECONDS)
        if first is not None and last is not None:
            self.decode.observe((last - first) / NANOSECONDS)
            if num_output > 1:
                self.tpot.observe((last - first) / NANOSECONDS / (num_output - 1))

    def exposition(self) -> bytes:
        """The scrape's body."""
        collectors = CollectorRegistry(auto_describe=False)
        collectors.register(self)
        return generate_latest(collectors)

    def collect(self) -> Iterable[Metric]:
        """Every family, from one snapshot."""
        snapshot = self._engine.snapshot()
        yield from self._requests(snapshot)
        yield from self._totals(snapshot)
        for histogram in self._histograms:
            yield histogram.family(self._model_name)
        yield from self._groups(snapshot)
        yield from self._workers(snapshot)
        if self._card_uses is not None:
            yield from self._cards(self._card_uses())

    def _cards(self, uses: Iterable[CardUse]) -> Iterator[Metric]:
        rows = [
            ((str(use.number), name), float(num_bytes)) for use in uses
            for name, num_bytes in (
                ("pages", use.pages_bytes), ("others", use.others_bytes), ("free", use.free_bytes))
        ]
        yield self._labelled(
            "jettison:card_memory_bytes", "Memory of a card: of the instances' pages, of all else that uses it, free.",
            ("card", "use"), rows)

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        return self._labelled(name, help_text, (), [((), value)])

    def _labelled(
        self, name: str, help_text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=["model_name", *labels])
        for values, value in rows:
            family.add_metric([self._model_name, *values], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _requests(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        groups = snapshot.groups
        total = sum(group.kv_blocks_total for group in groups)
        used = sum(group.kv_blocks_used for group in groups)
        running = sum(group.num_running + group.num_moving for group in groups)
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for memory, a step or a worker.",
                          snapshot.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", used / total if total else 0.0)
        yield self._gauge("jettison:offline_unplaced", "Offline requests that no living worker can take now.",
                          snapshot.num_unplaced_offline)
        for name, value in snapshot.gauges.items():
            if _NAME.fullmatch(name):
                help_text = _GAUGES.get(name, f"{name.replace('_', ' ').capitalize()}.")
                yield self._gauge(f"jettison:{name}", help_text, value)
        yield self._gauge("jettison:checkpoint_lag_blocks", "KV blocks that are to be copied to host memory and have "
                          "not been.", snapshot.checkpoint_lag_blocks)
        for kind, limit_s in (("ttft", snapshot.slo.ttft_s), ("tpot", snapshot.slo.tpot_s)):
            if limit_s is not None:
                yield self._gauge(f"jettison:slo_{kind}_seconds", "Objective of online requests, as known now.",
                                  limit_s)
        rows = [((str(snapshot.block_size), str(total)), 1.0)]
        yield self._labelled("vllm:cache_config_info", "KV cache now.", ("block_size", "num_gpu_blocks"), rows)
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"])
        for reason, count in self._finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished
        sheds = CounterMetricFamily(
            "jettison:sheds", "Requests refused, by reason.", labels=["model_name", "reason"])
        for reason, count in self._sheds.items():
            sheds.add_metric([self._model_name, reason], count)
        yield sheds

    def _totals(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens accepted.", self.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens of answers.", self.num_generation_tokens)
        totals = snapshot.counters
        for key, (name, help_text) in _VLLM_COUNTERS.items():
            yield self._counter(name, help_text, totals.get(key, 0.0))
        unknown = [key for key in totals if key not in _VLLM_COUNTERS and _NAME.fullmatch(key)]
        others = {key: f"{key.replace('_', ' ').capitalize()}." for key in unknown}
        for key, help_text in (others | _OWN_COUNTERS).items():
            yield self._counter(f"jettison:{key}", help_text, totals.get(key, 0.0))
        for key, value in self.attainment.counters().items():
            yield self._counter(f"jettison:{key}", _ATTAINMENT[key], value)

    def _groups(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        groups = snapshot.groups
        yield self._gauge("jettison:groups", "Pipelines that serve now.", len(groups))
        states = [((state,), float(state == snapshot.state)) for state in get_args(EngineState)]
        yield self._labelled("jettison:engine_state", "1 for the state that the engine is in.", ("state",), states)
        for name, help_text, attribute in (
            ("group_requests_running", "Requests running in the group.", "num_running"),
            ("group_requests_waiting", "Requests waiting at the group.", "num_waiting"),
            ("group_requests_moving", "Requests whose KV is on the move.", "num_moving"),
            ("kv_blocks_total", "KV blocks of the group; grows when parameters are dropped.", "kv_blocks_total"),
            ("kv_blocks_used", "KV blocks that requests hold.", "kv_blocks_used"),
            ("kv_blocks_cached", "Free KV blocks that still hold a prefix.", "kv_blocks_cached"),
        ):
            rows = [((str(group.group_id),), float(getattr(group, attribute))) for group in groups]
            yield self._labelled(f"jettison:{name}", help_text, ("group",), rows)
        for name, help_text in _OFFLINE_GAUGES.items():
            rows = [((str(group.group_id),), float(getattr(group.offline, name))) for group in groups]
            yield self._labelled(f"jettison:{name}", help_text, ("group",), rows)
        sizes = [((str(group.group_id),), float(len(group.worker_ids))) for group in groups]
        yield self._labelled("jettison:group_size", "Workers in the group.", ("group",), sizes)
        of = {worker_id: group.group_id for group in groups for worker_id in group.worker_ids}
        rows = [((str(w.worker_id),), float(of.get(w.worker_id, NO_GROUP))) for w in snapshot.workers]
        yield self._labelled("jettison:worker_group", "The worker's group; -1: none.", ("worker",), rows)

    def _workers(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        workers = snapshot.workers
        yield self._gauge("jettison:devices_asleep", "Workers that sleep.", sum(w.is_asleep for w in workers))
        awake = sum(w.alive and w.sleep == "awake" for w in workers)
        yield self._gauge("jettison:devices_awake", "Workers that live and are awake, none on its way.", awake)
        yield self._gauge("jettison:devices_wanted", "Workers that are to be awake, those asked for from outside "
                          "included.", snapshot.num_devices_wanted)
        uses = {"parameters": "parameter_bytes", "kv": "kv_bytes", "workspace": "workspace_bytes", "free": "free_bytes"}
        memory = [
            ((str(worker.worker_id), use), float(getattr(worker, attribute)))
            for worker in workers
            for use, attribute in uses.items()
        ]
        yield self._labelled("jettison:worker_memory_bytes", "Memory of a worker, by use.", ("worker", "use"), memory)
        for name, help_text in (
            ("stage_busy_seconds", "Time that the worker computed as a stage of a pipeline."),
            ("stage_bubble_seconds", "Time that it stood still while its pipeline had work."),
        ):
            family = CounterMetricFamily(f"jettison:{name}", help_text, labels=["model_name", "worker"])
            for worker in workers:
                family.add_metric([self._model_name, str(worker.worker_id)], getattr(worker, name))
            yield family
        for name, help_text, attribute in (
            ("worker_memory_budget_bytes", "Memory limit of the worker.", "budget_bytes"),
            ("dropped_parameter_bytes", "Parameter bytes given to the KV cache.", "dropped_parameter_bytes"),
            ("worker_alive", "1 while the worker's process lives.", "alive"),
            ("worker_asleep", "1 while the worker sleeps, its layers given up.", "is_asleep"),
            ("worker_rss_bytes", "Resident memory of the worker's process.", "rss_bytes"),
        ):
            told = workers if name != "worker_alive" else [w for w in workers if w.is_provisioned]  # 0 is an alarm
            rows = [((str(worker.worker_id),), float(getattr(worker, attribute))) for worker in told]
            yield self._labelled(f"jettison:{name}", help_text, ("worker",), rows)
