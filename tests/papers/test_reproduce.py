"""Reproductions: the registry, specs, rows, and one small experiment from the spec to the page."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jettison.cli.main import main
from jettison.errors import ConfigError, JettisonError
from jettison.report.plots import to_png
from jettison.report.results import RunResult
from jettison.sim.executor import ModelledExecutor, StageShape, StepLoad
from jettison.simulate.machines import cluster_setup
from jettison.simulate.spec import parse_spec
from papers import command, engine, figures, pool
from papers.claims import change, higher, lower, own, share
from papers.command import told_of_effort
from papers.figure import Band, Claim, Figure, Part
from papers.figures import v1
from papers.figures.v3_burst import lowest
from papers.jobs import changed, job_text
from papers.load import search
from papers.measures import bubble_share, throughput, ttft, values
from papers.page import TOLD_IN, row_cells, table, write_page
from papers.parameter_swap import StreamedParameters
from papers.pictures import DRAWING, bars
from papers.plots import over_time
from papers.pool import Runs
from papers.reasons import compute_bound, timing
from papers.registry import FIGURES, figure_named
from papers.requests import requests_of
from papers.rows import Outcome, Row
from papers.specs import Results, Spec, burst_span_s, read_spec, run_spec, spec_names
from papers.systems import BY_PRESSURE, SPARE
from papers.variants import Changes, Variant

NAMES = {
    *(f"kunserve-fig{n}" for n in (2, 5, 12, 13, 14, 15, 16, 17)),
    *(f"kunserve-v1-fig{n}" for n in (4, 5, 10, 11, 12, 13, 14, 15, 16)),
    *(f"conserve-fig{n}" for n in (2, 5, 6, 7, 8)), "conserve-safepoints", "conserve-slo", "conserve-link",
    *(f"mell-fig{n}" for n in (6, 11, 12, 13, 14, 15)), "ladder-day", "ladder-day-short",
    "ladder-day-small", "ladder-prices",
}  # fmt: skip

TINY = {
    "name": "tiny",
    "cluster": {"preset": "kunserve-a", "instances": 2, "kv_tokens": 6_000},
    "workload": {
        "arrivals": {"process": "poisson", "rate_per_s": 2, "duration_s": 6,
                     "bursts": [{"start_s": 2, "duration_s": 2, "multiplier": 6}]},
        "lengths": {"input": 500, "output": 200},
    },
    "settings": {"block_size": 64, "max_num_batched_tokens": 2048, "max_num_seqs": 256},
    "variants": ["drop", "recompute"],
    "seeds": [0, 1],
}  # fmt: skip


DROP, RECOMPUTE = Variant("drop", "drop"), Variant("recompute", "recompute")


def tiny() -> Spec:
    return Spec("tiny", TINY, parse_spec(TINY))


def test_every_figure_is_told_of_and_its_specs_are_in_the_tree() -> None:
    assert set(FIGURES) == NAMES
    assert {spec for figure in FIGURES.values() for spec in figure.specs} == set(spec_names())
    for name in spec_names():
        assert read_spec(name).name == name
        assert read_spec(name).machine.kv_tokens > 0
    told = TOLD_IN.read_text(encoding="utf-8")
    begins = tuple(f"## {name}" for name in ("kunserve", "conserve", "mell", "ladder"))
    sections = (line for line in told.splitlines() if line.startswith(begins))
    assert {line.removeprefix("## ") for line in sections} == NAMES
    summary = (Path(__file__).parents[2] / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in summary for name in NAMES)
    assert figures.__doc__


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: figure.name)
def test_the_table_of_a_figure_makes_sense(figure: Figure) -> None:
    rows = [(part.workload, c.metric, c.system, c.baseline) for part in figure.parts for c in part.claims]
    assert len(set(rows)) == len(rows), "one row twice"
    assert len({plot.name for plot in figure.plots}) == len(figure.plots) > 0
    for part in figure.parts:
        served = {variant.name: variant for variant in part.variants}
        assert len(served) == len(part.systems)
        assert part.conditions in ("", *served)
        assert not served or {c.system for c in part.claims} <= {*served, "the preset"}
        for claim in part.claims:
            assert claim.band is None or claim.band_source
        if part.spec is not None:  # `jettison simulate` meets the same systems
            in_file = {v.name: (v.policy, dict(v.settings)) for v in read_spec(part.spec).parsed.variants}
            both = served.keys() & in_file.keys()
            assert {name: (served[name].policy, dict(served[name].settings)) for name in both} == {
                name: in_file[name] for name in both
            }


def test_all_leaves_out_what_takes_hours_and_a_name_does_not() -> None:
    long = {name for name, figure in FIGURES.items() if figure.is_long}
    assert long and {figure.name for figure in command.figures_of(["all"])} == NAMES - long
    assert [figure.name for figure in command.figures_of(sorted(long))] == sorted(long)


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        figure_named("kunserve-fig31")
    with pytest.raises(ConfigError, match="no spec"):
        read_spec("nothing")


def test_bands_and_rows() -> None:
    assert [Band(1, 2).holds(v) for v in (0.9, 1, 2, 2.1)] == [False, True, True, False]
    assert (str(Band(5, None)), str(Band(None, 5)), str(Band(3, 3)), str(Band(1, 2))) == (">= 5", "<= 5", "3", "1 to 2")
    stated = own("m", ttft(99), "drop", "x").stated((12.7, 72.2), (5, None), "the paper's")
    row = Row("f", "w", replace(stated, baseline="recompute"), 6.0, (5.0, 7.0))
    assert row.in_band is True and not row.is_beside
    assert row.as_dict() == {
        "figure": "f", "workload": "w", "metric": "m", "system": "drop", "baseline": "recompute", "paper": [12.7, 72.2],
        "ours": 6.0, "unit": "x", "spread": [5.0, 7.0], "band": [5.0, None], "band_source": "the paper's",
        "is_idle": False, "in_band": True,
    }  # fmt: skip
    assert own("m", ttft(99)).stated(3).paper == Band(3.0, 3.0)
    judged = own("m", ttft(99), "drop").stated(None, (1, 2))
    counted = replace(own("abandoned steps", ttft(99), "harvest"), is_proof=True)
    never, once = Row("f", "w", counted, 0.0), Row("f", "w", counted, 1.0)
    assert (never.is_beside, once.is_beside) == (False, True), "a row that proves nothing is not folded away"
    assert "proves nothing" in row_cells(never)[-1] and row_cells(once)[-1] == ""
    assert Row("f", "w", judged, None).in_band is None
    assert Row("f", "w", judged, 3.0).in_band is False
    assert "| **no** (1 to 2) |" in table([Row("f", "w", judged, 3.0)])[-1]


def test_claims_compare_seed_by_seed() -> None:
    runs = {"a": [_of("recompute", 0, 2.0), _of("recompute", 0, 6.0)], "b": [_of("recompute", 0, 1.0)] * 2}
    found = [Results(tiny(), [1.0, 1.0], runs)]
    p99 = ttft(99)
    assert own("m", p99, "a").numbers(found) == [2.0, 6.0]
    assert share("m", p99, "a").numbers(found) == [200.0, 600.0]
    assert lower("m", p99, "b", "a").numbers(found) == higher("m", p99, "a", "b").numbers(found) == [2.0, 6.0]
    assert change("m", p99, "a", "b").numbers(found) == [100.0, 500.0]
    row = engine.row("f", "w", own("m", p99, "a"), found)
    assert (row.ours, row.spread) == (4.0, (2.0, 6.0))
    nothing = engine.row("f", "w", Claim("m", "a", lambda _: [None, float("inf")]), found)
    assert (nothing.ours, nothing.spread) == (None, None)


def test_a_small_figure_from_the_spec_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "read_spec", lambda _: tiny())
    systems = (DROP, RECOMPUTE, BY_PRESSURE, SPARE)
    claims = (
        lower("P99 TTFT, times lower", ttft(99), SPARE.name, "recompute").stated(2),
        own("P99 TTFT", ttft(99), unit="s"),
        *compute_bound(),
    )
    part = Part("two instances", claims, "tiny", systems, conditions="recompute")
    figure = replace(figure_named("kunserve-fig13"), parts=(part,), plots=(over_time("time-line", part.workload),))
    runs = Runs()
    outcome = engine.reproduce(figure, runs)
    assert runs.num_done == 8
    results = run_spec(tiny(), runs, systems)
    assert runs.num_done == 8  # nothing is simulated twice
    assert {name: len(found) for name, found in results.runs.items()} == dict.fromkeys(results.runs, 2)
    by_metric = {row.claim.metric: row for row in outcome.rows}
    row = by_metric["P99 TTFT, times lower"]
    assert row.ours is not None and row.ours > 1.0  # memory is short
    assert row.spread is not None and row.spread[0] <= row.ours <= row.spread[1]
    kinds = ("undropped", "merged", "endless")
    served = [by_metric[f"served for ever, an instance, {kind} KV"].ours or 0.0 for kind in kinds]
    assert 0 < served[0] < served[1] < served[2]
    assert (by_metric["arrivals in bursts, an instance"].ours or 0) > 2.0
    for run in results.runs["recompute"]:
        assert 0 < throughput(run) <= run.output_tokens_per_s * run.duration_s / 5.0
        assert values(run, "ttft_s", 0.0, 1e9) and not values(run, "ttft_s", 1e8, 1e9)
        assert (bubble_share(run) or 0.0) < 0.01  # lone instances have none
    write_page(tmp_path / "page.md", {"kunserve-fig13": outcome}, told_of_effort(runs, 60.0))
    text = (tmp_path / "page.md").read_text()
    above, below = text.split("Measured beside it")
    assert "| P99 TTFT, times lower |" in above and "| P99 TTFT |" in below and "- cluster: kunserve-a" in below
    assert "page/kunserve-fig13-time-line.png" in above and "papers/setup.md#kunserve-fig13)" in above
    assert text.endswith("\n8 simulations took 60 s here.\n")
    assert (tmp_path / "page" / "kunserve-fig13-time-line.png").stat().st_size < 150_000


def test_what_a_variant_changes_beyond_its_settings() -> None:
    spec = tiny()
    machine = spec.machine
    plain = cluster_setup(machine, spec.parsed, spec.parsed.variants[0], 0)
    spare = changed(plain, machine, SPARE.changes)
    assert spare.memory.budget_bytes - plain.memory.budget_bytes == pytest.approx(
        7 * machine.kv_tokens * machine.shape.num_layers * machine.shape.kv_bytes_per_token_layer
    )
    assert BY_PRESSURE.settings == {"overload_trigger": "pressure"}
    assert not changed(plain, machine, Changes(num_merges=1)).params.auto_restore
    streamed = changed(plain, machine, Changes(streamed_bytes=1 << 29))
    assert isinstance(streamed.executor, StreamedParameters)
    burst = read_spec("burst-burstgpt-14b")
    less, full = (burst.changed(cluster={"memory_utilisation": share}).machine for share in (0.5, 0.9))
    assert 0 < less.kv_tokens < 0.3 * full.kv_tokens
    assert job_text(TINY, SPARE, 0, 1.0) != job_text(TINY, Variant(SPARE.name, "recompute"), 0, 1.0)


def test_when_memory_ran_short_is_told_of_the_seeds_that_dropped() -> None:
    """The burst lasts from 2 s to 4 s; TTFT is 0.5 s before it, and the request that comes at 2.5 s waits longest."""
    rows = [{"scheduled_s": t / 10, "ttft_s": 3.0 if t >= 20 else 0.5} for t in range(200)]
    rows.append({"scheduled_s": 2.5, "ttft_s": 9.0})
    log = [{"t": 3.5, "kind": "drop_decided"}, {"t": 5.0, "kind": "exchange_done", "ms": 1500.0}]
    dropped = RunResult("made up", events={"log": log}, requests_detail=rows)
    found = [Results(tiny(), [1.0, 1.0], {BY_PRESSURE.name: [RunResult("calm", requests_detail=rows), dropped]})]
    numbers = {claim.metric: list(claim.numbers(found)) for claim in timing()}
    assert numbers == {
        "first drop, after the burst begins": [None, 1.5],
        "mean exchange": [None, 1.5],
        "P50 TTFT before the burst": [None, 0.5],
        "P50 TTFT in the 10 s before the first drop": [None, 3.0],
        "of the slowest hundredth, came before it": [None, 100.0],
    }
    nothing = RunResult("made up", events={"log": log}, requests_detail=[])
    served = [Results(tiny(), [1.0], {BY_PRESSURE.name: [nothing]})]
    assert [claim.numbers(served) for claim in timing()] == [[1.5], [1.5], [None], [None], [None]]


def test_the_best_of_a_sweep_is_taken_where_the_system_dropped() -> None:
    def point(recompute_s: float, drop_s: float, drops: int) -> Results:
        runs = {"recompute": [_of("recompute", 0, recompute_s)], "drop": [_of("drop", drops, drop_s)]}
        return Results(tiny(), [1.0], runs)

    best = v1.best_lower("drop", "recompute", "m")
    found = [point(30.0, 1.0, 0), point(8.0, 2.0, 1), point(6.0, 2.0, 2)]
    row = engine.row("f", "w", best, found)
    assert (row.ours, row.spread, row.is_idle) == (4.0, (3.0, 4.0), False)
    calm = engine.row("f", "w", best, found[:1])
    assert (calm.ours, calm.is_idle) == (30.0, True)


def test_streamed_parameters_are_hidden_behind_long_steps_and_not_behind_short_ones() -> None:
    spec = tiny()
    inner = ModelledExecutor(spec.machine.profile.cost)
    executor = StreamedParameters(inner, 0.05, 48)
    whole, half = StageShape(48, True, True), StageShape(24, True, False)
    prefill, decode = StepLoad(2048, 2048 * 1024, 2048, 1), StepLoad(1, 100, 100, 1)
    assert executor.stage_ns(0, 0, prefill, whole) == inner.stage_ns(0, 0, prefill, whole)
    assert executor.stage_ns(0, 0, decode, whole) == 50_000_000
    assert executor.stage_ns(0, 0, decode, half) == 25_000_000
    assert executor.decode_ns(0, 0, decode, whole, 3).tolist() == [50_000_000] * 3


def test_outside_of_a_checkout_the_command_says_where_the_figures_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jettison.cli.reproduce_cmd.CHECKOUT", tmp_path)
    assert main(["reproduce", "list"]) == 2
    assert "in a checkout of the source" in capsys.readouterr().err


def test_the_command_lists_refuses_and_reproduces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert main(["reproduce", "kunserve-fig31"]) == 2
    assert main(["reproduce", "all", "kunserve-fig2"]) == 2
    file = tmp_path / "rows.json"
    assert main(["reproduce", "kunserve-fig15", "--json", str(file), "--plots", str(tmp_path / "plots")]) == 0
    rows = json.loads(file.read_text())["rows"]
    wanted = {"figure", "workload", "metric", "system", "baseline", "paper", "ours", "in_band"}
    assert rows and all(wanted <= row.keys() for row in rows)
    assert {row["figure"] for row in rows} == {"kunserve-fig15"}
    assert list((tmp_path / "plots").glob("kunserve-fig15-*.png"))


def test_users_are_added_on_the_instants_that_are_there() -> None:
    spec = read_spec("extreme-burst").changed(seeds=[3])
    one, many = (requests_of(spec.parsed, factor) for factor in (1.0 / 9.0, 5.0))
    stamps = set(one.columns.arrival_s.tolist())
    assert set(many.columns.arrival_s.tolist()) == stamps
    assert len(many.rows) == pytest.approx(45 * len(one.rows), rel=0.01)
    assert len(set(many.columns.input_tokens.tolist())) > len(one.rows)  # lengths are drawn for each of them
    assert many.duration_s == pytest.approx(120.0 + 3 * 75.0)


def test_a_load_is_found_from_either_side() -> None:
    for first in (0.1, 1.0, 7.0):
        found = search(lambda factor, first=first: 0.3 * (first * factor) ** 1.4, 0.56)
        assert found.load == pytest.approx(0.56, rel=0.05)


def test_kept_runs_are_taken_again(tmp_path: Path) -> None:
    spec = tiny().changed(seeds=[0], workload={"mean_load": 0.3})
    first = Runs(folder=tmp_path)
    before = run_spec(spec, first, [RECOMPUTE])
    second = Runs(folder=tmp_path)
    after = run_spec(spec, second, [RECOMPUTE])
    assert (first.num_done, first.num_kept, second.num_done, second.num_kept) == (2, 0, 0, 2)
    assert told_of_effort(first, 600.0) == "2 simulations took 10 minutes here."
    run_spec(spec, second, [RECOMPUTE, DROP])
    assert told_of_effort(second, 600.0) == "2 of 3 runs were kept from before."
    assert after.factors == pytest.approx(before.factors)
    assert after.one("recompute").ttft_s.p99 == pytest.approx(before.one("recompute").ttft_s.p99)


def test_figures_side_by_side_share_what_both_need() -> None:
    spec, told = tiny().changed(seeds=[0]), []
    with Runs(2, lambda done, total, name: told.append((done, total, name))) as runs, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(run_spec, spec, runs, [RECOMPUTE, other]) for other in (DROP, SPARE)]
        one, other = (figure.result() for figure in asked)
    assert runs.num_done == 3 and [done for done, _, _ in told] == [1, 2, 3] and told[-1][1] == 3
    assert one.one("recompute") is other.one("recompute")


def test_pictures_that_several_threads_draw_are_what_one_draws() -> None:
    groups = {f"group {i}": {f"system {j}": float(i + j + 1) for j in range(7)} for i in range(4)}

    def draw(_: int) -> bytes:
        figure = bars(groups, "seconds", "bars", log=True)
        with DRAWING:
            return to_png(figure, dpi=40)

    alone = draw(0)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(draw, range(24))) == {alone}


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_begins_once_a_reproduction_has_ended(processes: int) -> None:
    with Runs(processes) as runs:
        pass
    with pytest.raises(JettisonError, match="has ended"):
        run_spec(tiny(), runs, [RECOMPUTE])
    assert runs.num_done == 0


def test_a_figure_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def reproduce(figure: Figure, runs: Runs) -> Outcome:
        if figure.name == "one":
            begun.wait(60.0)
            raise JettisonError("no such luck")
        begun.set()
        for seed in range(10_000):
            run_spec(tiny().changed(seeds=[seed]), runs, [SPARE])
        return Outcome()

    _stand_in(monkeypatch, reproduce)
    with pytest.raises(JettisonError, match="no such luck"):
        command.reproduce(
            ["one", "two"], Console(file=io.StringIO()), json_out=None, plots=tmp_path, page=None, processes=2
        )


def test_an_interrupt_ends_the_figures_that_wait_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's reaches all processes: it comes back as what a run ended with."""

    def waits(figure: Figure, runs: Runs) -> Outcome:
        runs.all([Interrupted("{}")])
        return Outcome()

    _stand_in(monkeypatch, waits)
    with pytest.raises(KeyboardInterrupt):
        command.reproduce(["one"], Console(file=io.StringIO()), json_out=None, plots=tmp_path, page=None, processes=2)


