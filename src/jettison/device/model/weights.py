"""Reading a model folder's safetensors into slabs.

``WeightFolder`` fills one slab at a time, at start and as the last resort of a restore, from a folder that has been
checked as a whole (``folder``). Rows are copied in pieces: loading takes little memory besides the slab, and a serving
worker can run a step between two pieces. Quantized weights are widened by the piece (``quantized``), and what is kept,
hashed and checked is the widened piece. Those that the configuration says are kept (``kept``) stay integers, which
kernels pack. Each piece is hashed and checked for NaN and infinities while a processor cache still has it. Only
safetensors are opened, as other formats can carry code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.devicebytes import DeviceBytes
from jettison.device.devicebytes_host import HostBytes
from jettison.device.dtypes import StoredDtype, torch_dtype
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.operands import IntegerMatrix, PackedMatrix
from jettison.device.model.checkpoint import FoundWeights, check_header
from jettison.device.model.folder import ModelFolder
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.identity import Digest, Digester
from jettison.device.model.integers import IntegerForm, Integers
from jettison.device.model.quantized.parts import DamagedPart, Header, Part, Recipe, Stored
from jettison.device.model.shards import TensorSource
from jettison.device.model.stored import StoredFile, StoredTensor
from jettison.errors import ModelError
from jettison.types import ShardId

PIECE_BYTES = 4 << 20
"""Most bytes of a piece, counted in float64: a millisecond or two from memory."""


class Rows(Protocol):
    """The rows of a model's tensors."""

    def copy_rows(self, source: TensorSource, start: int, dest: Tensor) -> None:
        """Rows from ``start`` on, as many as ``dest`` has, in its dtype. Raises ModelError."""
        ...

    def integers(self, source: TensorSource, form: IntegerForm, start: int, end: int) -> Integers:
        """Rows [start, end) of a matrix that is kept as integers. Raises ModelError."""
        ...


