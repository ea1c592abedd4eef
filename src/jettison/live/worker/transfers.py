"""Transfers between workers: KV blocks or one parameter shard, cut into pieces that fit a link's frame.

A transfer is TRANSFER_BEGIN, pieces, TRANSFER_END on one link, in that order. Pieces say where they belong, so the
receiver keeps only a byte count; it checks every offset and id against its own memory before it writes.
When to send is ``peers``' business; which transfer to make is the core's.

    source                                     destination
    queued --BEGIN--> sending                  (unknown) --BEGIN--> receiving
    sending --piece--> sending                 receiving --piece--> receiving | spoiled
    sending --END(True)--> over                receiving --END(True), all bytes--> TransferEnded(complete=True)
    queued, sending --cancel, error,           receiving, spoiled --END, link down--> TransferEnded(complete=False)
        then END(False)--> over
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from jettison.core.ports import SendKV, SendShard, Transfer, TransferEnded
from jettison.device.model.identity import Digester
from jettison.errors import JettisonError, LinkDownError, WorkerLostError
from jettison.live.worker.device_port import Device
from jettison.transport.link import Bytes, Frame, FrameKind, Link
from jettison.types import LayerRange, ShardId, TransferId

log = logging.getLogger(__name__)

_BEGIN = struct.Struct("<Q")
"""Total bytes; the shard's name follows (empty for KV)."""
_KV_PIECE = struct.Struct("<iiI?")
"""Layer range, number of blocks, and whether they go to the host pool; the payload is the blocks' bytes, then their
int32 ids at the destination."""
_SHARD_PIECE = struct.Struct("<Q")
"""Offset in the shard."""
_END = struct.Struct("<?")
"""Whether everything was sent."""
_ID_BYTES = 4


class TransferProtocolError(LinkDownError):
    """A peer sent transfer frames that make no sense; its link is not to be trusted any more."""


class OutgoingTransfer(ABC):
    """One transfer at its source."""

    kind: FrameKind

    def __init__(self, transfer_id: TransferId, total_bytes: int, shard: ShardId = "") -> None:
        self.transfer_id = transfer_id
        self.urgent = False
        """Goes before transfers of its kind that are not."""
        self.begun = False
        """TRANSFER_BEGIN was accepted by the link: from then on the destination owns the transfer's end, if it hears of
        it before the link fails."""
        self.cancelled = False
        """Send no more pieces: the controller withdrew it, or reading failed here."""
        self.last_bytes = 0
        """Payload of the newest turn's piece."""
        self._broken = False
        """Must not end complete, whatever the byte count says."""
        self._total_bytes = total_bytes
        self.shard = shard

    def cancel(self) -> None:
        """Stop at the next piece. A transfer whose last piece has gone still ends complete."""
        self.cancelled = True
        self._broken |= not self.begun

    def fail(self) -> None:
        """Something is wrong at this end: send no more and end incomplete."""
        self.cancelled = self._broken = True

    @property
    @abstractmethod
    def _exhausted(self) -> bool: ...

    @abstractmethod
    def _send_piece(self, link: Link, device: Device, piece_bytes: int) -> bool: ...

    def send_turn(self, link: Link, device: Device, piece_bytes: int) -> tuple[bool, bool]:
        """One turn on the link: at most one piece, with the begin or end that goes before or after it.

        Returns whether anything was sent and whether the transfer is over here. Raises LinkDownError.
        """
        sent = False
        self.last_bytes = 0
        if not self.begun:
            aux = _BEGIN.pack(self._total_bytes) + self.shard.encode()
            if not link.send_frame(FrameKind.TRANSFER_BEGIN, self.transfer_id, aux, 0, _nothing):
                return False, False
            self.begun = sent = True
        if not self.cancelled and not self._exhausted:
            try:
                if not self._send_piece(link, device, piece_bytes):
                    return sent, False
                sent = True
            except (LinkDownError, WorkerLostError):
                raise
            except Exception:
                log.exception("transfer %d: reading failed here; the destination will tell that it is incomplete",
                              self.transfer_id)
                self.fail()
        if not self.cancelled and not self._exhausted:
            return sent, False
        complete = self._exhausted and not self._broken
        over = link.send_frame(FrameKind.TRANSFER_END, self.transfer_id, _END.pack(complete), 0, _nothing)
        return sent or over, over


