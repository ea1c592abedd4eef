"""Turn a planned step into the arrays that each stage gets.

Reads requests and block tables at the moment the step is issued; keeps padded copies of block tables between steps so
that a decode step costs one short row copy per request, and counts of tokens seen for requests with penalties.

A step is one control message, and a message has a limit (``channel.MAX_MESSAGE_BYTES``). ``fixed_step_bytes`` bounds
the part that the configuration decides; of the rest, what clients ask of the sampler, the encoder sends what fits into
``MAX_SAMPLING_BYTES`` and refuses the others, each alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.core.ports import RunStep, StepRow
from jettison.core.requests import RequestState
from jettison.device.step import GrammarRow, PromptLogprobsRow, RemoteKV, SamplingRow, StepInput, pack_ints
from jettison.memory.blocks import BlockLedger, BlockTable
from jettison.types import FAILED_TOKEN_ID, LATER_TOKEN_ID, Grammar, RequestId, SamplingParams, WorkerId

logger = logging.getLogger(__name__)

_NO_TOKENS = np.zeros(0, dtype=np.int32)

MAX_FIXED_BYTES = 32 << 20
"""Token ids, lengths, block tables and targets of prompt logprobs of one step."""
MAX_SAMPLING_BYTES = 24 << 20
"""Sampling rows of one step. With ``MAX_FIXED_BYTES`` well under what a control message may have."""

_ROW_BYTES = 160
"""A sampling row's scalars and headers as msgpack, rounded up."""


def fixed_step_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Most bytes of a step without its sampling rows: every token a prompt logprob's target, every table full."""
    return 10 * max_num_tokens + max_num_seqs * (4 * max_blocks + 32)


def _sampling_bytes(row: SamplingRow) -> int:
    """Upper bound of a row as msgpack."""
    penalties = len(row.prompt_ids) + len(row.output_ids) + len(row.output_counts)
    ids = len(row.banned_token_ids) + len(row.logprob_token_ids)
    grammar = 0 if row.grammar is None else _grammar_bytes(row.grammar)
    return _ROW_BYTES + 5 * ids + 15 * len(row.logit_bias) + len(row.allowed_token_ids) + penalties + grammar


def _grammar_bytes(grammar: GrammarRow) -> int:
    texts = len(grammar.text.encode()) + len(grammar.begins_after.encode())
    return _ROW_BYTES + texts + len(grammar.output_ids) + 5 * len(grammar.end_token_ids)


class _Slot:
    """Where a request's block table lies in ``_TableMatrix``, and what of it is there."""

    __slots__ = ("generation", "index", "length")

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = -1
        self.length = 0


class _TableMatrix:
    """Block tables of a worker's requests as rows of one array, padded with zeros: a step's tables are one gather.

    Between two decode steps a row gets one new id at most, so only what has changed is copied. It grows with the most
    and the longest requests there are at a time, and is small again when the last one ends.
    """

    _INITIAL_SHAPE = (16, 16)

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] = np.zeros(self._INITIAL_SHAPE, dtype=np.int32)
        self._slots: dict[RequestId, _Slot] = {}
        self._free = list(range(len(self._ids)))

    def forget(self, request_id: RequestId) -> None:
        """The request has ended; its row is free. Unknown ids are nothing."""
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        if not self._slots and self._ids.shape != self._INITIAL_SHAPE:
            self._ids = np.zeros(self._INITIAL_SHAPE, dtype=np.int32)
            self._free = list(range(len(self._ids)))
            return
        self._ids[slot.index, : slot.length] = 0
        self._free.append(slot.index)

    def gather(self, tables: Mapping[RequestId, BlockTable], request_ids: Sequence[RequestId],
               num_blocks: int) -> npt.NDArray[np.int32]:
        """The requests' tables as they are now, ``[len(request_ids), num_blocks]``: longer ones cut, shorter ones
        padded."""
        slots = self._slots
        indices: list[int] = []
        for request_id in request_ids:
            table = tables[request_id]
            slot = slots.get(request_id)
            if slot is None or slot.length != len(table.ids) or slot.generation != table.generation:
                slot = self._refresh(request_id, table)
            indices.append(slot.index)
        if num_blocks > self._ids.shape[1]:
            self._widen(num_blocks)
        return self._ids[indices, :num_blocks]

    def _refresh(self, request_id: RequestId, table: BlockTable) -> _Slot:
        """Copy what has changed of one table."""
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = _Slot(self._take_row())
        length = len(table.ids)
        if length > self._ids.shape[1]:
            self._widen(length)
        if table.generation != slot.generation or length < slot.length:
            self._ids[slot.index, : slot.length] = 0
            slot.generation, slot.length = table.generation, 0
        self._ids[slot.index, slot.length : length] = table.ids[slot.length :]
        slot.length = length
        return slot

    def _take_row(self) -> int:
        if not self._free:
            num_rows = len(self._ids)
            self._free = list(range(num_rows, 2 * num_rows))
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
        return self._free.pop()

    def _widen(self, num_blocks: int) -> None:
        num_rows, width = self._ids.shape
        wider = np.zeros((num_rows, max(2 * width, num_blocks)), dtype=np.int32)
        wider[:, :width] = self._ids
        self._ids = wider


