"""Rates from what has changed, against samples of everything on every tick."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from jettison.core.load.samples import TickTimes, Totals, per_s
from jettison.types import NANOSECONDS

SECOND = NANOSECONDS


@dataclass
class Sampled:
    """A total that is sampled on every tick."""

    window_ns: int
    samples: list[tuple[int, int]] = field(default_factory=list)

    def add(self, now_ns: int, total: int) -> None:
        self.samples.append((now_ns, total))
        while len(self.samples) > 2 and self.samples[1][0] <= now_ns - self.window_ns:
            self.samples.pop(0)

    def per_s(self) -> float | None:
        if len(self.samples) < 2:
            return None
        (t0, v0), (t1, v1) = self.samples[0], self.samples[-1]
        return None if t1 - t0 < self.window_ns // 4 else (v1 - v0) * NANOSECONDS / (t1 - t0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-3, 5)),
        st.tuples(st.just("tick"), st.sampled_from([SECOND // 10, SECOND // 10, SECOND // 10 + 7, 3 * SECOND, 0])),
        st.tuples(st.just("ticks"), st.integers(0, 300)),
    ),
    max_size=80,
)


@given(STEPS, STEPS, st.sampled_from([2 * SECOND, 10 * SECOND]))
def test_both_sums_are_the_same(before: list[tuple[str, int]], steps: list[tuple[str, int]], window_ns: int) -> None:
    ticks, now, total, expected = TickTimes(), 0, 0, Sampled(window_ns)
    totals: Totals | None = None
    for number, (what, amount) in enumerate([*before, *steps]):
        if number == len(before):
            totals = Totals(ticks, total)
        if what == "add":
            total += amount
            if totals is not None:
                totals.note(total)
            continue
        times = [now + amount] if what == "tick" else [now + (i + 1) * SECOND // 10 for i in range(amount)]
        now = times[-1] if times else now
        if what == "tick":
            ticks.add(now)
        else:
            ticks.add_all(times)
        for time_ns in times if totals is not None else ():
            expected.add(time_ns, total)
        if totals is not None:
            changes = totals.changes(window_ns)
            assert (None if changes is None else per_s(changes[0][0], changes[1])) == expected.per_s()


def test_what_is_remembered_does_not_grow() -> None:
    ticks = TickTimes()
    totals = Totals(ticks, 0)
    for i in range(20_000):
        totals.note(i)
        ticks.add(i * SECOND // 10)
    assert len(ticks._times) < 1000 and len(totals._notes) < 1000 and ticks.num_ticks == 20_000
    ticks.add_all(range(2000 * SECOND, 3000 * SECOND, SECOND // 10))
    assert len(ticks._times) < 1000 and ticks.num_ticks == 30_000
    assert totals.changes(2 * SECOND) == ((0,), 2 * SECOND)
