"""An epoch's moves are divided between KV and tokens: never over a bound, nothing twice, nobody starves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.links import PortId, PortKind
from jettison.policy.movekinds import (
    MAX_FINAL_BLOCKS,
    Choice,
    Division,
    Fit,
    LinkBin,
    Move,
    MoveParams,
    divide_moves,
    final_blocks,
    rest_as_kv,
)

KV, TOKENS = MigrationKind.KV, MigrationKind.TOKENS
A, B = PortId(PortKind.NETWORK, 0, True), PortId(PortKind.CARD, 2, True)
"""Of the ways to the destination 1."""


def move(name: str, num_bytes: int = 100, num_tokens: int = 10, **fields: object) -> Move:
    made = Move(name, 1, 10, {A: num_bytes}, num_tokens)
    return made._replace(**fields)  # type: ignore[arg-type]


def divide(moves: list[Move], link: LinkBin, destination: LinkBin, fit: Fit = Fit.FIRST) -> Division:
    return divide_moves(moves, {A: link, B: link}, {1: destination}, MoveParams(fit=fit))


def kinds(division: Division) -> dict[str, MigrationKind]:
    return {choice.request_id: choice.kind for choice in division.chosen}


def test_first_fit_fills_ports_first_and_what_fits_neither_waits() -> None:
    division = divide([move(n) for n in "abcde"], LinkBin(200), LinkBin(20))
    assert kinds(division) == {"a": KV, "b": KV, "c": TOKENS, "d": TOKENS}
    assert division.waiting == ("e",)


def test_what_is_on_a_link_or_is_computed_already_is_room_less() -> None:
    division = divide([move(n) for n in "abc"], LinkBin(200, queued=100), LinkBin(20, queued=10))
    assert kinds(division) == {"a": KV, "b": TOKENS} and division.waiting == ("c",)


def test_best_fit_takes_the_bins_that_it_fills_up_most() -> None:
    assert kinds(divide([move("a")], LinkBin(1000), LinkBin(11), Fit.BEST)) == {"a": TOKENS}
    assert kinds(divide([move("a")], LinkBin(110), LinkBin(100), Fit.BEST)) == {"a": KV}


def test_soonest_takes_the_kind_in_which_it_is_done_first() -> None:
    assert kinds(divide([move("a")], LinkBin(1000), LinkBin(11), Fit.SOONEST)) == {"a": KV}
    assert kinds(divide([move("a")], LinkBin(110), LinkBin(100), Fit.SOONEST)) == {"a": TOKENS}


def test_soonest_waits_for_a_link_rather_than_be_computed_for_ever() -> None:
    """Half an epoch each over the link, fifty at the destination: the third waits an epoch."""
    moves = [move(n, 100, 1000) for n in "abc"]
    division = divide(moves, LinkBin(200), LinkBin(20), Fit.SOONEST)
    assert kinds(division) == {"a": KV, "b": KV} and division.waiting == ("c",)
    assert kinds(divide(moves, LinkBin(200), LinkBin(20), Fit.FIRST))["c"] is TOKENS


def test_soonest_divides_as_the_two_are_fast() -> None:
    """Five epochs a move over the link, five at the destination: both work, one after the other."""
    division = divide([move(n, 500, 50) for n in "abcd"], LinkBin(100), LinkBin(10), Fit.SOONEST)
    assert kinds(division) == {"a": KV, "b": TOKENS} and division.waiting == ("c", "d")


def test_soonest_never_lets_a_link_run_dry_between_two_epochs() -> None:
    """The second is on its way when the first, which does not fill the epoch, has arrived."""
    moves = [move(n, 60, 1000) for n in "abc"]
    assert kinds(divide(moves, LinkBin(100), LinkBin(10), Fit.SOONEST)) == {"a": KV, "b": KV}
    assert kinds(divide(moves, LinkBin(100), LinkBin(0), Fit.FIRST)) == {"a": KV}


def test_what_is_larger_than_a_bin_goes_alone() -> None:
    large = [move(n, 1000, 1000) for n in "abc"]
    assert kinds(divide(large, LinkBin(100), LinkBin(0))) == {"a": KV}
    assert not divide(large, LinkBin(100, queued=100), LinkBin(0)).chosen, "nor while a whole epoch is left"
    assert kinds(divide(large, LinkBin(100, queued=99), LinkBin(0))) == {"a": KV}
    assert not divide([move("d")], LinkBin(100, queued=900), LinkBin(0)).chosen


def test_a_link_of_which_nothing_is_known_takes_one_move() -> None:
    assert kinds(divide([move(n) for n in "ab"], LinkBin(None), LinkBin(0), Fit.SOONEST)) == {"a": KV}
    assert not divide([move("a")], LinkBin(None, queued=1), LinkBin(0)).chosen


def test_who_has_waited_goes_first_and_keeps_its_place() -> None:
    moves = [move("small", 10), move("large", 100, num_waited=2)]
    division = divide(moves, LinkBin(105, queued=6), LinkBin(0))
    assert not division.chosen and division.waiting == ("large", "small")
    fresh = [moves[0], moves[1]._replace(num_waited=0)]
    assert kinds(divide(fresh, LinkBin(105, queued=6), LinkBin(0))) == {"small": KV}


def test_a_request_that_grows_as_fast_as_a_bin_takes_it_does_not_go_there() -> None:
    assert kinds(divide([move("a", growth=1.0)], LinkBin(100), LinkBin(100))) == {"a": TOKENS}
    assert not divide([move("a", growth=1.0)], LinkBin(100), LinkBin(10)).chosen
    # half of what the link takes: twice the time, so twice the room
    division = divide([move(n, growth=0.5) for n in "ab"], LinkBin(100), LinkBin(0))
    assert kinds(division) == {"a": KV}


def test_kinds_that_are_ruled_out_are_not_taken() -> None:
    assert kinds(divide([move("a", may_kv=False)], LinkBin(1000), LinkBin(100))) == {"a": TOKENS}
    assert divide([move("a", may_kv=False, may_tokens=False)], LinkBin(1000), LinkBin(100)).waiting == ("a",)


@pytest.mark.parametrize(("per_s", "most"), [(1.0, 0), (55.0, 1), (550.0, 11), (1e9, 16), (None, 16)])
def test_the_last_round_is_as_long_as_the_link_allows(per_s: float | None, most: int) -> None:
    """Ten bytes a block, 0.2 s."""
    assert final_blocks(move("a"), {A: LinkBin(None, per_s=per_s)}, MoveParams()) == most
    division = divide([move("a")], LinkBin(1000, per_s=per_s), LinkBin(100))
    assert division.chosen == (Choice("a", KV, most) if most else Choice("a", TOKENS, MAX_FINAL_BLOCKS),)


def test_the_last_round_is_as_long_as_the_slowest_link_allows() -> None:
    wide = move("a", port_bytes={A: 100, B: 50})
    assert final_blocks(wide, {A: LinkBin(None, per_s=250.0), B: LinkBin(None, per_s=1e9)}, MoveParams()) == 5


# --- on the way -------------------------------------------------------------------------------------------------


def rest(made: Move, link: LinkBin, destination: LinkBin) -> int:
    return rest_as_kv(made, {A: link, B: link}, {1: destination}, MoveParams())


def test_a_rest_goes_as_kv_where_that_is_much_sooner() -> None:
    """One epoch over the link; so many at the destination."""
    assert rest(move("a", 100, 10), LinkBin(100), LinkBin(10)) == 0
    assert rest(move("a", 100, 14), LinkBin(100), LinkBin(10)) == 0, "not sooner enough"
    assert rest(move("a", 100, 16), LinkBin(100), LinkBin(10)) == MAX_FINAL_BLOCKS
    queued = LinkBin(10, queued=20)
    assert rest(move("a", 100, 10), LinkBin(100), queued) == MAX_FINAL_BLOCKS, "others are computed before it"
    assert rest(move("a", 100, 90), LinkBin(100, queued=100), LinkBin(10)) == 0, "the link is not free"
    assert rest(move("a", 100, 90), LinkBin(None), LinkBin(10)) == 0, "nobody knows what the link carries"
    assert rest(move("a", 100, 90, may_kv=False), LinkBin(100), LinkBin(10)) == 0


def test_a_rest_that_grows_as_fast_as_it_is_computed_goes_as_kv() -> None:
    assert rest(move("a", 100, 20, growth=0.5), LinkBin(100), LinkBin(10)) == MAX_FINAL_BLOCKS
    assert rest(move("a", 100, 20, growth=1.0), LinkBin(100), LinkBin(10)) == 0, "faster than either"


# --- properties -------------------------------------------------------------------------------------------------

PORTS = [PortId(PortKind.NETWORK, 0, True), PortId(PortKind.CARD, 1, True), PortId(PortKind.CARD, 1, False)]
bounds = st.integers(10, 60)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Move], dict, dict, MoveParams]:
    rates = st.none() | st.floats(1.0, 1e3)
    ports = {port: LinkBin(draw(bounds), draw(st.integers(0, 90)), draw(rates)) for port in PORTS}
    destinations = {group: LinkBin(draw(bounds), draw(st.integers(0, 90))) for group in (2, 3)}
    moves = [
        Move(
            f"r{i}", draw(st.sampled_from((2, 3))), draw(st.integers(1, 20)),
            draw(st.dictionaries(st.sampled_from(PORTS), st.integers(1, 90), min_size=1)), draw(st.integers(1, 90)),
            draw(st.sampled_from((0.0, 0.1))), draw(st.integers(0, 3)),
        )
        for i in range(draw(st.integers(0, 9)))
    ]
    return moves, ports, destinations, MoveParams(fit=draw(st.sampled_from(Fit)))


def needs_of(choice: Choice, moves: list[Move], bins: Mapping) -> dict:
    """Recomputed here: what it takes of which bins."""
    made = next(m for m in moves if m.request_id == choice.request_id)
    sizes = made.port_bytes if choice.kind is KV else {made.destination: made.num_tokens}
    return {name: size / (1 - made.growth * size / bins[name].bound) for name, size in sizes.items()}


@given(cluster=clusters())
def test_no_bin_is_overrun_and_nothing_is_divided_twice(cluster: tuple) -> None:
    """Beyond its bound, that is: the last one that ``soonest`` begins may reach into the next epoch."""
    moves, ports, destinations, params = cluster
    division = divide_moves(*cluster)
    bins = ports | destinations
    assert sorted([*(c.request_id for c in division.chosen), *division.waiting]) == sorted(m.request_id for m in moves)
    given_to: dict = {name: [] for name in bins}
    for choice in division.chosen:
        assert 0 < choice.num_final_blocks <= MAX_FINAL_BLOCKS
        for name, need in needs_of(choice, moves, bins).items():
            given_to[name].append(need)
    for name, (bound, queued, _) in bins.items():
        fitting = [need for need in given_to[name] if need <= bound]
        large = [need for need in given_to[name] if need > bound]
        if given_to[name] and params.fit is Fit.SOONEST:
            assert queued + sum(given_to[name][:-1]) < bound
        elif given_to[name]:
            assert queued + sum(fitting) <= bound + 1e-9 and len(large) <= 1 and (not large or queued < bound)
    assert divide_moves(*cluster) == division


@given(cluster=clusters())
@settings(max_examples=40)
def test_all_that_can_arrive_begins_at_last(cluster: tuple) -> None:
    moves, ports, destinations, params = cluster
    bins = {name: found._replace(queued=float(found.queued)) for name, found in (ports | destinations).items()}
    left = {m.request_id: m for m in moves}
    for epoch in range(200):
        if not left:
            break
        split = {k: v for k, v in bins.items() if isinstance(k, tuple)}, {k: bins[k] for k in (2, 3)}
        # small ones come all the time, and must not keep the others out
        young = [Move(f"n{epoch}", 2, 1, {PORTS[0]: 1}, 1)]
        division = divide_moves([*left.values(), *young], *split, params)
        everyone = [*left.values(), *young]
        for choice in division.chosen:
            for name, need in needs_of(choice, everyone, bins).items():
                bins[name] = bins[name]._replace(queued=bins[name].queued + need)
            left.pop(choice.request_id, None)
        left = {n: m._replace(num_waited=m.num_waited + 1) for n, m in left.items()}
        bins = {n: b._replace(queued=max(0.0, b.queued - b.bound)) for n, b in bins.items()}
    for stuck in left.values():
        sizes = [*((bins[k].bound, s) for k, s in stuck.port_bytes.items())]
        assert any(stuck.growth * s >= b for b, s in sizes) or not final_blocks(stuck, split[0], params)
        assert stuck.growth * stuck.num_tokens >= bins[stuck.destination].bound


@given(cluster=clusters())
def test_what_would_begin_as_tokens_now_does_not_change_to_kv(cluster: tuple) -> None:
    """The two questions agree, so that no move changes over as soon as it has begun."""
    moves, ports, destinations, params = cluster
    for made in moves:
        division = divide_moves([made], ports, destinations, params)
        if params.fit is Fit.SOONEST and division.chosen and division.chosen[0].kind is TOKENS:
            assert not rest_as_kv(made, ports, destinations, params)
