"""Remote attention of a step: the rows and layers with KV at other workers, and the merge of partial results.

KunServe v1 section 4.2: attention needs KV and no parameters, so the old home of a request can compute it while the
request's KV is still being moved. Unlike in the paper, keys and values of *new* tokens stay at the new stage, which
attends to them itself; only queries are sent, and the old home appends nothing. Each side attends to its own positions
and returns the log of its sum of exponentials, by which the new stage merges the parts: exact up to rounding.
In a layer with a window a query's position decides what it sees, so the question carries positions; a query whose
window begins after the KV there is not sent. Attention sinks are no part's: they are applied to what has been merged.

Not here: links, waiting, and the answering worker (``live.worker.remote_attention`` implements ``AttentionPort``).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from jettison.device.devicebytes import Bytes, DeviceBytes
from jettison.device.kernels.base import Kernels, merge_parts, sum_dtype
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.step import Int32s, StepInput


class AttentionPort(Protocol):
    """The port through which a step asks other workers for attention over their KV, and answers their questions
    meanwhile.

    Every method may raise RemoteAttentionError: then the step fails, and its rows have to be recomputed.
    """

    def begin(self, step: StepInput) -> None:
        """A step with ``step.remote`` starts: tell the holders its blocks."""
        ...

    def ask(self, layer: int, worker: int, entries: Int32s, q: Bytes, positions: Int32s | None = None) -> None:
        """Send queries without waiting: ``entries`` [n] has for each query the index in ``step.remote`` of the KV that
        it attends to; ``positions`` [n] its position in its request, in layers with a window."""
        ...

    def collect(self) -> list[list[tuple[int, Bytes]]]:
        """Wait for all answers: for each ``ask``, in order, pieces of (number of queries, ``pack_answer`` of them)."""
        ...

    def poll(self) -> None:
        """Between two layers: answer the peers that have asked. Cheap if none has."""
        ...


class Attending(NamedTuple):
    """How a layer attends; see ``Kernels.attention``."""

    num_heads: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @classmethod
    def of(cls, config: DecoderConfig, layer: int) -> Attending:
        """Of a layer of a model."""
        window, softcap = config.layers[layer].window, config.arithmetic.attention_softcap
        return cls(config.num_heads, config.attention_scale, window, softcap)


class _Part(NamedTuple):
    """Tokens of a step that attend at one worker in one layer."""

    worker: int
    tokens: Tensor
    """int64 [n]: their places in the step."""
    entries: Int32s
    """[n]: the index in ``step.remote`` of each token's KV."""
    positions: Int32s
    """[n]: of the tokens in their requests."""


class LayerParts(NamedTuple):
    """The parts of one layer of a step: the tokens that attend at other workers too, and the rows' remaining KV
    here."""

    parts: list[_Part]
    block_tables: Int32s
    """[R, max_blocks], without the leading blocks at other workers."""
    context_lens: Int32s
    """[R], likewise."""
    window: int = 0
    softcap: float = 0.0


class RemoteParts:
    """The remote parts of one step, layer by layer."""

    def __init__(
        self, step: StepInput, port: AttentionPort, kernels: Kernels, device_bytes: DeviceBytes, num_heads: int,
        block_size: int, scale: float,
    ) -> None:
        """Raises ValueError for parts that do not consist of whole blocks before the rows' chunks."""
        self._step = step
        self._port = port
        self._kernels = kernels
        self._bytes = device_bytes
        self._num_heads = num_heads
        self._block_size = block_size
        self._scale = scale
        self._cache: dict[tuple[tuple[int, ...], int], LayerParts] = {}
        for entry in step.remote:
            if not 0 < entry.num_tokens <= step.context_lens[entry.row] or entry.num_tokens % block_size:
                raise ValueError(f"step {step.step_id}: {entry.num_tokens} remote tokens of row {entry.row}")

    def at(self, layer: int, window: int = 0, softcap: float = 0.0) -> LayerParts | None:
        """The remote parts of a layer with this window and softcap; None if there are none."""
        chosen = tuple(i for i, e in enumerate(self._step.remote) if e.layer_lo <= layer < e.layer_hi)
        if not chosen:
            return None
        parts = self._cache.get((chosen, window))
        if parts is None:
            parts = self._cache[chosen, window] = self._parts(chosen, window)
        return parts._replace(softcap=softcap)

    def _parts(self, chosen: tuple[int, ...], window: int) -> LayerParts:
        step = self._step
        starts = np.cumsum(step.query_lens) - step.query_lens
        tables, contexts = step.block_tables.copy(), step.context_lens.copy()
        by_worker: dict[int, list[int]] = {}
        for index in chosen:
            entry = step.remote[index]
            by_worker.setdefault(entry.worker, []).append(index)
            num_blocks = entry.num_tokens // self._block_size
            tables[entry.row, : tables.shape[1] - num_blocks] = step.block_tables[entry.row, num_blocks:]
            contexts[entry.row] -= entry.num_tokens
        parts = []
        for worker, indices in sorted(by_worker.items()):
            rows = np.array([step.remote[i].row for i in indices])
            lens = step.query_lens[rows]
            entries = np.repeat(np.array(indices, dtype=np.int32), lens)
            place = np.arange(len(entries)) - np.repeat(np.cumsum(lens) - lens, lens)  # in the chunk
            tokens = np.repeat(starts[rows], lens) + place
            positions = np.repeat(step.context_lens[rows], lens) + place
            if window:
                there = np.repeat([step.remote[i].num_tokens for i in indices], lens)
                sees = positions + 1 - window < there
                entries, tokens, positions = entries[sees], tokens[sees], positions[sees]
            if len(entries):
                places = torch.from_numpy(tokens.astype(np.int64))
                parts.append(_Part(worker, places, entries, positions.astype(np.int32)))
        return LayerParts(parts, tables, contexts, window)

    def ask(self, layer: int, parts: LayerParts, q: Tensor) -> None:
        """Send the queries of a layer (``q``: [T, num_heads, head_dim], rotated) to the workers that hold the keys."""
        for part in parts.parts:
            positions = part.positions if parts.window else None
            self._port.ask(layer, part.worker, part.entries, self._bytes.read(q[part.tokens]), positions)

    def attend_here(self, parts: LayerParts, q: Tensor, arena: Tensor, out: Tensor) -> Tensor:
        """Attend to the KV of this worker, in all rows; returns the log-sum-exps [T, num_heads]."""
        lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
        self._kernels.attention(
            q, arena, parts.block_tables, self._step.query_lens, parts.context_lens, out, self._scale, lse,
            window=parts.window, softcap=parts.softcap,
        )  # fmt: skip
        return lse

    def merge(self, parts: LayerParts, out: Tensor, lse: Tensor) -> None:
        """Wait for the answers and merge them into ``out`` and ``lse`` with this worker's part."""
        for part, pieces in zip(parts.parts, self._port.collect(), strict=True):
            start = 0
            for num_queries, answer in pieces:
                there, there_lse = unpack_answer(answer, num_queries, self._num_heads, out.dtype, self._bytes)
                tokens = part.tokens[start : start + num_queries]
                out[tokens] = merge_parts(out[tokens], lse[tokens], there, there_lse)
                lse[tokens] = torch.logaddexp(lse[tokens], there_lse)
                start += num_queries


