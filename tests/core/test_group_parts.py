"""The two parts of a group, each without the other: its queues have no ledger, its blocks have no queue."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.changes import Changes
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import Place, Residence
from jettison.core.serving.blocks import GroupBlocks
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.queues import Queues
from jettison.core.serving.virtualtokens import VirtualTokens
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.types import LayerRange, Request, SamplingParams, ServiceClass

LIMITS = SchedulerLimits(block_size=4, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1000)


def request(index: int, num_tokens: int = 9, *, offline: bool = False) -> RequestState:
    service = ServiceClass.OFFLINE if offline else ServiceClass.ONLINE
    return RequestState(
        Request(f"r{index}", tuple(range(num_tokens)), SamplingParams(), 0, service_class=service), index
    )


@pytest.mark.parametrize("part", ["queues", "blocks"])
def test_a_part_loads_without_the_group_and_without_the_other(part: str) -> None:
    script = f"import sys, jettison.core.serving.{part}; print(*sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name for name in ("group", "queues", "blocks") if f"jettison.core.serving.{name}" in run.stdout.split()}
    assert loaded == {part}


ACTS = st.tuples(st.sampled_from(["ask", "admit", "leave", "store", "resume"]), st.integers(0, 20))


@given(st.lists(ACTS, max_size=40))
def test_queues_alone_keep_their_sums_whatever_happens(acts: list[tuple[str, int]]) -> None:
    changes = Changes()
    queues = Queues(3, Residence({Place(0, is_host=False): LayerRange(0, 2)}), LIMITS, changes)
    states: list[RequestState] = []
    for index, (what, number) in enumerate(acts):
        version, named = queues.version, changes.touched
        named.clear()
        of_phase = {phase: [s for s in states if s.phase is phase] for phase in Phase}
        if what == "ask":
            states.append(request(index, 1 + number, offline=number % 3 == 0))
            queues.enqueue(states[-1])
        elif what == "admit" and queues.has_waiting:
            state = next(iter([*queues.waiting, *queues.waiting_offline]))
            (state,) = queues.take_waiting([state.request_id], lambda _: False)
            state.first_scheduled_ns = number
            queues.resume(state)
        elif what == "leave" and states:
            state = states.pop(number % len(states))
            queues.take_out(state)
            state.phase = Phase.FINISHED
        elif what == "store" and of_phase[Phase.RUNNING]:
            state = of_phase[Phase.RUNNING][number % len(of_phase[Phase.RUNNING])]
            queues.take_out(state)
            queues.keep_stored(state)
        elif what == "resume" and of_phase[Phase.STORED]:
            state = of_phase[Phase.STORED][0]
            queues.take_out(state)
            queues.resume(state)
        else:
            continue
        assert queues.version > version and named == {3}, "plans made before are stale, and the group is asked again"
        queues.check()
    assert len(queues.all_requests()) == len(states)
    assert set(map(id, queues.take_all())) == set(map(id, states)) and not queues.all_requests()


def test_what_gives_way_is_the_first_to_be_evicted_whenever_it_began() -> None:
    tokens = VirtualTokens()
    queues = Queues(3, Residence({Place(0, is_host=False): LayerRange(0, 2)}), LIMITS, Changes(), None, tokens)

    def run(name: str, tenant: str, deadline_ns: int) -> RequestState:
        asked = Request(
            name, (1,), SamplingParams(), 0, tenant=tenant, service_class=ServiceClass.OFFLINE, deadline_ns=deadline_ns
        )
        state = RequestState(asked, queues.num_served)
        queues.enqueue(state)
        queues.take_waiting([name], lambda _: False)
        state.first_scheduled_ns = 0
        queues.resume(state)
        queues.check()
        return state

    for name, tenant, deadline_ns in (("a", "a", 9), ("b", "b", 5), ("lost", "b", 1)):
        run(name, tenant, deadline_ns)
    tokens.gives_way = frozenset({("a", 9), ("b", 1)})
    version = queues.version
    queues.note_lending()
    queues.check()
    assert [s.request_id for s in queues.running_offline()][-1] == "b" and queues.version > version
    run("b, too", "b", 6)
    run("a, too", "a", 9)
    assert {s.request_id for s in queues.running_offline()[:3]} == {"a", "lost", "a, too"}
    tokens.gives_way = frozenset()
    queues.note_lending()
    queues.check()
    assert queues.running_offline()[0].request_id == "a, too", "the newest again"


def blocks(num_blocks: int, num_stages: int, changes: Changes | None = None) -> GroupBlocks:
    ledgers = {w: BlockLedger(num_blocks, LIMITS.block_size) for w in range(num_stages)}
    return GroupBlocks(3, tuple(ledgers), ledgers, LIMITS, PrefixHasher(4, b"k"), changes or Changes())


@pytest.mark.parametrize("num_stages", [1, 3])
def test_blocks_alone_are_taken_and_given_back_alike_in_every_stage(num_stages: int) -> None:
    room = blocks(10, num_stages)
    a, b = request(0, 9), request(1, 9)
    assert room.cached_prefix(a) == (0, 3) and room.admit(a, 0) == 0
    a.num_computed = 9
    room.seal(a)
    assert room.cached_prefix(b) == (8, 1) and room.admit(b, 8) == 8, "two full blocks are shared"
    assert (room.num_used, room.num_free, room.num_exclusive(a)) == (4, 6, 1)
    room.grow(b, 2)
    assert [ledger.num_blocks_of("r1") for ledger in room.ledgers] == [5] * num_stages
    room.release(a)
    room.release(a)  # it has none any more
    assert (room.num_used, room.num_used_by(["r1"])) == (5, 5)
    room.check()


def test_a_request_that_no_empty_group_of_this_size_could_hold_is_oversized() -> None:
    assert not blocks(3, 1).is_oversized(request(0, 12)) and blocks(3, 1).is_oversized(request(0, 13))


def test_what_admission_may_take_is_less_than_what_is_free() -> None:
    changes = Changes()
    room = blocks(10, 2, changes)
    room.reserve("a", {1: 4})
    assert (room.num_allocatable, room.num_free) == (10, 6) and changes.touched == {3}
    room.cap_admission("a", 5)
    assert room.num_free == 5
    changes.touched.clear()
    room.cap_admission("a", 5)
    room.reserve("a", {1: 4})
    assert not changes.touched, "nothing is different"


def test_what_one_owner_keeps_free_another_does_not_give_away() -> None:
    room = blocks(10, 2)
    room.reserve("a", {1: 4})
    room.reserve_everywhere("b", 2)
    assert room.num_free == 4
    room.reserve("b", {})
    room.reserve("c", {})
    assert room.num_free == 6, "what a asked for"
    room.cap_admission("a", 5)
    room.cap_admission("b", 3)
    room.uncap_admission("a")
    room.uncap_admission("c")
    assert (room.admission_cap, room.num_free) == (3, 3) and room.caps == {"b": 3}
    room.uncap_admission("b")
    room.reserve("a", {})
    assert (room.admission_cap, room.num_free, dict(room.landing)) == (None, 10, {})
