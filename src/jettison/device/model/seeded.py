"""Weights without files: every element follows from a seed, its tensor's name and its place (``load_format: random``).

Elements are counted, not drawn in turn, so any piece can be made alone, by any life of any worker, at a start, a
restore or a wake. They are made by integer arithmetic, and are fractions of at most eight bits, which float16, bfloat16
and all wider types hold exactly: a processor and a card make the same bytes, and every dtype has the same values.

Scales are powers of two, chosen so that a layer's outputs are of the size of its inputs; norms are around one.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from jettison.device.devicebytes import DeviceBytes
from jettison.device.dtypes import StoredDtype
from jettison.device.kernels.base import Kernels
from jettison.device.model.folder import SeededFolder
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.identity import Digest, Digester
from jettison.device.model.integers import IntegerForm, Integers
from jettison.device.model.shards import TensorSource
from jettison.device.model.weights import PIECE_BYTES, Rows, WeightFolder, copy_ordered, pieces_of
from jettison.device.spec import FILES, RANDOM
from jettison.types import ShardId

SEED = 0
CARD_PIECE = 4 << 20
"""Elements that a card makes at once, with eight bytes of memory outside its budget for each."""
_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x31848BAD
"""Odd, and below 2**31, so that products of 32 bits fit in an int64."""


def weights_by(load_format: str) -> type[WeightFolder]:
    """What reads weights, by ``DeviceSpec.load_format``."""
    return {FILES: WeightFolder, RANDOM: SeededWeights}[load_format]


class SeededWeights(SeededFolder, WeightFolder):
    """The weights of one shape."""

    def __init__(
        self, model_dir: Path, config: DecoderConfig, dtype: StoredDtype, kernels: Kernels | None = None,
        device_bytes: DeviceBytes | None = None,
    ) -> None:
        super().__init__(model_dir, config, dtype, kernels, device_bytes)
        self._digests: dict[ShardId, Digest] = {}
        """Of shards that were made before: they are the same again, and a card's need not be read back."""

    def loading(self, shard: ShardId, slab: Tensor) -> Generator[None, None, Digest]:
        """See ``WeightFolder``."""
        digest = yield from super().loading(shard, slab)
        return self._digests.setdefault(shard, digest)

    def _digester(self, shard: ShardId) -> Digester:
        return _Known(self._digests[shard]) if shard in self._digests else Digester()

    def _reading(self) -> AbstractContextManager[Rows]:
        return nullcontext(SeededRows())

    def _copying(self, rows_of: Rows, source: TensorSource, dest: Tensor, digester: Digester) -> Iterator[None]:
        """Make a tensor where it lies, a piece at a time: nothing is copied to a card."""
        most_elements = PIECE_BYTES // 8 if dest.device.type == "cpu" else CARD_PIECE
        for start, end in pieces_of(source, most_elements):
            started_ns = time.perf_counter_ns()
            piece = dest[start:end]
            copy_ordered(rows_of, source, start, piece)
            made_ns = time.perf_counter_ns()
            if not isinstance(digester, _Known):
                digester.update(self._bytes.read(piece))
            self._note_time(started_ns, made_ns)
            yield


class SeededRows:
    """See ``Rows``; on the device of what is to be filled."""

    def __init__(self, seed: int = SEED) -> None:
        self._seed = seed

    def copy_rows(self, source: TensorSource, start: int, dest: Tensor) -> None:
        """See ``Rows``."""
        drawn = self._drawn(source, start, dest.numel(), dest.device)
        if source.name.endswith("norm.weight"):
            dest.copy_((drawn & 63).view(dest.shape)).div_(128).add_(0.75)
            return
        scale = _scale(source.shape[-1])
        dest.copy_(drawn.view(dest.shape)).mul_(scale).sub_(127.5 * scale)

    def integers(self, source: TensorSource, form: IntegerForm, start: int, end: int) -> Integers:
        """See ``Rows``: integers around zero, of weights as large as plain ones, with an offset that takes nothing."""
        columns = source.shape[-1]
        drawn = self._drawn(source, start, (end - start) * columns, torch.device("cpu")).int()
        most = (1 << form.bits - 1) - 1
        values = (drawn % (2 * most + 1) - most).to(torch.int8).view(-1, columns)
        scale = _scale(columns) * (1 << 8 - form.bits)
        scales = torch.full((end - start, columns // form.group_size), scale, dtype=getattr(torch, form.scale))
        offsets = {"none": None, "zero": torch.zeros_like(scales), "min": -8 * scales}[form.offset]
        return Integers(values, scales, offsets)

    def _drawn(self, source: TensorSource, start: int, count: int, device: torch.device) -> Tensor:
        """Bytes from the first of row ``start`` on."""
        key = zlib.crc32(f"{self._seed} {source.name}".encode())
        before = 0 if source.slice is None else source.slice.at * source.shape[0]
        return stream_bytes(key, (before + start) * math.prod(source.shape[1:]), count, device)


def _scale(columns: int) -> float:
    """Of bytes, so that the largest weight is about sqrt(3 / width)."""
    return 2.0 ** (math.floor(math.log2(3 / columns) / 2) - 7)


class _Known(Digester):
    """The digest of bytes that need not be looked at."""

    __slots__ = ("_digest",)

    def __init__(self, digest: Digest) -> None:
        super().__init__()
        self._digest = digest

    def update(self, data: object) -> None:
        """Nothing."""

    def digest(self) -> Digest:
        """As it was."""
        return self._digest


def stream_bytes(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """uint8 ``[count]``: the bytes from ``first`` on of the stream ``key``, each four of which are a counter's hash.

    Integers below 2**32 in int64, so that no product overflows: the same on every device.
    """
    words = torch.arange(first // 4, -(-(first + count) // 4), dtype=torch.int64, device=device)
    _spread(words, 16, _FIRST)
    words ^= key
    _spread(words, 15, _SECOND)
    words ^= words >> 16
    low = words.view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)  # all devices are little-endian
    return low[first % 4 : first % 4 + count]


def _spread(words: Tensor, shift: int, factor: int) -> None:
    """Let every bit of words of 32 bits touch others."""
    words ^= words >> shift
    words *= factor
    words &= _WORD
