"""Remote attention between workers: queries out, partial results in, and answers for peers that ask.

One object a worker. Both sides of a pipeline ask each other at the same time, from inside their forward passes; so
a worker that waits for an answer answers meanwhile, and one that computes looks up between two layers. It has no thread
of its own: links, arenas and kernels are used by one thread, a layout change cannot meet an answer that is being
computed, and the in-process cluster stays deterministic. The price is that a question may wait for one layer.

    asker                                                   holder of the KV
    begin: ATTEND tables (each row's blocks), once a step -> remembered until the next step's
    ask:   ATTEND query (layer, q, rows, positions)       -> attention over those blocks
    collect                                               <- ATTENDED (log-sum-exps, output), or why not

Positions go along in layers with a window, and in no others. Frames travel in the links' first class, before all bulk.
What the blocks mean is the core's business; that they are mapped is checked by the device, so a stale question gets a
refusal and never a wrong answer.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jettison.device.step import Int32s, StepInput
from jettison.errors import LinkDownError, RemoteAttentionError, WorkerLostError
from jettison.live.worker.device_port import Device
from jettison.live.worker.failpoints import Failpoint, nowhere
from jettison.transport.link import Bytes, Frame, FrameKind, Link
from jettison.types import WorkerId

log = logging.getLogger(__name__)

_ATTEND = struct.Struct("<Bqii")
"""Tables or query; step; first row, or layer; number of rows, or of queries."""
_TABLES, _QUERY, _PLACED_QUERY = 0, 1, 2
"""The last: with positions."""
_ATTENDED = struct.Struct("<?")
"""Whether the payload is an answer; else it is why there is none."""
MAX_MESSAGE_BYTES = 512
_INT32_BYTES = 4

Answer = list[tuple[int, Bytes]]


class OutgoingFrame:
    """One frame of remote attention that waits for room on its link."""

    def __init__(self, kind: FrameKind, tag: int, aux: bytes, *parts: Bytes) -> None:
        self._head = (kind, tag, aux)
        self._parts = parts

    def send(self, link: Link) -> bool:
        """Whether the link took it. Raises LinkDownError."""
        num_bytes = sum(len(part) for part in self._parts)

        def fill(out: Bytes) -> None:
            start = 0
            for part in self._parts:
                out[start : start + len(part)] = part
                start += len(part)

        return link.send_frame(*self._head, num_bytes, fill)


@dataclass(slots=True)
class _Tables:
    """What a peer's running step attends to here."""

    step_id: int = -1
    rows: list[Int32s] = field(default_factory=list)


@dataclass(slots=True)
class _Question:
    """A query on its way: one frame."""

    worker: WorkerId
    num_queries: int
    answer: Bytes | None = None


