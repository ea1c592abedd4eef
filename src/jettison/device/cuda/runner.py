"""Steps on a card: a step's rows in one copy, its layers as graphs or launches, tokens drawn there, one copy back.

Beside ``Running.result``, the first step of a padded number of tokens waits while its layers are captured. A step may
be started behind one that is all launched (``CudaStep.may_be_followed``): it takes that one's tokens on the card, where
its layers come behind them. So buffers and graphs serve one step after the other, and what the host reads or writes
while two are under way is there twice (``staging``).

Not here: how far the host runs ahead (``running``), rows as arrays (``rows``), draws (``sampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.card import Card
from jettison.device.cuda.draws import describe
from jettison.device.cuda.graphs import GraphKey, LayerGraphs, most_graphs
from jettison.device.cuda.rows import (
    GraphTables,
    HostRows,
    StepRows,
    batches_for,
    bucket_of,
    buckets_for,
    lay_out,
    most_staged_bytes,
    padded,
)
from jettison.device.cuda.running import CudaStep, Launches, Safepoints, wait_for
from jettison.device.cuda.sampler import CudaSampler, prompt_logprobs
from jettison.device.cuda.staging import Results, Staging
from jettison.device.cuda.warmup import num_warm_blocks, warm_steps
from jettison.device.cuda.worklist import WorkShape
from jettison.device.devicebytes import Bytes, DeviceBytes
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.operands import Activations, LayerConstants, LayerWeights
from jettison.device.lasttokens import LastTokens
from jettison.device.model.batch import Batch, RowOperations
from jettison.device.model.decoder import Decoder, GivesUp, ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.rope import fill_rotary_tables
from jettison.device.model.workspace import StepBuffers, Workspace
from jettison.device.remote import Attending, AttentionPort, attend_for_peer
from jettison.device.step import Int32s, PromptLogprobsRow, StepInput, StepOutput
from jettison.device.stepcheck import check_input, check_limits, remote_parts
from jettison.types import LayerRange

_STAGED_BYTES = 4 << 20
"""At least (``rows.most_staged_bytes``). Graphs read from there, so it should never have to grow."""
_ASKED_BYTES, _MADE_BYTES = 1 << 16, 1 << 14

Arrays = dict[str, npt.NDArray[Any]]


class CardKernels(Kernels, Protocol):
    """``Kernels`` whose layers may read a step's rows from the card."""

    @property
    def own_products(self) -> list[str]:
        """See ``CudaKernels.own_products``."""
        ...

    def warming(self, batches: Sequence[int]) -> AbstractContextManager[None]:
        """See ``CudaKernels.warming``."""
        ...

    def work_shape(self, heads: int, arena: Tensor, most_tokens: int) -> WorkShape:
        """See ``CudaKernels.work_shape``."""
        ...

    def row_operations(self, rows: StepRows) -> RowOperations:
        """See ``CudaKernels.row_operations``."""
        ...

    def attend_rows(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, rows: StepRows
    ) -> None:
        """See ``CudaKernels.attend_rows``."""
        ...


class Limits(NamedTuple):
    """Of one step."""

    max_num_tokens: int
    max_num_seqs: int
    """Rows that are sampled."""


class _Stage(NamedTuple):
    """One step, whose rows are checked and on the card."""

    step: StepInput
    batch: Batch
    buffers: StepBuffers
    """Of the rows, with padding."""
    rows: StepRows
    """With padding, too."""
    bucket: int | None
    """How many tokens those are; None: no graph is used, and there is no padding."""
    staged: dict[str, Tensor]


