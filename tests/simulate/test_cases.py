"""From a spec to results: the cases, what they say of themselves, and that processes change nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from specs import PROFILE, deployment, spec

from jettison.cli.main import main
from jettison.cost.deployment import deployment_to_document
from jettison.cost.model import CostModel
from jettison.cost.presets import instance_preset
from jettison.cost.profile_document import Fingerprint, ModelSizes, StoredProfile, to_document
from jettison.errors import BudgetError, ConfigError, JettisonError, TraceError
from jettison.profiles import save_profile
from jettison.simulate.batch import CaseProgress, run_cases
from jettison.simulate.cases import Case, cases_of, run_case
from jettison.simulate.command import with_timelines
from jettison.simulate.counterfactual import counterfactual_runs
from jettison.simulate.machines import resolve_machine
from jettison.simulate.sizing_command import size_command
from jettison.simulate.spec import parse_spec
from jettison.simulate.table import table_rows
from waiting import until


def test_a_case_for_each_point_seed_and_variant() -> None:
    cases = cases_of(spec(seeds=2, sweep={"cluster.instances": [2, 3]}), "file")
    assert [case.name for case in cases] == [
        "recompute instances=2 seed=0", "drop instances=2 seed=0", "recompute instances=2 seed=1",
        "drop instances=2 seed=1", "recompute instances=3 seed=0", "drop instances=3 seed=0",
        "recompute instances=3 seed=1", "drop instances=3 seed=1",
    ]
    assert cases[0].raw["variants"] == [{"policy": "recompute"}] and cases[3].raw["seeds"] == [1]


def test_variants_that_are_null_or_have_no_name_are_run() -> None:
    variants = [None, "recompute", {"name": None, "policy": "swap", "settings": None}, {"name": "last", "policy": None}]
    cases = cases_of(spec(variants=variants), "file")
    assert [case.variant for case in cases] == ["drop", "recompute", "swap", "last"]
    assert [parse_spec(case.raw).variants[0].policy for case in cases] == ["drop", "recompute", "swap", "drop"]
    swap = run_case(cases[2])
    assert swap.config["policy"] == "swap"
    assert list(counterfactual_runs(swap, ["recompute"], num_processes=1)) == ["recompute (simulated)"]


def test_a_variant_may_dispatch_as_a_proxy_before_several_engines() -> None:
    proxy = {"name": "proxy", "policy": "recompute", "settings": {"dispatch": "fewest-requests"}}
    behind, ours = (run_case(case) for case in cases_of(spec(variants=[proxy, "recompute"]), "file"))
    assert behind.events["rebalanced"] == 0 < ours.events["rebalanced"]
    assert behind.requests.completed == ours.requests.completed == ours.requests.submitted


def test_results_say_what_they_are_and_run_again_from_it() -> None:
    cases = cases_of(spec(), "file")
    runs = run_cases(cases, num_processes=1)
    recompute, drop = runs
    assert drop.events["drops"] >= 1 and recompute.events["drops"] == 0
    assert drop.config["policy"] == "drop" and drop.config["variant"] == "drop"
    again = run_case(Case("drop", drop.config["spec"], variant="drop", seed=drop.config["seed"]))
    assert again.config["event_log_hash"] == drop.config["event_log_hash"]
    rows = table_rows(runs)
    assert [row[:2] for row in rows] == [["", "recompute"], ["", "drop"]] and rows[1][4].endswith("x")


def test_the_number_of_processes_changes_nothing() -> None:
    cases = cases_of(spec(seeds=2), "file")
    alone, shared = (run_cases(cases, num_processes=number) for number in (1, 2))
    assert [asdict(run) for run in alone] == [asdict(run) for run in shared]


def test_a_failure_in_another_process_says_which_case() -> None:
    good, other = cases_of(spec(), "file")
    bad = Case("broken", {**other.raw, "workload": {"trace": "nowhere.csv"}}, variant="drop")
    with pytest.raises(TraceError, match=r"^broken: workload\.trace: there is no file nowhere\.csv"):
        run_cases([good, bad], num_processes=2)


class Fatal:
    """Ends the process that takes it from a queue, as the system does when memory is out."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (137,)


