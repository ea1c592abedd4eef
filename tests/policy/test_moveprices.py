"""Moves cost what the predictor says, and are refused where that is more than they save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import NOTHING, StepWork
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.links import PortId, PortKind
from jettison.policy.moveprices import (
    End,
    MovePrice,
    MovePrices,
    PricedMove,
    cost_device_s,
    price_move,
    saved_device_s,
)

KV, TOKENS = MigrationKind.KV, MigrationKind.TOKENS
OUT, IN = PortId(PortKind.NETWORK, 0, True), PortId(PortKind.NETWORK, 1, False)
COST = CostModel(4, 1e-9, 1e-9, 1e-6, 1e-4, 1e-4, 1e-5, 1e-7, 1e-5, 1e-6)
PREDICTOR = StepTimePredictor(4, COST)
PRICES = MovePrices(PREDICTOR, lambda link: 1e6, link_byte_s=1e-8)
FOUR, EIGHT = End(StepWork.decodes(4, 400)), End(StepWork.decodes(8, 800))
MOVE = PricedMove(FOUR, EIGHT, {OUT: 10**6, IN: 10**6}, 512, 1 / 8, 64)


def priced(kind: MigrationKind, move: PricedMove = MOVE, prices: MovePrices = PRICES) -> MovePrice:
    found = price_move(move, kind, prices)
    assert found is not None
    return found


def test_kv_costs_all_who_decode_at_its_ends_and_an_idle_link_costs_nothing() -> None:
    assert priced(KV) == pytest.approx((1 / 8, (3 + 8) * 1e-2, 0.0, 1.0))


def test_the_slowest_link_is_what_a_request_waits_for() -> None:
    rates = {OUT: 1e6, OUT._replace(number=2): 1e5, IN: 1e6}
    two = MOVE._replace(port_bytes={**dict.fromkeys(rates, 10**5), IN: 2 * 10**5})
    assert priced(KV, two, MovePrices(PREDICTOR, rates.get)) == pytest.approx((1 / 8, 0.0, 0.0, 1.0))


def test_transfers_that_share_a_port_end_later_by_what_they_share_it_for() -> None:
    """Two that share a link evenly: the shorter ends later by its own length, the longer by the other's."""
    both = {"short": 10**5, "long": 10**8}
    one_way = PRICES._replace(queued_at=lambda port: both if port == OUT else {})
    assert priced(KV, MOVE, one_way).waits_s == pytest.approx(0.1 + 1.0)
    both_ends = PRICES._replace(queued_at=lambda port: {"short": 10**5} if port == OUT else both)
    assert priced(KV, MOVE, both_ends).waits_s == pytest.approx(0.1 + 1.0), "each waits once"
    assert priced(TOKENS, MOVE, one_way).waits_s == 0.0


def test_a_decode_that_is_late_already_counts_by_how_late_it_is() -> None:
    step_s = PREDICTOR.predict_s(EIGHT.decodes)
    for kind in (KV, TOKENS):
        in_time, late = (
            priced(kind, MOVE._replace(source=End(NOTHING)), PRICES._replace(tpot_s=tpot_s))
            for tpot_s in (2 * step_s, step_s / 3)
        )
        assert late.slowed_s == pytest.approx(3 * in_time.slowed_s) and late.stall_s == in_time.stall_s


def test_tokens_cost_those_who_decode_at_the_destination() -> None:
    price = priced(TOKENS)
    step = EIGHT.decodes
    chunk_s = PREDICTOR.predict_s(step.with_prompt(64, 256)) - PREDICTOR.predict_s(step)
    assert price.waits_s == 0.0 and price.stall_s > 0.0
    assert price.slowed_s == pytest.approx(8 * (8 * chunk_s + price.stall_s))
    assert priced(TOKENS, MOVE._replace(destination=End(NOTHING))).slowed_s == 0.0


def test_what_is_not_known_has_no_price_and_is_not_refused() -> None:
    assert price_move(MOVE, KV, PRICES._replace(port_bytes_per_s=lambda port: None)) is None
    assert price_move(MOVE, TOKENS, PRICES._replace(predictor=StepTimePredictor(4))) is None

def test_costs_are_shared_by_the_requests_of_a_device_and_savings_begin_when_it_is_empty() -> None:
    price = MovePrice(1.0, 7.0, 4.0, 2.0)
    assert cost_device_s([price], 4) == pytest.approx(3.0)
    assert cost_device_s([price, price], 4) == pytest.approx(6.0)
    assert saved_device_s([price], 10.0, 1.0) == 8.0 and saved_device_s([price, price], 10.0, 0.5) == 3.0
    assert saved_device_s([price], 1.0, 1.0) == 0.0, "the requests end sooner than they have moved"


@given(
    kind=st.sampled_from(MigrationKind), num_bytes=st.integers(1, 10**9), tokens=st.integers(1, 4096),
    share=st.floats(0.0, 1.0), step_tokens=st.integers(1, 512), more=st.integers(1, 30),
)
def test_prices_grow_with_the_move_and_with_those_beside_it(
    kind: MigrationKind, num_bytes: int, tokens: int, share: float, step_tokens: int, more: int
) -> None:
    move = PricedMove(FOUR, EIGHT, {OUT: num_bytes, IN: num_bytes}, tokens, share, step_tokens)
    price = priced(kind, move)
    assert min(price) >= 0.0
    larger = priced(kind, move._replace(port_bytes={OUT: num_bytes + more, IN: num_bytes + more}))
    assert all(a <= b for a, b in zip(price, larger, strict=True))
    crowd = StepWork.decodes(8 + more, 800)
    assert priced(kind, move._replace(destination=End(crowd))).slowed_s >= price.slowed_s * (1 - 1e-6)
