"""A machine's single copy of the parameters in host memory, for sleeping workers: a memory file that all workers share.

    [ a byte for each shard: 1 when it is complete | shards, each from the start of a system page on ]

Workers that are to sleep at level 1 write here what is missing, and share that work; a worker that wakes reads it. The
file is never mapped, so it counts for no worker's resident set, and it is outside every budget of pages. The mark of a
shard is set when its last byte is written. The caller compares the digest of a read shard with the served weights, so
that no others are used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator, Iterator

from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.devicebytes import DeviceBytes
from jettison.device.model.identity import Digest, Digester
from jettison.types import ModelShape, ShardId

PIECE_BYTES = 4 << 20
"""Bytes copied between two steps: a millisecond or two."""


class SharedCopy:
    """One process' access to the copy. Keeps a descriptor of its own until ``close``, which is idempotent."""

    def __init__(self, fd: int, shape: ModelShape, device_bytes: DeviceBytes) -> None:
        """``device_bytes``: of the slabs. Raises OSError."""
        self._bytes = device_bytes
        self._fd: int | None = os.dup(fd)
        self._sizes = dict(shape.shard_bytes)
        self._number = {shard: number for number, shard in enumerate(self._sizes)}
        self._offset: dict[ShardId, int] = {}
        end = len(self._sizes)
        for shard, size in self._sizes.items():
            self._offset[shard] = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            end = self._offset[shard] + size
        self._num_bytes = end

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def has(self, shard: ShardId) -> bool:
        """Whether the whole shard has been written."""
        return self._fd is not None and os.pread(self._fd, 1, self._number[shard]) == b"\1"

    def writing(self, shard: ShardId, slab: Tensor) -> Iterator[None]:
        """Write a shard in pieces: yields after each. Raises OSError, where there is no memory for one."""
        assert self._fd is not None, "closed"
        if os.fstat(self._fd).st_size < self._num_bytes:
            os.ftruncate(self._fd, self._num_bytes)  # the same for every writer
        for start in range(0, self._sizes[shard], PIECE_BYTES):
            piece, at = self._bytes.read(slab[start : start + PIECE_BYTES]).data, self._offset[shard] + start
            while piece:
                num_bytes = os.pwrite(self._fd, piece, at)
                piece, at = piece[num_bytes:], at + num_bytes
            yield
        os.pwrite(self._fd, b"\1", self._number[shard])

    def reading(self, shard: ShardId, slab: Tensor) -> Generator[None, None, Digest]:
        """Fill a slab in pieces; returns the digest of the bytes read. Raises OSError."""
        assert self._fd is not None, "closed"
        digester = Digester()
        for start in range(0, self._sizes[shard], PIECE_BYTES):
            with self._bytes.writing(slab[start : start + PIECE_BYTES]) as piece:
                left, at = as_numpy_uint8(piece).data, self._offset[shard] + start
                while left:
                    num_bytes = os.preadv(self._fd, [left], at)
                    if num_bytes == 0:
                        raise OSError(f"the host copy of {shard} is cut short")
                    left, at = left[num_bytes:], at + num_bytes
                digester.update(piece)
            yield
        return digester.digest()
