"""Turn a planned step into the arrays that each stage gets.

Reads requests and block tables at the moment the step is issued; keeps padded copies of block tables between steps so
that a decode step costs one short row copy per request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from jettison.core.ports import RunStep, StepRow
from jettison.device.step import PromptLogprobsRow, SamplingRow, StepInput
from jettison.memory.blocks import BlockLedger
from jettison.types import RequestId, SamplingParams, WorkerId

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class _CachedTable:
    """A block table as an array with room to grow."""

    __slots__ = ("generation", "ids", "length")

    def __init__(self) -> None:
        self.generation = -1
        self.length = 0
        self.ids: npt.NDArray[np.int32] = np.zeros(16, dtype=np.int32)

    def refresh(self, ids: list[int], generation: int) -> None:
        """Copy what has changed."""
        if generation != self.generation or len(ids) < self.length:
            self.generation = generation
            self.length = 0
        if len(ids) > self.length:
            if len(ids) > len(self.ids):
                grown = np.zeros(max(2 * len(self.ids), len(ids)), dtype=np.int32)
                grown[: self.length] = self.ids[: self.length]
                self.ids = grown
            self.ids[self.length : len(ids)] = ids[self.length :]
            self.length = len(ids)


class StepEncoder:
    """Encodes steps over the ledgers of a cluster."""

    def __init__(self, ledgers: Mapping[WorkerId, BlockLedger], block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._ledgers = ledgers
        self._block_size = block_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._tables: dict[WorkerId, dict[RequestId, _CachedTable]] = {w: {} for w in ledgers}

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        for tables in self._tables.values():
            tables.pop(request_id, None)

    def encode(self, step: RunStep) -> list[tuple[WorkerId, StepInput]]:
        """One input per stage, in pipeline order."""
        rows = step.rows
        query_lens = np.array([r.num_tokens for r in rows], dtype=np.int32)
        context_lens = np.array([r.context_len for r in rows], dtype=np.int32)
        sample_rows = np.array([i for i, r in enumerate(rows) if r.samples], dtype=np.int32)
        num_blocks = int((context_lens + query_lens).max() + self._block_size - 1) // self._block_size
        sampling = [s for i, r in enumerate(rows) if r.samples and (s := self._sampling(i, r)) is not None]
        prompt_logprobs = [p for i, r in enumerate(rows) if (p := _prompt_logprobs(i, r)) is not None]
        inputs: list[tuple[WorkerId, StepInput]] = []
        workers = [s.worker_id for s in step.stages]
        for index, stage in enumerate(step.stages):
            first, last = index == 0, index == len(workers) - 1
            stage_input = StepInput(
                step_id=step.step_id,
                layer_lo=stage.layers.lo,
                layer_hi=stage.layers.hi,
                token_ids=_token_ids(rows) if first else _NO_TOKENS,
                query_lens=query_lens,
                context_lens=context_lens,
                block_tables=self._block_tables(stage.worker_id, rows, num_blocks),
                sample_rows=sample_rows,
                sampling=sampling if last else None,
                prompt_logprobs=prompt_logprobs if last else None,
                prev_worker=None if first else workers[index - 1],
                next_worker=None if last else workers[index + 1],
                group_id=step.group_id,
                epoch=step.epoch,
            )
            inputs.append((stage.worker_id, stage_input))
        return inputs

    def _block_tables(self, worker_id: WorkerId, rows: tuple[StepRow, ...], num_blocks: int) -> npt.NDArray[np.int32]:
        ledger, cached = self._ledgers[worker_id], self._tables[worker_id]
        tables = np.zeros((len(rows), num_blocks), dtype=np.int32)
        for i, row in enumerate(rows):
            request_id = row.state.request_id
            table = ledger.table(request_id)
            entry = cached.get(request_id)
            if entry is None:
                entry = cached[request_id] = _CachedTable()
            if entry.length != len(table.ids) or entry.generation != table.generation:
                entry.refresh(table.ids, table.generation)
            n = min(entry.length, num_blocks)
            tables[i, :n] = entry.ids[:n]
        return tables

    def _sampling(self, index: int, row: StepRow) -> SamplingRow | None:
        state = row.state
        params: SamplingParams = state.request.params
        if params.is_plain_greedy:
            return None
        banned: tuple[int, ...] = ()
        if state.num_output < params.min_tokens:
            banned = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)
        penalties = params.has_penalties
        return SamplingRow(
            row=index,
            position=len(state.tokens),
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or 0,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            banned_token_ids=banned,
            logit_bias=params.logit_bias,
            prompt_token_ids=state.request.prompt_token_ids if params.repetition_penalty != 1.0 else (),
            output_token_ids=tuple(state.tokens[state.num_prompt :]) if penalties else (),
        )


def _token_ids(rows: tuple[StepRow, ...]) -> npt.NDArray[np.int32]:
    ids: list[int] = []
    for row in rows:
        if row.num_tokens == 1:
            ids.append(row.state.tokens[row.context_len])
        else:
            ids += row.state.tokens[row.context_len : row.context_len + row.num_tokens]
    return np.array(ids, dtype=np.int32)


def _prompt_logprobs(index: int, row: StepRow) -> PromptLogprobsRow | None:
    num_top = row.state.request.params.prompt_logprobs
    if num_top is None or row.context_len + 1 >= row.state.num_prompt:
        return None
    end = min(row.context_len + row.num_tokens + 1, row.state.num_prompt)
    return PromptLogprobsRow(index, num_top, tuple(row.state.tokens[row.context_len + 1 : end]))
