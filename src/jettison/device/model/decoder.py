"""The decoder's arithmetic: embedding, a run of layers, final norm and head, over kernels and prepared buffers.

The residual stream is kept apart from the projections' outputs, which are added to it in one place (the norm that
follows). A stage passes on the residual after its last addition, and the next stage begins with a plain norm. These are
the same operations in the same order as in an unsplit run, so a split changes no bit.

Not here: the step's identity, sampling, and whether a shard may be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from jettison.device.dtypes import name_of
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.layer import prepare_heads
from jettison.device.kernels.operands import (
    IntegerMatrix,
    LayerConstants,
    LayerWeights,
    PackedMatrix,
    Weight,
    WeightStack,
)
from jettison.device.model.batch import Batch
from jettison.device.model.general_layer import GeneralLayers, attend_in_one_call
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.routing import Routed
from jettison.device.model.shards import shard_layouts
from jettison.device.model.workspace import StepBuffers, Workspace
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ShardId, layer_shard

GivesUp = Callable[[], bool]
"""Called at safepoints: whether to abandon the step."""


class ModelMemory(Protocol):
    """The part of ``device.memory.DeviceMemory`` that the decoder uses. Addresses never change while it is open."""

    def shard_bytes(self, shard: ShardId) -> Tensor:
        """The shard's slab: flat uint8."""
        ...

    def kv_arena(self, layer: int) -> Tensor:
        """The layer's KV cache: [blocks, 2, kv_heads, block_size, head_dim]."""
        ...

    def workspace(self) -> Tensor:
        """The bytes requested at construction: flat uint8."""
        ...


