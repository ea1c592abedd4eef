"""The records that travel between the controller and its workers.

Small tagged msgspec structs over the control channel; bulk bytes (activations, KV, parameters) go from
worker to worker over links and are described by ``transport``'s frame header, never by these.

In which order a worker obeys them: ``core.controlstream``.
"""

from __future__ import annotations

import msgspec

from jettison.device.model.identity import WeightsIdentity
from jettison.types import ShardId, TransferId, WorkerId


class Step(msgspec.Struct, tag="step", array_like=True):
    """Run one microbatch; ``payload`` is ``live.wire.codec``'s encoding of ``device.step.StepInput``."""

    payload: bytes


class RetainedKVRecord(msgspec.Struct, array_like=True):
    """Wire form of ``memory.layout.RetainedKV``."""

    layer_lo: int
    layer_hi: int
    block_ids: list[int]


class LayoutSpecRecord(msgspec.Struct, array_like=True):
    """Wire form of ``memory.layout.LayoutSpec``."""

    shards: list[ShardId]
    layer_lo: int
    layer_hi: int
    retained: list[RetainedKVRecord] = []


class OfferLayout(msgspec.Struct, tag="offer", array_like=True):
    """Ask what a layout would need; changes nothing. Answer: LayoutOffered."""

    call_id: int
    spec: LayoutSpecRecord
    live_blocks: int


class ApplyLayout(msgspec.Struct, tag="apply", array_like=True):
    """Copy blocks, then remap. Answer: LayoutApplied or CallFailed (then nothing has changed)."""

    call_id: int
    spec: LayoutSpecRecord
    live_blocks: int
    version: int
    copies: list[tuple[int, int]]


class SendKV(msgspec.Struct, tag="send_kv", array_like=True):
    """Copy blocks ``src_blocks`` of ``layers`` to ``dst_blocks`` of the destination's arenas, in pieces.

    With ``from_host`` and ``to_host`` the ids are slots of that end's host pool. A destination that is the worker
    itself copies to its own host pool, or from there. The destination answers with one TransferEnded, whatever happens.
    """

    transfer_id: TransferId
    dst_worker: WorkerId
    layer_lo: int
    layer_hi: int
    src_blocks: list[int]
    dst_blocks: list[int]
    urgent: bool = False
    """Before other KV."""
    from_host: bool = False
    to_host: bool = False
    beside_steps: bool = False
    """Inside this worker: while steps run, by rule 9 of ``core.controlstream``."""


class SendShard(msgspec.Struct, tag="send_shard", array_like=True):
    """Copy one parameter shard to the destination, in pieces, behind KV. The destination answers TransferEnded."""

    transfer_id: TransferId
    dst_worker: WorkerId
    shard: ShardId


class CancelTransfer(msgspec.Struct, tag="cancel_transfer", array_like=True):
    """Stop sending a transfer at the next piece. Still ends with the destination's TransferEnded(complete=False)
    unless the last piece had already gone; until then both sides' blocks stay reserved."""

    transfer_id: TransferId


class LoadShard(msgspec.Struct, tag="load_shard", array_like=True):
    """Fill a mapped shard (no peer has it) from the machine's copy in host memory, or else from the model folder.
    Answer: CallDone."""

    call_id: int
    shard: ShardId


class KeepShard(msgspec.Struct, tag="keep_shard", array_like=True):
    """Write a shard that is complete here to the machine's copy in host memory. Answer: CallDone."""

    call_id: int
    shard: ShardId


class FenceWorker(msgspec.Struct, tag="fence", array_like=True):
    """``lost_worker`` is lost: at once close the link to its lives up to ``lost_life`` and use nothing they sent.
    Answer: Fenced, when every step received before has finished here (those that wait for the lost one fail)."""

    call_id: int
    lost_worker: WorkerId
    lost_life: int


class AdoptWeights(msgspec.Struct, tag="weights", array_like=True):
    """Serve these weights and no others: the first command of every life of a worker. Not answered; a worker that has
    read others ends."""

    identity: WeightsIdentity


