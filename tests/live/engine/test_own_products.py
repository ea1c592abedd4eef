"""Products that workers compute themselves: known by worker, and told where workers differ."""

from __future__ import annotations

import logging

from jettison.live.engine.own_products import OwnProducts
from jettison.live.wire import messages as m

WIDE, NARROW = "1024 x 1024 in bfloat16", "64 x 1024 in bfloat16"


def ready(worker: int, *products: str) -> m.WorkerReady:
    return m.WorkerReady(worker, 10 + worker, 5, 0, "cuda-invariant", {}, None, own_products=products)


def test_workers_that_agree_are_no_matter(caplog) -> None:
    own = OwnProducts()
    assert own.all == own.of_some == ()
    with caplog.at_level(logging.WARNING):
        own.note([ready(0, WIDE, NARROW), ready(1, NARROW, WIDE)])
    assert own.all == (WIDE, NARROW) and own.of_some == () and not caplog.records


def test_workers_that_differ_are_named_once_and_until_they_agree(caplog) -> None:
    own = OwnProducts()
    own.note([ready(0, WIDE), ready(1, WIDE), ready(2, WIDE, NARROW)])
    assert own.all == (WIDE, NARROW) and own.of_some == (NARROW,)
    own.note([ready(1, WIDE)])
    (record,) = caplog.records
    assert f"product {NARROW} is computed by Triton on workers [2] and by cuBLAS on workers [0, 1]" in record.message
    own.note([ready(2, WIDE)])
    assert own.all == (WIDE,) and own.of_some == () and len(caplog.records) == 1, "a new life has found another answer"
