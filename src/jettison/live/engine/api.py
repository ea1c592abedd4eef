"""What the HTTP server (or any other front end) may ask of a running engine.

A protocol, so that the server is tested against a fake and the engine without HTTP.
All calls happen on one asyncio loop; none blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from jettison.core.observing import NO_OFFLINE, OfflineGauges
from jettison.core.ports import Record, StoredWork
from jettison.core.requests import RequestState
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.types import FinishReason, Request, RequestId, SampledToken, TokenLogprobs, WorkerId

EngineState = Literal["loading", "ready", "draining", "failed"]

OFTEN_LOST = "the server's engine ended each time that it worked on this request"
"""Error of a request that is not tried once more: nor should its client, as each try may cost a controller."""


class LogPart(NamedTuple):
    """What was read of the event log for a span of time."""

    records: Sequence[Record]
    """Oldest first."""
    num_older: int
    """Records of that span that were left out because they were too many: they are older than ``records``."""
    is_kept: bool
    """Whether the log still has the whole span: it keeps so many records and forgets older ones."""

    @property
    def is_whole(self) -> bool:
        """Whether ``records`` are all there were."""
        return self.is_kept and not self.num_older


@dataclass(slots=True)
class RequestTimings:
    """Milestones of one request, integer nanoseconds of the engine's monotonic clock; None = not reached."""

    arrival_ns: int
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    num_preemptions: int = 0

    def note(self, state: RequestState) -> RequestTimings:
        """Take what the core knows of the request by now; returns itself."""
        self.first_scheduled_ns, self.first_token_ns = state.first_scheduled_ns, state.first_token_ns
        self.finished_ns, self.num_preemptions = state.finished_ns, state.num_preemptions
        return self


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request. The last event, and only the last, has a ``finish_reason``. A request for no tokens
    (``max_tokens`` 0) has one event, without any."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that stopped it, when a stop token (or end of sequence) did; it is the last of ``tokens``."""
    error: str | None = None
    """With ``FinishReason.ERROR``: a message safe to show to a client."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Whole prompt, first entry None; sent once, with the first event, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    timings: RequestTimings | None = None
    """Set on the last event."""


@dataclass(slots=True)
class GroupSnapshot:
    """One group, now."""

    group_id: int
    worker_ids: tuple[int, ...]
    layer_ranges: tuple[tuple[int, int], ...]
    num_running: int
    num_waiting: int
    num_moving: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    offline: OfflineGauges = NO_OFFLINE


@dataclass(slots=True)
class WorkerSnapshot:
    """One worker's memory, now, in bytes."""

    worker_id: int
    pid: int
    alive: bool
    budget_bytes: int
    parameter_bytes: int
    dropped_parameter_bytes: int
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int
    stage_busy_seconds: float = 0.0
    """As a stage of pipelines: time spent computing, and time spent waiting while the pipeline had work."""
    stage_bubble_seconds: float = 0.0
    rss_bytes: int = 0
    """Of its process, as the operating system counts: mapped pages of the budget among them."""
    held_bytes: int = 0
    """Of its device, behind the pages of the budget: what sleep gives back is not held."""
    foreign_bytes: int = 0
    """Of ``kv_bytes``: KV of layers that it gave up in a drop, kept until another has it."""
    host_bytes: int = 0
    """Of its host pool, outside the budget."""
    host_used_bytes: int = 0
    sleep: str = "awake"
    """awake, leaving, emptying, asleep or waking; unprovisioned or starting: it has no process (yet)."""

    @property
    def is_asleep(self) -> bool:
        """It serves nothing, and nothing that it has begun will make it. It has a process."""
        return self.sleep in ("emptying", "asleep")

    @property
    def is_provisioned(self) -> bool:
        """It has a process, or had one that has died and is started again."""
        return self.sleep not in ("unprovisioned", "starting")


