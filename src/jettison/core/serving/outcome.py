"""What a finished step means for its requests, as a group reports it to ``core.driving.stepping``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.core.ports import StepRow
from jettison.core.requests import RequestState
from jettison.core.serving.blocks import GroupBlocks
from jettison.core.serving.fresh import FreshTokens
from jettison.core.serving.limits import SchedulerLimits
from jettison.types import FAILED_TOKEN_ID, LATER_TOKEN_ID, FinishReason, SampledToken, TokenLogprobs


class RowEnd(NamedTuple):
    """A request that ends with this step."""

    state: RequestState
    token: SampledToken | None
    """Its last token; None where it asked for none."""
    finish_reason: FinishReason
    stop_token_id: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the request got a token in this step: it asked for one, and sampling did not fail."""
        return self.token is not None and self.finish_reason is not FinishReason.ERROR


@dataclass(slots=True)
class StepOutcome:
    """What a commit yields. Entry i of ``tokens`` belongs to entry i of ``going_on``."""

    going_on: list[RequestState]
    """Requests that got a token and go on."""
    tokens: list[SampledToken]
    ended: list[RowEnd]
    """Requests to be ended by the caller."""
    with_first: list[RequestState]
    """Of all of these, requests whose first token this is."""
    is_plain: bool
    """No request of the step ends, starts again, attends to KV elsewhere or is another group's."""

    def with_token(self) -> list[RequestState]:
        """Requests that got a token in this step, those that end with it included."""
        return [*self.going_on, *[end.state for end in self.ended if end.is_fresh]]


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
