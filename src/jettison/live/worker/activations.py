"""Hidden states between stages: cut into chunks that fit a frame, put together again, kept until their step.

An activation belongs to a step id. It may arrive before its Step command does; a bounded number of such early
ones is kept. A stage whose part of a step failed, or was given up, sends a failure flag in place of hidden states, so
that every later stage ends its part too and the last one tells the controller.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from jettison.core.controlstream import Failure
from jettison.errors import LinkDownError
from jettison.transport.link import EMPTY, Bytes, Frame, FrameKind, Link
from jettison.types import WorkerId

_CHUNK = struct.Struct("<QQBiiq")
"""Offset of this chunk, total bytes of the activation, a ``Failed`` (if not 0 the bytes are a message), which worker
was lost if that is the failure (-1: none was), the layers after which the first stage has kept rows (-1: it has kept
none), and when it was handed on, on the sender's clock."""


class Failed(IntEnum):
    """Whether and how the stage before has failed."""

    NO = 0
    YES = 1
    RECOMPUTE = 2
    """Only a peer's attention was missing."""
    ABANDONED = 3
    """The first stage gave the step up, as it was asked to."""
    KEPT = 4
    """The first stage keeps all rows of the step."""

    @classmethod
    def as_in(cls, failure: Failure) -> Failed:
        """How a failure travels."""
        if failure.kept_layers is not None:
            return cls.KEPT
        return cls.ABANDONED if failure.abandoned else cls.RECOMPUTE if failure.recompute else cls.YES


MAX_FAILURE_BYTES = 512
MAX_ACTIVATION_BYTES = 1 << 30
"""What a peer can make this worker allocate for one step; far above any real microbatch."""


@dataclass(slots=True)
class Arrived:
    """The whole input of a step from the stage before it."""

    data: Bytes
    """Hidden bytes, owned by the receiver; empty after a failure."""
    failure: Failure | None = None
    """Why there are none."""
    transit_ns: int = 0
    """From being handed on to having arrived, by the two workers' own clocks: only differences mean anything."""
    kept_layers: int | None = None
    """The first stage has kept rows of the step after so many layers: the data are of the others."""


class OutgoingActivation:
    """One activation on its way out, resumed where back-pressure stopped it."""

    def __init__(
        self, step_id: int, data: Bytes, now_ns: int = 0, failed: Failed = Failed.NO,
        lost_worker: WorkerId | None = None, kept_layers: int | None = None,
    ) -> None:
        """``kept_layers``: see ``Arrived``."""
        self.step_id = step_id
        self._kept_layers = -1 if kept_layers is None else kept_layers
        self._lost_worker = -1 if lost_worker is None else lost_worker
        self._data = data
        self._now_ns = now_ns
        self._failed = failed
        self._offset = 0
        self._sent_any = False

    @classmethod
    def of_failure(cls, step_id: int, failure: Failure) -> OutgoingActivation:
        """Tell the later stages that this step has failed, or was given up."""
        data = np.frombuffer(failure.message.encode()[:MAX_FAILURE_BYTES], dtype=np.uint8)
        return cls(
            step_id, data, failed=Failed.as_in(failure), lost_worker=failure.lost_worker,
            kept_layers=failure.kept_layers,
        )

    def send(self, link: Link) -> bool:
        """Send as many chunks as the link takes now; whether all are sent. Raises LinkDownError."""
        limit = link.max_payload(FrameKind.ACTIVATION)
        total = len(self._data)
        while not self._sent_any or self._offset < total:
            chunk = self._data[self._offset : self._offset + limit]
            aux = _CHUNK.pack(self._offset, total, self._failed, self._lost_worker, self._kept_layers, self._now_ns)

            def fill(out: Bytes, chunk: Bytes = chunk) -> None:
                out[:] = chunk

            if not link.send_frame(FrameKind.ACTIVATION, self.step_id, aux, len(chunk), fill):
                return False
            self._sent_any = True
            self._offset += len(chunk)
        return True


@dataclass(slots=True)
class _Partial:
    peer: WorkerId
    data: Bytes
    num_bytes: int
    failed: Failed
    lost_worker: int
    kept_layers: int
    sent_ns: int


