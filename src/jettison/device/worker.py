"""A worker's device as one object: its memory, the parameters in it, and the runner over both.

Single-threaded: its owner makes one call at a time. It has no sockets, processes or clocks. Its back end
(``device.backend``) makes its parts, and bytes of other workers are read and written by the calls here.

Invariant: a step runs only when every shard it needs is mapped and filled, and all its blocks lie inside the arenas.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jettison.device.backend import BackEnd, HostPool, StepRunner
from jettison.device.choice import choose_back_end
from jettison.device.devicebytes import Bytes, as_bytes
from jettison.device.dtypes import resolve_dtype, torch_dtype
from jettison.device.hostcopy import HostCopy
from jettison.device.mapahead import MappedAhead
from jettison.device.memory import DeviceMemory
from jettison.device.model.decoder import GivesUp
from jettison.device.model.hf_config import DecoderConfig, read_config
from jettison.device.model.identity import (
    Digest,
    Digester,
    FileMark,
    WeightsIdentity,
    agreed_identity,
    config_digest,
    explain_difference,
)
from jettison.device.model.seeded import weights_by
from jettison.device.model.shards import model_shape
from jettison.device.model.tying import with_its_own_head
from jettison.device.model.weights import PIECE_BYTES
from jettison.device.model.workspaceplan import plan_workspace
from jettison.device.remote import AttentionPort
from jettison.device.rowmasks import DeviceMasks
from jettison.device.sharedcopy import SharedCopy
from jettison.device.spec import HOST, DeviceSpec
from jettison.device.step import Int32s, Running, StepInput, StepOutput
from jettison.errors import ConfigError, ModelError, NotReadyError
from jettison.memory.hostpool import num_host_slots
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.types import LayerRange, ModelShape, ShardId

logger = logging.getLogger(__name__)


def make_device(spec: DeviceSpec) -> DeviceWorker:
    """A device on the back end that its spec names. Raises ConfigError for a name that there is not."""
    return DeviceWorker(spec, choose_back_end(spec.back_end))


def import_for_the_host() -> None:
    """All that ``make_device`` and a device's start import where memory is the host's: for a process that is to fork
    others that make one."""
    choose_back_end(HOST)
    import jettison.device.kernels.native  # noqa: F401 - which is imported where it is loaded


class DeviceWorker:
    """One device with a model on it. Between ``start`` and ``close`` the attributes ``config``, ``shape``,
    ``kernels_name``, ``own_products`` and ``ahead`` are set, and all other methods may be called."""

    config: DecoderConfig
    ahead: MappedAhead
    shape: ModelShape
    kernels_name: str
    own_products: tuple[str, ...]
    """See ``StepRunner.own_products``."""

    def __init__(self, spec: DeviceSpec, back_end: BackEnd) -> None:
        self._spec = spec
        self._back_end = back_end
        self._bytes = back_end.bytes
        self.computes_by_itself = back_end.computes_by_itself
        self.pin = self._bytes.pin
        """See ``DeviceBytes.pin``."""
        self._host: HostPool | None = None
        self._shared: SharedCopy | None = None
        self._memory: DeviceMemory | None = None
        self._runner: StepRunner | None = None
        self._masks: DeviceMasks | None = None
        self._kv_layers = LayerRange(0, 0)
        self._resident: frozenset[ShardId] = frozenset()
        self._complete: set[ShardId] = set()
        """Shards with complete parameters in their pages, also dropped ones, as long as their pages are not
        overwritten."""
        self._ready: set[LayerRange] = set()
        """Ranges found ready since the last change of shards."""
        self._identity: WeightsIdentity | None = None
        """Identity of the served weights. A shard that is not in it yet is accepted as read."""
        self._refused: dict[ShardId, tuple[dict[str, FileMark], str]] = {}
        """Shards that could not be read or differ from the served weights: the folder's files at that time, and the
        reason."""

    def start(self) -> None:
        """Read the config, lay out memory, load the resident shards from disk. Idempotent.

        Raises ModelError, ConfigError, or BudgetError with the bytes needed; nothing stays acquired then.
        """
        if self._memory is not None:
            return
        spec, back_end = self._spec, self._back_end
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        config = spec.config or read_config(spec.model_dir, spec.max_model_len)
        dtype = resolve_dtype(spec.dtype, config)
        if spec.config is None:
            config = with_its_own_head(config, spec.model_dir, dtype, spec.load_format)
        kernels, numbers = back_end.load_kernels(spec.kernels, dtype), torch_dtype(dtype)
        weights = weights_by(spec.load_format)(spec.model_dir, config, dtype, kernels, self._bytes)
        if not spec.starts_empty:
            weights.open()
        shape = model_shape(config, dtype)
        memory = DeviceMemory(
            back_end.make_pool(spec.budget_bytes, spec.page_bytes), self._bytes, budget_bytes=spec.budget_bytes,
            shape=shape, dtype=numbers, block_size=spec.block_size,
            workspace_bytes=plan_workspace(
                config, dtype, spec.max_num_tokens, spec.max_num_seqs, keeps_rows=back_end.kind.keeps_rows
            ).num_bytes,
        )
        layers = shape.all_layers if spec.layers is None else spec.layers
        if not layers or not shape.all_layers.covers(layers):
            raise ConfigError(f"layers {layers.lo} to {layers.hi} are not in the model's {config.num_layers}")
        self.config, self.shape, self.kernels_name, self._weights = config, shape, kernels.name, weights
        self._dtype = numbers
        try:
            if spec.shared_copy_fd is not None:
                self._shared = SharedCopy(spec.shared_copy_fd, shape, self._bytes)
            self._memory = memory
            self._resident, self._kv_layers = shape.shards_for(layers), layers
            memory.start(LayoutSpec(self._resident, layers))
            runner = back_end.make_runner(config, numbers, memory, kernels, spec.max_num_tokens, spec.max_num_seqs)
            self._runner = runner
            self._masks = DeviceMasks(spec, config.vocab_size)
            slots = num_host_slots(spec.host_bytes, shape, spec.block_size)
            self._host = back_end.make_host_pool(slots, shape.num_layers, self.kv_block_bytes)
            self.ahead = MappedAhead(memory, shape, spec.drop_layers)
            self.ahead.follow(LayoutSpec(self._resident, layers))
            self.ahead.finish()
            memory.note_written(runner.warm_up(layers, memory.capacity_blocks))
            self.own_products = tuple(runner.own_products)
            if not spec.starts_empty:
                self._load_first(runner.final_norm)
        except BaseException:
            self.close()
            raise
        logger.info(
            "%s: %d of %d layers in %s, %d blocks of %d tokens, kernels %s",
            spec.model_dir.name, len(layers), config.num_layers, dtype, self.capacity_blocks, spec.block_size,
            self.kernels_name,
        )  # fmt: skip

    def _load_first(self, final_norm: Tensor) -> None:
        """Read the resident shards, which become the served weights."""
        weights = self._weights
        weights.load_final_norm(final_norm)
        norm = self._bytes.read(final_norm).tobytes()
        self._identity = WeightsIdentity({}, norm, config_digest(self.config), dict(weights.marks))
        for shard in sorted(self._resident):
            self.load_shard_from_disk(shard)

    def close(self) -> None:
        """Release the memory. Idempotent; tensors handed out before must not be used afterwards."""
        memory, self._memory, self._runner, self._host = self._memory, None, None, None
        self._resident, self._kv_layers = frozenset(), LayerRange(0, 0)
        self._complete.clear()
        self._ready.clear()
        self._refused.clear()
        self._identity = None
        if self._masks is not None:
            self._masks.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        if memory is not None:
            memory.close()

    @property
    def capacity_blocks(self) -> int:
        """Blocks per arena, now."""
        return self._open_memory.capacity_blocks

    @property
    def layout_version(self) -> int:
        """Version of the page map; the next ``apply_layout`` must name it."""
        return self._open_memory.version

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in one layer's arena (K and V)."""
        return self.shape.block_bytes_per_layer(self._spec.block_size)

    # --- steps ---------------------------------------------------------------------------------------------------

    def start_step(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> Running:
        """Begin one microbatch; see ``StepRunner.start_step``.

        Raises NotReadyError when a shard is missing, IndexError when a block lies outside the arenas, ValueError for
        a step that does not fit the model. The worker stays usable: only this step's own blocks may have changed.
        """
        memory, runner = self._open_memory, self._runner
        layers = LayerRange(step.layer_lo, step.layer_hi)
        if runner is None or not self.ready_for(layers):
            raise NotReadyError(f"step {step.step_id}: layers {layers.lo} to {layers.hi} are not all resident here")
        num_blocks = 1 + int(step.block_tables.max(initial=-1))
        if num_blocks > memory.capacity_blocks:
            raise IndexError(f"step {step.step_id}: block {num_blocks - 1} of {memory.capacity_blocks}")
        # Before the step: a step that fails half-way has written blocks, too.
        memory.note_written(num_blocks)
        if step.sampling and self._masks is not None:
            step.masks = self._masks.begin(step.sampling)
        return runner.start_step(step, hidden, port, gives_up)

    def run_step(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> Tensor | StepOutput | None:
        """Start one microbatch and wait for it, where nothing is served meanwhile. Raises like ``start_step``."""
        result: Tensor | StepOutput | None = self.start_step(step, hidden, port, gives_up).result()
        return result

    def attend(
        self, layer: int, block_ids: list[Int32s], rows: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> Bytes:
        """Attention of a peer's queries over KV of ``layer`` on this worker, retained or not; changes nothing.

        ``block_ids``: blocks of each row; ``rows``: each query's row; ``positions``: each query's, in layers with a
        window. Raises IndexError for a block that is not mapped (a stale request), ValueError for invalid arguments.
        """
        if self._runner is None:
            raise NotReadyError("the device is not started")
        known = len(rows) > 0 and rows.min() >= 0 and rows.max() < len(block_ids)
        if not known or not 0 <= layer < self.shape.num_layers:
            raise ValueError(f"attention in layer {layer} for rows that do not exist")
        self._open_memory.check_readable(layer, np.concatenate([block_ids[r] for r in np.unique(rows)]))
        return self._runner.attend(layer, block_ids, rows, q, positions)

    def hidden_from_bytes(self, data: Any, num_tokens: int) -> Tensor:
        """Hidden states [num_tokens, hidden_size] from the bytes that a peer sent (memoryview or array).

        Zero-copy where the device and alignment allow. Raises ValueError when the length is wrong.
        """
        flat = as_bytes(data)
        expected = num_tokens * self.config.hidden_size * self._dtype.itemsize
        if len(flat) != expected:
            raise ValueError(f"hidden states of {num_tokens} tokens are {expected} bytes, got {len(flat)}")
        return self._bytes.tensor(flat, self._dtype, (num_tokens, self.config.hidden_size))

    def hidden_to_bytes(self, hidden: Tensor) -> Bytes:
        """What a peer makes hidden states of again. The device does not use the memory any more."""
        return self._bytes.read(hidden)

    def ready_for(self, layers: LayerRange) -> bool:
        """Whether every shard that a stage of ``layers`` needs is mapped and filled, and its KV arenas are there."""
        if layers in self._ready:
            return True
        needed = self.shape.shards_for(layers)
        if not (self._kv_layers.covers(layers) and needed <= self._resident and needed <= self._complete):
            return False
        self._ready.add(layers)
        return True

    # --- layout --------------------------------------------------------------------------------------------------

    def offer_layout(self, spec: LayoutSpec, live_blocks: int) -> LayoutOffer:
        """The needs and gains of a layout; changes nothing. See ``DeviceMemory.offer``."""
        return self._open_memory.offer(spec, live_blocks)

    def apply_layout(
        self, spec: LayoutSpec, live_blocks: int, version: int, copies: Sequence[tuple[int, int]]
    ) -> LayoutResult:
        """Copy blocks, then remap; raises (StalePlanError, ...) with nothing changed. See ``DeviceMemory.apply``."""
        memory, was_asleep = self._open_memory, not self._kv_layers
        result = memory.apply(spec, live_blocks, version, copies)
        if memory.prepares and result.num_map_calls:
            logger.info("layout %d was not prepared: %d calls of the driver", result.version, result.num_map_calls)
        self._ready.clear()
        # Pages that were not overwritten hold the shard only if it was complete when dropped.
        broken = result.intact_shards - self._complete
        if broken:
            result = replace(
                result,
                intact_shards=result.intact_shards - broken,
                missing_shards=result.missing_shards | broken,
            )
        self._complete -= result.missing_shards
        self._resident = spec.shards
        self._kv_layers = spec.kv_layers
        self.ahead.follow(spec)
        if was_asleep:  # it serves nothing yet, and its pages were given back
            self.ahead.finish()
        return result

    def start_over(self) -> frozenset[ShardId]:
        """Map the layers of the start, whatever has come since; no block counts any more. Returns the shards of these
        layers that are complete: those that were dropped and overwritten, or half written, are not."""
        layers = self.shape.all_layers if self._spec.layers is None else self._spec.layers
        home = LayoutSpec(self.shape.shards_for(layers), layers)
        if (self._resident, self._kv_layers) != (home.shards, home.kv_layers):
            self.apply_layout(home, 0, self.layout_version, ())
        if self._masks is not None:  # of requests that come again, with fewer tokens perhaps
            self._masks.close()
        return home.shards & self._complete

    def shard_num_bytes(self, shard: ShardId) -> int:
        """Of a mapped shard. Raises NotReadyError when it is not mapped."""
        return self._open_memory.shard_bytes(shard).numel()

    def read_shard(self, shard: ShardId, offset: int, out: Bytes) -> None:
        """Fill ``out`` with a shard's bytes from ``offset`` on, as they lie in its slab.

        Raises NotReadyError when it is not mapped, ValueError for bytes that it does not have.
        """
        self._bytes.copy_out(self._piece(shard, offset, len(out)), out)

    def write_shard(self, shard: ShardId, offset: int, data: Bytes) -> None:
        """The inverse of ``read_shard``; ``data`` may be read-only. Raises like it."""
        self._bytes.copy_in(data, self._piece(shard, offset, len(data)))

    def _piece(self, shard: ShardId, offset: int, num_bytes: int) -> Tensor:
        slab = self._open_memory.shard_bytes(shard)
        if not 0 <= offset <= offset + num_bytes <= slab.numel():
            raise ValueError(f"bytes {offset} to {offset + num_bytes} of {shard}, which has {slab.numel()}")
        return slab[offset : offset + num_bytes]

    def mark_shard_filled(self, shard: ShardId, digest: Digest | None = None) -> None:
        """Mark a mapped shard as completely written. ``digest``: digest of its bytes (None = computed from memory).

        Raises ValueError when it is not mapped, ModelError where its bytes differ from the served shard.
        """
        if not self._open_memory.is_mapped(shard):
            raise ValueError(f"{shard} is not mapped")
        if self._identity is None and self._spec.starts_empty:
            raise NotReadyError(f"{shard} has come before it is known what is served")
        known = {} if self._identity is None else self._identity.digests
        if shard in known:
            if digest is None:
                digester = Digester()
                for piece in self._open_memory.shard_bytes(shard).split(PIECE_BYTES):
                    digester.update(self._bytes.read(piece))
                digest = digester.digest()
            if digest != known[shard]:
                raise ModelError(f"{shard}: the bytes that came are not those being served")
        self._complete.add(shard)

    def load_shard_from_disk(self, shard: ShardId) -> None:
        """Fill a mapped shard from the machine's shared copy, or where that lacks it from the model folder. Raises
        ModelError; the shard counts as missing then."""
        for _ in self.loading_shard_from_disk(shard):
            pass

    def loading_shard_from_disk(self, shard: ShardId) -> Iterator[None]:
        """The same in pieces of a few MiB: yields after each. Steps that need other shards may run in between, but no
        layout may be applied; the shard counts as missing until the end, and when the iterator is closed before it.

        ModelError names a file with other weights than the served ones; the file is not read again until it changes.
        """
        if not self._open_memory.is_mapped(shard):
            raise ValueError(f"{shard} is not mapped")
        self._complete.discard(shard)
        self._ready.clear()
        if (yield from self._loading_shared(shard)):
            return
        listing = self._weights.listing()
        self._check_refused(shard, listing)
        try:
            digest = yield from self._weights.loading(shard, self._open_memory.shard_bytes(shard))
            known = None if self._identity is None else self._identity.digests.setdefault(shard, digest)
            if known not in (None, digest):
                assert self._identity is not None
                raise ModelError(explain_difference(self._weights.files_of(shard), shard, self._identity.files))
        except ModelError as error:
            self._weights.forget()
            self._refused[shard] = (listing, str(error))
            raise
        self.mark_shard_filled(shard, digest)

    def _loading_shared(self, shard: ShardId) -> Generator[None, None, bool]:
        """Fill a shard from the machine's shared copy, if that has it; returns whether it did."""
        known = None if self._identity is None else self._identity.digests.get(shard)
        if known is None or self._shared is None or not self._shared.has(shard):
            return False
        try:
            digest = yield from self._shared.reading(shard, self._open_memory.shard_bytes(shard))
        except OSError as error:
            logger.warning("%s cannot be read from the host copy: %s", shard, error)
            return False
        if digest != known:
            logger.warning("%s in the host copy is not the one being served", shard)
            return False
        self.mark_shard_filled(shard, digest)
        return True

    def keeping_shard(self, shard: ShardId) -> Iterator[None]:
        """Write a shard of this worker to the machine's shared copy, in pieces: yields after each. Raises NotReadyError
        where the shard is not complete here, or there is no shared copy, and OSError where there is no memory for
        it."""
        if self._shared is None:
            raise NotReadyError("this machine has no host copy")
        if shard not in self._complete or not self._open_memory.is_mapped(shard):
            raise NotReadyError(f"{shard} is not complete here")
        if not self._shared.has(shard):
            yield from self._shared.writing(shard, self._open_memory.shard_bytes(shard))

    # --- which weights -------------------------------------------------------------------------------------------

    @property
    def weights_identity(self) -> WeightsIdentity | None:
        """Identity of the weights read or adopted; None before that."""
        return self._identity

    @property
    def reading_ns(self) -> tuple[int, int]:
        """Time of reading weights from the folder, and the part of it in digests and checks for NaN."""
        return self._weights.read_ns, self._weights.check_ns

    def adopt_weights(self, identity: WeightsIdentity) -> None:
        """Serve only these weights from now on. The final norm is written if nothing was read yet.

        Raises ModelError where other weights have been read already.
        """
        if self._runner is None:
            raise NotReadyError("the device is not started")
        if self._identity is None:
            self._bytes.copy_in(as_bytes(identity.final_norm), self._runner.final_norm)
        else:
            agreed_identity(self._spec.model_dir, [self._identity, identity])
        self._identity = replace(identity, digests=dict(identity.digests))

    def _check_refused(self, shard: ShardId, listing: dict[str, FileMark]) -> None:
        """Raise the last error again, without reading, while the folder's files are unchanged."""
        marks, message = self._refused.pop(shard, (None, ""))
        if marks == listing:
            self._refused[shard] = (marks, message)
            raise ModelError(message)

    # --- KV ------------------------------------------------------------------------------------------------------

    def kv_gather(self, layers: LayerRange, ids: Sequence[int], out: Any, *, from_host: bool = False) -> int:
        """Copy blocks out of the arenas, or slots out of the host pool; returns the bytes written to ``out``. See
        ``DeviceMemory.kv_gather``, ``HostPool.gather``."""
        source = self._open_host.gather if from_host else self._open_memory.kv_gather
        return source(layers, ids, out)

    def kv_scatter(self, layers: LayerRange, ids: Sequence[int], data: Any, *, to_host: bool = False) -> None:
        """Copy blocks into the arenas, or into slots of the host pool: the inverse of ``kv_gather``."""
        target = self._open_host.scatter if to_host else self._open_memory.kv_scatter
        target(layers, ids, data)

    @property
    def num_host_slots(self) -> int:
        """Blocks that the host pool has room for, in every layer."""
        return self._open_host.num_slots

    def copy_to_host(self, layers: LayerRange, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy blocks to host slots; returns the bytes. See ``HostPool.copy_out``."""
        return self._open_host.copy_out(self._open_memory, layers, block_ids, slots)

    def copy_from_host(self, layers: LayerRange, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy host slots to blocks; returns the bytes."""
        return self._open_host.copy_in(self._open_memory, layers, block_ids, slots)

    def copy_beside(
        self, layers: LayerRange, block_ids: Sequence[int], slots: Sequence[int], *, to_host: bool, skip_bytes: int = 0
    ) -> HostCopy:
        """Either copy as an object that runs on another thread, while steps do. See ``HostPool.beside``."""
        return self._open_host.beside(
            self._open_memory, layers, block_ids, slots, to_host=to_host, skip_bytes=skip_bytes
        )

    def memory_report(self) -> dict[str, int]:
        """Bytes by use."""
        return self._open_memory.report()

    @property
    def _open_host(self) -> HostPool:
        if self._host is None:
            raise NotReadyError("the device is not started")
        return self._host

    @property
    def _open_memory(self) -> DeviceMemory:
        if self._memory is None:
            raise NotReadyError("the device is not started")
        return self._memory
