"""One running request goes to another group as tokens: the destination computes them while the source goes on decoding
(ServerlessLLM section 5.2, MELL section V).

    COPY     rounds: the destination prefills the known tokens, in chunks (``core.serving.guests``); tokens that the
             source makes meanwhile are the next round's
    FINAL    at most 16 tokens are missing there: the request stands still and finishes its step in flight
    DONE     the destination owns the request, and computes the missing tokens in the step that samples its next one
    FAILED   the request has never left its source, which has lost nothing

From COPY it may go on as KV (``go_on_as_kv``): what has been computed stays, and the rest is sent.

It falls back at once, whatever is under way: a step of the destination that still writes to the request's blocks has
them under another name until it ends. Nothing travels, so the groups share no worker; and as no transfer reads the
source's blocks, the source may preempt the request, store it, or lose it in any other way: then it falls back.
"""

from __future__ import annotations

from collections.abc import Callable

from jettison.core.moving.passage import Passage, RelocationPhase, Trip
from jettison.core.ports import Action
from jettison.core.residence import hosted_tokens
from jettison.core.serving.guests import Guest
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import TransferId

MAX_FINAL_TOKENS = 16
"""Most tokens computed in the step of the next token; more are computed while the request decodes at its source."""


class TokenRelocation(Passage):
    """One running request that goes to another group as tokens: the destination, which has reserved blocks for all
    known tokens, computes them while the source goes on decoding."""

    kind = MigrationKind.TOKENS

    def __init__(
        self, cluster: ClusterState, trip: Trip, *, max_step_tokens: int, max_rounds: int | None = None,
        num_cached_blocks: int = 0, is_paced: bool = False,
        on_kv: Callable[[TokenRelocation, int, int], list[Action]] | None = None,
    ) -> None:
        """Make a request that decodes a guest at the destination. ``max_step_tokens``: most tokens of guests in a step
        that has tokens of this one; ``is_paced``: it may be changed on the way. ``on_kv``: has the request go on as KV,
        called with this relocation, the number of blocks that are there, and the time; None: it may not."""
        super().__init__(cluster, trip, max_rounds=max_rounds, num_cached_blocks=num_cached_blocks)
        state, source, destination = trip[:3]
        assert state.num_output and not state.remote and not set(source.worker_ids) & set(destination.worker_ids), state
        assert max_step_tokens > 0, f"{max_step_tokens} tokens a step"
        num_cached_tokens = num_cached_blocks * cluster.limits.block_size
        self._guest = Guest(state, max_step_tokens, num_cached_tokens, num_cached_blocks)
        self._num_preemptions = state.num_preemptions
        self._is_paced, self._on_kv = is_paced, on_kv
        self.num_final_blocks = 0
        """Most blocks of its last round as KV; 0: it goes on as tokens."""
        self._round_end = state.num_computed
        """Tokens that this round is to reach."""
        self._round_length = state.num_computed
        destination.guests.add(self._guest)
        destination.touch()

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows, unless a step computes tokens of the request at the destination: compute on,
        stand still, hand over, send the rest as KV, or fall back. Returns the actions."""
        guest, state = self._guest, self.state
        if self.is_over:
            return []
        if self.has_left:
            return self._fall_back("the request has left its source by itself")
        if guest.failure is not None:
            self.lost_transfer = True
            return self._fall_back(guest.failure)
        if guest.num_pending:
            return []
        self._resides_there(self.destination.residence.at(guest.num_computed))
        if self.num_final_blocks and self.phase is RelocationPhase.COPY:
            return self._send_rest(now_ns)
        if self.phase is RelocationPhase.COPY:
            if self._is_close(state.num_tokens + state.num_pending):
                self._stand_still(now_ns)
            elif self._is_last_round():
                return self._fall_back("the request grows as fast as it is computed")
        # Invariant: KV in host pools is a prefix of what is computed where the request runs. It must hold there, too.
        may_land = self._is_close(state.num_tokens) and hosted_tokens(state.residences) <= guest.num_computed
        if self.phase is RelocationPhase.FINAL and not state.num_pending and may_land:
            return self._land(now_ns)
        return self._compute_on()

    # --- as it is under way -----------------------------------------------------------------------------------

    @property
    def num_computed(self) -> int:
        """Leading tokens of the request that the destination has computed or found cached."""
        return self._guest.num_computed

    @property
    def may_change(self) -> bool:
        """Whether its pace and kind may still be changed."""
        return self._is_paced and self.phase is RelocationPhase.COPY and not self.num_final_blocks

    @property
    def may_go_as_kv(self) -> bool:
        """Whether the rest may still go as KV."""
        return self.may_change and self._on_kv is not None

    def pace(self, max_step_tokens: int) -> None:
        """Have the destination compute at most ``max_step_tokens`` (at least 1) of guests in a step from now on, as its
        batch has changed."""
        self._guest.max_step_tokens = max_step_tokens

    def go_on_as_kv(self, num_final_blocks: int, now_ns: int) -> list[Action]:
        """Send the rest as KV, as soon as no step computes tokens of it; return the actions. ``num_final_blocks``: most
        blocks in the last round. Raises AssertionError where the rest may not go as KV."""
        assert self.may_go_as_kv and num_final_blocks > 0, self.state
        self.num_final_blocks = num_final_blocks
        self._guest.max_step_tokens = 0
        return self.advance(now_ns)

    def _send_rest(self, now_ns: int) -> list[Action]:
        """End as tokens, and have a move as KV go on from there; return its actions."""
        assert self._on_kv is not None
        guest, block_size = self._guest, self._cluster.limits.block_size
        self.destination.guests.remove(guest)
        self.destination.queues.note_change()
        self.num_tokens = guest.num_computed - self.num_cached_blocks * block_size
        self.phase = RelocationPhase.DONE
        self._resides_there(None)
        return self._on_kv(self, guest.num_computed // block_size, now_ns)

    @property
    def has_left(self) -> bool:
        """Whether the request is ending, or has left its source, or the source had to let go of its KV."""
        return self._has_left or self.state.num_preemptions != self._num_preemptions

    def is_computed_since(self, since_ns: int) -> bool:
        """Whether a step with tokens of it at the destination was issued then or later, and has not ended."""
        flights = self.destination.in_flight.values()
        return any(self._guest in flight.guests and flight.issued_ns >= since_ns for flight in flights)

    def _is_close(self, num_tokens: int) -> bool:
        """Whether the destination lacks few enough of ``num_tokens`` for the last step."""
        return num_tokens - self._guest.num_computed <= MAX_FINAL_TOKENS

    def _is_last_round(self) -> bool:
        """Whether a round has ended, and no further one is allowed or the next would be no shorter. Begins the next
        round if one has ended."""
        num_computed = self._guest.num_computed
        if num_computed < self._round_end:
            return False
        self.num_rounds += 1
        self._round_end, before = self.state.num_computed, self._round_length
        self._round_length = self._round_end - num_computed
        return self.num_rounds == self._max_rounds or self._round_length >= before

    def _compute_on(self) -> list[Action]:
        """Have the destination compute on; its table grows first, where the request has grown. Returns no actions, or
        those of falling back where it is full."""
        guest, state, blocks = self._guest, self.state, self.destination.blocks
        if guest.num_computed == state.num_computed:
            return []
        missing = self.destination.limits.blocks_for(state.num_tokens)
        missing -= blocks.num_tokens_held(state) // self._cluster.limits.block_size
        if missing > 0:
            if blocks.num_allocatable < missing:
                return self._fall_back("the destination is full")
            blocks.grow(state, missing)
        self.destination.touch()
        return []

    # --- ends -------------------------------------------------------------------------------------------------

    def _land(self, now_ns: int) -> list[Action]:
        """Hand the request over to the destination, which computes the last tokens itself; return what ``on_over``
        does."""
        guest = self._guest
        self.destination.guests.remove(guest)
        self.num_tokens = guest.num_computed - self.num_cached_blocks * self._cluster.limits.block_size
        self.num_rounds += 1
        self.state.num_computed = guest.num_computed
        return self._hand_over(now_ns)

    def _fall_back(self, reason: str) -> list[Action]:
        """Leave the request at its source, at once, for this reason; return what ``on_over`` does."""
        self.let_go()
        self.failure = reason
        return self._on_over(self)

    def let_go(self) -> None:
        """Leave the request at its source, at once, and nothing of it at the destination."""
        super().let_go()
        self._leave()

    def lose_source(self) -> set[TransferId]:
        """Give up the move, as its source is dead. Returns no transfers. What the destination has computed stays in its
        prefix cache."""
        self.let_go()
        return set()

    def _leave(self) -> None:
        """Free the request's blocks at the destination: now, or when no step writes to them any more."""
        guest, state, destination = self._guest, self.state, self.destination
        destination.guests.remove(guest)
        destination.queues.note_change()
        if not guest.num_pending:
            destination.blocks.release(state)
            return
        step_id = next(i for i, flight in destination.in_flight.items() if guest in flight.guests)
        name = f"{state.request_id}\0step{step_id}"
        workers = [self._cluster.workers[worker_id] for worker_id in destination.worker_ids]
        for worker in workers:
            worker.ledger.rename(state.request_id, name)
            worker.ghosts[name] = set()
        guest.on_left = lambda: _release(workers, name)


def _release(workers: list[WorkerState], name: str) -> None:
    """Release the ledger entries of this name, unless a worker's death has done so before."""
    for worker in workers:
        if worker.ghosts.pop(name, None) is not None:
            worker.ledger.release(name)
