"""Reproductions: the registry, specs, rows, and one small experiment from the spec to the page."""

from __future__ import annotations

import io
import json
import math
import os
import threading
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
from jettison.simulate.reproduce import command, figures, pool
from jettison.simulate.reproduce.command import told_of_effort
from jettison.simulate.reproduce.figures import ablation, extreme, long_run, stay
from jettison.simulate.reproduce.figures.end_to_end import _lowest_row
from jettison.simulate.reproduce.jobs import Changes, Variant, changed, job_text
from jettison.simulate.reproduce.load import search
from jettison.simulate.reproduce.measures import alone, bubble_share, compared, throughput, ttft, values
from jettison.simulate.reproduce.page import table, write_page
from jettison.simulate.reproduce.parameter_swap import StreamedParameters
from jettison.simulate.reproduce.pictures import DRAWING, bars, time_lines
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.registry import EXPERIMENTS, experiment
from jettison.simulate.reproduce.remarks import timing
from jettison.simulate.reproduce.requests import requests_of
from jettison.simulate.reproduce.rows import Band, Outcome, Row
from jettison.simulate.reproduce.specs import (
    SPARE,
    WITHOUT_GUARD,
    Results,
    Spec,
    burst_span_s,
    read_spec,
    run_spec,
    spec_names,
)
from jettison.simulate.spec import parse_spec

FIGURES = {
    *(f"kunserve-fig{n}" for n in (2, 5, 12, 13, 14, 15, 16, 17)),
    *(f"kunserve-v1-fig{n}" for n in (4, 5, 10, 11, 12, 13, 14, 15, 16)),
}

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


def tiny() -> Spec:
    return Spec("tiny", TINY, parse_spec(TINY))


def test_every_figure_has_an_experiment_whose_specs_are_in_the_tree() -> None:
    assert set(EXPERIMENTS) == FIGURES
    named = {spec for found in EXPERIMENTS.values() for spec in found.specs}
    assert named == set(spec_names())
    for name in spec_names():
        assert read_spec(name).name == name
        assert read_spec(name).machine.kv_tokens > 0
    assert figures.__doc__


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        experiment("kunserve-fig31")
    with pytest.raises(ConfigError, match="no spec"):
        read_spec("nothing")


def test_bands_and_rows() -> None:
    assert [Band(1, 2).holds(v) for v in (0.9, 1, 2, 2.1)] == [False, True, True, False]
    assert (str(Band(5, None)), str(Band(None, 5)), str(Band(3, 3)), str(Band(1, 2))) == (">= 5", "<= 5", "3", "1 to 2")
    row = Row("f", "w", "m", "drop", "recompute", Band(12.7, 72.2), 6.0, "x", (5.0, 7.0), Band(5, None), "somebody's")
    assert row.in_band is True
    assert row.as_dict().items() >= {
        "figure": "f", "workload": "w", "metric": "m", "system": "drop", "baseline": "recompute", "paper": [12.7, 72.2],
        "ours": 6.0, "in_band": True, "band": [5, None],
    }.items()  # fmt: skip
    assert Row("f", "w", "m", "drop", "", None, None, band=Band(1, 2)).in_band is None
    assert Row("f", "w", "m", "drop", "", None, 3.0, band=Band(1, 2)).in_band is False
    assert "| **no** (1 to 2) |" in table([Row("f", "w", "m", "drop", "", None, 3.0, band=Band(1, 2))])[-1]


def test_a_small_experiment_from_the_spec_to_the_page(tmp_path: Path) -> None:
    runs = Runs()
    results = run_spec(tiny(), runs, [*tiny().variants, WITHOUT_GUARD, SPARE])
    assert runs.num_done == 8
    assert {name: len(found) for name, found in results.runs.items()} == dict.fromkeys(results.runs, 2)
    again = run_spec(tiny(), runs, tiny().variants)
    assert runs.num_done == 8  # nothing is simulated twice
    assert again.runs["recompute"] == results.runs["recompute"]
    row = compared(
        results, "kunserve-fig13", "tiny", "P99 TTFT, times lower", SPARE.name, "recompute", ttft(99), paper=None
    )
    assert row.ours is not None and row.ours > 1.0  # memory is short
    assert row.spread is not None and row.spread[0] <= row.ours <= row.spread[1]
    for run in results.runs["recompute"]:
        assert 0 < throughput(run) <= run.output_tokens_per_s * run.duration_s / 5.0
        assert values(run, "ttft_s", 0.0, 1e9) and not values(run, "ttft_s", 1e8, 1e9)
        assert (bubble_share(run) or 0.0) < 0.01  # lone instances have none
    picture = time_lines({name: found[0] for name, found in results.runs.items()}, "tiny")
    outcome = Outcome([row], {"time-line": picture}, {"tiny": [("cluster", "tiny")]}, ["A remark."])
    write_page(tmp_path / "page.md", {"kunserve-fig13": outcome}, told_of_effort(runs, 60.0))
    text = (tmp_path / "page.md").read_text()
    assert "A remark." in text and "page/kunserve-fig13-time-line.png" in text
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
    bare = changed(plain, machine, WITHOUT_GUARD.changes).params
    assert bare.overload.max_compute_load == math.inf
    assert not changed(plain, machine, Changes(num_merges=1)).params.auto_restore
    streamed = changed(plain, machine, Changes(streamed_bytes=1 << 29))
    assert isinstance(streamed.executor, StreamedParameters)
    less, full = (read_spec("burst-burstgpt-14b").changed(memory_utilisation=u).machine for u in (0.5, 0.9))
    assert 0 < less.kv_tokens < 0.3 * full.kv_tokens
    assert job_text(TINY, SPARE, 0, 1.0) != job_text(TINY, Variant(SPARE.name, "recompute"), 0, 1.0)