def _stand_in(monkeypatch: pytest.MonkeyPatch, reproduce: Callable[[Figure, Runs], Outcome]) -> None:
    """Figures of any name, reproduced by a function of the test."""
    monkeypatch.setattr(command, "figure_named", lambda name: replace(figure_named("kunserve-fig15"), name=name))
    monkeypatch.setattr(engine, "reproduce", reproduce)


class Interrupted(str):
    """A job whose process is interrupted while it runs it."""

    __slots__ = ()

    def startswith(self, *args: Any) -> bool:
        raise KeyboardInterrupt


class Fatal(str):
    """A job that ends the process which takes it from a queue, as the system does when memory is out."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (137,)


def test_a_process_that_is_killed_is_one_line_that_names_the_job() -> None:
    spec = {"name": "tiny", "variants": [{"name": "drop"}], "seeds": [4]}
    jobs = [Fatal(json.dumps({"spec": spec, "factor": factor})) for factor in (1.0, None)]
    with pytest.raises(JettisonError, match=r"while it simulated 'tiny: drop, seed 4'.*, `--processes 1`$") as raised:
        Runs(processes=2).all(jobs)
    assert "\n" not in str(raised.value)


def _of(policy: str, drops: int, p99_s: float = 1.0) -> RunResult:
    rows = [{"ttft_s": p99_s, "tpot_s": 0.1, "scheduled_s": 0.0}]
    return RunResult("x", {"policy": policy}, events={"drops": drops}, requests_detail=rows)


def _found(drops: int) -> Results:
    names = ("recompute", "pipeline", "swap", "migrate")
    runs = {"drop": [_of("drop", drops)], **{name: [_of(name, 0)] for name in names}}
    return Results(read_spec("burst-longbench-14b"), [1.0], runs)


def test_no_worse_than_others_shows_nothing_of_a_system_that_never_dropped() -> None:
    for drops, expected in ((0, None), (2, True)):
        found = _found(drops)
        claims = [
            lower("m", ttft(99), "drop", "recompute").stated(None, (1, None)),
            own("m", ttft(99), "drop").stated(None, (1, None)),
            lowest("drop").stated(None, (1, None)),
        ]
        rows = [engine.row("f", "w", claim, [found]) for claim in claims]
        assert [row.in_band for row in rows] == [expected] * 3
        assert ("nothing dropped" in table(rows)[-1]) == (expected is None)
        missed = lower("m", ttft(99), "drop", "swap").stated(None, (2, None))
        assert engine.row("f", "w", missed, [found]).in_band is False
        assert engine.row("f", "w", own("m", ttft(99), "swap").stated(None, (1, None)), [found]).in_band is True


def test_kept_runs_of_another_program_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny().changed(seeds=[0])
    recompute = [RECOMPUTE]
    run_spec(spec, Runs(folder=tmp_path), recompute)
    again, other = Runs(folder=tmp_path), Runs(folder=tmp_path)
    run_spec(spec, again, recompute)
    monkeypatch.setattr(pool, "program_mark", lambda: "another")
    run_spec(spec, other, recompute)
    assert (again.num_kept, other.num_kept) == (1, 0)


def test_windows_of_figures_hold_their_bursts() -> None:
    begin_s, end_s = burst_span_s("long-run", 1)
    assert burst_span_s("long-run", 1, 10.0, 40.0) == (begin_s - 10.0, end_s + 40.0)
    replayed = read_spec("extreme-burst").raw["workload"]["replay_burst"]
    assert (replayed["start_s"], replayed["end_s"]) == burst_span_s("extreme-burst")
    second_spike_s = read_spec("v1-restore").bursts[1].start_s
    assert second_spike_s == v1.SECOND_SPIKE_S