def pack_answer(out: Tensor, lse: Tensor, device_bytes: DeviceBytes) -> Bytes:
    """``out`` [n, heads, head_dim] and ``lse`` [n, heads] as bytes, sums first (they need the wider alignment)."""
    return np.concatenate((device_bytes.read(lse), device_bytes.read(out)))


def unpack_answer(
    data: Bytes, num_tokens: int, num_heads: int, dtype: torch.dtype, device_bytes: DeviceBytes
) -> tuple[Tensor, Tensor]:
    """Inverse of ``pack_answer``. Raises ValueError for other bytes."""
    num_lse = num_tokens * num_heads * sum_dtype(dtype).itemsize
    if len(data) <= num_lse or (len(data) - num_lse) % (num_tokens * num_heads * dtype.itemsize):
        raise ValueError(f"{len(data)} bytes are no attention of {num_tokens} tokens and {num_heads} heads")
    lse = device_bytes.tensor(data[:num_lse], sum_dtype(dtype), (num_tokens, num_heads))
    return device_bytes.tensor(data[num_lse:], dtype, (num_tokens, num_heads, -1)), lse


def attend_for_peer(
    kernels: Kernels, device_bytes: DeviceBytes, arena: Tensor, block_ids: list[Int32s], rows: Int32s, q: Bytes,
    how: Attending, positions: Int32s | None = None,
) -> Bytes:
    """Answer a peer: attention of its queries over whole blocks of this worker.

    ``block_ids``: each row's blocks from its request's start, every one of them mapped in this layer; ``rows`` [n]:
    each query's row, equal ones together; ``positions`` [n]: in the request, needed with a window. Raises ValueError
    or IndexError for invalid arguments.
    """
    _, _, _, block_size, head_dim = arena.shape
    row_bytes = how.num_heads * head_dim * arena.dtype.itemsize
    if len(q) != len(rows) * row_bytes:
        raise ValueError(f"{len(q)} bytes are no {len(rows)} queries of {row_bytes}")
    queries = device_bytes.tensor(q, arena.dtype, (len(rows), how.num_heads, head_dim))
    is_first = np.diff(rows, prepend=-1) != 0
    first_positions = None
    if how.window:
        if positions is None or len(positions) != len(rows):
            raise ValueError("queries of a layer with a window come with their positions")
        is_first |= np.diff(positions, prepend=-1) != 1
        first_positions = positions[is_first]
    starts = np.flatnonzero(is_first)
    listed = [block_ids[r] for r in rows[starts]]
    tables = np.zeros((len(listed), max(len(ids) for ids in listed)), dtype=np.int32)
    for table, ids in zip(tables, listed, strict=True):
        table[: len(ids)] = ids
    query_lens = np.diff(starts, append=len(rows)).astype(np.int32)
    context_lens = np.array([len(ids) * block_size for ids in listed], dtype=np.int32)
    out = torch.empty_like(queries)
    lse = queries.new_empty(queries.shape[:2], dtype=sum_dtype(arena.dtype))
    kernels.attention(
        queries, arena, tables, query_lens, context_lens, out, how.scale, lse, True, how.window, how.softcap,
        first_positions,
    )
    return pack_answer(out, lse, device_bytes)