class OutgoingKV(OutgoingTransfer):
    """Blocks of some layers. Pieces are rectangles: as many whole layers of all blocks as fit, else blocks of one."""

    kind = FrameKind.KV_PIECE

    def __init__(self, command: SendKV, kv_block_bytes: int) -> None:
        self._layers = command.layers
        self._src = np.array(command.src_blocks, dtype=np.int32)
        self._dst = np.array(command.dst_blocks, dtype=np.int32)
        self._unit_bytes = kv_block_bytes
        self._layer = self._layers.lo
        self._block = 0
        super().__init__(command.transfer_id, len(self._layers) * len(self._src) * kv_block_bytes)
        self.urgent = command.urgent
        self._from_host, self._to_host = command.from_host, command.to_host
        if len(self._src) != len(self._dst) or self._layers.hi < self._layers.lo:
            log.error("transfer %d: %d source blocks for %d destination blocks of layers %s",
                      command.transfer_id, len(self._src), len(self._dst), tuple(self._layers))
            self.fail()

    @property
    def _exhausted(self) -> bool:
        return len(self._src) == 0 or self._layer >= self._layers.hi

    def _send_piece(self, link: Link, device: Device, piece_bytes: int) -> bool:
        num_layers, num_blocks = self._next_rectangle(min(piece_bytes, link.max_payload(self.kind)))
        layers = LayerRange(self._layer, self._layer + num_layers)
        blocks = slice(self._block, self._block + num_blocks)
        data_bytes = num_layers * num_blocks * self._unit_bytes

        def fill(out: Bytes) -> None:
            device.kv_gather(layers, self._src[blocks], out[:data_bytes], from_host=self._from_host)
            out[data_bytes:] = self._dst[blocks].view(np.uint8)

        aux = _KV_PIECE.pack(*layers, num_blocks, self._to_host)
        if not link.send_frame(self.kind, self.transfer_id, aux, data_bytes + _ID_BYTES * num_blocks, fill):
            return False
        self.last_bytes = data_bytes
        self._block += num_blocks
        if self._block == len(self._src):
            self._layer, self._block = layers.hi, 0
        return True

    def _next_rectangle(self, limit_bytes: int) -> tuple[int, int]:
        """Layers and blocks of the next piece: never less than one unit, whatever the limit."""
        num_all = len(self._src)
        if self._block == 0:
            num_layers = (limit_bytes - _ID_BYTES * num_all) // (num_all * self._unit_bytes)
            if num_layers >= 1:
                return min(num_layers, self._layers.hi - self._layer), num_all
        fit = max(1, limit_bytes // (self._unit_bytes + _ID_BYTES))
        return 1, min(fit, num_all - self._block)


class OutgoingShard(OutgoingTransfer):
    """One parameter shard, front to back."""

    kind = FrameKind.SHARD_PIECE

    def __init__(self, command: SendShard, num_bytes: int) -> None:
        self._offset = 0
        super().__init__(command.transfer_id, num_bytes, command.shard)

    @property
    def _exhausted(self) -> bool:
        return self._offset >= self._total_bytes

    def _send_piece(self, link: Link, device: Device, piece_bytes: int) -> bool:
        # Asked for anew at every piece: a layout applied meanwhile may have unmapped it, and the device says so.
        num_bytes = device.shard_num_bytes(self.shard)
        if num_bytes != self._total_bytes:
            raise ValueError(f"shard {self.shard} shrank to {num_bytes} bytes")
        limit = min(piece_bytes, link.max_payload(self.kind), self._total_bytes - self._offset)

        def fill(out: Bytes) -> None:
            device.read_shard(self.shard, self._offset, out)

        if not link.send_frame(self.kind, self.transfer_id, _SHARD_PIECE.pack(self._offset), limit, fill):
            return False
        self._offset += limit
        self.last_bytes = limit
        return True


def outgoing(command: Transfer, device: Device) -> OutgoingTransfer:
    """What the core has ordered; a shard that is not here fails at its first turn."""
    if isinstance(command, SendKV):
        return OutgoingKV(command, device.kv_block_bytes)
    try:
        return OutgoingShard(command, device.shard_num_bytes(command.shard))
    except Exception:
        log.exception("transfer %d: shard %s is not here", command.transfer_id, command.shard)
        transfer = OutgoingShard(command, 0)
        transfer.fail()
        return transfer


class _Incoming:
    __slots__ = ("digester", "expected_bytes", "num_bytes", "shard", "spoiled", "started_ns")

    def __init__(self, expected_bytes: int, shard: ShardId | None, started_ns: int) -> None:
        self.expected_bytes = expected_bytes
        self.shard = shard
        self.started_ns = started_ns
        self.num_bytes = 0
        self.spoiled = False
        self.digester = Digester()
        """Of a shard's bytes so far: pieces are hashed as they come, the shard is compared at its end."""


class IncomingTransfers:
    """All unfinished transfers that one peer sends here."""

    def __init__(self) -> None:
        self._transfers: dict[TransferId, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def is_end_of_shard(self, frame: Frame) -> bool:
        """With this frame all of a shard has come, and is compared with what is served."""
        transfer = self._transfers.get(frame.tag)
        return frame.kind is FrameKind.TRANSFER_END and transfer is not None and transfer.shard is not None

    def accept(self, frame: Frame, device: Device, now_ns: int) -> TransferEnded | None:
        """Take one bulk frame; the end of a transfer returns its event. The frame may be released afterwards.

        A piece that cannot be written spoils its transfer, which then ends incomplete. Raises TransferProtocolError
        for frames out of order: no transfer is known to be whole after that.
        """
        try:
            if frame.kind is FrameKind.TRANSFER_BEGIN:
                self._begin(frame, now_ns)
            elif frame.kind is FrameKind.TRANSFER_END:
                (complete,) = _END.unpack(frame.aux)
                return self._end(frame.tag, complete, device, now_ns)
            else:
                self._piece(frame, device)
        except (struct.error, UnicodeDecodeError) as error:
            raise TransferProtocolError(f"{frame.kind.name} of transfer {frame.tag}: {error}") from None
        return None

    def abandon(self, now_ns: int) -> list[TransferEnded]:
        """The link is down: end every unfinished transfer, incomplete."""
        transfers, self._transfers = self._transfers, {}
        return [self._ended(transfer_id, transfer, False, now_ns) for transfer_id, transfer in transfers.items()]

    def _begin(self, frame: Frame, now_ns: int) -> None:
        if frame.tag in self._transfers:
            raise TransferProtocolError(f"transfer {frame.tag} begins twice")
        (expected_bytes,) = _BEGIN.unpack_from(frame.aux)
        shard = frame.aux[_BEGIN.size :].decode() or None
        self._transfers[frame.tag] = _Incoming(expected_bytes, shard, now_ns)

    def _piece(self, frame: Frame, device: Device) -> None:
        transfer = self._transfers.get(frame.tag)
        if transfer is None or (frame.kind is FrameKind.SHARD_PIECE) != (transfer.shard is not None):
            raise TransferProtocolError(f"{frame.kind.name} for transfer {frame.tag}, which is no such transfer")
        if transfer.spoiled:
            return
        try:
            if transfer.shard is None:
                transfer.num_bytes += _write_kv(frame, device)
            else:
                transfer.num_bytes += _write_shard(frame, device, transfer.shard, transfer.num_bytes)
                transfer.digester.update(frame.payload)
        except (TransferProtocolError, WorkerLostError):
            raise
        except IndexError as error:
            # Of one that was called off for a layout, which has been applied before its last pieces came.
            log.warning("transfer %d: a piece that came late is dropped: %s", frame.tag, error)
            transfer.spoiled = True
        except Exception:
            log.exception("transfer %d: a piece could not be written here", frame.tag)
            transfer.spoiled = True

    def _end(self, transfer_id: TransferId, complete: bool, device: Device, now_ns: int) -> TransferEnded:
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            raise TransferProtocolError(f"TRANSFER_END for transfer {transfer_id}, which has not begun")
        complete = complete and not transfer.spoiled and transfer.num_bytes == transfer.expected_bytes
        if complete and transfer.shard is not None:
            try:
                device.mark_shard_filled(transfer.shard, transfer.digester.digest())
            except WorkerLostError:
                raise
            except JettisonError as error:
                log.error("transfer %d: %s", transfer_id, error)
                complete = False
            except Exception:
                log.exception("transfer %d: shard %s arrived but is not wanted", transfer_id, transfer.shard)
                complete = False
        return self._ended(transfer_id, transfer, complete, now_ns)

    def _ended(self, transfer_id: TransferId, transfer: _Incoming, complete: bool, now_ns: int) -> TransferEnded:
        return TransferEnded(transfer_id, complete, transfer.num_bytes, now_ns - transfer.started_ns)


def _write_kv(frame: Frame, device: Device) -> int:
    layer_lo, layer_hi, num_blocks, to_host = _KV_PIECE.unpack(frame.aux)
    data_bytes = len(frame.payload) - _ID_BYTES * num_blocks
    if not 0 <= layer_lo < layer_hi or data_bytes != (layer_hi - layer_lo) * num_blocks * device.kv_block_bytes:
        raise TransferProtocolError(
            f"KV piece of layers {layer_lo} to {layer_hi}, {num_blocks} blocks in {len(frame.payload)} bytes"
        )
    block_ids = frame.payload[data_bytes:].view(np.int32)
    _check_ids(block_ids, device.num_host_slots if to_host else device.capacity_blocks)
    device.kv_scatter(LayerRange(layer_lo, layer_hi), block_ids, frame.payload[:data_bytes], to_host=to_host)
    return data_bytes


def _check_ids(ids: npt.NDArray[np.int32], capacity_blocks: int) -> None:
    """An id from a peer is an address: outside this worker's arenas or host pool it must never reach the device."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < capacity_blocks):
        raise ValueError(f"block ids {ids.min()} to {ids.max()} where there are {capacity_blocks} blocks")


def _write_shard(frame: Frame, device: Device, shard: ShardId, expected_offset: int) -> int:
    (offset,) = _SHARD_PIECE.unpack(frame.aux)
    if offset != expected_offset:
        raise TransferProtocolError(f"shard piece at {offset}, {expected_offset} bytes came before it")
    device.write_shard(shard, offset, frame.payload)
    return len(frame.payload)


def _nothing(out: Bytes) -> None:
    """Fill of an empty payload."""


def bulk_frame_bytes(piece_bytes: int, kv_block_bytes: int) -> int:
    """Payload room a link's bulk frame needs: a piece, but never less than one block of one layer and its id."""
    return max(piece_bytes, kv_block_bytes + _ID_BYTES)
