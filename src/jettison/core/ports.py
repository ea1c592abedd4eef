"""What goes into the core and what comes out: events and actions, nothing else.

The core is sans-I/O: ``ClusterCore.handle(event, now_ns) -> list[Action]``. A driver (live or simulated) turns the
world into events and carries out actions, in order. Actions never fail silently: each that can fail comes
back as an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.types import (
    FinishReason,
    GroupId,
    LayerRange,
    Request,
    RequestId,
    SampledToken,
    ShardId,
    TokenLogprobs,
    TransferId,
    WorkerId,
)

if TYPE_CHECKING:
    from jettison.core.requests import RemotePart, RequestState
    from jettison.memory.stages import StagePlan


# --- events: what happened -------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A request was accepted at the edge."""

    request: Request


class CancelRequested(NamedTuple):
    """The client is gone or asked to stop. Unknown and finished ids are ignored."""

    request_id: RequestId


class FinishRequested(NamedTuple):
    """The front end matched a stop string: end with STOP."""

    request_id: RequestId


class StepCompleted(NamedTuple):
    """The last stage finished a step."""

    step_id: int
    tokens: list[SampledToken]
    """One per row that samples, in row order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """Row index -> logprobs of prompt tokens."""
    compute_ns: int


class StepFailed(NamedTuple):
    """A step raised in a worker; nothing of it counts."""

    step_id: int
    message: str
    lost_worker: WorkerId | None = None
    """The worker whose part never came. The step is not to blame: its requests go on, here or elsewhere."""
    recompute: bool = False
    """Nothing is wrong with its rows: a peer did not compute attention that it needed."""


class StepAbandoned(NamedTuple):
    """A step was given up at a safepoint, as AbandonStep asked: nothing of it counts, and nothing is wrong."""

    step_id: int


class LayoutOffered(NamedTuple):
    """Answer to OfferLayout."""

    worker_id: WorkerId
    call_id: int
    offer: LayoutOffer


class LayoutApplied(NamedTuple):
    """Answer to ApplyLayout."""

    worker_id: WorkerId
    call_id: int
    result: LayoutResult


class CallFailed(NamedTuple):
    """OfferLayout, ApplyLayout, LoadShard or KeepShard was refused or rolled back; the worker is as before."""

    worker_id: WorkerId
    call_id: int
    message: str


class ShardLoaded(NamedTuple):
    """Answer to LoadShard and to KeepShard."""

    worker_id: WorkerId
    call_id: int


class TransferEnded(NamedTuple):
    """The one end of a SendKV or a SendShard."""

    transfer_id: TransferId
    complete: bool
    num_bytes: int
    duration_ns: int


class WorkerLost(NamedTuple):
    """A worker is dead, or declared dead: nothing that it still sends is delivered."""

    worker_id: WorkerId


class WorkerJoined(NamedTuple):
    """A lost worker is back: the layers of its home are mapped and empty, all blocks are free, and it has links to all
    live workers."""

    worker_id: WorkerId
    capacity_blocks: int
    life: int
    """Which life of the worker id it is; grows with each restart."""


class WorkerGone(NamedTuple):
    """A lost worker will not be started again."""

    worker_id: WorkerId


class WorkerFenced(NamedTuple):
    """Answer to FenceWorker."""

    worker_id: WorkerId
    call_id: int


class StoredWork(NamedTuple):
    """Offline requests with one deadline that a front end has promised to have answered: accepted here or not yet.
    Others may have the same deadline."""

    deadline_ns: int
    num_requests: int
    """That have no answer yet."""
    num_prompt_tokens: int
    """Of all of these."""
    max_output_tokens: int
    tenant: str = ""
    """As their requests have it."""
    name: str = ""
    """For people."""


class OfflineStored(NamedTuple):
    """All of that there is now; it takes the place of what was told before."""

    works: tuple[StoredWork, ...]


class Tick(NamedTuple):
    """Time has passed (every 100 ms)."""


Event = (
    Arrived | CancelRequested | FinishRequested | StepCompleted | StepFailed | StepAbandoned | LayoutOffered
    | LayoutApplied | CallFailed | ShardLoaded | TransferEnded | WorkerLost | WorkerJoined | WorkerGone | WorkerFenced
    | OfflineStored | Tick
)


# --- actions: what to do ---------------------------------------------------------------------------------------


class StepRow(NamedTuple):
    """One chunk of one request in a step."""

    state: RequestState
    context_len: int
    """Tokens already in the KV cache before this chunk."""
    num_tokens: int
    samples: bool
    """The chunk ends at the request's last known token, and it wants another: a new one is drawn."""
    remote: tuple[RemotePart, ...] = ()
    """What of its KV the stages attend to elsewhere, as it was when the step was planned."""