def test_when_memory_ran_short_is_told_of_the_first_seed_that_dropped() -> None:
    def run(name: str, ttft_s: float, log: list[dict[str, Any]]) -> RunResult:
        rows = [{"scheduled_s": float(t), "ttft_s": ttft_s if t > 2 else 0.5} for t in range(20)]
        return RunResult(name, events={"log": log}, requests_detail=rows)

    log = [{"t": 3.5, "kind": "drop_decided"}, {"t": 5.0, "kind": "exchange_done", "ms": 1500.0}]
    runs = {
        WITHOUT_GUARD.name: [run(WITHOUT_GUARD.name, 9.0, []), run(WITHOUT_GUARD.name, 4.0, log)],
        "recompute": [run("recompute", 8.0, []), run("recompute", 6.0, [])],
    }
    told = timing({"tiny": Results(tiny(), [1.0, 1.0], runs)})
    assert "first drop 2 s into a burst of 2 s, exchanges of 1.5 s; median TTFT 0.50 s before" in told
    assert "4.00 s from 10 s after the burst on (recompute 6.00 s)" in told
    told = timing({"tiny": Results(tiny(), [1.0], {WITHOUT_GUARD.name: [], "recompute": []})})
    assert told.endswith("tiny: no drop.")  # and nothing is concluded


@pytest.mark.parametrize(
    ("drop_s", "waiting_s", "late_from_s", "objections"),
    [
        (4.0, 3.0, 2.5, []),
        (2.5, 3.0, 2.1, ["with much of the burst to come"]),
        (4.0, 0.6, 2.5, ["were not late before"]),
        (4.0, 3.0, 4.5, ["did not come before"]),
        (2.5, 0.6, 5.0, ["with much of the burst to come", "were not late before", "did not come before"]),
    ],
)
def test_a_drop_is_called_too_late_only_where_the_numbers_bear_it_out(
    drop_s: float, waiting_s: float, late_from_s: float, objections: list[str]
) -> None:
    """The burst lasts from 2 s to 4 s; TTFT is 0.5 s before it."""
    rows = [{"scheduled_s": t / 10, "ttft_s": waiting_s if t >= 20 else 0.5} for t in range(200)]
    rows += [{"scheduled_s": late_from_s, "ttft_s": 9.0}] * 2
    run = RunResult("made up", events={"log": [{"t": drop_s, "kind": "drop_decided"}]}, requests_detail=rows)
    told = timing({"tiny": Results(tiny(), [1.0], {WITHOUT_GUARD.name: [run], "recompute": [run]})})
    assert "no exchange" in told
    assert ("So in tiny memory fills when the burst is over or nearly so" in told) == (not objections)
    assert ("Not so in tiny" in told) == bool(objections)
    found = ("with much of the burst to come", "were not late before", "did not come before")
    assert [words for words in found if words in told] == objections


def test_a_drop_in_a_run_that_served_nobody_is_told_all_the_same() -> None:
    run = RunResult("made up", events={"log": [{"t": 4.0, "kind": "drop_decided"}]}, requests_detail=[])
    told = timing({"tiny": Results(tiny(), [1.0], {WITHOUT_GUARD.name: [run], "recompute": [run]})})
    assert "median TTFT (none) before the burst" in told and "Not so in tiny" in told


def _with_p99(**p99_s: float | None) -> Results:
    """Made-up runs of which every request has this TTFT, and a stay of 10 s."""
    names = {"spare": SPARE.name, "bare": WITHOUT_GUARD.name}
    runs = {}
    for key, ttft_s in p99_s.items():
        row = {"scheduled_s": 0.0, "ttft_s": ttft_s, "e2e_s": None if ttft_s is None else ttft_s + 10.0}
        runs[names.get(key, key)] = [RunResult(key, requests_detail=[row])]
    return Results(tiny(), [1.0], runs)


def test_what_less_memory_is_said_to_give_follows_the_numbers() -> None:
    def told(**p99_s: float | None) -> str:
        results = _with_p99(**p99_s)
        return stay.remark(results, results)

    short = told(recompute=12.0, bare=6.0, spare=3.0)
    assert "Memory to spare divides recompute's by 4.0: memory is what most of it waits for." in short
    assert "own trigger divides it by 2.0. An order of magnitude is more than memory alone can give" in short
    assert "stays are 10.00 s is set and not found" in short
    assert "Memory alone can give an order of magnitude" in told(recompute=60.0, bare=6.0, spare=3.0)
    ample = told(recompute=4.0, bare=6.0, spare=3.0)
    assert "most of it does not wait for memory" in ample and "divides it by 0.7" in ample
    unknown = told(recompute=4.0, bare=None, spare=None)
    assert unknown.endswith(
        "drop without compute guard (none), memory to spare (none). What memory gives is not known."
    )


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


