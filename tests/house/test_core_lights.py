"""How much of the core wakes for one event: the modules and the calls of its frames, by kind of event, in virtual time.

A plain decode step is the event that a server meets most, so what it wakes is what a reader has to read to follow it,
and what every token pays for. ``python tests/house/test_core_lights.py`` prints the table. The bounds are what is so
today; a change that needs a higher one says why in its commit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import Watched, make_setup

import jettison.core
from jettison.config.offline import HARVEST_PARTS
from jettison.core import ports
from jettison.core.ladder.lists import with_offline
from jettison.policy.offline import OfflineParams
from jettison.types import ServiceClass

CORE = str(Path(jettison.core.__file__).parent)

ROWS = (1, 8, 32)
"""Requests that decode at each of two instances."""
SETTLED_NS = 550_000_000
"""From here on all have arrived and decode."""


class Bound(NamedTuple):
    """Of the median event of its kind."""

    modules: int
    calls: int


def most(rows: int) -> dict[str, Bound]:
    """By kind of event."""
    return {
        "a plain decode step ends": Bound(PLAIN_MODULES, PLAIN_CALLS + CALLS_A_ROW * rows),
        "a request arrives": Bound(*ARRIVAL),
    }


PLAIN_MODULES, PLAIN_CALLS, CALLS_A_ROW = 17, 66, 3
ARRIVAL = (27, 205)
OFFLINE = Bound(27, 213)
DECIDING = Bound(36, 536)


@dataclass(slots=True)
class Lights:
    """Counts while the core handles an event."""

    modules: set[str] = field(default_factory=set)
    calls: int = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(CORE):
            self.modules.add(frame.f_code.co_filename)
            self.calls += 1


class Counted:
    """A simulated cluster whose core tells what each event has woken."""

    def __init__(self, watched: Watched, name: Callable[[ports.Event, list[ports.Action]], str | None]) -> None:
        self.lights: defaultdict[str, list[Lights]] = defaultdict(list)
        self._handle, self._name = watched.cluster.core.handle, name
        watched.cluster.core.handle = self._counting  # type: ignore[method-assign]

    def _counting(self, event: ports.Event, now_ns: int) -> list[ports.Action]:
        lights, before = Lights(), sys.getprofile()
        sys.setprofile(lights)
        try:
            actions = self._handle(event, now_ns)
        finally:
            sys.setprofile(before)
        kind = self._name(event, actions)
        if kind is not None:
            self.lights[kind].append(lights)
        return actions

    def median(self, kind: str) -> Bound:
        """Of all events of the kind. Raises ValueError where there was none."""
        found = self.lights[kind]
        if not found:
            raise ValueError(f"no event of the kind: {kind}")
        modules, calls = (sorted(values) for values in ([len(x.modules) for x in found], [x.calls for x in found]))
        return Bound(modules[len(found) // 2], calls[len(found) // 2])


def _ends(actions: list[ports.Action]) -> bool:
    return any(isinstance(action, ports.Emit) and action.finish_reason is not None for action in actions)


def decoding(rows: int) -> Counted:
    """Two instances with the default ladder, so many requests at each, that decode and do not end for a while."""
    setup = replace(make_setup("drop", num_workers=2, num_blocks=400, eager=False), compress=False)
    watched = Watched(setup, checks=False)
    for i in range(2 * rows):
        watched.submit(f"r{i}", 20, 400, 0.001 * i)
    watched.submit("last", 20, 2, 0.5)

    def name(event: ports.Event, actions: list[ports.Action]) -> str | None:
        if isinstance(event, ports.Arrived):
            return "a request arrives"
        is_plain = watched.cluster.loop.now_ns > SETTLED_NS and not _ends(actions)
        return "a plain decode step ends" if is_plain and isinstance(event, ports.StepCompleted) else None

    counted = Counted(watched, name)
    watched.cluster.run()
    watched.expect_all_served()
    return counted


def beside_a_batch(*, sheds_rows: bool = False) -> Counted:
    """The same with offline work beside it, harvested; ``sheds_rows``: as workers on the CPU can."""
    setup = replace(make_setup("drop", num_workers=2, num_blocks=400, eager=False), compress=False)
    rungs = with_offline(setup.params.rungs, HARVEST_PARTS)
    offline = OfflineParams(slo_aware=True, checkpoints=True, prefetches=True)
    setup = replace(
        setup, params=replace(setup.params, rungs=rungs, offline=offline),
        limits=replace(setup.limits, sheds_rows=sheds_rows),
    )
    watched = Watched(setup, checks=False)
    for i in range(16):
        watched.submit(f"r{i}", 20, 120, 0.001 * i)
        watched.submit(f"o{i}", 100, 60, 0.0, ServiceClass.OFFLINE)

    def name(event: ports.Event, actions: list[ports.Action]) -> str | None:
        return "a step ends beside offline work" if isinstance(event, ports.StepCompleted) else None

    counted = Counted(watched, name)
    watched.cluster.run()
    watched.expect_all_served()
    return counted


def deciding() -> Counted:
    """A burst that makes two instances drop: the event that decides it."""
    watched = Watched(replace(make_setup("drop", num_workers=2), compress=False), checks=False)
    watched.load(3, num_requests=60, span_s=0.3)

    def name(event: ports.Event, actions: list[ports.Action]) -> str | None:
        decides = any(isinstance(action, ports.Record) and action.kind == "drop_decided" for action in actions)
        return "a drop is decided" if decides else None

    counted = Counted(watched, name)
    watched.cluster.run()
    watched.expect_all_served()
    return counted


@pytest.mark.parametrize("rows", ROWS)
def test_a_plain_decode_step_wakes_no_more_of_the_core_than_it_did(rows: int) -> None:
    counted = decoding(rows)
    for kind, bound in most(rows).items():
        seen = counted.median(kind)
        assert seen.modules <= bound.modules and seen.calls <= bound.calls, f"{kind}, {rows} rows: {seen}, most {bound}"


def test_a_step_beside_offline_work_and_a_decision_wake_no_more_than_they_did() -> None:
    for counted, kind, bound in (
        (beside_a_batch(), "a step ends beside offline work", OFFLINE),
        (beside_a_batch(sheds_rows=True), "a step ends beside offline work", OFFLINE),
        (deciding(), "a drop is decided", DECIDING),
    ):
        seen = counted.median(kind)
        assert seen.modules <= bound.modules and seen.calls <= bound.calls, f"{kind}: {seen}, most {bound}"


if __name__ == "__main__":
    for number in ROWS:
        for kind in most(number):
            print(f"{kind}, {number} rows: {decoding(number).median(kind)}")  # noqa: T201
    for seen, kind in ((beside_a_batch(), "a step ends beside offline work"), (deciding(), "a drop is decided")):
        print(f"{kind}: {seen.median(kind)}")  # noqa: T201