class RunStep(NamedTuple):
    """Run one microbatch through the stages of a group.

    The driver must read tokens and block tables while it carries the action out, not later: they change with the
    next event.
    """

    step_id: int
    group_id: GroupId
    epoch: int
    stages: tuple[StagePlan, ...]
    rows: tuple[StepRow, ...]
    safepoint_layers: int = 0
    """The first stage may give the step up after every so many layers (AbandonStep); 0: nowhere."""


class AbandonStep(NamedTuple):
    """Give a step up at its next safepoint. One that has none left, or has passed its first stage, runs to its end."""

    worker_id: WorkerId
    """Of the step's first stage."""
    step_id: int


class OfferLayout(NamedTuple):
    """Ask a worker what a layout needs."""

    worker_id: WorkerId
    call_id: int
    spec: LayoutSpec
    live_blocks: int


class ApplyLayout(NamedTuple):
    """Make a worker's memory look like ``spec``."""

    worker_id: WorkerId
    call_id: int
    spec: LayoutSpec
    live_blocks: int
    version: int
    copies: tuple[tuple[int, int], ...]


class SendKV(NamedTuple):
    """Copy KV blocks from one place to another: a place is a worker's arenas, or its host pool.

    Inside one worker it is a copy to its host pool or from there, which follows the steps issued before it.
    """

    transfer_id: TransferId
    src: WorkerId
    dst: WorkerId
    layers: LayerRange
    src_blocks: tuple[int, ...]
    """Blocks of the arenas, or slots of the host pool."""
    dst_blocks: tuple[int, ...]
    """Likewise, at the destination."""
    urgent: bool = False
    """Goes before other KV: a request can run as soon as it is there."""
    from_host: bool = False
    to_host: bool = False
    beside_steps: bool = False
    """Inside one worker: the copy runs while steps do. No step issued before its end reads what it writes, and nothing
    writes what it reads."""


class SendShard(NamedTuple):
    """Copy a parameter shard from worker to worker."""

    transfer_id: TransferId
    src: WorkerId
    dst: WorkerId
    shard: ShardId


class LoadShard(NamedTuple):
    """Fill a mapped shard from the machine's copy in host memory, or, where that lacks it, from the model folder."""

    worker_id: WorkerId
    call_id: int
    shard: ShardId


class KeepShard(NamedTuple):
    """Write a shard that is mapped and filled to the machine's copy in host memory. Answer: ShardLoaded."""

    worker_id: WorkerId
    call_id: int
    shard: ShardId


class CancelTransfer(NamedTuple):
    """Stop a transfer at its next piece; its TransferEnded still comes."""

    src: WorkerId
    transfer_id: TransferId


class FenceWorker(NamedTuple):
    """Tell a worker that another is lost.

    At once it closes its link to lives up to ``lost_life``: nothing that they sent is used any more. Answer:
    WorkerFenced, when every step received before has finished here (those that wait for the lost one fail).
    """

    worker_id: WorkerId
    call_id: int
    lost: WorkerId
    lost_life: int


class EmitTokens(NamedTuple):
    """One token each for requests that go on. Entry i of ``tokens`` is for the request of entry i of ``states``."""

    states: list[RequestState]
    tokens: list[SampledToken]

    def each(self) -> Iterator[Emit]:
        """The same as one ``Emit`` a request."""
        return (Emit(s.request_id, (token,), state=s) for s, token in zip(self.states, self.tokens, strict=True))


class Emit(NamedTuple):
    """Tokens for a client. With a ``finish_reason`` it is the request's last."""

    request_id: RequestId
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    state: RequestState | None = None
    """The request, for what else the front end wants to know (times, cached tokens, prompt logprobs)."""

    def each(self) -> tuple[Emit]:
        """Itself, as ``EmitTokens.each`` has it."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Record:
    """A decision or a milestone, for the event log: what, when, with which inputs and outcome."""

    kind: str
    time_ns: int
    fields: Mapping[str, object] = field(default_factory=dict)


Transfer = SendKV | SendShard
"""What a transfer id names: each ends with one TransferEnded, as long as its destination lives."""

Action = (
    RunStep | AbandonStep | OfferLayout | ApplyLayout | SendKV | SendShard | LoadShard | KeepShard | CancelTransfer
    | FenceWorker | EmitTokens | Emit | Record
)
