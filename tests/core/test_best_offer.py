"""The ladder begins the offer that brings most, and nothing else about the same group at that moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

import pytest
from fakes import FakeCluster
from hypothesis import given
from hypothesis import strategies as st
from sleepers import crowd, is_asleep, sleep

from jettison.core.ladder import drop
from jettison.core.ladder.forecasts import HORIZON_S, Question, Saving
from jettison.core.ladder.rung import Moment, Offer, Rung, Worth
from jettison.core.ladder.turns import ASK_EVERY_NS, Turns
from jettison.core.ladder.waking.wake import WakeRung
from jettison.core.params import AwakeParams
from jettison.core.ports import Action
from jettison.cost import predictor
from jettison.policy.forecast import Forecast
from jettison.policy.overload import Trigger

NOTHING = Forecast(0.0, 0.0, 0.0)


class Offering(Rung):
    """Makes the offers that it is given, and notes what it is told to begin."""

    name = "offering"
    rank = 1
    relieves = True
    moments = frozenset({Moment.TICK})

    def __init__(self, rung: Rung, offers: Iterable[Offer], begun: list[Offer]) -> None:
        super().__init__(rung.means)
        self._offers, self._begun = list(offers), begun

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        yield from self._offers

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        self._begun.append(offer)
        return []


OFFERS = st.lists(
    st.builds(
        lambda group, saved, device: Offer(
            groups=(group,), why="it is asked", worth=None if saved is None else Worth(saved, device)
        ),
        st.integers(0, 3), st.none() | st.floats(-100.0, 100.0), st.floats(0.0, 50.0),
    ),
    max_size=6,
)  # fmt: skip


@given(OFFERS, OFFERS)
def test_of_offers_about_a_group_the_best_is_begun(first: list[Offer], second: list[Offer]) -> None:
    ladder = FakeCluster().core.ladder
    begun: list[Offer] = []
    some = ladder.rung("drop")
    ladder._set_rungs([Offering(some, first, begun), Offering(some, second, begun)])
    ladder.climb(Moment.TICK, 0)
    at_once = list({offer.groups: offer for offer in reversed(first + second) if offer.worth is None}.values())
    assert sorted(begun[: len(at_once)], key=lambda o: o.groups) == sorted(at_once, key=lambda o: o.groups), (
        "what has no worth is begun as it is offered, one about a group"
    )
    relieved = {offer.groups for offer in at_once}
    weighed: dict[tuple[int, ...], list[Worth]] = {}
    for offer in first + second:
        if offer.worth is not None and offer.groups not in relieved:
            weighed.setdefault(offer.groups, []).append(offer.worth)
    chosen = begun[len(at_once) :]
    assert sorted(offer.groups for offer in chosen) == sorted(weighed)
    for offer in chosen:
        assert offer.worth is not None
        assert offer.worth.net_request_s == max(worth.net_request_s for worth in weighed[offer.groups])


class Foreseen:
    """A question whose answers are set."""

    def __init__(self, merging_request_s: float, waking_request_s: float) -> None:
        self._merging, self._waking = merging_request_s, waking_request_s

    def merging(self, merges: Iterable[Collection[int]]) -> Saving:
        list(merges)
        worth = Worth(self._merging)
        return Saving(worth, 10.0, NOTHING, NOTHING, worth)

    def waking(self, worker_ids: Collection[int], takes_s: float) -> Saving:
        worth = Worth(self._waking, float(len(worker_ids)))
        return Saving(worth, 10.0, NOTHING, NOTHING, worth)


@pytest.mark.parametrize(
    ("merging", "waking", "begins"),
    [(8.0, 6.0, "drop"), (6.0, 9.0, "wake"), (8.0, 8.5, "drop"), (3.0, 2.0, "wake"), (3.0, 1.0, None)],
)
def test_a_drop_and_a_wake_are_compared(
    monkeypatch: pytest.MonkeyPatch, merging: float, waking: float, begins: str | None
) -> None:
    """A wake's device counts as one request-second here, and a drop has to save four of ten."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, shard_bytes=256, awake=AwakeParams(), auto_restore=False,
        trigger=Trigger.FORECAST,
    )
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    monkeypatch.setattr(Question, "of", lambda means, now_ns, apart=(): Foreseen(merging, waking))
    crowd(cluster, 40, at_ms=cluster.now / 1e6)
    decided = ("drop_decided", "wake_decided")
    cluster.run(stop=lambda: any(r.kind in decided for r in cluster.records))
    first = next((r for r in cluster.records if r.kind in decided), None)
    assert (first and first.kind) == (begins and f"{begins}_decided")
    if begins is None:
        assert {r.kind for r in cluster.records} >= {"drop_declined", "wake_declined"}


def with_sleepers(**more: object) -> FakeCluster:
    """Two of four sleep, and more comes than the others hold."""
    cluster = FakeCluster(
        num_workers=4, full_blocks=24, shard_bytes=256, awake=AwakeParams(), auto_restore=False,
        trigger=Trigger.FORECAST, **more,  # type: ignore[arg-type]
    )
    sleep(cluster, 2, 3)
    cluster.run(stop=lambda: is_asleep(cluster, 2) and is_asleep(cluster, 3))
    crowd(cluster, 40, at_ms=cluster.now / 1e6)
    means = cluster.core.ladder.rung("drop").means
    cluster.run(stop=lambda: bool(cluster.core.loads.pressed()) and Question.of(means, cluster.now) is not None)
    return cluster


