"""Copies beside steps in a modelled worker: bytes over rate, the price of a step, layouts, cancellations, deaths."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scenarios import BLOCK_SIZE, COST, PROFILE, make_setup

from jettison.core import ports
from jettison.cost.hardware import HardwareProfile
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import StagePlan
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.executor import StepLoad
from jettison.sim.links import LinkClass, LinkSpec, Topology
from jettison.sim.tasks import StepRun
from jettison.types import LayerRange

RATE, PRICE_S = 1e6, 2e-7
"""Bytes a second, and what each adds to a step: a fifth of its time."""
SLOW = HardwareProfile(
    COST, 2e8, 2e-5, 1e-3, 1e-10, 1e9, 1e9, beside_bytes_per_s=RATE, beside_byte_s=PRICE_S
)  # fmt: skip
ALL = LayerRange(0, 4)
BLOCK_BYTES = 64 * BLOCK_SIZE
"""Of one layer."""
LOAD = StepLoad(8, 36, 8, 8)


class Alone:
    """Worker 1 of two, given commands in place of the core's, and what it tells, with the time."""

    def __init__(self, profile: HardwareProfile = SLOW, topology: Topology | None = None) -> None:
        changes = {} if topology is None else {"topology": topology}
        self.cluster = SimulatedCluster(make_setup("recompute", profile=profile, **changes))
        self.worker = self.cluster.workers[1]
        self.told: list[tuple[int, ports.Event]] = []

        def report(worker: object, event: ports.Event, at_ns: int) -> object:
            return self.cluster.loop.at(at_ns, lambda: self.told.append((at_ns, event)))

        self.cluster.report = report  # type: ignore[method-assign, assignment]

    @property
    def now_ns(self) -> int:
        return self.cluster.loop.now_ns

    def step(self, step_id: int) -> None:
        run = StepRun(ports.RunStep(step_id, 3, 0, (StagePlan(1, ALL),), ()), LOAD, {}, {})
        self.worker.deliver_step(run, 0, self.now_ns)

    def copy(self, number: int, num_blocks: int = 10, *, first: int = 0, layers: LayerRange = ALL,
             to_host: bool = True) -> None:
        blocks, slots = tuple(range(first, first + num_blocks)), tuple(range(num_blocks))
        ends = (blocks, slots) if to_host else (slots, blocks)
        command = ports.SendKV(number, 1, 1, layers, *ends, from_host=not to_host, to_host=to_host, beside_steps=True)
        self.worker.deliver(command, self.now_ns)

    def layout(self, call_id: int, layers: LayerRange = ALL, moved: tuple[tuple[int, int], ...] = ()) -> None:
        spec = LayoutSpec(self.cluster.shape.shards_for(layers), layers)
        self.worker.deliver(ports.ApplyLayout(1, call_id, spec, 0, self.worker.memory.version, moved), self.now_ns)

    def run(self, until_ns: int | None = None) -> None:
        self.cluster.loop.run(until_ns)

    def ends(self) -> list[tuple[int, bool, int]]:
        return [event[:3] for _, event in self.told if isinstance(event, ports.TransferEnded)]

    def step_ns(self) -> int:
        (took,) = [event.compute_ns for _, event in self.told if isinstance(event, ports.StepCompleted)]
        return took


def alone_ns() -> int:
    """What the step takes without copies."""
    alone = Alone()
    alone.step(1)
    alone.run()
    return alone.step_ns()


def bytes_of(num_blocks: int, num_layers: int = 4) -> int:
    return num_blocks * num_layers * BLOCK_BYTES