class ActivationInbox:
    """Activations that have arrived, whole or in part, by step id.

    Early ones (no Step command yet) are bounded by ``max_early``: beyond it the oldest is dropped and its
    step, should it come, is told so. The controller keeps few microbatches in flight, so this bound only
    meets steps that no longer exist.
    """

    def __init__(self, max_early: int = 64) -> None:
        self._partial: OrderedDict[int, _Partial] = OrderedDict()
        self._whole: OrderedDict[int, Arrived] = OrderedDict()
        self._expected: set[int] = set()
        self._max_early = max_early
        self._dropped: deque[int] = deque(maxlen=4 * max_early)

    def expect(self, step_id: int) -> None:
        """The step's command is here: its activation is no longer early."""
        self._expected.add(step_id)

    def accept(self, peer: WorkerId, frame: Frame, now_ns: int = 0) -> None:
        """Take one ACTIVATION frame (copied; the frame may be released). Raises LinkDownError on nonsense."""
        try:
            offset, total, failed, lost_worker, kept_layers, sent_ns = _CHUNK.unpack(frame.aux)
            failed = Failed(failed)
        except (struct.error, ValueError) as error:
            raise LinkDownError(f"activation of step {frame.tag}: {error}") from None
        step_id = frame.tag
        if step_id in self._dropped:
            return
        partial = self._partial.get(step_id)
        if partial is None:
            if offset != 0 or total > MAX_ACTIVATION_BYTES or step_id in self._whole:
                raise LinkDownError(f"activation of step {step_id} starts at {offset} of {total} bytes")
            partial = _Partial(peer, np.empty(total, dtype=np.uint8), 0, failed, lost_worker, kept_layers, sent_ns)
            self._partial[step_id] = partial
        end = offset + len(frame.payload)
        if (peer, offset, total) != (partial.peer, partial.num_bytes, len(partial.data)) or end > total:
            raise LinkDownError(f"activation of step {step_id}: chunk {offset} to {end} of {total} is out of place")
        partial.data[offset:end] = frame.payload
        partial.num_bytes = end
        if end == total:
            del self._partial[step_id]
            self._whole[step_id] = _arrived(partial, now_ns)
        self._drop_oldest_early()

    def ready(self, step_id: int) -> bool:
        """Whether ``take`` has something for this step."""
        return step_id in self._whole or step_id in self._dropped

    def take(self, step_id: int) -> Arrived:
        """Remove and return a step's input; KeyError unless ``ready``."""
        self._expected.discard(step_id)
        if step_id in self._dropped:
            self._dropped.remove(step_id)
            return Arrived(EMPTY, Failure("its activation came too early and was dropped"))
        return self._whole.pop(step_id)

    def forget(self, step_id: int) -> None:
        """The step is over without its input."""
        self._expected.discard(step_id)
        self._partial.pop(step_id, None)
        self._whole.pop(step_id, None)

    def forget_partial(self, peer: WorkerId) -> None:
        """The link to ``peer`` is down: what is not whole will never be."""
        for step_id in [step_id for step_id, partial in self._partial.items() if partial.peer == peer]:
            del self._partial[step_id]

    def _drop_oldest_early(self) -> None:
        early = [step_id for kept in (self._whole, self._partial) for step_id in kept if step_id not in self._expected]
        for step_id in early[: max(0, len(early) - self._max_early)]:
            self._whole.pop(step_id, None)
            self._partial.pop(step_id, None)
            self._dropped.append(step_id)


def _arrived(partial: _Partial, now_ns: int) -> Arrived:
    kept_layers = partial.kept_layers if partial.kept_layers >= 0 else None
    if partial.failed:
        message = partial.data.tobytes().decode(errors="replace")
        lost = partial.lost_worker if partial.lost_worker >= 0 else None
        recompute, abandoned = partial.failed is Failed.RECOMPUTE, partial.failed is Failed.ABANDONED
        return Arrived(EMPTY, Failure(message, lost, recompute, abandoned, kept_layers))
    return Arrived(partial.data, transit_ns=now_ns - partial.sent_ns, kept_layers=kept_layers)
