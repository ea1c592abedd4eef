"""Distances between workers and between groups of machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.links import FAR, NEAR, Links, PortId, PortKind, PortMap


def test_workers_of_one_machine_are_near_and_others_are_far() -> None:
    links = Links({0: 7, 1: 7, 2: 3})
    assert links.distance(0, 1) == NEAR
    assert links.distance(0, 2) == links.distance(2, 1) == FAR > NEAR


def test_who_is_not_named_is_alone() -> None:
    links = Links({0: 0})
    assert links.distance(0, 1) == links.distance(1, 2) == FAR
    assert links.distance(1, 1) == NEAR


def test_a_slow_network_is_further_in_its_direction() -> None:
    links = Links({0: 0, 1: 1}, {(0, 1): 2.5})
    assert (links.distance(0, 1), links.distance(1, 0)) == (2.5, FAR)
    assert links.farthest({0}, {1}) == links.farthest({1}, {0}) == 2.5


machines = st.frozensets(st.integers(0, 3), min_size=1)


@given(machines, machines, st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.floats(1.0, 9.0)))
def test_groups_are_as_far_as_their_farthest_members(
    some: frozenset[int], others: frozenset[int], between: dict[tuple[int, int], float]
) -> None:
    links = Links({w: w for w in range(4)}, between)
    pairs = [(a, b) for a in some for b in others]
    assert links.farthest(some, others) == max(max(links.distance(a, b), links.distance(b, a)) for a, b in pairs)


OUT, IN = True, False


def test_transfers_take_the_ports_of_their_ends_and_those_of_one_card_share_it() -> None:
    ports = PortMap({0: 0, 1: 0, 2: 1, 3: 1}, {0: 7, 1: 7, 2: 8})
    assert ports.of(0, 2) == ports.of(1, 2) == (PortId(PortKind.CARD, 7, OUT), PortId(PortKind.CARD, 8, IN))
    assert ports.of(2, 1) == (PortId(PortKind.CARD, 8, OUT), PortId(PortKind.CARD, 7, IN)), "both ways at once"
    assert ports.of(0, 3)[1] == PortId(PortKind.NETWORK, 3, IN), "it has a card of its own"
    assert ports.of(0, 1) == (PortId(PortKind.MEMORY, 0, OUT), PortId(PortKind.MEMORY, 1, IN)), "no card"
    assert ports.of(3, 3) == (PortId(PortKind.HOST, 3, False),), "a host pool is at its worker"


def test_without_a_map_each_worker_has_ports_of_its_own() -> None:
    assert PortMap().of(0, 1) == (PortId(PortKind.NETWORK, 0, OUT), PortId(PortKind.NETWORK, 1, IN))
