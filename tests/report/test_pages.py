from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from jettison.report import plots
from jettison.report.brief import CONDITIONS_LINES, brief_rows, missed_aim, print_brief
from jettison.report.fairness import FairnessHeader
from jettison.report.html import MAX_DETAILED_RUNS, PageTable, render_html, write_html
from jettison.report.memory import worker_names
from jettison.report.results import RequestRecord, RunResult, build_run
from jettison.report.summary import (
    METRICS,
    comparison_headers,
    comparison_rows,
    format_count,
    format_value,
    print_summary,
    ratio,
    zero_counts,
)

EVIL = "<script>alert('x')</script>"


def make_run(name: str, ttft_s: float, *, drops: bool = False) -> RunResult:
    records = []
    for index in range(20):
        at_s = index * 0.5
        times = (at_s, at_s + ttft_s, at_s + ttft_s + 0.9)
        records.append(RequestRecord(index, at_s, 10, 10, "completed", *times, 10, [0.1] * 9))
    records.append(RequestRecord(20, 10.0, 10, 10, "rejected", 10.0, None, 10.1, error="HTTP 429: full"))
    series = {"queue": [(0.0, 0.0), (5.0, 3.0)], "running": [(0.0, 1.0)], "kv_usage": [(0.0, 0.4), (5.0, 0.9)]}
    if drops:
        for worker in ("0", "1"):
            series[f"worker_memory_bytes/parameters/{worker}"] = [(0.0, 8e7), (4.0, 4e7)]
            series[f"worker_memory_bytes/kv/{worker}"] = [(0.0, 2e7), (4.0, 6e7)]
    header = FairnessHeader(500.0, 1500.0, "by hand", 0.7, 1000.0, 2170.0, arrivals=("made up",))
    events = {"preemptions": 1234 if not drops else 0}
    if drops:
        log = [{"t": 4.0, "kind": "drop", "groups": [0, 1]}, {"t": 8.0, "kind": "restore_done"}]
        events |= {"drops": 1, "log": log}
    return build_run(
        name, records, config={"fairness": header.as_dict()}, events=events, series=series,
        client={"lag_s": {"p50": 0.001, "p99": 0.002, "max": 0.003}}, slo_ttft_s=1.0,
    )  # fmt: skip


@pytest.fixture
def runs() -> list[RunResult]:
    return [make_run("recompute", 5.0), make_run("drop", 0.2, drops=True)]


@pytest.fixture(scope="module")
def rendered() -> str:
    """One page for all tests that only read it: drawing takes most of a second."""
    runs = [make_run("recompute", 5.0), make_run("drop", 0.2, drops=True)]
    return render_html(runs, title="Two runs")


