"""The requests of a group as the batching policy sees them. Reads a group, changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jettison.core.requests import UNSCHEDULED, RequestState
from jettison.core.residence import hosted_tokens
from jettison.core.serving.groupview import GroupView
from jettison.core.serving.stepsahead import has_unknown
from jettison.policy.batching import Chunk, RunningRow, VictimRow, WaitingRow, make_chunk, running_row


def running_rows(
    group: GroupView, states: Iterable[RequestState], *, is_ahead: bool = False
) -> list[RunningRow]:
    """Rows of those running requests that have tokens neither computed nor in flight, in the order given. Requests
    whose holds keep them from steps, and requests that the next step is planned without (``absent``), have none.
    ``is_ahead``: a token that the step in flight will sample counts as well."""
    block_size = group.limits.block_size
    tables = group.blocks.ledgers[0].tables
    absent = group.absent
    rows = []
    for state in states:
        scheduled = state.num_computed + state.num_pending
        ready = state.num_tokens - scheduled
        is_first = state.num_tokens == state.num_prompt
        if not ready and is_ahead and has_unknown(state, group.limits):
            ready, is_first = 1, False
        if ready <= 0 or (state.holds and state.holds & UNSCHEDULED):
            continue
        request_id = state.request_id
        if absent and request_id in absent:
            continue
        room = len(tables[request_id].ids) * block_size - scheduled
        rows.append(running_row((request_id, ready, room, state.num_pending > 0, is_first, scheduled)))
    return rows


def decode_chunks(group: GroupView) -> list[Chunk] | None:
    """A chunk of one token for each running request, in order, with the block that it has to grow by; None where one
    of them has another number of tokens ready, or a hold."""
    block_size = group.limits.block_size
    tables = group.blocks.ledgers[0].tables
    chunks = []
    for request_id, state in group.queues.running.items():
        scheduled = state.num_computed + state.num_pending
        if state.num_tokens - scheduled != 1 or state.holds:
            return None
        # What is computed has blocks, so that only the first token behind full ones may lack one.
        lacks_block = not scheduled % block_size and scheduled >= len(tables[request_id].ids) * block_size
        chunks.append(make_chunk((request_id, 1, 1 if lacks_block else 0)))
    return chunks


def waiting_row(group: GroupView, state: RequestState) -> WaitingRow:
    """The row of a waiting request, with the tokens found in the prefix cache and the blocks that its admission takes.
    For an oversized request the cache is not asked."""
    blocks = group.blocks
    if blocks.is_oversized(state):
        total = group.limits.blocks_for(state.num_tokens)
        return WaitingRow(state.request_id, state.num_tokens, 0, total, True)
    num_cached, num_needed = blocks.cached_prefix(state)
    return WaitingRow(state.request_id, state.num_tokens, num_cached, num_needed)


def waiting_row_beside_victims(group: GroupView, state: RequestState) -> WaitingRow:
    """The row of a waiting request where running requests may give way. It also counts the blocks of its cached prefix
    that one request alone holds: they are lost if that one gives way."""
    row = waiting_row(group, state)
    if not row.num_cached_tokens:
        return row
    return row._replace(num_blocks_at_risk=group.blocks.num_with_one_holder(state, row.num_cached_tokens))


def victim_rows(group: GroupView, states: Iterable[RequestState]) -> list[VictimRow]:
    """Rows of those running requests that may be preempted, in the order given: no token of theirs is in flight, and no
    hold is on them."""
    ledgers = group.blocks.ledgers
    return [
        VictimRow(
            s.request_id, min(ledger.num_exclusive_blocks(s.request_id) for ledger in ledgers),
            hosted_tokens(s.residences),
        )
        for s in states
        if s.num_pending == 0 and s.is_settled
    ]  # fmt: skip


class EachTime:
    """Rows that each iteration makes anew, and only as far as it goes."""

    def __init__(self, make: Callable[[], Iterator[WaitingRow]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[WaitingRow]:
        return self._make()