def test_a_process_that_is_killed_is_one_line_that_names_the_case() -> None:
    good, other = cases_of(spec(), "file")
    fatal = replace(other, name="fatal", raw={**other.raw, "cluster": Fatal()})
    with pytest.raises(JettisonError, match=r"while it simulated .*'fatal'.*, `--processes 1`$") as raised:
        run_cases([good, fatal, *[good] * 3], num_processes=2)
    assert type(raised.value) is JettisonError and "\n" not in str(raised.value)
    assert str(raised.value).count("'") <= 4, "at most as many as there were processes"


def test_an_interrupt_leaves_no_process() -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases_of(spec(seeds=4), "file"), num_processes=2, on_progress=interrupted)
    assert set(multiprocessing.active_children()) == before


KILLED = """
import os, signal, time
from jettison.simulate.pool import RunPool
if __name__ == "__main__":
    pool = RunPool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=subprocess.PIPE)
    told, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    await until(lambda: _is_over(int(told)))


def _is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("num_processes", [1, 2])
def test_progress_of_every_case_is_told(num_processes: int) -> None:
    seen: list[list[CaseProgress]] = []
    cases = cases_of(spec(), "file")
    runs = run_cases(cases, num_processes=num_processes, on_progress=lambda progress: seen.append(list(progress)))
    for last, run in zip(seen[-1], runs, strict=True):
        arrivals_s = [row["scheduled_s"] for row in run.requests_detail or ()]
        assert last.share == 1.0 and last.last_arrival_s == max(arrivals_s) <= last.now_s


def test_a_run_that_is_cut_off_is_over_too() -> None:
    seen: list[list[CaseProgress]] = []
    cases = cases_of(spec(run={"until_s": 0.5}), "file")
    runs = run_cases(cases, num_processes=1, on_progress=lambda progress: seen.append(list(progress)))
    assert all(run.requests.failed for run in runs)
    assert [each.share for each in seen[-1]] == [1.0, 1.0]


def test_being_told_of_time_changes_nothing() -> None:
    case = cases_of(spec(), "file")[1]
    times: list[tuple[float, float]] = []
    told = run_case(case, on_time=lambda *pair: times.append(pair))
    assert told.config["event_log_hash"] == run_case(case).config["event_log_hash"]
    assert [now_s for now_s, _ in times] == sorted({now_s for now_s, _ in times}) and len(times) >= 3


HOURS = [[0.5, 40, 20], [1.0, 40, 20], [3700.0, 40, 20]]


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_virtual_time_is_told_where_no_terminal_is(command: str, tmp_path, monkeypatch, capsys) -> None:
    """Also through hours in which no request ends: and that there are such is said before."""
    path = tmp_path / "spec.json"
    plan = {"plan": {"slo_ttft_p99_s": 100.0, "max_instances": 2}} if command == "plan" else {}
    path.write_text(yaml.safe_dump(spec(workload={"rows": HOURS}, variants=["drop"]) | plan))
    monkeypatch.setattr("jettison.report.terminal.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("jettison.simulate.batch.POLL_S", 0.0)
    assert main([command, str(path), "--processes", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "mind: rows: no request arrives from 1 s to 3,700 s (1.0 h)" in lines
    told = [line for line in lines if " of virtual time (requests arrive until 3,700 s), " in line]
    assert told and all(" runs are over; " in line for line in told)
    at_s = [float(re.search(r"is at ([\d,]+) s of virtual", line)[1].replace(",", "")) for line in told]  # type: ignore[index]
    assert any(1.0 < each < 3700.0 for each in at_s), at_s


def test_the_pilots_of_a_mean_load_tell_of_time_too() -> None:
    times: list[tuple[float, float]] = []
    rows = [[0.02 * i, 40, 30] for i in range(150)]
    raw = spec(workload={"rows": rows, "mean_load": 0.3, "mean_load_by": "time"})
    cases_of(raw, "file", on_time=lambda *pair: times.append(pair))
    assert times and all(now_s >= 0.0 and last_s > 0.0 for now_s, last_s in times)


def test_gaps_are_those_of_the_load_that_is_run() -> None:
    """A mean load by time may stretch minutes into hours."""
    cautions: list[str] = []
    rows = [[0.0, 40, 30], [100.0, 40, 30]]
    raw = spec(workload={"rows": rows, "mean_load_by": "time", "mean_load": 0.4}, variants=["drop"])
    cases_of(raw, "file", factor=0.02, on_cautions=cautions.extend)
    assert cautions == ["rows: no request arrives from 0 s to 5,000 s (1.4 h)"]


def test_settings_are_those_of_serve_and_of_the_variant_first() -> None:
    variants = [{"name": "a", "policy": "drop"}, {"name": "b", "policy": "drop", "settings": {"max-num-seqs": 3}}]
    a, b = run_cases(cases_of(spec(variants=variants), "file"), num_processes=1)
    assert a.config["cluster"]["max_num_seqs"] == 64 and b.config["cluster"]["max_num_seqs"] == 3
    assert a.config["cluster"]["memory_bytes"] == deployment().budget_bytes


def too_much(**shaping: object) -> dict[str, object]:
    return {"workload": {"rows": [[0, 5, 5], [1, 5, 5]], **shaping}}


def many(**arrivals: object) -> dict[str, object]:
    return {"workload": {"arrivals": {"duration_s": 60, **arrivals}, "lengths": "burstgpt"}}


IMPOSSIBLE: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"settings": {"max_num_seqs": 300, "max_num_batched_tokens": 100}}, ConfigError, "variant 'recompute': --max-num"),
    ({"faults": [{"kind": "crash", "at_s": 1, "worker": 2}]}, ConfigError, "faults[0] names worker 2: the workers"),
    ({"workload": {"trace": "nowhere.csv"}}, TraceError, "workload.trace: there is no file nowhere.csv"),
    ({"workload": "brust"}, ConfigError, "workload.builtin: unknown workload 'brust'"),
    ({"workload": {"rows": [[0, 5, 5]], "skip": 1}}, ConfigError, "workload.skip: rows has 1 requests, 1 "),
    (too_much(window_s=[5, 6]), ConfigError, "workload.window_s: 5 s to 6 s is no window of rows"),
    ({"workload": {"rows": [[0, 5, 5]], "offline": {"lengths": "nothing", "unfinished": 1}}}, ConfigError,
     "workload.offline.lengths: unknown lengths 'nothing'"),
    ({"cluster": "kunserve-z"}, ConfigError, "cluster: unknown cluster 'kunserve-z' (did you mean"),
    ({"cluster": {"gpu": "h100", "model": "qwen2.5-14b"}}, ConfigError, "cluster: unknown GPU 'h100'"),
    ({"cluster": {"gpu": "rtx-4090", "model": "qwen2.5-72b", "gpus_per_instance": 1}}, ConfigError, "cluster: qwen2"),
    ({"cluster": {"preset": "kunserve-a", "memory_utilisation": 0.3}}, BudgetError, "cluster.memory_utilisation: qwen"),
    ({"cluster": {"preset": "kunserve-a", "memory": "20GiB"}}, BudgetError, "cluster: kunserve-a (8 x qwen2.5-14b/a8"),
    ({"cluster": {"preset": "kunserve-a", "memory": "100GiB"}}, BudgetError, "cluster.memory: 107374182400 bytes are"),
    ({"cluster": {"preset": "kunserve-a", "kv_tokens": 2_000_000}}, BudgetError, "cluster.kv_tokens: 2000000 tokens b"),
    ({"cluster": {"description": "nowhere.json"}}, ConfigError, "cluster.description: there is no file nowhere.json"),
    ({"cluster": {"description": {"format": "x"}}}, ConfigError, "cluster.description: format is 'x', not 'jettison-"),
    ({"cluster": {"model": "nowhere"}}, ConfigError, "cluster.model: there is no model folder nowhere"),
    ({"workload": {"rows": [[0, 5, 5]], "mean_load": 0.5}}, ConfigError, "workload.mean_load: rows has no demand"),
    (too_much(length_scale=1e9), ConfigError, "workload.length_scale: length scale 1e+09: a length comes to 5e+0"),
    (too_much(upscale=1e12), ConfigError, "workload.upscale: rows upscaled 1e+12 times: more than 100,000,000 "),
    (too_much(rate_scale=1e-300), ConfigError, "workload.rate_scale: rate scale 1e-300: the last requests would"),
    (too_much(slice_s=1e-9, slice_index=0), ConfigError, "workload.slice_s: rows has more than 1,000,000 slices of"),
    (too_much(replay_burst={"start_s": 0, "end_s": 2, "repeats": 10**9}), ConfigError, "workload.replay_burst: 0 s"),
    (many(process="poisson", rate_per_s=1e300), ConfigError, "workload.arrivals: Poisson arrivals at 1e+300 requests/"),
    (many(process="on_off", on_rate_per_s=1, on_s=1e-9, off_s=1e-9), ConfigError, "workload.arrivals: Poisson arr"),
    (many(process="diurnal", mean_rate_per_s=1, period_s=1e-300), ConfigError, "workload.arrivals: Poisson arr"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), IMPOSSIBLE)
def test_what_cannot_be_run_is_one_line(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        cases_of(spec(**changes), "file")
    assert str(raised.value).startswith(message), str(raised.value)
    assert "\n" not in str(raised.value)


def test_mean_load_is_found_and_the_same_for_all_variants_and_points() -> None:
    workload = spec()["workload"] | {"mean_load": 0.4}
    workload["arrivals"] = {"process": "poisson", "rate_per_s": 20.0, "duration_s": 6.0}
    pilots: list[float] = []
    cases = cases_of(
        spec(workload=workload, sweep={"cluster.instances": [2, 4]}), "file",
        on_pilot=lambda n, f, load: pilots.append(load),
    )
    assert len({case.factor for case in cases}) == 1 and cases[0].factor != 1.0
    assert abs(pilots[-1] / 0.4 - 1.0) < 0.05
    first = run_case(cases[0])
    assert first.config["workload"]["mean_load"]["factor"] == cases[0].factor
    assert 0.2 < first.config["fairness"]["mean_load"] < 0.8


def test_mean_load_by_time_and_of_rows_in_hand() -> None:
    rows = [[0.02 * i, 40, 30] for i in range(150)]
    for way in ("time", "users"):
        raw = spec(workload={"rows": rows, "mean_load": 0.3, "mean_load_by": way}, variants=["recompute"])
        run = run_case(cases_of(raw, "file")[0])
        assert run.config["fairness"]["mean_load"] == pytest.approx(0.3, rel=0.15), way


def test_time_lines_of_simulated_runs_have_steps_transfers_and_decisions(tmp_path: Path) -> None:
    cases = with_timelines(cases_of(spec(), "file"), tmp_path / "line.json.gz")
    assert [Path(str(case.timeline)).name for case in cases] == ["line-recompute.json.gz", "line-drop.json.gz"]
    watched = [run_case(case) for case in cases]
    plain = run_cases(cases_of(spec(), "file"), num_processes=1)
    assert [run.config["event_log_hash"] for run in watched] == [run.config["event_log_hash"] for run in plain]
    assert [run.events for run in watched] == [run.events for run in plain]
    events = json.loads(gzip.decompress((tmp_path / "line-drop.json.gz").read_bytes()))["traceEvents"]
    found = {event.get("cat") for event in events}
    assert {"step", "transfer", "decision", "move", "request"} <= found
    num_requests = plain[1].requests.completed
    ends = [e for e in events if e.get("cat") == "request" and e["ph"] == "e" and e["name"].startswith("r")]
    assert len(ends) == num_requests
    steps = [e for e in events if e.get("cat") == "step"]
    assert {e["tid"] for e in steps} == {0, 1} and all(e["dur"] > 0 for e in steps)


def test_a_description_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps(deployment_to_document(deployment())))
    by_file = cases_of(spec(cluster={"description": "deployment.json", "instances": 3}), "file", tmp_path)
    inline = cases_of(spec(cluster={"description": deployment_to_document(deployment()), "instances": 3}), "file")
    hashes = {run_case(case).config["event_log_hash"] for case in (by_file[1], inline[1])}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("cluster", "share"),
    [
        ({"preset": "kunserve-a", "instances": 2}, 0.344),
        ({"preset": "kunserve-b", "instances": 2}, 0.423),
        ({"preset": "kunserve-a", "instances": 2, "memory_utilisation": 0.5}, 0.344),
        ({"preset": "kunserve-a", "instances": 2, "memory": "55GiB"}, 0.344 * 80 / 55),
    ],
)
def test_presets_state_the_papers_parameter_share(cluster: dict[str, object], share: float) -> None:
    raw = spec(cluster=cluster, workload={"rows": [[0, 50, 3]]}, variants=["recompute"], settings={})
    run = run_case(cases_of(raw, "file")[0])
    assert run.config["fairness"]["parameter_share"] == pytest.approx(share, abs=0.001)


def test_a_case_carries_the_content_of_its_description_and_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, elsewhere = tmp_path / "specs", tmp_path / "elsewhere"
    specs.mkdir()
    elsewhere.mkdir()
    known = deployment()
    assert known.profile is not None
    (specs / "live.json").write_text(json.dumps(deployment_to_document(known)))
    (specs / "bare.json").write_text(json.dumps(deployment_to_document(replace(known, profile=None))))
    mark = Fingerprint("a machine", "c", "v", "float64", 1, "native")
    save_profile(specs / "profile.json", StoredProfile(mark, known.profile))
    for decoy in ("live.json", "bare.json", "profile.json"):
        (elsewhere / decoy).write_text("{}")
    found = [
        run_case(cases_of(spec(cluster={**cluster, "instances": 3}), "file", specs)[1])
        for cluster in ({"description": "live.json"}, {"description": "bare.json", "profile": "profile.json"})
    ]
    monkeypatch.chdir(elsewhere)
    for run in found:
        assert set(run.config["spec"]["cluster"]) == {"description", "instances"}
        again = run_case(Case("drop", run.config["spec"], variant="drop", seed=run.config["seed"]))
        assert again.config["event_log_hash"] == run.config["event_log_hash"]
        (other,) = counterfactual_runs(run, ["recompute"], num_processes=1).values()
        assert other.config["cluster"]["instances"] == 3


def test_a_profile_takes_the_place_of_a_preset_s_roofline(tmp_path: Path) -> None:
    instance = instance_preset("qwen2.5-14b", "a800-80g")
    slow = CostModel(48, 0.0, 0.0, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    measured = replace(PROFILE, cost=slow, link_bytes_per_s=1.0, device_copy_bytes_per_s=None)
    mark = Fingerprint("a machine", "c", "v", "bfloat16", 1, "native")
    save_profile(tmp_path / "p.json", StoredProfile(mark, measured, ModelSizes.of(instance.shape)))
    cluster = {"instances": 2, "profile": "p.json", "link": {"gbps": 10, "efficiency": 1.0}}
    forms: list[dict[str, object]] = [{"preset": "kunserve-a"}, {"model": "qwen2.5-14b", "gpu": "a800-80g"}]
    for form in forms:
        raw = spec(
            cluster={**cluster, **form}, workload={"rows": [[0, 50, 3]]}, variants=["recompute"], settings={},
        )
        (case,) = cases_of(raw, "file", tmp_path)
        machine = resolve_machine(parse_spec(case.raw).cluster, {})
        assert machine.profile.cost == slow and machine.profile.remap_fixed_s == PROFILE.remap_fixed_s
        assert machine.topology.host is not None
        assert machine.profile.host_copy_bytes_per_s == machine.topology.host.bytes_per_s
        assert machine.profile.device_copy_bytes_per_s == instance.device_copy_bytes_per_s
        assert machine.profile.link_bytes_per_s == machine.topology.between.bytes_per_s == 10e9 / 8
        # Three steps of 48 ms: what the profile says and the roofline does not. The case needs the file no more.
        run = run_case(replace(case, base_dir=str(tmp_path / "elsewhere")))
        assert run.e2e_s.p50 is not None and 0.144 <= run.e2e_s.p50 < 0.15
        assert run.config["cluster"]["name"].endswith("steps as measured on a machine")
        found = size_command(raw, "file", tmp_path, slo_ttft_p99_s=0.05, max_instances=1, console=Console(quiet=True))
        assert found[0].best.ttft_p99_s == pytest.approx(0.048, abs=1e-3)


@pytest.mark.parametrize(("sizes", "told"), [
    (None, "48 layers, and not 80 layers, hidden 8192, 2 bytes a number"),
    (ModelSizes(48, 5120, 2), "48 layers, hidden 5120, 2 bytes a number, and not 80 layers, hidden 8192, 2 by"),
    (ModelSizes(80, 8192, 4), "80 layers, hidden 8192, 4 bytes a number, and not 80 layers, hidden 8192, 2 bytes"),
])  # fmt: skip
def test_a_profile_of_another_model_is_refused(sizes: ModelSizes | None, told: str) -> None:
    num_layers = 48 if sizes is None else sizes.num_layers
    measured = replace(PROFILE, cost=replace(PROFILE.cost, num_layers=num_layers))
    mark = Fingerprint("a machine", "c", "v", "bfloat16", 1, "native")
    cluster = {"preset": "kunserve-b", "profile": to_document(StoredProfile(mark, measured, sizes))}
    with pytest.raises(ConfigError, match=f"^cluster.profile was measured for another model than qwen2.5-72b: {told}"):
        cases_of(spec(cluster=cluster, settings={}), "file")


def test_a_profile_of_other_weights_is_refused() -> None:
    instance = instance_preset("qwen2.5-14b", "a800-80g")
    mark = Fingerprint("a machine", "c", "v", "bfloat16", 1, "native", "int4-g128")
    measured = replace(PROFILE, cost=replace(PROFILE.cost, num_layers=48))
    several = replace(mark, weights="int4-g32+int8-g32")
    mixed = to_document(StoredProfile(several, measured, ModelSizes.of(instance.shape)))
    with pytest.raises(ConfigError, match=r"int4-g32\+int8-g32 weights, and not plain: a preset's are all of one form"):
        cases_of(spec(cluster={"preset": "kunserve-a", "profile": mixed}, settings={}), "file")
    document = to_document(StoredProfile(mark, measured, ModelSizes.of(instance.shape)))
    cluster = {"preset": "kunserve-a", "profile": document}
    with pytest.raises(ConfigError, match=r"^cluster.profile was measured with int4-g128 weights, and not plain: say "):
        cases_of(spec(cluster=cluster, settings={}), "file")
    machine = resolve_machine(parse_spec(spec(cluster=cluster | {"weights": "int4-g128"}, settings={})).cluster, {})
    assert machine.shape.parameter_bytes < instance.parameter_bytes / 2 and "int4-g128" in machine.name


def test_a_profile_of_one_gpu_is_none_of_an_instance_of_four() -> None:
    measured = replace(PROFILE, cost=replace(PROFILE.cost, num_layers=80))
    mark = Fingerprint("a machine", "c", "v", "bfloat16", 1, "native")
    cluster = {"preset": "kunserve-b", "profile": to_document(StoredProfile(mark, measured, ModelSizes(80, 8192, 2)))}
    with pytest.raises(ConfigError, match=r"^cluster.profile is of one GPU, and an instance of .* has 4$"):
        cases_of(spec(cluster=cluster, settings={}), "file")


@pytest.mark.parametrize(("profile", "told"), [
    ("none.json", "there is no file none.json"), ({"format": "other"}, "format is 'other', not"),
    ({}, "format is None"),
])  # fmt: skip
def test_what_is_no_profile_is_told_by_its_place(profile: object, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.profile: {told}"):
        cases_of(spec(cluster={"preset": "kunserve-a", "profile": profile}, settings={}), "file")
