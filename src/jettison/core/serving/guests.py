"""Guests: requests that run in another group and are to run here. The group computes their tokens beforehand, chunk by
chunk.

A guest has blocks here, under its request's id, and is in none of the group's queues. It is in no view that policies
decide by; no token of it is sampled, charged, or counted as load or as fresh work. Its chunks go into the room that the
group's own requests leave in a step, before their rows (``core.serving.flights``), one chunk of a guest at a time. A
guest is computed no further than its request is at its source.

``core.moving.astokens`` decides which request is a guest, and when it becomes the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jettison.core.ports import StepRow
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.blocks import GroupBlocks
from jettison.types import RequestId


@dataclass(slots=True, eq=False)
class Guest:
    """A group's part of a request that runs in another group."""

    state: RequestState
    max_step_tokens: int
    """Most tokens of guests in a step that has tokens of this one."""
    num_computed: int
    """Leading tokens with KV here."""
    num_sealed: int
    """Leading blocks that can be found in the prefix cache here."""
    num_pending: int = 0
    """Tokens in the unfinished step."""
    failure: str | None = None
    """Why a step with tokens of it failed."""
    on_left: Callable[[], None] | None = None
    """Called when a step that still writes to the blocks of a former guest has ended."""


class Guests:
    """The guests of one group."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Guest] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def states(self) -> list[RequestState]:
        """Their requests, in the order in which they came."""
        return [guest.state for guest in self._by_id.values()]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are computed at the guests' sources, and not here."""
        return sum(guest.state.num_computed - guest.num_computed for guest in self._by_id.values())

    def num_missing_before(self, state: RequestState) -> int:
        """Tokens that are computed at the sources and not here, of the guests that came before this request's guest,
        which get their chunks first. Of all guests, where the request has none."""
        before = takewhile(lambda guest: guest.state is not state, self._by_id.values())
        return sum(guest.state.num_computed - guest.num_computed for guest in before)

    def add(self, guest: Guest) -> None:
        """Add a guest, as the last. Its request has blocks here, no step has tokens of it, and it is no guest yet."""
        assert guest.state.request_id not in self._by_id, f"{guest.state} is a guest already"
        self._by_id[guest.state.request_id] = guest

    def remove(self, guest: Guest) -> None:
        """Take a guest out: it gets no more chunks. A step with its last chunk may still be under way."""
        del self._by_id[guest.state.request_id]

    def plan_rows(self, num_tokens: int, num_rows: int, blocks: GroupBlocks) -> tuple[tuple[Guest, ...], list[StepRow]]:
        """(guests, their rows) for a step with room for ``num_tokens`` and ``num_rows`` more, a chunk for each guest in
        the order in which they came; changes nothing. A guest's chunk ends where its request is computed at its source,
        or its blocks end. A guest with a chunk under way, or nothing to compute, is passed over, and so is one whose
        request its source has just let go of."""
        guests: list[Guest] = []
        rows: list[StepRow] = []
        num_taken = 0
        for guest in self._by_id.values():
            state, first = guest.state, guest.num_computed
            end = min(state.num_computed, blocks.num_tokens_held(state))
            chunk = min(end - first, num_tokens - num_taken, guest.max_step_tokens - num_taken)
            if guest.num_pending or chunk <= 0 or len(rows) >= num_rows or state.phase is not Phase.RUNNING:
                continue
            num_taken += chunk
            guests.append(guest)
            rows.append(StepRow(state, first, chunk, False))
        return tuple(guests), rows


def begin_chunks(guests: Sequence[Guest], rows: Sequence[StepRow]) -> None:
    """Note the tokens of each guest's row as under way: the step is issued."""
    for guest, row in zip(guests, rows, strict=True):
        guest.num_pending = row.num_tokens


def end_chunks(guests: Sequence[Guest], blocks: GroupBlocks, *, are_computed: bool) -> None:
    """Their step has ended, with their chunks if ``are_computed``. Full blocks are final, so they can be found in the
    prefix cache at once, whatever becomes of the guest. Of a former guest nothing counts, and ``on_left`` is called."""
    for guest in guests:
        num_tokens, guest.num_pending = guest.num_pending, 0
        if guest.on_left is not None:
            guest.on_left()
        elif are_computed:
            guest.num_computed += num_tokens
            guest.num_sealed = blocks.seal_between(guest.state, guest.num_sealed, guest.num_computed)
