"""``jettison demo``: four small instances that sleep, wake, pack, drop and restore through a day, beside a batch.

Against the same day on the same instances, all awake, which recompute, and have the batch as requests of low priority.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jettison.demo.burst import DemoModel, make_setup, run_shown
from jettison.demo.load import DAY, Day, FittedDay, fit_day, seeded
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, profile_quickly
from jettison.report.day import DayFigures, PhaseSpan, day_figures, day_opening, day_rows, missed_goals, story_rows
from jettison.report.failures import check_answered, print_failures
from jettison.report.html import PagePicture, PageTable, write_html
from jettison.report.plots import draw_day
from jettison.report.results import RunResult, write_results
from jettison.report.terminal import phase, print_whole

NUM_INSTANCES = 4

DAY_MODEL = DemoModel(layers=6, hidden=256, heads=4, kv_heads=1, kv_tokens_per_instance=1200, context=1000)

SERVED: dict[str, tuple[str, dict[str, object]]] = {
    "all awake": ("recompute", {"offline": "priority"}),
    "Jettison": (
        "drop", {"offline": "harvest", "packing": "mell", "sleep": "auto", "sleep_after_s": 1, "min_awake": 1},
    ),
}  # fmt: skip
"""Name of a run -> its ``--overload`` and other flags. The baseline is first: a plain engine serves the batch as
requests of low priority, and preempts the request that came last where memory is short."""


def run_day(out_dir: Path, seed: int = 0, *, model: DemoModel = DAY_MODEL, day: Day = DAY) -> int:
    """Make the model, measure the machine, fit the day to it, serve it in both ways; write the report.

    Raises JettisonError when a server does not come up, and, after all is written, where requests were not answered.
    ``model``, ``day``: in place of the demo's own, for a demo of another size.
    """
    console = Console()
    console.print("[bold]Jettison demo[/bold]: a day on four instances that sleep, wake, pack, drop and restore")
    setup = dataclasses.replace(make_setup(out_dir, seed, model), instances=NUM_INSTANCES)
    with phase("measuring this machine, then fitting the day to it", console):
        profile_quickly(setup)  # before the first wake nothing else tells how long one takes
        speed = measure_speed(setup)
        fitted = fit_day(day, speed, setup.deployment(), seed)
    _tell_plan(console, setup, day, fitted)
    workload = day.workload(fitted.rate_per_s, seed)
    pool = seeded(day.batch, seed)
    runs = [
        run_shown(console, dataclasses.replace(setup, extra_flags=flags), policy, workload, name, seed, pool=pool)
        for name, (policy, flags) in SERVED.items()
    ]
    for run in runs:
        run.config["day"] = {
            "phases": [dataclasses.asdict(each) for each in day.phases], **dataclasses.asdict(fitted),
        }
    console.print()
    print_failures(runs, console)
    _report(console, out_dir, day, runs)
    check_answered(runs)
    return 0


def _tell_plan(console: Console, setup: ExperimentSetup, day: Day, fitted: FittedDay) -> None:
    console.print(
        f"{setup.instances} instances of {setup.memory_bytes() / 2**20:.0f} MiB, {setup.parameter_share():.0%} of it "
        f"the model, KV for {setup.capacity_tokens() / setup.instances:.0f} tokens each; at night"
        f" {fitted.rate_per_s:.2f} requests/s, at most {max(max(p.rates) for p in day.phases) * fitted.rate_per_s:.1f}:"
        f" at its peak the day asks for {fitted.peak_over_capacity:.2f} of the KV that there is undropped, and for"
        f" {fitted.burst_core_share:.0%} of what the cores can compute ({fitted.core_share:.0%} over the whole day)"
    )
    if fitted.caution is not None:
        console.print(fitted.caution, style="bold red", highlight=False)


def _report(console: Console, out_dir: Path, day: Day, runs: list[RunResult]) -> None:
    spans = [PhaseSpan(p.name, p.start_s, p.end_s) for p in day.phases]
    base, own = (day_figures(run, day.duration_s) for run in runs)
    headers, rows = ["", *(run.name for run in runs), f"{runs[1].name} / {runs[0].name}"], day_rows(base, own)
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print_whole(table, console)
    for line in missed_goals(base, own):
        console.print(f"missed: {line}; what happened when is in the report", style="bold red", highlight=False)
    write_results(out_dir / "report.json", runs)
    write_html(
        out_dir / "report.html", runs, title="Jettison demo: a day", opening=day_opening(base, own),
        tables=[PageTable("The day in figures", headers, rows, _notes(base)), _story(runs, spans)],
        pictures=[PagePicture(
            "Memory by use over time, on each instance",
            f"Stacked areas of each instance's memory over time: {' and '.join(run.name for run in runs)}. Phases: "
            + ", ".join(f"{span.name} from {span.start_s:g} s" for span in spans),
            lambda width: draw_day(runs, spans, width_in=width),
        )],
    )  # fmt: skip
    console.print(f"report: {out_dir / 'report.html'}, {out_dir / 'report.json'}", soft_wrap=True)


def _story(runs: list[RunResult], spans: list[PhaseSpan]) -> PageTable:
    return PageTable(
        "What happened when", ["phase", "run", "requests", "P99 TTFT", "instances"], story_rows(runs, spans),
        is_folded=True,
    )


def _notes(base: DayFigures) -> list[str]:
    return [
        "P99 TTFT: 99 of 100 online requests had their first token within. Device-seconds: instances that were not "
        "asleep, over time, until the last answer. All awake: four instances that are never asleep and recompute what "
        f"does not fit, with the {base.num_lines} lines of the batch as requests of low priority."
    ]
