"""The choice between sending KV, computing it again and attending to it where it lies."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jettison.memory.kvtransfers import ExchangeMode, by_layers, split_layers
from jettison.policy.exchange import ExchangeCosts, ExchangeQueue, StalledRequest, choose_exchange
from jettison.types import LayerRange

LINK = (0, 1)
FIXED = [ExchangeMode.TRANSFER, ExchangeMode.RECOMPUTE, ExchangeMode.LIVE]


def request(num_bytes: int = 1000, num_tokens: int = 10, can_run_live: bool = True) -> StalledRequest:
    return StalledRequest(num_tokens, {LINK: num_bytes}, {LINK: num_bytes // 10}, 4, can_run_live)


def costs(rate: float | None = 1000.0, per_token: float | None = 0.1, step: float | None = 0.05) -> ExchangeCosts:
    return ExchangeCosts(
        lambda link: rate, lambda n: None if per_token is None else n * per_token, step, round_trip_s=0.01
    )


def choose(
    asked: StalledRequest, known: ExchangeCosts, ahead: int = 0, tokens_ahead: int = 0, num_others: int = 0
) -> ExchangeMode | None:
    queue = ExchangeQueue({LINK: ahead}, tokens_ahead, num_others)
    return choose_exchange(asked, queue, known, ExchangeMode.AUTO)


@given(st.sampled_from(FIXED), st.integers(0, 10**9), st.sampled_from([None, 1.0, 1e9]))
def test_a_fixed_mode_is_obeyed(mode: ExchangeMode, num_bytes: int, rate: float | None) -> None:
    queue = ExchangeQueue({}, 0)
    assert choose_exchange(request(num_bytes), queue, costs(rate), mode) is mode
    without = choose_exchange(request(num_bytes, can_run_live=False), queue, costs(rate), mode)
    assert without is (ExchangeMode.TRANSFER if mode is ExchangeMode.LIVE else mode)


def test_the_first_transfer_measures_the_link_and_the_others_wait_for_it() -> None:
    assert choose(request(), costs(rate=None)) is ExchangeMode.TRANSFER
    assert choose(request(), costs(rate=None), ahead=500) is None


def test_each_direction_of_a_link_is_measured_while_the_other_is_busy() -> None:
    back = (1, 0)
    known = ExchangeCosts(lambda link: 1000.0 if link == LINK else None, lambda num_tokens: num_tokens * 0.1, 0.05)
    asked = StalledRequest(10, {back: 1000}, {back: 100}, 4, True)

    def choose_behind(ahead: dict[tuple[int, int], int]) -> ExchangeMode | None:
        return choose_exchange(asked, ExchangeQueue(ahead, 0), known, ExchangeMode.AUTO)

    assert choose_behind({LINK: 10**9, back: 0}) is ExchangeMode.TRANSFER
    assert choose_behind({LINK: 10**9, back: 1}) is None


def test_a_fast_link_transfers_and_a_slow_one_does_not() -> None:
    assert choose(request(), costs(rate=1e6)) is ExchangeMode.TRANSFER
    assert choose(request(), costs(rate=100.0)) is ExchangeMode.RECOMPUTE
    assert choose(request(), costs(rate=100.0, per_token=10.0)) is ExchangeMode.LIVE
    assert choose(request(can_run_live=False), costs(rate=100.0, per_token=10.0)) is ExchangeMode.TRANSFER


def test_what_is_computed_again_holds_everybody_up() -> None:
    slow = costs(rate=100.0)  # 10 s to send, 1 s to compute
    assert choose(request(can_run_live=False), slow, num_others=2) is ExchangeMode.RECOMPUTE
    assert choose(request(can_run_live=False), slow, num_others=3) is ExchangeMode.TRANSFER


@given(
    num_bytes=st.integers(1, 10**8), num_tokens=st.integers(1, 10**4), ahead=st.integers(0, 10**8),
    rate=st.floats(1e3, 1e9), per_token=st.floats(1e-5, 1.0), step=st.floats(1e-3, 1.0), more=st.integers(1, 10**8),
)
def test_more_bytes_ahead_never_make_a_transfer_more_attractive(
    num_bytes: int, num_tokens: int, ahead: int, rate: float, per_token: float, step: float, more: int
) -> None:
    known = costs(rate, per_token, step)
    asked = request(num_bytes, num_tokens)
    if choose(asked, known, ahead) is not ExchangeMode.TRANSFER:
        assert choose(asked, known, ahead + more) is not ExchangeMode.TRANSFER


@given(num_tokens=st.integers(1, 1000), before=st.integers(0, 1000), more=st.integers(1, 1000))
def test_a_longer_queue_of_prefills_never_makes_recomputing_more_attractive(
    num_tokens: int, before: int, more: int
) -> None:
    asked = request(5000, num_tokens)
    if choose(asked, costs(), 0, before) is not ExchangeMode.RECOMPUTE:
        assert choose(asked, costs(), 0, before + more) is not ExchangeMode.RECOMPUTE


@given(st.integers(0, 50), st.integers(0, 40), st.integers(1, 12))
def test_parts_of_layers_are_the_layers(lo: int, length: int, max_parts: int) -> None:
    parts = split_layers(LayerRange(lo, lo + length), max_parts)
    assert [layer for part in parts for layer in part.layers()] == list(range(lo, lo + length))
    assert len(parts) == min(max_parts, length)
    assert max((len(p) for p in parts), default=0) - min((len(p) for p in parts), default=0) <= 1


RANGES = st.tuples(st.integers(0, 8), st.integers(0, 6)).map(lambda r: LayerRange(r[0], r[0] + r[1]))


@given(st.lists(st.tuples(RANGES, st.frozensets(st.integers(0, 9)))))
def test_overlapping_ranges_become_disjoint_ones_with_the_same_blocks(
    sets: list[tuple[LayerRange, frozenset[int]]],
) -> None:
    wanted = {(layer, block) for layers, ids in sets for layer in layers.layers() for block in ids}
    merged = by_layers(sets)
    assert {(layer, block) for layers, ids in merged for layer in layers.layers() for block in ids} == wanted
    assert all(a[0].hi <= b[0].lo for a, b in itertools.pairwise(merged))
    assert all(list(ids) == sorted(ids) for _, ids in merged)
