"""The core's inputs and outputs: events and actions, nothing else.

The core is sans-I/O: ``ClusterCore.handle(event, now_ns) -> list[Action]``. A driver (live or simulated) turns the
world into events and carries out actions, in order. Actions never fail silently: each that can fail comes
back as an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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


# --- events ----------------------------------------------------------------------------------------------------


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
    kept_layers: int | None = None
    """Its rows from ``RunStep.sheds_from`` on were shed: the first stage has computed so many of its layers for them,
    and keeps them by the step's id. Tokens are those of the other rows. None: all rows are computed."""
    has_prepared: bool = False
    """A stage has also prepared later steps, as captures of graphs do: its time says nothing of steps like it."""


class StepFailed(NamedTuple):
    """A step raised in a worker; nothing of it counts."""

    step_id: int
    message: str
    lost_worker: WorkerId | None = None
    """The worker that never sent its part. The step is not to blame: its requests go on, here or elsewhere."""
    recompute: bool = False
    """Its rows are sound: a peer did not compute attention that the step needed, or the step before it sampled none of
    its tokens."""


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


class LinkLost(NamedTuple):
    """A worker's link to a peer has failed, and none is opened again between these lives. Nothing arrives here over it
    any more, and nothing is sent: of transfers it has told what it knows. What was on the way may have been heard of at
    neither end; so whatever has no end when both ends have told this is over."""

    worker_id: WorkerId
    peer: WorkerId
    peer_life: int


class WorkerLost(NamedTuple):
    """A worker is dead, or declared dead: messages that it still sends are not delivered."""

    worker_id: WorkerId


class WorkerJoined(NamedTuple):
    """A lost worker is back: the layers of its home are mapped and empty, all blocks are free, and it has links to all
    live workers."""

    worker_id: WorkerId
    capacity_blocks: int
    life: int
    """Which life of the worker id it is; grows with each restart."""
    kept: frozenset[ShardId] = frozenset()
    """Shards that it has all the same: it has outlived its controller."""


class WorkersEmpty(NamedTuple):
    """These have started without having loaded anything, as their hosts have no folder of the model. Comes before any
    request."""

    worker_ids: tuple[WorkerId, ...]


class WorkerGone(NamedTuple):
    """A lost worker will not be started again."""

    worker_id: WorkerId


class StartFailed(NamedTuple):
    """A process that AskInstance has asked for could not be started, or placed; it is tried again by itself."""

    worker_id: WorkerId
    reason: str


class WorkerFenced(NamedTuple):
    """Answer to FenceWorker."""

    worker_id: WorkerId
    call_id: int


class StoredWork(NamedTuple):
    """Offline requests with one deadline that a front end has promised to answer, accepted here or not yet. Other
    requests may have the same deadline."""

    deadline_ns: int
    num_requests: int
    """Requests without an answer yet."""
    num_prompt_tokens: int
    """Prompt tokens of all of these."""
    max_output_tokens: int
    tenant: str = ""
    """The tenant of these requests."""
    name: str = ""
    """A name to show to users."""


class OfflineStored(NamedTuple):
    """All stored work there is now; it replaces that of earlier events."""

    works: tuple[StoredWork, ...]


class Tick(NamedTuple):
    """Time has passed (every 100 ms)."""


Event = (
    Arrived | CancelRequested | FinishRequested | StepCompleted | StepFailed | StepAbandoned | LayoutOffered
    | LayoutApplied | CallFailed | ShardLoaded | TransferEnded | LinkLost | WorkerLost | WorkerJoined | WorkerGone
    | StartFailed | WorkerFenced | WorkersEmpty | OfflineStored | Tick
)


# --- actions ---------------------------------------------------------------------------------------------------


class StepRow(NamedTuple):
    """One chunk of one request in a step."""

    state: RequestState
    context_len: int
    """Tokens already in the KV cache before this chunk."""
    num_tokens: int
    samples: bool
    """The chunk ends at the request's last token, known or under way, and the request wants another: a token is
    sampled."""
    remote: tuple[RemotePart, ...] = ()
    """Parts of its KV that the stages attend to on other workers, as of the planning of the step."""


