"""The smallest cluster: the search against trying everything, and `jettison plan` on a little one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from specs import spec

from jettison.errors import ConfigError
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import cases_of
from jettison.simulate.sizing import Found, Objective, search, size_all
from jettison.simulate.sizing_command import size_command


def found_by(holds: list[bool]) -> Found:
    """Run a search; ``holds[n - 1]`` answers for n."""
    running = search(len(holds))
    asked = next(running)
    while True:
        assert asked and all(1 <= n <= len(holds) for n in asked)
        try:
            asked = running.send({n: holds[n - 1] for n in asked})
        except StopIteration as end:
            found: Found = end.value
            return found


@given(smallest=st.integers(1, 70), largest=st.integers(1, 70))
def test_where_more_never_holds_less_the_search_finds_what_trying_all_finds(smallest: int, largest: int) -> None:
    found = found_by([n >= smallest for n in range(1, largest + 1)])
    assert found.smallest == (smallest if smallest <= largest else None)
    assert not found.exceptions
    assert len(found.held) <= 2 * largest.bit_length() + 3


@given(holds=st.lists(st.booleans(), min_size=1, max_size=40))
def test_whatever_holds_what_is_found_was_tried_and_its_neighbours_below_fail(holds: list[bool]) -> None:
    found = found_by(holds)
    assert all(holds[n - 1] == answer for n, answer in found.held.items())
    if found.smallest is None:
        assert not holds[-1]
        return
    assert holds[found.smallest - 1]
    assert not any(holds[n - 1] for n in range(max(1, found.smallest - 2), found.smallest))
    assert found.exceptions == [n for n in found.held if n > found.smallest and not holds[n - 1]]


def test_sizing_agrees_with_every_number_of_instances_tried() -> None:
    raw = spec(seeds=2)
    objective = Objective(ttft_p99_s=0.25)
    sizings = size_all(cases_of(raw, "file"), objective, 6, lambda cases: run_cases(cases, num_processes=1))
    for index, sizing in enumerate(sizings):
        smallest = None
        for number in range(1, 7):
            tried = cases_of({**raw, "cluster": {**raw["cluster"], "instances": number}}, "file")
            if objective.holds(run_cases([c for c in tried if c.variant == sizing.variant], num_processes=1)):
                smallest = number
                break
        assert sizing.found.smallest == smallest, sizing.variant
        assert sizing.variant == ("recompute", "drop")[index]
    recompute, drop = sizings
    assert drop.best.num_instances <= recompute.best.num_instances


def test_the_command_says_what_it_found_and_what_it_costs(tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    out = tmp_path / "plan.json"
    size_command(
        spec(), "little", Path(), slo_ttft_p99_s=0.5, max_instances=6, price_per_gpu_hour=2.0, json_out=out,
        num_processes=1, console=console,
    )
    text = console.export_text()
    assert "smallest cluster with P99 TTFT 0.5 s" in text and "cost a day" in text
    document = json.loads(out.read_text())
    assert [row["variant"] for row in document["rows"]] == ["recompute", "drop"]
    for row in document["rows"]:
        assert row["cost_per_day"] == pytest.approx(row["instances"] * 48.0)
        assert {trial["instances"]: trial["holds"] for trial in row["trials"]}[row["instances"]]


def test_what_no_cluster_holds_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^P99 TTFT 1e-06 s is not reached with 2 instances: \w+ comes to P99 TTFT"):
        size_command(spec(), "little", Path(), slo_ttft_p99_s=1e-6, max_instances=2, num_processes=1)


def test_an_objective_is_needed() -> None:
    with pytest.raises(ConfigError, match="an objective is missing"):
        size_command(spec(), "little", Path())
