"""Where packed newcomers' prompts are computed: long ones on an empty instance or a woken one, short ones beside
others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

from fakes import MS, FakeCluster, tokens
from hypothesis import given
from hypothesis import strategies as st
from sleepers import is_asleep, sleep

from jettison.core.ladder.packing.newcomers import MOST_PLACES, Newcomers, cheapest, fits_compute
from jettison.core.ladder.prompts import PromptWork, prompt_rate_of
from jettison.core.load.views import Loads
from jettison.core.params import AwakeParams
from jettison.core.ports import Record
from jettison.core.serving.group import Group
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.packing.params import PackParams

WHY = "its prompt costs less on a sleeper"


def packed(*, epoch_s: float = 0.05, awake: AwakeParams | None = None) -> FakeCluster:
    """Objectives that no prompt breaks: what is decided, is decided by cost."""
    return FakeCluster(
        policy="recompute", num_workers=2, full_blocks=9000, max_tokens=64, prefix_caching=False, max_seqs=64,
        offline=OfflineParams(checkpoints=False, prefetches=False, slo=SloParams(ttft_s=1000.0, tpot_s=10.0)),
        packing=PackParams(epoch_s=epoch_s, head_room=0.05), awake=awake,
    )


def beside_decodes(num_tokens: int, *, epoch_s: float = 0.05) -> tuple[FakeCluster, bool]:
    """A prompt of so many tokens comes to two instances, of which one has eight decodes: whether it goes there."""
    cluster = packed(epoch_s=epoch_s)
    requests = cluster.core.state.requests
    for i in range(8):
        cluster.submit(f"r{i}", tokens(i, 20), 400, 5.0 * i, ignore_eos=True)
    cluster.submit("new", tokens(99, num_tokens), 2, 250.0)
    cluster.check_every_event = False
    cluster.run(stop=lambda: "new" in requests)
    counts = Counter(state.group_id for state in requests.values())
    assert sum(counts.values()) == 9
    return cluster, counts[requests["new"].group_id] > 4


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.check_every_event = False
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_long_prompt_goes_to_an_empty_instance_and_a_short_one_beside_decodes() -> None:
    for num_tokens, stays in ((20, True), (200, True), (6000, False)):
        cluster, is_there = beside_decodes(num_tokens)
        assert is_there == stays, num_tokens
        expect_all_well(cluster)


def test_a_long_prompt_stays_where_a_further_instance_is_worth_more_than_it_slows() -> None:
    """The instance that it has to itself is kept until the next epoch moves it."""
    cluster, is_there = beside_decodes(6000, epoch_s=2.0)
    assert is_there
    expect_all_well(cluster)


def beside_a_sleeper(num_others: int, num_tokens: int) -> FakeCluster:
    """One of two instances sleeps, and how long its wake takes is known. Some prompts come to the other, and one of so
    many tokens in their midst."""
    cluster = packed(awake=AwakeParams(1))
    cluster.submit("first", tokens(0, 20), 30, 0.0, ignore_eos=True)
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    cluster.carry_out(cluster.core.request_wake(1, cluster.now))
    cluster.run(stop=lambda: len(cluster.core.groups) == 2)
    cluster.submit("second", tokens(1, 20), 30, cluster.now / MS + 1, ignore_eos=True)
    cluster.run()
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    cluster.check_every_event = False
    at_ms = cluster.now / MS + 1.0
    for i in range(num_others):
        cluster.submit(f"a{i}", tokens(2 + i, 3000), 2, at_ms + 0.1 * i)
    cluster.submit("new", tokens(99, num_tokens), 2, at_ms + 0.05 * num_others)
    return cluster


def woken(cluster: FakeCluster) -> list[Record]:
    return [r for r in cluster.records if r.kind == "wake_decided" and r.fields["reason"] == WHY]


def test_a_prompt_that_would_wait_for_longer_than_a_wake_wakes_a_sleeper_and_goes_there() -> None:
    cluster = beside_a_sleeper(5, 3000)
    cluster.run()
    (record,) = woken(cluster)
    fields = record.fields
    assert fields["cost_request_s"] < fields["saved_request_s"]  # type: ignore[operator]
    assert fields["wake_s"] < fields["ahead_s"]  # type: ignore[operator]
    reasons = {r.fields.get("reason") for r in cluster.records if r.kind == "pack"}
    assert "an empty group serves it sooner" in reasons, "it does not wait for the queue to be dealt out"
    cluster.expect_outputs()


def a_long_prompt_apart(num_decodes: int = 8, *, num_tokens: int = 6000) -> tuple[FakeCluster, Group, Group]:
    """Two instances: decodes in the first, and a prompt that has gone to the second; a request named "new" has come,
    and so much is known of steps."""
    cluster = packed()
    for i in range(num_decodes):
        cluster.submit(f"r{i}", tokens(i, 20), 400, 2.0 * i, ignore_eos=True)
    cluster.submit("long", tokens(98, 6000), 2, 250.0)
    cluster.submit("new", tokens(99, num_tokens), 2, 250.1)
    requests, groups = cluster.core.state.requests, cluster.core.groups
    cluster.check_every_event = False
    cluster.run(stop=lambda: "new" in requests)
    decoding, computing = groups[requests["r0"].group_id], groups[requests["long"].group_id]
    assert decoding is not computing
    return cluster, decoding, computing


def choice(cluster: FakeCluster, wanted: Group, other: Group, *, is_needed: bool) -> Group | None:
    """Of two groups in use, of which packing wants the first for the request named "new"; it can do without the other
    unless it ``is_needed``."""
    newcomers, state = Newcomers(cluster.core.state, Loads(cluster.core.state)), cluster.core.state.requests["new"]
    return newcomers.choose(wanted, state, lambda: ([other], []), {other.group_id} if is_needed else set())


def test_a_newcomer_does_not_wait_behind_a_prompt_where_another_instance_is_in_use_anyway() -> None:
    cluster, decoding, computing = a_long_prompt_apart(1, num_tokens=20)
    assert choice(cluster, computing, decoding, is_needed=True) is decoding
    assert choice(cluster, decoding, computing, is_needed=True) is decoding
    expect_all_well(cluster)


def test_no_newcomer_leaves_an_instance_that_keeps_the_objective_for_one_that_breaks_it() -> None:
    """Even where it costs less, as it would slow many decodes."""
    cluster, decoding, computing = a_long_prompt_apart(24)
    assert choice(cluster, decoding, computing, is_needed=True) is computing
    params, new = cluster.core.state.params, cluster.core.state.requests["new"]
    own_s = PromptWork(cluster.core.state).of(new) / (prompt_rate_of(cluster.core.state, decoding) or 0.0)
    slo = SloParams(ttft_s=1.1 * own_s, tpot_s=10.0)
    cluster.core.reconfigure(replace(params, offline=replace(params.offline, slo=slo)))
    assert [fits_compute(cluster.core.state, group, new) for group in (decoding, computing)] == [True, False]
    assert choice(cluster, decoding, computing, is_needed=True) is decoding
    expect_all_well(cluster)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=90))
def test_so_many_places_are_weighed_and_those_cost_least(groups: list[tuple[float, bool]]) -> None:
    made = [SimpleNamespace(group_id=i, cost=cost, has_room=room) for i, (cost, room) in enumerate(groups)]
    found = cheapest(made, lambda g: (False, g.cost), lambda g: g.has_room)  # type: ignore[arg-type, attr-defined]
    roomy = sorted((cost, i) for i, (cost, room) in enumerate(groups) if room)
    assert [group.group_id for group in found] == [i for _, i in roomy[:MOST_PLACES]]


def test_a_prompt_counts_for_what_it_attends_to() -> None:
    cluster, _, computing = a_long_prompt_apart()
    state, long = cluster.core.state, cluster.core.state.requests["long"]
    assert PromptWork(state).ahead(computing) > 1.2 * (long.num_tokens - long.num_computed) > 0
    expect_all_well(cluster)


def test_a_short_wait_wakes_nobody() -> None:
    cluster = beside_a_sleeper(0, 60)
    cluster.run()
    assert not woken(cluster)
    cluster.expect_outputs()