step_row = partial(tuple.__new__, StepRow)
"""Makes a ``StepRow`` of one tuple of all its fields, in half the time: every row of every step is one."""


class TokenSources(NamedTuple):
    """Where the tokens come from that a step ahead was planned without (``core.serving.stepsahead``)."""

    step_id: int
    """The step before it on the same worker, which samples them."""
    places: Mapping[int, int]
    """Row with one token, not known yet -> which of the tokens that the step before samples it is."""


class Resumption(NamedTuple):
    """The rows of a step from ``RunStep.sheds_from`` on are those that an earlier one has shed: they join the others at
    the layer that they have reached."""

    step_id: int
    """The step by whose id the first stage keeps them."""
    num_layers: int
    """Layers of the first stage that they have behind them."""
    most_layers: int | None = None
    """Layers after which the stage keeps them again, if they are not at its end then; None: it computes all."""


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
    """Layers between two points at which the first stage may give the step up (AbandonStep); 0: it may not."""
    follows: TokenSources | None = None
    """Of a step with tokens that are not known yet: it fails where the step before it has sampled none."""
    sheds_from: int | None = None
    """With safepoints: where the step is told to give up, only its rows from this one on stop there, offline ones, and
    the first stage keeps them (``core.serving.slices``); the others run on. None: the whole step is given up, and
    nothing is kept."""
    resumes: Resumption | None = None
    """Of a step whose rows were shed by an earlier one: it fails where these are not kept any more."""


class AbandonStep(NamedTuple):
    """Give a step up at its next safepoint, or the rows that it may shed. A step that has no safepoint left, or has
    passed its first stage, runs to its end."""

    worker_id: WorkerId
    """The worker of the step's first stage."""
    step_id: int


class OfferLayout(NamedTuple):
    """Ask a worker for its offer for a layout."""

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
    gives_back: bool = False
    """It only frees KV of layers that the worker no longer runs, for the arenas of those that it does: it waits for no
    step."""


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
    """It goes before other KV: a request can run as soon as it has arrived."""
    from_host: bool = False
    to_host: bool = False
    beside_steps: bool = False
    """Inside one worker: the copy runs while steps do. No step issued before its end reads the blocks that it writes,
    and nothing writes the blocks that it reads."""
    is_settled: bool = False
    """To another worker: all steps that write these blocks at its source have ended. It waits for no step."""


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

    At once it closes its link to lives up to ``lost_life``: nothing that these sent is used any more. Answer:
    WorkerFenced, when every step received before has finished here (steps that wait for the lost worker fail).
    """

    worker_id: WorkerId
    call_id: int
    lost: WorkerId
    lost_life: int


class AskInstance(NamedTuple):
    """Have a process started for a worker that has none. It starts empty. Answer, in time: WorkerJoined; StartFailed as
    often as a start fails meanwhile."""

    worker_id: WorkerId


class ReleaseInstance(NamedTuple):
    """End the process of a worker that holds nothing, or give up its start, and its place on its host with it. It has
    no answer: the worker is over with this action."""

    worker_id: WorkerId


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
    """The request, from which the front end reads times, cached tokens and prompt logprobs."""

    def each(self) -> tuple[Emit]:
        """Itself, as ``EmitTokens.each`` has it."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Record:
    """A decision or a milestone, for the event log: its kind, its time, its inputs and outcome."""

    kind: str
    time_ns: int
    fields: Mapping[str, object] = field(default_factory=dict)


Transfer = SendKV | SendShard
"""The kinds of transfers: each ends with one TransferEnded, as long as its destination lives and its link holds
(``LinkLost``)."""

Action = (
    RunStep | AbandonStep | OfferLayout | ApplyLayout | SendKV | SendShard | LoadShard | KeepShard | CancelTransfer
    | FenceWorker | AskInstance | ReleaseInstance | EmitTokens | Emit | Record
)