def test_copies_take_their_bytes_over_the_rate_one_after_the_other() -> None:
    alone = Alone()
    alone.copy(1, 10)
    alone.copy(2, 5, to_host=False, first=12)
    alone.run()
    took_ns = round(bytes_of(10) / RATE * 1e9)
    assert [at_ns for at_ns, _ in alone.told] == [took_ns, took_ns + round(bytes_of(5) / RATE * 1e9)]
    assert alone.ends() == [(1, True, bytes_of(10)), (2, True, bytes_of(5))]
    assert [event.duration_ns for _, event in alone.told] == [took_ns, took_ns // 2]  # type: ignore[union-attr]


def test_with_copy_engines_the_rate_is_that_of_the_host_link() -> None:
    topology = Topology(LinkSpec.of(LinkClass.RDMA, 1e9), host=LinkSpec.of(LinkClass.PCIE, 4 * RATE))
    alone = Alone(topology=topology)
    alone.copy(1, 10)
    alone.run()
    assert alone.told[0][0] == round(bytes_of(10) / (4 * RATE) * 1e9)


def test_a_step_pays_for_what_is_copied_while_it_runs() -> None:
    """Long copies slow it by a quarter from end to end; of short ones it pays for their bytes."""
    took_ns = alone_ns()
    for num_blocks, wanted_ns in ((30, took_ns / (1 - RATE * PRICE_S)), (1, took_ns + bytes_of(1, 1) * PRICE_S * 1e9)):
        alone = Alone()
        alone.copy(1, num_blocks, layers=ALL if num_blocks > 1 else LayerRange(0, 1))
        alone.run(0)
        alone.step(2)
        alone.run()
        assert alone.step_ns() == round(wanted_ns) > took_ns
        step_end_ns = alone.told[[type(e) for _, e in alone.told].index(ports.StepCompleted)][0]
        (copy_end_ns,) = [at_ns for at_ns, event in alone.told if isinstance(event, ports.TransferEnded)]
        copied_ns = bytes_of(num_blocks, 4 if num_blocks > 1 else 1) / RATE * 1e9
        assert copy_end_ns == max(round(copied_ns), step_end_ns), "it is told between steps"


def test_without_a_measurement_the_price_is_half_of_a_copy_between_steps() -> None:
    assert PROFILE.copies_beside_byte_s == 0.5 / PROFILE.host_copy_bytes_per_s
    assert PROFILE.copies_beside_bytes_per_s == PROFILE.host_copy_bytes_per_s


def test_a_layout_stops_what_is_gone_and_holds_up_what_is_not() -> None:
    alone = Alone()
    alone.copy(1, 10)
    alone.copy(2, 10, layers=LayerRange(0, 2))
    alone.run(1_000_000)
    alone.layout(3)
    alone.run(1_000_000)
    alone.run(5_000_000)
    assert alone.ends() == []
    alone.layout(4, LayerRange(0, 2))
    alone.run()
    (first, second), layouts = alone.ends(), [(t, e) for t, e in alone.told if isinstance(e, ports.LayoutApplied)]
    assert first[:2] == (1, False) and 0 < first[2] < bytes_of(10) and second == (2, True, bytes_of(10, 2))
    remap_ns = layouts[1][1].result.duration_ns
    copied_ns = round(bytes_of(10, 2) / RATE * 1e9)
    assert alone.told[-1][0] == 5_000_000 + remap_ns + copied_ns, "it began when the layout was in force"


def test_what_is_not_there_ends_at_once() -> None:
    alone = Alone()
    alone.copy(1, 3, first=alone.worker.memory.capacity_blocks - 2)
    alone.copy(2, 0)
    alone.run()
    assert alone.ends() == [(1, False, 0), (2, True, 0)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_cancelled_copy_ends_at_once_and_the_other_goes_on(number: int) -> None:
    alone = Alone()
    alone.copy(1)
    alone.copy(2)
    alone.run(4_000_000)
    for _ in range(2):
        alone.worker.cancel_transfer(number)
    alone.run(4_000_000)
    assert alone.ends() == [(number, False, 4_000 if number == 1 else 0)]
    alone.run()
    assert alone.ends()[1] == (3 - number, True, bytes_of(10))
    assert alone.now_ns == round(bytes_of(10) / RATE * 1e9) + (4_000_000 if number == 1 else 0)


def test_a_copy_that_waits_for_a_step_is_withdrawn() -> None:
    alone = Alone()
    alone.step(1)
    alone.copy(2, to_host=False)
    alone.worker.cancel_transfer(2)
    alone.run()
    assert alone.ends() == [(2, False, 0)]


def test_the_dead_tell_nothing_and_a_new_life_copies() -> None:
    alone = Alone()
    alone.copy(1)
    alone.run(1_000_000)
    alone.worker.die()
    alone.run()
    assert alone.ends() == []
    alone.worker.rise()
    alone.copy(2, 1)
    alone.run()
    assert alone.ends() == [(2, True, bytes_of(1))]


def test_steps_are_not_told_of_together_while_copies_are_under_way() -> None:
    alone = Alone()
    assert alone.worker.can_fast_forward(0)
    alone.copy(1)
    alone.run(0)
    assert not alone.worker.can_fast_forward(0)
    alone.run()
    assert alone.worker.can_fast_forward(alone.now_ns)


class Schedules(RuleBasedStateMachine):
    """Any order of copies, steps, layouts, cancellations and deaths: one end each, never from a past life."""

    @initialize()
    def start(self) -> None:
        self.alone = Alone()
        self.next_id = 0
        self.wanted: dict[int, int] = {}
        """Copies of this life, with their bytes."""
        self.may_break: set[int] = set()
        self.layers = ALL

    def take_id(self) -> int:
        self.next_id += 1
        return self.next_id

    @rule(num_blocks=st.integers(0, 12), lo=st.integers(0, 3), to_host=st.booleans())
    def copy(self, num_blocks: int, lo: int, to_host: bool) -> None:
        number, layers = self.take_id(), LayerRange(lo, 4)
        self.alone.copy(number, num_blocks, layers=layers, to_host=to_host)
        self.wanted[number] = bytes_of(num_blocks, len(layers))
        if not self.layers.covers(layers):
            self.may_break.add(number)

    @rule()
    def step(self) -> None:
        self.alone.step(self.take_id())

    @rule(layers=st.sampled_from([ALL, LayerRange(0, 2), LayerRange(2, 4)]))
    def layout(self, layers: LayerRange) -> None:
        self.alone.run(self.alone.now_ns + 10**9)
        self.alone.layout(self.take_id(), layers)
        self.layers = layers

    @rule(layers=st.sampled_from([ALL, LayerRange(2, 4)]))
    def layout_while_copying(self, layers: LayerRange) -> None:
        """Refused where another layout is on its way: which is in force is known after the next one alone."""
        self.alone.layout(self.take_id(), layers)
        self.layers = LayerRange(0, 0)
        self.may_break |= self.wanted.keys()

    @rule(back=st.integers(0, 3))
    def cancel(self, back: int) -> None:
        self.may_break.add(self.next_id - back)
        self.alone.worker.cancel_transfer(self.next_id - back)

    @rule()
    def die(self) -> None:
        self.alone.worker.die()
        self.alone.run()
        self.alone.told.clear()
        self.wanted.clear()
        self.alone.worker.rise()
        self.layers = ALL

    @rule(num_ns=st.integers(0, 20_000_000))
    def pass_time(self, num_ns: int) -> None:
        self.alone.run(self.alone.now_ns + num_ns)

    @invariant()
    def ends_are_of_this_life_and_once(self) -> None:
        ends = self.alone.ends() if hasattr(self, "alone") else []
        assert len({number for number, *_ in ends}) == len(ends)
        for number, is_complete, num_bytes in ends:
            assert is_complete or number in self.may_break
            assert num_bytes == self.wanted[number] if is_complete else num_bytes <= self.wanted[number]

    def teardown(self) -> None:
        if hasattr(self, "alone"):
            self.alone.run()
            self.ends_are_of_this_life_and_once()
            assert {number for number, *_ in self.alone.ends()} == self.wanted.keys()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=40, deadline=None)