class CudaRunner:
    """A ``StepRunner``. Cheap to construct over open memory: it cuts the workspace and fills the rotary tables."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, memory: ModelMemory, kernels: CardKernels, limits: Limits,
        device_bytes: DeviceBytes, card: Card,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._limits = limits
        self._memory = memory
        self._kernels = kernels
        self._bytes = device_bytes
        self._card = card
        self._workspace = Workspace(memory.workspace(), config, dtype, *limits)
        self._decoder = Decoder(config, memory, kernels, dtype, self._workspace)
        self._sampler = CudaSampler(config.vocab_size)
        self._staging = Staging(card, _STAGED_BYTES)
        self._asked = Staging(card, _ASKED_BYTES)
        """Of sampling, after the layers."""
        self._results = Results(card, _MADE_BYTES)
        self._graphs = LayerGraphs(card, most_graphs(config.num_layers))
        self._likeliest = torch.empty(limits.max_num_seqs, dtype=torch.int64, device=card.device)
        self._buffers: dict[int, StepBuffers] = {}
        """Of steps by graphs, by tokens."""
        self._bucket_sizes = buckets_for(config.token_parameters, limits.max_num_tokens)
        self._tables = GraphTables(card, config.max_model_len)
        self._last = LastTokens()
        self._newest: CudaStep | None = None
        self._sampled_on_card: int | None = None
        """The last step of which ``_likeliest`` has, or will have, all tokens."""
        fill_rotary_tables(config.ropes, self._workspace.cos, self._workspace.sin)

    @property
    def final_norm(self) -> Tensor:
        """[hidden_size], a view of the workspace."""
        return self._workspace.final_norm

    @property
    def own_products(self) -> list[str]:
        """See ``StepRunner.own_products``."""
        return self._kernels.own_products

    def start_step(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> CudaStep:
        """See ``StepRunner.start_step``. Copies the step's arrays, and launches its first layers."""
        layers = check_limits(step, self.config, *self._limits)
        check_input(step, hidden, self.config.hidden_size, self.dtype)
        before, self._newest = self._newest, None
        if before is not None and step.follows_step not in (None, self._sampled_on_card):
            before.settle()  # its tokens come by way of the host
        before = None if before is None or before.is_over else before
        every = step.safepoint_layers
        safepoints = Safepoints(gives_up, every) if gives_up is not None and every else None
        try:
            stage = self._begin(step, hidden, port, takes_from_card=before is not None)
            launches = Launches(
                layers, partial(self._run_layer, stage), partial(self._end, stage), lambda: self._graphs.num_captures)
            self._newest = CudaStep(self._card, launches, safepoints, None if port is None else port.poll, before)
        except RuntimeError:
            wait_for(self._card)  # a card that has failed says so here, and ends its worker
            raise
        return self._newest

    def warm_up(self, layers: LayerRange, num_blocks: int) -> int:
        """Compile and load what steps launch, and look at the model's products. See ``StepRunner.warm_up``."""
        block_size = self._memory.kv_arena(layers.lo).shape[3]
        self._staging.reserve(most_staged_bytes(*self._limits, -(-self.config.max_model_len // block_size)))
        most_tokens = min(num_blocks * block_size, self._limits.max_num_tokens, self.config.max_model_len)
        steps = warm_steps(self.config, layers, most_tokens, block_size)
        with self._kernels.warming(batches_for(self._bucket_sizes, *self._limits)):
            for step in steps:
                shape = step.num_tokens, self.config.hidden_size
                hidden = torch.zeros(shape, dtype=self.dtype, device=self._card.device) if layers.lo else None
                stage = self._begin(step, hidden, None, takes_from_card=False)
                for layer in layers.layers():
                    self._run_layer(stage, layer)
                self._end(stage)
        self._card.synchronize()
        self._card.give_back()
        return num_warm_blocks(steps)

    def attend(
        self, layer: int, block_ids: list[Int32s], rows: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> Bytes:
        """A peer's queries over blocks of ``layer`` that are mapped here; see ``remote.attend_for_peer``."""
        config = self.config
        return attend_for_peer(
            self._kernels, self._bytes, self._memory.kv_arena(layer), block_ids, rows, q,
            Attending.of(config, layer), positions,
        )

    # ------------------------------------------------------------------------------------------------- before layers

    def _begin(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None, *, takes_from_card: bool
    ) -> _Stage:
        """Copy the step's rows, and fill the residual. ``takes_from_card``: the step before is still under way, so the
        tokens that it samples are there only."""
        stage = self._stage(step, port, takes_from_card)
        if hidden is None:
            token_ids, of_slot = stage.staged["token_ids"], stage.staged.get("of_slot")
            if of_slot is not None:
                token_ids.index_copy_(0, stage.staged["unknown"], self._likeliest.index_select(0, of_slot))
            self._decoder.embed(token_ids, stage.buffers.residual)
        else:
            stage.buffers.residual[: step.num_tokens].copy_(hidden)
        return stage

    def _stage(self, step: StepInput, port: AttentionPort | None, takes_from_card: bool) -> _Stage:
        """Check a step's rows, and copy what it needs. Raises as ``start_step`` does."""
        bucket = bucket_of(step, self._bucket_sizes)
        rows = self._rows(step, bucket)
        num_tokens = len(rows.positions)
        arrays: Arrays = rows.arrays()
        if step.layer_lo == 0:
            arrays |= self._token_ids(step, num_tokens, takes_from_card)
        if step.layer_hi == self.config.num_layers:
            arrays["sampled"] = np.cumsum(step.query_lens, dtype=np.int64)[step.sample_rows] - 1
        staged = self._staging.put(arrays)
        tables: Tensor | None = None
        if bucket is not None:
            tables = self._tables.put(staged["tables"], self._memory.kv_arena(step.layer_lo).shape[3])
        remote = remote_parts(step, port, self._kernels, self._bytes, self.config, self._memory)
        on_card = rows.on_card(staged, tables)
        batch = Batch(
            step.query_lens, step.context_lens, step.block_tables, rows.positions[: step.num_tokens], remote,
            partial(self._kernels.attend_rows, rows=on_card), self._kernels.row_operations(on_card),
        )
        return _Stage(step, batch, self._buffers_for(num_tokens), on_card, bucket, staged)

    def _rows(self, step: StepInput, bucket: int | None) -> HostRows:
        arena, heads = self._memory.kv_arena(step.layer_lo), self.config.num_heads
        most = self.config.max_model_len
        if int((step.context_lens + step.query_lens).max()) > most:
            raise IndexError(f"step {step.step_id}: a position lies beyond the {most} that the model serves")
        rows = lay_out(
            partial(self._kernels.work_shape, heads, arena), arena, step.block_tables, step.query_lens,
            step.context_lens, step.num_tokens,
        )
        return rows if bucket is None else rows.padded(bucket)

    def _token_ids(self, step: StepInput, num_tokens: int, takes_from_card: bool) -> Arrays:
        """The tokens, padded; with ``takes_from_card`` also the places of those that are unknown, and of what they are
        among the tokens of the step before. Raises IndexError, and TokensLostError."""
        arrays: Arrays = {}
        ids = step.token_ids
        if step.follows_step is not None and takes_from_card:
            unknown = np.flatnonzero(ids < 0)
            arrays = {"unknown": unknown, "of_slot": -1 - ids[unknown].astype(np.int64)}
            ids = np.maximum(ids, 0)
        else:
            ids = self._last.token_ids(step)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise IndexError(f"step {step.step_id}: a token lies outside the vocabulary of {self.config.vocab_size}")
        return {"token_ids": padded(ids.astype(np.int64), num_tokens, 0), **arrays}

    def _prompt_targets(self, step: StepInput) -> Arrays:
        targets = {
            f"targets{i}": np.array(asked.target_token_ids, dtype=np.int64)
            for i, asked in enumerate(step.prompt_logprobs) if asked.target_token_ids
        }  # fmt: skip
        if any(ids.min() < 0 or ids.max() >= self.config.vocab_size for ids in targets.values()):
            raise IndexError(f"step {step.step_id}: a token of a prompt lies outside the vocabulary")
        return targets

    def _buffers_for(self, num_tokens: int) -> StepBuffers:
        """Views of the same memory, whatever the number of tokens."""
        buffers = self._buffers.get(num_tokens)
        if buffers is None:
            buffers = StepBuffers(self._workspace, self.config, num_tokens)
            if num_tokens in self._bucket_sizes:
                self._buffers[num_tokens] = buffers
        return buffers

    # -------------------------------------------------------------------------------------------------------- layers

    def _run_layer(self, stage: _Stage, layer: int) -> None:
        is_first, remote = layer == stage.step.layer_lo, stage.batch.remote
        buffers, batch = stage.buffers, stage.batch
        is_remote = remote is not None and remote.at(layer) is not None
        if is_remote:  # what peers and the host take part in has no padding
            num_tokens = stage.step.num_tokens
            buffers = self._buffers_for(num_tokens)
            batch = batch._replace(rows=self._kernels.row_operations(stage.rows.leading(num_tokens)))
        launch = partial(self._decoder.run_layer, layer, batch, buffers, is_first)
        if stage.bucket is None or is_remote:
            launch()
        else:
            key = GraphKey(layer, is_first, stage.bucket, stage.rows.tile.rows)
            self._graphs.run(key, self._staging.generation, launch)

    def _end(self, stage: _Stage) -> Callable[[], Any]:
        """Launch what follows the last layer."""
        is_last = stage.step.layer_hi == self.config.num_layers
        self._decoder.end_layers(stage.buffers, is_last)
        if is_last:
            return self._sample(stage)
        residual = stage.buffers.residual[: stage.step.num_tokens].clone()
        return lambda: residual

    # -------------------------------------------------------------------------------------------------------- tokens

    def _sample(self, stage: _Stage) -> Callable[[], StepOutput]:
        """Launch everything from final hidden states to tokens and log-probabilities. What rows ask for is listed and
        copied now, as the layers keep the card busy."""
        step, x = stage.step, stage.buffers.x
        plan = self._sampler.plan(step.sample_rows.tolist(), step.sampling, step.masks)
        arrays = plan.arrays | self._prompt_targets(step)
        staged = self._asked.put(arrays) if arrays else {}
        made = self._describe_prompts(stage, staged)
        if plan.rows:
            rows = self._workspace.rows[: len(plan.rows)]
            torch.index_select(x, 0, stage.staged["sampled"], out=rows)
            logits = self._decoder.logits(rows)
            tokens = self._likeliest[: len(plan.rows)]
            self._sampled_on_card = None if plan.on_host else step.step_id
            self._kernels.argmax(logits[:, : self.config.vocab_size], tokens)
            made |= self._sampler.launch(logits, tokens, plan, staged)
        fetched = self._results.fetch(made)

        def finish() -> StepOutput:
            prompts = {asked.row: self._prompt(i, asked, fetched) for i, asked in enumerate(step.prompt_logprobs)}
            output = StepOutput(step.step_id, [], prompts)
            if plan.rows:
                output.tokens = self._sampler.finish(plan, fetched)
            self._last.check_followed(step)
            self._last.note(output)
            return output

        return finish

    def _describe_prompts(self, stage: _Stage, staged: dict[str, Tensor]) -> dict[str, Tensor]:
        """Log-probabilities of prompts, as many positions at a time as the logits buffer has rows."""
        step, size = stage.step, self._limits.max_num_seqs
        made: dict[str, Tensor] = {}
        row_ends = np.cumsum(step.query_lens)
        for i, asked in enumerate(step.prompt_logprobs):
            first, num_targets = int(row_ends[asked.row] - step.query_lens[asked.row]), len(asked.target_token_ids)
            pieces = []
            for start in range(0, num_targets, size):
                end = min(start + size, num_targets)
                logits = self._decoder.logits(stage.buffers.x[first + start : first + end])
                pieces.append(describe(logits, staged[f"targets{i}"][start:end], asked.num_top))
            if pieces:
                made |= {f"prompt{i}.{name}": torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return made

    def _prompt(self, number: int, asked: PromptLogprobsRow, fetched: Arrays) -> list[Any]:
        prefix = f"prompt{number}."
        mine = {name.removeprefix(prefix): array for name, array in fetched.items() if name.startswith(prefix)}
        return prompt_logprobs(asked.target_token_ids, min(asked.num_top, self.config.vocab_size), mine)
