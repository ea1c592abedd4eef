"""Steps that have been issued, and the rows of those that end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jettison.core.ports import RunStep, StepRow
from jettison.core.requests import RequestState
from jettison.core.serving.blocks import GroupBlocks
from jettison.core.serving.fresh import FreshTokens
from jettison.core.serving.guests import Guest
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.outcome import RowEnd, StepOutcome
from jettison.cost.stepwork import StepWork
from jettison.types import FAILED_TOKEN_ID, LATER_TOKEN_ID, FinishReason, SampledToken, TokenLogprobs


@dataclass(slots=True)
class InFlight:
    """A step that has been issued."""

    step: RunStep
    issued_ns: int
    """When it was issued; of a step ahead, from then on when the step before it ended."""
    work: StepWork
    guests: tuple[Guest, ...] = ()
    """Guests with a row each in it; their rows come first."""
    shed_ns: int | None = None
    """Of a step that resumes a slice: when its rows were shed first."""

    @property
    def own_rows(self) -> tuple[StepRow, ...]:
        """Rows of the group's own requests, without those of guests."""
        return self.step.rows[len(self.guests) :]


def work_of(rows: Sequence[StepRow]) -> StepWork:
    """The work of a step with these rows, as ``StepWork.of`` gives it; faster where most rows are decodes."""
    num_tokens = num_kv_tokens = num_more_pairs = 0
    for _, context_len, num, _, _ in rows:
        num_kv_tokens += context_len
        num_tokens += num
        if num > 1:
            num_more_pairs += (num - 1) * (2 * context_len + num) // 2
    return StepWork(len(rows), num_tokens, num_kv_tokens + num_tokens + num_more_pairs, num_kv_tokens)


def take_row(
    row: StepRow, token: SampledToken | None, entries: Sequence[TokenLogprobs], outcome: StepOutcome,
    blocks: GroupBlocks, limits: SchedulerLimits, fresh: FreshTokens,
) -> SampledToken | None:
    """Take a row of a finished step, with the logprobs (``entries``) of its prompt tokens: its tokens count as computed
    and full blocks are sealed. Returns its token where the request gets it; None where none was sampled, or it is none,
    or the request starts again or ends."""
    state, context_len, num_tokens, _, remote = row
    if remote or state.holds:
        outcome.is_plain = False
        # A step ahead computed what would have been the next token of a request that has ended meanwhile.
        if state.recompute or context_len >= state.num_tokens:
            return None
    if token is not None and token.token_id == LATER_TOKEN_ID:
        num_tokens, token = num_tokens - 1, None
    state.num_computed += num_tokens
    if context_len < state.num_prompt:
        fresh.note_prompt(state)
    if entries and state.prompt_logprobs is not None:
        state.note_prompt_logprobs(context_len, entries)
    if blocks.seals and state.num_computed // limits.block_size > state.num_sealed:
        blocks.seal(state)
    if token is None:
        if state.num_computed == state.num_tokens and state.ending is None and not state.wants_output:
            outcome.ended.append(RowEnd(state, None, FinishReason.LENGTH))
        return None
    if state.ending is not None:
        return None
    if token.token_id <= FAILED_TOKEN_ID:
        outcome.ended.append(RowEnd(state, token, FinishReason.ERROR))
        return None
    return token


def end_of(state: RequestState, token: SampledToken, limits: SchedulerLimits) -> RowEnd | None:
    """How a request ends with a token: by a stop from ``min_tokens`` on, or by length; None while it goes on."""
    params = state.request.params
    num_output = state.num_tokens - state.num_prompt
    if num_output >= params.min_tokens:
        token_id = token.token_id
        is_eos = not params.ignore_eos and token_id in limits.eos_token_ids
        if is_eos or token_id in params.stop_token_ids:
            return RowEnd(state, token, FinishReason.STOP, token_id)
    if num_output >= params.max_tokens or state.num_tokens >= limits.max_model_len:
        return RowEnd(state, token, FinishReason.LENGTH)
    return None
