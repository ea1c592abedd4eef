"""Where distances come from, and that drops keep to them: partners of one machine, shards from a near holder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fakes import FakeCluster
from test_pulls import RESIDENCIES, arranged, fill

from jettison.core.load.distances import SLOWER, known_links, machine_distance
from jettison.core.load.pullrates import PullRates
from jettison.core.ports import SendShard
from jettison.policy.links import FAR, NEAR

TWO_MACHINES = {0: 0, 1: 1, 2: 0, 3: 1}
"""By their numbers alone, 0 and 1 would be the first pair."""


def place(cluster: FakeCluster, machine_of: Mapping[int, int]) -> FakeCluster:
    cluster.core.reconfigure(replace(cluster.core.params, machine_of=machine_of))
    return cluster


def four(machine_of: Mapping[int, int]) -> FakeCluster:
    return place(FakeCluster(num_workers=4, auto_restore=False), machine_of)


# --- what is known


@pytest.mark.parametrize("machine_of", [{}, dict.fromkeys(range(4), 5), {w: w for w in range(4)}])
def test_where_all_links_are_alike_nothing_is_known(machine_of: dict[int, int]) -> None:
    assert known_links(four(machine_of).core.state) is None


def test_one_machine_has_no_networks_to_compare() -> None:
    """What workers that share memory measure differs by what else their cores do."""
    state = four({}).core.state
    state.link_rate((0, 1)).observe(1000, 1.0)
    state.link_rate((0, 2)).observe(1000, 100.0)
    assert known_links(state) is None


def test_machines_say_who_is_near() -> None:
    links = known_links(four(TWO_MACHINES).core.state)
    assert links is not None
    assert links.distance(0, 2) == links.distance(3, 1) == NEAR
    assert links.distance(0, 1) == links.distance(3, 2) == FAR


def test_a_network_that_carried_a_fraction_of_another_is_further() -> None:
    state = four({w: w for w in range(4)}).core.state
    for dst, seconds in ((1, 1.0), (2, 0.9 * SLOWER), (3, 1.1 * SLOWER**2)):
        state.link_rate((0, dst)).observe(1000, seconds)
    links = known_links(state)
    assert links is not None
    assert links.distance(0, 1) == links.distance(0, 2) == FAR, "what else was on the way explains as much"
    assert links.distance(0, 3) == FAR + 2
    assert links.distance(3, 0) == links.distance(1, 2) == FAR, "not measured"


def test_a_machines_best_transfer_says_what_its_network_carries() -> None:
    state = four({0: 0, 1: 1, 2: 1, 3: 2}).core.state
    for dst, seconds in ((1, 50.0), (2, 1.0), (3, 20.0)):
        state.link_rate((0, dst)).observe(1000, seconds)
    links = known_links(state)
    assert links is not None
    assert links.distance(0, 1) == links.distance(0, 2) == FAR < links.distance(0, 3)


def test_asking_for_a_rate_that_nobody_has_measured_says_nothing() -> None:
    state = four({w: w for w in range(4)}).core.state
    state.link_rate((0, 1))
    assert known_links(state) is None


# --- what follows


def members(cluster: FakeCluster) -> set[tuple[int, ...]]:
    return {tuple(sorted(g.worker_ids)) for g in cluster.core.groups.values()}


@pytest.mark.parametrize("num_drops", [1, 2])
def test_instances_merge_with_those_of_their_machine(num_drops: int) -> None:
    cluster = four(TWO_MACHINES)
    for _ in range(num_drops):
        cluster.order("drop")
        cluster.run()
    assert (0, 2) in members(cluster)
    assert members(cluster) == {(0, 2), (1, 3)} if num_drops == 2 else {(0, 2), (1,), (3,)}
    cluster.expect_nothing_left()


def test_without_machines_the_freest_and_first() -> None:
    cluster = four({})
    cluster.order("drop")
    cluster.run()
    assert (0, 1) in members(cluster)


@pytest.mark.parametrize(("machine_of", "sender"), [({}, 1), ({0: 0, 1: 0, 2: 1, 3: 1}, 3)])
def test_a_missing_shard_comes_from_a_near_holder(machine_of: dict[int, int], sender: int) -> None:
    """Members 0 and 2 hold the first layer, 1 and 3 the others: 2 needs the second layer, which 1 and 3 have."""
    cluster = place(arranged(RESIDENCIES[4]), machine_of)
    fill(cluster)
    cluster.run(until_ms=60)
    cluster.order("drop")
    seen: set[tuple[int, int]] = set()

    def note() -> bool:
        seen.update(p.ends for p in cluster.core.state.book.transfers.values() if isinstance(p.transfer, SendShard))
        return False

    cluster.run(stop=note)
    assert seen == {(sender, 2)}
    cluster.expect_outputs()
    cluster.expect_nothing_left()


# --- networks that were measured at the start

APART = {0: 0, 1: 1, 2: 2}
ONE_BEHIND = {(0, 1): 20e6, (1, 0): 20e6, (0, 2): 100e6, (2, 0): 100e6, (1, 2): 20e6, (2, 1): 20e6}
"""Bytes per second, as between hosts at 1 Gbit/s of which one is behind 200 Mbit/s; by their numbers alone, 0 and 1
would be the first pair."""


def three(networks: Mapping[tuple[int, int], float], **params: object) -> FakeCluster:
    cluster = FakeCluster(num_workers=3, auto_restore=False)
    found = replace(cluster.core.params, machine_of=APART, networks=networks, has_profiled_links=False, **params)
    cluster.core.reconfigure(found)
    return cluster


def test_a_network_that_is_slower_at_rest_is_further() -> None:
    links = known_links(three(ONE_BEHIND).core.state)
    assert links is not None
    assert links.distance(0, 2) == links.distance(2, 0) == FAR < links.distance(0, 1) == links.distance(2, 1)


def test_what_transfers_that_share_a_port_measure_changes_no_class() -> None:
    state = three(ONE_BEHIND).core.state
    state.link_rate((0, 2)).observe(1000, 1.0)
    links = known_links(state)
    assert links is not None and links.distance(0, 2) == FAR < links.distance(0, 1)
    assert PullRates(state).of((0, 2)) == 1000.0, "what a transfer costs now is another matter"


def test_networks_of_one_kind_are_alike() -> None:
    assert known_links(three({pair: 1.8e7 if 1 in pair else 2e7 for pair in ONE_BEHIND}).core.state) is None


def test_the_nearer_of_two_hosts_is_the_partner() -> None:
    cluster = three(ONE_BEHIND)
    cluster.order("drop")
    cluster.run()
    assert members(cluster) == {(0, 2), (1,)}
    cluster.expect_nothing_left()


def test_prices_are_known_before_the_first_transfer() -> None:
    cluster = three(ONE_BEHIND)
    state, rates = cluster.core.state, PullRates(cluster.core.state)
    assert (rates.of((0, 2)), rates.of((2, 1)), rates.of_kv((1, 0))) == (100e6, 20e6, 20e6)
    assert (rates.slowest([0, 2]), rates.slowest([0, 1, 2])) == (100e6, 20e6)
    costs = cluster.core.loads.exchange_costs(cluster.core.groups[0])
    assert (costs.link_bytes_per_s((0, 2)), costs.link_bytes_per_s((0, 1))) == (100e6, 20e6)
    state.link_rate((0, 1)).observe(5000, 1.0)
    costs = cluster.core.loads.exchange_costs(cluster.core.groups[0])
    assert (costs.link_bytes_per_s((0, 1)), costs.link_bytes_per_s((2, 1))) == (5000.0, 20e6)


def test_destinations_of_packing_and_relief_are_as_far_as_their_networks() -> None:
    distance = machine_distance(three(ONE_BEHIND).core.state)
    assert distance(0, 0) == NEAR < distance(0, 2) == FAR < distance(0, 1)
    alike = machine_distance(four(TWO_MACHINES).core.state)
    assert (alike(1, 1), alike(0, 1)) == (NEAR, FAR)


# --- hosts that have joined since

ALIKE = dict.fromkeys(ONE_BEHIND, 125e6)
"""At 1 Gbit/s."""


def joined(networks: Mapping[tuple[int, int], float]) -> FakeCluster:
    """A fourth host, of which no probe has measured anything."""
    cluster = FakeCluster(num_workers=4, auto_restore=False)
    found = replace(
        cluster.core.params, machine_of={**APART, 3: 3}, networks=networks, has_profiled_links=False
    )
    cluster.core.reconfigure(found)
    return cluster


def both_ways(cluster: FakeCluster, one: int, other: int, bytes_per_s: float) -> None:
    for link in ((one, other), (other, one)):
        cluster.core.state.link_rate(link).observe(round(bytes_per_s), 1.0)


def test_a_pair_of_which_nothing_is_known_is_as_far_as_the_slowest() -> None:
    cluster = joined(ONE_BEHIND)
    links, distance = known_links(cluster.core.state), machine_distance(cluster.core.state)
    assert links is not None
    for host in range(3):
        assert links.distance(3, host) == links.distance(host, 3) == links.distance(0, 1) > links.distance(0, 2)
        assert distance(3, host) == distance(host, 3) == distance(0, 1)
    assert distance(3, 3) == NEAR
    rates = PullRates(cluster.core.state)
    assert rates.of((3, 0)) is None, "no pull of which the time is not known"
    assert (rates.slowest([2, 3]), rates.slowest([0, 2]), rates.slowest([3])) == (20e6, 100e6, 1e9)
    both_ways(cluster, 2, 3, 60e6)
    assert PullRates(cluster.core.state).slowest([2, 3]) == 60e6


def test_transfers_say_what_lies_between_a_host_that_has_joined_and_the_others() -> None:
    cluster = joined(ALIKE)
    kept = machine_distance(cluster.core.state)
    assert known_links(cluster.core.state) is None and kept(0, 3) == FAR
    both_ways(cluster, 0, 3, 25e6)  # 200 Mbit/s
    links = known_links(cluster.core.state)
    assert links is not None
    assert links.distance(0, 3) == links.distance(3, 0) == kept(3, 0) > kept(0, 1) == links.distance(0, 1) == FAR
    assert kept(3, 1) == FAR, "of that pair nothing is known"


def test_a_host_that_has_joined_by_a_fast_network_is_no_longer_as_far_as_the_slowest() -> None:
    cluster = joined(ONE_BEHIND)
    both_ways(cluster, 2, 3, 60e6)  # it shared a port
    links, distance = known_links(cluster.core.state), machine_distance(cluster.core.state)
    assert links is not None and links.distance(2, 3) == distance(3, 2) == FAR < links.distance(1, 3)


def test_equal_rates_are_equally_far_whichever_way_they_were_measured() -> None:
    cluster = joined(ONE_BEHIND)
    both_ways(cluster, 1, 3, 20e6)
    distance = machine_distance(cluster.core.state)
    assert distance(1, 3) == distance(1, 0)


def test_a_function_that_a_packer_keeps_follows_what_becomes_known() -> None:
    cluster = joined(ALIKE)
    kept = machine_distance(cluster.core.state)
    assert kept(0, 3) == FAR
    cluster.core.reconfigure(replace(cluster.core.params, networks={**ALIKE, (0, 3): 25e6}))
    assert kept(0, 3) == FAR + 2 == kept(3, 0), "as far as the slowest that a probe has measured"
    both_ways(cluster, 0, 3, 125e6)
    assert kept(0, 3) == FAR + 2 > kept(3, 0) == FAR, "what a probe has measured stays"


@pytest.mark.parametrize(("bytes_per_s", "pair"), [(25e6, (0, 2)), (125e6, (0, 1))])
def test_a_host_that_has_joined_is_a_partner_as_its_network_is(bytes_per_s: float, pair: tuple[int, int]) -> None:
    """By its number alone, 1 would be the first partner."""
    cluster = joined({(src, dst): 125e6 for src in (0, 2, 3) for dst in (0, 2, 3) if src != dst})
    for host in (0, 2, 3):
        both_ways(cluster, host, 1, bytes_per_s)
    cluster.order("drop")
    cluster.run()
    assert pair in members(cluster)
    cluster.expect_nothing_left()