class _SeenTokens:
    """Distinct tokens of one request, and how often its output has them. Costs what is new since the last step."""

    __slots__ = ("_counts", "_ids", "_num_counted", "_slot_of", "prompt_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_ids = pack_ints(np.unique(np.asarray(prompt_token_ids, dtype=np.int32)))
        self._slot_of: dict[int, int] = {}
        self._ids: npt.NDArray[np.int32] = np.zeros(16, dtype=np.int32)
        self._counts: npt.NDArray[np.int32] = np.zeros(16, dtype=np.int32)
        self._num_counted = 0

    def output(self, tokens: list[int]) -> tuple[bytes, bytes]:
        """Packed ids and counts of the output, which has only grown since the last call."""
        for token in tokens[self._num_counted :]:
            slot = self._slot_of.setdefault(token, len(self._slot_of))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
            self._counts[slot] += 1
        self._num_counted = len(tokens)
        num_ids = len(self._slot_of)
        return pack_ints(self._ids[:num_ids]), pack_ints(self._counts[:num_ids])


class _GrammarPlaces:
    """Where each grammar's text and tokens have been sent, so that a step carries what is new.

    A worker that was restarted, or has given a state up, has to be sent all of it: it says so by failing the step
    (GrammarLostError), and the driver calls ``forget_places`` for every step that failed.
    """

    _OVERLAP = 8
    """Tokens that are sent again: a step that was given up before its last stage began has told that stage nothing."""

    _KEPT_STEPS = 128
    """Steps of all groups after which a worker may have given up what it was not asked for: half of its own bound."""

    def __init__(self, end_token_ids: tuple[int, ...]) -> None:
        self._end_token_ids = end_token_ids
        self._at: dict[RequestId, tuple[WorkerId, int, int]] = {}
        """The last worker that was sent it, how many tokens of the output, and in which step."""

    def row(self, worker_id: WorkerId, step_id: int, state: RequestState, grammar: Grammar) -> GrammarRow:
        """What this worker needs to know."""
        num_known = len(state.output)
        worker, num_sent, last_step = self._at.get(state.request_id, (None, 0, 0))
        is_known = worker == worker_id and step_id - last_step <= self._KEPT_STEPS
        num_before = max(0, min(num_sent, num_known) - self._OVERLAP) if is_known else 0
        self._at[state.request_id] = worker_id, num_known, step_id
        return GrammarRow(
            state.request_id, "" if is_known else grammar.text, grammar.begins_after, num_before,
            pack_ints(state.output[num_before:]), self._end_token_ids,
        )

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        self._at.pop(request_id, None)

    def forget_places(self) -> None:
        """Send all of it again, whatever was sent."""
        self._at.clear()


class _Told(NamedTuple):
    """What a request tells the sampler in a step."""

    row: SamplingRow | None
    """None: nothing, as the sampler only takes the likeliest token."""
    num_bytes: int
    """An upper bound of the row."""


_NOTHING = _Told(None, 0)


class StepEncoder:
    """Encodes steps over the ledgers of a cluster."""

    def __init__(self, ledgers: Mapping[WorkerId, BlockLedger], block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._ledgers = ledgers
        self._block_size = block_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._tables = {worker: _TableMatrix() for worker in ledgers}
        self._seen: dict[RequestId, _SeenTokens] = {}
        """Of requests with penalties."""
        self._unchanging: dict[RequestId, _Told] = {}
        """Of requests that tell the sampler the same in each further step, but for the row and its position: most of
        all rows."""
        self._grammars = _GrammarPlaces(self._eos_token_ids)
        self._refused: dict[int, dict[int, int]] = {}
        """Step -> which of its sampled rows (by place in ``sample_rows``) were not asked for, and what stands in place
        of their tokens."""

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        for tables in self._tables.values():
            tables.forget(request_id)
        self._seen.pop(request_id, None)
        self._unchanging.pop(request_id, None)
        self._grammars.forget(request_id)

    def forget_places(self) -> None:
        """A step has failed or shed rows, or a worker is lost: what workers keep of grammars is not known any more."""
        self._grammars.forget_places()

    def take_refused(self, step_id: int) -> dict[int, int]:
        """The step is over: which of its tokens do not count, because their sampling rows were not sent, and what
        stands in their places."""
        return self._refused.pop(step_id, {}) if self._refused else {}

    def encode(self, step: RunStep) -> list[tuple[WorkerId, StepInput]]:
        """One input per stage, in pipeline order. Sampling rows are the encoder's own: a later step changes them."""
        rows = step.rows
        states, contexts, lengths, are_sampled, remote = zip(*rows)
        query_lens = np.array(lengths, dtype=np.int32)
        context_lens = np.array(contexts, dtype=np.int32)
        sample_rows = np.array([i for i, is_sampled in enumerate(are_sampled) if is_sampled], dtype=np.int32)
        num_blocks = -(-max(map(add, contexts, lengths)) // self._block_size)
        request_ids = [state.request_id for state in states]
        sampling = self._sampling_rows(step)
        prompt_logprobs = [
            p for i, state in enumerate(states)
            if state.prompt_logprobs is not None and (p := _prompt_logprobs(i, rows[i])) is not None
        ]
        is_remote = any(remote)
        inputs: list[tuple[WorkerId, StepInput]] = []
        workers = [s.worker_id for s in step.stages]
        for index, stage in enumerate(step.stages):
            first, last = index == 0, index == len(workers) - 1
            stage_input = StepInput(
                step_id=step.step_id,
                layer_lo=stage.layers.lo,
                layer_hi=stage.layers.hi,
                token_ids=_token_ids(step) if first else _NO_TOKENS,
                query_lens=query_lens,
                context_lens=context_lens,
                block_tables=self._tables[stage.worker_id].gather(
                    self._ledgers[stage.worker_id].tables, request_ids, num_blocks),
                sample_rows=sample_rows,
                sampling=sampling if last else [],
                prompt_logprobs=prompt_logprobs if last else [],
                prev_worker=None if first else workers[index - 1],
                next_worker=None if last else workers[index + 1],
                group_id=step.group_id,
                epoch=step.epoch,
                remote=self._remote(stage.worker_id, rows) if is_remote else [],
                safepoint_layers=0 if index else step.safepoint_layers,
                follows_step=None if step.follows is None else step.follows.step_id,
                sheds_from=step.sheds_from,
                resumes_step=None if index or step.resumes is None else step.resumes.step_id,
                most_layers=None if index or step.resumes is None else step.resumes.most_layers,
            )
            inputs.append((stage.worker_id, stage_input))
        return inputs

    def _remote(self, worker_id: WorkerId, rows: tuple[StepRow, ...]) -> list[RemoteKV]:
        """What this stage's rows attend to elsewhere; adjacent layers at one place are one entry."""
        entries: list[RemoteKV] = []
        for index, row in enumerate(rows):
            for part in row.remote:
                if part.dst != worker_id:
                    continue
                num_tokens, last = part.num_blocks * self._block_size, entries[-1] if entries else None
                if last and (last.row, last.worker, last.layer_hi) == (index, part.src, part.layers.lo):
                    last.layer_hi = part.layers.hi
                    continue
                ids = self._ledgers[part.src].table(row.state.request_id).ids[: part.num_blocks]
                entries.append(RemoteKV(index, part.src, *part.layers, num_tokens, list(ids)))
        return entries

    def _sampling_rows(self, step: RunStep) -> list[SamplingRow]:
        """What fits, in service order. The requests of all others end with an error when the step comes back, but those
        whose grammars had no room beside others': they are sampled in a later step."""
        kept: list[SamplingRow] = []
        num_bytes, place, unchanging = 0, -1, self._unchanging
        for i, row in enumerate(step.rows):
            state, context_len, num_tokens, is_sampled, _ = row
            if not is_sampled:
                continue
            place += 1
            told = unchanging.get(state.request_id)
            if told is None:
                told = self._told(step, i, row)
            spec, size = told
            if spec is None:
                continue
            spec.row, spec.position = i, context_len + num_tokens
            if num_bytes + size <= MAX_SAMPLING_BYTES:
                num_bytes += size
                kept.append(spec)
            elif spec.grammar is not None and num_bytes:
                self._grammars.forget(state.request_id)
                self._refused.setdefault(step.step_id, {})[place] = LATER_TOKEN_ID
            else:
                logger.error("request %s: %d bytes for the sampler are more than step %d can carry",
                             state.request_id, size, step.step_id)
                self._refused.setdefault(step.step_id, {})[place] = FAILED_TOKEN_ID
        return kept

    def _told(self, step: RunStep, index: int, row: StepRow) -> _Told:
        """What a row tells the sampler. Where the request's later rows will tell the same, it is remembered."""
        state = row.state
        params = state.request.params
        if params.is_plain_greedy:
            told = self._unchanging[state.request_id] = _NOTHING
            return told
        spec = self._sampling(index, row)
        if params.grammar is not None:
            spec.grammar = self._grammars.row(step.stages[-1].worker_id, step.step_id, state, params.grammar)
        told = _Told(spec, _sampling_bytes(spec))
        changes = params.grammar is not None or bool(params.bad_words) or params.has_penalties
        if not changes and spec.position - state.num_prompt >= params.min_tokens:
            self._unchanging[state.request_id] = told
        return told

    def _sampling(self, index: int, row: StepRow) -> SamplingRow:
        state = row.state
        params: SamplingParams = state.request.params
        banned: tuple[int, ...] = ()
        position = row.context_len + row.num_tokens
        if position - state.num_prompt < params.min_tokens:
            banned = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)
        if params.bad_words:
            banned += ends_of_bad_words(params.bad_words, state.output)
        prompt_ids = output_ids = output_counts = b""
        if params.has_penalties:
            seen = self._seen.get(state.request_id)
            if seen is None:
                seen = self._seen[state.request_id] = _SeenTokens(
                    state.request.prompt_token_ids if params.repetition_penalty != 1.0 else ())
            prompt_ids = seen.prompt_ids
            output_ids, output_counts = seen.output(state.output)
        return SamplingRow(
            row=index,
            position=position,
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
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            output_counts=output_counts,
            allowed_token_ids=params.allowed_token_ids,
            logprob_token_ids=params.logprob_token_ids,
        )


def ends_of_bad_words(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> tuple[int, ...]:
    """The tokens that would complete one of these sequences behind this output (the prompt does not count).

    Worked out from the tokens that the core has, at every step: nothing that a move of memory could lose.
    """
    return tuple(dict.fromkeys(
        word[-1] for word in words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]))


def _token_ids(step: RunStep) -> npt.NDArray[np.int32]:
    """Of all rows but those that it resumes; a token that is not known yet is -1 - i, where the step before samples it
    as its i-th."""
    ids: list[int] = []
    places = {} if step.follows is None else step.follows.places
    rows = step.rows if step.resumes is None else step.rows[: step.sheds_from]
    for index, (state, context_len, num_tokens, _, _) in enumerate(rows):
        if places and index in places:
            ids.append(-1 - places[index])
        elif num_tokens == 1:  # ``tokens_between``, for every row of every step
            at = context_len - state.num_prompt
            ids.append(state.output[at] if at >= 0 else state.request.prompt_token_ids[context_len])
        else:
            ids += state.tokens_between(context_len, context_len + num_tokens)
    return np.array(ids, dtype=np.int32)


def _prompt_logprobs(index: int, row: StepRow) -> PromptLogprobsRow | None:
    num_top = row.state.request.params.prompt_logprobs
    if num_top is None or row.context_len + 1 >= row.state.num_prompt:
        return None
    end = min(row.context_len + row.num_tokens + 1, row.state.num_prompt)
    return PromptLogprobsRow(index, num_top, tuple(row.state.tokens_between(row.context_len + 1, end)))
