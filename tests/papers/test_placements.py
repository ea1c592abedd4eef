"""MELL's figures on the fluid model: the requests that they are of, and that their numbers are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from jettison.report.results import RequestRecord, build_run
from papers import placements
from papers.figures import mell, mell_served
from papers.placements import SYSTEMS, Load

SLOW = Load("7B on RTX 4090", "Poisson 0.5/s")


@pytest.fixture(autouse=True)
def minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of arrivals; nothing of it is kept for others."""
    monkeypatch.setattr(placements, "DURATION_S", 60.0)
    kept = (placements.lives_of, placements.demand, placements.bound, placements._placed, placements.num_kept)
    for each in kept:
        each.cache_clear()
    yield  # type: ignore[misc]
    for each in kept:
        each.cache_clear()


def test_lives_are_what_the_preset_takes_for_them_and_fit_a_device() -> None:
    found = placements.lives_of(SLOW, 0)
    assert found is not None
    lives, num_cut = found
    capacity = SLOW.preset.instance.kv_tokens
    totals = [life.input_tokens + life.output_tokens for life in lives]
    assert 15 < len(lives) < 50 and max(totals) <= capacity
    assert num_cut == sum(total > capacity - placements.BLOCK_SIZE for total in totals)
    step_s = {round((life.end_s - life.first_s) / life.output_tokens, 6) for life in lives}
    assert len(step_s) == 1 and 0.01 < step_s.pop() < 0.1
    assert all(life.first_s > life.arrival_s for life in lives)


def test_lengths_are_half_of_either_set() -> None:
    inputs, outputs = placements.lengths_of(20_000, 0)
    means = [placements.published_lengths(name) for name in placements.LENGTHS]
    assert np.mean(outputs) == pytest.approx(10 * np.mean([m.outputs.mean for m in means]), rel=0.05)
    assert np.mean(inputs) == pytest.approx(10 * np.mean([m.inputs.mean for m in means]), rel=0.1)


def test_a_trace_that_is_not_to_be_had_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JETTISON_DATA", raising=False)
    azure = Load("7B on RTX 4090", "Azure")
    assert placements.lives_of(azure, 0) is None and placements.placed(azure, 0, SYSTEMS["mell"]) is None
    for part in (mell._devices(azure), mell._moves(azure), mell._batching(azure), mell._kept(azure)):
        assert {number for claim in part.claims for number in claim.numbers([])} == {None}


def test_the_rows_of_a_figure_agree_with_each_other() -> None:
    rows = {(c.metric, c.system, c.baseline): c.numbers([])[0] for c in mell._devices(SLOW).claims}
    ours, theirs = (rows["devices, time-mean", name, ""] for name in ("mell", "worst-fit"))
    assert ours is not None and theirs is not None
    change, least = rows["devices, mean", "mell", "worst-fit"], rows["devices, mean", "L2 bound", "worst-fit"]
    assert change == pytest.approx(100 * (ours / theirs - 1)) and least is not None and least <= change <= 0
    closed = rows["gap to the bound (L2, same sizes and reserve) closed", "mell", "worst-fit"]
    assert closed == pytest.approx(100 * change / least)


def test_a_cluster_that_is_large_enough_keeps_everybody_and_a_small_one_keeps_some() -> None:
    found = placements.lives_of(SLOW, 0)
    assert found is not None
    num = len(found[0])
    assert placements.num_kept(SLOW, 0, SYSTEMS["mell"], num) == num
    few = {name: placements.num_kept(SLOW, 0, SYSTEMS[name], 2) for name in ("mell", "worst-fit", "best-fit")}
    assert all(count is not None and 0 < count < num for count in few.values())


def test_what_served_runs_are_measured_by() -> None:
    records = [RequestRecord(i, 5.0 * i, 10, 4, "completed", output_tokens=4) for i in range(3)]
    plans = [{"t": 2.0, "kind": "packed", "needed": 3}, {"t": 6.0, "kind": "packed", "needed": 1}]
    events = {"packing_migrations": 5, "preemptions": 6, "log": plans}
    run = build_run("mell", records, config={"cluster": {"instances": 2}}, events=events, series={
        "kv_blocks_used": [(0.0, 10), (5.0, 5), (10.0, 0)], "kv_blocks_total": [(0.0, 40), (5.0, 40), (10.0, 40)],
        "kv_blocks_used/0": [(0.0, 8), (5.0, 5), (10.0, 0)], "kv_blocks_used/1": [(0.0, 2), (5.0, 0), (10.0, 0)],
    })  # fmt: skip
    assert mell_served.mean_devices(run) == 1.5 and mell_served.peak_devices(run) == 2.0
    assert mell_served.utilisation(run) == 15 / 60
    assert mell_served.wanted_devices(run) == (3 * 4 + 1 * 4) / 10
    assert mell_served.moves_per_s(run) == 0.5 and mell_served.computed_again(run) == 2.0
