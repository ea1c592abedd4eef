"""What a device is made of, as every back end offers it: the seam under ``device.worker``.

A back end is chosen once, where a worker is made (``device.choice``), and nothing else asks which one it is. It brings

    pages      ``device.pages``          physical pages under addresses that never change
    bytes      ``device.devicebytes``    shards, KV blocks, hidden states and weights in and out
    kernels    ``device.kernels.base``   arithmetic on the device's tensors
    runner     here                      steps, with the sampler that draws from their logits
    buffers    here                      the host pool, and copies to and from it, some of them beside steps

What a controller knows of it is its kind (``device.kind``). What is alike on all of them is above: which shards are
resident and whole, which weights they are, what fits a step.
``tests/device/test_backend.py`` holds each of them to what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from jettison.device.devicebytes import Bytes, DeviceBytes
from jettison.device.dtypes import Dtype
from jettison.device.hostcopy import HostCopy
from jettison.device.kernels.base import Kernels
from jettison.device.kind import DeviceKind
from jettison.device.memory import DeviceMemory
from jettison.device.model.decoder import GivesUp, ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.pages import PagePool
from jettison.device.remote import AttentionPort
from jettison.device.step import Int32s, Running, StepInput
from jettison.types import LayerRange


class StepRunner(Protocol):
    """Runs steps over any resident layer range, one at a time."""

    @property
    def final_norm(self) -> Tensor:
        """[hidden_size], for the loader to fill. Never dropped."""
        ...

    def start_step(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> Running:
        """Begin a step's layers. ``port``: for steps with remote KV, and to answer peers between layers. ``gives_up``:
        asked at the safepoints of a step that has some.

        ``hidden``: [T, hidden_size] from the previous stage, None on the first one; it is not kept beyond the step.
        The result is the residual stream [T, hidden_size] for the next stage, in memory of its own; or, where the range
        ends with the last layer, a StepOutput with the time that it took; None where the step was given up: nothing was
        sampled, and of the blocks only the new positions of its own rows were written. A Shed where it has shed rows
        (``DeviceKind.keeps_rows``).

        Raises, or the result does, ValueError or IndexError for a step that does not fit the model or the limits;
        blocks of the step's own rows may have been written by then, nothing else has changed. A step may follow another
        (``StepInput.follows_step``) and begin with tokens of it: TokensLostError where that was not the last one that
        sampled here.
        """
        ...

    def warm_up(self, layers: LayerRange, num_blocks: int) -> int:
        """Have all that steps over ``layers`` need ready, before the first one: no request waits for it then. Returns
        the number of blocks, at most ``num_blocks``, that were written. Parameters may be any bytes, before and after.
        """
        ...

    @property
    def own_products(self) -> list[str]:
        """Shapes of products that the back end computes itself, as its library does not keep rows independent of the
        batch; known after ``warm_up``."""
        ...

    def attend(
        self, layer: int, block_ids: list[Int32s], rows: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> Bytes:
        """A peer's queries over blocks of ``layer`` that are mapped here; see ``remote.attend_for_peer``."""
        ...


class HostPool(Protocol):
    """Slots in host memory, each for a copy of one KV block in every layer; memory is taken at the first copy.

    All calls raise IndexError for a slot, block or layer that is not there, ValueError for sizes that do not match.
    """

    @property
    def num_slots(self) -> int:
        """Which slot holds what is ``memory.hostpool``'s book."""
        ...

    def gather(self, layers: LayerRange, slots: Sequence[int], out: Any) -> int:
        """Copy slots to the start of ``out`` (uint8), layer by layer, slot by slot; returns the bytes written."""
        ...

    def scatter(self, layers: LayerRange, slots: Sequence[int], data: Any) -> None:
        """Copy ``data``, which may be read-only, to slots: the inverse of ``gather``."""
        ...

    def copy_out(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """KV blocks to slots, in these layers; returns the bytes copied."""
        ...

    def copy_in(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """Slots to KV blocks: the inverse."""
        ...

    def beside(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool,
        skip_bytes: int = 0,
    ) -> HostCopy:
        """The same copies, to be run on another thread while steps run: nothing is copied here, all is checked, and
        blocks that will be written count as written. It is stopped before a layout changes, and made anew after it."""
        ...


class BackEnd(Protocol):
    """One kind of device. Making one opens nothing: what it makes does."""

    @property
    def bytes(self) -> DeviceBytes:
        """Of all tensors over its pages."""
        ...

    @property
    def computes_by_itself(self) -> bool:
        """A step that is launched needs the caller's thread no more: what it does not touch may be read and written
        meanwhile."""
        ...

    @property
    def kind(self) -> DeviceKind:
        """What a controller knows of it."""
        ...

    def load_kernels(self, name: str, dtype: Dtype) -> Kernels:
        """Kernels by their configured or resolved name. Raises ConfigError."""
        ...

    def make_pool(self, budget_bytes: int, page_bytes: int) -> PagePool:
        """Pages, not started. Raises ValueError for a page size that cannot be."""
        ...

    def make_runner(
        self, config: DecoderConfig, dtype: torch.dtype, memory: ModelMemory, kernels: Kernels, max_num_tokens: int,
        max_num_seqs: int,
    ) -> StepRunner:
        """Over open memory with a workspace as ``model.workspaceplan`` has it. Cheap: no parameter is read."""
        ...

    def make_host_pool(self, num_slots: int, num_layers: int, block_bytes: int) -> HostPool:
        """Takes no memory yet."""
        ...