class Page(HTMLParser):
    """What a test wants to know of a page: its tags, images and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.sources: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        elif tag == "source":
            self.sources.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_table_conditions_pictures_and_events(rendered: str) -> None:
    page = Page(rendered)
    for part in (
        "Two runs", "TTFT p99", "25.00x", "parameters' share of memory", "peak demand / merged capacity", "made up",
        "1,234", "HTTP 429: full", "Load generator's own lag", "restore", "groups [0, 1]", "scheduled arrival to",
    ):  # fmt: skip
        assert part in page.text, part
    captions = [image["alt"] or "" for image in page.images]
    shown = ("time to first token", "memory was used for", "Queue", "Memory of each worker over time, drop", "Share")
    for caption, part in zip(captions, shown, strict=True):  # the run without memory series has no memory map
        assert part in caption
    assert "drop: half within 200 ms, 99 of 100 within 200 ms" in captions[0]


def test_the_page_opens_with_a_sentence_two_pictures_and_eight_rows_and_folds_the_rest(rendered: str) -> None:
    before, _, folded = rendered.partition("<details>")
    opening = Page(before)
    assert opening.text.index("99 of 100 first tokens") < opening.text.index("HTTP 429: full")
    assert len(opening.images) == 2 and len(Page(folded).images) == 3
    assert opening.tags.count("table") == 1 and opening.tags.count("tr") == 1 + 8
    assert "parameters' share of memory" not in opening.text and "groups [0, 1]" not in opening.text
    assert rendered.count("<details>") == rendered.count("</details>") == rendered.count("<summary>")


def test_many_runs_are_all_compared_and_only_some_told_in_full() -> None:
    runs = [
        RunResult(f"{name} seed={seed}", config={"simulated": True, "seed": seed}, duration_s=1.0)
        for seed in range(MAX_DETAILED_RUNS) for name in ("recompute", "drop")
    ]  # fmt: skip
    text = Page(render_html(runs)).text
    assert f"The first {MAX_DETAILED_RUNS} of {len(runs)} runs" in text
    assert f"medians of {MAX_DETAILED_RUNS} seeds" in text
    assert "drop seed=0: events" in text and f"seed={MAX_DETAILED_RUNS - 1}: events" not in text


def test_the_page_needs_nothing_from_outside(rendered: str) -> None:
    page = Page(rendered)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all((image["src"] or "").startswith("data:image/svg+xml;base64,") for image in page.images)
    assert len(page.sources) == 2  # the pictures that are not folded away have a form for narrow windows
    assert all((source["srcset"] or "").startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not re.search(r"https?://", re.sub(r"base64,[A-Za-z0-9+/=]+", "", rendered))


def test_foreign_text_is_escaped() -> None:
    run = make_run(EVIL, 0.2)
    run.requests_detail, run.series = None, {}  # pictures are another test's
    run.config["note"] = EVIL
    run.events["log"] = [{"t": 1.0, "kind": EVIL, "why": EVIL}]
    text = render_html([run], title=EVIL)
    assert EVIL not in text
    assert text.count("&lt;script&gt;") >= 5
    assert "script" not in Page(text).tags


def test_a_caller_s_tables_stand_below_its_sentence_or_are_folded() -> None:
    found = PageTable(f"found {EVIL}", ["variant", EVIL], [["drop", "3"], [EVIL, "4"]], ["mind this", EVIL])
    tried = PageTable("tried", ["n"], [["1"]], is_folded=True)
    text = render_html([RunResult("empty")], tables=[tried, found], opening=f"Three will do, says {EVIL}.")
    assert EVIL not in text and "script" not in Page(text).tags
    shown = Page(text).text
    places = [shown.index(part) for part in ("Three will do", "found", "mind this", "Eight figures", "tried")]
    assert places == sorted(places)
    plain = Page(render_html([RunResult("empty")])).tags
    assert Page(text).tags.count("section") == plain.count("section") + 1
    assert Page(text).tags.count("details") == plain.count("details") + 1


def test_a_plan_among_the_events_is_readable() -> None:
    run = make_run("drop", 0.2)
    run.requests_detail, run.series = None, {}  # pictures are another test's
    merges = [{"groups": [0, 1], "stages": [{"worker": 1, "layers": [0, 3]}, {"worker": 0, "layers": [3, 6]}]}]
    run.events["log"] = [
        {"t": 1.0, "kind": "drop_decided", "load": 1.5, "merges": merges, "freed_bytes": 7},
        {"t": 2.0, "kind": "drop_decided", "load": 1.25},
    ]
    text = Page(render_html([run])).text
    assert "freed_bytes 7, load 1.5, plan: groups 0, 1: worker 1 layers 0 to 2, worker 0 layers 3 to 5" in text
    assert "load 1.25" in text and text.count("plan: ") == 1


def test_a_run_with_nothing_still_makes_a_page(tmp_path: Path) -> None:
    write_html(tmp_path / "deep" / "page.html", [RunResult("empty")])
    text = (tmp_path / "deep" / "page.html").read_text()
    assert "No fairness header was recorded" in text
    assert "<img" not in text


def test_pictures_are_drawn_where_there_is_something_to_draw(runs: list[RunResult]) -> None:
    shown = plots.all_shown(runs)
    drawn = [
        plots.draw_first_tokens([shown]), plots.draw_memory_by_use(shown), plots.draw_story(shown),
        plots.draw_queue(runs), plots.draw_memory(runs[1]), plots.draw_distributions(runs),
    ]  # fmt: skip
    assert all(figure is not None for figure in drawn)
    assert plots.draw_memory(runs[0]) is None
    empty = [RunResult("empty")]
    assert plots.draw_queue(empty) is plots.draw_distributions(empty) is None
    nothing = plots.all_shown(empty)
    assert plots.draw_first_tokens([nothing]) is plots.draw_memory_by_use(nothing) is plots.draw_story(nothing) is None


def test_the_same_runs_make_the_same_picture(runs: list[RunResult]) -> None:
    first, second = (plots.draw_first_tokens([plots.all_shown(runs)]) for _ in range(2))
    assert first is not None and second is not None
    assert plots.to_svg(first) == plots.to_svg(second)
    assert plots.to_png(first, dpi=20).startswith(b"\x89PNG")


def test_drops_and_restores_are_marked(runs: list[RunResult]) -> None:
    figure = plots.draw_memory(runs[1])
    assert figure is not None
    colors = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colors == [plots.EVENT_COLORS["drop"], plots.EVENT_COLORS["restore_done"]]


def test_blocks_of_all_groups_are_added_up_and_drawn_against_their_number() -> None:
    series = {
        "kv_blocks_used/0": [(0.0, 5.0), (1.0, 6.0)],
        "kv_blocks_used/1": [(0.0, 4.0)],  # merged into the other after the first sample
        "kv_blocks_total/0": [(0.0, 10.0), (1.0, 30.0)],
        "kv_blocks_total/1": [(0.0, 10.0)],
        "kv_usage": [(0.0, 0.45), (1.0, 0.2)],
    }
    figure = plots.draw_queue([RunResult("r", series=series)])
    assert figure is not None and len(figure.axes) == 1
    used, capacity = figure.axes[0].get_lines()
    assert list(used.get_ydata()) == [9.0, 6.0]
    assert list(capacity.get_ydata()) == [20.0, 30.0]


def test_workers_are_in_numeric_order() -> None:
    names = ("10", "2", "b", "a")
    run = RunResult("r", series={f"worker_memory_bytes/kv/{name}": [(0.0, 1.0)] for name in names})
    assert worker_names(run) == ["2", "10", "a", "b"]


def test_ratios_say_how_many_times_better(runs: list[RunResult]) -> None:
    ttft = next(metric for metric in METRICS if metric.label == "TTFT p99")
    speed = next(metric for metric in METRICS if metric.label == "output tokens/s")
    assert ratio(runs[1], runs[0], ttft) == pytest.approx(25.0)
    expected = runs[1].output_tokens_per_s / runs[0].output_tokens_per_s
    assert ratio(runs[1], runs[0], speed) == pytest.approx(expected)
    assert ratio(RunResult("empty"), runs[0], ttft) is None


def test_rows_fit_their_headers(runs: list[RunResult]) -> None:
    three = [*runs, make_run("third", 1.0)]
    assert comparison_headers(three) == ["", "recompute", "drop", "against recompute", "third", "against recompute"]
    assert {len(row) for row in comparison_rows(three)} == {6}


def test_the_summary_prints_figures_conditions_and_lag(runs: list[RunResult]) -> None:
    out = io.StringIO()
    runs[1].name = "[bold]drop"  # a name is text, not markup
    print_summary(runs, Console(file=out, width=140))
    for part in (
        "TTFT p99",
        "5 s",
        "200 ms",
        "25.00x",
        "client lag of recompute",
        "peak demand / undropped",
        "KV capacity / mean need",
        "online load as a share of the maximum",
        "ttft_s: scheduled arrival to the first chunk",
        "[bold]drop",
    ):
        assert part in out.getvalue(), part


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "s", "-"), (0.0123, "s", "12.3 ms"), (1.0, "s", "1 s"), (12.3456, "s", "12.35 s"), (0.5, "", "0.5"),
     (159_500.0, "", "159,500"), (12_345.6, "s", "12,346 s")],
)
def test_figures_for_people(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_nothing_is_cut_off_where_there_is_no_terminal(runs: list[RunResult]) -> None:
    runs[1].name = "a name that is much longer than what eighty columns leave for it: " + "x" * 60
    runs[0].config["fairness"]["arrivals"] = ["y" * 200]
    output = io.StringIO()
    console = Console(file=output, width=40)
    print_summary(runs, console)
    print_brief([(runs[0], runs[1])], {"burst": "z" * 100}, console)
    text = output.getvalue()
    assert "\u2026" not in text
    assert all(whole in text for whole in (runs[1].name, "x" * 60, "y" * 200, "z" * 100))


def test_rows_of_nothing_but_zeros_are_one_line(runs: list[RunResult]) -> None:
    for run in runs:
        run.events |= {"sheds/draining": 0, "swapped_in_blocks": 0.0}
    labels = [row[0] for row in comparison_rows(runs)]
    assert "requests rejected" in labels and "preemptions" in labels
    assert zero_counts(runs) == ["requests failed", "requests cancelled", "sheds/draining", "swapped in blocks"]
    assert not set(zero_counts(runs)) & set(labels)
    output = io.StringIO()
    print_summary(runs, Console(file=output, width=80))
    assert "0 in all runs: requests failed, requests cancelled, sheds/draining, swapped in blocks" in output.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.0, "12"), (1234567.0, "1,234,567"), (1234, "1,234"), (1620.16882, "1,620"), (12.5639653, "12.56"),
     (0.00114, "0.00114"), (None, "-"), ("word", "word"), (True, "True"), (float("inf"), "inf")],
)  # fmt: skip
def test_counts_for_people(value: object, text: str) -> None:
    assert format_count(value) == text


CALM = {"drops": 0, "preemptions": 0}


@pytest.mark.parametrize(
    ("aimed", "over_capacity", "over_merged", "events", "words"),
    [
        (0.72, 2.1, 0.9, {"drops": 2}, None),
        (0.72, 3.8, 1.65, {"drops": 2}, "1.65 of the merged capacity, more than dropping can carry"),
        (0.72, 0.9, 0.4, CALM, "0.90 of the undropped capacity, so memory never ran short"),
        (0.72, 0.97, 0.43, {"drops": 2, "preemptions": 31},
         "memory ran short only now and then (drops 2 in burst: drop; preemptions 31 in burst: drop)"),
        (0.72, 0.9, 0.4, {}, "0.90 of the undropped capacity, less than was meant"),
        (0.72, None, None, CALM, None),
        (2.2, 4.9, 2.1, {"drops": 2}, None),
        (2.2, 2.1, 0.9, {"drops": 2}, "0.90 of it, which dropping can carry"),
        (2.2, None, None, CALM, None),
    ],
)  # fmt: skip
def test_a_missed_aim_is_told(
    aimed: float, over_capacity: float | None, over_merged: float | None, events: dict[str, int], words: str | None
) -> None:
    header = {"peak_over_capacity": over_capacity, "peak_over_merged": over_merged}
    baseline = RunResult("burst: recompute", events=CALM)
    told = missed_aim(baseline, RunResult("burst: drop", config={"fairness": header}, events=events), aimed)
    assert (told is None) == (words is None)
    if words is not None and told is not None:
        assert all(word in told for word in (words, f"was to be {aimed:.2f}", "one more run may do"))


def test_a_baseline_that_ran_short_is_no_calm_pair() -> None:
    header = {"peak_over_capacity": 0.97, "peak_over_merged": 0.43}
    baseline = RunResult("burst: recompute", events={"drops": 0, "preemptions": 31})
    told = missed_aim(baseline, RunResult("burst: drop", config={"fairness": header}, events=CALM), 0.72)
    assert told is not None and "never" not in told and "preemptions 31 in burst: recompute" in told


def test_events_are_marked_in_the_colour_of_their_run(runs: list[RunResult]) -> None:
    for figure in (plots.draw_first_tokens([plots.all_shown(runs)]), plots.draw_queue(runs)):
        assert figure is not None
        marks = [line for line in figure.axes[0].get_lines() if list(line.get_xdata()) in ([4.0, 4.0], [8.0, 8.0])]
        assert [(mark.get_color(), mark.get_linestyle()) for mark in marks] == [
            (plots.run_color(1), "--"), (plots.run_color(1), ":"),
        ]
        legend = figure.axes[0].get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == [
            "recompute", "drop", "layers dropped", "layers restored",
        ]


def test_the_short_form_fits_a_terminal_and_its_conditions_six_lines(runs: list[RunResult]) -> None:
    output = io.StringIO()
    pairs = [(runs[0], runs[1]), (runs[1], runs[0])]
    titles = {"burst": "what dropping carries", "beyond": "what it does not"}
    terminal = Console(file=output, width=80, force_terminal=True, color_system=None)
    print_brief(pairs, titles, terminal)
    lines = output.getvalue().splitlines()
    rows = brief_rows(pairs)
    assert [row[0] for row in rows] == [
        "P50 TTFT", "P99 TTFT", "P50 TPOT", "output tokens/s", "drops", "restores", "preemptions", "requests",
    ]
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 3 + len(rows) + len(titles) + CONDITIONS_LINES
    assert "burst: what dropping carries" in lines
    ttft = next(line for line in lines if line.startswith("P50 TTFT"))
    assert [cell for cell in ttft.split() if cell.endswith("x")] == ["25.00x", "0.04x"] and "5 s" in ttft
    assert rows[6] == ["preemptions", "1,234", "0", "", "0", "1,234", ""]
    assert rows[7][1] == "20/21"
    stated = " ".join(lines[-CONDITIONS_LINES:])
    words = ("parameters 70%", "1,000 undropped, 2,170 merged", "made up", "2 ms", "KV that requests hold or wait for",
             "mean load (recompute, drop): burst 0.50, beyond 0.50; capacity / mean need: 2.",
             "peak demand (recompute, drop): burst 1.50, beyond 1.50 undropped, 0.69, 0.69 m")
    assert [word for word in words if word not in stated] == []
    assert "\u2026" not in "".join(lines[:-CONDITIONS_LINES])


def test_a_run_is_compared_with_the_first_that_met_the_same_arrivals() -> None:
    def at(name: str, delay_s: float, ttft_s: float) -> RunResult:
        run = make_run(name, ttft_s)
        assert run.requests_detail
        moved = [row | {"scheduled_s": row["scheduled_s"] + delay_s} for row in run.requests_detail]
        return replace(run, requests_detail=moved)

    runs = [at("a", 0.0, 8.0), at("b", 0.0, 2.0), at("c", 1.0, 9.0), at("d", 1.0, 3.0)]
    assert comparison_headers(runs) == ["", "a", "b", "against a", "c", "other arrivals", "d", "against c"]
    row = next(row for row in comparison_rows(runs) if row[0] == "TTFT p99")
    assert row[3::2] == ["4.00x", "-", "3.00x"]


def test_a_sweep_s_runs_are_compared_inside_their_point() -> None:
    def at(name: str, instances: int, ttft_s: float, *, seed: int = 0, detail: bool = True) -> RunResult:
        run = make_run(name, ttft_s)
        config = {"simulated": True, "point": {"cluster.instances": instances}, "seed": seed}
        return replace(run, config=run.config | config, requests_detail=run.requests_detail if detail else None)

    for detail in (True, False):
        runs = [at("a", 2, 8.0, detail=detail), at("b", 2, 2.0, detail=detail), at("c", 4, 9.0, detail=detail),
                at("d", 4, 3.0, detail=detail), at("e", 2, 3.0, seed=1, detail=detail)]  # fmt: skip
        assert comparison_headers(runs) == [
            "", "a", "b", "against a", "c", "other point", "d", "against c", "e", "other seed",
        ]  # fmt: skip
        row = next(row for row in comparison_rows(runs) if row[0] == "TTFT p99")
        assert row[3::2] == ["4.00x", "-", "3.00x", "-"]


def test_the_share_above_a_value_counts_unanswered_requests_as_above() -> None:
    answered = [
        RequestRecord(i, 0.0, 1, 1, status="completed", first_s=1.0 + i, finished_s=9.0, output_tokens=1)
        for i in range(3)
    ]
    whole = build_run("whole", answered)
    assert plots.share_above(whole, "ttft_s") == ([1.0, 2.0, 3.0], pytest.approx([1.0, 2 / 3, 1 / 3]))
    lost = RequestRecord(3, 0.0, 1, 1, status="rejected")
    values, share = plots.share_above(build_run("lost", [*answered, lost]), "ttft_s")
    assert (values, share) == ([1.0, 2.0, 3.0, 3.0], [1.0, 0.75, 0.5, 0.25])