class Decoder:
    """Runs any layer range. Not thread-safe: a device computes one step at a time.

    It reads parameters and writes KV through ``memory``. The caller ensures that the shards of the range are mapped and
    filled, and that the block tables stay inside the arenas.
    """

    def __init__(
        self, config: DecoderConfig, memory: ModelMemory, kernels: Kernels, dtype: torch.dtype, workspace: Workspace
    ) -> None:
        self.config = config
        self._memory = memory
        self._kernels = kernels
        self._dtype = dtype
        self._workspace = workspace
        self._layouts = shard_layouts(config, name_of(dtype))
        self._layers: dict[int, LayerWeights] = {}
        self._tables: dict[ShardId, Weight] = {}
        self._constants = _constants(config, workspace)
        self._general = None if config.is_plain else GeneralLayers(config, kernels, self._constants)
        self._embedding_scale = float(torch.tensor(config.arithmetic.embedding_scale, dtype=dtype))

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """Rows of the embedding: ``token_ids`` [T], ``out`` [T, hidden]. Raises IndexError for an unknown token."""
        self._kernels.gather_rows(self._table(EMBED_SHARD), token_ids, out)
        if self._embedding_scale != 1.0:
            out.mul_(self._embedding_scale)

    def run_layers(
        self, layers: LayerRange, batch: Batch, buffers: StepBuffers, is_last: bool,
        between_layers: Callable[[], None] | None = None, gives_up: GivesUp | None = None, every: int = 1,
    ) -> int:
        """Run a contiguous, non-empty range over ``buffers.residual``, and store KV; returns the layer that would be
        next: the range's end or, where it was given up, the one that it stopped before.

        ``gives_up`` is called before the first layer and before every ``every``-th one after it: if it returns True,
        the remaining layers are left out, and the range ends there as one that is not the last.

        ``between_layers`` is called after attention and after the MLP of a layer, when nothing is half written. After
        the run the residual holds every addition and, where ``is_last``, ``buffers.x`` holds its final norm.
        """
        for layer in layers.layers():
            is_first = layer == layers.lo
            if gives_up is not None and (layer - layers.lo) % every == 0 and gives_up():
                if not is_first:
                    self.end_layers(buffers, is_last=False)
                return layer
            if between_layers is not None and not is_first:
                between_layers()
            self.run_layer(layer, batch, buffers, is_first, between_layers)
        self.end_layers(buffers, is_last)
        return layers.hi

    def run_layer(
        self, layer: int, batch: Batch, buffers: StepBuffers, is_first: bool,
        between_halves: Callable[[], None] | None = None,
    ) -> None:
        """Run one layer of a range. ``is_first``: of the range, so that ``buffers.x`` adds nothing to the residual."""
        kernels, eps, weights = self._kernels, self.config.norm_eps, self._layer(layer)
        if self._general is not None:
            kind = self.config.layers[layer]
            self._general.run(kind, layer, weights, batch, buffers, is_first, between_halves)
            return
        assert weights.input_norm is not None
        if is_first:
            kernels.rms_norm(x=buffers.residual, weight=weights.input_norm, eps=eps, out=buffers.x)
        else:
            kernels.add_rms_norm(buffers.x, buffers.residual, weights.input_norm, eps, buffers.x)
        self._attend(layer, weights, batch, buffers)
        if between_halves is not None:
            between_halves()
        kernels.feed_forward(weights, buffers, self._constants[layer])

    def end_layers(self, buffers: StepBuffers, is_last: bool) -> None:
        """After the last layer of a range; see ``run_layers``."""
        if self._general is not None:
            self._general.end(buffers, self._workspace.final_norm if is_last else None)
        elif is_last:
            norm, eps = self._workspace.final_norm, self.config.norm_eps
            self._kernels.add_rms_norm(buffers.x, buffers.residual, norm, eps, buffers.x)
        else:
            buffers.residual.add_(buffers.x)

    def step_ended(self) -> Routed:
        """What is to be told of experts; see ``RoutingCounts``."""
        return Routed() if self._general is None else self._general.routing.step_ended()

    def logits(self, x: Tensor) -> Tensor:
        """Logits of final hidden states ``x`` [n, hidden], n <= max_num_seqs, of ``sum_dtype``: a view that the next
        call overwrites."""
        out = self._workspace.logits[: x.shape[0]]
        self._kernels.linear(x, self._table(EMBED_SHARD if self.config.tied_embeddings else HEAD_SHARD), None, out)
        arithmetic = self.config.arithmetic
        if arithmetic.logits_scale != 1.0:
            out.mul_(arithmetic.logits_scale)
        if arithmetic.logits_softcap:
            out.div_(arithmetic.logits_softcap).tanh_().mul_(arithmetic.logits_softcap)
        return out

    def _attend(self, layer: int, weights: LayerWeights, batch: Batch, buffers: StepBuffers) -> None:
        """Attention of one layer: from the norm in ``buffers.x`` to the output projection in ``buffers.x``."""
        kernels, constants = self._kernels, self._constants[layer]
        remote = None if batch.remote is None else batch.remote.at(layer, constants.window)
        if batch.remote is None or remote is None:
            attend_in_one_call(kernels, constants, weights, batch, buffers)
            return
        kernels.linear(buffers.x, weights.qkv_weight, weights.qkv_bias, buffers.qkv)
        prepare_heads(kernels, weights, buffers, constants, batch.positions)
        batch.remote.ask(layer, remote, buffers.q)
        rows = batch.block_tables, batch.query_lens, batch.context_lens
        kernels.write_kv(buffers.k, buffers.v, weights.arena, *rows)
        lse = batch.remote.attend_here(remote, buffers.q, weights.arena, buffers.attention)
        batch.remote.merge(remote, buffers.attention, lse)
        kernels.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)

    def _layer(self, layer: int) -> LayerWeights:
        weights = self._layers.get(layer)
        if weights is None:
            parameters = self._parameters(layer_shard(layer))
            weights = self._layers[layer] = LayerWeights(parameters, self._memory.kv_arena(layer))
        return weights

    def _table(self, shard: ShardId) -> Weight:
        """The only matrix of the embedding or head shard: [vocab, hidden]."""
        table = self._tables.get(shard)
        if table is None:
            (table,) = self._parameters(shard).values()
            self._tables[shard] = table
        return table

    def _parameters(self, shard: ShardId) -> dict[str, Any]:
        """A shard's parameters by name: tensors, and matrices in their form in the slab."""
        layout = self._layouts[shard]
        views: dict[str, Any] = dict(layout.views(self._memory.shard_bytes(shard)))
        for slot in layout.slots:
            is_packed = slot.lies_packed(self._kernels)
            if len(slot.shape) == 3:
                views[slot.name] = WeightStack(views[slot.name], is_packed, slot.form, (slot.shape[1], slot.shape[2]))
            elif slot.form is not None:
                views[slot.name] = IntegerMatrix(views[slot.name], slot.shape[0], slot.shape[1], slot.form)
            elif is_packed:
                views[slot.name] = PackedMatrix(views[slot.name])
        return views


def _constants(config: DecoderConfig, workspace: Workspace) -> list[LayerConstants]:
    """Of each layer; the same object for layers that rotate and see alike."""
    norm, softcap = config.arithmetic.norm, config.arithmetic.attention_softcap
    of_kind = {
        (kind.rope, kind.window): LayerConstants(
            workspace.cos[kind.rope or 0], workspace.sin[kind.rope or 0], config.norm_eps, config.attention_scale,
            kind.window, softcap, "rms" if norm == "layer" else norm,
        )
        for kind in config.layers
    }  # fmt: skip
    return [of_kind[kind.rope, kind.window] for kind in config.layers]
