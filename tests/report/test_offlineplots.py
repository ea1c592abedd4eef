"""Offline work on the HTML page: a section with pictures and both classes beside each other, or nothing of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harvested_runs import harvested
from logged_runs import run as made_run

from jettison.policy.standing import Standstill
from jettison.report.classes import class_figure
from jettison.report.html import render_html
from jettison.report.offlineplots import draw_harvest, draw_latencies, draw_offline_requests
from jettison.report.offlinework import class_rows, given_up_rows, objectives_told
from jettison.report.plots import NARROW_IN, all_shown, to_svg
from jettison.report.results import RunResult


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return [harvested(mode, mode) for mode in ("none", "priority", "harvest")]


def texts(svg: bytes) -> str:
    return " ".join(re.findall(r">([^<>]+)</text>", svg.decode()))


def test_the_page_has_a_section_where_there_is_offline_work(runs: list[RunResult]) -> None:
    page = render_html(runs)
    section = page[page.index("<h2>Offline work</h2>") :]
    section = section[: section.index("</section>")]
    assert section.count("<figure>") == 3
    for said in ("Both classes", "online: requests that kept both, in every gap", "harvested", "steps given up",
                 f"stood still: {Standstill.PAUSED}", "Objectives: TTFT 20 ms, gap 6 ms."):  # fmt: skip
        assert said in section
    assert "Offline work" not in render_html([harvested("alone", pool=None), made_run()])


def test_rows_say_what_the_runs_counted(runs: list[RunResult]) -> None:
    rows = {row[0]: row[1:] for row in class_rows(runs)}
    assert rows["offline: requests completed"] == ["0", "30", "30"]
    per_s = [class_figure(run, "offline", "tokens", "total_per_s") for run in runs]
    assert rows["offline: first-time tokens/s, harvested"] == [f"{value:,.4g}" for value in per_s]
    given_up, never = given_up_rows(runs)
    found = {row[0]: row[1:] for row in given_up}
    harvest = runs[2].events
    label = "steps given up for an arrival / their tokens"
    assert found[label] == ["0 / 0", "0 / 0", f"{harvest['steps_abandoned']} / {harvest['tokens_abandoned']}"]
    assert found["pauses, as memory kept online requests out"][2] == f"{harvest['offline_pauses']}"
    assert not set(never) & found.keys()
    assert objectives_told([made_run()]) == []


def test_pictures_show_each_run_and_what_stopped_it(runs: list[RunResult]) -> None:
    shown = all_shown(runs)
    tokens = draw_harvest(shown, width_in=NARROW_IN)
    requests, latencies = draw_offline_requests(shown), draw_latencies(shown)
    assert tokens is not None and requests is not None and latencies is not None
    assert [axis.get_title("left") for axis in tokens.axes] == ["none", "priority", "harvest"]
    assert [axis.get_title("left") for axis in requests.axes] == ["priority", "harvest"], "the other had none"
    for said in ("online", "offline", "stands still", "step given up"):
        assert said in texts(to_svg(tokens))
    assert texts(to_svg(latencies)).count("objective") == 2
    assert to_svg(tokens) == to_svg(tokens)


def test_a_pause_is_hatched_to_its_end_or_the_runs(runs: list[RunResult]) -> None:
    runs[2].events["log"] += [{"t": 2.0, "kind": "offline_paused", "group": 0}]
    figure = draw_harvest(all_shown(runs[2:]))
    assert figure is not None and "paused" in texts(to_svg(figure))


def test_runs_without_counters_over_time_draw_nothing(runs: list[RunResult]) -> None:
    bare = made_run()
    assert draw_harvest(all_shown([bare])) is None and draw_offline_requests(all_shown([bare])) is None
    assert draw_harvest([]) is None and draw_latencies([]) is None
