"""The bill of a run: what it had, what its requests would have needed, and what cannot be billed."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from logged_runs import run

from jettison.errors import UserError
from jettison.report.bill import Bill, BillOptions, bill_document, bill_of, print_bill, rows_of
from jettison.report.plots import draw_bill, to_svg
from jettison.report.results import RunResult

CONFIG = {"cluster": {"instances": 4, "block_size": 2}, "fairness": {"kv_capacity_tokens": 80.0}}


def billed(**parts: Any) -> Bill:
    """Twenty requests, one a second, of 12 tokens and 1.1 s each, on four instances of 20 tokens."""
    found = run(log=parts.pop("log", []), config=CONFIG)
    found.series = parts.pop("series", {})
    return bill_of(found, BillOptions(**parts))


def test_what_the_run_paid_for_is_held_against_what_its_requests_need() -> None:
    bill = billed()
    rows = {row["what"]: row for row in rows_of(bill)}
    assert rows["run, awake"]["mean_devices"] == 4.0 and rows["run, awake"]["saved_device_hours"] == 0.0
    # Two of them are there at a time, and no device holds two.
    assert rows["mell"]["peak_devices"] == rows["least"]["peak_devices"] == 2
    hours = bill.duration_s * 4 / 3600
    assert rows["mell"]["saved_device_hours"] == pytest.approx(hours - rows["mell"]["device_hours"])
    assert bill.is_exact.all()
    assert rows["volume bound"]["mean_devices"] <= rows["least"]["mean_devices"] <= rows["mell"]["mean_devices"]


def test_who_sleeps_is_not_paid_for_and_who_holds_nothing_is_told() -> None:
    log = [
        {"t": 5.0, "kind": "asleep", "worker": 3}, {"t": 15.0, "kind": "waking", "worker": 3},
        {"t": 17.0, "kind": "woken", "worker": 3},
    ]  # one that is being woken has its memory already
    series = {
        "kv_blocks_used/0": [(0.0, 3), (10.0, 0)], "group_size/0": [(0.0, 2), (10.0, 2)],
        "kv_blocks_used/1": [(0.0, 0), (10.0, 1)],
    }  # fmt: skip
    bill = billed(log=log, series=series)
    assert bill.awake is not None and bill.holding is not None
    assert bill.awake.device_s(bill.duration_s) == bill.duration_s * 4 - 10.0
    assert bill.holding.device_s(bill.duration_s) == 10.0 * 2 + (bill.duration_s - 10.0)


def test_an_instance_without_a_process_is_not_paid_for() -> None:
    log = [
        {"t": 1.0, "kind": "instance_asked", "worker": 4}, {"t": 3.0, "kind": "worker_joined", "worker": 4},
        {"t": 4.0, "kind": "woken", "worker": 4}, {"t": 5.0, "kind": "worker_joined", "worker": 0},
        {"t": 13.0, "kind": "asleep", "worker": 4}, {"t": 15.0, "kind": "instance_released", "worker": 4},
    ]  # worker 0 has died and come back: it counts all along
    bill = billed(log=log)
    assert bill.awake is not None and bill.awake.device_s(bill.duration_s) == bill.duration_s * 4 + 10.0


def test_the_optimum_is_found_where_no_placement_meets_the_bound() -> None:
    found = run(log=[], config=CONFIG, num_requests=5)
    for row in found.requests_detail or []:
        row |= {"scheduled_s": 0.0, "ttft_s": 0.1, "e2e_s": 0.2, "input_tokens": 16, "output_tokens": 0}
    bill = bill_of(found, BillOptions(capacity_tokens=40))
    # 40 of 20 blocks each: two by volume and by Martello and Toth, but no device holds three.
    assert bill.demand.volume().tolist() == bill.demand.l2().tolist() == [2]
    assert bill.least.tolist() == [3] and bill.is_exact.all()


def test_epoch_and_capacity_are_knobs() -> None:
    coarse = billed(epoch_s=5.0, policies=("mell",))
    assert list(coarse.placed) == ["mell"] and len(coarse.demand.batches) == 5
    assert billed(capacity_tokens=1000).placed["mell"].peak_devices == 1


def test_all_of_it_is_printed_written_and_drawn() -> None:
    bill = billed()
    console = Console(file=io.StringIO(), width=200)
    print_bill(bill, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "load-balance" in text and "20 requests" in text and "exact in 100%" in text
    document = bill_document(bill)
    assert len(document["devices"]["mell"]) == len(document["devices"]["least"]) == len(bill.demand.batches)
    assert document["capacity_tokens"] == 20 and document["exact_share"] == 1.0
    assert b"worst-fit" in to_svg(draw_bill(bill))


def without(found: RunResult, key: str) -> RunResult:
    for row in found.requests_detail or []:
        row[key] = None
    return found


@pytest.mark.parametrize(
    ("found", "options", "match"),
    [
        (run(detail=False, config=CONFIG), {}, "kept no requests"),
        (without(run(config=CONFIG), "input_tokens"), {}, "how long its requests were"),
        (without(run(config=CONFIG), "ttft_s"), {}, "no request was answered"),
        (run(), {}, "give --capacity-tokens"),
        (run(config=CONFIG), {"capacity_tokens": 1}, "holds no block"),
        (run(config=CONFIG), {"policies": ("mel",)}, "unknown packing 'mel'"),
    ],
)
def test_what_cannot_be_billed_is_one_line(found: RunResult, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        bill_of(found, BillOptions(**options))
