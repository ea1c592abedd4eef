"""One step of one stage on the host: from ``StepInput`` to the hidden states for the next stage, or to tokens.

Not here: checks for the shards and blocks that a step names (``device.worker``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from jettison.device.devicebytes import Bytes, DeviceBytes
from jettison.device.keptrows import KeptRows
from jettison.device.kernels.base import Kernels
from jettison.device.lasttokens import LastTokens
from jettison.device.model.batch import Batch
from jettison.device.model.decoder import Decoder, GivesUp, ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.rope import fill_rotary_tables
from jettison.device.model.workspace import StepBuffers, Workspace
from jettison.device.remote import Attending, AttentionPort, attend_for_peer
from jettison.device.sampler import Sampler
from jettison.device.step import Ended, Int32s, SamplingRow, Shed, StepInput, StepOutput
from jettison.device.stepcheck import check_input, check_limits, remote_parts
from jettison.types import FAILED_TOKEN_ID, LayerRange, SampledToken, TokenLogprobs

logger = logging.getLogger(__name__)


class Runner:
    """A ``StepRunner``: runs steps over any resident layer range, one at a time, in preallocated memory.

    Cheap to construct over open memory: it cuts the workspace and fills the rotary tables; ``final_norm`` is for the
    loader to fill.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        memory: ModelMemory,
        kernels: Kernels,
        max_num_tokens: int,
        max_num_seqs: int,
        device_bytes: DeviceBytes,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.max_num_tokens = max_num_tokens
        self.max_num_seqs = max_num_seqs
        self._workspace = Workspace(memory.workspace(), config, dtype, max_num_tokens, max_num_seqs, keeps_rows=True)
        self._memory = memory
        self._kernels = kernels
        self._bytes = device_bytes
        self._decoder = Decoder(config, memory, kernels, dtype, self._workspace)
        self._sampler = Sampler(config.vocab_size)
        self._likeliest = torch.empty(max_num_seqs, dtype=torch.int64)
        """Of each row that is sampled."""
        self._buffers: StepBuffers | None = None
        """The last step's buffers; a step with as many tokens reuses them."""
        self._last = LastTokens()
        self._kept = KeptRows(self._workspace.kept)
        fill_rotary_tables(config.ropes, self._workspace.cos, self._workspace.sin)

    @property
    def final_norm(self) -> Tensor:
        """[hidden_size], a view of the workspace."""
        return self._workspace.final_norm

    def start_step(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> Ended:
        """``run``, to its end."""
        start_ns = time.perf_counter_ns()
        result = self.run(step, hidden, port, gives_up)
        output = result.result if isinstance(result, Shed) else result
        if isinstance(output, StepOutput):
            output.routed = self._decoder.step_ended()
            output.compute_ns = time.perf_counter_ns() - start_ns
        return Ended(result)

    def run(
        self, step: StepInput, hidden: Tensor | None, port: AttentionPort | None = None,
        gives_up: GivesUp | None = None,
    ) -> Tensor | StepOutput | Shed | None:
        """Run the step's layers. ``port``: for steps with remote KV, and to answer peers between layers. ``gives_up``:
        called at the safepoints of a step, if it has some.

        ``hidden``: [T, hidden_size] from the previous stage, None on the first one; it is copied, not kept. Returns the
        residual stream [T, hidden_size] for the next stage, in memory of its own so that it may be sent while the next
        step runs; or, where the range ends with the last layer, the sampled tokens. None where the step was abandoned:
        nothing was sampled, and only the new positions of its own rows were written in blocks. A Shed where it has shed
        rows (``StepInput.sheds_from``), which are kept. Raises ValueError or
        IndexError for a step that does not fit the model or the limits; blocks of the step's own rows may have been
        written by then, nothing else has changed. Raises TokensLostError for one that follows a step that has sampled
        nothing, and RowsLostError for one that goes on with rows that are not kept any more.
        """
        layers = check_limits(step, self.config, self.max_num_tokens, self.max_num_seqs)
        batch = self._batch(step, port)
        poll = None if port is None else port.poll
        if not step.safepoint_layers:
            gives_up = None
        if step.resumes_step is None:
            begin, end = layers.lo, layers.hi
            buffers = self._buffers_for(len(batch.positions))
            self._enter(step, hidden, buffers)
        else:
            begin = self._kept.next_layer(step)
            end = layers.hi if step.most_layers is None else min(layers.hi, begin + step.most_layers)
            reached = self._catch_up(step, batch, LayerRange(layers.lo, begin), poll, gives_up)
            if reached < begin:
                self._kept.keep_on(step.step_id)
                return Shed(begin - layers.lo, self._go_on(step, batch, LayerRange(reached, layers.hi), poll))
            buffers = self._buffers_for(len(batch.positions))
            self._kept.take(buffers.residual)
        is_last = end == self.config.num_layers
        reached = self._decoder.run_layers(
            LayerRange(begin, end), batch, buffers, is_last, poll, gives_up, step.safepoint_layers
        )
        if reached == layers.hi:
            return self._result(step, buffers, is_last)
        is_untouched = reached == layers.lo and step.resumes_step is None
        if step.sheds_from is None or (is_untouched and not step.sheds_from):
            return None
        self._kept.keep(step.step_id, reached, buffers.residual[_num_tokens(step, step.sheds_from) :])
        return Shed(reached - layers.lo, self._go_on(step, batch, LayerRange(reached, layers.hi), poll))

    def _catch_up(
        self, step: StepInput, batch: Batch, layers: LayerRange, poll: Callable[[], None] | None,
        gives_up: GivesUp | None,
    ) -> int:
        """Run the rows of a step that resumes which were not shed, up to where the others are; returns the layer that
        is next."""
        first = step.leading(step.sheds_from or 0)
        if not len(first.query_lens):
            return layers.hi
        buffers = self._buffers_for(first.num_tokens)
        self._enter(first, None, buffers)
        if layers.lo == layers.hi:
            return layers.hi
        rows = batch.leading(len(first.query_lens), first.num_tokens)
        return self._decoder.run_layers(layers, rows, buffers, False, poll, gives_up, step.safepoint_layers)

    def _go_on(
        self, step: StepInput, batch: Batch, left: LayerRange, poll: Callable[[], None] | None
    ) -> Tensor | StepOutput | None:
        """Run the rows that a step does not shed through the layers that are left; None where there are none."""
        first = step.leading(step.sheds_from or 0)
        if not len(first.query_lens):
            return None
        buffers, is_last = self._buffers_for(first.num_tokens), left.hi == self.config.num_layers
        rows = batch.leading(len(first.query_lens), first.num_tokens)
        self._decoder.run_layers(left, rows, buffers, is_last, poll)
        return self._result(first, buffers, is_last)

    def _result(self, step: StepInput, buffers: StepBuffers, is_last: bool) -> Tensor | StepOutput:
        if not is_last:
            return buffers.residual.clone()
        output = self._leave(step, buffers.x)
        self._last.note(output)
        return output

    @property
    def own_products(self) -> list[str]:
        """None: see ``StepRunner.own_products``."""
        return []

    def warm_up(self, layers: LayerRange, num_blocks: int) -> int:
        """All is ready."""
        return 0

    def attend(
        self, layer: int, block_ids: list[Int32s], rows: Int32s, q: Bytes, positions: Int32s | None = None
    ) -> Bytes:
        """A peer's queries over blocks of ``layer`` that are mapped here; see ``remote.attend_for_peer``."""
        config = self.config
        return attend_for_peer(
            self._kernels, self._bytes, self._memory.kv_arena(layer), block_ids, rows, q,
            Attending.of(config, layer), positions,
        )

    def _buffers_for(self, num_tokens: int) -> StepBuffers:
        if self._buffers is None or self._buffers.x.shape[0] != num_tokens:
            self._buffers = StepBuffers(self._workspace, self.config, num_tokens)
        return self._buffers

    def _batch(self, step: StepInput, port: AttentionPort | None) -> Batch:
        query_lens = step.query_lens
        first_positions = step.context_lens - (np.cumsum(query_lens, dtype=np.int32) - query_lens)
        positions = np.arange(step.num_tokens, dtype=np.int32) + np.repeat(first_positions, query_lens)
        remote = remote_parts(step, port, self._kernels, self._bytes, self.config, self._memory)
        return Batch(query_lens, step.context_lens, step.block_tables, positions, remote)

    def _enter(self, step: StepInput, hidden: Tensor | None, buffers: StepBuffers) -> None:
        """Fill the residual."""
        check_input(step, hidden, self.config.hidden_size, self.dtype)
        if hidden is None:
            self._decoder.embed(torch.tensor(self._last.token_ids(step), dtype=torch.int64), buffers.residual)
        else:
            buffers.residual.copy_(hidden)

    def _leave(self, step: StepInput, x: Tensor) -> StepOutput:
        """Logits and tokens from final hidden states ``x`` [T, hidden]."""
        row_ends = np.cumsum(step.query_lens)
        prompt_logprobs = self._prompt_logprobs(step, x, row_ends)
        if len(step.sample_rows) == 0:
            return StepOutput(step.step_id, [], prompt_logprobs)
        sampled = self._workspace.rows[: len(step.sample_rows)]
        torch.index_select(x, 0, torch.from_numpy(row_ends[step.sample_rows] - 1), out=sampled)
        rows, sampling = step.sample_rows.tolist(), step.sampling
        instead: dict[int, int] = {}
        logits = self._decoder.logits(sampled)
        if step.masks is not None:
            sampling, instead = step.masks.applied(sampling, self.config.vocab_size)
        tokens = self._sample(logits, rows, sampling)
        for row, token_id in instead.items():
            tokens[rows.index(row)] = SampledToken(token_id)
        return StepOutput(step.step_id, tokens, prompt_logprobs)

    def _sample(self, logits: Tensor, rows: list[int], sampling: Sequence[SamplingRow]) -> list[SampledToken]:
        """Sample all rows at once; if that raises, one by one, so that one bad row fails alone."""
        likeliest = self._likeliest[: len(rows)]
        self._kernels.argmax(logits[:, : self.config.vocab_size], likeliest)
        tokens = likeliest.tolist()
        if min(tokens) >= 0:
            if not sampling:
                return [SampledToken(token) for token in tokens]
            try:
                return self._sampler.sample(logits, rows, sampling, tokens)
            except Exception:
                logger.exception("sampling %d rows failed: trying them one by one", len(rows))
        sampled: list[SampledToken] = []
        for index, row in enumerate(rows):
            try:
                if tokens[index] < 0:
                    raise ValueError("logits are not finite")
                mine = [s for s in sampling if s.row == row]
                sampled += self._sampler.sample(logits[index : index + 1], [row], mine)
            except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row only
                logger.error("row %d of %d cannot be sampled: %s", row, len(rows), error)
                sampled.append(SampledToken(FAILED_TOKEN_ID))
        return sampled

    def _prompt_logprobs(self, step: StepInput, x: Tensor, row_ends: Int32s) -> dict[int, list[TokenLogprobs]]:
        """As many positions at a time as the logits buffer has rows."""
        result: dict[int, list[TokenLogprobs]] = {}
        for asked in step.prompt_logprobs:
            first = int(row_ends[asked.row] - step.query_lens[asked.row])
            targets = asked.target_token_ids
            described: list[TokenLogprobs] = []
            for start in range(0, len(targets), self.max_num_seqs):
                piece = targets[start : start + self.max_num_seqs]
                logits = self._decoder.logits(x[first + start : first + start + len(piece)])
                described += self._sampler.prompt_logprobs(logits, piece, asked.num_top)
            result[asked.row] = described
        return result


def _num_tokens(step: StepInput, num_rows: int) -> int:
    """Of its first rows."""
    return int(step.query_lens[:num_rows].sum())