@dataclass(slots=True)
class EngineSnapshot:
    """State of the whole engine for /health, /metrics and the console."""

    state: EngineState
    block_size: int
    groups: list[GroupSnapshot] = field(default_factory=list)
    workers: list[WorkerSnapshot] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    """Monotone totals: num_preemptions, prefix_cache_queries, prefix_cache_hits (tokens), drops, restores,
    drop_seconds, restore_seconds, exchanged_bytes, pulled_bytes, recomputed_tokens, cancelled,
    worker_losses, worker_joins, recoveries, recovery_seconds, rebalanced, and what else the engine counts."""
    gauges: dict[str, float] = field(default_factory=dict)
    """What rungs of the ladder show now, by name: ``devices_needed``, ..."""
    num_unplaced: int = 0
    """Accepted online requests that wait outside all groups, because no living worker can take them now."""
    num_unplaced_offline: int = 0
    """Offline ones."""
    checkpoint_lag_blocks: int = 0
    """Sealed blocks of the candidates for checkpoints that have not been copied."""
    num_devices_wanted: int = 0
    """Awake, on their way back, or asked for from outside."""
    slo: Objectives = UNKNOWN_OBJECTIVES
    """Of online requests, as they are known now."""
    troubles: tuple[str, ...] = ()
    """Why workers that live cannot serve again yet, or dead ones cannot be started, a line each: weights that no worker
    has, and what to do; hosts on which nothing can be placed."""
    weights: str | None = None
    """Digest of the weights that are served; None before they are read."""
    own_products: tuple[str, ...] = ()
    """Shapes of products that workers compute themselves, where a card's library does not keep rows independent of the
    batch."""
    products_of_some: tuple[str, ...] = ()
    """Those of them that other workers leave to the library: bits may change where a request moves."""
    wakes_s: tuple[float, ...] = ()
    """What waking each sleeper that may be woken would take, the soonest first."""
    waits: Mapping[WorkerId, str] = field(default_factory=dict)
    """Instances whose processes were asked for and could not be started yet: why."""

    @property
    def num_waiting(self) -> int:
        """Online requests that wait, in the groups' queues and outside them."""
        return sum(group.num_waiting for group in self.groups) + self.num_unplaced


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while the engine runs."""

    model_dir: str
    max_model_len: int
    """Most tokens (prompt + output) of one request: the model's context or ``--max-model-len``."""
    max_request_tokens: int
    """Most tokens that all memory could ever hold for one request."""
    max_offline_tokens: int
    """Most tokens of an offline request: what one instance holds, as none merge for it."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class PendingEvents(AsyncIterator[TokenEvent]):
    """Events of a request that an engine in another process has not accepted yet."""

    @abstractmethod
    async def accepted(self) -> None:
        """Returns once it has. Raises what ``EngineClient.submit`` raises."""


class EngineClient(Protocol):
    """The engine as its front end sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> EngineState: ...

    def ready_in_s(self) -> float | None:
        """How long loading is predicted to go on, in seconds; None where nothing loads, or nothing is known of it."""
        ...

    def submit(self, request: Request, *, is_further: bool = False) -> AsyncIterator[TokenEvent]:
        """Accept a request, synchronously, and return its events.

        ``is_further``: it belongs to one accepted just before (another choice of the same answer), so the queue's
        limit is not held against it: its own siblings, which no step could take yet, would fill the queue. Nor is it
        against an offline request, which keeps no online one waiting.
        Raises NotReadyError (loading, draining, failed), OverCapacityError (queue full), TooLongError, RequestError
        (token ids outside the vocabulary, a salt that is no text).
        Once accepted the iterator yields exactly one event with a finish reason and then ends. Leaving the
        iterator early (aclose, cancellation) cancels the request.
        """
        ...

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None:
        """Whether the queue takes another request of a tenant, behind ``num_arriving`` of all that are not submitted
        yet. Cheap.

        Raises OverCapacityError. ``submit`` asks the same by itself; a front end that asks on arrival need not read a
        request that will be refused.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; unknown or finished ids are ignored. Ends with CANCELLED."""
        ...

    def finish_early(self, request_id: RequestId) -> None:
        """The front end matched a stop string: free everything, end with STOP and no further tokens."""
        ...

    def num_unread(self, request_id: RequestId) -> int:
        """Events of a request under way that its iterator has not yielded yet; 0 for any other. Cheap."""
        ...

    def timings(self, request_id: RequestId) -> RequestTimings | None:
        """Milestones so far of a request that is under way; None for any other. Cheap."""
        ...

    def note_stored(self, works: Sequence[StoredWork]) -> None:
        """All offline work that the front end has promised to have done by some time, accepted here or not: an instance
        that a deadline needs is woken, and does not fall asleep. Nothing before the engine is ready."""
        ...

    def objectives(self) -> Objectives:
        """Latencies that online requests are judged by, as they are known now; cheap (asked for each request)."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """State for metrics; cheap (called on every scrape)."""
        ...


class SleepControl(Protocol):
    """As the front end sees it. ``instance``: one of them; None: all that it can be meant for. All raise RequestError
    for an instance that there is not, SleepRefusedError, and NotReadyError where the engine is not ready."""

    def sleep(self, instance: int | None, level: int) -> Mapping[str, Any]:
        """Begin to put instances to sleep."""
        ...

    def wake(self, instance: int | None) -> Mapping[str, Any]:
        """Begin to wake instances, or call back those that have not left."""
        ...

    def states(self, instance: int | None = None) -> Mapping[str, Any]:
        """The instances and whether each sleeps."""
        ...
