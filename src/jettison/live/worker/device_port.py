"""What a worker's loop asks of its device: the seam between ``live`` and ``device.worker.DeviceWorker``.

Byte buffers are flat uint8 numpy arrays on the host here (``device.devicebytes`` moves them), so that the loop and its
tests need no torch, and it shows nowhere what the device is. All calls come from one thread, one at a time, but for
what ``HostCopy`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jettison.device.hostcopy import HostCopy
from jettison.device.spec import DeviceSpec
from jettison.device.step import Int32s, Running, StepInput
from jettison.live.wire.worker_config import WorkerSpec
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.transport.link import Bytes
from jettison.transport.shm import Pin
from jettison.types import LayerRange, ShardId

if TYPE_CHECKING:
    from jettison.device.model.identity import Digest, WeightsIdentity
    from jettison.device.remote import AttentionPort


def device_spec(spec: WorkerSpec) -> DeviceSpec:
    """What a worker tells its device."""
    return DeviceSpec(
        model_dir=Path(spec.model_dir),
        dtype=spec.dtype,
        budget_bytes=spec.memory_bytes,
        block_size=spec.block_size,
        max_num_tokens=spec.max_num_tokens,
        max_num_seqs=spec.max_num_seqs,
        back_end=spec.back_end,
        kernels=spec.kernels,
        load_format=spec.load_format,
        tokenizer_dir=None if spec.tokenizer_dir is None else Path(spec.tokenizer_dir),
        page_bytes=spec.page_bytes,
        num_threads=spec.num_threads,
        config=spec.model,
        # Where the host has no folder of the model, its peers have what was read elsewhere.
        starts_empty=spec.starts_empty or not Path(spec.model_dir).is_dir(),
        host_bytes=spec.host_bytes,
        shared_copy_fd=spec.shared_copy_fd,
        layers=None if spec.layers is None else LayerRange(*spec.layers),
        drop_layers=tuple(LayerRange(*layers) for layers in spec.drop_layers),
    )


class Ahead(Protocol):
    """What a device does ahead of its next layout, in the shadow of steps."""

    def turn(self) -> bool:
        """A tenth of a millisecond of it; False where nothing is left."""
        ...


class Device(Protocol):
    """One device's memory, layers and KV cache. Any call may raise; what failed has changed nothing."""

    @property
    def ahead(self) -> Ahead:
        """Between ``start`` and ``close``."""
        ...

    @property
    def computes_by_itself(self) -> bool:
        """Steps that are launched (``Running.is_launched``) run without this thread, which may call meanwhile what
        gathers and scatters blocks and shards that the step does not touch."""
        ...

    @property
    def capacity_blocks(self) -> int:
        """Blocks per arena of the resident layers."""
        ...

    @property
    def layout_version(self) -> int:
        """Version of the page map."""
        ...

    @property
    def kernels_name(self) -> str:
        """Which kernels run, for the logs."""
        ...

    @property
    def own_products(self) -> tuple[str, ...]:
        """Shapes of products that the device computes itself, where its library does not keep rows independent of the
        batch."""
        ...

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in one layer's arena (K and V)."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def start_over(self) -> frozenset[ShardId]:
        """Map the layers of the start, forget all KV and what is known of requests; returns the shards of them whose
        parameters are here. No step is under way, and no copy."""
        ...

    def start_step(
        self, step: StepInput, hidden: Any, port: AttentionPort | None = None,
        gives_up: Callable[[], bool] | None = None,
    ) -> Running:
        """Begin one stage. ``port`` asks peers for attention over KV that they hold, and answers them meanwhile.
        ``hidden`` is None on the first stage. The result is a StepOutput on the last stage, else hidden; None where
        ``gives_up``, asked every ``step.safepoint_layers`` layers, has said so, or a Shed where the step has shed rows.

        Until it may be followed (``Running.may_be_followed``) no other step is started, and nothing that it reads or
        writes is written until it is over. The hidden states of the result are the caller's: their memory is not used
        again by the device.
        """
        ...

    def attend(
        self, layer: int, block_ids: list[Int32s], rows: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> Bytes:
        """Attention of a peer's queries over blocks that lie here. Called between steps, and while one runs."""
        ...

    def hidden_from_bytes(self, data: Bytes, num_tokens: int) -> Any:
        """Hidden states ``[num_tokens, hidden_size]`` over ``data``, which the device may keep and change."""
        ...

    def hidden_to_bytes(self, hidden: Any) -> Bytes:
        """Of hidden states that a step has made; they may share memory."""
        ...

    def offer_layout(self, spec: LayoutSpec, live_blocks: int) -> LayoutOffer: ...

    def apply_layout(
        self, spec: LayoutSpec, live_blocks: int, version: int, copies: list[tuple[int, int]]
    ) -> LayoutResult: ...

    @property
    def pin(self) -> Pin | None:
        """Makes copies to and from memory of the host fast that is used again and again: a link's slots. Returns what
        undoes it, which is called before the memory goes. Never fails: copies are right without it. None: there is
        nothing to gain."""
        ...

    def kv_gather(self, layers: LayerRange, ids: Any, out: Bytes, *, from_host: bool = False) -> int:
        """Copy blocks of the arenas out, or slots of the host pool, layer by layer, one after the other:
        ``len(layers) * len(ids) * kv_block_bytes``."""
        ...

    @property
    def num_host_slots(self) -> int:
        """Blocks that the host pool has room for."""
        ...

    def kv_scatter(self, layers: LayerRange, ids: Any, data: Bytes, *, to_host: bool = False) -> None:
        """Inverse of ``kv_gather``; ``data`` may be read-only."""
        ...

    def copy_to_host(self, layers: LayerRange, block_ids: Any, slots: Any) -> int:
        """Copy blocks of these layers to slots of the host pool; returns the bytes."""
        ...

    def copy_from_host(self, layers: LayerRange, block_ids: Any, slots: Any) -> int:
        """Inverse of ``copy_to_host``."""
        ...

    def copy_beside(
        self, layers: LayerRange, block_ids: Any, slots: Any, *, to_host: bool, skip_bytes: int = 0
    ) -> HostCopy:
        """One of these copies, to be run beside steps, from byte ``skip_bytes`` on. Over when a layout changes: it is
        stopped before, and asked for anew."""
        ...

    def shard_num_bytes(self, shard: ShardId) -> int:
        """Of a shard as the device lays it out. Raises when it is not mapped."""
        ...

    def read_shard(self, shard: ShardId, offset: int, out: Bytes) -> None:
        """Fill ``out`` with its bytes from ``offset`` on. Raises when it is not mapped or does not have them."""
        ...

    def write_shard(self, shard: ShardId, offset: int, data: Bytes) -> None:
        """The inverse; ``data`` may be read-only."""
        ...

    def mark_shard_filled(self, shard: ShardId, digest: Digest | None = None) -> None:
        """All bytes of a mapped shard are written; ``digest``: of them, where it is known. Raises ModelError where they
        are not those of the weights that are served."""
        ...

    @property
    def weights_identity(self) -> WeightsIdentity | None:
        """Of what was read or adopted; None before."""
        ...

    @property
    def reading_ns(self) -> tuple[int, int]:
        """Time spent in reading weights from the folder, and of it in digests and checks."""
        ...

    def adopt_weights(self, identity: WeightsIdentity) -> None:
        """Serve nothing but these weights from now on. Raises ModelError where others were read."""
        ...

    def loading_shard_from_disk(self, shard: ShardId) -> Iterator[None]:
        """Fill a mapped shard from the machine's copy in host memory or from the model folder, in pieces of a few MiB:
        yields after each. Steps may run in between; the shard counts as missing until the end.
        """
        ...

    def keeping_shard(self, shard: ShardId) -> Iterator[None]:
        """Write a shard to the machine's copy in host memory, likewise in pieces."""
        ...

    def memory_report(self) -> dict[str, int]: ...