def with_a_long_queue() -> FakeCluster:
    """The same, and hundreds wait."""
    cluster = with_sleepers()
    crowd(cluster, 400, first=100, at_ms=cluster.now / 1e6)
    cluster.run(stop=lambda: len(cluster.core.state.requests) > 300)
    return cluster


def asked(cluster: FakeCluster) -> Question:
    question = Question.of(cluster.core.ladder.rung("drop").means, cluster.now)
    assert question is not None
    return question


def test_a_sleeper_that_was_woken_at_the_same_moment_is_not_woken_again() -> None:
    cluster = with_sleepers()
    rung, now_ns = cluster.core.ladder.rung("wake"), cluster.now
    assert isinstance(rung, WakeRung)
    two, one = (rung._offer(None, "it is asked", num_bytes, now_ns) for num_bytes in (2 * 24 * 4 * 64 * 100, 1))
    assert two is not None and one is not None and set(two.worker_ids) == {2, 3} > set(one.worker_ids)
    cluster.carry_out(rung.begin(one, now_ns))
    cluster.carry_out(rung.begin(two, now_ns))
    assert rung.begin(two, now_ns) == []
    assert sorted(w for r in cluster.records if r.kind == "wake_decided" for w in r.fields["workers"]) == [2, 3]  # type: ignore[attr-defined]


def test_a_plan_whose_groups_have_merged_meanwhile_is_not_begun() -> None:
    cluster = with_sleepers()
    rung, pair = cluster.core.ladder.rung("drop"), sorted(cluster.core.groups)[:2]
    assert isinstance(rung, drop.DropRung)
    groups = [cluster.core.groups[g] for g in pair]
    plan = rung._planner.plan(groups, 1, pair[0], 1.0)
    offer = drop.DropOffer(groups=(pair[0],), why="it is asked", plan=plan)
    assert len(plan.merges) == 1
    cluster.carry_out(rung.begin(offer, cluster.now))
    assert rung.begin(offer, cluster.now) == []
    assert len(cluster.core.moves.merges) == 1


def test_a_wake_saves_less_the_longer_it_takes_and_never_nothing_for_a_long_queue() -> None:
    question = asked(with_a_long_queue())
    soon, late = (question.waking([2], takes_s).worth.saved_request_s for takes_s in (0.0, 0.5))
    assert soon > late > 0.0


def test_a_second_sleeper_does_not_delay_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_a_long_queue()
    monkeypatch.setattr(cluster.core.sleepers, "coming_s", lambda now_ns: {2: 0.1})
    assert asked(cluster).waking([3], 3.0).worth.saved_request_s >= -1e-6


def test_a_wake_under_way_is_known_to_the_next_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "USUAL_STAGE_S", 0.0)  # the fake's steps take a millisecond: a hop would be half
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, shard_bytes=1024, awake=AwakeParams(), auto_restore=False,
        trigger=Trigger.FORECAST,
    )
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    crowd(cluster, 40, at_ms=cluster.now / 1e6)
    means = cluster.core.ladder.rung("drop").means
    cluster.run(stop=lambda: bool(cluster.core.loads.pressed()) and Question.of(means, cluster.now) is not None)
    before = Question.of(means, cluster.now)
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    after = Question.of(means, cluster.now)
    assert before is not None and after is not None
    assert after.staying.cost_request_s < before.staying.cost_request_s
    pair = list(means.state.groups)[:2]
    assert before.merging([pair]).worth.saved_request_s > 0.0
    assert after.merging([pair]).worth < before.merging([pair]).worth


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), max_size=60))
def test_one_group_is_asked_about_at_a_moment_and_no_group_is_forgotten(asked: list[tuple[int, int]]) -> None:
    turns, now_ns = Turns(), 0
    granted: list[tuple[int, int]] = []
    for after_ms, group in asked:
        now_ns += after_ms * 1_000_000
        assert sorted(turns.in_turn(range(5))) == list(range(5))
        if turns.may_ask(group, now_ns, range(5)):
            granted.append((now_ns, group))
    moments = sorted(set(granted))
    assert len({at_ns for at_ns, _ in moments}) == len(moments), "of one moment one group"
    assert all(b[0] - a[0] >= ASK_EVERY_NS for a, b in pairwise(moments))
    last = {group: at_ns for at_ns, group in granted}
    assert turns.in_turn(range(5)) == sorted(range(5), key=lambda g: (last.get(g, -1), g))


def test_what_memory_could_save_beside_a_wake_counts_the_woken_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, staying would have more instances than ample memory: a drop could hardly be worth anything."""
    cluster = with_sleepers()
    means = cluster.core.ladder.rung("drop").means
    crowd(cluster, 60, first=100, at_ms=cluster.now / 1e6)
    cluster.run(stop=lambda: len(cluster.core.state.requests) > 42)
    monkeypatch.setattr(means.sleepers, "coming_s", lambda now_ns: {2: 0.0, 3: 0.0})
    question = Question.of(means, cluster.now)
    assert question is not None
    possible = question.waking([], 0.0).possible_request_s
    assert possible > question.staying.cost_request_s / 3, "four hold no more than a part of them"


def test_a_slow_wake_ranks_by_what_it_brings_while_a_merge_is_foreseen() -> None:
    question = asked(with_a_long_queue())
    quick, slow = question.waking([2], 1.0), question.waking([2], 3.0 * HORIZON_S)
    assert quick.rank == quick.worth
    assert slow.rank.saved_request_s == pytest.approx(0.0, abs=1e-6), "by then what merges bring is over"
