"""The state of one accepted request. Owned by the core; drivers read it, only the core writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag, StrEnum
from math import ceil
from typing import NamedTuple

from jettison.core.residence import NOWHERE, Residences
from jettison.policy.order import SchedulingPolicy, own_key
from jettison.types import (
    FinishReason,
    GroupId,
    LayerRange,
    Request,
    RequestId,
    ServiceClass,
    TokenLogprobs,
    WorkerId,
)


class Phase(StrEnum):
    """The phases of a request's life.

        WAITING --admit--> RUNNING --stop/length/cancel--> FINISHED
           ^                 |  ^
           |---- preempt ----|  |-- KV complete --
           |                 |- merge, swap ---> MOVING (stalled until its KV is in place) <---> STORED (at the host)
    """

    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"
    STORED = "stored"
    FINISHED = "finished"


class Hold(IntFlag):
    """Reasons, beside its phase, for which steps or moves may not touch a request. ``RequestState`` alone sets and
    clears holds."""

    ENDING = 1
    """It must end, but tokens of it are still in flight or KV of it on a link; ``ending`` says how it ends."""
    RECOMPUTE = 2
    """Its KV cannot be completed or trusted: it is computed again from its tokens as soon as no step and no transfer
    touches it."""
    MOVING = 4
    """The last blocks of its KV are on their way to its new home."""
    REMOTE = 8
    """Its steps attend to KV on other workers; ``remote`` says where."""
    COPYING = 16
    """``transfers`` of its KV have not ended: until then its blocks stay reserved on both sides."""


NOT_HELD = Hold(0)
UNSCHEDULED = Hold.ENDING | Hold.RECOMPUTE | Hold.MOVING
"""Holds with which no step takes a request."""


class RemotePart(NamedTuple):
    """Layers of a running request's KV that are still on their way: the old home attends to them."""

    src: WorkerId
    dst: WorkerId
    layers: LayerRange
    num_blocks: int
    """How many leading blocks of the request's tables these are: full ones, computed before the merge."""


FIRST_TRIAL_TOKENS = 4
"""Tokens that a suspect has to produce alone before it is cleared; each further trial takes four times as many."""


@dataclass(slots=True)
class Suspicion:
    """Deaths of workers that computed a request, and whether the request may be their cause.

    A killer is found however late it kills, as trials become longer. Deaths while it ran alone are never forgotten.
    """

    num_deaths: int = 0
    """Workers that died while a step with this request was under way, since its last clearance."""
    num_deaths_alone: int = 0
    """Deaths with no other request under way, of all deaths."""
    on_trial: bool = False
    """It shares no step with others (``core.serving.stepplan``): one more death and it ends."""
    num_trials: int = 0
    num_tokens_alone: int = 0
    """Tokens of this trial."""

    def note_death(self, *, alone: bool, max_deaths: int) -> None:
        """A worker died while it computed this request."""
        self.num_deaths += 1
        self.num_deaths_alone += alone
        if self.num_deaths == max_deaths - 1:
            self.on_trial, self.num_tokens_alone = True, 0
            self.num_trials += 1

    def is_guilty(self, max_deaths: int) -> bool:
        """Its steps were under way at too many deaths for it to run again."""
        return max(self.num_deaths, self.num_deaths_alone) >= max_deaths

    def note_token_alone(self) -> bool:
        """It got a token in a step of its own, on trial. Returns whether that clears it."""
        self.num_tokens_alone += 1
        if self.num_tokens_alone < FIRST_TRIAL_TOKENS * 4 ** (self.num_trials - 1):
            return False
        self.on_trial, self.num_deaths = False, 0
        return True


