"""A back end of a pretended card: CUDA's runner, pages and sampler over host memory and a fake driver.

Its kernels are the host's, which get the rows of a step from what was staged for the card alone, so that a wrong list
of work, table or place shows as a wrong token, in any precision.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, cached_property
from types import SimpleNamespace

import numpy as np
from fakecuda import FakeBindings, PoisonedPool
from pretendedcard import PretendedCard

from jettison.device.cuda.backend import CudaBackEnd
from jettison.device.cuda.kind import CudaKind
from jettison.device.cuda.rows import NOWHERE
from jettison.device.cuda.runner import CudaRunner, Limits
from jettison.device.cuda.tiles import choose_tile
from jettison.device.cuda.worklist import HEADER_WORDS, ITEM_WORDS, WorkShape
from jettison.device.dtypes import name_of
from jettison.device.kernels import library
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.model.shards import model_shape
from jettison.device.model.workspace import StepBuffers

PAGE = 4096
_BUFFERS = [name for name in StepBuffers.__slots__ if name not in ("bound", "routed")]


@cache
def _exact_kernels() -> Kernels:
    """Checked once. Below double ``auto`` may be kernels whose rows depend on their batch."""
    return load_kernels("native" if library.supported_variants() else "torch")


class RowKernels:
    """The host's kernels as a card's: layers read the rows of a step where they were staged."""

    def __init__(self, name: str) -> None:
        self._inner = _exact_kernels()
        self.name = name

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def packs(self, shape, dtype):
        return False

    def keeps(self, form, shape, dtype):
        return False

    own_products = ()

    def warming(self, batches):
        return nullcontext()

    def work_shape(self, heads, arena, most_tokens):
        kv_heads, head_dim = arena.shape[2], arena.shape[4]
        group = heads // kv_heads
        tile = choose_tile(head_dim, arena.itemsize, group, most_tokens, is_one_size=True)
        return WorkShape(tile, group, kv_heads, programs=4)

    def attend_rows(self, weights, buffers, constants, rows) -> None:
        batch = staged_rows(rows, weights.arena.shape[3])
        mine = SimpleNamespace(bound=None, **{name: getattr(buffers, name)[: len(batch[3])] for name in _BUFFERS})
        self._inner.attend_layer(weights, mine, constants, *batch)

    def row_operations(self, rows):
        return StagedRowOperations(self._inner, rows)


def staged_rows(rows, block_size: int) -> tuple:
    """(tables, query lens, context lens, positions) from what was staged for the card."""
    # A graph has the tensor of its capture; how long the list is, the list says.
    length = HEADER_WORDS + ITEM_WORDS * int(rows.work[0])
    work = rows.work.as_strided((length,), (1,)).numpy()
    items = work[HEADER_WORDS:].reshape(-1, ITEM_WORDS)
    items = items[items[:, 5] == 0]  # a tile's first split, or all of it
    items = items[np.argsort(items[:, 1])]
    num_rows, num_tokens = int(items[:, 0].max()) + 1, int(items[:, 2].sum())
    query_lens, context_lens = np.zeros((2, num_rows), dtype=np.int32)
    np.add.at(query_lens, items[:, 0], items[:, 2])
    context_lens[items[::-1, 0]] = items[::-1, 3]
    tables, positions = rows.tables[:num_rows].numpy(), rows.positions[:num_tokens].numpy()
    row = np.repeat(np.arange(num_rows), query_lens)
    places = tables[row, positions // block_size] * block_size + positions % block_size
    assert (rows.slots[:num_tokens].numpy() == places).all(), "keys would go elsewhere"
    assert (rows.slots[num_tokens:].numpy() == NOWHERE).all(), "padding would be written"
    return np.ascontiguousarray(tables), query_lens, context_lens, positions


class StagedRowOperations:
    """See ``RowOperations``."""

    def __init__(self, kernels: Kernels, rows) -> None:
        self._kernels, self._rows = kernels, rows

    def rotate(self, q, k, cos, sin) -> None:
        positions = self._rows.positions.numpy()
        self._kernels.rotary(q, k, cos, sin, positions)

    def store(self, k, v, arena) -> None:
        *batch, positions = staged_rows(self._rows, arena.shape[3])
        self._kernels.write_kv(k[: len(positions)], v[: len(positions)], arena, *batch)

    def attend(self, q, arena, out, scale, lse, window, softcap) -> None:
        *batch, positions = staged_rows(self._rows, arena.shape[3])
        size = len(positions)
        more = {"window": window, "softcap": softcap} if window or softcap else {}
        self._kernels.attention(
            q[:size], arena, *batch, out[:size], scale, None if lse is None else lse[:size], **more
        )

    def positions(self):
        return self._rows.positions


class WatchedRunner(CudaRunner):
    """Tells the pretended card which memory its steps read and write; when they end the card sees itself."""

    def start_step(self, step, hidden, port=None, gives_up=None):
        steps = self._card.steps
        shape = model_shape(self.config, name_of(self.dtype))
        number = steps.begin(step, self._memory, shape, lambda tensor: tensor.data_ptr())
        try:
            return super().start_step(step, hidden, port, gives_up)
        except BaseException:
            steps.end(number)  # it was refused, and has launched nothing
            raise


def card_runner(config, dtype, memory, kernels, max_num_tokens, max_num_seqs, device_bytes) -> CudaRunner:
    """A runner on a pretended card of its own."""
    card, limits = PretendedCard(), Limits(max_num_tokens, max_num_seqs)
    card.start()
    return CudaRunner(config, dtype, memory, kernels, limits, device_bytes, card)


class PretendedKind(CudaKind):
    """See ``DeviceKind``."""

    def resolve_kernels(self, name, dtype, processor=None):
        return super().resolve_kernels(name, "float32", processor)  # the host's compute in double, too


class PretendedBackEnd(CudaBackEnd):
    """See ``BackEnd``."""

    kind = PretendedKind()

    def __init__(self) -> None:
        self.fake = FakeBindings(1 << 30, granularity=PAGE)

    @cached_property
    def card(self):
        return PretendedCard()

    def load_kernels(self, name, dtype):
        name = self.kind.resolve_kernels(name, dtype)
        self.card.start()
        return RowKernels(name)

    def make_runner(self, config, dtype, memory, kernels, max_num_tokens, max_num_seqs):
        limits = Limits(max_num_tokens, max_num_seqs)
        return WatchedRunner(config, dtype, memory, kernels, limits, self.bytes, self.card)

    def make_pool(self, budget_bytes, page_bytes):
        super().make_pool(budget_bytes, page_bytes)
        self.card.start()  # a device has loaded its kernels by then
        return PoisonedPool(budget_bytes, page_bytes, self.fake)
