"""Decode steps of a group that follow each other with nothing to decide in between, committed at once.

``core.driving.fastforward`` says when that may be done; the books are as after so many commits and plans.
"""

from __future__ import annotations

from jettison.core.ports import RunStep, StepRow, step_row
from jettison.core.serving.flights import InFlight
from jettison.core.serving.group import Group
from jettison.cost.stepwork import StepWork


def repeat(group: Group, num_steps: int, token_id: int, now_ns: int) -> tuple[RunStep, list[int]]:
    """Commit the group's step in flight and ``num_steps - 1`` like it, and plan the same rows again after each.

    The caller has made sure that no row ends, nothing else could be planned and the blocks suffice. Blocks are taken in
    the order in which single plans would have taken them. Returns the step that is in flight then, and the number of
    the step (from 1) after which each block was taken.
    """
    ((step_id, flight),) = group.in_flight.items()
    rows, size = flight.step.rows, group.limits.block_size
    queues, counters, tables = group.queues, group.counters, group.blocks.ledgers[0].tables
    growth: list[tuple[int, int]] = []
    for index, (state, context_len, *_) in enumerate(rows):
        room = len(tables[state.request_id].ids) * size - context_len - 1
        if room < num_steps:
            growth += [(number, index) for number in range(room + 1, num_steps + 1, size)]
    growth.sort()
    for _, index in growth:
        group.blocks.grow(rows[index].state, 1)
    counters.num_grown_blocks += len(growth)
    num_offline = len([True for row in rows if row.state.is_offline]) if queues.has_offline else 0
    counters.fresh.offline_output += num_steps * num_offline
    counters.fresh.online_output += num_steps * (len(rows) - num_offline)
    repeated: list[StepRow] = []
    is_charged = queues.are_charged
    for state, context_len, *_ in rows:
        state.num_computed += num_steps
        state.add_tokens(token_id, num_steps)
        if is_charged:
            queues.charge(state, 0, num_steps)
        repeated.append(step_row((state, context_len + num_steps, 1, True, ())))
    queues.version += 2 * num_steps
    counters.num_steps += num_steps
    step = flight.step._replace(rows=tuple(repeated))
    work = StepWork.decodes(len(rows), flight.work.num_kv_tokens + num_steps * len(rows))
    group.in_flight[step_id] = InFlight(step, now_ns, work)
    return step, [number for number, _ in growth]