class RequestState:
    """Progress of one request.

    Invariant: ``num_computed <= num_computed + num_pending <= num_tokens``, and one more while a step is planned ahead
    with a token that the step before it samples (``core.serving.stepsahead``). KV of tokens before ``num_computed`` is
    valid where it runs (``core.residence``), for the layers named there, except for the parts in ``remote``, which are
    at their source.
    """

    __slots__ = (
        "request", "request_id", "num_prompt", "num_tokens", "output", "wants_output", "num_computed", "num_pending",
        "phase", "group_id", "residences", "num_cached", "num_sealed", "hashes", "holds", "ending", "finish_reason",
        "first_scheduled_ns",
        "first_token_ns", "finished_ns", "num_preemptions", "order", "prompt_logprobs", "transfers", "remote",
        "tenant", "is_offline", "turn", "is_in_line", "num_prompt_seen", "num_live_rows", "needs_each_token",
        "_suspicion",
    )

    def __init__(self, request: Request, order: int, policy: SchedulingPolicy = "fcfs") -> None:
        """``order``: the number of its arrival."""
        self.request = request
        self.request_id: RequestId = request.request_id
        self.num_prompt = len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt + len(request.resumed)
        """Prompt and output. Invariant: ``num_prompt + len(output)``; kept because it is asked for all the time."""
        self.output: list[int] = list(request.resumed)
        """Tokens produced so far (``add_token``)."""
        self.wants_output = request.params.max_tokens > 0
        """It asked for tokens beyond its prompt; one that did not ends when its prompt is computed."""
        self.num_computed = 0
        self.num_pending = 0
        """Tokens in unfinished steps."""
        self.phase = Phase.WAITING
        self.group_id: GroupId = -1
        self.residences: Residences = NOWHERE
        """The places of its KV."""
        self.num_cached = 0
        """Prompt tokens taken from the prefix cache at the first admission."""
        self.num_prompt_seen = 0
        """Leading prompt tokens that have ever been computed or taken from the cache, even if their KV was lost
        since."""
        self.num_sealed = 0
        """Leading blocks registered in the prefix cache."""
        self.hashes: list[bytes] = []
        """Chain hashes of the leading full blocks, computed as needed."""
        self.holds = NOT_HELD
        """Reasons for which it may not be touched."""
        self.ending: FinishReason | None = None
        """How it ends or has ended (``Hold.ENDING``)."""
        self.finish_reason: FinishReason | None = None
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = request.arrival_ns if request.resumed else None
        """One that is resumed has had its first token, and is late for none: it waits as one that was preempted."""
        self.finished_ns: int | None = None
        self.num_preemptions = 0
        self.num_live_rows = 0
        """Rows of steps in which it attended to KV at its old home."""
        self.needs_each_token = request.params.needs_each_token
        """No step is planned ahead beside it (``core.serving.stepsahead``)."""
        self._suspicion: Suspicion | None = None
        self.order = own_key(request.deadline_ns, request.priority, order, policy)
        """Its key among its tenant's own requests; ``policy.order`` orders tenants."""
        self.tenant = request.tenant
        self.is_offline = request.service_class is ServiceClass.OFFLINE
        self.turn: int | None = None
        """Number of its first turn, as ``core.serving.virtualtokens`` counts turns; None: it has had none."""
        self.is_in_line = False
        """It waits for its turn (``core.serving.virtualtokens``)."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if request.params.prompt_logprobs is not None else None
        )
        self.transfers: set[int] = set()
        """Transfers of its KV that have not ended (``Hold.COPYING``)."""
        self.remote: tuple[RemotePart, ...] = ()
        """KV that its steps attend to on other workers, in a live exchange (``Hold.REMOTE``)."""

    def note_prompt_logprobs(self, context_len: int, entries: Sequence[TokenLogprobs]) -> None:
        """Append those of a chunk after ``context_len`` tokens that are new: after a preemption the same positions are
        computed again. Nothing is appended behind a gap."""
        assert self.prompt_logprobs is not None
        # Entry i belongs to prompt position context_len + 1 + i.
        known = len(self.prompt_logprobs) - (context_len + 1)
        if known >= 0:
            self.prompt_logprobs += entries[known:]

    # --- holds ------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """It has no holds: it neither ends nor starts again, and no copy of its KV is under way. (A step may be: see
        ``num_pending``.)"""
        return not self.holds

    @property
    def paused(self) -> bool:
        """The last blocks of its KV are on their way to its new home."""
        return bool(self.holds & Hold.MOVING)

    @property
    def recompute(self) -> bool:
        """It starts again from its tokens as soon as no step and no transfer touches it."""
        return bool(self.holds & Hold.RECOMPUTE)

    def end_with(self, reason: FinishReason) -> None:
        """It must end with this reason, as soon as no step and no transfer touches it. This is never undone."""
        self.ending = reason
        self.holds |= Hold.ENDING

    def pause(self) -> None:
        """The last blocks of its KV leave for its new home."""
        self.holds |= Hold.MOVING

    def resume(self) -> None:
        """These last blocks have arrived, or stay at the source. Idempotent."""
        self.holds &= ~Hold.MOVING

    def distrust(self) -> None:
        """Its KV cannot be completed or trusted."""
        self.holds |= Hold.RECOMPUTE

    def attend_at(self, parts: tuple[RemotePart, ...]) -> None:
        """From now on its steps attend to these parts at their old home; none: to its own KV alone."""
        self.remote = parts
        self.holds = self.holds | Hold.REMOTE if parts else self.holds & ~Hold.REMOTE

    def note_transfer(self, transfer_id: int) -> None:
        """A transfer of its KV has begun."""
        self.transfers.add(transfer_id)
        self.holds |= Hold.COPYING

    def note_transfer_ended(self, transfer_id: int) -> None:
        """A transfer has ended, or is no longer its own. Idempotent."""
        self.transfers.discard(transfer_id)
        if not self.transfers:
            self.holds &= ~Hold.COPYING

    def start_again(self) -> None:
        """It has given its KV up and waits to be computed again: holds that concerned this KV are cleared."""
        self.remote = ()
        self.holds &= ~(Hold.MOVING | Hold.RECOMPUTE | Hold.REMOTE)

    def check_holds(self) -> None:
        """Check that the holds agree with the fields that they stand for. Raises AssertionError."""
        if self.holds is NOT_HELD and self.ending is None and not self.remote and not self.transfers:
            return  # as nearly always
        named = {Hold.ENDING: self.ending is not None, Hold.REMOTE: self.remote, Hold.COPYING: self.transfers}
        for hold, is_so in named.items():
            assert bool(self.holds & hold) == bool(is_so), (self, hold)

    # --- tokens: the prompt, which is the request's own and never copied, then the output ---------------------

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, as a new list: O(tokens)."""
        return [*self.request.prompt_token_ids, *self.output]

    def tokens_between(self, first: int, end: int) -> Sequence[int]:
        """Known tokens ``first <= position < end``; O(end - first)."""
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.request.prompt_token_ids[first:end]
        if first >= num_prompt:
            return self.output[first - num_prompt : end - num_prompt]
        return [*self.request.prompt_token_ids[first:], *self.output[: end - num_prompt]]

    def add_tokens(self, token_id: int, count: int) -> None:
        """It has got the same token ``count`` times (pretend tokens: ``core.driving.fastforward``)."""
        self.output += [token_id] * count
        self.num_tokens += count

    def add_token(self, token_id: int) -> None:
        """It has got a token."""
        self.output.append(token_id)
        self.num_tokens += 1

    @property
    def num_output(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_ready(self) -> int:
        """Tokens known but neither computed nor in flight."""
        return self.num_tokens - self.num_computed - self.num_pending

    # --- memory -----------------------------------------------------------------------------------------------

    @property
    def num_tokens_to_hold(self) -> int:
        """Tokens that memory must have room for: all that the client asked for. Where the client asked for no length,
        the present tokens and an eighth more (the next token at least): most answers end long before they would be
        cut."""
        params = self.request.params
        most = self.num_prompt + params.max_tokens
        if not self.request.has_default_length:
            return most
        return min(most, max(self.num_prompt + params.min_tokens, self.num_tokens + max(1, self.num_tokens // 8)))

    def num_tokens_foreseen(self, usual_output: float) -> int:
        """Tokens that it is expected to hold at its end, at most as many as it may: an answer as long as
        ``usual_output``, or an eighth more than it holds where that is more. The length that a client allows is a
        forecast only where nothing can end the answer earlier."""
        params = self.request.params
        if params.ignore_eos and not params.stop_token_ids and not self.request.has_default_length:
            return self.num_prompt + params.max_tokens
        grown = self.num_tokens + max(1, self.num_tokens // 8)
        least = self.num_prompt + max(params.min_tokens, ceil(usual_output))
        return min(self.num_prompt + params.max_tokens, max(least, grown))

    def cut_default_length(self, num_tokens: int) -> None:
        """Let it never hold more than ``num_tokens``, unless its client asked for a length or it needs more already."""
        max_tokens, params = num_tokens - self.num_prompt, self.request.params
        if self.request.has_default_length and self.num_tokens_to_hold <= num_tokens and max_tokens < params.max_tokens:
            self.request = replace(self.request, params=replace(params, max_tokens=max_tokens))

    # --- the rest ---------------------------------------------------------------------------------------------

    @property
    def suspicion(self) -> Suspicion:
        """Its suspicion, made when first asked for: hardly any request ever needs one."""
        if self._suspicion is None:
            self._suspicion = Suspicion()
        return self._suspicion

    @property
    def on_trial(self) -> bool:
        """It is suspected of killing workers, and runs alone."""
        return self._suspicion is not None and self._suspicion.on_trial

    @property
    def is_finished(self) -> bool:
        """Whether its terminal event has been emitted."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.phase} {self.num_computed}+{self.num_pending}/{self.num_tokens}"
            f" at {self.residences}>"
        )