class PeerAttention:
    """Implements ``device.remote.AttentionPort`` over links; ``Peers`` owns it and hands it every frame."""

    def __init__(
        self,
        device: Device,
        link_of: Callable[[WorkerId], Link | None],
        post: Callable[[WorkerId, OutgoingFrame], None],
        serve: Callable[[bool], bool],
        wait: Callable[[], None],
        clock_ns: Callable[[], int],
        timeout_s: float,
        failpoint: Failpoint = nowhere,
        between_layers: Callable[[], None] | None = None,
    ) -> None:
        """``post`` queues a frame; ``serve`` does what the links ask for now (sending bulk only if told so) and says
        whether that was anything; ``wait`` returns when there may be more. ``between_layers`` is what is
        done there where ``is_live`` does not hold."""
        self._device = device
        self._link_of = link_of
        self._post = post
        self._serve = serve
        self._wait = wait
        self._clock_ns = clock_ns
        self._timeout_ns = int(timeout_s * 1e9)
        self._reach = failpoint
        self._between_layers = between_layers
        self.is_live = True
        """Peers ask or are asked in this step: all that links have is served between its layers."""
        self._tables: dict[WorkerId, _Tables] = {}
        """As holder, by peer."""
        self._next_tag = 0
        self._step_id = -1
        self._local_row: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        """Entry of the running step -> its row in the tables sent to its holder."""
        self._asked: list[list[int]] = []
        """Tags of each ``ask`` since the last ``collect``."""
        self._questions: dict[int, _Question] = {}
        self._failure: str | None = None
        self._lost_worker: WorkerId | None = None
        self.waited_ns = 0
        """Time spent waiting for answers; the loop, which reports it, sets it back."""

    # --- asking: AttentionPort --------------------------------------------------------------------------------

    def begin(self, step: StepInput) -> None:
        """See ``AttentionPort.begin``."""
        self._step_id, self._failure, self._lost_worker = step.step_id, None, None
        self._asked.clear()
        self._questions.clear()
        self._local_row = np.zeros(len(step.remote), dtype=np.int32)
        rows: dict[WorkerId, list[Int32s]] = {}
        for index, entry in enumerate(step.remote):
            mine = rows.setdefault(entry.worker, [])
            self._local_row[index] = len(mine)
            mine.append(np.array(entry.block_ids, dtype=np.int32))
        for worker, tables in rows.items():
            self._send_tables(worker, tables)

    def _send_tables(self, worker: WorkerId, tables: list[Int32s]) -> None:
        limit, first = self._limit(worker), 0
        while first < len(tables):
            end, num_bytes = first, 0
            while end < len(tables) and num_bytes + _INT32_BYTES * (1 + len(tables[end])) <= limit:
                num_bytes += _INT32_BYTES * (1 + len(tables[end]))
                end += 1
            if end == first:
                raise RemoteAttentionError(f"a block table of {len(tables[first])} entries does not fit a frame")
            lens = np.array([len(table) for table in tables[first:end]], dtype=np.int32)
            payload = np.concatenate((lens, *tables[first:end])).view(np.uint8)
            aux = _ATTEND.pack(_TABLES, self._step_id, first, end - first)
            self._post(worker, OutgoingFrame(FrameKind.ATTEND, 0, aux, payload))
            first = end

    def ask(
        self, layer: int, worker: WorkerId, entries: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> None:
        """See ``AttentionPort.ask``."""
        query_bytes = len(q) // len(entries)
        # An answer has one sum a head beside as many values as the query: at most twice its bytes.
        most = max(1, self._limit(worker) // (2 * query_bytes + 2 * _INT32_BYTES))
        ints = [self._local_row[entries], *([] if positions is None else [positions])]
        what = _QUERY if positions is None else _PLACED_QUERY
        tags = []
        for first in range(0, len(entries), most):
            part = [each[first : first + most] for each in ints]
            count = len(part[0])
            tag, self._next_tag = self._next_tag, self._next_tag + 1
            self._questions[tag] = _Question(worker, count)
            tags.append(tag)
            aux = _ATTEND.pack(what, self._step_id, layer, count)
            queries = q[first * query_bytes : (first + count) * query_bytes]
            frame = OutgoingFrame(FrameKind.ATTEND, tag, aux, queries, *(each.view(np.uint8) for each in part))
            self._post(worker, frame)
        self._asked.append(tags)

    def collect(self) -> list[Answer]:
        """See ``AttentionPort.collect``."""
        started_ns = self._clock_ns()
        has_served = False
        try:
            while any(question.answer is None for question in self._questions.values()):
                if self._failure is not None:
                    raise RemoteAttentionError(self._failure, self._lost_worker)
                # One piece of bulk a wait: more would stand before this stage's next question, and the peer's.
                if self._serve(not has_served):
                    has_served = True
                    continue
                if self._clock_ns() - started_ns > self._timeout_ns:
                    silent = sorted({q.worker for q in self._questions.values() if q.answer is None})
                    raise RemoteAttentionError(f"workers {silent} did not attend in {self._timeout_ns / 1e9:.0f} s")
                self._wait()
            return [
                [(q.num_queries, q.answer) for tag in tags if (q := self._questions[tag]).answer is not None]
                for tags in self._asked
            ]
        finally:
            self._asked.clear()
            self._questions.clear()
            self.waited_ns += self._clock_ns() - started_ns

    def poll(self) -> None:
        """See ``AttentionPort.poll``."""
        if self.is_live or self._between_layers is None:
            self._serve(True)
        else:
            self._between_layers()

    def _limit(self, worker: WorkerId) -> int:
        link = self._link_of(worker)
        if link is None:
            raise RemoteAttentionError(f"no link to worker {worker}, which holds KV that this step needs", worker)
        return link.max_payload(FrameKind.ATTEND)

    # --- frames -----------------------------------------------------------------------------------------------

    def accept(self, peer: WorkerId, frame: Frame) -> None:
        """Take a frame of either kind; it may be released afterwards. Raises LinkDownError on nonsense."""
        try:
            if frame.kind is FrameKind.ATTENDED:
                self._on_answer(peer, frame)
                return
            what, step_id, number, count = _ATTEND.unpack(frame.aux)
        except struct.error as error:
            raise LinkDownError(f"{frame.kind.name} of worker {peer}: {error}") from None
        if what == _TABLES:
            self._on_tables(peer, step_id, number, count, frame.payload)
        else:
            self._on_query(peer, frame, step_id, number, count, is_placed=what == _PLACED_QUERY)

    def lost(self, peer: WorkerId) -> None:
        """The link to ``peer`` is gone: it will neither ask nor answer."""
        self._tables.pop(peer, None)
        if any(q.worker == peer and q.answer is None for q in self._questions.values()):
            self._lost_worker = peer
            self._failure = f"the link to worker {peer}, which holds KV that this step needs, is down"

    def _on_answer(self, peer: WorkerId, frame: Frame) -> None:
        (is_answer,) = _ATTENDED.unpack(frame.aux)
        question = self._questions.get(frame.tag)
        if question is None or question.worker != peer:
            return  # of a step that has failed meanwhile
        if is_answer:
            question.answer = frame.payload.copy()
        else:
            self._failure = f"worker {peer}: {frame.payload.tobytes().decode(errors='replace')}"

    def _on_tables(self, peer: WorkerId, step_id: int, first: int, count: int, payload: Bytes) -> None:
        ints = payload.copy().view(np.int32) if len(payload) % _INT32_BYTES == 0 else np.zeros(0, dtype=np.int32)
        lens = ints[: max(0, count)]
        if count < 1 or len(lens) != count or lens.min() < 1 or count + int(lens.sum(dtype=np.int64)) != len(ints):
            raise LinkDownError(f"tables of worker {peer} that are none")
        tables = self._tables.setdefault(peer, _Tables())
        if first == 0:
            tables.step_id, tables.rows = step_id, []
        if (tables.step_id, len(tables.rows)) != (step_id, first):
            raise LinkDownError(f"tables of worker {peer} out of order")
        tables.rows += np.split(ints[count:], np.cumsum(lens)[:-1])

    def _on_query(
        self, peer: WorkerId, frame: Frame, step_id: int, layer: int, count: int, *, is_placed: bool
    ) -> None:
        tag, payload = frame.tag, frame.payload
        ints_at = len(payload) - _INT32_BYTES * count * (2 if is_placed else 1)
        if count < 1 or ints_at <= 0 or ints_at % count:
            raise LinkDownError(f"a query of worker {peer} that is none")
        tables = self._tables.get(peer, _Tables())
        try:
            if tables.step_id != step_id:
                raise ValueError(f"tables of step {tables.step_id}, not {step_id}, were sent")
            ints = payload[ints_at:].copy().view(np.int32)
            rows, positions = ints[:count], ints[count:] if is_placed else None
            self._reach("before_attention")
            answer = self._device.attend(layer, tables.rows, rows, payload[:ints_at], positions)
            self._reach("after_attention")
        except WorkerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the asker's step fails with it and is repeated
            log.warning("attention for worker %d refused: %s", peer, error)
            message = np.frombuffer(f"{error}".encode()[:MAX_MESSAGE_BYTES], dtype=np.uint8)
            self._post(peer, OutgoingFrame(FrameKind.ATTENDED, tag, _ATTENDED.pack(False), message))
            return
        self._post(peer, OutgoingFrame(FrameKind.ATTENDED, tag, _ATTENDED.pack(True), answer))