class ReportMemory(msgspec.Struct, tag="report", array_like=True):
    """Answer: MemoryReported."""

    call_id: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Finish nothing, release everything, exit 0."""


Command = (
    Step | OfferLayout | ApplyLayout | SendKV | SendShard | CancelTransfer | LoadShard | KeepShard | FenceWorker
    | AdoptWeights | ReportMemory | Stop
)


class WorkerReady(msgspec.Struct, tag="ready", array_like=True):
    """First message of a worker: its layers are mapped, and loaded if this is its first life."""

    worker_id: WorkerId
    pid: int
    capacity_blocks: int
    layout_version: int
    kernels: str
    memory: dict[str, int]
    weights: WeightsIdentity | None = None
    """Of what it has read; None: it has read nothing and waits for AdoptWeights."""
    read_ns: int = 0
    """Time that reading them took, all in all."""
    check_ns: int = 0
    """Of it: digests, and the look for what is not finite."""


class WorkerStartFailed(msgspec.Struct, tag="start_failed", array_like=True):
    """The worker could not start; ``user_error`` tells whether the caller can mend it."""

    worker_id: WorkerId
    error_type: str
    message: str
    user_error: bool


class SampledRecord(msgspec.Struct, array_like=True):
    """Wire form of ``types.TokenLogprobs``."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class StepDone(msgspec.Struct, tag="step_done", array_like=True):
    """Sent by the last stage of a step."""

    worker_id: WorkerId
    step_id: int
    token_ids: list[int]
    compute_ns: int
    """This stage's own time."""
    logprobs: dict[int, SampledRecord] = {}
    """Index into ``token_ids`` -> logprobs, for the tokens that asked."""
    prompt_logprobs: dict[int, list[SampledRecord]] = {}
    """Row -> logprobs of prompt tokens."""
    started_ns: int = 0
    ended_ns: int = 0
    """When the stage began and ended its part, on the worker's clock (for bubble accounts)."""
    input_delay_ns: int = 0
    """How long this stage's input was on its way (between machines: beyond the fastest one on that link); 0 on a first
    stage."""
    remote_wait_ns: int = 0
    """Time this stage waited for attention at peers."""


class StepLogprobs(msgspec.Struct, tag="step_logprobs", array_like=True):
    """Part of a step's logprobs, ahead of its StepDone, where all of them would be too much for one message."""

    worker_id: WorkerId
    step_id: int
    logprobs: dict[int, SampledRecord] = {}
    prompt_logprobs: dict[int, list[SampledRecord]] = {}
    """Both as in StepDone; a row's entries may be spread over several parts, in order."""


class StageDone(msgspec.Struct, tag="stage_done", array_like=True):
    """Sent by every stage but the last: its part of the step is computed (for bubble and time accounts)."""

    worker_id: WorkerId
    step_id: int
    compute_ns: int
    started_ns: int = 0
    ended_ns: int = 0
    input_delay_ns: int = 0
    remote_wait_ns: int = 0
    """Both as in StepDone."""


class StepFailed(msgspec.Struct, tag="step_failed", array_like=True):
    """A step raised; the worker lives on. The requests of this step fail, no others."""

    worker_id: WorkerId
    step_id: int
    message: str
    lost_worker: WorkerId | None = None
    """The stage whose part never came, if that is why: then nothing is wrong with the step's requests."""
    recompute: bool = False
    """Only a peer's attention was missing: the rows are fine and are to be computed again."""


class StepAbandoned(msgspec.Struct, tag="step_abandoned", array_like=True):
    """The first stage has given a step up, as its flag asked: nothing of it counts. Sent by the last stage."""

    worker_id: WorkerId
    step_id: int


class Fenced(msgspec.Struct, tag="fenced", array_like=True):
    """Answer to FenceWorker."""

    worker_id: WorkerId
    call_id: int


class LayoutOffered(msgspec.Struct, tag="offered", array_like=True):
    """Answer to OfferLayout."""

    worker_id: WorkerId
    call_id: int
    version: int
    evacuate_from_block: int
    capacity_blocks: int


class LayoutApplied(msgspec.Struct, tag="applied", array_like=True):
    """Answer to ApplyLayout."""

    worker_id: WorkerId
    call_id: int
    version: int
    capacity_blocks: int
    bytes_to_kv: int
    num_map_calls: int
    duration_ns: int
    intact_shards: list[ShardId]
    missing_shards: list[ShardId]
    memory: dict[str, int]


class CallDone(msgspec.Struct, tag="call_done", array_like=True):
    """A command without a result of its own has been carried out."""

    worker_id: WorkerId
    call_id: int


class CallFailed(msgspec.Struct, tag="call_failed", array_like=True):
    """A command was refused or rolled back; ``error_type`` is the class name in ``jettison.errors``."""

    worker_id: WorkerId
    call_id: int
    error_type: str
    message: str


class TransferEnded(msgspec.Struct, tag="transfer_ended", array_like=True):
    """Sent by a transfer's destination, exactly once per SendKV or SendShard."""

    worker_id: WorkerId
    transfer_id: TransferId
    complete: bool
    num_bytes: int
    duration_ns: int


class MemoryReported(msgspec.Struct, tag="memory", array_like=True):
    """Bytes by use; sums to the budget."""

    worker_id: WorkerId
    call_id: int
    memory: dict[str, int]


Event = (
    WorkerReady | WorkerStartFailed | StepLogprobs | StepDone | StageDone | StepFailed | StepAbandoned | LayoutOffered
    | LayoutApplied | CallDone | CallFailed | TransferEnded | MemoryReported | Fenced
)
