"""What travels between the controller and its workers over the control channel.

What the core says and hears goes as the core declares it (``core.ports``); declared here is what only processes tell
each other. Bulk bytes (activations, KV, parameters) go from worker to worker over links and are described by
``transport``'s frame header, never by these.

In which order a worker obeys commands: ``core.controlstream``.
"""

from __future__ import annotations

import msgspec

from jettison.core import ports
from jettison.device.model.identity import WeightsIdentity
from jettison.types import ShardId, TokenLogprobs, WorkerId


class Step(msgspec.Struct, array_like=True):
    """Run one microbatch; ``payload`` is ``live.wire.codec``'s encoding of ``device.step.StepInput``."""

    payload: bytes


class AdoptWeights(msgspec.Struct, array_like=True):
    """Serve these weights and no others; in every life of a worker this comes before any step. Not answered; a worker
    that has read others ends."""

    identity: WeightsIdentity


class PeerAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where one life of a worker takes connections from the addressee's host."""

    worker_id: WorkerId
    life: int
    address: str


class KnowPeers(msgspec.Struct, array_like=True):
    """These workers are there now: a link to one is opened when it is first used, by either end. Not answered."""

    peers: list[PeerAddress]


class ForgetPeer(msgspec.Struct, array_like=True):
    """This life of a worker, and every older one, is over: no link to it is opened any more. Not answered. A link that
    is open tells of its end itself, after all that has arrived."""

    worker_id: WorkerId
    life: int


class Certificate(msgspec.Struct, array_like=True):
    """The answer to CertificateWanted."""

    certificate: bytes
    """PEM, of the key in the request."""
    authority: bytes
    """PEM: the certificate of the authority, which has signed those of all peers."""


class TakeOver(msgspec.Struct, array_like=True):
    """The first command of a controller to a worker that has outlived an earlier one. Answer: WorkerReady."""

    epoch: int
    """Higher than any before."""
    signature: bytes
    """The parent's, of this epoch (``transport.succession``)."""


class ReportMemory(msgspec.Struct, array_like=True):
    """Answer: MemoryReported."""

    call_id: int


class Stop(msgspec.Struct, array_like=True):
    """Finish nothing, release everything, exit 0."""


Command = (
    Step | ports.OfferLayout | ports.ApplyLayout | ports.SendKV | ports.SendShard | ports.CancelTransfer
    | ports.LoadShard | ports.KeepShard | ports.FenceWorker | AdoptWeights | KnowPeers | ForgetPeer | ReportMemory
    | Certificate | TakeOver | Stop
)


class CertificateWanted(msgspec.Struct, array_like=True):
    """First message of a worker that has peers on other hosts: sign the key that it has made. Once in a life."""

    worker_id: WorkerId
    token: bytes
    """Of this life, from ``WorkerStart``."""
    request: bytes
    """``transport.authority.Applicant.request``."""


class WorkerReady(msgspec.Struct, array_like=True):
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
    own_products: tuple[str, ...] = ()
    """``StepRunner.own_products``."""
    kept: list[ShardId] | None = None
    """Of a worker that is taken over: the shards of its start that it has. None: this is its start."""


class WorkerStartFailed(msgspec.Struct, array_like=True):
    """The worker could not start; ``user_error`` tells whether the caller can mend it."""

    worker_id: WorkerId
    error_type: str
    """The class's name in ``jettison.errors``."""
    message: str
    user_error: bool


class StepDone(msgspec.Struct, array_like=True):
    """Sent by the last stage of a step, with its account of the stage."""

    worker_id: WorkerId
    completed: ports.StepCompleted
    started_ns: int = 0
    ended_ns: int = 0
    """When the stage began and ended its part, on the worker's clock (for bubble accounts)."""
    input_delay_ns: int = 0
    """How long this stage's input was on its way (between machines: beyond the fastest one on that link); 0 on a first
    stage."""
    remote_wait_ns: int = 0
    """Time this stage waited for attention at peers."""
    expert_tokens: int = 0
    """Pairs of a token and an expert in those steps that were counted and not told yet, in the stage's layers; told now
    and then, so mostly 0."""
    expert_tokens_at_busiest: int = 0
    """As many as there would be if every expert of a layer had what its busiest one had."""

    @property
    def step_id(self) -> int:
        """Which step it was."""
        return self.completed.step_id


class StepLogprobs(msgspec.Struct, array_like=True):
    """Part of a step's logprobs, ahead of its StepDone, where all of them would be too much for one message."""

    worker_id: WorkerId
    step_id: int
    logprobs: dict[int, TokenLogprobs] = {}
    """By the token's place in the step."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """As in StepCompleted; a row's entries may be spread over several parts, in order."""


class StageDone(msgspec.Struct, array_like=True):
    """Sent by every stage but the last: its part of the step is computed (for bubble and time accounts)."""

    worker_id: WorkerId
    step_id: int
    compute_ns: int
    started_ns: int = 0
    ended_ns: int = 0
    input_delay_ns: int = 0
    remote_wait_ns: int = 0
    """Both as in StepDone."""
    has_prepared: bool = False
    """See StepCompleted."""


class MemoryReported(msgspec.Struct, array_like=True):
    """Bytes by use; sums to the budget. Answers ReportMemory, and goes ahead of each LayoutApplied."""

    worker_id: WorkerId
    call_id: int
    memory: dict[str, int]


Event = (
    CertificateWanted | WorkerReady | WorkerStartFailed | StepLogprobs | StepDone | StageDone | MemoryReported
    | ports.StepFailed | ports.StepAbandoned | ports.LayoutOffered | ports.LayoutApplied | ports.ShardLoaded
    | ports.CallFailed | ports.TransferEnded | ports.LinkLost | ports.WorkerFenced
)
