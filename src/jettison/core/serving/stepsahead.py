"""A step ahead: a group plans its next step while one is under way, so that its device never waits for the core.

The tokens of the step under way are not known then. A request that will have one of them is planned for it all the
same: its row says which of the sampled tokens it is (``ports.TokenSources``), and the worker puts it in. At most one of
a request's tokens is unknown at a time: where both steps are under way, nothing of it can be planned.

    step N      ------- computed -------|           |
    step N + 1        ^ planned, waits  |- computed -|
    step N + 2                            ^ planned when N has ended

A step is planned ahead only where nothing could have to come between the two. Everything else waits for the step under
way and is planned then, as without steps ahead: preemptions, newcomers' room, moves, and requests with a wish that the
host works out from token to token (``SamplingParams.needs_each_token``). One such request has its group wait: without
it every second step would be a step of the others alone, and it would get half of the tokens that it gets so.

A request that ends with an unforeseen token (an end token) has a row in the step behind for nothing, and its blocks
until that has ended. An end by length is foreseen. Where step N fails, the worker fails step N + 1, too; rows in it
that were none of N's run again.

Only groups of one stage: a pipeline has other microbatches while one is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from jettison.core.ports import RunStep, TokenSources
from jettison.core.requests import RequestState
from jettison.core.serving.flights import InFlight
from jettison.core.serving.guests import Guests
from jettison.core.serving.holds import Holder
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.queues import Queues
from jettison.memory.stages import StagePlan
from jettison.types import RequestId, TransferId


class AheadView(Protocol):
    """The part of a group that is looked at here; ``Group`` documents it."""

    @property
    def limits(self) -> SchedulerLimits: ...
    @property
    def stages(self) -> Sequence[StagePlan]: ...
    @property
    def in_flight(self) -> Mapping[int, InFlight]: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def guests(self) -> Guests: ...
    @property
    def stranded(self) -> Mapping[RequestId, RequestState]: ...
    @property
    def copies(self) -> Mapping[TransferId, int]: ...
    @property
    def copies_beside(self) -> Mapping[TransferId, int]: ...
    @property
    def paused(self) -> Set[Holder]: ...
    @property
    def holds_preemption(self) -> Set[Holder]: ...


def step_to_follow(group: AheadView) -> RunStep | None:
    """The step in flight, if another may be planned behind it now; None: the next step waits for its end.

    Moves that wait for a request to be in no step find it so: with a request on the move, or a group that is held, none
    is planned ahead. Offline requests give way between two steps, so where there are any none is, either. A request
    that has ended is in no further step, so none has to wait for it.
    """
    if not group.limits.steps_ahead or len(group.stages) > 1 or len(group.in_flight) != 1:
        return None
    queues = group.queues
    if group.paused or group.holds_preemption or group.stranded or group.guests or group.copies or group.copies_beside:
        return None
    if queues.suspects or queues.moving or queues.stored or queues.has_offline:
        return None
    (flight,) = group.in_flight.values()
    if flight.step.safepoint_layers or flight.guests:
        return None
    for state in queues.running.values():
        if state.ending is None and (state.holds or state.needs_each_token):
            return None
    return flight.step


def has_unknown(state: RequestState, limits: SchedulerLimits) -> bool:
    """Whether a request with all its known tokens in steps will have one more, which is under way, and go on with it:
    that token is not its last by length."""
    num_tokens = state.num_tokens + 1
    return (
        state.num_computed + state.num_pending == state.num_tokens and state.num_pending > 0
        and num_tokens - state.num_prompt < state.request.params.max_tokens and num_tokens < limits.max_model_len
    )  # fmt: skip


def token_sources(before: RunStep, step: RunStep) -> TokenSources | None:
    """Which tokens of the step ``before`` the rows of the one behind it begin with; None where they are all known."""
    unknown = [(i, state) for i, (state, context_len, *_) in enumerate(step.rows) if context_len >= state.num_tokens]
    if not unknown:
        return None
    sampled = [row.state for row in before.rows if row.samples]
    place_of = dict(zip(sampled, range(len(sampled)), strict=True))
    return TokenSources(before.step_id, {i: place_of[state] for i, state in unknown})