def test_the_command_lists_refuses_and_reproduces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIGURES)
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
    spec = tiny().changed(seeds=[0], mean_load=0.3)
    first = Runs(folder=tmp_path)
    before = run_spec(spec, first, [Variant("recompute", "recompute")])
    second = Runs(folder=tmp_path)
    after = run_spec(spec, second, [Variant("recompute", "recompute")])
    assert (first.num_done, first.num_kept, second.num_done, second.num_kept) == (2, 0, 0, 2)
    assert told_of_effort(first, 600.0) == "2 simulations took 10 minutes here."
    run_spec(spec, second, [Variant("recompute", "recompute"), Variant("drop", "drop")])
    assert told_of_effort(second, 600.0) == "2 of 3 runs were kept from before."
    assert after.factors == pytest.approx(before.factors)
    assert after.one("recompute").ttft_s.p99 == pytest.approx(before.one("recompute").ttft_s.p99)


def test_figures_side_by_side_share_what_both_need() -> None:
    spec, told = tiny().changed(seeds=[0], mean_load=None), []
    recompute, drop = Variant("recompute", "recompute"), Variant("drop", "drop")
    with Runs(2, lambda done, total, name: told.append((done, total, name))) as runs, ThreadPoolExecutor(2) as threads:
        figures = [threads.submit(run_spec, spec, runs, [recompute, other]) for other in (drop, SPARE)]
        one, other = (figure.result() for figure in figures)
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
        run_spec(tiny(), runs)
    assert runs.num_done == 0


def test_a_figure_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def fails(runs: Runs) -> Outcome:
        begun.wait(60.0)
        raise JettisonError("no such luck")

    def goes_on(runs: Runs) -> Outcome:
        begun.set()
        for seed in range(10_000):
            run_spec(tiny().changed(seeds=[seed], mean_load=None), runs, [SPARE])
        return Outcome()

    some = experiment("kunserve-fig15")
    made = {"one": replace(some, name="one", reproduce=fails), "two": replace(some, name="two", reproduce=goes_on)}
    monkeypatch.setattr(command, "experiment", made.__getitem__)
    with pytest.raises(JettisonError, match="no such luck"):
        command.reproduce(
            ["one", "two"], Console(file=io.StringIO()), json_out=None, plots=tmp_path, page=None, processes=2
        )


def test_an_interrupt_ends_the_figures_that_wait_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's reaches all processes: it comes back as what a run ended with."""
    monkeypatch.setattr(command, "experiment", lambda name: replace(experiment("kunserve-fig15"), reproduce=waits))

    def waits(runs: Runs) -> Outcome:
        runs.all([Interrupted("{}")])
        return Outcome()

    with pytest.raises(KeyboardInterrupt):
        command.reproduce(["one"], Console(file=io.StringIO()), json_out=None, plots=tmp_path, page=None, processes=2)


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
    band = Band(1.0, None)
    for drops, expected in ((0, None), (2, True)):
        found = _found(drops)
        rows = [
            compared(found, "f", "w", "m", "drop", "recompute", ttft(99), paper=None, band=band),
            alone(found, "f", "w", "m", "drop", ttft(99), paper=None, band=band),
            _lowest_row("LongBench 14B", found, "drop"),
        ]
        assert [row.in_band for row in rows] == [expected] * 3
        assert ("nothing dropped" in table(rows)[-1]) == (expected is None)
        missed = compared(found, "f", "w", "m", "drop", "swap", ttft(99), paper=None, band=Band(2.0, None))
        assert missed.in_band is False
        assert alone(found, "f", "w", "m", "swap", ttft(99), paper=None, band=band).in_band is True


def test_kept_runs_of_another_program_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny().changed(seeds=[0], mean_load=None)
    recompute = [Variant("recompute", "recompute")]
    run_spec(spec, Runs(folder=tmp_path), recompute)
    again, other = Runs(folder=tmp_path), Runs(folder=tmp_path)
    run_spec(spec, again, recompute)
    monkeypatch.setattr(pool, "program_mark", lambda: "another")
    run_spec(spec, other, recompute)
    assert (again.num_kept, other.num_kept) == (1, 0)


def test_windows_of_figures_hold_their_bursts() -> None:
    for spec, window, number in (("ablation", ablation.burst_s(), 0), ("long-run", long_run.second_wave_s(), 1)):
        begin_s, end_s = burst_span_s(spec, number)
        assert window[0] <= begin_s and end_s + 10.0 <= window[1]
    replayed = read_spec("extreme-burst").raw["workload"]["replay_burst"]
    assert (replayed["start_s"], replayed["end_s"]) == burst_span_s("extreme-burst")
    assert replayed["start_s"] == extreme.burst_begins_s()
