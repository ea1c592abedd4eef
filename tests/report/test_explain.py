"""Decisions with their outcomes, and cards of incidents, from stored runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from logged_runs import LOG, declined, run

from jettison.cli.main import main
from jettison.report import decisions
from jettison.report.decisions import decisions_of
from jettison.report.explain import (
    explain_document,
    format_field,
    format_plan,
    print_decisions,
    print_incident,
    print_whole_run,
)
from jettison.report.incidents import incidents_of, whole_run
from jettison.report.results import write_results


def of_kind(decisions, kind):
    return [d for d in decisions if d.kind == kind]


def test_a_drop_finds_its_outcome_by_its_beginning() -> None:
    (drop,) = of_kind(decisions_of(run(late={4})), "drop")
    assert drop.at_s == 5.0 and drop.workers == (0, 1) and drop.group == 0
    assert drop.predicted["freed_bytes"] == 1000 and drop.predicted["memory_wait_s"] == 3.0
    assert "throughput_cost" not in drop.predicted, "what was not known is not shown"
    assert drop.outcome["bytes_to_kv"] == 1 << 20 and drop.outcome["exchange_ms"] == 500.0
    assert drop.outcome["decision_to_first_queued_step_ms"] == 20.0 and drop.outcome["step_in_flight_ms"] == 8.0
    assert drop.outcome["longest_wait_in_queue_s"] == pytest.approx(3.0), "request 4 waited until 8 s"


def test_a_drop_that_failed_says_so() -> None:
    log = [LOG[1], {"t": 5.1, "kind": "drop_failed", "reason": "no memory", "workers": [0, 1]}]
    (drop,) = decisions_of(run(log=log))
    assert drop.outcome["failed"] == "no memory" and "bytes_to_kv" not in drop.outcome


def test_restores_end_done_or_turned() -> None:
    turned, done = of_kind(decisions_of(run()), "restore")
    assert turned.outcome["ended_as"] == "restore_turned" and done.outcome["ended_as"] == "restore_done"
    assert done.outcome["after_s"] == pytest.approx(1.0)


def test_other_decisions() -> None:
    log = [
        {"t": 1.0, "kind": "worker_lost", "worker": 1, "groups": [0], "requests": 2, "moves": []},
        {"t": 1.4, "kind": "recovered", "worker": 0, "ms": 400.0},
        {"t": 3.0, "kind": "worker_joined", "worker": 1, "life": 2},
        {"t": 4.0, "kind": "migrated", "request": "r", "source": 0, "destination": 1, "ms": 250.0, "stop_ms": 3.0},
        {"t": 5.0, "kind": "scale_out", "group": 0, "missing_bytes": 5, "reason": "x"},
        {"t": 7.0, "kind": "scale_out_over"},
        {"t": 8.0, "kind": "yield", "group": 0, "cap_blocks": 5},
        {"t": 8.5, "kind": "rebalanced", "requests": 2, "to": [1]},
        {"t": 9.0, "kind": "something new"},
    ]
    decisions = decisions_of(run(log=log))
    assert [d.kind for d in decisions] == ["recover", "migrate", "scale out", "yield", "rebalance"]
    assert decisions[0].outcome == pytest.approx({"survivor_ready_after_s": 0.4, "worker_back_after_s": 2.0})
    assert decisions[1].at_s == 3.75 and decisions[2].outcome == {"need_over_after_s": 2.0}


def test_processes_that_come_and_go() -> None:
    log = [
        {"t": 1.0, "kind": "instance_asked", "worker": 2, "predicted_s": 2.0},
        {"t": 1.5, "kind": "instance_waits", "worker": 2, "reason": "no host has room", "waits_s": 0.5},
        {"t": 4.0, "kind": "worker_joined", "worker": 2, "life": 1},
        {"t": 5.0, "kind": "woken", "worker": 2, "ms": 900.0, "start_ms": 3000.0},
        {"t": 9.0, "kind": "instance_released", "worker": 2, "reason": "it has slept for 3 s", "left": 2},
        {"t": 11.0, "kind": "instance_asked", "worker": 2, "predicted_s": 3.0},
        {"t": 17.0, "kind": "instance_given_up", "worker": 2, "reason": "nothing needs it", "after_s": 6.0},
    ]
    first, released, second, given_up = decisions_of(run(log=log))
    assert [first.kind, released.kind] == ["start instance", "release instance"]
    assert first.workers == (2,) and first.predicted == {"predicted_s": 2.0}
    assert first.outcome == {"waited_for": "no host has room", "serves_after_s": 4.0, "start_ms": 3000.0}
    assert released.outcome == {"asked_for_again_after_s": 2.0} and released.inputs["left"] == 2
    assert second.outcome == {"given_up_after_s": 6.0} and given_up.kind == "give up start"


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("memory_wait_s", 3.0, "memory wait 3 s"), ("remap_ms", 2.0, "remap 2 ms"), ("ms", 2.0, "2 ms"),
    ("freed_bytes", 3 << 20, "freed bytes 3 MiB"), ("bytes_to_kv", 1 << 20, "bytes to kv 1 MiB"),
    ("sufficient", True, "sufficient yes"), ("stalled_requests", 1234, "stalled requests 1,234"),
    ("homes", {1: [0, 2]}, "homes 1: 0, 2"), ("load", 1.23456, "load 1.235"),
    ("stay_request_s", 265.6, "stay 265.6 request-seconds"),
])
def test_fields_are_read_by_their_units(name, value, shown) -> None:
    assert format_field(name, value) == shown


def test_all_of_it_is_printed_and_written() -> None:
    dropped = run(late={4})
    incidents = incidents_of(dropped, 1.0, {"recompute": run("recompute", [], late={4, 5})})[1:]
    console = Console(width=150)
    with console.capture() as printed:
        print_decisions(decisions_of(dropped), console)
        print_incident(incidents[0], 2, 1.0, console)
    text = printed.get()
    plan = "groups 0, 1: worker 1 layers 0 to 2, worker 0 layers 3 to 5"
    for expected in ("no drop", "compute binds", "1 MiB of parameters", "recompute", "so 1 saved", "P99", plan):
        assert expected in text
    document = json.loads(json.dumps(explain_document(dropped, incidents, 1.0)))
    assert document["incidents"][0]["saved"] == {"recompute": 1} and len(document["decisions"]) == 4
    assert document["slo_ttft_s"] == 1.0 and document["whole_run"] is None
    assert document["incidents"][0]["drops"][0]["plan"] == LOG[1]["merges"]


def test_a_drop_that_was_weighed_shows_its_forecast_and_what_came_of_it() -> None:
    foreseen = {"stay_request_s": 90.0, "taken_request_s": 40.0, "possible_request_s": 60.0}
    came = {"t": LOG[1]["t"] + 5.0, "kind": "forecast_outcome", "after_s": 5.0, "foreseen_request_s": 30.0,
            "seen_request_s": 33.0}  # fmt: skip
    made = [d for d in decisions_of(run(log=[*LOG[:1], {**LOG[1], **foreseen}, *LOG[2:], came])) if d.kind == "drop"]
    assert made[0].predicted.items() >= foreseen.items()
    assert made[0].outcome["foreseen_request_s"] == 30.0 and made[0].outcome["seen_request_s"] == 33.0
    (declined,) = decisions_of(run(log=[{**LOG[0], **foreseen}]))
    assert declined.predicted.items() >= foreseen.items()


def test_a_sleep_shows_what_the_others_were_foreseen_to_need() -> None:
    need = {"ahead_s": 1.0, "online_blocks": 3, "growth_blocks": 2, "open_blocks": 40}
    log = [{"t": 1.0, "kind": "falling_asleep", "worker": 2, "level": 2, "requests": 0, "reason": "idle", **need}]
    (decision,) = decisions_of(run(log=log))
    assert decision.predicted == need and "open_blocks" not in decision.inputs


def test_a_restore_and_a_yield_show_their_forecasts_and_what_came_of_their_own() -> None:
    foreseen = {"stay_request_s": 90.0, "taken_request_s": 40.0}
    weighed = {"t": 20.0, "kind": "restore_decided", "group": 7, "workers": [0, 1], **foreseen}
    begun = {"t": 20.2, "kind": "restore_begin", "group": 7, "workers": [0, 1], "reason": "it fits"}
    came = {"t": 24.0, "kind": "forecast_outcome", "decision": "restore_decided", "group": 7, "after_s": 4.0,
            "foreseen_request_s": 30.0, "seen_request_s": 33.0}  # fmt: skip
    yields = {"t": 24.0, "kind": "yield", "group": 8, "workers": [2, 3], "cap_blocks": 5, **foreseen}
    restored, yielded = decisions_of(run(log=[weighed, begun, came, yields]))
    assert restored.predicted == foreseen and restored.outcome["seen_request_s"] == 33.0
    assert yielded.predicted == foreseen and yielded.inputs == {"cap_blocks": 5}
    assert "seen_request_s" not in yielded.outcome, "what came was the restore's"
    for log in ([begun], [weighed, begun, {**begun, "t": 30.0}]):
        alone = decisions_of(run(log=log))[-1]
        assert alone.predicted == {} and "seen_request_s" not in alone.outcome, "another's forecast, or none"


def test_what_dropping_cost_is_not_called_saved(capsys) -> None:
    dropped, other = run(log=LOG[1:], late={4, 5, 6}), run("recompute", [], late={4})
    (worse,) = incidents_of(dropped, 1.0, {"recompute": other})
    (untold,) = incidents_of(dropped, 1.0, {"recompute": other}, untold={"recompute"})
    print_incident(worse, 1, 1.0, Console(width=150))
    assert "1 over: here 2 more over" in capsys.readouterr().out
    print_incident(untold, 1, 1.0, Console(width=150), "[far] off")
    shown = capsys.readouterr().out
    assert untold.num_saved("recompute") is None and "saved" not in shown and "more over" not in shown
    assert "Warning" in shown and "[far] off" in shown


def test_the_command(tmp_path, capsys) -> None:
    path, out = tmp_path / "runs.json", tmp_path / "deep" / "explained.json"
    write_results(path, [run("recompute", [], late={4, 5}), run(late={4})])
    assert main(["explain", str(path), "--json", str(out), "--kind", "drop"]) == 0
    assert "incident 1" in capsys.readouterr().out
    (explained,) = json.loads(out.read_text())["runs"]
    assert explained["run"] == "drop" and list(explained["incidents"][1]["saved"].values()) == [1]


def test_the_file_is_there_where_the_reader_of_the_words_is_gone(tmp_path, monkeypatch) -> None:
    def gone(*_):
        raise SystemExit(1)

    monkeypatch.setattr("jettison.report.explain.print_incident", gone)
    path, out = tmp_path / "runs.json", tmp_path / "explained.json"
    write_results(path, [run(late={4})])
    assert main(["explain", str(path), "--json", str(out)]) == 1
    assert json.loads(out.read_text())["runs"]


def test_every_kind_of_decision_can_be_asked_for() -> None:
    made = set(re.findall(r'Decision\(event\["t"\], "([^"]+)"', Path(decisions.__file__).read_text()))
    assert "shed rows" in made and made <= set(decisions.KINDS)


def test_what_clients_call_their_requests_is_shown_as_it_is(capsys) -> None:
    log = [{"t": 1.0, "kind": "offline_computed_again", "group": 0, "request": f"cmpl-{name}-0", "reason": "r"}
           for name in ("[/x]", "[job]7")]
    print_decisions(decisions_of(run(log=log)), Console(width=150), folds=False)
    shown = capsys.readouterr().out
    assert "cmpl-[/x]-0" in shown and "cmpl-[job]7-0" in shown


def test_what_several_runs_cannot_be_simulated_for_is_told_once(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    write_results(path, [run(late={4}), run("again", LOG, late={4})])
    assert main(["explain", str(path)]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not simulated")]
    assert "does not say on which cluster it ran" in first and second.endswith("as of 'drop'")


def test_a_run_that_cannot_be_simulated_says_why_in_one_line(tmp_path, capsys) -> None:
    path, profile = tmp_path / "runs.json", tmp_path / "none.json"
    write_results(path, [run(late={4}), run("calm", [])])
    assert main(["explain", str(path), "--run", "drop"]) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not simulated")]
    assert "does not say on which cluster it ran" in told
    assert main(["explain", str(path), "--run", "drop", "--no-counterfactual"]) == 0
    assert main(["explain", str(path), "--run", "calm"]) == 0, "no card, nothing to compare"
    assert "not simulated" not in capsys.readouterr().out
    for flags in (["--counterfactual", "swap"], ["--profile", str(profile)]):
        assert main(["explain", str(path), "--run", "drop", *flags]) == 2, "who asks is told"
        assert "does not say on which cluster it ran" in capsys.readouterr().err


def test_a_calm_run_is_no_mistake(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    write_results(path, [run("calm", [])])
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "calm" in shown and "nothing was decided" in shown


def test_the_command_names_what_is_missing(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    foreign = run("plain")
    del foreign.events["log"]
    write_results(path, [foreign])
    for arguments, message in (
        ([], "no run with an event log"), (["--run", "plain"], "run 'plain' has no event log"),
        (["--run", "other"], "no run named 'other' (runs: plain)"),
        (["--no-counterfactual", "--profile", "p.json"], "--profile does not go with --no-counterfactual"),
        (["--no-counterfactual", "--processes", "1"], "--processes does not go with --no-counterfactual"),
        (["--no-counterfactual", "--counterfactual", "swap"], "--counterfactual does not go with --no-counterfac"),
        (["--kind", "drop", "--kind", "nonsense"], "--kind 'nonsense': no such kind (there are: 'drop', "),
    ):
        assert main(["explain", str(path), "--json", str(tmp_path / "out.json"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert not (tmp_path / "out.json").exists()


def test_cards_come_first_and_moves_of_requests_share_a_row(tmp_path, capsys) -> None:
    moves = [{"t": 2.0 + i / 10, "kind": "rebalanced", "requests": 2, "to": [i % 2]} for i in range(9)]
    path = tmp_path / "runs.json"
    write_results(path, [run(log=[LOG[0], *moves, *LOG[1:]])])
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("rebalance") == 1
    assert shown.index("incident 1") < shown.index("rebalance, 9 times") < shown.index("requests 18")
    assert main(["explain", str(path), "--kind", "rebalance"]) == 0
    assert capsys.readouterr().out.count("rebalance") == 9, "who asks for them gets each"


def test_a_migration_without_a_known_home_is_counted() -> None:
    log = [{"t": float(t), "kind": "migrated", "request": f"r{t}", "ms": 5.0} for t in (1, 2)]
    console = Console(width=150)
    with console.capture() as printed:
        print_decisions(decisions_of(run(log=log)), console)
    assert "migrate, 2 times" in printed.get() and "requests 2" in printed.get()


def card(incident, capsys) -> str:
    print_incident(incident, 1, 1.0, Console(width=200))
    return capsys.readouterr().out


def test_the_card_of_a_drop_that_was_declined(capsys) -> None:
    log = [declined(3.5), {**declined(8.5, "compute binds", 1), "memory_wait_s": 0.6}, declined(9.0, group=2)]
    (incident,) = incidents_of(run(log=log, late={2, 3, 8}), 1.0, {"swap": run("swap", [], late={2, 3, 8, 9})})
    text = card(incident, capsys)
    for expected in (
        "no drop", "3.50 s to 12.00 s, 8.5 s long", "Trigger  load 1.2", "memory wait 3 s", "up to 3 at one time",
        "a pipeline could not keep up (groups 0, 2); compute binds (group 1)", "3 over 1 s",
        "swap: TTFT", "4 over, so 1 saved",
    ):
        assert expected in text
    assert "Freed" not in text and "Plan" not in text and "workers" not in text


def test_the_card_of_a_failed_drop_names_what_failed(capsys) -> None:
    log = [LOG[1], {"t": 5.1, "kind": "drop_failed", "reason": "no [memory] left", "workers": [0, 1]}]
    (incident,) = incidents_of(run(log=log, late={4}), 1.0)
    assert "no drop: a drop failed: no [memory] left (group 0)" in card(incident, capsys)


def test_the_card_of_requests_that_waited(capsys) -> None:
    series = {"queue": [(0.0, 0), (4.5, 3)], "kv_usage": [(0.0, 0.99)]}
    waited = run("swap", [], {4, 5}, series=series, config={"policy": "swap"}, events={"preemptions": 1234})
    (incident,) = incidents_of(waited, 1.0, {"drop (simulated)": run()})
    text = card(incident, capsys)
    for expected in (
        "late requests", "4.00 s to 9.00 s, 5 s long", "late requests 2; most in queue 3; highest kv usage 0.99",
        "policy swap; decisions none; preemptions in the whole run 1,234", "2 over 1 s",
        "drop (simulated): TTFT P50 100 ms", "0 over: here 2 more over",
    ):
        assert expected in text
    assert "Foreseen" not in text


def test_plans_of_further_drops_have_their_time_and_old_logs_have_none(capsys) -> None:
    log = [*LOG[1:5], {**LOG[1], "t": 7.0}, {**LOG[2], "t": 7.01, "workers": [2, 3]}]
    (incident,) = incidents_of(run(log=log), 1.0)
    plan = format_plan(LOG[1]["merges"])
    text = card(incident, capsys)
    assert f"Plan     {plan}" in text and "and 1 more drops" in text and f"at 7.00 s {plan}" in text
    old = [{key: value for key, value in event.items() if key != "merges"} for event in log]
    (incident,) = incidents_of(run(log=old), 1.0)
    assert "Plan" not in card(incident, capsys) and incident.trigger.plan == ()


def test_the_whole_run_is_a_table(capsys) -> None:
    others = {"swap [x]": run("swap", [], {3}), "own": run()}
    whole = whole_run(run("calm", []), 1.0, others, untold={"own"})
    print_whole_run(whole, 1.0, Console(width=150), "far off")
    text = capsys.readouterr().out
    for expected in ("no overload", "this run", "0 of 20", "swap [x]", "1, so 1 saved", "own", "over 1 s", "far off"):
        assert expected in text
    document = json.loads(json.dumps(explain_document(run("calm", []), [], 1.0, whole=whole)))
    assert document["whole_run"]["saved"] == {"swap [x]": 1, "own": None}


def test_the_run_s_own_objective_is_taken(tmp_path, capsys) -> None:
    path, out = tmp_path / "runs.json", tmp_path / "explained.json"
    write_results(path, [run(late={4}, slo_ttft_s=5.0)])
    for flags, objective, num_over in (([], 5.0, 0), (["--slo-ttft", "0.05"], 0.05, 8)):
        assert main(["explain", str(path), "--json", str(out), *flags]) == 0
        assert f"{num_over} over {'5 s' if objective == 5.0 else '50 ms'}" in capsys.readouterr().out
        (explained,) = json.loads(out.read_text())["runs"]
        dropped = next(i for i in explained["incidents"] if i["kind"] == "drop")
        assert (explained["slo_ttft_s"], dropped["num_over_slo"]) == (objective, num_over)


def test_a_card_of_a_run_without_its_requests_counts_none(capsys) -> None:
    (incident,) = incidents_of(run(log=LOG[1:], detail=False), 1.0)
    text = card(incident, capsys)
    assert "not in the file one by one" in text and "arrived" not in text and "at one time" not in text


def test_who_was_packed_why_and_what_came_of_it_and_who_was_not_and_why() -> None:
    ends = {"request": "r1", "source": 0, "destination": 2}
    log = [
        {"t": 1.0, "kind": "pack", **ends, "how": "migrated", "goes_as": "tokens", "reason": "it fits better there"},
        {"t": 1.0, "kind": "packed", "used": 3, "needed": 2, "pressure": None, "early": False},
        {"t": 1.5, "kind": "migrated", **ends, "went_as": "tokens", "stop_ms": 4.0, "ms": 500.0},
        {"t": 2.0, "kind": "packed", "used": 3, "needed": 3, "owed": 1, "migrated": 0, "refused": [
            {"request": "r2", "cost_device_s": 2.0, "saved_device_s": 0.5}]},
        {"t": 3.0, "kind": "packed", "used": 3, "needed": 3, "pressure": "a worker is down"},
    ]
    decisions = decisions_of(run(log=log))
    (pack,), (refused, pressed) = of_kind(decisions, "pack"), of_kind(decisions, "packed")
    assert pack.inputs["reason"] == "it fits better there" and pack.outcome["stop_ms"] == 4.0
    assert refused.outcome["not_worth_it"] == ["r2 (2 device-seconds for 0.5)"] and refused.outcome["owed"] == 1
    assert pressed.inputs["pressure"] == "a worker is down"


def test_preemptions_have_their_reasons_also_where_they_share_a_row() -> None:
    log = [
        {"t": 1.0, "kind": "preempted", "group": 0, "reason": "why one", "request_ids": ["a", "b"], "tokens": 7},
        {"t": 1.1, "kind": "preempted", "group": 1, "reason": "why two", "request_ids": ["c"], "tokens": 5},
    ]
    first, second = decisions_of(run(log=log))
    assert first.kind == "preempt" and first.inputs == {"reason": "why one", "requests": 2}
    assert second.inputs["request"] == "c" and second.outcome == {"tokens_computed_again": 5}
    console = Console(width=150)
    with console.capture() as printed:
        print_decisions([first, second], console)
    assert all(text in printed.get() for text in ("preempt, 2 times", "requests 3", "why one", "why two"))