class WeightFolder(ModelFolder):
    """A folder's weights, read shard by shard. No file stays open between calls, except while ``loading`` runs."""

    def __init__(
        self, model_dir: Path, config: DecoderConfig, dtype: StoredDtype, kernels: Kernels | None = None,
        device_bytes: DeviceBytes | None = None,
    ) -> None:
        """``kernels``: the kernels in whose packed form matrices are stored; None: plain. ``device_bytes``: of the
        slabs (None: they are in host memory)."""
        super().__init__(model_dir, config, dtype)
        self._kernels = kernels
        self._bytes: DeviceBytes = device_bytes or HostBytes()
        self.read_ns = 0
        """Total time of reading, hashing and checking included."""
        self.check_ns = 0
        """Time of hashing and of checking for NaN and infinities, a part of ``read_ns``."""

    def load_shard(self, shard: ShardId, slab: Tensor) -> Digest:
        """Fill a shard's slab (flat uint8), converting to the serving dtype; returns the slab's digest.

        Opens the folder if need be. Gaps between tensors become zeros.
        """
        loading = self.loading(shard, slab)
        while True:
            try:
                next(loading)
            except StopIteration as end:
                digest: Digest = end.value
                return digest

    def loading(self, shard: ShardId, slab: Tensor) -> Generator[None, None, Digest]:
        """``load_shard`` in pieces: yields after each. Close it to stop early; the slab then holds a part of the
        shard."""
        self.open()
        layout = self.layouts[shard]
        views = layout.views(slab)
        digester, end = self._digester(shard), 0
        with self._reading() as rows_of:
            for slot in layout.slots:
                self._skip(slab[end : slot.offset], digester)
                end = slot.offset + slot.num_bytes
                is_packed, view, row = slot.lies_packed(self._kernels), views[slot.name], 0
                num_rows, num_columns = slot.shape[-2:] if len(slot.shape) > 1 else (slot.shape[0], 1)
                for source in slot.sources:
                    part, first = (view[row // num_rows], row % num_rows) if len(slot.shape) == 3 else (view, row)
                    if slot.form is not None:
                        matrix = IntegerMatrix(part, num_rows, num_columns, slot.form)
                        yield from self._packing_integers(rows_of, source, first, matrix)
                    elif is_packed:
                        yield from self._packing(rows_of, source, first, PackedMatrix(part))
                    else:
                        yield from self._copying(rows_of, source, part[first : first + source.shape[0]], digester)
                    row += source.shape[0]
                if is_packed or slot.form is not None:
                    yield from self._digesting(slab[slot.offset : end], digester)
        self._skip(slab[end : layout.num_bytes], digester)
        return digester.digest()

    def load_final_norm(self, dest: Tensor) -> None:
        """Fill ``Workspace.final_norm``, of any float dtype."""
        self.open()
        with self._reading() as rows_of:
            for source, part in zip(self._final_norm, dest.view(len(self._final_norm), -1), strict=True):
                for _ in self._copying(rows_of, source, part, Digester()):
                    pass

    def holds_equal(self, first: TensorSource, second: TensorSource) -> bool:
        """Whether two tensors of one shape are equal in the serving dtype. Opens the folder if need be."""
        self.open()
        with self._reading() as rows_of:
            for start, end in pieces_of(first, PIECE_BYTES // 8):
                rows = torch.empty((2, end - start, *first.shape[1:]), dtype=torch_dtype(self._dtype))
                for source, part in zip((first, second), rows, strict=True):
                    rows_of.copy_rows(source, start, part)
                if not torch.equal(*rows):
                    return False
        return True

    def _digester(self, shard: ShardId) -> Digester:
        """For one reading of a shard."""
        return Digester()

    def _reading(self) -> AbstractContextManager[Rows]:
        """Where the rows of tensors come from, for one reading."""
        return _Files(self._opened())

    def _copying(self, rows_of: Rows, source: TensorSource, dest: Tensor, digester: Digester) -> Iterator[None]:
        """Copy a tensor to its place in the slab, a piece at a time."""
        for start, end in pieces_of(source, PIECE_BYTES // 8):
            started_ns = time.perf_counter_ns()
            with self._bytes.writing(dest[start:end]) as piece:
                copy_ordered(rows_of, source, start, piece)
                copied_ns = time.perf_counter_ns()
                digester.update(piece)
                if not _is_finite(piece):
                    raise self._not_finite(source, piece)
            self._note_time(started_ns, copied_ns)
            yield

    def _packing(self, rows_of: Rows, source: TensorSource, row: int, matrix: PackedMatrix) -> Iterator[None]:
        """Pack a tensor's rows into a matrix, from its row ``row`` on, a piece at a time."""
        assert self._kernels is not None
        for start, end in pieces_of(source, PIECE_BYTES // 8):
            started_ns = time.perf_counter_ns()
            piece = torch.empty((end - start, *source.shape[1:]), dtype=matrix.data.dtype)
            copy_ordered(rows_of, source, start, piece)
            on_device = self._bytes.tensor(as_numpy_uint8(piece), piece.dtype, tuple(piece.shape))
            self._kernels.pack_rows(on_device, row + start, matrix)
            copied_ns = time.perf_counter_ns()
            if not _is_finite(piece):
                raise self._not_finite(source, piece)
            self._note_time(started_ns, copied_ns)
            yield

    def _packing_integers(self, rows_of: Rows, source: TensorSource, row: int, matrix: IntegerMatrix) -> Iterator[None]:
        """The same of a matrix that is kept as integers, whose scales the recipe has checked."""
        assert self._kernels is not None
        for start, end in pieces_of(source, PIECE_BYTES // 8):
            started_ns = time.perf_counter_ns()
            values, scales, offsets = ordered_integers(rows_of, source, matrix.form, start, end)
            self._kernels.pack_integers(values, scales, offsets, row + start, matrix)
            self._note_time(started_ns, time.perf_counter_ns())
            yield

    def _digesting(self, part: Tensor, digester: Digester) -> Iterator[None]:
        """Hash a part of the slab as stored. A packed matrix can be hashed only when all of it is packed."""
        for start in range(0, part.numel(), PIECE_BYTES):
            started_ns = time.perf_counter_ns()
            digester.update(self._bytes.read(part[start : start + PIECE_BYTES]))
            self._note_time(started_ns, started_ns)
            yield

    def _note_time(self, started_ns: int, copied_ns: int) -> None:
        ended_ns = time.perf_counter_ns()
        self.check_ns += ended_ns - copied_ns
        self.read_ns += ended_ns - started_ns

    def _not_finite(self, source: TensorSource, piece: Tensor) -> ModelError:
        name = str(piece.dtype).removeprefix("torch.")
        is_nan = bool(piece.isnan().any())
        mend = "download the file again" if is_nan else "download the file again, or serve it in a wider --dtype"
        what = f"tensor {source.name} has values that are not finite in {name}"
        return ModelError(f"{self._opened().files_of(source)[0]}: {what}; {mend}")

    def _skip(self, padding: Tensor, digester: Digester) -> None:
        """Zero and hash a gap between tensors: gaps are part of a slab's digest, as peers send whole slabs."""
        if padding.numel():
            with self._bytes.writing(padding) as zeros:
                zeros.zero_()
                digester.update(zeros)


class _Files:
    """The safetensors files of a reading, each opened once (a header can be long), and all closed at its end."""

    def __init__(self, found: FoundWeights) -> None:
        self._found = found
        self._open: dict[Path, StoredFile] = {}
        self._recipe: Recipe | None = None
        self._parts: dict[str, StoredTensor] = {}
        """Of that recipe, whose tensor is read now."""
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def copy_rows(self, source: TensorSource, start: int, dest: Tensor) -> None:
        """See ``Rows``."""
        recipe = self._found.recipes[source.key]
        with self._reading(recipe) as parts:
            dest[:] = recipe.widen(parts, start, start + dest.shape[0])

    def integers(self, source: TensorSource, form: IntegerForm, start: int, end: int) -> Integers:
        """See ``Rows``."""
        recipe = self._found.recipes[source.key]
        assert recipe.integers is not None and recipe.integers.form == form  # ``open`` has checked it
        with self._reading(recipe) as parts:
            return recipe.integers.read(parts, start, end)

    @contextmanager
    def _reading(self, recipe: Recipe) -> Iterator[Stored]:
        """The parts of a tensor. Errors name the file."""
        if recipe is not self._recipe:
            for file in self._open.values():
                file.windows.clear()
            self._parts = {name: self._stored(part) for name, part in recipe.parts.items()}
            self._recipe = recipe
        try:
            yield self._parts
        except DamagedPart as error:
            part = recipe.parts[error.part]
            raise ModelError(f"{self._found.file_of[part.name]}: tensor {part.name} {error}") from None

    def _stored(self, part: Part) -> StoredTensor:
        """A stored tensor, of which no byte is read yet."""
        path = self._found.file_of[part.name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(StoredFile(path))
        dtype, stored = self._open[path].tensor(part.name)
        check_header(path, Header(dtype, stored.shape), part)  # it may have changed since the check
        return stored


def copy_ordered(rows_of: Rows, source: TensorSource, start: int, piece: Tensor) -> None:
    """Rows of a tensor from ``start`` on, in the order in which they are kept."""
    rows_of.copy_rows(source, start, piece)
    if source.order is not None:
        source.order.apply(piece)


def ordered_integers(rows_of: Rows, source: TensorSource, form: IntegerForm, start: int, end: int) -> Integers:
    """The same of a matrix that is kept as integers, all contiguous."""
    read = rows_of.integers(source, form, start, end)
    return Integers(
        _ordered(read.values, source), _ordered(read.scales, source),
        None if read.offsets is None else _ordered(read.offsets, source),
    )


def _ordered(rows: Tensor, source: TensorSource) -> Tensor:
    """Contiguous; in new memory where they change places, as they may be a view of columns that are kept."""
    if source.order is None:
        return rows.contiguous()
    ordered = rows.clone(memory_format=torch.contiguous_format)
    source.order.apply(ordered)
    return ordered


def pieces_of(source: TensorSource, most_elements: int) -> Iterator[tuple[int, int]]:
    """Row ranges [start, end) of a tensor, one for each piece; whole heads where rows change places in them."""
    num_rows, unit = source.shape[0], 1 if source.order is None else source.order.head_dim
    step = max(1, most_elements // math.prod(source.shape[1:]) // unit) * unit
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _is_finite(piece: Tensor) -> bool:
    """Whether a piece has no NaN and no infinity: both show in the least or the largest value, a check that is 30 times
    faster."""
    return all(math.isfinite(bound.item()) for bound in piece.aminmax())
